"""What every part of the package may use: errors, settings, text, locks, ranks, the native op.

Nothing here imports another part but ``op_builder``, from which ``native`` has the op.
"""
