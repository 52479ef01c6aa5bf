"""The ``async_io`` op: tensors to and from files through io_uring, libaio or threads."""

from __future__ import annotations

from typing import ClassVar

from .engine import EngineOpBuilder


class AsyncIOBuilder(EngineOpBuilder):
    """Builds ``async_io``, whose handle is ``aio_handle``."""

    BUILD_VAR: ClassVar[str] = "NVME_BUILD_AIO"
    NAME: ClassVar[str] = "async_io"
