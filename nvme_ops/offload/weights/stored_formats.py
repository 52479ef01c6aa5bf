"""Joins the weights of 8 and 4 bits in a model's files with their scales, and refuses what is not understood."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from nvme_ops.formats.packed import Packed
from nvme_ops.formats.packings import FORMATS, Packing
from nvme_ops.formats.quantized import KINDS, OF_ACTIVATIONS, Processed, Scaled, WeightFormat, part_of, read_scale
from nvme_ops.offload.weights.stored import stored_in
from nvme_ops.offload.weights.window import read_now
from nvme_ops.storage.source import Source, concatenated

_SETTINGS = "quantization_config"
_OF_TORCHAO = "_qdata"  # how the names of its numbers end
_AT_ONCE = 4096  # weights whose small parts are in memory together
_PACKED = (torch.int8, torch.uint8, torch.int16, torch.int32)


def quantization_of(config: Any) -> tuple[Any, dict[str, Any]]:
    """Returns a configuration without settings of quantization, and these: transformers has kernels of its own for it.

    Raises ValueError if they are no settings.
    """
    if all(getattr(part, _SETTINGS, None) is None for part in _with_parts(config)):
        return config, {}
    config = copy.deepcopy(config)
    quantization: Any = None
    for part in _with_parts(config):
        if (settings := getattr(part, _SETTINGS, None)) is not None:
            quantization = settings if quantization is None else quantization
            delattr(part, _SETTINGS)
    quantization = quantization.to_dict() if hasattr(quantization, "to_dict") else quantization
    if not isinstance(quantization, dict):
        raise ValueError(f"{_SETTINGS} must be an object, not {quantization!r}")
    return config, quantization


def _with_parts(config: Any) -> Iterator[Any]:
    yield config
    for name in getattr(config, "sub_configs", None) or ():
        if (part := getattr(config, name, None)) is not None:
            yield from _with_parts(part)


def blocks_of(settings: Mapping[str, Any]) -> Sequence[int]:
    """Returns the sizes of the blocks of a matrix that have a factor each; none if the settings name none.

    Raises ValueError if they are no sizes.
    """
    blocks = settings.get("weight_block_size")
    groups = settings.get("config_groups")  # of compressed-tensors
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if blocks is None and isinstance(weights, dict):
            blocks, size = weights.get("block_structure"), weights.get("group_size")
            if blocks is None and size not in (None, -1):
                blocks = [1, size]
    if blocks is None:
        return ()
    if (
        not isinstance(blocks, list | tuple)
        or len(blocks) != 2
        or any(type(size) is not int or size < 1 for size in blocks)
    ):
        raise ValueError(f"{_SETTINGS}: the size of blocks must be two positive numbers, not {blocks!r}")
    return blocks


class Joined(NamedTuple):
    """Where a weight is stored, with all that belongs to it."""

    source: Source
    stored_as: WeightFormat | None = None  #: how its values are made; None: they are the stored ones


def with_usual_names(sources: Mapping[str, Source]) -> dict[str, Source]:
    """Renames what torchao has called ``_weight_qdata``, ``_weight_scale`` and the like."""
    owners: dict[str, list[str]] = {}
    for name in sources:
        owner, _, last = name.rpartition(".")
        if last.startswith("_") and last.endswith(_OF_TORCHAO):
            owners.setdefault(owner, []).append(last.removesuffix(_OF_TORCHAO[1:]))

    def usual(name: str) -> str:
        owner, _, last = name.rpartition(".")
        begin = next((begin for begin in owners.get(owner, ()) if last.startswith(begin)), None)
        return name if begin is None else f"{owner}.{last[1:]}".removesuffix(_OF_TORCHAO)

    return {usual(name): source for name, source in sources.items()}


def with_scales(weights: Mapping[str, Joined], settings: Mapping[str, Any]) -> dict[str, Joined]:
    """Joins weights of 8 bits with their scales, which are read.

    Args:
        weights: what ``with_packed`` returns.
        settings: of quantization, which may name the sizes of blocks.

    Raises:
        ValueError: a scale does not fit.
    """
    parts: dict[str, dict[str, str]] = {}
    narrow = {name for name, one in weights.items() if one.stored_as is None and one.source.dtype in KINDS}
    for name in weights:
        weight, part = part_of(name)
        if weight in narrow:
            first = parts.setdefault(weight, {}).setdefault(part, name)
            if first != name:
                raise ValueError(f"{weight} has two scales, {first} and {name}")
    parts = {weight: names for weight, names in parts.items() if "scale" in names}
    names = [name for of_weight in parts.values() for name in of_weight.values()]
    values = dict(zip(names, read_now([weights[name].source for name in names]), strict=True))
    joined = {name: one for name, one in weights.items() if name not in values}
    blocks = blocks_of(settings)
    for weight, of_weight in parts.items():
        source, scale, zero = weights[weight].source, of_weight["scale"], None
        if "layout" in of_weight and values[of_weight["layout"]].any():
            raise ValueError(f"{of_weight['layout']}: only weights in the order of their rows can be read")
        factor = read_scale(scale, values[scale], source.shape, blocks)
        if "zero" in of_weight:
            zero = read_scale(of_weight["zero"], values[of_weight["zero"]].float(), source.shape, blocks)
            zero = zero.expand_as(factor)
        joined[weight] = Joined(source, Scaled(factor, zero))
    return joined


def with_packed(sources: Mapping[str, Source], settings: Mapping[str, Any]) -> dict[str, Joined]:
    """Joins packed numbers with their scales, both of which stay where they are.

    Args:
        sources: the tensors of the files.
        settings: of quantization, by which some formats are recognised.

    Raises:
        ValueError: the parts of a weight do not fit each other.
    """
    found = [
        (row, stem, {end: f"{stem}{end}" for end in (row.numbers, *row.parts) if f"{stem}{end}" in sources})
        for row in FORMATS
        for stem in [name.removesuffix(row.numbers) for name in sources if name.endswith(row.numbers)]
    ]
    joined = {name: Joined(source) for name, source in sources.items()}
    values: dict[str, torch.Tensor] = {}
    alike: dict[Any, tuple[Packing, Packed] | None] = {}  # by what is known of all parts, if none of them is read
    for number, (row, stem, names) in enumerate(found):
        if number % _AT_ONCE == 0:
            some = found[number : number + _AT_ONCE]
            small = list({each[end] for other, _, each in some for end in other.small if end in each})
            values = dict(zip(small, read_now([sources[name] for name in small]), strict=True))
        parts = {end: sources[name] for end, name in names.items()}
        is_read = any(end in names for end in row.small)
        key = row.name, stem if is_read else "", *((end, part.dtype, part.shape) for end, part in parts.items())
        if key not in alike:
            try:
                packing = row.read(parts, {end: values[names[end]] for end in row.small if end in names}, settings)
            except ValueError as error:
                raise ValueError(f"{stem}{row.numbers}: {error}") from None
            alike[key] = None if packing is None else (packing, packing.form())
        if (both := alike[key]) is None:
            continue
        packing, form = both
        stored = [parts[end] for end in packing.stored]
        if packing.matrices is None:
            extents = [extent for part in stored for extent in part.extents]
            source: Source | None = Source(extents, torch.uint8, (sum(part.nbytes for part in stored),))
        else:
            count = packing.matrices
            source = concatenated([part.view((count, part.nbytes // count), torch.uint8) for part in stored], 1)
        if source is not None:
            for name in names.values():
                del joined[name]
            weight = f"{stem}.weight" if row.numbers.startswith(".") else stem
            if weight in joined:
                raise ValueError(f"{stem}{row.numbers}: there is a .weight beside it")
            joined[weight] = Joined(source, form)
    return joined


def require_understood(
    joined: Mapping[str, Joined], sources: Mapping[str, Source], settings: Mapping[str, Any]
) -> None:
    """Raises ValueError for a tensor beside a weight of 8 bits which may change what that one stands for.

    Args:
        joined: the tensors after ``with_packed`` and ``with_scales``.
        sources: the tensors before.
        settings: of quantization; if there are any, integers in place of a weight are refused, too, before all missing
            weights are initialized, which takes as much memory as the model.
    """
    transforms = json.dumps(settings.get("transform_config"), default=str)  # of compressed-tensors
    online = [place for place in re.findall(r'"location": "(\w+)"', transforms) if not place.startswith("weight_")]
    if online:
        raise ValueError(
            f"{_SETTINGS}: transforms of activations ({online[0]}) are not computed{format_words(settings)}"
        )
    narrow = {name for name, source in sources.items() if source.dtype.itemsize == 1 and source.dtype != torch.bool}
    for name, (source, stored_as) in joined.items():
        owner, _, last = name.rpartition(".")
        ends = [len(name) - len(last) + at for at, sign in enumerate(last) if sign == "_"]
        weights = [f"{owner}.weight", owner, *(name[:end] for end in ends)]
        weight = next((key for key in weights if key in narrow and key != name), None)
        if weight is not None and last not in (*OF_ACTIVATIONS, "weight") and not last.endswith("bias"):
            words = f"{name} is not understood, and {weight}, stored as {_dtype(sources[weight])}, may need it"
            raise ValueError(words + format_words(settings))
        is_matrix = stored_as is None and len(source.shape) > 1
        is_packed = is_matrix and source.dtype in _PACKED and f"{owner}.weight" not in joined
        divides = last == "scales" and settings.get("quant_method") == "awq"  # what an activation returns
        if settings and (is_packed or divides):
            raise ValueError(f"{name}, stored as {_dtype(source)}, is not understood{format_words(settings)}")


def require_expanded(model: torch.nn.Module, settings: Mapping[str, Any]) -> None:
    """Raises ValueError for a weight that is computed with as stored, though what is stored are no such numbers."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, value in named:
        stored = stored_in(value)
        is_made = stored is not None and isinstance(stored._stored_as, Scaled | Packed | Processed)
        if stored is None or is_made or not stored.dtype.is_floating_point:
            continue
        kind = stored.source.dtype
        if kind.itemsize == 1 or not (kind.is_floating_point or kind.is_complex):
            words = format_words(settings)
            raise ValueError(f"{name} is stored as {_dtype(stored.source)}, and no scale for it is in the files{words}")


def _dtype(source: Source) -> str:
    return str(source.dtype).removeprefix("torch.")


def format_words(settings: Mapping[str, Any]) -> str:
    """Returns what a configuration says about the format of the weights, to be added to an error."""
    names = [settings.get(key) for key in ("quant_method", "format", "version", "checkpoint_format", "quant_algo")]
    named = " ".join(str(name) for name in names if name)
    known = "; ".join(["int8 and float8 with scales", *(packed.name for packed in FORMATS)])
    return f"; the files are in the format {named}, known are {known}" if named else ""
