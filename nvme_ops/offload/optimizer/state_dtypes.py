"""How elementwise states are stored in fewer bits than an optimizer computes with: bfloat16, or int8 as bitsandbytes.

Native code packs and expands in host memory, torch's operations do elsewhere, to the same bits.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, cast, get_args

import torch

from nvme_ops.base.native import native

StateDtype = Literal["bfloat16", "int8"]

BLOCK = 256  #: states that share a scale in int8
_LEAST = 4096  # elements of a parameter whose states bitsandbytes keeps in int8
_EXPONENT = 0x7F800000  # bits
_PIECE = 1 << 22  # states that are rounded at once by torch's operations
#: The states that can be stored in fewer bits, and whether they have signs. Others are sensitive to small errors: the
#: difference that RMSprop(centered=True) takes the root of may become negative.
_MOMENTS = {
    "exp_avg": True, "momentum_buffer": True, "exp_avg_sq": False, "max_exp_avg_sq": False, "square_avg": False,
    "acc_delta": False, "exp_inf": False, "sum": False,
}  # fmt: skip
_NESTED = "__bnb_optimizer_quant_state__"  # where state dicts of bitsandbytes have its states since 0.46
_OF_BITSANDBYTES = {
    "Adam": ("exp_avg", "exp_avg_sq"), "AdamW": ("exp_avg", "exp_avg_sq"), "Adagrad": ("sum",),
    "RMSprop": ("square_avg",), "SGD": ("momentum_buffer",),
}  # fmt: skip


class Randomness(NamedTuple):
    """A sequence of random numbers, and the place of the first one that is used."""

    key: int
    first: int


def randomness(seed: int, step: int, parameter: int, first: int, state: str) -> Randomness:
    """Returns the numbers by which elements of a parameter's state, from ``first`` on, are rounded in a step.

    They are those of the element in any division into chunks.
    """
    text = f"{seed} {step} {parameter} {state}".encode()
    return Randomness(int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little"), first)


MASTER = "master_weights"  #: the state that has a parameter's value in float32


class Region(NamedTuple):
    """A state with one element for each element of a parameter."""

    name: str
    dtype: torch.dtype
    packing: StatePacking | None = None  #: how it is stored; None: in its dtype

    def nbytes(self, elements: int) -> int:
        """Returns the bytes of so many elements as they are stored."""
        return elements * self.dtype.itemsize if self.packing is None else self.packing.nbytes(elements)

    def expanded(self, elements: int) -> int:
        """Returns the bytes that so many elements need beside those to be computed with."""
        return 0 if self.packing is None else elements * self.dtype.itemsize


class StatePacking(Protocol):
    """How a state of all elements of a chunk is stored: ``stored`` are the bytes, ``place`` elements of a slice."""

    block: ClassVar[int]
    """Elements of which slices have to begin at a multiple."""

    def nbytes(self, elements: int) -> int:
        """Returns the bytes of so many elements, whole blocks."""

    def expand(self, stored: torch.Tensor, place: slice, out: torch.Tensor) -> None:
        """Fills ``out`` with values in float32."""

    def pack(self, values: torch.Tensor, stored: torch.Tensor, place: slice, random: Randomness | None) -> None:
        """Stores values. Without ``random``, what ``expand`` has made becomes the bytes again that it was."""


@dataclass(frozen=True)
class Bfloat16:
    """Rounds stochastically: small changes, of which the nearest values would show none, show on average."""

    block: ClassVar[int] = 1

    def nbytes(self, elements: int) -> int:
        """Returns the bytes of so many elements."""
        return 2 * elements

    def expand(self, stored: torch.Tensor, place: slice, out: torch.Tensor) -> None:
        """See ``StatePacking``."""
        out.copy_(stored.view(torch.bfloat16)[place])

    def pack(self, values: torch.Tensor, stored: torch.Tensor, place: slice, random: Randomness | None) -> None:
        """See ``StatePacking``; without ``random`` it rounds to the nearest."""
        out = stored.view(torch.bfloat16)[place]
        if random is None:
            out.copy_(values)
        elif values.device.type == "cpu":
            native().round_states(values, *random, out, torch.get_num_threads())
        else:
            for at in range(0, values.numel(), _PIECE):
                piece = slice(at, at + _PIECE)
                out[piece].copy_(rounded(values[piece], Randomness(random.key, random.first + at)))


def rounded(values: torch.Tensor, random: Randomness) -> torch.Tensor:
    """Rounds to bfloat16 as native code does, by torch's operations."""
    mask = 0xFFFFFFFF
    numbers = torch.arange(values.numel(), device=values.device).add_(random.first)
    numbers = (numbers * 0x9E3779B9 + random.key) & mask
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):  # lowbias32
        numbers = ((numbers ^ (numbers >> shift)) * factor) & mask
    words = values.view(torch.int32)
    is_finite = (words & _EXPONENT) != _EXPONENT
    raised = (words + (numbers >> 16).int()) >> 16
    return torch.where(is_finite, raised.short().view(torch.bfloat16), values.bfloat16())


