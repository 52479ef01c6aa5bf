"""The stream of an ``nvme_ops.File``: reads and writes of any size, moved in blocks while the program goes on.

``Stream`` has the position and the lock. What is written gathers in ``memory.blocks``, and what will be read is fetched
into them, at most 16 MiB each.
"""

from nvme_ops.stream.stream import Stream as Stream

__all__ = ["Stream"]


def __dir__() -> list[str]:
    return __all__
