"""What a model larger than memory will do on this machine, and what it does."""
