"""``StoredTensor``: a weight that is in a file, and in memory while something computes with it."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from nvme_ops.base.errors import FormatError, free_frames
from nvme_ops.formats.packed import Packed
from nvme_ops.formats.quantized import Cast, Processed, Rearranged, Scaled, WeightFormat, are_few
from nvme_ops.formats.safetensors_format import Header
from nvme_ops.lazy import operators
from nvme_ops.lazy.offloaded import (
    OffloadedTensor,
    Step,
    apply_steps,
    cat_one_by_one,
    never_compiled,
    offloaded_in,
    outline_of,
)
from nvme_ops.offload.weights.window import Window, read_now
from nvme_ops.storage.source import FileExtent, Source, WeightFile, concatenated, narrowed

aten = torch.ops.aten


class Weights:
    """Holds the window through which the stored tensors of one model are read, once it exists.

    Args:
        budget: the most bytes of weights that may be computed with before that.
        budget_name: of the argument that says so.
    """

    def __init__(self, budget: int = 0, budget_name: str = "device_budget") -> None:
        self.window: Window | None = None
        self.budget, self.early = budget, 0
        self.too_early = f"loading the model computes with more weights than {budget_name} has room for"

    def fetch(self, source: Source) -> torch.Tensor:
        """Returns a weight as ``Window.fetch`` does."""
        return self.open().fetch(source)

    def open(self) -> Window:
        """Returns the window. Raises RuntimeError if the model is not complete yet."""
        if self.window is None:
            raise RuntimeError("the weights of this model cannot be read before it is complete")
        return self.window


class StoredTensor(OffloadedTensor):
    """A weight whose values are in a file. It cannot be changed and takes no gradient; gradients flow through it.

    Parts along the first dimension, other shapes or dtypes, and concatenations of stored tensors are stored tensors
    again: making them reads nothing, and using a part reads only the bytes of that part.

    Args:
        weights: the model's, through which this one is read.
        source: where the stored values are.
        dtype: that of the values after conversion; the stored one when None.
        device: where the weight is used.
        stored_as: how values are made of what is stored; None: they are the same, in ``dtype``.
        outline: has shape and dtype of this tensor; those of the values when None.
        steps: views that lead from the converted values to this tensor.
    """

    _weights: Weights
    _source: Source
    _device: torch.device
    _converted: torch.dtype  # of the values after conversion, before the steps
    _stored_as: WeightFormat | None  # None: as they are, or in another dtype
    _is_part: bool  # whether it is a part of a weight, whose rest is not read

    writable = False
    lazy: ClassVar[dict[Any, Callable[..., Any]]] = dict(OffloadedTensor.lazy)
    instead: ClassVar[str] = "copy it by to_memory(), or the model by copy.deepcopy()"

    @staticmethod
    def __new__(
        cls,
        weights: Weights,
        source: Source,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        stored_as: WeightFormat | None = None,
        outline: torch.Tensor | None = None,
        steps: tuple[Step, ...] = (),
    ) -> StoredTensor:
        """Makes a tensor without reading anything."""
        device, converted = device or torch.device("cpu"), dtype or source.dtype
        if outline is None:
            shape = source.shape if stored_as is None else stored_as.shape(source.shape)
            outline = torch.empty(shape, dtype=converted, device="meta")
        made = cls._outlined(outline, steps, device)
        made._weights, made._source, made._device, made._stored_as = weights, source, device, stored_as
        made._converted, made._is_part = converted, False
        return made

    @property
    def source(self) -> Source:
        """Where the stored values are."""
        return self._source

    @property
    def stored_at(self) -> Hashable:
        """A key shared by all tensors that in torch would share memory; a conversion is a copy."""
        return id(self._source), self._converted

    def to_memory(self) -> torch.Tensor:
        """Returns an ordinary tensor with the values, in memory of its own."""
        (values,) = read_now([self._source])
        return self.expanded(values.to(self._device))

    def in_window(self, stored: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the values in memory of the budget, which is free again with the last tensor over it.

        They are made of what is ``stored``, which is read if it is not given. While the model is being put together,
        some weights are computed with: these are simply read.
        """
        if self._weights.window is None and self._weights.budget:
            self._weights.early += self.nbytes
            if self._weights.early > self._weights.budget:
                raise MemoryError(self._weights.too_early)
            return self.to_memory()
        room = functools.partial(self._weights.open().room, self._source)
        try:
            return self.expanded(self._weights.fetch(self._source) if stored is None else stored, room)
        except BaseException as error:
            del stored
            free_frames(error)
            raise

    def expanded(self, values: torch.Tensor, room: Callable[[int], torch.Tensor] | None = None) -> torch.Tensor:
        """Returns the values of this tensor, made of the stored ``values`` in memory that ``room(nbytes)`` returns."""
        if self._format is not None:
            size = self.nbytes_expanded
            memory = torch.empty(size, dtype=torch.uint8, device=values.device) if room is None else room(size)
            out = memory.view(self._converted).view(self._format.shape(self._source.shape))
            self._format.expand(values, out)
            values = out
        return apply_steps(self._steps, values)

    def linear(self, inputs: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Computes ``torch.nn.functional.linear``; a few inputs are multiplied with what is stored in fewer bits."""
        rows = inputs.view(-1, inputs.shape[-1]) if inputs.dim() != 2 and inputs.is_contiguous() else inputs
        if not self.may_multiply(rows):
            return _linear(inputs, self.in_window(), bias)
        stored = made = None
        try:
            stored = self._weights.fetch(self._source)
            if (made := self.product(stored, rows, transposed=False)) is None:
                return _linear(inputs, self.in_window(stored), bias)
            made = made.view(*inputs.shape[:-1], made.shape[-1])
            return made if bias is None else made + bias
        except BaseException as error:
            del stored, made
            free_frames(error)
            raise

    def may_multiply(self, inputs: torch.Tensor) -> bool:
        """Returns whether ``product`` may return one."""
        packed = isinstance(self._stored_as, Scaled | Packed) and not self._steps and self._weights.window is not None
        fits = inputs.dim() == 2 and inputs.dtype == self.dtype and not torch.is_autocast_enabled("cpu")
        return packed and fits and are_few(inputs)

    def product(self, stored: torch.Tensor, inputs: torch.Tensor, transposed: bool) -> torch.Tensor | None:
        """Returns a product with what is ``stored``; see ``WeightFormat``."""
        if self._stored_as is None or inputs.shape[-1] != self.shape[0 if transposed else 1]:
            return None
        return self._stored_as.product(stored, inputs, transposed)

    @property
    def _format(self) -> WeightFormat | None:
        """How stored values are expanded to those computed with; None if they are the same."""
        if self._stored_as is not None:
            return self._stored_as
        return Cast() if self._converted != self._source.dtype else None

    @property
    def nbytes_expanded(self) -> int:
        """Bytes of memory taken beside the stored values while it is computed with."""
        if self._format is None:
            return 0
        return math.prod(self._format.shape(self._source.shape)) * self._converted.itemsize

    def is_plain(self) -> bool:
        """Returns whether its elements are the stored ones, in their order, but for a conversion of the dtype."""
        return not self._steps and self._stored_as is None

    def is_by_row(self) -> bool:
        """Returns whether each row is made of the same row of what is stored, by a format."""
        return not self._steps and self._stored_as is not None and self._stored_as.by_row

    @property
    def nbytes_moved(self) -> int:
        """Bytes of the larger of it and of what is read for it alone."""
        return max(self.nbytes, self.source.nbytes) if self.is_by_row() else self.nbytes

    def has_parts(self) -> bool:
        """Returns whether each index of the first of three dimensions can be read alone."""
        is_known = not isinstance(self._stored_as, Rearranged) or self._stored_as.is_by_index(self._source.shape)
        return self.dim() == 3 and not self._steps and is_known

    def like(
        self,
        source: Source,
        dtype: torch.dtype | None = None,
        stored_as: WeightFormat | None = None,
        outline: torch.Tensor | None = None,
        is_part: bool = False,
    ) -> StoredTensor:
        """Returns a tensor of the same model, device and dtype from another ``source``, without steps."""
        made = StoredTensor(self._weights, source, dtype or self._converted, self._device, stored_as, outline)
        made._is_part = self._is_part or is_part
        return made

    def _derived(self, outline: torch.Tensor, *steps: Step) -> StoredTensor:
        same = (self._weights, self._source, self._converted, self._device, self._stored_as)
        made = StoredTensor(*same, outline, (*self._steps, *steps))
        made._is_part = self._is_part
        return made

    def _viewed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StoredTensor | list[StoredTensor]:
        if self._is_part and func is aten.as_strided.default:  # it may reach beyond the part
            raise RuntimeError(f"{func}: not for a part of a weight that is streamed: apply it to the whole weight")
        return super()._viewed(func, args, kwargs)

    def _lend(self, uses: contextlib.ExitStack, change: bool) -> torch.Tensor:
        del uses, change
        return self.in_window()

    @classmethod
    def _lend_together(cls, lent: Mapping[int, StoredTensor], values: dict[int, torch.Tensor]) -> None:
        for weights in {tensor._weights for tensor in lent.values() if tensor._weights.window is not None}:
            of_model = {key: tensor for key, tensor in lent.items() if tensor._weights is weights}
            stored = weights.open().fetch_all(dict.fromkeys(tensor._source for tensor in of_model.values()))
            try:
                for key, tensor in of_model.items():
                    values[key] = tensor.in_window(stored[tensor._source])
            finally:
                stored.clear()  # a traceback would keep them alive

    def _whole(self) -> StoredTensor:
        return self if not self._steps else self.like(self._source, self._converted, self._stored_as)

    def _copies(self) -> tuple[dict[Any, StorageWeakRef], Any]:
        return self._source.copies, self._converted

    def _require_writable(self, function: Any) -> None:
        if self._converted != self._source.dtype and not isinstance(self, torch.nn.Parameter):
            raise RuntimeError(
                f"{function}: a converted copy of a weight that is streamed cannot be changed: clone() it"
            )
        raise RuntimeError(f"{function}: weights that are streamed from storage cannot be changed")

    def _assign(self, value: torch.Tensor) -> None:
        if not isinstance(value, StoredTensor) or value._weights is not self._weights:
            raise RuntimeError("data: weights that are streamed from storage cannot be changed")
        self._become(value._derived(value._outline))  # another view, or conversion, of the same weights

    @classmethod
    @never_compiled
    def __torch_function__(  # type: ignore[override]  # the base class has torch's own that does nothing
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Calls the function, with weights as they are in memory.

        There parameters require a gradient, also where none is computed, and ``matmul`` multiplies all rows of an input
        of three or more dimensions by such a one at once, but by another batch by batch if the input is not contiguous
        (``should_fold`` in ATen's LinearAlgebra.cpp). The last bits differ.
        """
        with torch._C.DisableTorchFunctionSubclass():
            if func is _linear and not kwargs and _is_simple(*args):
                inputs, weight, *bias = args
                return weight.linear(inputs, *bias)
            if func in _MULTIPLYING and not torch.is_grad_enabled() and _in_batches(func, args):
                args = tuple(map(_as_trained, args))
            return func(*args, **(kwargs or {}))


def stored_tensors(
    file: WeightFile, header: Header, weights: Weights, device: torch.device | None = None
) -> Iterator[tuple[str, StoredTensor]]:
    """Yields names and tensors of a safetensors file. Raises FormatError if one reaches beyond the file's end."""
    return ((name, StoredTensor(weights, source, device=device)) for name, source in sources_in(file, header))


def sources_in(file: WeightFile, header: Header) -> Iterator[tuple[str, Source]]:
    """Yields names and places of the tensors of a safetensors file; see ``stored_tensors``."""
    for name, entry in header.entries.items():
        dtype, shape = entry.in_torch(file.path, name)
        if entry.end > file.size:
            raise FormatError(f"{file.path}: tensor {name!r} reaches beyond the end of the file")
        yield name, Source([FileExtent(file, entry.start, entry.end - entry.start)], dtype, shape)


_linear = torch.nn.functional.linear
_attention = torch.nn.functional.multi_head_attention_forward
_MULTIPLYING = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, _linear, _attention)


