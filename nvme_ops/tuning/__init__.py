"""What is known about devices: the settings that ``nvme-tune`` found, and what handles learned from their transfers.

``aio_handle.tuned`` and ``aio_handle.adaptive`` use it. ``store`` keeps both for each device, ``dictionary`` is what
the adaptive handles of a process know. How a transfer's tool is chosen is native code: ``csrc/engine/experience.h``.
"""
