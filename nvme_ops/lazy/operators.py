"""Tells which of torch's operators return views, write or take lists, also where their schemas do not say so."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

aten = torch.ops.aten

# What torch's schemas do not say: these return views, and these write to some arguments (in training).
_VIEWS = (aten._unsafe_view.default, aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default)
_WRITES = dict.fromkeys(
    ("aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm"), ("running_mean", "running_var")
)
_RECEIVED = ("tensors", "output", "outputs", "output_tensor", "output_tensors", "output_lists")  # by collectives
# Views that set a bit of the tensor, which code below the dispatcher ignores, and operators that copy their values.
BITS = {aten._conj.default: aten.conj_physical.default, aten._neg_view.default: aten.neg.default}
SHAPE_CHANGES = (aten.resize_.default, aten.resize_as_.default, aten.set_.source_Storage)


@functools.cache
def is_view(func: Any) -> bool:
    """Returns whether an operator returns views and changes nothing."""
    returns = func._schema.returns
    if func in _VIEWS:
        return True
    return bool(returns) and all(result.alias_info is not None and not result.alias_info.is_write for result in returns)


@functools.cache
def writes(func: Any) -> tuple[tuple[int, str, bool], ...]:
    """Returns, for each argument that an operation writes to, its position, its name and whether it is a list."""
    return tuple(
        (number, argument.name, isinstance(argument.type, torch.ListType))
        for number, argument in enumerate(func._schema.arguments)
        if (argument.alias_info is not None and argument.alias_info.is_write)
        or argument.name in _WRITES.get(func._schema.name, ())
        or (argument.name in _RECEIVED and func.namespace == "c10d" and func._schema.name.endswith("_"))
    )


@functools.cache
def has_out(func: Any) -> bool:
    """Returns whether an operation has an ``out=``, which it resizes where the result has another shape."""
    return any(argument.is_out for argument in func._schema.arguments)


def writes_now(func: Any, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Returns whether this call writes to the arguments that ``writes`` names: batch norm only does in training."""
    if func._schema.name not in _WRITES:
        return True
    names = [argument.name for argument in func._schema.arguments]
    return bool({**dict(zip(names, args, strict=False)), **kwargs}["training"])


def members(func: Any, args: Any) -> int:
    """Returns the length of the lists that an operation takes, if it treats each tensor on its own; else 0."""
    named = func._schema.name.startswith(("aten::_foreach_", "aten::_fused_", "aten::_amp_foreach_"))
    if not named or len(func._schema.returns) > 1:
        return 0
    return len(args[0]) if args and isinstance(args[0], list | tuple) else 0


def one_by_one(func: Any, count: int, args: Any, kwargs: Any) -> Any:
    """Runs an operation on lists for one member of each at a time, since all of them may not fit in memory."""
    given = {**dict(zip([argument.name for argument in func._schema.arguments], args, strict=False)), **kwargs}

    def of(name: str, value: Any, number: int) -> Any:
        if isinstance(value, list | tuple) and len(value) == count:
            return [value[number]]
        return value[number : number + 1] if name == "scalars" and isinstance(value, torch.Tensor) else value

    results: list[Any] = []
    for number in range(count):
        result = func(**{name: of(name, value, number) for name, value in given.items()})
        results += result or []
    return results if func._schema.returns else None


def leaves(value: Any) -> Iterator[Any]:
    """Yields the values in nested lists and tuples, the only containers that operators take."""
    for item in value:
        if isinstance(item, list | tuple):
            yield from leaves(item)
        else:
            yield item


def mapped(function: Callable[[Any], Any], values: Any) -> list[Any]:
    """Calls a function with each of ``leaves``; returns the results in lists, nested in the same way."""
    return [mapped(function, value) if isinstance(value, list | tuple) else function(value) for value in values]
