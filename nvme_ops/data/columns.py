"""``Columns``: what a sample consists of, and where each part lies in a record.

A record consists of: for each column of variable size except the last, its size in bytes, a little-endian uint64; the
columns of fixed size; the columns of variable size. Each column begins at a multiple of the size of its elements. If
a store has one unnamed column, its records are just the values.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from nvme_ops.base.errors import FormatError
from nvme_ops.io.tensors import bytes_of

#: ``bytes``, ``str``, a dtype (for numbers), or a dtype and a shape, whose first dimension may be -1: any length.
#: ``int``, ``float`` and ``bool`` are numbers that a sample has as Python's, and a batch as tensors.
Spec: TypeAlias = "type[bytes | str | int | float] | torch.dtype | tuple[torch.dtype, Sequence[int]]"
#: A tensor, a str, or a dict of them by column.
Sample: TypeAlias = Any

_WORD = 8  # bytes of a length
_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64}
_UNNAMED = ""


@dataclass(frozen=True)
class Column:
    """Values of one dtype and shape; ``shape[0]`` is -1 where each sample has its own length."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    text: bool = False  # UTF-8, given and returned as str
    number: bool = False  # returned as Python's

    @property
    def nbytes(self) -> int | None:
        """Bytes in each record; None if they vary."""
        return None if -1 in self.shape else math.prod(self.shape) * self.dtype.itemsize

    @property
    def kind(self) -> str:
        """The name of the dtype."""
        return str(self.dtype).removeprefix("torch.")

    def __str__(self) -> str:
        """Returns for example ``label: int64 []``."""
        return f"{self.name or '(unnamed)'}: {'str' if self.text else f'{self.kind} {list(self.shape)}'}"

    @classmethod
    def of(cls, name: str, spec: Spec) -> Column:
        """Returns the column of a ``spec``. Raises TypeError or ValueError if that is invalid."""
        if spec is bytes or spec is str:
            return cls(name, torch.uint8, (-1,), spec is str)
        if isinstance(spec, type) and spec in _NUMBERS:
            return cls(name, _NUMBERS[spec], (), number=True)
        pair: Any = (spec, ()) if isinstance(spec, torch.dtype) else spec
        try:
            dtype, lengths = pair
            shape = tuple(operator.index(length) for length in lengths)
        except (TypeError, ValueError):
            dtype, shape = None, ()
        if not isinstance(dtype, torch.dtype):
            kinds = "bytes, str, int, float, bool, a dtype, or a dtype and a shape of ints"
            raise TypeError(f"{_words(name)} must be {kinds}, not {spec!r}")
        if any(length < 0 for length in shape[1:]) or (shape and shape[0] < -1):
            raise ValueError(f"{_words(name)}: only the first dimension of {shape} may be -1")
        if math.prod(shape[1:]) == 0 and -1 in shape:
            raise ValueError(f"{_words(name)}: elements of {shape} have no bytes, so their number is not known")
        return cls(name, dtype, shape)

    def packed(self, value: Any) -> memoryview:
        """Returns the bytes of one value. Raises TypeError or ValueError, naming the column."""
        if self.text:
            if not isinstance(value, str):
                raise TypeError(f"{_words(self.name)} needs a str, not {type(value).__name__}")
            try:
                return memoryview(value.encode())
            except UnicodeEncodeError as error:
                raise ValueError(f"{_words(self.name)} cannot hold {value!r}: not UTF-8: {error}") from error
        if isinstance(value, bytes | bytearray | memoryview) and self.dtype == torch.uint8 and len(self.shape) == 1:
            view = memoryview(value)
            view = view.cast("B") if view.nbytes else memoryview(b"")
            if self.nbytes not in (None, len(view)):
                raise ValueError(f"{_words(self.name)} needs {self.nbytes} bytes, not {len(view)}")
            return view
        try:
            tensor = self._tensor_of(value)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise TypeError(f"{_words(self.name)} cannot hold {type(value).__name__}: {error}") from error
        if tensor.layout != torch.strided or tensor.is_nested:
            raise TypeError(f"{_words(self.name)} cannot hold a tensor of layout {tensor.layout}")
        exact = isinstance(value, torch.Tensor)  # numbers and lists of them have no dtype of their own
        if tensor.dtype != self.dtype if exact else tensor.numel() and not torch.can_cast(tensor.dtype, self.dtype):
            raise TypeError(f"{_words(self.name)} needs {self.dtype}, not {tensor.dtype}")
        shape = tuple(tensor.shape)
        if shape != self.shape and (not shape or (-1, *shape[1:]) != self.shape):
            raise ValueError(f"{_words(self.name)} needs the shape {self.shape}, not {shape}")
        made = tensor.to(self.dtype).contiguous().resolve_conj().resolve_neg()
        if not exact and not _fits(tensor, made):
            raise ValueError(f"{_words(self.name)}: {value!r} does not fit {self.dtype}")
        return bytes_of(made)

    def _tensor_of(self, value: Any) -> torch.Tensor:
        if self.dtype == torch.uint64 and not isinstance(value, torch.Tensor):
            try:  # torch makes Python's numbers int64, and cannot convert NumPy's large ones
                return cpu_tensor(value)
            except (OverflowError, RuntimeError, TypeError, ValueError):
                return cpu_tensor(value.tolist() if hasattr(value, "tolist") else value, self.dtype)
        tensor = cpu_tensor(value).detach()
        if not hasattr(value, "dtype") and (tensor.is_floating_point() or tensor.is_complex()):
            # Python's numbers have 64 bits, and torch gives them its default dtype.
            return cpu_tensor(value, torch.complex128 if tensor.is_complex() else torch.float64)
        return tensor

    def unpacked(self, memory: torch.Tensor) -> Any:
        """Returns the value in ``memory``, uint8, as a view of it; a str is a copy."""
        if self.text:
            return bytes(bytes_of(memory)).decode()
        value = memory.view(self.dtype).view(self.shape)
        return value.item() if self.number else value

    def stacked(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns the values in ``rows``, uint8 ``[n, bytes]``, as a view ``[n, *shape]``."""
        return rows.view(self.dtype).view(rows.shape[0], *self.shape)


class Columns:
    """The columns of a store.

    Args:
        given: a spec for each name; a single spec for one unnamed column; None for records of bytes.

    Raises:
        TypeError, ValueError: a name or a spec is invalid.
    """

    def __init__(self, given: Mapping[str, Spec] | Spec | None = None) -> None:
        if isinstance(given, Mapping):
            if not given:
                raise ValueError("columns must not be empty")
            if _UNNAMED in given:
                raise ValueError("each of several columns must have a name")
            for name in given:
                if not isinstance(name, str):
                    raise TypeError(f"the name of a column must be a str, not {name!r}")
            self.all = [Column.of(name, spec) for name, spec in given.items()]
        else:
            self.all = [Column.of(_UNNAMED, bytes if given is None else given)]
        self.given: Mapping[str, Spec] | Spec = bytes if given is None else given
        self.fixed = [column for column in self.all if column.nbytes is not None]
        self.variable = [column for column in self.all if column.nbytes is None]
        self._lengths = max(0, len(self.variable) - 1) * _WORD
        self._places: dict[str, int] = {}
        end = self._lengths
        for column in self.fixed:
            self._places[column.name] = end = _aligned(end, column)
            end += column.nbytes or 0
        self._fixed_bytes = end
        #: Bytes of every record; None if they vary.
        self.record_bytes = None if self.variable else end
        #: Whether samples are values and not dicts.
        self.unnamed = self.all[0].name == _UNNAMED
        #: Records must begin at multiples of this many bytes in memory.
        self.alignment = max(column.dtype.itemsize for column in self.all)

    def packed(self, sample: Sample) -> list[memoryview]:
        """Returns the parts of the sample's record. Raises TypeError, ValueError or KeyError, naming the column."""
        if self.unnamed:
            return [self.all[0].packed(sample)]
        if not isinstance(sample, Mapping) or sample.keys() != {column.name for column in self.all}:
            names = ", ".join(repr(column.name) for column in self.all)
            if not isinstance(sample, Mapping):
                raise TypeError(f"a sample must be a dict of {names}, not {type(sample).__name__}")
            raise KeyError(f"a sample must be a dict of {names}, not of {', '.join(map(repr, sample))}")
        values = {column.name: column.packed(sample[column.name]) for column in self.all}
        parts = [memoryview(len(values[column.name]).to_bytes(_WORD, "little")) for column in self.variable[:-1]]
        end = self._lengths
        for column in [*self.fixed, *self.variable]:
            begin = _aligned(end, column)
            if begin > end:
                parts.append(memoryview(bytes(begin - end)))
            parts.append(values[column.name])
            end = begin + len(values[column.name])
        return parts

    def unpacked(self, record: torch.Tensor) -> Sample:
        """Returns the sample in a record, uint8, as views of it. Raises FormatError for an invalid record."""
        try:
            if self.unnamed:
                return self.all[0].unpacked(record)
            sample = {column.name: column.unpacked(self._part(column, record)) for column in self.fixed}
            end = self._fixed_bytes
            for number, column in enumerate(self.variable):
                begin = _aligned(end, column)
                end = record.numel() if column is self.variable[-1] else begin + _length(record, number)
                if not begin <= end <= record.numel():
                    raise FormatError(f"column {column.name!r} does not fit its record of {record.numel()} bytes")
                sample[column.name] = column.unpacked(record[begin:end])
            return {column.name: sample[column.name] for column in self.all}
        except (RuntimeError, UnicodeDecodeError, TypeError, OverflowError) as error:  # an impossible shape
            raise FormatError(f"a record of {record.numel()} bytes does not hold its columns: {error}") from error

    def stacked(self, rows: torch.Tensor) -> Any:
        """Returns views of records of fixed size, uint8 ``[n, bytes]``: a tensor, or a dict of them by column."""
        parts = {column.name: column.stacked(self._part(column, rows)) for column in self.all}
        return parts[_UNNAMED] if self.unnamed else parts

    def gathered(self, samples: Sequence[Sample]) -> Any:
        """Returns samples by column: a tensor where their size is fixed, else a list."""
        if self.unnamed:
            return _gathered(self.all[0], list(samples))
        return {column.name: _gathered(column, [sample[column.name] for sample in samples]) for column in self.all}

    def _part(self, column: Column, memory: torch.Tensor) -> torch.Tensor:
        begin = self._places[column.name]
        return memory[..., begin : begin + (column.nbytes or 0)]

    def as_json(self) -> list[dict[str, Any]]:
        """Returns what an index keeps about the columns."""
        names = ("name", "shape", "text", "number")
        return [{"dtype": column.kind, **{name: getattr(column, name) for name in names}} for column in self.all]

    @classmethod
    def from_json(cls, given: Sequence[Mapping[str, Any]]) -> Columns:
        """Reverses ``as_json``. Raises ValueError, KeyError, TypeError or AttributeError for anything else."""
        specs: dict[str, Spec] = {}
        for column in given:
            dtype = getattr(torch, column["dtype"])
            spec: Spec = str if column["text"] else (dtype, tuple(int(length) for length in column["shape"]))
            if column.get("number"):
                spec = {stored: kind for kind, stored in _NUMBERS.items()}[dtype]
            specs[str(column["name"])] = spec
        return cls(specs[_UNNAMED]) if list(specs) == [_UNNAMED] else cls(specs)


def _words(name: str) -> str:
    return f"column {name!r}" if name else "a record"


def _fits(given: torch.Tensor, made: torch.Tensor) -> bool:
    """Returns whether the numbers are unchanged, apart from the rounding of floats."""
    if made.is_floating_point() and made.itemsize == 1:  # torch replaces numbers that are too large by the largest one
        return not bool((given.isfinite() & (given.abs() > torch.finfo(made.dtype).max)).any())
    if given.is_floating_point() or given.is_complex() or made.is_complex():
        return not bool((given.isfinite() & ~made.isfinite()).any())
    if made.dtype == torch.uint64 and given.dtype.is_signed and bool((given < 0).any()):
        return False  # converting back would give the same negative numbers
    return torch.equal(made.to(given.dtype), given)


def cpu_tensor(value: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Returns a value as a tensor, on the CPU whatever torch's default device is."""
    flags = getattr(value, "flags", None)  # of a NumPy array
    if flags is not None and not (flags.writeable and flags.c_contiguous):  # torch would warn, or refuse it
        value = value.copy()
    return torch.as_tensor(value, dtype=dtype, device="cpu")


def _gathered(column: Column, values: list[Any]) -> Any:
    if column.nbytes is None:
        return values
    if column.number:
        return torch.tensor(values, dtype=column.dtype, device="cpu")
    return torch.stack(values) if values else torch.empty(0, *column.shape, dtype=column.dtype, device="cpu")


def _aligned(value: int, column: Column) -> int:
    size = column.dtype.itemsize
    return -(-value // size) * size


def _length(record: torch.Tensor, number: int) -> int:
    """Returns the size of a column of variable size, which the record begins with; -1 if it is cut off."""
    part = record[number * _WORD : (number + 1) * _WORD]
    return int.from_bytes(bytes_of(part), "little") if part.numel() == _WORD else -1