def _in_batches(func: Any, args: Sequence[Any]) -> bool:
    """Returns whether a product may be computed batch by batch."""
    if func is _attention:
        return True
    batches = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.dim() > 2]
    return any(isinstance(args[0], StoredTensor) or not _is_foldable(batch) for batch in batches)


def _is_foldable(value: torch.Tensor) -> bool:
    """Returns whether all rows lie at equal distances; one that is contiguous may have others where a size is 1."""
    shape, stride = value.shape, value.stride()
    return all(stride[dim] == stride[dim + 1] * shape[dim + 1] for dim in range(value.dim() - 2))


def _as_trained(value: Any) -> Any:
    if isinstance(value, StoredTensor) and value.is_floating_point():
        return value.detach().requires_grad_()
    return value


def _is_simple(inputs: Any, weight: Any, bias: Any = None) -> bool:
    """Returns whether a layer computes with plain values, of which nothing is kept: not for a gradient, say."""
    others = [inputs] if bias is None else [inputs, bias]
    return (
        isinstance(weight, StoredTensor)
        and all(type(value) in (torch.Tensor, torch.nn.Parameter) for value in others)
        and _is_foldable(inputs)
        and not (torch.is_grad_enabled() and any(value.requires_grad for value in [weight, *others]))
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()  # what reads would be transformed, too
    )


