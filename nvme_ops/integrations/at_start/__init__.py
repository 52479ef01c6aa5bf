"""A folder for PYTHONPATH: what Python imports from it when it starts."""
