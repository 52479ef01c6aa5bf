"""Converts between tensors and what is stored of them: another dtype, or values of 8 or 4 bits with a scale."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch

from nvme_ops.base.native import native

KINDS = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
MAX = 127  #: values of 8 bits are within -127 and 127
_E8M0 = 127  # the exponent that stands for 1
_CHUNK = 1 << 18  # elements that are multiplied at once, in float32, on the CPU
_CHUNK_ELSEWHERE = 1 << 24
_SHORT = (torch.bfloat16, torch.float16)  # of inputs whose products have room for the sums' last bits
FEW = 4  #: inputs for which a product takes less time than expanding a matrix
#: What native code expands to, and calls these dtypes.
NATIVE = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}

#: What belongs to a weight, by how its name ends after that of the weight: scales in compressed-tensors and static FP8,
#: and in FP8 in blocks as in DeepSeek-V3, whose "inverse" scale is the one to multiply by; zero points in
#: compressed-tensors; the layout in bitsandbytes.
_PARTS = {"_scale": "scale", "_scale_inv": "scale", "_zero_point": "zero", "_format": "layout"}
#: Names of what is about activations, and changes no weight.
OF_ACTIVATIONS = (
    "input_scale", "output_scale", "input_zero_point", "output_zero_point", "input_global_scale", "activation_scale",
    "act_scale", "k_scale", "v_scale",
)  # fmt: skip


class WeightFormat(ABC):
    """Computes the values of a tensor from what is stored of it."""

    by_row = False  #: whether each row is made of the same row of what is stored, whatever the others are

    def shape(self, stored: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of the values, given that of what is stored: the same, unless a format says otherwise."""
        return tuple(stored)

    def select(self, index: int) -> WeightFormat:
        """Returns the format of an index of the first of three dimensions: the same, unless a format says otherwise."""
        del index
        return self

    def product(self, stored: torch.Tensor, inputs: torch.Tensor, transposed: bool) -> torch.Tensor | None:
        """Returns ``inputs @ values.T``, made of what is stored of a matrix without its values in memory.

        Sums are made in float32, in another order than torch makes them.

        Args:
            stored: of the matrix.
            inputs: of two dimensions.
            transposed: ``inputs @ values`` is wanted.

        Returns:
            None where expanding it takes less time or memory of its own, or the sums would be less exact.
        """
        del stored, inputs, transposed
        return None

    def of_rows(self, count: int) -> WeightFormat | None:
        """Returns the format of so many rows of a matrix; None if what is stored of a row does not lie together."""
        del count
        return None

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


