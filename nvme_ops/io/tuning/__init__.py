"""What is known about devices: the settings that ``nvme-tune`` found, and what handles learned from their transfers.

``aio_handle.tuned`` and ``aio_handle.adaptive`` use it. ``store`` keeps both for each device; ``dictionary`` has what
the adaptive handles of a process know. Native code chooses the tool of a transfer: ``csrc/engine/experience.h``.
"""
