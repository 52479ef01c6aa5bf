"""``Expert``: the weights of one expert of a mixture, where they are in files, and what it is worth in memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from nvme_ops.base.settings import PAGE
from nvme_ops.io.tensors import DEVICE_ALIGNMENT
from nvme_ops.offload.residency.files import FileEntry
from nvme_ops.storage.source import FileExtent, Source

#: Tokens after which a use counts half. Experts differ in how often they are used, and topics change slowly.
_HALF_LIFE = 128
_DECAY = 0.5 ** (1 / _HALF_LIFE)


class Expert(FileEntry):
    """All weights of one expert, which are used together, in one piece of memory.

    Args:
        group: the index of its layer.
        sources: its weights.
        device: where they are used.
    """

    guessed: int | None = None  #: the quarter of the guess by which it was read, until that is settled
    _count = 0.0  # of uses; older ones count less
    _at = 0.0  # the time of the group when they were counted
    worth = -math.inf  #: orders experts by their uses; the order stays the same while time passes
    stream: torch.Stream | None = None  #: in whose order an accelerator's memory is reused, if it may sink
    offered = 0  #: the number under which it was last offered to leave memory

    def __init__(self, group: int, sources: Sequence[Source], device: torch.device) -> None:
        self.group = group
        reads, self.places, nbytes = _layout(sources, device)
        super().__init__(reads, nbytes)

    def note_use(self, tokens: int, among: int, now: float) -> None:
        """Counts a use by ``tokens`` of ``among`` tokens, the last of them at ``now``, in tokens."""
        # as many uses as ``among`` tokens that came one by one would have made
        made = tokens / among * (1 - _DECAY**among) / (1 - _DECAY)
        self._count = self._count * _DECAY ** (now - self._at) + made
        self._at = now
        self.worth = math.log2(self._count) + now / _HALF_LIFE


def experts_of(groups: Sequence[Sequence[Sequence[Source]]], device: torch.device) -> list[list[Expert]]:
    """Returns experts: for each layer, for each of its experts, their weights."""
    return [[Expert(number, sources, device) for sources in group] for number, group in enumerate(groups)]


def _layout(
    sources: Sequence[Source], device: torch.device
) -> tuple[list[tuple[FileExtent, int]], dict[Source, int], int]:
    """Returns the reads that fill the memory of an expert, at which byte each source begins, and the bytes in all.

    Whole pages are read, which needs no copy, and sources that follow each other in a file by one read.
    """
    reads: list[tuple[FileExtent, int]] = []
    places: dict[Source, int] = {}
    nbytes = 0
    for run in _runs(sources, device):
        first = run[0].extents[0]
        if len(run[0].extents) > 1 or not _is_aligned(run[0], device):
            reads += [(extent, nbytes + at) for extent, at in run[0].placed()]
            places[run[0]] = nbytes
            nbytes += -(-run[0].nbytes // PAGE) * PAGE
            continue
        skipped = first.start % PAGE
        length = skipped + sum(source.nbytes for source in run)
        start, room = first.start - skipped, -(-length // PAGE) * PAGE
        reads.append((FileExtent(first.file, start, min(first.file.size - start, room)), nbytes))
        at = nbytes + skipped
        for source in run:
            places[source] = at
            at += source.nbytes
        nbytes += room
    return reads, places, nbytes


def _runs(sources: Sequence[Source], device: torch.device) -> Iterable[list[Source]]:
    """Yields sources that follow each other in a file together, and the others alone."""
    run: list[Source] = []
    for source in sorted(sources, key=lambda source: (source.extents[0].file.path, source.extents[0].start)):
        if run and _follows(run[-1], source) and _is_aligned(source, device) and _is_aligned(run[-1], device):
            run.append(source)
            continue
        if run:
            yield run
        run = [source]
    if run:
        yield run


def _follows(one: Source, other: Source) -> bool:
    if len(one.extents) > 1 or len(other.extents) > 1:
        return False
    (file, start, nbytes), after = one.extents[0], other.extents[0]
    return after.file is file and after.start == start + nbytes


def _is_aligned(source: Source, device: torch.device) -> bool:
    """Returns whether a tensor may begin at the same byte of a page as in its file."""
    alignment = source.dtype.itemsize if device.type == "cpu" else DEVICE_ALIGNMENT
    return source.extents[0].start % PAGE % alignment == 0