class Processed(WeightFormat):
    """Stored in another format: its values, in float32 on the CPU, are changed by a function of numpy arrays.

    Args:
        stored_as: the other format.
        stored: shape of its values.
        shape: of those that the function makes.
        function: changes them.
    """

    def __init__(
        self,
        stored_as: WeightFormat,
        stored: Sequence[int],
        shape: Sequence[int],
        function: Callable[[Any], Any],
    ) -> None:
        self._stored_as, self._stored, self._shape, self._function = stored_as, tuple(stored), tuple(shape), function

    def shape(self, stored: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of the values."""
        del stored
        return self._shape

    def expand(self, stored: torch.Tensor, out: torch.Tensor) -> None:
        """Fills ``out`` with the values."""
        values = torch.empty(math.prod(self._stored), dtype=torch.float32, device="cpu")
        self._stored_as.expand(stored.cpu(), values.view(-1, self._stored[-1]))
        made = self._function(values.view(self._stored).numpy())
        out.copy_(torch.from_numpy(made.reshape(self._shape).copy()))


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
        if (matrix := self._matrix(stored)) is not None and out.is_contiguous() and out.dtype in NATIVE:
            native().expand(matrix, stored, 0, out, NATIVE[out.dtype], False, torch.get_num_threads())
            return
        scale = _wide(self.scale, stored)
        zero = None if self.zero is None else _wide(self.zero, stored)
        rows = stored.shape[0] // scale.shape[0]
        for part in parts_of(stored):
            of_part = torch.arange(part.start, part.stop, device=scale.device) // rows
            values = stored[part].float()
            if zero is not None:
                values -= zero[of_part]
            out[part] = values.mul_(scale[of_part])

    def product(self, stored: torch.Tensor, inputs: torch.Tensor, transposed: bool) -> torch.Tensor | None:
        """Returns the product of a matrix and a few inputs; see ``WeightFormat``."""
        matrix = None if transposed or stored.dim() != 2 else self._matrix(stored)
        return None if matrix is None else multiplied([matrix], stored, len(stored), inputs)

    def _matrix(self, stored: torch.Tensor) -> tuple[Any, ...] | None:
        """Returns how native code finds the values of a matrix, or of several of one size; None if it cannot."""
        *matrices, rows, columns = stored.shape if stored.dim() in (2, 3) else (0, 0)
        *of_matrices, of_rows, groups = self.scale.shape
        one = [1] * len(matrices)
        if (
            stored.device.type != "cpu"
            or not stored.numel()
            or of_matrices not in (matrices, one if of_rows == 1 else matrices)
        ):
            return None
        count = math.prod(matrices)
        rows_of_scale = rows // of_rows if of_matrices == matrices else count * rows
        sizes = (count * rows, columns, columns // groups, rows_of_scale)
        numbers = {torch.int8: "int8", torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}[stored.dtype]
        return numbers, "float32", *sizes, 1.0, None, self.scale, self.zero, 0, 0, None, False, False


def are_few(inputs: torch.Tensor) -> bool:
    """Returns whether inputs are of 16 bits, in CPU memory, and so few that products with them are worth while."""
    return inputs.device.type == "cpu" and inputs.dtype in _SHORT and 0 < inputs.shape[0] <= FEW


def multiplied(
    matrices: Sequence[tuple[Any, ...]],
    stored: torch.Tensor,
    width: int,
    inputs: torch.Tensor,
    by_columns: bool = False,
) -> torch.Tensor | None:
    """Returns the products of a few inputs of 16 bits and stored matrices in CPU memory, side by side; else None.

    Args:
        matrices: what native code needs to know of them.
        stored: what is stored of all.
        width: sums for each input: rows of the matrices, or columns.
        inputs: have a value for each column, or row, and are at most ``FEW``.
        by_columns: whether the matrices are transposed, which those with numbers in words can be.
    """
    if not are_few(inputs):
        return None
    out = torch.empty(len(inputs), width, dtype=inputs.dtype, device="cpu")
    native().multiply(matrices, stored, inputs, out, NATIVE[inputs.dtype], torch.get_num_threads(), by_columns)
    return out


def _wide(factor: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
    """Returns a factor for each column of ``stored``, on its device."""
    factor = factor.to(stored.device)
    for dim in range(1, factor.dim()):
        if factor.shape[dim] > 1:
            factor = factor.repeat_interleave(stored.shape[dim] // factor.shape[dim], dim)
    return factor


def part_of(name: str) -> tuple[str, str]:
    """Returns of which weight a tensor of this name may be a part, and which: its scale, zero or layout; else ""."""
    module, _, last = name.rpartition(".")
    if last in ("SCB", "scale"):  # bitsandbytes' LLM.int8(), and DeepSeek-V4
        return f"{module}.weight", "scale"
    return next(((name.removesuffix(end), part) for end, part in _PARTS.items() if name.endswith(end)), ("", ""))


def powers_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """Returns what exponents in E8M0 stand for, in float32."""
    return torch.exp2(exponents.float() - _E8M0).masked_fill_(exponents == 255, torch.nan)


def read_scale(name: str, stored: torch.Tensor, shape: Sequence[int], blocks: Sequence[int] = ()) -> torch.Tensor:
    """Returns what a stored scale says, in float32, with as many dimensions as its weight; its sizes divide those.

    Args:
        name: of the scale.
        stored: one factor for all, one for each row, or one for each block of the weight, of which the last ones may be
            short. As uint8 it holds exponents (E8M0: 127 stands for 1, 255 for NaN).
        shape: of the weight.
        blocks: sizes of the blocks, in the last dimensions, that the configuration names. Those of which the scale has
            another number are inferred: blocks of the size of a power of two, else all of one size; groups of a row
            are of one size if they can be.

    Raises:
        ValueError: there are no such blocks.
    """
    scale = powers_of_two(stored) if stored.dtype == torch.uint8 else stored.float()
    if name.endswith("SCB"):
        scale = scale / MAX
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
    are_groups = scale.shape[:-1] == tuple(shape[:-1])  # of a row, all of one size
    for dim, size in enumerate(shape):
        if (count := scale.shape[dim]) > 1:
            even = size // count if are_groups and size % count == 0 else 0
            likely = [named.get(dim, 0), even, *(1 << power for power in range(16)), size // count]
            block = next((length for length in likely if length and -(-size // length) == count), 0)
            if block == 0:
                raise wrong
            step = math.gcd(size, block)
            scale = scale.repeat_interleave(block // step, dim).narrow(dim, 0, size // step)
    return scale


def parts_of(tensor: torch.Tensor) -> list[slice]:
    """Returns slices of the first dimension with elements to be multiplied at once."""
    rows, most = tensor.shape[0], _CHUNK if tensor.device.type == "cpu" else _CHUNK_ELSEWHERE
    step = max(1, most * rows // max(1, tensor.numel()))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]