class _Map(NamedTuple):
    """256 values in ascending order, the bounds between them, and where to begin to search; see csrc/packed."""

    values: torch.Tensor
    bounds: torch.Tensor
    numbers: torch.Tensor


@functools.cache
def _map(signed: bool, device: torch.device) -> _Map:
    """Returns the map of dynamic exponents and fractions (Dettmers, arXiv:1511.04561), as ``create_dynamic_map``.

    In the unsigned one the least bound is 0: a second moment that is not zero does not become zero, as Adam would then
    divide the first one by ``eps`` where the gradient is zero.
    """
    if device.type != "cpu":
        return _Map(*(tensor.to(device) for tensor in _map(signed, torch.device("cpu"))))
    with torch.inference_mode(False):
        values = [0.0, 1.0]
        for exponent in range(7):
            edges = torch.linspace(0.1, 1, 2 ** (exponent + 1 - signed) + 1, dtype=torch.float32, device="cpu")
            means = 10.0 ** (exponent - 6) * ((edges[:-1] + edges[1:]) / 2)
            values += [*means.tolist(), *(-means if signed else means[:0]).tolist()]
        table = torch.tensor(sorted(values), dtype=torch.float32, device="cpu")
        bounds = torch.cat([(table[:-1] + table[1:]) / 2, table.new_tensor([torch.inf])])
        if not signed:
            bounds[0] = 0
        begins = torch.arange(1 << 16, dtype=torch.int32, device="cpu") << 16
        least = torch.where(begins < 0, begins | 0xFFFF, begins).view(torch.float32)
        return _Map(table, bounds, torch.bucketize(least.nan_to_num(nan=0.0), bounds).clamp_(max=255).to(torch.uint8))


