"""Finds the best settings of a handle within a budget, on machines where single passes vary by 20 %.

1. Openings: a few block sizes with few and with many lanes race against the default.
2. The values of one setting after another race against the best so far, again and again until all are decided.
3. The final: a duel of the best and the default in passes of full size, until it is clear or the time is over.

docs/tune.md explains the races. Given the measurements, the search is deterministic.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from nvme_ops.base.command_line import positive, size
from nvme_ops.base.settings import Settings
from nvme_ops.base.text import KIB, MIB
from nvme_ops.measure.files import cached_share, handles_read_the_cache, make_cold, sync
from nvme_ops.measure.rows import in_turn, noise, noise_of_median

if TYPE_CHECKING:
    import torch

    from nvme_ops.io.handle import aio_handle

#: Bytes per second of one pass, by direction: "read", "write".
Rates: TypeAlias = Mapping[str, float]

#: By how much the rates must differ, whatever the noise, before the default is left.
MIN_GAIN = 0.02
#: Rounds until a median says anything.
MIN_ROUNDS = 3
_UNKNOWN = 0.1  # standard deviation assumed for a round's ratio until a setting has been measured twice


@dataclass(frozen=True)
class Duel:
    """A challenger's rates over a baseline's."""

    challenger: Settings
    ratios: Sequence[float]  # one for each round; above 1 the challenger was faster
    noise: float  # standard deviation of ``ratio``

    @property
    def ratio(self) -> float:
        """The median of the rounds."""
        return statistics.median(self.ratios)

    @property
    def won(self) -> bool:
        """Whether the challenger was faster by more than two standard deviations of the noise."""
        return len(self.ratios) >= MIN_ROUNDS and self.ratio > 1 + max(MIN_GAIN, 2 * self.noise)

    @property
    def clear(self) -> bool:
        """Whether more rounds would hardly change the result."""
        return abs(self.ratio - 1) > max(MIN_GAIN, 4 * self.noise)

    @property
    def noise_of_a_pass(self) -> float:
        """Standard deviation of the logarithm of a single pass's rate."""
        return self.noise / noise_of_median(math.sqrt(2), len(self.ratios))


class Rounds:
    """Keeps the rates of all rounds, to compare any two settings that were measured in the same rounds."""

    def __init__(self) -> None:
        self._rates: list[dict[Settings, float]] = []

    def __len__(self) -> int:
        return len(self._rates)

    def measure(self, contestants: Sequence[Settings], measure: Callable[[Settings], Rates | None]) -> bool:
        """Measures each contestant once, in another order each round; returns False once ``measure`` returns None."""
        rates: dict[Settings, float] = {}
        for settings in in_turn(contestants, len(self)):
            taken = measure(settings)
            if taken is None:
                return False
            rates[settings] = geometric_mean(taken.values())
        self._rates.append(rates)
        return True

    def duels(self, baseline: Settings) -> dict[Settings, Duel]:
        """Compares all other settings with ``baseline``, each over the rounds that had both.

        The noise is estimated over all of these duels together, from how much each ratio differs from the previous one,
        so that slow changes of the machine do not count.
        """
        ratios: dict[Settings, list[float]] = {}
        for rates in self._rates:
            for settings, rate in rates.items() if baseline in rates else ():
                ratios.setdefault(settings, []).append(rate / rates[baseline])
        ratios.pop(baseline, None)
        one = noise([math.log(ratio) for ratio in each] for each in ratios.values())
        one = _UNKNOWN if one is None else one
        return {
            settings: Duel(settings, tuple(each), noise_of_median(one, len(each))) for settings, each in ratios.items()
        }


def geometric_mean(values: Iterable[float]) -> float:
    """Returns the geometric mean of positive numbers, at least one."""
    return math.exp(statistics.fmean(math.log(value) for value in values))


DIRECTIONS = ("write", "read")
MIN_PASS = 32 * MIB  # a shorter pass would mostly measure how it begins and ends
# How many short and how many full passes should fit into a budget. Fewer and longer passes are as much less noisy as
# they are fewer; many and short ones say less about large blocks, since a pass should have many blocks.
_SHORT_PASSES, _FULL_PASSES = 200, 80


