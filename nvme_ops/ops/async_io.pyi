"""The native module ``async_io``: the engine, and the interface of ``nvme_ops.handle`` on it."""

import os
from collections.abc import Callable, Sequence
from typing import final

import torch

from nvme_ops.future import IoFuture as IoFuture
from nvme_ops.handle import aio_handle as aio_handle
from nvme_ops.handle import aio_read as aio_read
from nvme_ops.handle import aio_write as aio_write
from nvme_ops.handle import deepspeed_memcpy as deepspeed_memcpy

_File = str | bytes | os.PathLike[str] | os.PathLike[bytes] | int

@final
class Operation:
    """A transfer under way."""

    def done(self) -> bool: ...
    def wait(self, seconds: float | None, /) -> bool: ...
    def exception(self) -> BaseException | None: ...
    def bytes(self) -> int: ...
    def add_callback(self, callable: Callable[[], object], /) -> None: ...

class Engine:
    """The lanes of one handle."""

    def __new__(
        cls,
        block_size: int,
        queue_depth: int,
        single_submit: bool,
        overlap_events: bool,
        lanes: int,
        backend: str,
        cache: str,
        /,
    ) -> Engine: ...
    def run(
        self,
        write: bool,
        memory: object,
        file: _File,
        offset: int | None,
        validate: bool,
        all_lanes: bool = False,
        /,
    ) -> int: ...
    def submit(self, write: bool, memory: object, file: _File, offset: int | None, validate: bool, /) -> Operation: ...
    def submit_many(
        self,
        write: bool,
        memories: Sequence[object] | torch.Tensor,
        files: _File | Sequence[_File],
        offsets: Sequence[int] | None,
        /,
    ) -> Operation: ...
    def backend(self) -> str: ...
    def staging_bytes(self) -> int: ...
    def sweep(self) -> None: ...

class Buffer:
    """Huge-page memory with the buffer protocol, back in the pool when the object goes."""

    def __new__(cls, bytes: int, /) -> Buffer: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def lock(self) -> bool: ...
    def unlock(self) -> None: ...

def backends() -> dict[str, str | None]: ...
def in_pool(tensor: torch.Tensor, /) -> bool: ...
def pool_statistics() -> dict[str, int]: ...
def trim_pool() -> None: ...
def shut_down() -> None: ...
