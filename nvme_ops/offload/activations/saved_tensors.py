"""What a saved tensor is restored from: itself, or bytes from somewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch.autograd import Variable
from torch.autograd.function import BackwardCFunction

from nvme_ops.base.native import native

_MAX = 4  # a storage that is larger than what is saved of it by more than this factor is not saved as a whole
_node = getattr(torch._C, "_current_autograd_node", lambda: None)


class SavedValue(Protocol):
    """Restores a tensor, whatever it was saved as."""

    def value(self) -> torch.Tensor:
        """Returns the tensor. Raises RuntimeError if it was modified in place, and what reading it raises."""


class StoragePart(NamedTuple):
    """Bytes of a storage."""

    storage: int  #: as ``StorageWeakRef.cdata``
    nbytes: int
    part: Layout | None = None  #: None: all bytes of the storage. Else the elements that are copied, without gaps


@dataclass(frozen=True)
class Layout:
    """How a tensor uses the bytes of its storage."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int  #: bytes

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Layout:
        """Returns the layout of a strided tensor."""
        return cls(tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()) * tensor.itemsize)

    def close(self) -> Layout:
        """Returns the layout of a copy of the elements alone, with dimensions in the same order in memory."""
        copied = _distinct(torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta"))
        both = zip(self.stride, torch.empty_like(copied).stride(), strict=True)
        moved = tuple(0 if step == 0 else other for step, other in both)  # those of expanded dimensions stay 0
        return Layout(self.dtype, self.shape, moved, 0)


@dataclass(eq=False)
class Kept:
    """A tensor that stays in memory."""

    tensor: torch.Tensor  #: without a graph: the graph keeps this alive
    version: int

    def value(self) -> torch.Tensor:
        """Returns the tensor. Raises RuntimeError if it was modified in place."""
        if self.tensor._version != self.version:
            has_shape = not self.tensor.is_nested or self.tensor.layout != torch.strided
            raise modified(self.tensor.dtype, self.tensor.shape if has_shape else ())
        return self.tensor


@dataclass(eq=False)
class Copied:
    """A small part of a large storage, which would otherwise be kept as a whole."""

    layout: Layout
    memory: torch.Tensor
    counter: torch.Tensor  #: has the version of the tensor, whose memory may be reused once it is freed
    version: int

    def value(self) -> torch.Tensor:
        """Returns an equal tensor. Raises RuntimeError if it was modified in place."""
        if self.counter._version != self.version:
            raise modified(self.layout.dtype, self.layout.shape)
        close = self.layout.close()
        return _copy_like(self.memory.as_strided(close.shape, close.stride), self.layout)


def kept(tensor: torch.Tensor, least: int) -> Kept | Copied:
    """Returns what keeps a tensor in memory, and less than ``least`` bytes besides it."""
    version, place = tensor._version, place_of(tensor, 0)
    if place is not None and place.part is not None and tensor.untyped_storage().nbytes() >= least:
        counter = native().share_version(torch.empty(0, device="cpu"), tensor)
        return Copied(place.part, _distinct(tensor.detach()).clone(), counter, version)
    return Kept(tensor if tensor.grad_fn is None else tensor.detach(), version)


@dataclass(eq=False)
class Saved:
    """A tensor made of bytes that are fetched.

    Autograd reuses the memory of a gradient that nobody else refers to. A backward may return a saved tensor as a
    gradient if that needs none itself: such a tensor is therefore referred to as long as anybody else uses its bytes.
    """

    layout: Layout
    fetch: Callable[[], torch.Tensor]  #: returns a tensor over the bytes
    counter: torch.Tensor | None = None  #: has the version of the tensor, which is then checked for changes
    version: int = 0
    may_be_gradient: bool = False
    shared: Callable[[], bool] | None = None  #: whether others that do not know of ``fetch`` use the bytes, too
    part: Layout | None = None  #: what the bytes are a copy of, without gaps; None where they are a storage

    def value(self) -> torch.Tensor:
        """Returns the tensor. Raises RuntimeError if it was modified in place, and what ``fetch`` raises."""
        if self.counter is not None and self.counter._version != self.version:  # whether it was written before or not
            raise modified(self.layout.dtype, self.layout.shape)
        fetched, layout = self.fetch(), self.layout if self.part is None else self.part.close()
        place = int(fetched.storage_offset()) * fetched.itemsize + layout.offset
        if self.may_be_gradient:
            value = self._kept_with(fetched, layout, place)
        else:  # it shares the version counter: a backward may write to it
            if fetched.dtype != layout.dtype:
                whole = fetched.nbytes // layout.dtype.itemsize * layout.dtype.itemsize
                fetched = fetched.as_strided((whole // fetched.itemsize,), (1,)).view(layout.dtype)
            value = fetched.as_strided(layout.shape, layout.stride, place // layout.dtype.itemsize)
            # a user's function may return even this one as a gradient
            if self.shared is not None and isinstance(_node(), BackwardCFunction) and self.shared():
                value = value.clone()
        return value if value.stride() == self.layout.stride else _copy_like(value, self.layout)

    def _kept_with(self, fetched: torch.Tensor, layout: Layout, place: int) -> torch.Tensor:
        """Returns a tensor that begins at byte ``place`` and lives as long as ``fetched``."""
        made = made_of(fetched)
        if layout not in made:
            value = torch.empty(0, dtype=layout.dtype, device=fetched.device)
            value.set_(fetched.untyped_storage(), place // value.itemsize, layout.shape, layout.stride)
            made[layout] = value, value._version
            if self.shared is not None and self.shared():
                with contextlib.suppress(RuntimeError):  # not in a backward pass
                    Variable._execution_engine.queue_callback(partial(_keep, value))
        return made[layout][0]


def _keep(_: torch.Tensor) -> None:
    """Keeps a tensor until the end of the backward pass, when this is called."""


def made_of(fetched: torch.Tensor) -> dict[Layout, tuple[torch.Tensor, int]]:
    """Returns tensors made over the memory of another one, which live as long as that does, with their versions."""
    made: dict[Layout, tuple[torch.Tensor, int]] = vars(fetched).setdefault("_nvme_ops_made", {})
    return made


def is_changed(fetched: torch.Tensor, version: int) -> bool:
    """Returns whether a backward has written to the memory that it was given in this version."""
    if fetched._version != version:
        return True
    made = vars(fetched).get("_nvme_ops_made")
    return made is not None and any(value._version != old for value, old in made.values())


def place_of(tensor: torch.Tensor, least: int) -> StoragePart | None:
    """Returns which bytes are saved for a tensor, at least ``least``; None if it stays in memory.

    Parameters and views of them stay, and tensors without ordinary memory, or less than their size.
    """
    if (
        type(tensor) is not torch.Tensor
        or (tensor.is_leaf and tensor.requires_grad)
        or tensor.layout != torch.strided
        or tensor.is_nested
        or tensor.is_inference()
        or tensor.is_meta
        or tensor.is_quantized
        or tensor.is_conj()
        or tensor.is_neg()
        or tensor._is_zerotensor()  # whose storage has a size, and no memory
        or torch._is_functional_tensor(tensor)
        or tensor.numel() == 0
    ):
        return None
    base: Any = tensor._base
    if base is not None and (isinstance(base, torch.nn.Parameter) or (base.is_leaf and base.requires_grad)):
        return None
    nbytes = length = tensor.nbytes
    if not tensor.is_contiguous():
        nbytes, length = _distinct(tensor).nbytes, _length(tensor)
    storage = tensor.untyped_storage()
    whole = storage.nbytes()
    if whole < int(tensor.storage_offset()) * tensor.itemsize + length:
        return None  # it was resized; whoever did that brings it back
    if whole <= _MAX * nbytes:
        return None if whole < least else StoragePart(storage._cdata, whole)
    return None if nbytes < least else StoragePart(storage._cdata, nbytes, Layout.of(tensor))


def whole_of(tensor: torch.Tensor) -> StoragePart:
    """Returns all bytes of the storage of a tensor."""
    storage = tensor.untyped_storage()
    return StoragePart(storage._cdata, storage.nbytes())


def copy_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    """Returns the memory of a copy of the elements of a tensor, without gaps."""
    return _distinct(tensor.detach()).clone().untyped_storage()


def _length(tensor: torch.Tensor) -> int:
    """Returns the bytes of the storage from the first element to the last."""
    steps = sum((length - 1) * step for length, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (steps + 1) * tensor.itemsize


def _distinct(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor without the repetitions of expanded dimensions."""
    if tensor.is_contiguous():
        return tensor
    shape = [1 if step == 0 else length for length, step in zip(tensor.shape, tensor.stride(), strict=True)]
    return tensor if shape == list(tensor.shape) else tensor.detach().as_strided(shape, tensor.stride())


def _copy_like(value: torch.Tensor, like: Layout) -> torch.Tensor:
    """Returns a copy with the strides of ``like``: with others, operations may sum in another order."""
    made = torch.empty_strided(like.shape, like.stride, dtype=like.dtype, device=value.device)
    _distinct(made).copy_(_distinct(value))
    return made


def modified(dtype: torch.dtype, shape: Sequence[int]) -> RuntimeError:
    """Returns what autograd raises for a tensor that has changed since it was saved."""
    return RuntimeError(
        f"one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{dtype} {list(shape)}], saved by save_on_nvme"
    )
