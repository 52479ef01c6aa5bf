"""Plans for a model larger than memory: what is to be expected of it on this machine."""
