"""``nvme-report``: what works on this machine, what does not, and the command that fixes it.

Checks return results (result.py, and one module for each topic); cli.py lists them all, formats what they return, and
is the command. From the package it imports only the builders and what reads devices and mounts, no capability;
trial.py alone makes a handle, in a process of its own.
"""
