"""Builds the header of a new safetensors file: which tensors it may hold, and their offsets."""

from __future__ import annotations

import json
from collections.abc import Mapping
from json.encoder import encode_basestring
from typing import Any, NamedTuple

import torch

from nvme_ops._native import native
from nvme_ops.errors import SharedMemoryError
from nvme_ops.formats.safetensors_format import MOST_HEADER, NAMES, Header, TensorEntry
from nvme_ops.offloaded import OffloadedTensor

_PAGE = 4096
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def build(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> Header:
    """Builds a header, larger dtypes first, so that all tensors are aligned, the first one to a page.

    Raises:
        ValueError: a dtype or a layout that the format does not have, a header beyond 100 MB.
    """
    kinds: dict[tuple[torch.dtype, torch.Size], _Kind] = {}
    described = []
    for name, tensor in tensors.items():
        key = tensor.dtype, tensor.shape
        if key not in kinds:
            kinds[key] = _kind(name, *key)
        described.append((kinds[key], name))
    described.sort(key=lambda each: (-each[0].itemsize, each[1]))
    lines = []
    if metadata:
        lines.append('"__metadata__":' + json.dumps(metadata, separators=(",", ":"), ensure_ascii=False))
    places, position = [], 0
    for kind, name in described:
        end = position + kind.size
        lines.append(f"{encode_basestring(name)}:{kind.text}[{position},{end}]}}")
        places.append((name, kind, position, end))
        position = end
    text = ("{" + ",".join(lines) + "}").encode()
    padded = -(-(8 + len(text)) // _PAGE) * _PAGE - 8
    if padded > MOST_HEADER:
        raise ValueError(f"the header would be {padded} bytes long, and readers accept {MOST_HEADER}: too many tensors")
    start = 8 + padded
    entries = {
        name: TensorEntry(kind.dtype, kind.shape, start + first, start + last) for name, kind, first, last in places
    }
    return Header(entries, dict(metadata), text.ljust(padded))


class _Kind(NamedTuple):
    """What tensors of one dtype and shape have in common."""

    itemsize: int
    dtype: str
    shape: tuple[int, ...]
    size: int  # in bytes
    text: str  # in the header, up to the offsets


def _kind(name: str, dtype: torch.dtype, shape: torch.Size) -> _Kind:
    if dtype not in NAMES:
        raise ValueError(f"tensor {name!r}: safetensors has no dtype for {dtype}")
    counted = _halves(name, shape) if NAMES[dtype] == "F4" else tuple(shape)
    dimensions = ",".join(map(str, counted))
    text = f'{{"dtype":"{NAMES[dtype]}","shape":[{dimensions}],"data_offsets":'
    return _Kind(dtype.itemsize, NAMES[dtype], counted, shape.numel() * dtype.itemsize, text)


def _halves(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape as the format counts it: two values in each element of torch's dtype."""
    if not shape:
        raise ValueError(f"tensor {name!r}: the two values of an element need a dimension to lie along")
    return (*shape[:-1], shape[-1] * 2)


def require_tensors(obj: Any) -> Mapping[str, torch.Tensor]:
    """Returns ``obj`` as a flat dictionary of dense tensors that share no memory.

    Raises:
        TypeError: not a dictionary of tensors by name.
        ValueError: a sparse or distributed tensor, or tensors that share memory; named.
    """
    if not isinstance(obj, Mapping):
        raise TypeError(f"safetensors holds a dict of tensors by name, not {type(obj).__name__}: save it as .pt")
    for name, tensor in obj.items():
        if not isinstance(name, str):
            raise TypeError(f"names must be str, not {type(name).__name__}: {name!r}")
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name!r} is a {type(tensor).__name__}, not a tensor: save it as .pt")
        if name == "__metadata__":
            raise ValueError("'__metadata__' is a name that the format keeps for itself")
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"the name {name!r} is not valid Unicode: {error}") from None
        if tensor.layout != torch.strided or tensor.is_meta or tensor.is_nested:
            raise ValueError(f"tensor {name!r} has no dense memory: {tensor.layout}, device {tensor.device}")
        if type(tensor) not in _PLAIN and not isinstance(tensor, OffloadedTensor) and not _has_memory(tensor):
            raise ValueError(
                f"tensor {name!r} is a {type(tensor).__name__}, which has no memory of its own: save what it holds "
                "(a DTensor's full_tensor()), or shards of it with nvme_ops.dcp"
            )
    _require_own_memory(obj)
    return obj


def _has_memory(tensor: torch.Tensor) -> bool:
    try:
        tensor.untyped_storage().data_ptr()
    except RuntimeError:  # a subclass that wraps other tensors
        return False
    return True


def _require_own_memory(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raises for tensors that share memory, as safetensors does: they would be stored and loaded twice."""
    in_memory = {name: each for name, each in tensors.items() if not isinstance(each, OffloadedTensor)}
    shared = native().overlapping(list(in_memory.values()))
    pair = None if shared is None else [list(in_memory)[index] for index in shared]
    places: dict[Any, str] = {}
    for name, each in tensors.items():
        if isinstance(each, OffloadedTensor) and (first := places.setdefault(each.stored_at, name)) is not name:
            pair = pair or [first, name]
    if pair is not None:
        before, name = pair
        raise SharedMemoryError(
            f"tensors {before!r} and {name!r} share memory, which a safetensors file would hold twice: save one of "
            "them, or a clone, or save as .pt"
        )
