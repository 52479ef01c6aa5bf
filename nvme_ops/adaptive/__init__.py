"""The way of each transfer chosen from experience: see ``handle.py``."""
