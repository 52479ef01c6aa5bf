"""Loads the compiled op when it is first needed, compiling it if necessary, and not when nvme_ops is imported."""

from __future__ import annotations

import functools
from typing import Any


@functools.cache  # the builder takes microseconds, and this is called for every tensor
def native() -> Any:
    """Returns the native module, described in ``nvme_ops/ops/async_io.pyi``. RuntimeError if it cannot be built."""
    from nvme_ops.op_builder import AsyncIOBuilder

    return AsyncIOBuilder().load()