@dataclass
class Passes:
    """Writes and reads ``tensor``, or its first part, to and from the start of an existing file.

    Call ``calibrate`` first: it fills the file and chooses the sizes of short and full passes.
    """

    path: str
    tensor: torch.Tensor  # bytes, on the CPU or on a GPU; a full pass moves no more than all of them
    make_handle: Callable[..., aio_handle]  # from settings; so cheap that every pass has a handle of its own
    directions: Sequence[str] = DIRECTIONS
    loops: int = 1  # repetitions in a pass; the rate is that of all together
    #: The share of each read that was in the page cache all the same, where it is known.
    cached: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.short = self.full = min(self.tensor.numel(), MIN_PASS)
        self._buffered = not _direct(self.path)

    def calibrate(self, seconds: float) -> None:
        """Fills the file and chooses sizes for a budget in seconds, from the rates of the default settings."""
        handle = self.make_handle()
        self._fill(handle)
        rates = self.measure(Settings(), False)
        moved = seconds / sum(1 / rate for rate in rates.values()) / self.loops
        self.short, self.full = (
            min(self.tensor.numel(), max(MIN_PASS, int(moved / passes) // MIB * MIB))
            for passes in (_SHORT_PASSES, _FULL_PASSES)
        )
        self._fill(handle)
        self.cached.clear()

    def _fill(self, handle: aio_handle) -> None:
        handle.sync_pwrite(self.tensor[: self.full], self.path, 0)
        sync(self.path)

    def measure(self, settings: Settings, full: bool) -> dict[str, float]:
        """Returns bytes per second by direction."""
        handle = self.make_handle(**settings.as_json())
        memory = self.tensor[: self.full if full else self.short]
        # untimed, so that every lane has its thread and its ring
        handle.sync_pread(memory[: settings.intra_op_parallelism * MIB], self.path, 0)
        seconds = dict.fromkeys(self.directions, 0.0)
        for _ in range(self.loops):
            for direction in self.directions:
                seconds[direction] += self._pass(handle, direction, memory)
        return {name: memory.numel() * self.loops / taken for name, taken in seconds.items()}

    def _pass(self, handle: aio_handle, direction: str, memory: torch.Tensor) -> float:
        if direction == "read":
            make_cold(self.path)
            share = cached_share(self.path, memory.numel()) if handles_read_the_cache() else None
            self.cached += [] if share is None else [share]
        start = time.perf_counter()
        if direction == "read":
            handle.sync_pread(memory, self.path, 0)
        else:
            handle.sync_pwrite(memory, self.path, 0)
            if self._buffered:  # otherwise it is on the device already
                sync(self.path)
        return time.perf_counter() - start


def _direct(path: str) -> bool:
    """Returns whether the file system supports direct I/O; otherwise written data stay in the page cache."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_DIRECT))
    except OSError:
        return False
    return True


#: Measures settings once; with True in a pass of full size, else in a short one.
Measure: TypeAlias = Callable[[Settings, bool], Rates]

DEFAULT = Settings()
#: How much rate a simpler setting may cost. A ratio that is known this exactly is not measured again.
TIE = 0.01
#: The share of the budget for the races; the rest is for the final.
RACE_SHARE = 0.7
_OPENING_ROUNDS, _ROUNDS = 2, 3  # of a race
_CERTAIN = 3  # a challenger this many standard deviations below the fastest drops out
_MIN_FINAL, _MAX_FINAL = 5, 40  # rounds


@dataclass(frozen=True)
class Axis:
    """One setting and the values to try, ascending."""

    name: str
    values: Sequence[Any]


def axes(processors: int) -> list[Axis]:
    """Returns the settings to try, with at most as many lanes as ``processors``: more would only add threads."""
    return [
        Axis("block_size", [128 * KIB, 256 * KIB, 512 * KIB, MIB, 2 * MIB, 4 * MIB, 8 * MIB]),
        Axis("queue_depth", [4, 8, 16, 32, 64, 128]),
        Axis("intra_op_parallelism", [count for count in (1, 2, 4, 8, 16) if count <= max(1, processors)]),
        Axis("overlap_events", [False, True]),
        Axis("single_submit", [False, True]),
    ]


def combinations(axes: Sequence[Axis], base: Settings = DEFAULT) -> list[Settings]:
    """Returns all settings that the axes span; everything else is as in ``base``."""
    names = [axis.name for axis in axes]
    every = itertools.product(*(axis.values for axis in axes))
    return [replace(base, **dict(zip(names, values, strict=True))) for values in every]


def _switch(text: str) -> bool:
    if text.lower() not in ("0", "1", "false", "true"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return text.lower() in ("1", "true")


#: What can be swept, by ds_nvme_tune's names: the setting, and the parser of a value.
SWEPT: dict[str, tuple[str, Callable[[str], Any]]] = {
    "block_size": ("block_size", size),
    "queue_depth": ("queue_depth", positive),
    "io_parallel": ("intra_op_parallelism", positive),
    "single_submit": ("single_submit", _switch),
    "sequential_requests": ("overlap_events", lambda text: not _switch(text)),
}


def swept(name: str, values: Iterable[object]) -> Axis:
    """Returns the axis of a name in ``SWEPT``, with each value once. Raises ValueError for an invalid value."""
    setting, parse = SWEPT[name]
    try:
        return Axis(setting, list(dict.fromkeys(parse(str(value)) for value in values)))
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"{name}: {error}") from None


@dataclass(frozen=True)
class Outcome:
    """What a search found, or has found so far."""

    best: Settings
    baseline: Settings  # the default, or if that is not searched the nearest to it
    challenger: Settings  # the baseline itself if nothing challenges it
    final: Duel | None  # None without challenger, or before there were enough rounds
    axes: Sequence[Axis]
    rates: Mapping[Settings, Rates]  # medians
    passes: Mapping[Settings, int]  # how often each was measured
    races: Mapping[Settings, Duel]  # what was measured in the same races as ``best``, against it
    complete: bool  # False if the time was over before the final


@dataclass
class Search:
    """Searches the combinations of ``axes``; settings that are no axis keep their default."""

    measure: Measure
    axes: Sequence[Axis]
    spent: Callable[[], float]  # share of the budget that is used; from 1 on only the first pass may begin
    progress: Callable[[str], None] = lambda _: None  # called with what is done next

    def __post_init__(self) -> None:
        self._best = self._baseline = _nearest_to_default(self.axes)
        self._races, self._final = Rounds(), Rounds()
        self._taken: dict[Settings, tuple[list[Rates], list[Rates]]] = {}  # short and full passes
        self._complete = True

    def find(self) -> Outcome:
        """Runs the search. An exception of ``measure`` ends it; ``outcome`` then returns what is known."""
        self._pass(False, self._baseline)  # so that there is always a result
        raced = [self._race(self._openings(), _OPENING_ROUNDS)]
        while any(raced):
            raced = [self._race(self._varied(axis), _ROUNDS) for axis in self.axes]
        contestants = list(dict.fromkeys([self._baseline, self._best]))
        while len(self._final) < _MAX_FINAL and self._final.measure(contestants, partial(self._pass, True)):
            duels = self._final.duels(self._baseline).values()
            if len(self._final) >= _MIN_FINAL and all(duel.clear for duel in duels):
                break
        return self.outcome()

    def outcome(self) -> Outcome:
        """Returns what is known so far. Before the final, the best is the winner of the races."""
        final = self._final.duels(self._baseline).get(self._best) if len(self._final) >= MIN_ROUNDS else None
        best = self._best if final is None or final.won else self._baseline
        return Outcome(
            best, self._baseline, self._best, final, self.axes,
            {settings: _median(full or short) for settings, (short, full) in self._taken.items()},
            {settings: len(short) + len(full) for settings, (short, full) in self._taken.items()},
            self._races.duels(best), self._complete,
        )  # fmt: skip

    def _openings(self) -> list[Settings]:
        """Returns up to three block sizes with up to three numbers of lanes, at a depth that suits most devices."""
        depth = min(self._values("queue_depth"), key=lambda value: abs(value - 32))
        return [
            replace(self._baseline, block_size=block, intra_op_parallelism=lanes, queue_depth=depth)
            for block in _spread_out(self._values("block_size"))
            for lanes in _spread_out(self._values("intra_op_parallelism"))
        ]

    def _varied(self, axis: Axis) -> list[Settings]:
        return [replace(self._best, **{axis.name: value}) for value in axis.values]

    def _values(self, name: str) -> Sequence[Any]:
        return next((axis.values for axis in self.axes if axis.name == name), [getattr(DEFAULT, name)])

    def _race(self, challengers: Sequence[Settings], rounds: int) -> bool:
        """Races the challengers against the best; returns whether anything was measured."""
        before = len(self._races)
        for _ in range(rounds):
            left = self._undecided(challengers)
            if not left or not self._races.measure([self._best, *left], partial(self._pass, False)):
                break
        self._choose(challengers)
        return len(self._races) > before

    def _undecided(self, challengers: Sequence[Settings]) -> list[Settings]:
        duels = self._races.duels(self._best)
        known = [duels[settings] for settings in challengers if settings in duels]
        fastest = max([1.0, *(duel.ratio * (1 - duel.noise) for duel in known)])
        decided = {self._best} | {
            duel.challenger for duel in known if duel.noise <= TIE or duel.ratio * (1 + _CERTAIN * duel.noise) < fastest
        }
        return [settings for settings in challengers if settings not in decided]

    def _choose(self, challengers: Sequence[Settings]) -> None:
        """Makes the fastest challenger the best if it is faster beyond the noise, then the simplest that is as fast."""

        def at_least(settings: Settings) -> float:
            duel = duels.get(settings)
            return 0.0 if duel is None else duel.ratio * (1 - duel.noise)

        duels = self._races.duels(self._best)
        fastest = max(challengers, key=at_least)
        if at_least(fastest) > 1:
            self._best = fastest
            duels = self._races.duels(self._best)
        equal = [settings for settings in challengers if at_least(settings) > 1 - TIE]
        self._best = min([self._best, *equal], key=self._cost)

    def _cost(self, settings: Settings) -> tuple[int, int, int, int]:
        """Ranks settings by simplicity: lanes (threads), switches (CPU), difference from default, memory in flight."""
        unlike = sum(getattr(settings, axis.name) != getattr(self._baseline, axis.name) for axis in self.axes)
        switches = settings.single_submit + settings.overlap_events
        return settings.intra_op_parallelism, switches, unlike, settings.block_size * settings.queue_depth

    def _pass(self, full: bool, settings: Settings) -> Rates | None:
        if self._taken and self.spent() >= (1.0 if full else RACE_SHARE):
            self._complete = not full
            return None
        self.progress("the best against the default" if full else "searching")
        rates = self.measure(settings, full)
        self._taken.setdefault(settings, ([], []))[full].append(rates)
        return rates


def _median(taken: Sequence[Rates]) -> Rates:
    return {name: statistics.median(rates[name] for rates in taken) for name in taken[0]}


def _nearest_to_default(axes: Iterable[Axis]) -> Settings:
    """Returns the combination nearest to the default, by doublings."""

    def distance(name: str, value: int) -> float:
        return abs(math.log2((1 + value) / (1 + getattr(DEFAULT, name))))

    return replace(DEFAULT, **{axis.name: min(axis.values, key=partial(distance, axis.name)) for axis in axes})


def _spread_out(values: Sequence[Any]) -> list[Any]:
    """Returns at most three of the values, spread from low to high."""
    last = len(values) - 1
    return [values[place] for place in sorted({round(last / 6), round(last / 2), last})]
