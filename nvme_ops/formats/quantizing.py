"""Packs tensors in 8 or 4 bits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from nvme_ops.formats import Kind
from nvme_ops.formats.packed import E2M1, INT4, MatrixLayout, Packed
from nvme_ops.formats.quantized import MAX, Scaled, WeightFormat, parts_of

_GROUP = 32  # numbers of a scale, in 4 bits
_LARGEST = 7.5  # half of what integers of 4 bits span, by which compressed-tensors divides as well
_EXPONENT = 2  # of the largest power of two in E2M1
_LIMITS = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))
"""Between the numbers of E2M1 that follow each other, and whether the upper one is taken there: it is the even one."""


def quantize(
    tensor: torch.Tensor, dtype: torch.dtype = torch.int8, dim: int = -1, name: str = "a weight"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a tensor in 8 bits, and the scale of each row: its largest absolute value over 127, in float32.

    As int8 each value is off by at most half the scale of its row. Raises ValueError for values that are not finite.

    Args:
        tensor: of values.
        dtype: int8, or a floating one, whose largest value takes the place of 127.
        dim: along which a row lies.
        name: of the values, in the error.
    """
    largest = tensor.detach().abs().amax(dim, keepdim=True).float()
    if not bool(largest.isfinite().all()):
        raise ValueError(f"{name} that is not finite cannot be quantized")
    most = torch.finfo(dtype).max if dtype.is_floating_point else MAX
    scale = (largest / most).clamp(min=torch.finfo(torch.float32).tiny)
    values = torch.empty(tensor.shape, dtype=dtype, device=tensor.device)
    for part in parts_of(tensor):
        scaled = tensor[part].detach().float() / scale[part]
        values[part] = (scaled if dtype.is_floating_point else scaled.round_()).to(dtype)
    return values, scale


def packed_as(kind: Kind, tensor: torch.Tensor) -> tuple[torch.Tensor, WeightFormat] | None:
    """Returns what is to be stored of a matrix, or of several, and its format; None if it cannot be stored so.

    Args:
        kind: ``"int8"``, a scale for each row; ``"int4"``, one in bfloat16 for each 32 of a row, as compressed-tensors
            has them; ``"mxfp4"``, E2M1 with an exponent for each 32 of a row (OCP Microscaling Formats 1.0, 6.3).
        tensor: of two or more dimensions; in 4 bits of two or three, the last a multiple of 32.

    Raises:
        ValueError: a value is not finite.
    """
    if kind == "int8":
        values, scale = quantize(tensor)
        return values, Scaled(scale)
    if tensor.dim() not in (2, 3) or tensor.shape[-1] % _GROUP:
        return None
    rows, columns = tensor.shape[-2:]
    layout = _layout(kind, rows, columns)
    matrices = tensor.detach().reshape(-1, rows, columns)
    stored = torch.empty(len(matrices), layout.nbytes, dtype=torch.uint8, device=tensor.device)
    for matrix, to in zip(matrices, stored, strict=True):
        numbers, scale, *_ = to.split(list(layout.sizes))
        numbers, scale = numbers.view(rows, -1), scale.view(rows, -1)
        for part in parts_of(matrix):
            groups = _groups(kind, matrix[part])
            made = _scales(kind, groups)
            numbers[part] = _numbers(kind, groups, made)
            scale[part] = made.view(torch.uint8).view(len(groups), -1)
    count = None if tensor.dim() == 2 else len(matrices)
    return (stored[0] if count is None else stored), Packed([layout], [(1.0,)] * len(matrices), count)


def packed_bytes(kind: Kind, shape: Sequence[int]) -> int | None:
    """Returns the bytes that ``packed_as`` stores of a matrix, or of several, of this shape; None if it stores none."""
    if kind == "int8":
        return math.prod(shape)
    if len(shape) not in (2, 3) or shape[-1] % _GROUP:
        return None
    return math.prod(shape[:-2]) * _layout(kind, *shape[-2:]).nbytes


class QuantizationError:
    """Adds up by how much packed values are off."""

    def __init__(self) -> None:
        self._of_errors = self._of_values = 0.0  # sums of squares

    def add(self, tensor: torch.Tensor, stored: torch.Tensor, stored_as: WeightFormat) -> None:
        """Compares a tensor with the values of what is stored of it."""
        expanded = torch.empty(tensor.shape, dtype=torch.float32, device=tensor.device)
        stored_as.expand(stored, expanded)
        self._of_errors += float(expanded.sub_(tensor.detach()).pow_(2).sum())
        self._of_values += float(tensor.detach().float().pow(2).sum())

    @property
    def relative(self) -> float:
        """The root mean square error, relative to that of the values."""
        return (self._of_errors / self._of_values) ** 0.5 if self._of_values else 0.0


