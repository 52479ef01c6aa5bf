"""Chooses from experience how to move each transfer: see ``handle.py``."""
