"""The formats in which packed weights are published: one row each, of names, and of how the parts lie.

A row says how the name of the numbers ends after that of the weight, which other tensors belong to it by theirs, and
which of these are so small that they are read when the model is opened.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from nvme_ops.formats.packed import E2M1, INT4, MatrixLayout, Packed, scales_in

_WORD = 32  # bits
_SIGNED = (*INT4[8:], *INT4[:8])  # what 4 bits stand for as a signed integer


class Described(Protocol):
    """A tensor of which nothing is read."""

    @property
    def dtype(self) -> torch.dtype:
        """The stored one."""

    @property
    def shape(self) -> Sequence[int]:
        """Of the tensor."""


class Packing(NamedTuple):
    """What a row makes of the tensors of one weight."""

    layout: MatrixLayout  # of each matrix
    stored: list[str]  # names of the parts, in its order
    matrices: int | None = None  # how many there are; None for one that has two dimensions
    divisor: float = 1.0
    transposed: bool = False

    def form(self) -> Packed:
        """Returns how the values are made."""
        return Packed([self.layout], [(self.divisor,)] * (self.matrices or 1), self.matrices, self.transposed)


class PackedFormat(NamedTuple):
    """A format, and how it is recognised."""

    name: str  #: in messages
    numbers: str  #: how the name of the numbers ends
    parts: tuple[str, ...]  #: how the names of the others may end
    small: tuple[str, ...]  #: those of them that are read when the model is opened
    read: Callable[[Mapping[str, Described], Mapping[str, torch.Tensor], Mapping[str, Any]], Packing | None]
    """Returns the packing, given the tensors by the ends of their names, the values of the small ones, and the
    settings of quantization; None if it is another format. Raises ValueError if they do not fit each other."""


def _numbers(parts: Mapping[str, Described], end: str) -> tuple[int | None, int, int]:
    """Returns how many matrices there are, and rows and numbers' columns of each."""
    shape = parts[end].shape
    if len(shape) not in (2, 3) or 0 in shape:
        raise ValueError(f"{end} has shape {tuple(shape)}, not that of a matrix or of several")
    return (None if len(shape) == 2 else shape[0]), shape[-2], shape[-1]


def _scales(parts: Mapping[str, Described], end: str, numbers: str, columns: int) -> tuple[str, int]:
    """Returns how the scales of numbers are stored, and the columns that share one."""
    if end not in parts:
        raise ValueError(f"there is no {end}")
    scale, rows = parts[end], tuple(parts[numbers].shape[:-1])
    kind, groups = scales_in(scale.dtype), scale.shape[-1] if scale.shape else 0
    if kind is None or tuple(scale.shape[:-1]) != rows or not groups or columns % groups:
        dtype = str(scale.dtype).removeprefix("torch.")
        raise ValueError(f"{end}, {dtype} of shape {tuple(scale.shape)}, fits no {rows} rows of {columns} values")
    return kind, columns // groups


def _last(values: Mapping[str, torch.Tensor], end: str, most: int) -> float:
    """Returns the last number, of as many as there may be."""
    if not 0 < values[end].numel() <= most:
        raise ValueError(f"{end} has {values[end].numel()} numbers")
    return float(values[end].flatten()[-1])


