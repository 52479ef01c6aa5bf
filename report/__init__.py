"""``nvme-report``: what works on this machine, what does not, and the command that fixes it.

Checks return results (result.py, and one module per topic), sections.py lists them all, render.py writes them down and
cli.py is the command. Of the package it imports the builders and the reading of devices and mounts, none of its
capabilities.
"""
