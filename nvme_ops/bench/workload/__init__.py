"""``nvme-bench workload``: the I/O of known jobs, and how busy it keeps accelerators that are only emulated.

``table`` has the jobs, ``readers`` who can feed them, ``feed`` the emulation, ``beside`` what runs at the same time.
"""
