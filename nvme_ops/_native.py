"""The compiled op, loaded (and at first built) when something needs it, not when nvme_ops is imported."""

from __future__ import annotations

import functools
from typing import Any


@functools.cache
def native() -> Any:
    """The native module, which ``nvme_ops/ops/async_io.pyi`` describes. RuntimeError when it cannot be built."""
    from nvme_ops.op_builder import AsyncIOBuilder

    return AsyncIOBuilder().load()
