"""The native module ``async_io``: the engine, and the names of ``nvme_ops.io.handle``."""

from collections.abc import Callable, Sequence
from typing import Any, final

import torch

from nvme_ops.io.arguments import FileName
from nvme_ops.io.future import IoFuture as IoFuture
from nvme_ops.io.handle import aio_handle as aio_handle
from nvme_ops.io.handle import aio_read as aio_read
from nvme_ops.io.handle import aio_write as aio_write
from nvme_ops.io.handle import deepspeed_memcpy as deepspeed_memcpy

@final
class OpenFile:
    """A file that stays open across calls, in place of a name. ``fd`` must stay open until ``close``."""

    def __new__(cls, fd: int, padded: bool = False, /) -> OpenFile: ...
    def close(self) -> None: ...
    def fileno(self) -> int: ...

@final
class Operation:
    """A submitted transfer."""

    def done(self) -> bool: ...
    def submitted(self) -> bool: ...
    def wait(self, seconds: float | None, /) -> bool: ...
    def request_cancel(self) -> None: ...
    def exception(self) -> BaseException | None: ...
    def bytes(self) -> int: ...
    def add_callback(self, callable: Callable[[], object], /) -> None: ...

@final
class Experience:
    """What the adaptive handles of one device learn.

    ``first`` is the tool used without experience: block size, queue depth, lanes, in place, bounce, cache. ``fixed``
    says which of block size, queue depth, lanes and cache may not be varied.
    """

    def __new__(
        cls, first: Sequence[int], lanes: int, fixed: tuple[bool, bool, bool, bool], cufile: bool, /
    ) -> Experience: ...
    def entries(self) -> list[tuple[Any, ...]]: ...
    def freeze(self) -> None: ...

class Engine:
    """The lanes of one handle. ``memory`` is a tensor or anything with the buffer protocol.

    ``priority`` is a ``Priority``; ``offset`` None writes the whole file. A ``gds_handle`` has two, behind the same
    methods; those of ``ClosedEngine`` raise ValueError.
    """

    def __new__(
        cls,
        block_size: int,
        queue_depth: int,
        single_submit: bool,
        overlap_events: bool,
        lanes: int,
        backend: str,
        cache: str,
        experience: Experience | None = None,
        /,
    ) -> Engine: ...
    def run(
        self,
        op: int,
        memory: object,
        file: FileName,
        offset: int | None,
        validate: bool,
        all_lanes: bool = False,
        priority: int = 0,
        /,
    ) -> int:
        """Moves the bytes on the caller's thread or, with ``all_lanes``, on the lanes' threads; returns how many."""

    def submit(
        self,
        op: int,
        memory: object,
        file: FileName,
        offset: int | None,
        validate: bool,
        all_lanes: bool = False,
        priority: int = 0,
        pending: Pending | set[Operation] | None = None,
        /,
    ) -> Operation:
        """Starts the transfer on the lanes' threads. It is in ``pending`` before it starts."""

    def submit_many(
        self,
        op: int,
        memories: Sequence[object] | torch.Tensor,
        files: FileName | Sequence[FileName],
        offsets: Sequence[int] | None,
        priority: int = 0,
        pending: set[Operation] | None = None,
        /,
    ) -> Operation:
        """Starts many transfers as one operation; like ``submit``."""

    def backend(self) -> str:
        """Returns the backend's name: ``io_uring``, ``libaio`` or ``threads``."""

    def staging_bytes(self) -> int:
        """Returns the bytes of staging memory held now."""

    def paths(self) -> dict[str, Any]:
        """Returns the paths that accelerator tensors took: ``last``, ``why`` and ``uses``."""

    def statistics(self) -> dict[str, int]:
        """Returns the counters behind ``Statistics``."""

    def sweep(self) -> None:
        """Releases the memory of transfers that have ended."""

class Pending:
    """Operations to wait for together."""

    def __len__(self) -> int: ...
    def add(self, operation: Operation, /) -> None: ...
    def discard(self, operation: Operation, /) -> None: ...
    def wait(self) -> int: ...

class Buffer:
    """Huge-page memory with the buffer protocol; returns to the pool when the object is freed."""

    def __new__(cls, bytes: int, /) -> Buffer: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def lock(self) -> bool: ...
    def unlock(self) -> None: ...

def backends() -> dict[str, str | None]: ...
def checksums(kind: str, buffers: Sequence[object] | torch.Tensor, /) -> list[int]: ...
def joined_checksum(kind: str, first: int, second: int, bytes: int, /) -> int: ...
def cached_pages(fd: int, offset: int, bytes: int, /) -> int | None: ...
def expand(
    packed: tuple[object, ...],
    stored: torch.Tensor,
    begin: int,
    out: torch.Tensor,
    dtype: str,
    transposed: bool,
    threads: int,
    /,
) -> None: ...
def multiply(
    packed: Sequence[tuple[object, ...]],
    stored: torch.Tensor,
    inputs: torch.Tensor,
    out: torch.Tensor,
    dtype: str,
    threads: int,
    by_columns: bool,
    /,
) -> None: ...
def quantize_states(
    map: tuple[torch.Tensor, ...],
    values: torch.Tensor,
    numbers: torch.Tensor,
    scales: torch.Tensor,
    threads: int,
    /,
) -> None: ...
def expand_states(
    map: tuple[torch.Tensor, ...],
    numbers: torch.Tensor,
    scales: torch.Tensor,
    out: torch.Tensor,
    threads: int,
    /,
) -> None: ...
def round_states(values: torch.Tensor, key: int, first: int, out: torch.Tensor, threads: int, /) -> None: ...
def populate(buffer: object, start: int, stop: int, /) -> None: ...
def overlapping(tensors: Sequence[torch.Tensor], /) -> tuple[int, int] | None: ...
def deny_memory(tensor: torch.Tensor, message: str, /) -> None: ...
def share_version(tensor: torch.Tensor, other: torch.Tensor, /) -> torch.Tensor: ...
def set_parts(
    tensors: Sequence[torch.Tensor], memory: torch.Tensor, places: Sequence[int], lengths: Sequence[int], /
) -> None: ...
def set_storages(
    tensors: Sequence[torch.Tensor],
    owners: Sequence[torch.Tensor],
    offsets: Sequence[int],
    sizes: Sequence[Sequence[int]],
    strides: Sequence[Sequence[int]],
    /,
) -> None: ...
def set_storage_offsets(tensors: Sequence[torch.Tensor], offsets: Sequence[int], /) -> None: ...
def in_pool(tensor: torch.Tensor, /) -> bool: ...
def pool_statistics() -> dict[str, int]: ...
def trim_pool(keep: int = 0, /) -> None: ...
def pool_large_tensors() -> object | None: ...
def endings() -> int: ...
def note_ending(*args: object) -> None: ...
def wait_for_ending(seen: int, seconds: float, /) -> None: ...
def shut_down() -> None: ...
