"""Reads and writes of any size through an ``nvme_ops.File``, moved in blocks while the program continues.

``Stream`` has the position and the lock. Written data are collected in blocks (``memory.blocks``), and data to be read
are fetched into them ahead, at most 16 MiB each.
"""

from nvme_ops.stream.stream import Stream as Stream

__all__ = ["Stream"]


def __dir__() -> list[str]:
    return __all__