class CompressedPart(WeightFormat):
    """Makes, of a matrix as it is, one of the tensors that compressed-tensors stores of it: it packs, row by row.

    In 4 bits a scale is for 32 columns, in 8 bits for a row: integers have scales in bfloat16, E2M1 exponents.

    Args:
        kind: in which the matrix is packed.
        end: of the tensor's name, an entry of ``ENDS``.
        name: of the matrix, in errors.
        error: gets the values of all rows, once.
    """

    by_row = True
    ENDS = ("_packed", "_scale")

    def __init__(self, kind: Kind, end: str, name: str, error: QuantizationError) -> None:
        self._kind, self._end, self._name, self._error = kind, end, name, error

    @property
    def dtype(self) -> torch.dtype:
        """That of the tensor."""
        if self._kind == "mxfp4":
            return torch.uint8
        return torch.int32 if self._end == "_packed" else torch.bfloat16

    def shape(self, stored: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of the tensor, given that of the matrix, or of some of its rows."""
        rows, columns = stored
        layout = _layout(self._kind, rows, columns)
        return rows, layout.groups if self._end == "_scale" else layout.sizes[0] // (rows * self.dtype.itemsize)

    def expand(self, stored: torch.Tensor, out: torch.Tensor) -> None:
        """Fills ``out`` with what is to be stored of these rows. Raises ValueError for a value that is not finite."""
        for part in parts_of(stored):
            groups = _groups(self._kind, stored[part])
            try:
                scales = _scales(self._kind, groups)
            except ValueError as error:
                raise ValueError(f"{self._name}: {error}") from None
            if self._end == "_scale":
                out[part] = scales
                continue
            numbers = _numbers(self._kind, groups, scales)
            out[part] = numbers.view(self.dtype)
            packed = torch.cat([numbers.view(-1), scales.view(-1).view(torch.uint8)])
            self._error.add(stored[part], packed, Packed([_layout(self._kind, *stored[part].shape)], [(1.0,)]))


def fits(kind: Kind, shape: Sequence[int]) -> bool:
    """Returns whether compressed-tensors can store a matrix of this shape in whole groups and words."""
    return len(shape) == 2 and shape[0] > 0 and shape[1] > 0 and shape[1] % (4 if kind == "int8" else _GROUP) == 0


def settings_of(kind: Kind, ignored: Sequence[str]) -> dict[str, Any]:
    """Returns the ``quantization_config`` of a model whose linear layers, but the ignored ones, are packed so."""
    weights: dict[str, Any] = {"num_bits": 4, "type": "int", "symmetric": True, "dynamic": False}
    weights |= {"strategy": "group", "group_size": _GROUP}
    name = "pack-quantized"  # also in 8 bits: those in bytes of their own are for activations of 8 bits, too
    if kind == "int8":
        weights |= {"num_bits": 8, "strategy": "channel", "group_size": None}
    elif kind == "mxfp4":
        weights |= {"type": "float", "scale_dtype": "torch.uint8"}
        name = "mxfp4-pack-quantized"
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {**group, "format": name}},
        "ignore": list(ignored),
    }


def _layout(kind: Kind, rows: int, columns: int) -> MatrixLayout:
    if kind == "int8":
        return MatrixLayout("biased8", rows, columns, columns, "bfloat16")
    scales, table = ("e8m0", E2M1) if kind == "mxfp4" else ("bfloat16", INT4)
    return MatrixLayout("low_first", rows, columns, _GROUP, scales, table)


def _groups(kind: Kind, rows: torch.Tensor) -> torch.Tensor:
    """Returns rows in float32, divided into what shares a scale."""
    return rows.float().view(len(rows), -1, rows.shape[1] if kind == "int8" else _GROUP)


def _scales(kind: Kind, groups: torch.Tensor) -> torch.Tensor:
    """Returns the scale of each group, as it is stored."""
    largest = groups.abs().amax(-1)
    if not bool(largest.isfinite().all()):
        raise ValueError("a weight that is not finite cannot be quantized")
    if kind == "mxfp4":
        return ((torch.frexp(largest).exponent - 1 - _EXPONENT).clamp(-127, 127) + 127).to(torch.uint8)
    most = MAX if kind == "int8" else _LARGEST
    return (largest / most).clamp(min=torch.finfo(torch.float32).tiny).bfloat16()


def _numbers(kind: Kind, groups: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of the numbers of each row."""
    if kind == "int8":
        return ((groups / scales.float()[..., None]).round_().clamp_(-MAX, MAX) + 128).to(torch.uint8).flatten(1)
    if kind == "mxfp4":
        scaled = groups * torch.exp2(127 - scales.float())[..., None]
        size = scaled.abs()
        codes = sum((size >= limit if upper else size > limit).to(torch.uint8) for limit, upper in _LIMITS)
        codes = codes | (scaled < 0).to(torch.uint8) << 3
    else:
        codes = ((groups / scales.float()[..., None]).round_().clamp_(-8, 7) + 8).to(torch.uint8)
    pairs = codes.flatten(1)
    return pairs[:, ::2] | (pairs[:, 1::2] << 4)
