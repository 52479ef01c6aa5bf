"""The ops' modules as type checkers see the result of ``load()``; at run time they are plain modules."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from nvme_ops.io import gds as gds_op
    from nvme_ops.io import handle, pin_memory


class AsyncIOModule(ModuleType):
    """The result of ``AsyncIOBuilder().load()``; ``nvme_ops/ops/async_io.pyi`` describes its internal part."""

    aio_handle: type[handle.aio_handle]
    aio_read: Callable[..., int]
    aio_write: Callable[..., int]
    deepspeed_memcpy: Callable[..., int]
    backends: Callable[[], dict[str, str | None]]
    trim_pool: Callable[[], None]


class GDSModule(ModuleType):
    """The result of ``GDSBuilder().load()``."""

    gds_handle: type[gds_op.gds_handle]


class PinMemoryModule(ModuleType):
    """The result of ``PinMemoryBuilder().load()``."""

    pin_handle: type[pin_memory.pin_handle]
