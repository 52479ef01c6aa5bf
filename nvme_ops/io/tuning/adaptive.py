"""``Learner``: what the adaptive handles of a process have learned about one device. It ends with the process.

Native code chooses the tool of a transfer: ``csrc/engine/experience.h``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nvme_ops.base.text import rate_words, size_words
from nvme_ops.filesystem.device import nearest
from nvme_ops.io.arguments import CACHE
from nvme_ops.io.engine import AUTOMATIC

if TYPE_CHECKING:
    from nvme_ops.ops.async_io import Experience

MODE = "NVME_OPS_ADAPTIVE"
_MODES = ("learn", "off")
_MAX_LANES = 8  # more do not copy from the page cache any faster
# By their numbers in the native module
_PLACES = ("pageable", "aligned", "pinned", "device")
_CONCURRENCY = ("waited", "alone", "crowd")
_CACHES = ("auto", "direct", "buffered")
_SMALLEST = 4096  # bytes: the first class; each further class is four times as large
_CLASSES = 10


@dataclass(frozen=True)
class Tool:
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
class TransferClass:
    """What is known about one class of transfers."""

    op: str  #: ``read`` or ``write``
    most_bytes: int | None  #: of a transfer; over a quarter of it, except in the first class. None: more than 256 MiB
    place: str  #: of the tensor: ``pageable``, ``aligned``, ``pinned`` (or in huge pages), ``device``
    cached: bool  #: the page cache had most of the bytes
    concurrency: str  #: ``waited``: nothing else in flight, the caller waits; ``alone``: it does not; ``crowd``
    tools: tuple[Tool, ...]  #: the handle's own settings first
    chosen: int  #: index of the tool in use
    exploring: bool  #: other tools are being tried
    explorations: int  #: number begun
    transfers: int  #: before it was frozen
    frozen: bool  #: no tool is tried or measured any more

    def __str__(self) -> str:
        size = f"up to {size_words(self.most_bytes)}" if self.most_bytes else "more than 256 MiB"
        cached = ", in the page cache" if self.cached else ""
        state = "frozen" if self.frozen else "exploring" if self.exploring else "settled"
        state = state if len(self.tools) > 1 else "no choice"
        head = f"{self.op} {size}, {self.place}{cached}, {self.concurrency}: {state} after {self.transfers} transfers"
        order = sorted(range(len(self.tools)), key=lambda number: number != self.chosen)
        return "\n".join([head, *(self._line(number) for number in order)])

    def _line(self, number: int) -> str:
        tool = self.tools[number]
        used = "-> " if number == self.chosen else "   "
        own = " (the handle's settings)" if number == 0 else ""
        if tool.cost is None:
            return f"  {used}{tool.words()}{own}" + (": not measured" if len(self.tools) > 1 else "")
        return f"  {used}{tool.words()}{own}: {rate_words(1 / tool.cost)}"


class Learner:
    """What the handles of this process with the same settings have learned about one device."""

    def __init__(self, *arguments: Any) -> None:
        self._arguments = arguments
        self._experiences: dict[str, Experience] = {}  # by the native module that moves the bytes
        self._frozen = False

    def experience(self, module: Any) -> Experience:
        """Returns the native ``Experience`` for engines of this module."""
        name = module.__name__.rpartition(".")[2]
        if name not in self._experiences:
            made = module.Experience(*self._arguments, name == "gds")
            self._experiences.setdefault(name, made)  # another thread may have been faster
            if self._frozen:
                self.freeze()
        return self._experiences[name]

    def freeze(self) -> None:
        """Makes every handle that uses it keep to what is known."""
        self._frozen = True  # first: experiences that are made meanwhile are frozen, too
        for experience in list(self._experiences.values()):
            experience.freeze()

    def learned(self) -> list[TransferClass]:
        """Returns what is known about each class."""
        return [self._class(*entry) for made in list(self._experiences.values()) for entry in made.entries()]

    def explain(self, learned: list[TransferClass]) -> str:
        """Describes what was ``learned``."""
        lines = list(map(str, learned)) or ["nothing was transferred yet"]
        return "\n".join(lines + ["frozen: all other transfers use the handle's settings"] * self._frozen)

    def _class(
        self,
        fields: tuple[int, ...],
        tools: list[Any],
        costs: list[float],
        chosen: int,
        exploring: bool,
        explorations: int,
        transfers: int,
    ) -> TransferClass:
        op, size, place, cached, concurrency = fields
        most_bytes = _SMALLEST * 4**size if size + 1 < _CLASSES else None
        return TransferClass(
            op="write" if op else "read",
            most_bytes=most_bytes,
            place=_PLACES[place],
            cached=bool(cached),
            concurrency=_CONCURRENCY[concurrency],
            tools=tuple(map(_tool, tools, costs)),
            chosen=chosen,
            exploring=exploring and not self._frozen,
            explorations=explorations,
            transfers=transfers,
            frozen=self._frozen,
        )


def _tool(tool: tuple[int, int, int, bool, bool, int], cost: float) -> Tool:
    block_size, queue_depth, lanes, in_place, bounce, cache = tool
    return Tool(block_size, queue_depth, lanes, in_place, bounce, _CACHES[cache], cost or None)


#: By the device and everything else that affects what is learned.
_learners: dict[tuple[Any, ...], Learner] = {}


def learner_of(
    path: str | os.PathLike[str], way: str, backend: str, settings: Mapping[str, Any], given: Mapping[str, Any]
) -> Learner | None:
    """Returns what handles with these settings learn with, made if necessary; None if they are not to learn.

    Args:
        path: a file or folder on the device, or one to be created there.
        way: as for ``aio_handle.tuned``.
        backend: the handle's.
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
    )
    status = os.stat(nearest(path))
    device = status.st_rdev or status.st_dev  # the first: of the path, if it is a block device
    return _learners.setdefault((device, way, backend, *arguments), Learner(*arguments))


def forget() -> None:
    """Makes new handles know nothing; existing ones retain what they know."""
    _learners.clear()
