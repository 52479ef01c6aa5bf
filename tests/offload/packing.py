"""Packs matrices as the packages of their formats do, which also say what the packed values stand for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

#: Returns tensors by what follows the name of the module, and the values that they stand for.
Pack = Callable[[torch.Tensor], tuple[dict[str, torch.Tensor], torch.Tensor]]

#: What is read of a weight whenever it is used.
PARTS = (
    "weight_packed", "weight_scale", "weight_zero_point", "weight", "weight.absmax", "weight.nested_absmax", "qweight",
    "scales", "qzeros", "g_idx", "_weight_qdata", "_weight_scale", "_weight_zero_point",
)  # fmt: skip
#: Of compressed-tensors: the compressor, and its arguments.
COMPRESSED: dict[str, tuple[str, dict[str, Any]]] = {
    "mxfp4": ("MXFP4PackedCompressor", {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}),
    "nvfp4": ("NVFP4PackedCompressor", {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}),
    "int4": ("PackedQuantizationCompressor", {"num_bits": 4, "strategy": "group", "group_size": 32}),
    "int4 zeros": (
        "PackedQuantizationCompressor",
        {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False},
    ),
    "int4 rows": ("PackedQuantizationCompressor", {"num_bits": 4, "strategy": "channel"}),
    "int8": ("PackedQuantizationCompressor", {"num_bits": 8, "strategy": "group", "group_size": 32}),
    "int8 zeros": ("PackedQuantizationCompressor", {"num_bits": 8, "strategy": "channel", "symmetric": False}),
}

#: Of bitsandbytes: the kind of numbers, their blocks, and whether scales are quantized, too.
BITSANDBYTES = {"nf4": ("nf4", 32, False), "nf4 nested": ("nf4", 64, True), "fp4": ("fp4", 4096, False)}
#: Of GPTQ and AWQ: the settings, and the columns of a group. By their definition, as their packages need a GPU.
IN_WORDS: dict[str, tuple[dict[str, Any], int]] = {
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}, 32),
    "gptq int8": ({"quant_method": "gptq", "bits": 8, "group_size": 16, "desc_act": False}, 16),
    "gptq_v2": ({"quant_method": "gptq", "bits": 4, "group_size": -1, "checkpoint_format": "gptq_v2"}, 0),
    "gptq in the order of activations": ({"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}, 32),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm", "zero_point": True}, 16),
}
PACKINGS = (*COMPRESSED, *BITSANDBYTES, *IN_WORDS, "torchao int4")


def packing(name: str) -> tuple[Pack, dict[str, Any]]:
    """Returns a function that packs in one of PACKINGS, and the settings that say so."""
    if name in COMPRESSED:
        return compressed(name)
    if name == "torchao int4":
        return as_torchao, {"quant_method": "torchao"}
    return bitsandbytes(*BITSANDBYTES[name]) if name in BITSANDBYTES else in_words(*IN_WORDS[name])


def bitsandbytes(kind: str, block: int, nested: bool) -> tuple[Pack, dict[str, Any]]:
    functional = pytest.importorskip("bitsandbytes.functional")

    def pack(value: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        with torch.device("cpu"):
            options = {"quant_type": kind, "blocksize": block, "compress_statistics": nested}
            numbers, state = functional.quantize_4bit(value.cpu(), **options)
            parts = {f"weight.{end}": part for end, part in state.as_dict(packed=True).items()}
            state.shape = (1, value.numel())  # with AVX-512 it takes the scales of others where blocks end within rows
            return {"weight": numbers, **parts}, functional.dequantize_4bit(numbers, state).view_as(value)

    return pack, {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}


def as_torchao(value: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Packs integers of 4 bits with signs in groups of 32 as ``Int4Tensor``, which needs a GPU to be made, has them."""
    groups = value.float().view(len(value), -1, 32)
    least, most = groups.aminmax(dim=-1, keepdim=True)
    scale = ((most - least) / 15).bfloat16()
    zero = (least.float() + 8 * scale.float()).bfloat16()
    numbers = ((groups - zero.float()) / scale.float()).round().clamp(-8, 7)
    pairs = numbers.view(len(value), -1, 2).to(torch.int8)
    parts = {"qdata": (pairs[..., 0] & 15) | (pairs[..., 1] << 4)}
    parts |= {name: part.squeeze(-1).T.contiguous() for name, part in (("scale", scale), ("zero_point", zero))}
    plain = (numbers * scale.float() + zero.float()).view_as(value)
    return {f"_weight_{name}": part for name, part in parts.items()}, plain


