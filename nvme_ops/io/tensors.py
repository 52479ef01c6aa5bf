"""Tensors: made in huge-page memory, which storage fills fastest; laid out in one memory; their bytes and checksums."""

from __future__ import annotations

import ctypes
import functools
import gc
import math
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias, TypeVar, cast

import torch

from nvme_ops.base.native import native
from nvme_ops.base.settings import ALIGNMENT, LARGE, PAGE
from nvme_ops.lazy.offloaded import OffloadedTensor

if TYPE_CHECKING:
    from nvme_ops.ops.async_io import Buffer

_P = ParamSpec("_P")
_T = TypeVar("_T")
_MIN_ALIGNMENT = 8  # bytes: what safetensors pads its header to
#: Bytes to which torch aligns what it allocates on an accelerator. For operands that are aligned to fewer than 256,
#: libraries may take other kernels, which round otherwise: CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES of cuBLASLt.
DEVICE_ALIGNMENT = 512

#: A tensor's dtype and shape.
Kind: TypeAlias = tuple[torch.dtype, tuple[int, ...]]


def pool_buffer(size: int) -> Buffer:
    """Allocates ``size`` bytes from the native pool. Raises MemoryError."""
    if size > sys.maxsize:
        raise MemoryError(f"a tensor of {size} bytes does not fit any memory")
    return cast("Buffer", native().Buffer(size))


def empty(*size: int | tuple[int, ...] | torch.Size, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Like ``torch.empty`` on the CPU, in huge pages from a pool and aligned for direct I/O.

    The contents are arbitrary. The memory goes back to the pool when the last tensor over it is freed, and the pool
    keeps at most ``NVME_OPS_POOL_BYTES`` (256 MiB) of it for the next call.

    Args:
        size: the shape, as numbers or one tuple.
        dtype: torch's default dtype when None.

    Raises:
        ValueError: a negative size.
        TypeError: a size that is not an int, or a dtype that is not a torch.dtype.
        MemoryError: there is not enough memory.
    """
    given: Any = size[0] if len(size) == 1 and isinstance(size[0], Iterable) else size
    if not all(hasattr(length, "__index__") for length in given):
        raise TypeError(f"size must consist of integers: {given}")
    shape = tuple(map(operator.index, given))
    if any(length < 0 for length in shape):
        raise ValueError(f"size must not be negative: {shape}")
    dtype = dtype or torch.get_default_dtype()
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype, not {type(dtype).__name__}")
    elements = math.prod(shape)
    if elements == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    buffer = pool_buffer(elements * dtype.itemsize)
    return torch.frombuffer(buffer, dtype=dtype, count=elements).view(shape)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Returns the memory of a contiguous CPU tensor, not a copy. It keeps the tensor alive."""
    if tensor.nbytes == 0:
        return memoryview(b"")
    array: Any = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    array.keeps = tensor
    return memoryview(array).cast("B")


def collector_paused(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Pauses Python's garbage collector while a function makes thousands of objects, which it would scan often.

    Garbage of other threads is not collected meanwhile either. This is no context manager: Ctrl-C may come as one of
    Python's begins or ends, which would leave the collector off.
    """

    @functools.wraps(function)
    def paused(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        was_on = gc.isenabled()
        try:
            gc.disable()
            return function(*args, **kwargs)
        finally:
            if was_on:
                gc.enable()

    return paused


def is_plain(tensor: torch.Tensor) -> bool:
    """Returns whether the memory of ``tensor``, on any device, has its values in row-major order, ready to be moved."""
    if isinstance(tensor, OffloadedTensor):
        return False
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def is_plain_on_host(tensor: torch.Tensor) -> bool:
    """Returns whether ``tensor`` is plain and in host memory."""
    return tensor.device.type == "cpu" and is_plain(tensor)


def is_dense(tensor: torch.Tensor) -> bool:
    """Returns whether the elements fill their memory without gaps, in any order of the dimensions."""
    if tensor.is_conj() or tensor.is_neg():
        return False
    return tensor.is_contiguous() or tensor.permute(_order(tensor)).is_contiguous()


def dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Returns the tensor's own strides if it is dense, else those of a contiguous tensor of its shape."""
    return tuple(tensor.stride() if is_dense(tensor) else torch.empty(tensor.shape, device="meta").stride())


def dense_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a one-dimensional byte view of a dense tensor's memory."""
    tensor = tensor.detach()
    flat = tensor if tensor.is_contiguous() else tensor.permute(_order(tensor))
    return flat.view(-1).view(torch.uint8)


def _order(tensor: torch.Tensor) -> list[int]:
    """Returns the dimensions in the order of memory, outermost first."""
    strides, shape = list(tensor.stride()), tensor.shape
    return sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], -shape[dim]))


