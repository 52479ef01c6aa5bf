"""What a saved tensor is made of again: itself, or bytes from somewhere."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch.autograd import Variable

_MOST = 4  # a storage that is larger than what is saved of it by more than this factor is not saved as a whole


class Source(Protocol):
    """Gives a tensor again, whatever it was saved as."""

    def value(self) -> torch.Tensor:
        """Returns it. Raises RuntimeError if it was modified in place, and what reading it raises."""


class Place(NamedTuple):
    """Bytes of a storage."""

    storage: int  #: what ``StorageWeakRef.cdata`` is
    begin: int
    nbytes: int


@dataclass(frozen=True)
class Layout:
    """What a tensor makes of the bytes of its storage."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int  #: bytes

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Layout:
        """Returns that of a strided tensor."""
        return cls(tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()) * tensor.itemsize)


class Kept:
    """A tensor that stays in memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        # not the tensor itself where its graph would keep it, and it the graph
        self._tensor = tensor if tensor.grad_fn is None else tensor.detach()
        self._version = tensor._version

    def value(self) -> torch.Tensor:
        """Returns it. Raises RuntimeError if it was modified in place."""
        if self._tensor._version != self._version:
            raise modified(self._tensor.dtype, self._tensor.shape)
        return self._tensor


class Saved:
    """A tensor made of bytes that are fetched.

    Autograd takes the memory of a gradient that nobody else refers to. A backward may return as one what was saved, if
    that needs no gradient itself: such a tensor is therefore referred to as long as its bytes are anybody else's.

    Args:
        layout: of the tensor.
        begin: the byte of its storage with which what is fetched begins.
        fetch: returns a tensor over the bytes.
        tensor: itself; is looked at when it is asked for, for changes.
        shared: whether others have the bytes, too, who do not know of ``fetch``.
    """

    def __init__(
        self,
        layout: Layout,
        begin: int,
        fetch: Callable[[], torch.Tensor],
        tensor: torch.Tensor | None = None,
        shared: Callable[[], bool] | None = None,
    ) -> None:
        self._layout, self._begin, self._fetch, self._shared = layout, begin, fetch, shared
        self._tensor = None if tensor is None else weakref.ref(tensor)
        self._version = -1 if tensor is None else tensor._version
        self._may_be_gradient = tensor is not None and not tensor.requires_grad

    def value(self) -> torch.Tensor:
        """Returns it. Raises RuntimeError if it was modified in place, and what ``fetch`` raises."""
        layout = self._layout
        tensor = None if self._tensor is None else self._tensor()
        if tensor is not None and tensor._version != self._version:  # whether or not it was written before that
            raise modified(layout.dtype, layout.shape)
        fetched = self._fetch()
        place = int(fetched.storage_offset()) * fetched.itemsize + layout.offset - self._begin
        if not self._may_be_gradient:
            return _view_of(fetched, layout, place)
        made = made_of(fetched)
        known = made.get((layout, self._begin))
        if known is not None:
            return known[0]
        value = torch.empty(0, dtype=layout.dtype, device=fetched.device)
        value.set_(fetched.untyped_storage(), place // value.itemsize, layout.shape, layout.stride)
        made[layout, self._begin] = value, value._version
        if self._shared is not None and self._shared():
            with contextlib.suppress(RuntimeError):  # not in a backward pass
                Variable._execution_engine.queue_callback(partial(_keep, value))
        return value


def _view_of(fetched: torch.Tensor, layout: Layout, place: int) -> torch.Tensor:
    """Returns a tensor from that byte of the storage on. It shares the version counter: a backward may write to it."""
    if fetched.dtype != layout.dtype:
        whole = fetched.nbytes // layout.dtype.itemsize * layout.dtype.itemsize
        fetched = fetched.as_strided((whole // fetched.itemsize,), (1,)).view(layout.dtype)
    return fetched.as_strided(layout.shape, layout.stride, place // layout.dtype.itemsize)


def _keep(_: torch.Tensor) -> None:
    """Is called at the end of the backward pass, to which it keeps a tensor."""


def made_of(fetched: torch.Tensor) -> dict[tuple[Layout, int], tuple[torch.Tensor, int]]:
    """Returns tensors that were made over the memory of another one, and live as long as that does; each's version."""
    found: dict[tuple[Layout, int], tuple[torch.Tensor, int]] = vars(fetched).setdefault("_nvme_ops_made", {})
    return found


def is_changed(fetched: torch.Tensor, version: int) -> bool:
    """Whether a backward has written to memory of this version that it was given."""
    return fetched._version != version or any(value._version != each for value, each in made_of(fetched).values())


def place_of(tensor: torch.Tensor, least: int) -> Place | None:
    """Returns which bytes are saved for a tensor, at least so many; None for what stays in memory.

    Parameters and views of them stay, and what has no memory of the usual kind.
    """
    if _stays(tensor) or tensor.numel() == 0:
        return None
    itemsize = tensor.itemsize
    span = (1 + sum((length - 1) * step for length, step in zip(tensor.shape, tensor.stride(), strict=True))) * itemsize
    storage = tensor.untyped_storage()
    whole = storage.nbytes()
    begin, nbytes = (0, whole) if whole <= _MOST * span else (int(tensor.storage_offset()) * itemsize, span)
    return None if nbytes < least else Place(storage._cdata, begin, nbytes)


def whole_of(tensor: torch.Tensor) -> Place:
    """Returns all bytes of the storage of a tensor."""
    storage = tensor.untyped_storage()
    return Place(storage._cdata, 0, storage.nbytes())


def _stays(tensor: torch.Tensor) -> bool:
    if type(tensor) is not torch.Tensor or (tensor.is_leaf and tensor.requires_grad):
        return True
    if (
        tensor.layout != torch.strided
        or tensor.is_nested
        or tensor.is_inference()
        or tensor.is_meta
        or tensor.is_quantized
        or tensor.is_conj()
        or tensor.is_neg()
    ):
        return True
    base: Any = tensor._base
    return base is not None and (isinstance(base, torch.nn.Parameter) or (base.is_leaf and base.requires_grad))


def modified(dtype: torch.dtype, shape: Sequence[int]) -> RuntimeError:
    """Returns what autograd raises for a tensor that is not any more what it was when it was saved."""
    return RuntimeError(
        f"one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{dtype} {list(shape)}], saved by save_on_nvme"
    )
