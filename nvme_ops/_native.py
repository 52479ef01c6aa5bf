"""The compiled op, loaded (and at first built) when something needs it, not when nvme_ops is imported."""

from __future__ import annotations

from typing import Any

_module: Any = None  # asking the builder takes microseconds, and this is asked for every tensor


def native() -> Any:
    """The native module, which ``nvme_ops/ops/async_io.pyi`` describes. RuntimeError when it cannot be built."""
    global _module
    if _module is None:
        from nvme_ops.op_builder import AsyncIOBuilder

        _module = AsyncIOBuilder().load()
    return _module
