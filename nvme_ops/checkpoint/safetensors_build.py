"""The head of a new safetensors file: what it may hold, and where each tensor will lie."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from json.encoder import encode_basestring
from typing import Any

import torch

from nvme_ops.checkpoint.safetensors_format import MOST_HEADER, NAMES, Entry, Header

_PAGE = 4096


def build(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> Header:
    """Where each tensor will lie: the larger dtypes first, so that all are aligned, and the first on a page.

    Raises:
        ValueError: a dtype or a layout that the format does not have, a header beyond 100 MB.
    """
    described = []
    for name, tensor in tensors.items():
        dtype = tensor.dtype
        if dtype not in NAMES:
            raise ValueError(f"tensor {name!r}: safetensors has no dtype for {dtype}")
        described.append((-dtype.itemsize, name, dtype, tuple(tensor.shape), tensor.nbytes))
    described.sort(key=lambda each: each[:2])
    lines = []
    if metadata:
        lines.append('"__metadata__":' + json.dumps(metadata, separators=(",", ":"), ensure_ascii=False))
    places, position = [], 0
    for _, name, dtype, shape, size in described:
        kind = NAMES[dtype]
        if kind == "F4":
            shape = _halves(name, shape)
        end = position + size
        dimensions = ",".join(map(str, shape))
        lines.append(
            f'{encode_basestring(name)}:{{"dtype":"{kind}","shape":[{dimensions}],"data_offsets":[{position},{end}]}}'
        )
        places.append((name, kind, shape, position, end))
        position = end
    text = ("{" + ",".join(lines) + "}").encode()
    padded = -(-(8 + len(text)) // _PAGE) * _PAGE - 8
    if padded > MOST_HEADER:
        raise ValueError(f"the header would be {padded} bytes long, and readers accept {MOST_HEADER}: too many tensors")
    start = 8 + padded
    entries = {name: Entry(kind, shape, start + first, start + last) for name, kind, shape, first, last in places}
    return Header(entries, dict(metadata), start, text.ljust(padded))


def _halves(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """As the format counts: two in each element of torch's."""
    if not shape:
        raise ValueError(f"tensor {name!r}: the two values of an element need a dimension to lie along")
    return (*shape[:-1], shape[-1] * 2)


def require_tensors(obj: Any) -> Mapping[str, torch.Tensor]:
    """``obj`` as what the format can hold: a flat dictionary of dense tensors that share no memory.

    Raises:
        TypeError: not a dictionary of tensors by name.
        ValueError: a sparse tensor, or tensors that share memory, named.
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
    _require_own_memory(obj)
    return obj


def _require_own_memory(tensors: Mapping[str, torch.Tensor]) -> None:
    """Like safetensors, which refuses what would be stored twice and come back as two."""
    by_storage: dict[tuple[torch.device, int], list[str]] = {}
    for name, tensor in tensors.items():
        if tensor.nbytes:
            by_storage.setdefault((tensor.device, tensor.untyped_storage().data_ptr()), []).append(name)
    for names in by_storage.values():
        areas = sorted((_area(tensors[name]), name) for name in names) if len(names) > 1 else []
        for ((_, end), before), ((begin, _), name) in itertools.pairwise(areas):
            if begin < end:
                raise ValueError(
                    f"tensors {before!r} and {name!r} share memory, which a safetensors file would hold twice: save "
                    "one of them, or a clone, or save as .pt"
                )


def _area(tensor: torch.Tensor) -> tuple[int, int]:
    reach = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.data_ptr()
    return begin, begin + (reach + 1) * tensor.element_size()
