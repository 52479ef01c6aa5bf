"""What a saved tensor is restored from: itself, or bytes from somewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch.autograd import Variable

from nvme_ops._native import native

_MOST = 4  # a storage that is larger than what is saved of it by more than this factor is not saved as a whole
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
        stride = torch.empty_like(copied).stride()
        return Layout(self.dtype, self.shape, tuple(_where_moved(self.stride, stride)), 0)


class Seen:
    """The version of a tensor that is not itself kept alive: its memory may be reused once it is freed."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._counter = torch.empty(0, device="cpu")
        native().share_version(self._counter, tensor)
        self._version = tensor._version

    def require_unchanged(self, layout: Layout) -> None:
        """Raises RuntimeError if it was modified in place."""
        if self._counter._version != self._version:
            raise modified(layout.dtype, layout.shape)


class Kept:
    """A tensor that stays in memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        # a detached tensor, where the tensor and its graph would keep each other alive
        self._tensor = tensor if tensor.grad_fn is None else tensor.detach()
        self._version = tensor._version

    def value(self) -> torch.Tensor:
        """Returns the tensor. Raises RuntimeError if it was modified in place."""
        if self._tensor._version != self._version:
            has_shape = not self._tensor.is_nested or self._tensor.layout != torch.strided
            raise modified(self._tensor.dtype, self._tensor.shape if has_shape else ())
        return self._tensor


class Copied:
    """A small part of a large storage, which would otherwise be kept as a whole."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._layout, self._memory = Layout.of(tensor), _distinct(tensor.detach()).clone()
        self._seen = Seen(tensor)

    def value(self) -> torch.Tensor:
        """Returns an equal tensor. Raises RuntimeError if it was modified in place."""
        self._seen.require_unchanged(self._layout)
        close = self._layout.close()
        return _copy_like(self._memory.as_strided(close.shape, close.stride), self._layout)


def kept(tensor: torch.Tensor, least: int) -> Kept | Copied:
    """Returns what keeps a tensor in memory, and less than ``least`` bytes besides it."""
    if _stays(tensor) or not tensor.numel():
        return Kept(tensor)
    whole = tensor.untyped_storage().nbytes()
    return Copied(tensor) if whole >= least and whole > _MOST * _distinct(tensor).nbytes else Kept(tensor)


