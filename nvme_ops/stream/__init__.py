"""The stream of an ``nvme_ops.File``: reads and writes of any size, moved in blocks while the program goes on.

``Stream`` has the position and the lock. What is written gathers in ``memory.write_behind``, what will be read is
fetched by ``memory.read_ahead``, both in ``memory.blocks``, at most 16 MiB each.
"""

from nvme_ops.stream.stream import Stream as Stream

__all__ = ["Stream"]


def __dir__() -> list[str]:
    return __all__
