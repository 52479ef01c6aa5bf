"""The ``async_io`` op: tensors to and from files through io_uring, libaio or threads."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from .engine import EngineOpBuilder

if TYPE_CHECKING:
    from .modules import AsyncIOModule


class AsyncIOBuilder(EngineOpBuilder):
    """Builds ``async_io``, whose handle is ``aio_handle``."""

    BUILD_VAR: ClassVar[str] = "NVME_BUILD_AIO"
    NAME: ClassVar[str] = "async_io"

    if TYPE_CHECKING:

        def load(self, verbose: bool = False) -> AsyncIOModule: ...  # noqa: D102
        def jit_load(self, verbose: bool = True) -> AsyncIOModule: ...  # noqa: D102