class Saved:
    """A tensor made of bytes that are fetched.

    Autograd reuses the memory of a gradient that nobody else refers to. A backward may return a saved tensor as a
    gradient if that needs none itself: such a tensor is therefore referred to as long as anybody else uses its bytes.

    Args:
        layout: of the tensor.
        fetch: returns a tensor over the bytes.
        tensor: the tensor itself; checked for changes when its value is asked for.
        shared: whether others that do not know of ``fetch`` use the bytes, too.
        like: the tensor's layout, where ``layout`` is that of a copy of its elements.
    """

    def __init__(
        self,
        layout: Layout,
        fetch: Callable[[], torch.Tensor],
        tensor: torch.Tensor | None = None,
        shared: Callable[[], bool] | None = None,
        like: Layout | None = None,
    ) -> None:
        self._layout, self._fetch, self._shared, self._like = layout, fetch, shared, like
        self._seen = None if tensor is None else Seen(tensor)
        self._may_be_gradient = tensor is not None and not tensor.requires_grad

    def value(self) -> torch.Tensor:
        """Returns the tensor. Raises RuntimeError if it was modified in place, and what ``fetch`` raises."""
        layout = self._layout
        if self._seen is not None:  # whether or not it was written before that
            self._seen.require_unchanged(layout)
        value = self._made_of(self._fetch())
        return value if self._like is None else _spread(value, self._like)

    def _made_of(self, fetched: torch.Tensor) -> torch.Tensor:
        layout = self._layout
        place = int(fetched.storage_offset()) * fetched.itemsize + layout.offset
        if not self._may_be_gradient:
            view = _view_of(fetched, layout, place)
            # a user's function may return even this one as a gradient
            by_user = isinstance(_node(), torch.autograd.function.BackwardCFunction)
            return view.clone() if by_user and self._shared is not None and self._shared() else view
        made = made_of(fetched)
        known = made.get(layout)
        if known is not None:
            return known[0]
        value = torch.empty(0, dtype=layout.dtype, device=fetched.device)
        value.set_(fetched.untyped_storage(), place // value.itemsize, layout.shape, layout.stride)
        made[layout] = value, value._version
        if self._shared is not None and self._shared():
            with contextlib.suppress(RuntimeError):  # not in a backward pass
                Variable._execution_engine.queue_callback(partial(_keep, value))
        return value


def _view_of(fetched: torch.Tensor, layout: Layout, place: int) -> torch.Tensor:
    """Returns a tensor that begins at byte ``place``. It shares the version counter: a backward may write to it."""
    if fetched.dtype != layout.dtype:
        whole = fetched.nbytes // layout.dtype.itemsize * layout.dtype.itemsize
        fetched = fetched.as_strided((whole // fetched.itemsize,), (1,)).view(layout.dtype)
    return fetched.as_strided(layout.shape, layout.stride, place // layout.dtype.itemsize)


def _keep(_: torch.Tensor) -> None:
    """Keeps a tensor until the end of the backward pass, when this is called."""


def made_of(fetched: torch.Tensor) -> dict[Layout, tuple[torch.Tensor, int]]:
    """Returns tensors made over the memory of another one, which live as long as that does, with their versions."""
    found: dict[Layout, tuple[torch.Tensor, int]] = vars(fetched).setdefault("_nvme_ops_made", {})
    return found


def is_changed(fetched: torch.Tensor, version: int) -> bool:
    """Returns whether a backward has written to the memory that it was given in this version."""
    changed = fetched._version != version
    for value, each in made_of(fetched).values():
        changed |= value._version != each
    return changed


def place_of(tensor: torch.Tensor, least: int) -> StoragePart | None:
    """Returns which bytes are saved for a tensor, at least ``least``; None if it stays in memory.

    Parameters and views of them stay, and tensors without ordinary memory, or less than their size.
    """
    if _stays(tensor) or tensor.numel() == 0:
        return None
    nbytes = length = tensor.nbytes
    if not tensor.is_contiguous():
        nbytes, length = _distinct(tensor).nbytes, _length(tensor)
    whole = whole_of(tensor)
    if whole.nbytes < int(tensor.storage_offset()) * tensor.itemsize + length:
        return None  # it was resized; whoever did that brings it back
    if whole.nbytes <= _MOST * nbytes:
        return None if whole.nbytes < least else whole
    layout = Layout.of(tensor)
    return None if nbytes < least else StoragePart(whole.storage, nbytes, layout)


def whole_of(tensor: torch.Tensor) -> StoragePart:
    """Returns all bytes of the storage of a tensor."""
    storage = tensor.untyped_storage()
    return StoragePart(storage._cdata, storage.nbytes())


def memory_of(tensor: torch.Tensor, place: StoragePart) -> torch.Tensor:
    """Returns the bytes that are saved for a tensor: those of its storage, or of a copy of its elements."""
    source = tensor if place.part is None else _distinct(tensor.detach()).clone()
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return whole.set_(source.untyped_storage(), 0, (place.nbytes,), (1,))


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


def _where_moved(stride: Sequence[int], moved: Sequence[int]) -> Iterator[int]:
    """Yields strides of a copy; those of expanded dimensions stay 0."""
    return (0 if step == 0 else other for step, other in zip(stride, moved, strict=True))


def _spread(value: torch.Tensor, like: Layout) -> torch.Tensor:
    """Returns the value with the strides of ``like``: with others, operations may sum in another order."""
    return value if value.stride() == like.stride else _copy_like(value, like)


def _copy_like(value: torch.Tensor, like: Layout) -> torch.Tensor:
    made = torch.empty_strided(like.shape, like.stride, dtype=like.dtype, device=value.device)
    _distinct(made).copy_(_distinct(value))
    return made


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
        or tensor._is_zerotensor()  # whose storage has a size, and no memory
        or torch._is_functional_tensor(tensor)
    ):
        return True
    base: Any = tensor._base
    return base is not None and (isinstance(base, torch.nn.Parameter) or (base.is_leaf and base.requires_grad))


def modified(dtype: torch.dtype, shape: Sequence[int]) -> RuntimeError:
    """Returns what autograd raises for a tensor that has changed since it was saved."""
    return RuntimeError(
        f"one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{dtype} {list(shape)}], saved by save_on_nvme"
    )
