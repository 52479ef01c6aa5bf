"""``nvme-tune``: the settings with which a device is fastest, found in less than 20 seconds and kept.

``search`` decides what to measure, ``duel`` judges it, ``passes`` measures; ``tuning.store`` keeps the result, which
``aio_handle.tuned`` uses.
"""
