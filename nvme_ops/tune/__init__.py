"""``nvme-tune``: the settings with which a device is fastest, found in less than a minute and kept.

``search`` decides what to measure, ``model`` and ``duel`` judge it, ``passes`` measures; ``identity`` and ``store``
keep the result for each device, ``handle`` uses it.
"""
