"""``StoredTensor``: a weight that is in a file, and comes into memory for as long as something computes with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from nvme_ops.offload.quantized import expand
from nvme_ops.offload.source import Source, concatenated, narrowed
from nvme_ops.offload.window import Window, read_now

aten = torch.ops.aten


class Weights:
    """What stored tensors of one model read through, once its window is there."""

    def __init__(self) -> None:
        self.window: Window | None = None

    def fetch(self, source: Source) -> torch.Tensor:
        """See ``Window.fetch``."""
        return self._open().fetch(source)

    def rows(self, source: Source, indices: Sequence[int]) -> torch.Tensor | None:
        """See ``Window.rows``."""
        return self._open().rows(source, indices)

    def _open(self) -> Window:
        if self.window is None:
            raise RuntimeError("the weights of this model cannot be read before it is complete")
        return self.window


class StoredTensor(torch.Tensor):
    """Has dtype, shape and device of a weight, and its values in a file.

    Operations get the values in memory; what they return are usual tensors. Parts along the first dimension, other
    shapes, other dtypes and what is put together of stored tensors are stored tensors again, of which nothing is read.
    It cannot be changed, and takes no gradient; gradients flow through it.

    Args:
        weights: read it.
        source: where its values are.
        dtype: what the stored ones are converted to; as they are when None.
        device: where it is used.
        turned: whether it is the transpose of the matrix that is stored.
        scale: what the stored values, of 8 bits, are multiplied with.
    """

    _weights: Weights
    _source: Source
    _device: torch.device
    _turned: bool
    _scale: torch.Tensor | None

    @staticmethod
    def __new__(
        cls,
        weights: Weights,
        source: Source,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        turned: bool = False,
        scale: torch.Tensor | None = None,
    ) -> StoredTensor:
        """Makes one; nothing is read."""
        device = device or torch.device("cpu")
        shape = torch.empty(source.shape, device="meta")
        shape = shape.t() if turned else shape
        made: StoredTensor = torch.Tensor._make_wrapper_subclass(
            cls, shape.shape, strides=shape.stride(), dtype=dtype or source.dtype, device=device
        )
        made._weights, made._source, made._device, made._turned = weights, source, device, turned
        made._scale = scale
        return made

    @property
    def source(self) -> Source:
        """Where its values are."""
        return self._source

    def to_memory(self) -> torch.Tensor:
        """A usual tensor with its values, in memory of its own."""
        (values,) = read_now([self._source])
        return self.computed(values.to(self._device))

    def in_window(self) -> torch.Tensor:
        """The values, in memory that is used again when the last tensor over it is gone."""
        return self.computed(self._weights.fetch(self._source))

    def computed(self, values: torch.Tensor) -> torch.Tensor:
        """What stored ``values`` are to whoever computes with them."""
        if self._scale is not None:
            values = expand(values, self._scale, self.dtype)
        elif values.dtype != self.dtype:
            values = values.to(self.dtype)
        return values.t() if self._turned else values

    def like(
        self,
        source: Source,
        dtype: torch.dtype | None = None,
        turned: bool = False,
        scale: torch.Tensor | None = None,
    ) -> StoredTensor:
        """Another one of the same weights."""
        return StoredTensor(self._weights, source, dtype or self.dtype, self._device, turned, scale)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # torch declares it without types
        """For example ``StoredTensor(shape=(4096, 4096), dtype=torch.bfloat16)``."""
        return f"StoredTensor(shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """A usual tensor, or a parameter where this is one."""
        values = self.to_memory()
        made = torch.nn.Parameter(values, False) if isinstance(self, torch.nn.Parameter) else values
        memo[id(self)] = made
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Is pickled as a usual tensor."""
        values = self.to_memory()
        made = torch.nn.Parameter(values, False) if isinstance(self, torch.nn.Parameter) else values
        return made.__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls the function as it is, but for one that would expand a weight that takes no gradient.

        ``matmul`` of an input of three dimensions that is not contiguous repeats the weight for each of the first
        dimension, in memory, where the weight takes no gradient (``should_fold`` in ATen's LinearAlgebra.cpp).
        """
        if func in (torch.nn.functional.linear, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__):
            args = tuple(each.contiguous() if type(each) is torch.Tensor else each for each in args)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it without cls
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if (lazily := _LAZY.get(func)) is not None and (lazily in _OF_ALL or not _any_unusual(args)):
            found = lazily(*args, **kwargs)
            if found is not NotImplemented:
                return found
        if func._schema.is_mutable:
            _require_not_written(func, args, kwargs)
        return func(*tree_map(_in_memory, tuple(args)), **tree_map(_in_memory, dict(kwargs)))


def stored_in(tensor: Any) -> StoredTensor | None:
    """Returns the stored tensor that this is, or that a ``DTensor`` has as this rank's part."""
    local = getattr(tensor, "_local_tensor", tensor)
    return local if isinstance(local, StoredTensor) else None


def _any_unusual(args: Any) -> bool:
    return any(
        isinstance(each, StoredTensor) and (each._turned or each._scale is not None) for each in tree_leaves(args)
    )


def _in_memory(value: Any) -> Any:
    return value.in_window() if isinstance(value, StoredTensor) else value


def _require_not_written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            if any(isinstance(each, StoredTensor) for each in tree_leaves(value)):
                raise RuntimeError(f"{func}: weights that are streamed from storage cannot be changed")


# Operations of which nothing has to be read. Each returns NotImplemented for what it cannot do.

_LAZY: dict[Any, Callable[..., Any]] = {}


def _lazily(*operators: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        _LAZY.update(dict.fromkeys(operators, function))
        return function

    return add


@_lazily(aten.detach.default, aten.alias.default, aten.lift_fresh.default)
def _same(tensor: StoredTensor) -> StoredTensor:
    return tensor.like(tensor.source, turned=tensor._turned, scale=tensor._scale)


@_lazily(aten.t.default)
def _t(tensor: StoredTensor) -> Any:
    """Autograd keeps it for the backward of a linear layer: not the values, which are read again there."""
    if tensor.dim() != 2:
        return NotImplemented
    return tensor.like(tensor.source, turned=not tensor._turned, scale=tensor._scale)


@_lazily(aten.transpose.int)
def _transpose(tensor: StoredTensor, first: int, second: int) -> Any:
    return _t(tensor) if tensor.dim() == 2 and (first - second) % 2 else NotImplemented


@_lazily(aten._to_copy.default)
def _to_copy(tensor: StoredTensor, *, dtype: torch.dtype | None = None, **options: Any) -> Any:
    device = options.pop("device", None)
    options.pop("non_blocking", None)
    elsewhere = device is not None and torch.device(device).type not in (tensor.device.type, "meta")
    if tensor._weights.window is None:  # transformers puts all in host memory first
        elsewhere, device = False, None
    if elsewhere or any(value is not None for value in options.values()) or tensor.dtype != tensor.source.dtype:
        return NotImplemented
    if device is not None and torch.device(device).type == "meta":
        return torch.empty(tensor.shape, dtype=dtype or tensor.dtype, device="meta")
    return tensor.like(tensor.source, dtype)


@_lazily(aten.select.int)
def _select(tensor: StoredTensor, dim: int, index: int) -> Any:
    if tensor._turned or dim % max(tensor.dim(), 1) or not -tensor.shape[0] <= index < tensor.shape[0]:
        return NotImplemented
    index %= tensor.shape[0]
    part = tensor.source.rows(index, index + 1).view(tensor.source.shape[1:])
    scale = tensor._scale
    if scale is not None and (scale.dim() != tensor.dim() or tensor.dim() < 3):
        return NotImplemented
    return tensor.like(part, scale=None if scale is None else scale[index if scale.shape[0] > 1 else 0])


@_lazily(aten.slice.Tensor)
def _slice(tensor: StoredTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
    dim %= tensor.dim()
    begin, stop, _ = slice(start, end).indices(tensor.shape[dim])
    part = narrowed(tensor.source, dim, begin, max(begin, stop)) if step == 1 else None
    return NotImplemented if part is None else tensor.like(part)


@_lazily(aten.split.Tensor)
def _split(tensor: StoredTensor, size: int, dim: int = 0) -> Any:
    parts = [_slice(tensor, dim, at, at + size) for at in range(0, tensor.shape[dim], size)]
    return NotImplemented if any(part is NotImplemented for part in parts) else parts


@_lazily(aten.view.default, aten._unsafe_view.default, aten.reshape.default)
def _view(tensor: StoredTensor, shape: Sequence[int]) -> Any:
    resolved = torch.empty(tensor.shape, device="meta").view(tuple(shape)).shape
    return tensor.like(tensor.source.view(tuple(resolved)))


@_lazily(aten.unsqueeze.default)
def _unsqueeze(tensor: StoredTensor, dim: int) -> Any:
    return _view(tensor, torch.empty(tensor.shape, device="meta").unsqueeze(dim).shape)


@_lazily(aten.stack.default)
def _stack(tensors: Sequence[Any], dim: int = 0) -> Any:
    if not all(isinstance(each, StoredTensor) and each.shape == tensors[0].shape for each in tensors):
        return NotImplemented
    return _cat([_unsqueeze(each, dim) for each in tensors], dim)


@_lazily(aten.cat.default)
def _cat(tensors: Sequence[Any], dim: int = 0) -> Any:
    if not all(isinstance(each, StoredTensor) and each.dtype == tensors[0].dtype for each in tensors):
        return NotImplemented
    found = concatenated([each.source for each in tensors], dim)
    return NotImplemented if found is None else tensors[0].like(found)


@_lazily(aten.embedding.default)
def _embedding(weight: Any, indices: torch.Tensor, *_: Any, **__: Any) -> Any:
    """Reads the rows that are asked for alone, where these are few."""
    usual = isinstance(weight, StoredTensor) and not isinstance(indices, StoredTensor) and weight.dim() == 2
    if not usual:
        return NotImplemented
    unique, inverse = torch.unique(indices, return_inverse=True)
    numbers = unique.tolist()
    if not numbers or numbers[0] < 0 or numbers[-1] >= weight.shape[0]:
        return NotImplemented  # torch says what is wrong
    rows = weight._weights.rows(weight.source, numbers)
    if rows is None:
        return NotImplemented
    return rows.to(weight.dtype)[inverse]


_OF_ALL = (_same, _t, _transpose, _select)  # which mind a transpose and a scale
