"""The order of an epoch: which sample comes at each position. Any part of it is computed when needed, none is stored.

The same seed and epoch give the same order on every machine, with any number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Literal, TypeAlias

import torch

#: False: in order; True: at random; ``"shards"``: the data files at random, and the samples within each.
Shuffle: TypeAlias = "bool | Literal['shards']"

_ROUNDS = 8
_SMALL = 1024  # places: so few are sorted, since the network cannot make all of their permutations
# The constants of splitmix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014).
_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_WORD = (1 << 64) - 1


class Permutation:
    """A permutation of ``range(count)``, each place of which can be computed alone.

    It is a Feistel network, applied again while its result is not below ``count`` (cycle walking; Black and Rogaway,
    "Ciphers with Arbitrary Finite Domains", CT-RSA 2002). A small one is sorted by random keys.
    """

    def __init__(self, count: int, seed: int) -> None:
        bits = max(2, (count - 1).bit_length())
        self._count = count
        self._sizes = (bits // 2, bits - bits // 2)
        self._keys = [_mixed(seed + number * _STEP) >> 2 for number in range(_ROUNDS)]
        self._sorted: torch.Tensor | None = None
        if count <= _SMALL:
            keys = [_mixed(seed + number * _STEP) for number in range(count)]
            self._sorted = torch.tensor(sorted(range(count), key=keys.__getitem__), dtype=torch.int64, device="cpu")

    def __call__(self, places: torch.Tensor) -> torch.Tensor:
        """Returns the number at each of ``places``; both are int64."""
        if self._sorted is not None:
            return self._sorted[places]
        permuted = self._rounds(places)
        outside = (permuted >= self._count).nonzero()[:, 0]
        while len(outside):
            moved = self._rounds(permuted[outside])
            permuted[outside] = moved
            outside = outside[moved >= self._count]
        return permuted

    def _rounds(self, values: torch.Tensor) -> torch.Tensor:
        left_bits, right_bits = self._sizes
        left, right = values >> right_bits, values & ((1 << right_bits) - 1)
        for key in self._keys:
            mixed = (right + key) * (_FIRST - _WORD - 1)  # int64 wraps around
            mixed ^= (mixed >> 27) & (_WORD >> 27)
            mixed *= _SECOND - _WORD - 1
            mixed ^= (mixed >> 31) & (_WORD >> 31)
            left, right = right, left ^ (mixed & ((1 << left_bits) - 1))
            left_bits, right_bits = right_bits, left_bits
        return (left << right_bits) | right


class EpochOrder:
    """The samples of one epoch.

    Args:
        counts: the number of samples in each data file.
        shuffle: False, True or ``"shards"``.
        seed: any int.
        epoch: any int; each has its own order.

    Raises:
        ValueError: ``shuffle`` is something else.
    """

    def __init__(self, counts: Sequence[int], shuffle: Shuffle, seed: int, epoch: int) -> None:
        if not isinstance(shuffle, bool) and shuffle != "shards":
            raise ValueError(f"shuffle must be True, False or 'shards', not {shuffle!r}")
        self._counts, self._shuffle = list(counts), shuffle
        self._seed = _mixed(_mixed(seed) + epoch)
        self.count = sum(self._counts)
        self._inside: tuple[int, Permutation] | None = None  # the file that was used last, and its order
        if shuffle is True:
            self._whole = Permutation(self.count, self._seed)
        elif shuffle == "shards":
            files = torch.arange(len(self._counts), device="cpu")
            self._files = (Permutation(len(self._counts), self._seed)(files) if len(files) else files).tolist()
            self._starts = [0, *accumulate(self._counts[file] for file in self._files)]  # positions where they begin
            self._firsts = [0, *accumulate(self._counts)]

    def at(self, start: int, stop: int) -> torch.Tensor:
        """Returns the numbers of the samples at positions ``start`` to ``stop``, int64."""
        places = torch.arange(start, stop, device="cpu")
        if self._shuffle is True:
            return self._whole(places) if len(places) else places
        if self._shuffle == "shards":
            return self._in_shards(places)
        return places

    def _in_shards(self, places: torch.Tensor) -> torch.Tensor:
        which = torch.searchsorted(torch.tensor(self._starts, device="cpu"), places, right=True) - 1
        numbers = torch.empty_like(places)
        for number in which.unique().tolist():
            file, mine = self._files[number], which == number
            if self._inside is None or self._inside[0] != file:
                self._inside = file, Permutation(self._counts[file], self._seed + 1 + file)
            numbers[mine] = self._inside[1](places[mine] - self._starts[number]) + self._firsts[file]
        return numbers


def _mixed(seed: int) -> int:
    """Returns 64 bits that depend on each bit of ``seed``: splitmix64."""
    value = (seed + _STEP) & _WORD
    value = (value ^ (value >> 30)) * _FIRST & _WORD
    value = (value ^ (value >> 27)) * _SECOND & _WORD
    return value ^ (value >> 31)
