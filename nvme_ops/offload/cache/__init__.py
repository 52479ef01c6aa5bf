"""Keys and values of a generation that may be larger than memory."""