def in_window_together(tensors: Sequence[StoredTensor]) -> Iterator[torch.Tensor]:
    """Yields the values of tensors of one model that are used one after the other, in memory of the budget."""
    if any(tensor._format is not None or tensor._steps for tensor in tensors):
        return (tensor.in_window() for tensor in tensors)  # expanded one after the other, too
    return stored_together(tensors)


def stored_together(tensors: Sequence[StoredTensor]) -> Iterator[torch.Tensor]:
    """Yields what is stored of such tensors."""
    return tensors[0]._weights.open().fetch_together([tensor._source for tensor in tensors])


def stored_in(tensor: Any) -> StoredTensor | None:
    """Returns this tensor, or the local shard of a ``DTensor``, if it is a stored one; else None."""
    offloaded = offloaded_in(tensor)
    return offloaded if isinstance(offloaded, StoredTensor) else None


# Operations that read nothing, or a part alone. Each returns NotImplemented for arguments that it cannot handle.


def _lazily(*operators: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a function for plain weights; ``OffloadedTensor`` makes the views of others."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def of_plain(*args: Any, **kwargs: Any) -> Any:
            is_other = any(isinstance(leaf, StoredTensor) and not leaf.is_plain() for leaf in tree_leaves(args))
            return NotImplemented if is_other else function(*args, **kwargs)

        StoredTensor.lazy.update(dict.fromkeys(operators, of_plain))
        return function

    return add


def _to_copy(tensor: StoredTensor, *, dtype: torch.dtype | None = None, **options: Any) -> Any:
    device = options.pop("device", None)
    options.pop("non_blocking", None)
    elsewhere = device is not None and torch.device(device).type not in (tensor.device.type, "meta")
    loading = tensor._weights.window is None
    if loading:  # transformers moves all weights to host memory first
        elsewhere, device = False, None
    is_stored = tensor.is_plain() and tensor.dtype == tensor.source.dtype
    is_expanded = loading and not tensor._steps and isinstance(tensor._stored_as, Scaled | Packed | Processed)
    if elsewhere or any(value is not None for value in options.values()) or not (is_stored or is_expanded):
        return NotImplemented
    if device is not None and torch.device(device).type == "meta":
        return torch.empty(tensor.shape, dtype=dtype or tensor.dtype, device="meta")
    return tensor.like(tensor.source, dtype, tensor._stored_as)


StoredTensor.lazy[aten._to_copy.default] = _to_copy


def select(tensor: StoredTensor, dim: int, index: int) -> Any:
    """Selects an index of the first dimension, such as one of packed experts, with its part of a scale."""
    if [step.function for step in tensor._steps] == [aten.baddbmm.default]:
        ((_, (left, right), scales, _),) = tensor._steps
        part = select(tensor._whole(), dim, index)
        if part is NotImplemented:
            return NotImplemented
        index %= tensor.shape[0]
        added = Step(aten.baddbmm.default, (left[index, None], right[index, None]), scales)
        return part._derived(
            part._outline, Step(aten.unsqueeze.default, (0,), {}), added, Step(aten.squeeze.dim, (0,), {})
        )
    if (
        tensor._steps
        or not tensor.numel()
        or (tensor._stored_as is not None and not tensor.has_parts())
        or dim % max(tensor.dim(), 1)
        or not -tensor.shape[0] <= index < tensor.shape[0]
    ):
        return NotImplemented
    index %= tensor.shape[0]
    stored_as = None if tensor._stored_as is None else tensor._stored_as.select(index)
    part = tensor.source.rows(index, index + 1).view(tensor.source.shape[1:])
    return tensor.like(part, None, stored_as, tensor._outline.select(dim, index), is_part=True)


StoredTensor.lazy[aten.select.int] = select


@_lazily(aten.baddbmm.default)
def _baddbmm(tensor: Any, left: torch.Tensor, right: torch.Tensor, **scales: float) -> Any:
    """Adds a product of factors, such as peft has for packed experts, to each expert when that is used."""
    if not isinstance(tensor, StoredTensor) or tensor.shape != (*left.shape[:2], right.shape[2]) or not tensor.numel():
        return NotImplemented
    step = Step(aten.baddbmm.default, (left.clone(), right.clone()), scales)  # as they are now
    return tensor._derived(outline_of(tensor.shape, tensor._outline.stride(), tensor.dtype), step)


def _indexed(tensor: Any, indices: Sequence[Any]) -> Any:
    """Reads each of the packed experts in an index of the first dimension once, and no others."""
    if not isinstance(tensor, StoredTensor) or tensor.dim() != 3 or len(indices) != 1:
        return NotImplemented
    index = indices[0]
    if type(index) is not torch.Tensor or index.dim() != 1 or index.dtype not in (torch.int32, torch.int64):
        return NotImplemented
    numbers, inverse = torch.unique(index, return_inverse=True)
    parts = [select(tensor, 0, number) for number in numbers.tolist()]
    if any(part is NotImplemented for part in parts):
        return NotImplemented
    gathered = torch.empty((len(index), *tensor.shape[1:]), dtype=tensor.dtype, device=tensor.device)
    for number, part in enumerate(parts):
        gathered[inverse == number] = part.in_window()
    return gathered


StoredTensor.lazy[aten.index.Tensor] = _indexed


def _slice(tensor: StoredTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
    if not tensor.numel():
        return NotImplemented
    dim %= tensor.dim()
    if not tensor.is_plain() and (dim or not tensor.is_by_row()):
        return NotImplemented
    if dim and tensor._weights.window is not None:  # dense in memory, its sums would be in another order
        return NotImplemented
    begin, stop, _ = slice(start, end).indices(tensor.shape[dim])
    part = narrowed(tensor.source, dim, begin, max(begin, stop)) if step == 1 else None
    outline = tensor._outline.narrow(dim, begin, max(begin, stop) - begin)
    return NotImplemented if part is None else tensor.like(part, None, tensor._stored_as, outline, is_part=True)


def _split(tensor: StoredTensor, size: int, dim: int = 0) -> Any:
    if size < 1:
        return NotImplemented
    parts = [_slice(tensor, dim, at, at + size) for at in range(0, tensor.shape[dim], size)]
    return NotImplemented if any(part is NotImplemented for part in parts) else parts


StoredTensor.lazy.update({aten.slice.Tensor: _slice, aten.split.Tensor: _split})


def _view(tensor: StoredTensor, shape: Sequence[int]) -> Any:
    if tensor.is_plain():
        return _reshaped(tensor, tensor._outline.view(tuple(shape)))
    if tensor._steps or not isinstance(tensor._stored_as, Rearranged):
        return NotImplemented
    outline = tensor._outline.view(tuple(shape))
    return tensor.like(tensor.source, None, tensor._stored_as.view(outline.shape), outline)


StoredTensor.lazy.update(dict.fromkeys((aten.view.default, aten._unsafe_view.default, aten.reshape.default), _view))


@_lazily(aten.view.dtype)
def _view_dtype(tensor: StoredTensor, dtype: torch.dtype) -> Any:
    """Reinterprets the bytes; writers of checkpoints do so, a part at a time."""
    if tensor.dtype != tensor.source.dtype:
        return NotImplemented
    outline = tensor._outline.view(dtype)
    return tensor.like(tensor.source.view(tuple(outline.shape), dtype), dtype, outline=outline)


def _unsqueeze(tensor: StoredTensor, dim: int) -> Any:
    if tensor._steps or not isinstance(tensor._stored_as, Scaled | Packed | None):
        return NotImplemented
    outline = tensor._outline.unsqueeze(dim)
    stored_as = None if tensor._stored_as is None else tensor._stored_as.unsqueeze(dim)
    if not isinstance(tensor._stored_as, Packed):
        return tensor.like(tensor.source.view(tuple(outline.shape)), None, stored_as, outline)
    one = tensor.source.view((1, *tensor.source.shape))
    return NotImplemented if stored_as is None else tensor.like(one, None, stored_as)


StoredTensor.lazy[aten.unsqueeze.default] = _unsqueeze


def _reshaped(tensor: StoredTensor, outline: torch.Tensor) -> StoredTensor:
    return tensor.like(tensor.source.view(tuple(outline.shape)), outline=outline)


def _stack(tensors: Sequence[Any], dim: int = 0) -> Any:
    if not all(isinstance(tensor, StoredTensor) and tensor.shape == tensors[0].shape for tensor in tensors):
        return NotImplemented
    return _cat([torch.unsqueeze(tensor, dim) for tensor in tensors], dim)


StoredTensor.lazy[aten.stack.default] = _stack


def _cat(tensors: Sequence[Any], dim: int = 0) -> Any:
    made = None
    if all(isinstance(part, StoredTensor) and not part._steps and part.dtype == tensors[0].dtype for part in tensors):
        sources, formats = [part.source for part in tensors], [part._stored_as for part in tensors]
        made = concatenated_as_stored(sources, formats, [part.shape for part in tensors], dim % tensors[0].dim())
    return cat_one_by_one(tensors, dim) if made is None else tensors[0].like(made[0], None, made[1])


def concatenated_as_stored(
    sources: Sequence[Source], formats: Sequence[WeightFormat | None], shapes: Sequence[Sequence[int]], dim: int
) -> tuple[Source, WeightFormat | None] | None:
    """Returns where weights of these shapes are, and how they are stored, when concatenated; None if they cannot be."""
    stored_as = None
    for kind in (Scaled, Packed):
        of_kind: list[Any] = [form for form in formats if isinstance(form, kind)]
        if len(of_kind) == len(formats):
            stored_as = kind.concatenated(of_kind, shapes, dim)
    if stored_as is None and any(form is not None for form in formats):
        return None
    source = concatenated(sources, dim)
    return None if source is None else (source, stored_as)


StoredTensor.lazy[aten.cat.default] = _cat


def _clone(tensor: StoredTensor, *, memory_format: torch.memory_format | None = None) -> Any:
    """Makes a part contiguous while a model is being put together: reading it makes it dense, or rearranges it."""
    if tensor._weights.window is not None or memory_format is not torch.contiguous_format:
        return NotImplemented
    outline = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    if tensor.is_plain():
        return tensor.like(tensor.source, outline=outline, is_part=True)
    view = tensor._outline
    by_stride = sorted(range(view.dim()), key=view.stride, reverse=True)
    is_rearranged = (
        tensor._stored_as is None
        and all(operators.is_view(step.function) for step in tensor._steps)
        and view.dtype == tensor._converted
        and not (view.is_conj() or view.is_neg())
        and view.numel() == math.prod(tensor.source.shape)
        and view.permute(by_stride).is_contiguous()
    )
    if not is_rearranged:
        return NotImplemented
    return tensor.like(tensor.source, None, Rearranged(view.shape, view.stride(), view.shape), outline)


StoredTensor.lazy[aten.clone.default] = _clone


def _embedding(weight: Any, indices: torch.Tensor, *_: Any, **__: Any) -> Any:
    """Reads only the rows in ``indices`` if these are few."""
    if not isinstance(weight, StoredTensor) or isinstance(indices, StoredTensor) or weight.dim() != 2 or weight._steps:
        return NotImplemented
    if weight._stored_as is not None and weight._stored_as.of_rows(1) is None:
        return NotImplemented
    unique, inverse = torch.unique(indices, return_inverse=True)
    numbers = unique.tolist()
    if not numbers or numbers[0] < 0 or numbers[-1] >= weight.shape[0]:
        return NotImplemented  # torch then raises the error
    rows = weight._weights.open().rows(weight.source, numbers, weight.shape[0])
    if rows is None:
        return NotImplemented
    if weight._stored_as is not None and (form := weight._stored_as.of_rows(len(numbers))) is not None:
        values = torch.empty(len(numbers), weight.shape[1], dtype=weight.dtype, device=rows.device)
        form.expand(rows.view(-1), values)
        return values[inverse]
    return rows.to(weight.dtype)[inverse]


StoredTensor.lazy[aten.embedding.default] = _embedding
