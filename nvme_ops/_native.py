"""The compiled op, loaded (and at first built) when something needs it, not when nvme_ops is imported."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from nvme_ops.ops import async_io as native_module


def native() -> type[native_module]:
    """The native module ``async_io``. Raises RuntimeError when it cannot be built or loaded."""
    from nvme_ops.op_builder import AsyncIOBuilder

    return cast("type[native_module]", AsyncIOBuilder().load())
