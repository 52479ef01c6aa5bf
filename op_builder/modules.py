"""The ops' modules as type checkers see what ``load()`` returns; at run time they are plain modules."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from nvme_ops import gds as gds_op
    from nvme_ops import handle, pin_memory


class AsyncIOModule(ModuleType):
    """What ``AsyncIOBuilder().load()`` returns; ``nvme_ops/ops/async_io.pyi`` has what is not for users."""

    aio_handle: type[handle.aio_handle]
    aio_read: Callable[..., int]
    aio_write: Callable[..., int]
    deepspeed_memcpy: Callable[..., int]
    backends: Callable[[], dict[str, str | None]]
    trim_pool: Callable[[], None]


class GDSModule(ModuleType):
    """What ``GDSBuilder().load()`` returns."""

    gds_handle: type[gds_op.gds_handle]


class PinMemoryModule(ModuleType):
    """What ``PinMemoryBuilder().load()`` returns."""

    pin_handle: type[pin_memory.pin_handle]
