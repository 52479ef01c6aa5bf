"""What is known about devices: the settings that ``nvme-tune`` found, and what handles learn from their transfers.

``store`` keeps the settings for ``aio_handle.tuned``; ``adaptive`` is how the handles of ``aio_handle.adaptive`` learn.
"""
