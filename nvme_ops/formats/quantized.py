"""Converts between tensors and what is stored of them: another dtype, or values of 8 or 4 bits with a scale."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch

KINDS = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
_MAX = 127  # the values are within -127 and 127
_E2M1 = [sign * number for sign in (1, -1) for number in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)]
_MX = 32  # numbers of a scale
_E4M3 = 2.0**8  # what bits of float8_e4m3fn stand for, over what they do in float16, whose exponents begin lower
_E4M3_NAN, _E4M3_COPY = 0x7F << 7, 1 << 14  # magnitude of NaN; a second copy of the sign
_E8M0 = 127  # the exponent that stands for 1
_CHUNK = 1 << 18  # elements that are multiplied at once, in float32, on the CPU
_CHUNK_ELSEWHERE = 1 << 24

#: What belongs to a weight, by how its name ends after that of the weight: scales in compressed-tensors and static FP8,
#: and in FP8 in blocks as in DeepSeek-V3, whose "inverse" scale is the one to multiply by; zero points in
#: compressed-tensors; the layout in bitsandbytes.
_PARTS = {"_scale": "scale", "_scale_inv": "scale", "_zero_point": "zero", "_format": "layout"}
#: Names of what is about activations, and changes no weight.
OF_ACTIVATIONS = (
    "input_scale", "output_scale", "input_zero_point", "output_zero_point", "input_global_scale", "activation_scale",
    "act_scale", "k_scale", "v_scale",
)  # fmt: skip


def quantize(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a tensor as int8, and the scale of each row: its largest absolute value over 127, in float32.

    Each value is off by at most half the scale of its row. Raises ValueError for values that are not finite.
    """
    largest = tensor.detach().abs().amax(dim=-1, keepdim=True).float()
    if not bool(largest.isfinite().all()):
        raise ValueError("a weight that is not finite cannot be quantized")
    scale = (largest / _MAX).clamp(min=torch.finfo(torch.float32).tiny)
    values = torch.empty(tensor.shape, dtype=torch.int8, device=tensor.device)
    for part in _parts(tensor):
        values[part] = (tensor[part].detach().float() / scale[part]).round_().to(torch.int8)
    return values, scale