def cut(tensor: torch.Tensor, size: int) -> Iterator[torch.Tensor]:
    """Yields parts of at most ``size`` bytes, of about equal size, in row-major order; none for an empty tensor."""
    nbytes = tensor.nbytes_moved if isinstance(tensor, OffloadedTensor) else tensor.nbytes
    if nbytes == 0:
        return
    if nbytes <= size:
        yield tensor
        return
    row = nbytes // tensor.shape[0]
    if row > size:
        for part in tensor.unbind(0):
            yield from cut(part, size)
    else:
        rows = tensor.shape[0]
        parts = -(-rows // (size // row))
        yield from tensor.split(-(-rows // parts))


def copy_bytes(target: torch.Tensor, source: torch.Tensor) -> None:
    """Fills ``target``, a contiguous byte tensor, with the values of ``source`` in row-major order."""
    copy(target.view(source.dtype).view(source.shape), source)


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Fills ``target``, of any strides, on any device, with the values of ``source``, of the same dtype and shape."""
    if source.element_size() == 1 and not target.is_neg():  # torch cannot copy every dtype of one byte
        target.view(torch.uint8).copy_(source.resolve_neg().view(torch.uint8))
    else:
        target.copy_(source)


def lay_out(runs: Sequence[tuple[int, int]], device: torch.device) -> tuple[list[int], int]:
    """Returns the offset in one memory for each run of a file (its start and end), and the size of that memory.

    Large runs keep their offset within a page, so that storage fills them without a copy. Their tensors are then
    aligned as they are in the file: to at least 8 bytes in host memory, as when safetensors maps it, and on an
    accelerator as torch aligns its own.
    """
    on_host = device.type == "cpu"
    alignment, least = (ALIGNMENT, _MIN_ALIGNMENT) if on_host else (DEVICE_ALIGNMENT, DEVICE_ALIGNMENT)
    places, size = [], 0
    for start, end in runs:
        size = -(-size // alignment) * alignment
        if end - start >= LARGE and start % least == 0:
            size += (start - size) % PAGE
        places.append(size)
        size += end - start
    return places, size


def placed(base: torch.Tensor, places: Sequence[tuple[int, Kind]]) -> list[torch.Tensor]:
    """Returns contiguous tensors in ``base``, a byte tensor, at places that are aligned for them.

    They are not views: they share no version counter. The memory is freed with the last of them.
    """
    first: dict[Kind, torch.Tensor] = {}  # one tensor of each kind, at the start of the memory
    for _, kind in places:
        if kind not in first:
            dtype, shape = kind
            first[kind] = base[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
    tensors = [first[kind].data for _, kind in places]
    native().set_storage_offsets(tensors, [place // dtype.itemsize for place, (dtype, _) in places])
    return tensors


def give_storages(
    tensors: Mapping[str, torch.Tensor], memory: torch.Tensor, parts: Sequence[tuple[str, int, int]]
) -> None:
    """Gives each named byte tensor a storage of its own: ``length`` bytes of ``memory`` from ``place`` on.

    The storages cannot grow. ``memory`` is freed with the last of them.
    """
    first = memory.storage_offset()
    native().set_parts(
        [tensors[name] for name, _, _ in parts],
        memory,
        [first + place for _, place, _ in parts],
        [length for _, _, length in parts],
    )


def checksums_of(data: Sequence[torch.Tensor | bytes], kind: str) -> list[int]:
    """Returns the checksums of ``data``: bytes, or contiguous CPU tensors, all in one call."""
    return cast("list[int]", native().checksums(kind, data))


def checksum_of(tensor: torch.Tensor, kind: str, value: int = 0) -> int:
    """Returns the checksum of ``tensor``, continuing from ``value`` as ``zlib.crc32`` does."""
    return joined_checksum(value, checksums_of([tensor], kind)[0], tensor.nbytes, kind)


def joined_checksum(first: int, second: int, length: int, kind: str) -> int:
    """Returns the checksum of two parts from the ``first`` one's, and the ``second``'s, which has ``length`` bytes."""
    return cast("int", native().joined_checksum(kind, first, second, length))


def groups(sizes: Sequence[int], nbytes: int) -> Iterator[range]:
    """Divides the places of ``sizes`` into ranges of at most ``nbytes`` together or of one place; yields them."""
    first, together = 0, 0
    for place, size in enumerate(sizes):
        if place > first and together + size > nbytes:
            yield range(first, place)
            first, together = place, 0
        together += size
    if sizes:
        yield range(first, len(sizes))
