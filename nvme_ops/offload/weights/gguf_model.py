"""Finds, for each weight of a transformers model, where it is in GGUF files, and how it becomes what the model expects.

Names, and what is changed when such a file is written, are those of transformers (``modeling_gguf_pytorch_utils``).
What its functions do with a tensor is found out by numbers of rows in place of values, so that nothing is read.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from nvme_ops.formats.blocks import PLAIN, BlockLayout
from nvme_ops.formats.gguf import GgufHeader, GgufTensor
from nvme_ops.formats.packed import Packed
from nvme_ops.formats.quantized import Processed, WeightFormat
from nvme_ops.offload.weights.stored import StoredTensor, Weights
from nvme_ops.offload.weights.window import read_now
from nvme_ops.storage.source import FileExtent, Source, WeightFile

_FACTORS = "rope_freqs.weight"  # by which frequencies are divided, in models whose configuration had rope_scaling


class GgufWeights(NamedTuple):
    """The weights of a model."""

    tensors: dict[str, StoredTensor]  #: by the model's names
    factors: Source | None  #: of frequencies, which belong to no weight


def dtype_of(headers: Sequence[GgufHeader]) -> torch.dtype:
    """Returns the dtype of most bytes, in which a model computes unless another is asked for; bfloat16 for blocks."""
    sizes: dict[torch.dtype, int] = {}
    for header in headers:
        for tensor in header.tensors.values():
            dtype = PLAIN.get(tensor.kind, torch.bfloat16)
            sizes[dtype] = sizes.get(dtype, 0) + tensor.end - tensor.start
    return max(sizes, key=lambda dtype: sizes[dtype], default=torch.bfloat16)


def gguf_weights(
    files: Sequence[WeightFile],
    headers: Sequence[GgufHeader],
    weights: Weights,
    device: torch.device,
    model: torch.nn.Module,
    dtype: torch.dtype,
) -> GgufWeights:
    """Returns the weights of a model; what the files have beyond these is named in a warning.

    Args:
        files: that hold them.
        headers: of the files.
        weights: the model's.
        device: where it computes.
        model: without values, on the meta device.
        dtype: of the expanded weights.
    """
    from transformers import modeling_gguf_pytorch_utils as conversion

    module: Any = conversion
    architecture = headers[0].fields.get("general.architecture")
    kind = module.TENSOR_PROCESSORS.get(architecture, module.TensorProcessor)
    processor = kind(config=model.config.to_dict())  # type: ignore[operator,union-attr]  # a transformers model
    names: dict[str, str] = module.get_gguf_hf_weights_map(model, processor)
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    made: dict[str, StoredTensor] = {}
    joined: dict[str, dict[int, StoredTensor]] = {}
    unused: list[str] = []
    factors = None
    for file, header in zip(files, headers, strict=True):
        for name, tensor in header.tensors.items():
            extent = FileExtent(file, tensor.start, tensor.end - tensor.start)
            if name == _FACTORS and tensor.kind == "F32":
                factors = Source([extent], torch.float32, tensor.shape)
                continue
            process = functools.partial(_processed, processor, names, name)
            of_model, at, change = _changed(process, tensor, names.get(name), shapes)
            if of_model is None:
                unused.append(name)
                continue
            source, form = _stored(tensor, extent, change, is_part=at is not None)
            one = StoredTensor(weights, source, None if form is None else dtype, device, form)
            if at is None:
                made[of_model] = one
            else:
                joined.setdefault(of_model, {})[at] = one
    for name, parts in joined.items():
        made[name] = torch.cat([part for _, part in sorted(parts.items())], 1)  # type: ignore[assignment]
    if unused:
        listed = ", ".join(unused[:5]) + (" ..." if len(unused) > 5 else "")
        warnings.warn(f"{files[0].path}: transformers' model has no place for {listed}", stacklevel=4)
    return GgufWeights(made, factors)


class _Change(NamedTuple):
    """How stored rows become those of the model."""

    order: tuple[int, ...] | None = None  # the row that each becomes
    transposed: bool = False
    function: Callable[[Any], Any] | None = None  # in place of these, and to this shape:
    shape: tuple[int, ...] = ()


def _processed(processor: Any, names: Mapping[str, str], name: str, values: Any) -> tuple[str | None, Any]:
    """Returns the model's name of a tensor and what it becomes by transformers' functions."""
    parsed: dict[str, Any] = {"tensors": {}}
    with torch.device("cpu"):  # whatever the caller's default is
        made = processor.process(weights=values, name=name, tensor_key_mapping=names, parsed_parameters=parsed)
    if made.name is None:
        return next(((key, value.numpy()) for key, value in parsed["tensors"].items()), (None, None))
    return names.get(made.name), made.weights


def _changed(
    process: Callable[[Any], tuple[str | None, Any]],
    tensor: GgufTensor,
    name: str | None,
    shapes: Mapping[str, tuple[int, ...]],
) -> tuple[str | None, int | None, _Change]:
    """Returns the model's name of a tensor, the row at which it begins if it is a part of that, and how it changes."""
    import numpy as np  # which transformers needs

    shape = tensor.shape if len(tensor.shape) == 1 else (*tensor.shape[:-1], 1)
    rows = np.arange(1, math.prod(shape) + 1, dtype=np.int64).reshape(shape)
    try:
        found, made = process(rows)
    except (ValueError, LookupError):  # it needs whole rows, or has no name for it
        found, made = name, None
    if found is None or found not in shapes:
        return None, None, _Change()
    if made is not None and made.shape == shape and np.array_equal(made, rows):
        return found, None, _Change()
    if made is not None and len(shape) == 3 and made.ndim == 3 and made.shape[::2] == shape[::2]:
        for at in range(0, made.shape[1], shape[1]):
            if np.array_equal(made[:, at : at + shape[1]], rows):
                return found, at, _Change()
    if made is not None and len(shape) == 2 and np.array_equal(np.sort(made.flatten()), rows.flatten()):
        if made.shape == shape:
            return found, None, _Change(order=tuple(np.argsort(made.flatten()).tolist()))
        if made.shape == shape[::-1] and np.array_equal(made, rows.T):
            return found, None, _Change(transposed=True)
    return found, None, _Change(function=lambda values: process(values)[1], shape=shapes[found])


