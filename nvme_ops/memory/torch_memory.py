"""Where torch takes memory for large tensors from."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from nvme_ops.base.native import native


@contextlib.contextmanager
def large_tensors_pooled(keep: int = 0) -> Iterator[None]:
    """Has torch take memory for tensors of 512 KiB or more on the CPU from the pool, in all threads, for the block.

    What is freed can then be reused, or returned. torch's usual allocator keeps much of it, between smaller tensors.

    Args:
        keep: the most bytes that stay for reuse afterwards, if there were not more before.
    """
    cached = native().pool_statistics()["cached_bytes"]
    use = native().pool_large_tensors()
    try:
        yield
    finally:
        del use
        native().trim_pool(max(cached, keep))