def in_words(settings: dict[str, Any], group: int) -> tuple[Pack, dict[str, Any]]:
    bits, is_gptq = settings["bits"], settings["quant_method"] == "gptq"
    of_word = 32 // bits
    in_order = list(range(of_word)) if is_gptq else [0, 2, 4, 6, 1, 3, 5, 7]
    least = int(is_gptq and "checkpoint_format" not in settings)

    def words(numbers: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
        """Packs numbers of rows that follow each other."""
        rows = numbers.long().view(-1, of_word, numbers.shape[1])
        return sum(rows[:, row] << bits * place for place, row in enumerate(order)).to(torch.int32)

    def pack(value: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        columns = value.shape[1]
        size = group or columns
        groups = torch.arange(columns) // size
        if settings.get("desc_act"):
            groups = groups[torch.randperm(columns)]
        matrix = value.T.float()
        largest = torch.stack([matrix[groups == each].abs().amax(0) for each in range(columns // size)])
        scales = (largest / 2 ** (bits - 1)).half()
        zeros = torch.randint(2**bits, scales.shape) + least
        numbers = (matrix / scales[groups].float() + zeros[groups]).round().clamp(0, 2**bits - 1)
        made = {"scales": scales, "qzeros": words((zeros - least).T, in_order).T.contiguous()}
        if is_gptq:
            made |= {"qweight": words(numbers, in_order), "g_idx": groups.int()}
        else:
            made["qweight"] = words(numbers.T, in_order).T.contiguous()
        return made, ((numbers - zeros[groups]) * scales[groups].float()).T.contiguous()

    return pack, settings


def compressed(name: str) -> tuple[Pack, dict[str, Any]]:
    """Returns a function that packs as compressed-tensors does, and the settings that say so."""
    with torch.device("cpu"):  # tables of the package stay in memory
        quantization = pytest.importorskip("compressed_tensors.quantization")
        utils = pytest.importorskip("compressed_tensors.quantization.utils")
        compressors = pytest.importorskip("compressed_tensors.compressors")
    kind, options = COMPRESSED[name]
    compressor = getattr(compressors, kind)
    if name == "mxfp4":
        options = {**options, "scale_dtype": torch.uint8}
    arguments = quantization.QuantizationArgs(**options)
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=arguments)

    def pack(value: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        with torch.device("cpu"):
            return packed(value.cpu())

    def packed(value: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        groups = value.view(value.shape[0], -1, options.get("group_size", value.shape[1]))
        parts, more = {"weight": value}, {}
        if name == "nvfp4":
            more["global_scale"] = parts["weight_global_scale"] = utils.generate_gparam(value.amin(), value.amax())
        scale, zero = utils.calculate_qparams(groups.amin(-1), groups.amax(-1), arguments, **more)
        made = compressor.compress({**parts, "weight_scale": scale, "weight_zero_point": zero}, scheme)
        return made, compressor.decompress(made, scheme)["weight"]

    stored_as = {"mxfp4": "mxfp4-pack-quantized", "nvfp4": "nvfp4-pack-quantized"}.get(name, "pack-quantized")
    weights = {"group_0": {"targets": ["Linear"], "weights": arguments.model_dump(mode="json")}}
    return pack, {"quant_method": "compressed-tensors", "format": stored_as, "config_groups": weights}
