"""A cache of keys and values that may be larger than memory."""
