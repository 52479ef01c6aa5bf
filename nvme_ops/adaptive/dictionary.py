"""What was learned about a device: shared by the handles of a process, kept for the next process."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nvme_ops import at_exit
from nvme_ops.storage.identity import Identity
from nvme_ops.text import rate_words, size_words
from nvme_ops.tune import store

SECTION = "adaptive"  # in the names of files
_PLACES = ("pageable", "aligned", "pinned", "device")
_CONCURRENCY = ("waited", "alone", "crowd")
_CACHES = ("auto", "direct", "buffered")
_SMALLEST = 4096  # bytes: the first class; each further class is four times as large
_CLASSES = 10
_MOST_KEPT = 1000  # classes in a file
_PLAUSIBLE = 1e-15, 1e6  # seconds per byte; 0: not known

#: Block size, queue depth, lanes, in place, bounce, cache: as in the native module.
Tool = tuple[int, int, int, bool, bool, int]


@dataclass(frozen=True)
class Tried:
    """A tool and what was found about it."""

    block_size: int
    queue_depth: int
    lanes: int
    in_place: bool  #: without staging memory, wherever alignment allows
    bounce: bool  #: accelerator tensors through page-locked memory, even if cuFile could move them
    cache: str
    cost: float | None  #: seconds per byte; None: not tried yet

    def words(self) -> str:
        """Returns the tool in words."""
        lanes = f"{self.lanes} {'lane' if self.lanes == 1 else 'lanes'}"
        cache = "" if self.cache == "auto" else "through the page cache" if self.cache == "buffered" else "direct"
        switches = [word for word, on in (("in place", self.in_place), ("bounce", self.bounce)) if on]
        return ", ".join(filter(None, [f"{size_words(self.block_size)} x {self.queue_depth}", lanes, cache, *switches]))


@dataclass(frozen=True)
class Learned:
    """What is known about one class of transfers."""

    op: str  #: ``read`` or ``write``
    most_bytes: int | None  #: of a transfer; the least is a quarter, except in the first class. None: more than 256 MiB
    place: str  #: of the tensor: ``pageable``, ``aligned``, ``pinned`` (or in huge pages), ``device``
    cached: bool  #: the page cache had most of the bytes
    concurrency: str  #: ``waited``: nothing else in flight, the caller waits; ``alone``: it does not; ``crowd``
    tools: tuple[Tried, ...]  #: the handle's own settings first
    chosen: int  #: index of the one in use
    exploring: bool  #: the others are being tried
    explorations: int  #: begun in this process
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

    def of(self, module: Any, cufile: bool) -> Any:
        """Returns the native ``Experience`` for an engine of that module; when new, with what is stored."""
        name = module.__name__.rpartition(".")[2]
        if name not in self._experiences:
            made = module.Experience(self._first, self._lanes, self._fixed, cufile, self._frozen)
            for entry in _stored(self._identity):
                if entry["op"] == name:
                    _restore(made, entry)
            self._experiences.setdefault(name, made)  # another thread's may be there by now
            self._saved = self._findings()
        return self._experiences[name]

    def learned(self) -> list[Learned]:
        """Returns what is known about each class."""
        return [self._learned(entry) for made in self._experiences.values() for entry in made.entries()]

    def _learned(self, entry: tuple[Any, ...]) -> Learned:
        (op, size, place, cached, concurrency), tools, costs, chosen, _, exploring, explorations, transfers = entry
        return Learned(
            op="write" if op else "read",
            most_bytes=_SMALLEST * 4**size if size + 1 < _CLASSES else None,
            place=_PLACES[place],
            cached=bool(cached),
            concurrency=_CONCURRENCY[concurrency],
            tools=tuple(_tried(tool, cost) for tool, cost in zip(tools, costs, strict=True)),
            chosen=chosen,
            exploring=exploring,
            explorations=explorations,
            transfers=transfers,
        )

    def save(self) -> None:
        """Keeps what was found since the last time; what others kept about other classes stays. Never raises.

        If a save is under way, in another thread or interrupted by the freeing of a handle, it goes on to this one.
        """
        _to_be_saved.append(self)
        while _to_be_saved and _saving.acquire(blocking=False):
            try:
                while _to_be_saved:
                    _to_be_saved.popleft()._save()
            finally:
                _saving.release()

    def _save(self) -> None:
        findings = self._findings()
        if self._frozen or findings == self._saved:
            return
        settled, again = self._entries(exploring=False), self._entries(exploring=True)
        try:
            with store.locked(self._identity, SECTION):
                stored: dict[tuple[Any, ...], dict[str, Any]] = {}
                with contextlib.suppress(RuntimeWarning):  # if warnings are errors: a damaged file, which is replaced
                    stored = {_key(entry): entry for entry in _stored(self._identity)}
                known = {**again, **stored, **settled}
                store.save_section(self._identity, SECTION, {"classes": list(known.values())[-_MOST_KEPT:]})
        except (OSError, RuntimeError) as error:  # the program can do without
            self._why_not_kept = str(error)
        else:
            self._saved, self._why_not_kept = findings, ""

    def words(self) -> str:
        """Says where the dictionary is kept."""
        if self._why_not_kept:
            return f"not kept for the next program: {self._why_not_kept}"
        try:
            path = store.path_of(self._identity, SECTION)
        except RuntimeError as error:  # no home folder
            return f"not kept for the next program: {error}"
        if not self._frozen:
            return f"kept in {path}: remove it to begin anew"
        kept = os.path.exists(path)  # not Path's, which raises if the folder cannot be read
        return f"frozen: as kept in {path}" if kept else f"frozen: nothing is kept for this device in {path}"

    def _entries(self, exploring: bool) -> dict[tuple[Any, ...], dict[str, Any]]:
        """Returns settled classes; or those explored again, of which the tool in use is known, but not the costs."""
        entries = [
            {
                "op": name,
                "class": fields,
                "tools": tools,
                "costs": [0] * len(costs) if exploring else costs,
                "chosen": chosen,
                "usual": usual,
                "transfers": transfers,
            }
            for name, made in self._experiences.items()
            for fields, tools, costs, chosen, usual, now, explorations, transfers in made.entries()
            if now == exploring and explorations > now and len(tools) > 1
        ]
        return {_key(entry): entry for entry in entries}

    def _findings(self) -> list[Any]:
        """Returns for each class how many explorations have ended, and whether its usual cost is known since."""
        return [
            (fields, explorations - exploring, usual > 0)
            for made in self._experiences.values()
            for fields, tools, _, _, usual, exploring, explorations, _ in made.entries()
            if len(tools) > 1 and explorations > exploring
        ]


def _tried(tool: Tool, cost: float) -> Tried:
    block_size, queue_depth, lanes, in_place, bounce, cache = tool
    return Tried(block_size, queue_depth, lanes, in_place, bounce, _CACHES[cache], cost or None)


#: By process, so that a forked child has its own; and by all that affects what is learned.
_dictionaries: dict[tuple[Any, ...], Dictionary] = {}


def dictionary_of(identity: Identity, first: Tool, lanes: int, fixed: tuple[bool, ...], frozen: bool) -> Dictionary:
    """Returns the dictionary of the handles with these settings, making one if there is none."""
    arguments = (first, lanes, fixed, frozen)
    key = (os.getpid(), identity, *arguments)
    return _dictionaries.setdefault(key, Dictionary(identity, *arguments))


def forget() -> None:
    """Makes new handles begin anew, except for what is kept in files; existing ones retain what they know."""
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


def _stored(identity: Identity) -> list[dict[str, Any]]:
    document = store.document(identity, SECTION, _check)
    classes = [] if document is None else document["classes"]
    return [entry for entry in classes if not entry.get("energy")]  # of joules, which earlier versions could learn


def _check(document: Mapping[str, Any]) -> None:
    """Raises ValueError, LookupError or TypeError unless this is what ``save`` writes."""
    for entry in document["classes"]:
        if not isinstance(entry["op"], str):
            raise ValueError(f"its op {entry['op']}")
        numbers = [*entry["class"], entry["chosen"], entry["transfers"]]
        costs = [*entry["costs"], _usual(entry)]
        fields = zip(entry["class"], (2, _CLASSES, len(_PLACES), 2, len(_CONCURRENCY)), strict=True)
        if not all(value >= 0 for value in numbers) or not all(value < most for value, most in fields):
            raise ValueError(f"its class {entry['class']}")
        if not all(cost == 0 or _PLAUSIBLE[0] <= cost <= _PLAUSIBLE[1] for cost in costs):
            raise ValueError(f"its costs {costs}")
        if not len(entry["tools"]) == len(entry["costs"]) > entry["chosen"]:
            raise ValueError(f"its class {entry['class']} has {len(entry['tools'])} tools")
        if any(len(tool) != 6 or not all(value >= 0 for value in tool) for tool in entry["tools"]):
            raise ValueError(f"its tools {entry['tools']}")


def _key(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns what distinguishes classes: those of other settings have other tools."""
    return entry["op"], tuple(entry["class"]), tuple(map(tuple, entry["tools"]))


def _restore(made: Any, entry: Mapping[str, Any]) -> None:
    with contextlib.suppress(TypeError, ValueError, OverflowError):  # numbers that no version wrote
        found = entry["costs"], entry["chosen"], _usual(entry), entry["transfers"]
        made.restore(tuple(entry["class"]), entry["tools"], *found)


def _usual(entry: Mapping[str, Any]) -> Any:
    """Returns what the chosen tool usually costs; 0, with which it is learned anew, if that is not kept."""
    return entry.get("usual", 0)
