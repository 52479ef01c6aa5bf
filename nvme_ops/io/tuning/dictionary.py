"""``Dictionary``: what was learned about a device, shared by the handles of a process and kept for the next one."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nvme_ops.base import at_exit
from nvme_ops.base.text import rate_words, size_words
from nvme_ops.filesystem.device import Identity
from nvme_ops.io.arguments import CACHE
from nvme_ops.io.engine import AUTOMATIC
from nvme_ops.io.tuning import store

SECTION = "classes"  # of a device's file
MODE = "NVME_OPS_ADAPTIVE"
_MODES = ("learn", "frozen", "off")
_MAX_LANES = 8  # more do not copy from the page cache any faster
_PLACES = ("pageable", "aligned", "pinned", "device")
_CONCURRENCY = ("waited", "alone", "crowd")
_CACHES = ("auto", "direct", "buffered")
_SMALLEST = 4096  # bytes: the first class; each further class is four times as large
_CLASSES = 10
_MAX_KEPT = 1000  # classes in a file
_PLAUSIBLE = 1e-15, 1e6  # seconds per byte; 0: not known

#: Block size, queue depth, lanes (0: automatic), in place, bounce, cache: as in the native module.
Tool = tuple[int, int, int, bool, bool, int]


@dataclass(frozen=True)
class Tried:
    """A way to move bytes, and its cost."""

    block_size: int
    queue_depth: int
    lanes: int  #: 0: automatic
    in_place: bool  #: without staging memory, wherever alignment allows
    bounce: bool  #: accelerator tensors through page-locked memory, even if cuFile could move them
    cache: str
    cost: float | None  #: seconds per byte; None: not tried yet

    def words(self) -> str:
        """Returns the tool in words."""
        lanes = f"{self.lanes or 'automatic'} {'lane' if self.lanes == 1 else 'lanes'}"
        cache = "" if self.cache == "auto" else "through the page cache" if self.cache == "buffered" else "direct"
        switches = [word for word, on in (("in place", self.in_place), ("bounce", self.bounce)) if on]
        return ", ".join(filter(None, [f"{size_words(self.block_size)} x {self.queue_depth}", lanes, cache, *switches]))


@dataclass(frozen=True)
class Learned:
    """What is known about one class of transfers."""

    op: str  #: ``read`` or ``write``
    most_bytes: int | None  #: of a transfer; over a quarter of it, except in the first class. None: more than 256 MiB
    place: str  #: of the tensor: ``pageable``, ``aligned``, ``pinned`` (or in huge pages), ``device``
    cached: bool  #: the page cache had most of the bytes
    concurrency: str  #: ``waited``: nothing else in flight, the caller waits; ``alone``: it does not; ``crowd``
    tools: tuple[Tried, ...]  #: the handle's own settings first
    chosen: int  #: index of the tool in use
    exploring: bool  #: other tools are being tried
    explorations: int  #: number begun in this process
    transfers: int

    def __str__(self) -> str:
        size = f"up to {size_words(self.most_bytes)}" if self.most_bytes else "more than 256 MiB"
        cached = ", in the page cache" if self.cached else ""
        state = "exploring" if self.exploring else "settled" if len(self.tools) > 1 else "no choice"
        head = f"{self.op} {size}, {self.place}{cached}, {self.concurrency}: {state} after {self.transfers} transfers"
        order = sorted(range(len(self.tools)), key=lambda number: number != self.chosen)
        return "\n".join([head, *(self._line(number) for number in order)])

    def _line(self, number: int) -> str:
        tried = self.tools[number]
        used = "-> " if number == self.chosen else "   "
        own = " (the handle's settings)" if number == 0 else ""
        if tried.cost is None:
            return f"  {used}{tried.words()}{own}" + (": not measured" if len(self.tools) > 1 else "")
        return f"  {used}{tried.words()}{own}: {rate_words(1 / tried.cost)}"


class Dictionary:
    """What the handles of this process with the same settings know about one device."""

    def __init__(self, identity: Identity, *arguments: Any) -> None:
        self._identity = identity
        self._first, self._lanes, self._fixed, self._frozen = arguments
        self._experiences: dict[str, Any] = {}  # by the native module that moves the bytes
        self._saved: list[Any] = []
        self._why_not_kept = ""

    def of(self, module: Any) -> Any:
        """Returns the native ``Experience`` for engines of this module; a new one has what is stored."""
        name = module.__name__.rpartition(".")[2]
        if name not in self._experiences:
            made = module.Experience(self._first, self._lanes, self._fixed, name == "gds", self._frozen)
            for entry in store.load(self._identity, SECTION, _check) or []:
                if entry["op"] == name:
                    with contextlib.suppress(TypeError, ValueError, OverflowError):  # impossible numbers
                        made.restore(tuple(entry["class"]), *(entry[part] for part in _PARTS))
            self._experiences.setdefault(name, made)  # another thread may have been faster
            self._saved = _findings(self._explored())
        return self._experiences[name]

    def learned(self) -> list[Learned]:
        """Returns what is known about each class."""
        return [_learned(*entry) for made in self._experiences.values() for entry in made.entries()]

    def save(self) -> None:
        """Stores what was found since the last time; what others stored about other classes stays. Never raises.

        If a save is under way, in another thread or in this one (freeing a handle saves), that one does this, too.
        """
        _to_be_saved.append(self)
        while _to_be_saved and _saving.acquire(blocking=False):
            try:
                while _to_be_saved:
                    _to_be_saved.popleft()._save()
            finally:
                _saving.release()

    def _save(self) -> None:
        explored = self._explored()
        findings = _findings(explored)
        if self._frozen or findings == self._saved:
            return
        try:
            with store.changing(self._identity) as document:
                stored: Any = document.get(SECTION, [])
                again = [entry for entry, exploring, _ in explored if exploring]
                settled = [entry for entry, exploring, _ in explored if not exploring]
                entries = [*again, *([] if store.problem_of(stored, _check) else stored), *settled]
                document[SECTION] = list({_key(entry): entry for entry in entries}.values())[-_MAX_KEPT:]
        except (OSError, RuntimeError) as error:  # the program does not depend on it
            self._why_not_kept = str(error)
        else:
            self._saved, self._why_not_kept = findings, ""

    def _explored(self) -> list[Explored]:
        """Returns what to store. For a class that is explored again, this is the tool in use, without costs."""
        found = []
        for name, made in self._experiences.items():
            for fields, tools, costs, chosen, usual, exploring, explorations, transfers in made.entries():
                if len(tools) > 1 and explorations > exploring:
                    values = tools, [0] * len(costs) if exploring else costs, chosen, usual, transfers
                    entry = {"op": name, "class": fields, **dict(zip(_PARTS, values, strict=True))}
                    found.append((entry, bool(exploring), explorations - exploring))
        return found

    def words(self) -> str:
        """Says where the dictionary is kept."""
        try:
            path = store.path_of(self._identity)
        except RuntimeError as error:  # no home folder
            return f"not kept for the next program: {error}"
        if self._why_not_kept:
            return f"not kept for the next program: {self._why_not_kept}"
        if not self._frozen:
            return f"kept in {path}: remove it to begin anew"
        kept = os.path.exists(path)  # not Path's, which raises if the folder cannot be read
        return f"frozen: as kept in {path}" if kept else f"frozen: nothing is kept for this device in {path}"


#: A class as it is stored, whether it is explored again, and how many explorations of it have ended.
Explored = tuple[dict[str, Any], bool, int]
_PARTS = ("tools", "costs", "chosen", "usual", "transfers")


def _findings(explored: list[Explored]) -> list[Any]:
    """Returns a value that differs after each result worth storing: an exploration that ended, a usual cost."""
    return [(entry["op"], entry["class"], ended, entry["usual"] > 0) for entry, _, ended in explored]


def _learned(fields: tuple[int, ...], tools: list[Any], costs: list[float], chosen: int, *counts: Any) -> Learned:
    op, size, place, cached, concurrency = fields
    _usual, exploring, explorations, transfers = counts
    most_bytes = _SMALLEST * 4**size if size + 1 < _CLASSES else None
    kind = "write" if op else "read", most_bytes, _PLACES[place], bool(cached), _CONCURRENCY[concurrency]
    return Learned(*kind, tuple(map(_tried, tools, costs)), chosen, bool(exploring), explorations, transfers)


def _tried(tool: Tool, cost: float) -> Tried:
    block_size, queue_depth, lanes, in_place, bounce, cache = tool
    return Tried(block_size, queue_depth, lanes, in_place, bounce, _CACHES[cache], cost or None)


#: By process, so that a forked child has its own, and by everything that affects what is learned.
_dictionaries: dict[tuple[Any, ...], Dictionary] = {}


def dictionary_of(identity: Identity, settings: Mapping[str, Any], given: Mapping[str, Any]) -> Dictionary | None:
    """Returns the dictionary of handles with these settings, made if necessary; None if they are not to learn.

    Args:
        identity: the device.
        settings: the handle's, under the names of its arguments.
        given: the arguments that the user gave; these are not changed.

    Raises:
        ValueError: ``NVME_OPS_ADAPTIVE`` has an unknown value.
    """
    mode = os.environ.get(MODE) or "learn"
    if mode not in _MODES:
        raise ValueError(f"{MODE}={mode!r} is not one of {', '.join(_MODES)}")
    if mode == "off":
        return None
    fixed = {name for name, value in given.items() if value is not None}
    lanes = settings["intra_op_parallelism"] or AUTOMATIC
    lanes_fixed = bool(fixed & {"intra_op_parallelism", "num_threads"})
    sizes = settings["block_size"], settings["queue_depth"], lanes
    arguments = (
        (*sizes, False, False, _CACHES.index(settings["cache"])),
        lanes if lanes_fixed else max(lanes, min(_MAX_LANES, max(2, len(os.sched_getaffinity(0))))),
        ("block_size" in fixed, "queue_depth" in fixed, lanes_fixed, "cache" in fixed or bool(os.environ.get(CACHE))),
        mode == "frozen",
    )
    return _dictionaries.setdefault((os.getpid(), identity, *arguments), Dictionary(identity, *arguments))


def forget() -> None:
    """Makes new handles know only what is stored in files; existing ones retain what they know."""
    _dictionaries.clear()


def _save_all() -> None:
    for known in list(_dictionaries.values()):
        known.save()


at_exit.call(_save_all)

_to_be_saved: deque[Dictionary] = deque()
_saving = threading.Lock()


def _start_anew() -> None:
    global _saving
    _saving = threading.Lock()
    _to_be_saved.clear()


os.register_at_fork(after_in_child=_start_anew)


def _check(classes: list[dict[str, Any]]) -> None:
    """Raises ValueError, LookupError or TypeError unless ``classes`` is what ``save`` writes."""
    for entry in classes:
        limits = (2, _CLASSES, len(_PLACES), 2, len(_CONCURRENCY))
        tools, costs, chosen, usual, transfers = (entry[part] for part in _PARTS)
        if (
            not isinstance(entry["op"], str)
            or not all(0 <= value < limit for value, limit in zip(entry["class"], limits, strict=True))
            or not all(cost == 0 or _PLAUSIBLE[0] <= cost <= _PLAUSIBLE[1] for cost in (*costs, usual))
            or not len(tools) == len(costs) > chosen >= 0 <= transfers
            or any(len(tool) != 6 or min(tool) < 0 for tool in tools)
        ):
            raise ValueError(f"its class {entry}")


def _key(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns what identifies a class; with other settings, it has other tools."""
    return entry["op"], tuple(entry["class"]), tuple(map(tuple, entry["tools"]))
