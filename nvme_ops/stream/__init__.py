"""The stream of an ``nvme_ops.File``: reads and writes of any size, moved in blocks while the program goes on.

``Stream`` has the position and the lock. What is written gathers in ``write_behind``, what will be read is fetched by
``read_ahead``, both in ``blocks`` of pool memory, at most 16 MiB each.
"""

from nvme_ops.stream.stream import Stream as Stream

__all__ = ["Stream"]