def _stored(
    tensor: GgufTensor, extent: FileExtent, change: _Change, is_part: bool
) -> tuple[Source, WeightFormat | None]:
    """Returns where a tensor is, and how its values are made; None: they are as they are."""
    if change == _Change() and tensor.kind in PLAIN and not is_part:  # parts may be of several kinds
        return Source([extent], PLAIN[tensor.kind], tensor.shape), None
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    values, size = GGML_QUANT_SIZES[GGMLQuantizationType[tensor.kind]]
    count = tensor.shape[0] if len(tensor.shape) == 3 and change.function is None else None
    rows = math.prod(tensor.shape[:-1]) // (count or 1)
    layout = BlockLayout(tensor.kind, rows, tensor.shape[-1], values, size, change.order)
    form: WeightFormat = Packed([layout], [(1.0,)] * (count or 1), count, change.transposed)
    if change.function is not None:
        form = Processed(form, tensor.shape, change.shape, change.function)
    shape = (extent.nbytes,) if count is None else (count, layout.nbytes)
    return Source([extent], torch.uint8, shape), form


def scale_frequencies(model: torch.nn.Module, factors: Source) -> None:
    """Divides the frequencies of rotary embeddings by stored factors, as the file's writer means them."""
    (divisors,) = read_now([factors])
    for module in model.modules():
        frequencies = getattr(module, "inv_freq", None)
        if isinstance(frequencies, torch.Tensor) and getattr(module, "rope_type", "default") == "default":
            if frequencies.shape != divisors.shape:
                raise ValueError(f"{_FACTORS} has shape {tuple(divisors.shape)}, and the model {frequencies.shape}")
            frequencies.div_(divisors.to(frequencies.device))
            original = getattr(module, "original_inv_freq", None)
            if isinstance(original, torch.Tensor) and original is not frequencies:
                original.copy_(frequencies)