def _compressed_tensors(
    parts: Mapping[str, Described], values: Mapping[str, torch.Tensor], settings: Mapping[str, Any]
) -> Packing | None:
    """FP4 with one or two levels of scales, and integers of 4 or 8 bits in words."""
    del settings
    count, rows, width = _numbers(parts, "_packed")
    dtype = parts["_packed"].dtype
    if dtype == torch.uint8:
        kind, group = _scales(parts, "_scale", "_packed", 2 * width)
        divisor = _last(values, "_global_scale", 1) if "_global_scale" in values else 1.0
        if not 0 < divisor < math.inf:
            raise ValueError(f"_global_scale is {divisor}")
        return Packing(
            MatrixLayout("low_first", rows, 2 * width, group, kind, E2M1), ["_packed", "_scale"], count, divisor
        )
    if dtype != torch.int32:
        return None
    columns = int(_last(values, "_shape", 3)) if "_shape" in values else width * (_WORD // 4)
    bits = next((bits for bits in (4, 8) if columns > 0 and -(-columns * bits // _WORD) == width), None)
    if bits is None or columns * bits % _WORD:
        raise ValueError(f"rows of {width} words of 32 bits are no {columns} integers of 4 or 8 bits")
    kind, group = _scales(parts, "_scale", "_packed", columns)
    order = values.get("_g_idx", torch.tensor([-1]))  # -1: there is none
    if -1 not in order and not torch.equal(order.int(), torch.arange(columns).int() // group):
        raise ValueError("groups in the order of activations (actorder) cannot be read")
    zeros = 0
    if (zero := parts.get("_zero_point")) is not None:
        zeros, shape = bits, (*parts["_packed"].shape[:-2], -(-rows * bits // _WORD), columns // group)
        if (zero.dtype, tuple(zero.shape)) != (torch.int32, shape):
            raise ValueError(f"_zero_point, {zero.dtype} of shape {tuple(zero.shape)}, is no int32 of shape {shape}")
    numbers, table = ("low_first", INT4) if bits == 4 else ("biased8", None)
    least = -(1 << (bits - 1))  # as in the integers, whose middle one is zero
    layout = MatrixLayout(numbers, rows, columns, group, kind, table, zeros, least)
    stored = ["_packed", "_scale", *(["_zero_point"] if zeros else [])]
    return Packing(layout, stored, count)


def _gpt_oss(
    parts: Mapping[str, Described], values: Mapping[str, torch.Tensor], settings: Mapping[str, Any]
) -> Packing | None:
    """MXFP4 of transposed matrices, as blocks of 16 bytes."""
    del values, settings
    numbers, scales = parts["_blocks"], parts.get("_scales")
    if numbers.dtype != torch.uint8:
        return None
    *shape, size = numbers.shape or (0,)
    if scales is None or scales.dtype != torch.uint8 or list(scales.shape) != shape:
        raise ValueError(f"there is no _scales of shape {tuple(shape)}, stored as uint8")
    if len(shape) != 3 or size != 16 or 0 in shape:
        raise ValueError(f"MXFP4 has experts, rows, groups and 16 bytes, not {tuple(numbers.shape)}")
    count, rows, groups = shape
    return Packing(
        MatrixLayout("low_first", rows, 32 * groups, 32, "e8m0", E2M1), ["_blocks", "_scales"], count, transposed=True
    )


def _deepseek(
    parts: Mapping[str, Described], values: Mapping[str, torch.Tensor], settings: Mapping[str, Any]
) -> Packing | None:
    """MXFP4 in bytes that are called int8, beside FP8, as which the whole is declared."""
    del values
    is_declared = settings.get("quant_method") == "fp8"
    end = next((end for end in (".scale", ".weight_scale_inv") if end in parts), None)
    if not is_declared or parts[".weight"].dtype != torch.int8 or end is None:
        return None
    count, rows, width = _numbers(parts, ".weight")
    kind, group = _scales(parts, end, ".weight", 2 * width)
    return Packing(MatrixLayout("low_first", rows, 2 * width, group, kind, E2M1), [".weight", end], count)


_NESTED = 256  # scales of bitsandbytes that share one
_STATES = (".weight.quant_state.bitsandbytes__nf4", ".weight.quant_state.bitsandbytes__fp4")  # as bytes of JSON
_TABLES = (".weight.quant_map", ".weight.nested_quant_map", *_STATES)


def _bitsandbytes(
    parts: Mapping[str, Described], values: Mapping[str, torch.Tensor], settings: Mapping[str, Any]
) -> Packing | None:
    """NF4 and FP4 in blocks of the flattened matrix, whose scales may be in 8 bits with scales of their own."""
    state = next((values[end] for end in _STATES if end in values), None)
    if state is None:
        return None
    _require_method(settings, "bitsandbytes")
    try:
        said = json.loads(bytes(state.tolist()))
        (rows, columns), block = said["shape"], said["blocksize"]
        least, nested = float(said.get("nested_offset", 0)), said.get("nested_blocksize", _NESTED)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"its quant_state cannot be read: {error!r}") from None
    sizes = (rows, columns, block)
    if any(type(size) is not int or size < 1 for size in sizes) or block % 2 or nested != _NESTED:
        raise ValueError(f"its quant_state has shape {rows} x {columns} and blocks of {block} and {nested}")
    count, blocks = rows * columns, -(-rows * columns // block)
    _require_size(parts, ".weight", count // 2, in_bytes=True)
    _require_size(parts, ".weight.absmax", blocks)
    stored, kind, scale_table = [".weight", ".weight.absmax"], scales_in(parts[".weight.absmax"].dtype), None
    if kind == "e8m0":  # bytes, which here are not exponents
        _require_size(parts, ".weight.nested_absmax", -(-blocks // _NESTED), torch.float32)
        stored, kind = [*stored, ".weight.nested_absmax"], "nested"
        scale_table = _numbers_in(values, ".weight.nested_quant_map", 256)
    if kind not in ("float32", "bfloat16", "float16", "nested") or count % 2 or not math.isfinite(least):
        raise ValueError(f".weight.absmax is stored as {parts['.weight.absmax'].dtype}, of {count} numbers")
    width = columns if columns % block else 0  # then blocks go on in the next row
    if width:
        rows, columns = (count // block, block) if count % block == 0 else (1, count)
    table = _numbers_in(values, ".weight.quant_map", 16)
    layout = MatrixLayout("high_first", rows, columns, block, kind, table, scale_table=scale_table, width=width)
    return Packing(layout, stored, None, least if kind == "nested" else 1.0)


def _require_method(settings: Mapping[str, Any], *known: str) -> None:
    """Raises ValueError if the settings say that it is another format."""
    if (method := settings.get("quant_method")) not in (None, *known):
        raise ValueError(f"is packed as in {known[0]}, and quantization_config says {method!r}")


def _require_size(
    parts: Mapping[str, Described], end: str, count: int, dtype: torch.dtype | None = None, in_bytes: bool = False
) -> None:
    """Raises ValueError if a part has not so many elements, or bytes."""
    if end not in parts:
        raise ValueError(f"there is no {end}")
    part = parts[end]
    has = math.prod(part.shape) * (part.dtype.itemsize if in_bytes else 1)
    if has != count or part.dtype != (dtype or part.dtype):
        unit = "bytes" if in_bytes else "elements"
        raise ValueError(f"{end}, {part.dtype} of shape {tuple(part.shape)}, has not the {count} {unit} that it needs")


def _numbers_in(values: Mapping[str, torch.Tensor], end: str, count: int) -> tuple[float, ...]:
    """Returns a table of so many numbers, always the same one, which many weights share."""
    table = tuple(values[end].flatten().tolist()) if end in values else ()
    if len(table) != count or not all(map(math.isfinite, table)):
        raise ValueError(f"there is no {end} of {count} finite numbers")
    return _shared(table)


@functools.lru_cache(maxsize=64)
def _shared(table: tuple[float, ...]) -> tuple[float, ...]:
    return table


def _gptq_or_awq(
    parts: Mapping[str, Described], values: Mapping[str, torch.Tensor], settings: Mapping[str, Any]
) -> Packing | None:
    """Integers of the transposed matrix in words, in GPTQ of rows that follow each other, in AWQ of columns."""
    del values
    shapes = {end: tuple(parts[end].shape) if end in parts else () for end in (".qweight", ".scales", ".qzeros")}
    if any(len(shape) != 2 or 0 in shape for shape in shapes.values()):
        raise ValueError(f"there must be matrices .qweight, .scales and .qzeros, and there are {shapes}")
    (height, width), (groups, columns), (of_zeros, words) = shapes.values()
    kind, bits = scales_in(parts[".scales"].dtype), _WORD * words // columns
    if (
        kind not in ("float32", "bfloat16", "float16")
        or {parts[end].dtype for end in (".qweight", ".qzeros")} != {torch.int32}
        or of_zeros != groups
        or _WORD * words != bits * columns
        or width not in (columns, words)
    ):
        raise ValueError(f".qweight, .scales and .qzeros do not fit each other: {shapes}, {parts['.scales'].dtype}")
    is_gptq = width == columns
    _require_method(settings, "gptq" if is_gptq else "awq")
    dynamic = settings.get("dynamic")  # of GPTQModel: what is otherwise in some modules
    changes = list(dynamic.values()) if isinstance(dynamic, dict) else []
    each = [settings, *({**settings, **change} for change in changes if isinstance(change, dict))]
    if bits not in ((4, 8) if is_gptq else (4,)) or all(one.get("bits", bits) != bits for one in each):
        raise ValueError(f"has integers of {bits} bits, {settings.get('bits')} in quantization_config; 4 can be read")
    known = ("gptq", "gptq_v2") if is_gptq else ("gemm",)
    keys = ("checkpoint_format" if is_gptq else "version", "format")
    form = next((str(settings[key]).lower() for key in keys if settings.get(key)), known[0])
    if "quant_method" not in settings or form not in known:
        raise ValueError(f"is {settings.get('quant_method')} of format {form}; known are {', '.join(known)}")
    rows = height * _WORD // bits if is_gptq else height
    sizes = [one.get("group_size", -1) for one in each]
    likely = {-(-rows // groups) if not isinstance(size, int) or size < 1 else min(size, rows) for size in sizes}
    fitting = [size for size in likely if -(-rows // size) == groups]
    if len(fitting) != 1:
        said = " or ".join(map(str, sizes))
        raise ValueError(f"{groups} groups do not divide {rows} rows into groups of {said}, as in quantization_config")
    stored = [".qweight", ".scales", ".qzeros"]
    if ".g_idx" in parts:
        _require_size(parts, ".g_idx", rows, torch.int32)
        stored.append(".g_idx")
    numbers = f"stacked{bits}" if is_gptq else "even_first"
    least = int(is_gptq and form == "gptq")  # zero points are stored less one
    layout = MatrixLayout(numbers, rows, columns, 1, kind, None, bits, least, fitting[0], ".g_idx" in parts)
    return Packing(layout, stored, None, transposed=True)


def _torchao(
    parts: Mapping[str, Described], values: Mapping[str, torch.Tensor], settings: Mapping[str, Any]
) -> Packing | None:
    """Integers of 4 bits, to which a number of the same dtype as their scale is added."""
    del values
    zero = parts.get(".weight_zero_point")
    if settings.get("quant_method") != "torchao" or zero is None or not zero.dtype.is_floating_point:
        return None
    count, rows, width = _numbers(parts, ".weight")
    if (scale := parts.get(".weight_scale")) is None:
        raise ValueError("there is no .weight_scale")
    kind, groups = scales_in(scale.dtype), scale.shape[-2] if len(scale.shape) > 1 else 0
    first = () if count is None else (count,)
    if (
        parts[".weight"].dtype not in (torch.int8, torch.uint8)
        or kind not in ("float32", "bfloat16", "float16")
        or any((part.dtype, tuple(part.shape)) != (scale.dtype, (*first, groups, rows)) for part in (scale, zero))
        or not groups
        or 2 * width % groups
    ):
        shapes = [f"{end} {part.dtype} {tuple(part.shape)}" for end, part in parts.items()]
        raise ValueError(f"the parts do not fit each other: {', '.join(shapes)}")
    layout = MatrixLayout("low_first", rows, 2 * width, 2 * width // groups, kind, _SIGNED, added=True)
    return Packing(layout, [".weight", ".weight_scale", ".weight_zero_point"], count)


#: In the order in which they are tried.
FORMATS = (
    PackedFormat(
        "mxfp4-, nvfp4- and pack-quantized of compressed-tensors",
        "_packed",
        ("_scale", "_global_scale", "_zero_point", "_shape", "_g_idx"),
        ("_global_scale", "_shape", "_g_idx"),
        _compressed_tensors,
    ),
    PackedFormat("MXFP4 as in gpt-oss", "_blocks", ("_scales",), (), _gpt_oss),
    PackedFormat("MXFP4 as in DeepSeek-V4", ".weight", (".scale", ".weight_scale_inv"), (), _deepseek),
    PackedFormat(
        "NF4 and FP4 of bitsandbytes",
        ".weight",
        (".weight.absmax", ".weight.nested_absmax", *_TABLES),
        _TABLES,
        _bitsandbytes,
    ),
    PackedFormat("GPTQ (4 and 8 bits) and AWQ (gemm)", ".qweight", (".scales", ".qzeros", ".g_idx"), (), _gptq_or_awq),
    PackedFormat("int4 of torchao", ".weight", (".weight_scale", ".weight_zero_point"), (), _torchao),
)
