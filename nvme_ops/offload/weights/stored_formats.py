"""Joins the weights of 8 and 4 bits in a model's files with their scales, and refuses what is not understood."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from nvme_ops.formats.quantized import KINDS, OF_ACTIVATIONS, Mxfp4, Scaled, part_of, read_scale
from nvme_ops.offload.weights.stored import StoredTensor, stored_in
from nvme_ops.offload.weights.window import read_now
from nvme_ops.storage.source import concatenated

_SETTINGS = "quantization_config"
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


def with_scales(
    state: Mapping[str, StoredTensor], dtype: torch.dtype, settings: Mapping[str, Any]
) -> dict[str, StoredTensor]:
    """Joins weights of 8 bits with their scales, which are read.

    Args:
        state: the tensors of the files.
        dtype: of the expanded weights.
        settings: of quantization, which may name the sizes of blocks.

    Raises:
        ValueError: a scale does not fit.
    """
    parts: dict[str, dict[str, str]] = {}
    for name in state:
        weight, part = part_of(name)
        if weight in state and state[weight].dtype in KINDS:
            first = parts.setdefault(weight, {}).setdefault(part, name)
            if first != name:
                raise ValueError(f"{weight} has two scales, {first} and {name}")
    parts = {weight: names for weight, names in parts.items() if "scale" in names}
    names = [name for of_weight in parts.values() for name in of_weight.values()]
    values = dict(zip(names, read_now([state[name].source for name in names]), strict=True))
    joined = {name: tensor for name, tensor in state.items() if name not in values}
    blocks = blocks_of(settings)
    for weight, of_weight in parts.items():
        stored, scale, zero = state[weight], of_weight["scale"], None
        if "layout" in of_weight and values[of_weight["layout"]].any():
            raise ValueError(f"{of_weight['layout']}: only weights in the order of their rows can be read")
        factor = read_scale(scale, values[scale], stored.shape, blocks)
        if "zero" in of_weight:
            zero = read_scale(of_weight["zero"], values[of_weight["zero"]].float(), stored.shape, blocks)
            zero = zero.expand_as(factor)
        joined[weight] = StoredTensor(stored._weights, stored.source, dtype, stored.device, Scaled(factor, zero))
    return joined


def with_exponents(state: Mapping[str, StoredTensor], dtype: torch.dtype) -> dict[str, StoredTensor]:
    """Joins numbers of 4 bits with their exponents, both of which stay where they are: weights in MXFP4.

    Raises ValueError for numbers whose shape, or that of their exponents, is another.
    """
    joined = dict(state)
    for name in [key.removesuffix("_blocks") for key in state if key.endswith("_blocks")]:
        numbers, exponents = state[f"{name}_blocks"], state.get(f"{name}_scales")
        if numbers.dtype != torch.uint8:
            continue
        *shape, size = numbers.shape or (0,)
        if exponents is None or exponents.dtype != torch.uint8 or list(exponents.shape) != shape:
            raise ValueError(f"{name}_blocks: there is no {name}_scales of shape {tuple(shape)}, stored as uint8")
        if len(shape) != 3 or size != 16 or not numbers.numel():
            raise ValueError(f"{name}_blocks: MXFP4 has experts, rows, groups and 16 bytes, not {tuple(numbers.shape)}")
        count, rows, groups = shape
        source = concatenated([part.source.view((count, part.numel() // count)) for part in (numbers, exponents)], 1)
        if source is not None:
            del joined[f"{name}_blocks"], joined[f"{name}_scales"]
            joined[name] = StoredTensor(numbers._weights, source, dtype, numbers.device, Mxfp4(rows, 32 * groups))
    return joined


def require_understood(
    joined: Mapping[str, StoredTensor], state: Mapping[str, StoredTensor], settings: Mapping[str, Any]
) -> None:
    """Raises ValueError for a tensor beside a weight of 8 bits which may change what that one stands for.

    Args:
        joined: the tensors after ``with_scales`` and ``with_exponents``.
        state: those before.
        settings: of quantization; if there are any, integers in place of a weight are refused, too, before all missing
            weights are initialized, which takes as much memory as the model.
    """
    narrow = {name for name, tensor in state.items() if tensor.dtype.itemsize == 1 and tensor.dtype != torch.bool}
    for name, tensor in joined.items():
        owner, _, last = name.rpartition(".")
        ends = [len(name) - len(last) + at for at, sign in enumerate(last) if sign == "_"]
        weights = [f"{owner}.weight", owner, *(name[:end] for end in ends)]
        weight = next((key for key in weights if key in narrow and key != name), None)
        if weight is not None and last not in (*OF_ACTIVATIONS, "weight") and not last.endswith("bias"):
            words = f"{name} is not understood, and {weight}, stored as {_dtype(state[weight])}, may need it"
            raise ValueError(words + format_words(settings))
        if settings and tensor.dim() > 1 and tensor.dtype in _PACKED and f"{owner}.weight" not in joined:
            raise ValueError(f"{name}, stored as {_dtype(tensor)}, is not understood{format_words(settings)}")


def require_expanded(model: torch.nn.Module, settings: Mapping[str, Any]) -> None:
    """Raises ValueError for a weight that is computed with as stored, though what is stored are no such numbers."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, value in named:
        stored = stored_in(value)
        if stored is None or isinstance(stored._stored_as, Scaled | Mxfp4) or not stored.dtype.is_floating_point:
            continue
        kind = stored.source.dtype
        if kind.itemsize == 1 or not (kind.is_floating_point or kind.is_complex):
            words = format_words(settings)
            raise ValueError(f"{name} is stored as {_dtype(stored)}, and no scale for it is in the files{words}")


def _dtype(tensor: StoredTensor) -> str:
    return str(tensor.source.dtype).removeprefix("torch.")


def format_words(settings: Mapping[str, Any]) -> str:
    """Returns what a configuration says about the format of the weights, to be added to an error."""
    names = [settings.get(key) for key in ("quant_method", "format", "quant_algo")]
    named = " ".join(str(name) for name in names if name)
    return f"; the files are in the format {named}, known are int8 and float8 with scales, and MXFP4" if named else ""
