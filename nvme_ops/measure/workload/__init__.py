"""``nvme-bench workload``: the I/O of known jobs, and how busy it keeps emulated accelerators.

``table`` has the jobs, ``readers`` what can feed them, ``saving`` those that write, ``feed`` the emulation.
"""
