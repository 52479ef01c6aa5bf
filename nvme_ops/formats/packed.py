"""Weights of 4 to 8 bits whose numbers are stored beside their scales: how these lie, and what they stand for."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nvme_ops.base.native import native
from nvme_ops.formats.blocks import BlockLayout
from nvme_ops.formats.quantized import NATIVE, WeightFormat, multiplied, powers_of_two

#: What 4 bits stand for in E2M1 (OCP Microscaling Formats 1.0), and as integers of which the middle one is zero.
E2M1 = tuple(sign * number for sign in (1.0, -1.0) for number in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))
INT4 = tuple(float(number - 8) for number in range(16))

_SCALES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
_NARROW = {torch.float8_e4m3fn: "e4m3", torch.uint8: "e8m0", getattr(torch, "float8_e8m0fnu", None): "e8m0"}
_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2, "e4m3": 1, "e8m0": 1, "nested": 1}
_NESTED = 256  # scales that share one
#: Bits of the numbers that words of 32 bits hold, and how far to shift for each of those that follow each other.
_WORDS = {
    "stacked4": (4, tuple(range(0, 32, 4))),
    "stacked8": (8, tuple(range(0, 32, 8))),
    "even_first": (4, (0, 16, 4, 20, 8, 24, 12, 28)),
}
_CHUNK = 1 << 24  # values that are made at once where torch's operations make them


@dataclass(frozen=True)
class MatrixLayout:
    """How a matrix is packed: the bytes of its numbers, of its scales, of its zero points, and of its rows' groups.

    Attributes:
        numbers: ``"low_first"`` or ``"high_first"``, two numbers of 4 bits in a byte; ``"int8"``; ``"biased8"``, in
            which 128 stands for 0; ``"e4m3"``, ``"e5m2"``. Or in words of 32 bits, whose columns have a scale and a
            zero point each: ``"stacked4"`` and ``"stacked8"``, of rows that follow each other, as in GPTQ;
            ``"even_first"``, of eight columns, the even ones first, as in AWQ.
        rows: of the matrix.
        columns: of it.
        group: columns that share a scale; the last group may be shorter.
        scales: ``"float32"``, ``"bfloat16"``, ``"float16"``, ``"e4m3"``, ``"e8m0"``, exponents of two, or
            ``"nested"``: each byte selects a number, which is multiplied by a scale in float32 of 256 such.
        table: what each number of 4 bits stands for.
        zeros: bits of each zero point, 4 or 8; rows that follow each other share a word of 32 bits, as in
            compressed-tensors, or columns where words hold the numbers, too. 0: there are none.
        least_zero: the zero point that is packed as 0.
        rows_of_scale: rows that share their scales.
        row_groups: whether the groups of the rows are stored: which rows of the scales are theirs, as int32.
        scale_table: what each byte of nested scales selects.
        added: whether scales lie group by group, and as many numbers follow that are added to the products, as in
            torchao's integers of 4 bits.
        width: columns of the values, if groups go on in the next row, so that ``columns`` are others; or 0.
    """

    numbers: str
    rows: int
    columns: int
    group: int
    scales: str
    table: tuple[float, ...] | None = None
    zeros: int = 0
    least_zero: int = 0
    rows_of_scale: int = 1
    row_groups: bool = False
    scale_table: tuple[float, ...] | None = None
    added: bool = False
    width: int = 0

    @property
    def groups(self) -> int:
        """Scales of a row."""
        return -(-self.columns // self.group)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the values."""
        width = self.width or self.columns
        return self.rows * self.columns // width, width

    @functools.cached_property
    def sizes(self) -> tuple[int, int, int, int]:
        """Bytes of the numbers, the scales, the zero points, and the groups of rows."""
        scales = -(-self.rows // self.rows_of_scale) * self.groups
        words = -(-self.rows * self.zeros // 32) * self.groups
        return (
            self.rows * self.columns // (2 if self._is_short else 1),
            scales * _SIZES[self.scales] * (1 + self.added)
            + (4 * -(-scales // _NESTED) if self.scales == "nested" else 0),
            scales * self.zeros // 8 if self.numbers in _WORDS else 4 * words,
            4 * self.rows if self.row_groups else 0,
        )

    @property
    def is_multiplied(self) -> bool:
        """Whether native code may multiply with the numbers."""
        return not self.width

    @property
    def has_columns(self) -> bool:
        """Whether it may multiply with the transposed matrix, too."""
        return self.numbers in _WORDS and self.columns % 8 == 0 and self.rows_of_scale % 8 == 0

    @property
    def _is_short(self) -> bool:
        return self.table is not None or self.numbers in ("stacked4", "even_first")

    @property
    def words(self) -> str:
        """How many bits a number has, and what its scales are."""
        numbers = self.group if self.numbers not in _WORDS else self.rows_of_scale
        return f"{4 if self._is_short else 8} bits, scales of {self.scales} for {numbers} numbers"

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return sum(self.sizes)

    def matrix(self, divisor: float) -> tuple[Any, ...]:
        """Returns what native code needs to know of a matrix whose scales are divided by ``divisor``.

        Nested scales are not divided: it is added to them.
        """
        sizes = (self.rows, self.columns, self.group, self.rows_of_scale)
        zeros = (self.zeros, self.least_zero)
        return (
            *(self.numbers, self.scales, *sizes, divisor, _table(self.table), None, None, *zeros),
            *(_table(self.scale_table), self.row_groups, self.added),
        )

    def expand(self, stored: torch.Tensor, divisor: float, out: torch.Tensor, transposed: bool) -> None:
        """Fills ``out`` with the values, or with the transposed matrix, by torch's operations."""
        numbers, scales, packed, row_groups = stored.split(list(self.sizes))
        zeros = self._zeros(packed) if self.zeros else None
        scales, *more = scales.chunk(1 + self.added)
        factors, *added = (self._factors(part, divisor) for part in (scales, *more))
        groups = torch.arange(self.rows, device=stored.device) // self.rows_of_scale
        if self.row_groups:
            stored_groups = row_groups.clone().view(torch.int32).long()
            if not 0 <= int(stored_groups.min()) <= int(stored_groups.max()) < len(factors):
                raise ValueError("a row belongs to a group that is not there")
            groups = stored_groups if stored_groups.any() else groups  # of zeros alone: there are none
        step = max(8, _CHUNK // self.columns // 8 * 8)  # whole words of rows
        values_of = out.T if transposed else out.view(self.rows, self.columns)
        for begin in range(0, self.rows, step):
            rows = groups[begin : begin + step]
            values = self._coded(numbers[begin * len(numbers) // self.rows :][: len(rows) * len(numbers) // self.rows])
            values = values.view(len(rows), self.columns)
            if zeros is not None:
                values -= _wide(zeros[rows], self.group, self.columns)
            values *= _wide(factors[rows], self.group, self.columns)
            for part in added:
                values += _wide(part[rows], self.group, self.columns)
            values_of[begin : begin + step] = values

    def _factors(self, stored: torch.Tensor, divisor: float) -> torch.Tensor:
        """Returns the scales in float32, of the rows that have them."""
        if self.added:
            return _factors(stored, self.scales).view(self.groups, -1).T / divisor
        if self.scale_table is None:
            return _factors(stored, self.scales).view(-1, self.groups) / divisor
        count = -(-self.rows // self.rows_of_scale) * self.groups
        nested = stored[count:].clone().view(torch.float32).repeat_interleave(_NESTED)[:count]
        numbers = torch.tensor(self.scale_table, device=stored.device)[stored[:count].int()]
        return (numbers * nested + divisor).view(-1, self.groups)

    def _zeros(self, packed: torch.Tensor) -> torch.Tensor:
        """Returns the zero points in float32, of the rows that have scales."""
        if self.numbers in _WORDS:
            zeros = _from_words(packed, *_WORDS[self.numbers], 1).view(-1, self.columns)
        else:  # words have those of rows that follow each other
            zeros = _from_words(packed, self.zeros, tuple(range(0, 32, self.zeros)), self.groups)
            zeros = zeros.view(-1, self.groups)[: self.rows]
        return zeros + self.least_zero

    def _coded(self, numbers: torch.Tensor) -> torch.Tensor:
        """Returns what rows of numbers stand for, in float32."""
        if self.numbers in _WORDS:
            return _from_words(numbers, *_WORDS[self.numbers], 1 if self.numbers == "even_first" else self.columns)
        if self.table is None:
            if self.numbers == "biased8":
                return numbers.float() - 128
            kinds = {"int8": torch.int8, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
            return numbers.view(kinds[self.numbers]).float()
        table = torch.tensor(self.table, device=numbers.device)
        pairs = [table.repeat(16), table.repeat_interleave(16)]  # by the byte that holds them
        return torch.stack(pairs if self.numbers == "low_first" else pairs[::-1], 1)[numbers.int()]


def scales_in(dtype: torch.dtype) -> str | None:
    """Returns how a ``MatrixLayout`` calls scales of a dtype; None if they are no scales."""
    return _SCALES.get(dtype) or _NARROW.get(dtype)


def _factors(scales: torch.Tensor, kind: str) -> torch.Tensor:
    """Returns scales in float32."""
    if kind == "e8m0":
        return powers_of_two(scales)
    dtypes = {name: dtype for dtype, name in [*_SCALES.items(), (torch.float8_e4m3fn, "e4m3")]}
    return scales.clone().view(dtypes[kind]).float()  # they may begin at any byte


def _wide(factors: torch.Tensor, group: int, columns: int) -> torch.Tensor:
    return factors.repeat_interleave(group, 1)[:, :columns]


def _from_words(packed: torch.Tensor, bits: int, shifts: tuple[int, ...], side_by_side: int) -> torch.Tensor:
    """Returns the integers of words of 32 bits in float32: of so many words side by side the first ones first."""
    words = packed.clone().view(torch.int32).view(-1, 1, side_by_side)
    each = torch.tensor(shifts, dtype=torch.int32, device=packed.device).view(1, -1, 1)
    return ((words >> each) & ((1 << bits) - 1)).float()


class Packed(WeightFormat):
    """Stored as bytes: each matrix is one, or several whose rows follow each other, as their layouts say.

    Args:
        layouts: of the parts of each matrix, whose values have the same columns.
        divisors: of the scales, of each matrix and part; are added to nested ones.
        count: of matrices, the first dimension of what is stored and of the values; None for a single matrix.
        transposed: whether the values are those of the transposed parts.
    """

    def __init__(
        self,
        layouts: Sequence[MatrixLayout | BlockLayout],
        divisors: Sequence[tuple[float, ...]],
        count: int | None = None,
        transposed: bool = False,
    ) -> None:
        self._layouts, self._divisors = tuple(layouts), tuple(divisors)
        self._count, self._transposed = count, transposed
        self._nbytes = sum(layout.nbytes for layout in layouts)

    @functools.cached_property
    def _packed(self) -> list[tuple[tuple[Any, ...] | None, ...]]:
        pairs = [zip(self._layouts, divisors, strict=True) for divisors in self._divisors]
        return [tuple(layout.matrix(divisor) for layout, divisor in pair) for pair in pairs]

    @property
    def words(self) -> str:
        """How many bits a number has, and what its scales are."""
        return self._layouts[0].words

    def shape(self, stored: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of the values."""
        del stored
        first = () if self._count is None else (self._count,)
        return (*first, sum(self._shape(layout)[0] for layout in self._layouts), self._shape(self._layouts[0])[1])

    def _shape(self, layout: MatrixLayout | BlockLayout) -> tuple[int, int]:
        """Returns rows and columns of the values of a part."""
        rows, columns = layout.shape
        return (columns, rows) if self._transposed else (rows, columns)

    def select(self, index: int) -> Packed:
        """Returns the format of one matrix."""
        return Packed(self._layouts, self._divisors[index : index + 1], None, self._transposed)

    def unsqueeze(self, dim: int) -> Packed | None:
        """Returns the format of a matrix as the first of several."""
        one = self._count is None and dim == 0
        return Packed(self._layouts, self._divisors, 1, self._transposed) if one else None

    @staticmethod
    def concatenated(formats: Sequence[Packed], shapes: Sequence[Sequence[int]], dim: int) -> Packed | None:
        """Returns the format of weights when they, and what is stored of them, are concatenated; None if none is."""
        del shapes
        first = formats[0]
        count, transposed = first._count, first._transposed
        if any(other._transposed != transposed for other in formats):
            return None
        if dim == 0 and count is not None:  # more matrices
            if any(other._layouts != first._layouts or other._count is None for other in formats):
                return None
            divisors = [divisor for other in formats for divisor in other._divisors]
            return Packed(first._layouts, divisors, len(divisors), transposed)
        columns = {first._shape(layout)[1] for other in formats for layout in other._layouts}
        if len(columns) > 1 or dim != (count is not None) or any(other._count != count for other in formats):
            return None  # more rows
        layouts = [layout for other in formats for layout in other._layouts]
        divisors = [sum(parts, ()) for parts in zip(*(other._divisors for other in formats), strict=True)]
        return Packed(layouts, divisors, count, transposed)

    def expand(self, stored: torch.Tensor, out: torch.Tensor) -> None:
        """Fills ``out`` with the values."""
        is_native = out.device.type == "cpu" and out.dtype in NATIVE and out.is_contiguous()
        matrices, every = stored.reshape(-1, self._nbytes), out.view(-1, *self.shape(())[-2:])
        for matrix, values, packed, divisors in zip(matrices, every, self._packed, self._divisors, strict=True):
            begin = row = 0
            for layout, one, divisor in zip(self._layouts, packed, divisors, strict=True):
                rows = self._shape(layout)[0]
                part = values[row : row + rows]
                if is_native and isinstance(layout, MatrixLayout) and one is not None:
                    dtype, threads = NATIVE[out.dtype], torch.get_num_threads()
                    native().expand(one, matrix, begin, part, dtype, self._transposed, threads)
                else:
                    layout.expand(matrix[begin : begin + layout.nbytes], divisor, part, self._transposed)
                begin, row = begin + layout.nbytes, row + rows

    def product(self, stored: torch.Tensor, inputs: torch.Tensor, transposed: bool) -> torch.Tensor | None:
        """Returns the product of a matrix and a few inputs; see ``WeightFormat``."""
        matrices = [matrix for matrix in self._packed[0] if matrix is not None]
        by_columns = transposed != self._transposed
        is_split = transposed and len(self._layouts) > 1  # by what would have to be summed
        if self._count is not None or is_split or not all(layout.is_multiplied for layout in self._layouts):
            return None
        if by_columns and not all(isinstance(one, MatrixLayout) and one.has_columns for one in self._layouts):
            return None
        width = sum(layout.shape[by_columns] for layout in self._layouts)
        made = multiplied(matrices, stored, width, inputs, by_columns)
        if made is None:
            return None
        row = 0
        for layout in self._layouts:
            if isinstance(layout, BlockLayout) and layout.order is not None:
                part = made[:, row : row + layout.rows]
                part.index_copy_(1, torch.tensor(layout.order, device=made.device), part.clone())
            row += layout.rows
        return made

    def of_rows(self, count: int) -> Packed | None:
        """Returns the format of so many rows of a matrix; see ``WeightFormat``."""
        layout = self._layouts[0]
        if len(self._layouts) > 1 or self._count is not None or self._transposed or not isinstance(layout, BlockLayout):
            return None
        rows = layout.of_rows(count)
        return None if rows is None else Packed([rows], self._divisors)


@functools.lru_cache(maxsize=64)
def _table(values: tuple[float, ...] | None) -> torch.Tensor | None:
    with torch.inference_mode(False):
        return None if values is None else torch.tensor(values, dtype=torch.float32, device="cpu")