@dataclass(frozen=True)
class Int8:
    """bitsandbytes' blockwise numbers: of each block of a parameter, in the order of its memory, the largest value."""

    signed: bool
    block: ClassVar[int] = BLOCK

    def nbytes(self, elements: int) -> int:
        """Returns the bytes of so many elements: the numbers, then the scales in float32."""
        return elements + elements // BLOCK * 4

    def _parts(self, stored: torch.Tensor, place: slice) -> tuple[torch.Tensor, torch.Tensor]:
        elements = stored.numel() // (BLOCK + 4) * BLOCK
        blocks = slice(place.start // BLOCK, -(-place.stop // BLOCK))
        return stored[place], stored[elements:].view(torch.float32)[blocks]

    def expand(self, stored: torch.Tensor, place: slice, out: torch.Tensor) -> None:
        """See ``StatePacking``."""
        numbers, scales = self._parts(stored, place)
        kept = _map(self.signed, stored.device)
        if stored.device.type == "cpu":
            native().expand_states(kept, numbers, scales, out, torch.get_num_threads())
        else:
            out.copy_(expanded(kept.values, in_blocks(numbers), scales).view(-1)[: out.numel()])

    def pack(self, values: torch.Tensor, stored: torch.Tensor, place: slice, random: Randomness | None) -> None:
        """See ``StatePacking``."""
        numbers, scales = self._parts(stored, place)
        kept = _map(self.signed, stored.device)
        if stored.device.type == "cpu":
            native().quantize_states(kept, values, numbers, scales, torch.get_num_threads())
        else:
            blocks = in_blocks(values)
            scales.copy_(blocks.abs().amax(1))
            numbers.copy_(self.numbers_of(blocks, scales).view(-1)[: values.numel()])
        if random is None and self.signed:
            self._recover(values, numbers, scales)

    def numbers_of(self, blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Returns the numbers of blocks, one a row, as native code makes them, by torch's operations."""
        kept = _map(self.signed, blocks.device)
        is_usable = (scales > 0) & (scales < torch.inf)
        shares = (blocks / scales.unsqueeze(1)).where(is_usable.unsqueeze(1), 0.0)
        least = kept.numbers.take(((shares.view(torch.int32) >> 16) & 0xFFFF).long())
        return least + (shares > kept.bounds.take(least.long()))

    def _recover(self, values: torch.Tensor, numbers: torch.Tensor, scales: torch.Tensor) -> None:
        """Gives blocks that were expanded their numbers and scales back.

        The map has 1 but not -1: a block whose largest value was negative lost some of that when it was expanded. Its
        scale is one of three floats then, and only the right one gives all values again.
        """
        table = _map(True, values.device).values
        blocks, every = in_blocks(values), in_blocks(numbers)
        likely = scales / -table[0]
        for scale in (likely, likely.nextafter(2 * likely), likely.nextafter(0 * likely)):
            rows = ((blocks.amin(1) == -scales) & (likely < torch.inf)).nonzero().view(-1)
            for columns in (8, BLOCK):  # a few values exclude nearly all blocks that were not expanded
                again = self.numbers_of(blocks[rows, :columns], scale[rows])
                is_same = (expanded(table, again, scale[rows]) == blocks[rows, :columns]).all(1)
                rows, again = rows[is_same], again[is_same]
            every[rows], scales[rows] = again, scale[rows]
        numbers.copy_(every.view(-1)[: numbers.numel()])


def expanded(table: torch.Tensor, numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Returns what numbers of blocks, one a row, stand for, as native code makes it, by torch's operations."""
    return table.take(numbers.long()) * scales.unsqueeze(1)


def in_blocks(values: torch.Tensor) -> torch.Tensor:
    """Returns values as rows of a block each, with zeros at the end."""
    return torch.nn.functional.pad(values, (0, -values.numel() % BLOCK)).view(-1, BLOCK)


def packed(
    regions: Sequence[Region], dtype: StateDtype | None, parameter: torch.Tensor, optimizer: str
) -> tuple[Region, ...]:
    """Returns how the states of a parameter are stored. Raises ValueError if one of them is sensitive to rounding."""
    made: list[Region] = []
    for region in regions:
        packing: StatePacking | None = None
        if dtype is not None and region.name != MASTER:
            if region.name not in _MOMENTS:
                raise ValueError(
                    f"state_dtype={dtype!r} is for moments ({', '.join(_MOMENTS)}), and {optimizer} keeps "
                    f"{region.name!r}"
                )
            if region.dtype != torch.float32:
                raise ValueError(
                    f"state_dtype={dtype!r} needs states that are computed in torch.float32, and those of a parameter "
                    f"are {region.dtype}: make it float32, or if it has 16 bits, master_weights=True"
                )
            if dtype == "bfloat16":
                packing = Bfloat16()
            elif parameter.numel() >= _LEAST:
                packing = Int8(_MOMENTS[region.name])
        made.append(region._replace(packing=packing))
    return tuple(made)


def require_state_dtype(given: Any) -> StateDtype | None:
    """Returns it. Raises ValueError unless it is None or one that there is."""
    name = str(given).removeprefix("torch.")
    if given is not None and name not in get_args(StateDtype):
        raise ValueError(f"state_dtype must be None, 'bfloat16' or 'int8', not {given!r}")
    return None if given is None else cast(StateDtype, name)


def from_bitsandbytes(optimizer: str, states: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a parameter's states under torch's names and in float32, if they are bitsandbytes'; others as they are.

    Raises:
        ValueError: they are not those of this optimizer, or are in blocks of another size.
    """
    given = {**states, **states.get(_NESTED, {})}
    given.pop(_NESTED, None)
    if "state1" not in given:
        return given
    names = _OF_BITSANDBYTES.get(optimizer, ())
    if len(names) != 1 + ("state2" in given):
        raise ValueError(f"these are states of bitsandbytes, but not those of its {optimizer}8bit")
    made = {name: value for name, value in given.items() if not name.endswith(("1", "2", "_vec"))}
    for number, name in enumerate(names, 1):
        state = given[f"state{number}"]
        if state.dtype == torch.uint8:
            scales = given.get(f"absmax{number}")
            if scales is None or scales.numel() != -(-state.numel() // BLOCK):
                raise ValueError(f"these states of bitsandbytes' {optimizer}8bit are not in blocks of {BLOCK}")
            numbers = in_blocks(state.reshape(-1))
            values = expanded(given[f"qmap{number}"].to(scales.device), numbers.to(scales.device), scales)
            state = values.view(-1)[: state.numel()].view(state.shape)
        made[name] = state
    return made
