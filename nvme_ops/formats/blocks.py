"""Blocks of GGUF, in which numbers lie beside their scales: how a matrix of them becomes values.

What the blocks hold is defined by ggml-common.h and ggml-quants.c of https://github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from nvme_ops.base.native import native
from nvme_ops.formats.quantized import NATIVE

#: Kinds that are values as they are.
PLAIN = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

_AT_ONCE = 1 << 20  # values that are made before they are put to their rows; on an accelerator that are made at once
_TWICE_E2M1 = tuple(sign * number for sign in (1.0, -1.0) for number in (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0))


@dataclass(frozen=True)
class BlockLayout:
    """A matrix whose rows are whole blocks.

    Attributes:
        kind: of the blocks, as gguf calls it.
        rows: of the matrix.
        columns: of it.
        values: in a block.
        size: of a block, in bytes.
        order: the row of the values that each stored row is; None: the same.
    """

    kind: str
    rows: int
    columns: int
    values: int
    size: int
    order: tuple[int, ...] | None = None

    @property
    def is_multiplied(self) -> bool:
        """Whether a product with the blocks takes less time than expanding them first."""
        return self.kind in _BLOCKS and self.kind != "MXFP4"

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the values."""
        return self.rows, self.columns

    @property
    def words(self) -> str:
        """What the blocks are."""
        return f"blocks of {self.kind}"

    @property
    def row(self) -> int:
        """Bytes of a row."""
        return self.columns // self.values * self.size

    @property
    def nbytes(self) -> int:
        """Bytes of the matrix."""
        return self.rows * self.row

    def of_rows(self, count: int) -> BlockLayout | None:
        """Returns the layout of so many rows that lie together; None if rows are in another order."""
        return replace(self, rows=count) if self.order is None else None

    def matrix(self, divisor: float) -> tuple[Any, ...] | None:
        """Returns what native code needs to know of it; None if it knows no such blocks."""
        del divisor  # there is none
        if self.kind not in _BLOCKS:
            return None
        sizes = (self.rows, self.columns, self.values, 1)
        return (self.kind.lower(), "none", *sizes, 1.0, None, None, None, 0, 0.0, None, False, False)

    def expand(self, stored: torch.Tensor, divisor: float, out: torch.Tensor, transposed: bool) -> None:
        """Fills ``out`` with the values, or with the transposed matrix."""
        del divisor
        if transposed or self.order is not None or stored.device.type != "cpu":
            step = max(1, _AT_ONCE // self.columns)
            for begin in range(0, self.rows, step):
                count = min(step, self.rows - begin)
                part = replace(self, rows=count, order=None)
                made = torch.empty(count, self.columns, dtype=out.dtype, device=out.device)
                part._fill(stored[begin * self.row :][: part.nbytes], made)
                rows = range(begin, begin + count) if self.order is None else self.order[begin : begin + count]
                (out.T if transposed else out).index_copy_(0, torch.tensor(rows, device=out.device), made)
        else:
            self._fill(stored, out)

    def _fill(self, stored: torch.Tensor, out: torch.Tensor) -> None:
        packed = self.matrix(1.0)
        if packed is not None and out.device.type == "cpu" and out.dtype in NATIVE and out.is_contiguous():
            native().expand(packed, stored, 0, out, NATIVE[out.dtype], False, torch.get_num_threads())
        elif self.kind in PLAIN:
            out.copy_(stored.clone().view(PLAIN[self.kind]).view(out.shape))
        elif packed is not None:
            out.copy_(_BLOCKS[self.kind](stored.view(-1, self.size)).view(out.shape))
        else:
            out.copy_(_by_gguf(self.kind, stored, self.rows))


def _by_gguf(kind: str, stored: torch.Tensor, rows: int) -> torch.Tensor:
    import gguf

    rows_of_bytes = stored.cpu().view(rows, -1).numpy()
    return torch.from_numpy(gguf.dequantize(rows_of_bytes, gguf.GGMLQuantizationType[kind]))


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _halves(numbers: torch.Tensor) -> torch.Tensor:
    """Returns the lower numbers of all bytes, then the upper ones."""
    return torch.cat([numbers & 15, numbers >> 4], -1)


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return blocks[:, 2:].contiguous().view(torch.int8).float() * _half(blocks, 0)


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return (_halves(blocks[:, 2:]).float() - 8) * _half(blocks, 0)


def _mxfp4(blocks: torch.Tensor) -> torch.Tensor:
    table = torch.tensor(_TWICE_E2M1, device=blocks.device)
    return table[_halves(blocks[:, 1:]).int()] * torch.exp2(blocks[:, :1].float() - 128)


def _q4_k(blocks: torch.Tensor, fifth: torch.Tensor | None = None) -> torch.Tensor:
    """Eight groups, each with a scale and a least value of 6 bits, of which four have their upper bits elsewhere."""
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat([first & 63, third & 15 | first >> 6 << 4], 1).float() * _half(blocks, 0)
    least = torch.cat([second & 63, third >> 4 | second >> 6 << 4], 1).float() * _half(blocks, 2)
    numbers = _halves(blocks[:, -128:].view(-1, 4, 32)).view(-1, 8, 32)
    if fifth is not None:
        places = torch.arange(8, dtype=torch.uint8, device=blocks.device)[:, None]
        numbers = numbers | (fifth[:, None] >> places & 1) << 4
    return scales[..., None] * numbers.float() - least[..., None]


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    return _q4_k(blocks, blocks[:, 16:48])


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    low = _halves(blocks[:, :128].view(-1, 2, 64)).view(-1, 2, 4, 32)
    places = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)[:, None]
    numbers = (low | (blocks[:, 128:192].view(-1, 2, 1, 32) >> places & 3) << 4).view(-1, 16, 16).float() - 32
    return blocks[:, 192:208].contiguous().view(torch.int8).float().mul(_half(blocks, 208))[..., None] * numbers


#: Of the kinds that native code knows, too: from bytes of blocks to their values, in float32.
_BLOCKS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Q8_0": _q8_0, "Q4_0": _q4_0, "MXFP4": _mxfp4, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k,
}  # fmt: skip