class WeightFormat(ABC):
    """Computes the values of a tensor from what is stored of it."""

    def shape(self, stored: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of the values, given that of what is stored: the same, unless a format says otherwise."""
        return tuple(stored)

    def select(self, index: int) -> WeightFormat:
        """Returns the format of an index of the first of three dimensions: the same, unless a format says otherwise."""
        del index
        return self

    @abstractmethod
    def expand(self, stored: torch.Tensor, out: torch.Tensor) -> None:
        """Fills ``out`` with the values."""


class Cast(WeightFormat):
    """Stored as values in another dtype."""

    def expand(self, stored: torch.Tensor, out: torch.Tensor) -> None:
        """Fills ``out`` with the values."""
        out.copy_(stored)


class Rearranged(WeightFormat):
    """Stored in another order: the values are a view of what is stored, copied so that they are contiguous.

    Args:
        size: of the view, with all elements that are stored.
        stride: of the view.
        shape: of the values.
    """

    def __init__(self, size: Sequence[int], stride: Sequence[int], shape: Sequence[int]) -> None:
        self._size, self._stride, self._shape = tuple(size), tuple(stride), tuple(shape)

    def shape(self, stored: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of the values."""
        del stored
        return self._shape

    def view(self, shape: Sequence[int]) -> Rearranged:
        """Returns the format of the same values in another shape."""
        return Rearranged(self._size, self._stride, shape)

    def is_by_index(self, stored: Sequence[int]) -> bool:
        """Returns whether each index of the first dimension has the elements stored under that index."""
        first = (stored[0], math.prod(stored[1:]))
        return (self._size[0], self._stride[0]) == first and self._shape[0] == stored[0]

    def select(self, index: int) -> Rearranged:
        """Returns the format of an index of the first dimension."""
        del index
        return Rearranged(self._size[1:], self._stride[1:], self._shape[1:])

    def expand(self, stored: torch.Tensor, out: torch.Tensor) -> None:
        """Fills ``out`` with the values."""
        out.view(self._size).copy_(stored.as_strided(self._size, self._stride))


class Scaled(WeightFormat):
    """Stored as values of 8 bits; they are multiplied by ``scale``, from ``read_scale``, in float32.

    If there are zero points, of the scale's shape, these are subtracted first.
    """

    def __init__(self, scale: torch.Tensor, zero: torch.Tensor | None = None) -> None:
        self.scale, self.zero = scale, zero

    def _mapped(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Scaled:
        return Scaled(function(self.scale), None if self.zero is None else function(self.zero))

    def select(self, index: int) -> Scaled:
        """Returns the part of the scale for an index of packed matrices."""
        return self._mapped(lambda tensor: tensor[index if tensor.shape[0] > 1 else 0])

    def unsqueeze(self, dim: int) -> Scaled:
        """Returns the format of the same values with one more dimension."""
        return self._mapped(lambda tensor: tensor.unsqueeze(dim))

    @staticmethod
    def concatenated(formats: Sequence[Scaled], shapes: Sequence[Sequence[int]], dim: int) -> Scaled:
        """Returns the format of weights of these shapes when they are concatenated."""
        steps = [shape[dim] // scaled.scale.shape[dim] for scaled, shape in zip(formats, shapes, strict=True)]
        least = math.gcd(*steps)
        counts = [math.lcm(*sizes) for sizes in zip(*(scaled.scale.shape for scaled in formats), strict=True)]

        def repeated(scale: torch.Tensor, step: int) -> torch.Tensor:
            for place, count in enumerate(counts):
                times = step // least if place == dim else count // scale.shape[place]
                scale = scale if times == 1 else scale.repeat_interleave(times, place)
            return scale

        scales = [repeated(scaled.scale, step) for scaled, step in zip(formats, steps, strict=True)]
        zero = None
        if any(scaled.zero is not None for scaled in formats):
            zeros = [torch.zeros_like(scaled.scale) if scaled.zero is None else scaled.zero for scaled in formats]
            zero = torch.cat([repeated(tensor, step) for tensor, step in zip(zeros, steps, strict=True)], dim)
        return Scaled(torch.cat(scales, dim), zero)

    def expand(self, stored: torch.Tensor, out: torch.Tensor) -> None:
        """Fills ``out`` with the values."""
        scale = _wide(self.scale, stored)
        zero = None if self.zero is None else _wide(self.zero, stored)
        rows = stored.shape[0] // scale.shape[0]
        for part in _parts(stored):
            of_part = torch.arange(part.start, part.stop, device=scale.device) // rows
            values = _floats(stored[part])
            if zero is not None:
                values -= zero[of_part]
            out[part] = values.mul_(scale[of_part])


def _wide(factor: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
    """Returns a factor for each column of ``stored``, on its device."""
    factor = factor.to(stored.device)
    for dim in range(1, factor.dim()):
        if factor.shape[dim] > 1:
            factor = factor.repeat_interleave(stored.shape[dim] // factor.shape[dim], dim)
    return factor


class Mxfp4(WeightFormat):
    """Stored as MXFP4: numbers of 4 bits (E2M1), each 32 of a row with a scale (E8M0), as in the files of gpt-oss.

    Stored of a matrix are, as uint8, all numbers, two in a byte, the first in its lower half; then all scales. The
    values are those of the transposed matrix, by which transformers multiplies. (OCP Microscaling Formats 1.0.)

    Args:
        rows: of the stored matrix.
        columns: of it; a multiple of 32.
    """

    def __init__(self, rows: int, columns: int) -> None:
        self._rows, self._columns = rows, columns

    def shape(self, stored: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of the transposed matrices."""
        return (*stored[:-1], self._columns, self._rows)

    def expand(self, stored: torch.Tensor, out: torch.Tensor) -> None:
        """Fills ``out`` with the values."""
        groups = self._columns // _MX
        # in float16 a number times its scale may be finite where the scale is not
        dtype, as_one = (out.dtype, torch.int32) if out.dtype == torch.bfloat16 else (torch.float32, torch.int64)
        numbers = torch.tensor(_E2M1, dtype=dtype, device=out.device) * 2  # of halved scales: 2**128 is no float
        pairs = torch.stack([numbers.repeat(16), numbers.repeat_interleave(16)], 1)  # by the byte that holds them
        pairs = pairs.view(as_one).flatten()
        for matrix, values in zip(
            stored.reshape(-1, stored.shape[-1]), out.view(-1, self._columns, self._rows), strict=True
        ):
            bytes_, scales = matrix.split([self._rows * self._columns // 2, self._rows * groups])
            bytes_, scales = bytes_.view(self._rows, -1), scales.view(self._rows, groups, 1)
            for rows in _parts(bytes_):
                made = pairs[bytes_[rows].int()].view(dtype).view(-1, groups, _MX)
                made *= torch.exp2(scales[rows].float() - (_E8M0 + 1)).to(dtype)
                values[:, rows] = made.view(-1, self._columns).T


def part_of(name: str) -> tuple[str, str]:
    """Returns of which weight a tensor of this name may be a part, and which: its scale, zero or layout; else ""."""
    module, _, last = name.rpartition(".")
    if last == "SCB":  # bitsandbytes' LLM.int8()
        return f"{module}.weight", "scale"
    return next(((name.removesuffix(end), part) for end, part in _PARTS.items() if name.endswith(end)), ("", ""))


def read_scale(name: str, stored: torch.Tensor, shape: Sequence[int], blocks: Sequence[int] = ()) -> torch.Tensor:
    """Returns what a stored scale says, in float32, with as many dimensions as its weight; its sizes divide those.

    Args:
        name: of the scale.
        stored: one factor for all, one for each row, or one for each block of the weight, of which the last ones may be
            short. As uint8 it holds exponents (E8M0: 127 stands for 1, 255 for NaN).
        shape: of the weight.
        blocks: sizes of the blocks, in the last dimensions, that the configuration names. Those of which the scale has
            another number are inferred: blocks of the size of a power of two, else all of one size.

    Raises:
        ValueError: there are no such blocks.
    """
    scale = stored.float()
    if stored.dtype == torch.uint8:
        scale = torch.exp2(scale - _E8M0).masked_fill_(stored == 255, torch.nan)
    if name.endswith("SCB"):
        scale = scale / _MAX
    wrong = ValueError(f"{name}: a scale of shape {tuple(stored.shape)} fits no weight of shape {tuple(shape)}")
    if not shape or not scale.numel():
        raise wrong
    if scale.numel() == 1:
        return scale.reshape((1,) * len(shape))
    if scale.dim() == 1 and len(scale) == shape[0]:
        return scale.reshape(-1, *(1,) * (len(shape) - 1))
    if scale.dim() != len(shape):
        raise wrong
    named = dict(zip(range(len(shape) - 1, -1, -1), reversed(blocks), strict=False))
    for dim, size in enumerate(shape):
        if (count := scale.shape[dim]) > 1:
            likely = [named.get(dim, 0), *(1 << power for power in range(16)), size // count]
            block = next((length for length in likely if length and -(-size // length) == count), 0)
            if block == 0:
                raise wrong
            step = math.gcd(size, block)
            scale = scale.repeat_interleave(block // step, dim).narrow(dim, 0, size // step)
    return scale


def expand(values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns ``values`` times ``scale``, as ``Scaled`` does, in new memory."""
    made = torch.empty(values.shape, dtype=dtype, device=values.device)
    Scaled(scale).expand(values, made)
    return made


def _floats(stored: torch.Tensor) -> torch.Tensor:
    """Returns values of 8 bits in float32; float8 by way of float16, as torch converts them one by one on the CPU."""
    if stored.device.type != "cpu" or not stored.is_floating_point():
        return stored.float()
    bits = stored.view(torch.int8).to(torch.int16)
    if stored.dtype == torch.float8_e5m2:  # the upper half of a float16
        return bits.bitwise_left_shift_(8).view(torch.float16).float()
    bits.bitwise_left_shift_(7).bitwise_and_(~_E4M3_COPY)
    if bits.bitwise_and(_E4M3_NAN).max() == _E4M3_NAN:  # which is no NaN as a float16
        return stored.float()
    return bits.view(torch.float16).float().mul_(_E4M3)


def _parts(tensor: torch.Tensor) -> list[slice]:
    """Returns slices of the first dimension with elements to be multiplied at once."""
    rows, most = tensor.shape[0], _CHUNK if tensor.device.type == "cpu" else _CHUNK_ELSEWHERE
    step = max(1, most * rows // max(1, tensor.numel()))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]
