"""Moves tensors of a checkpoint to those of a planner, and verifies their checksums."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

from nvme_ops.checksums import checksum_of, checksums_of, joined
from nvme_ops.dcp.items import CHECKSUM, grouped
from nvme_ops.dcp.spans import in_one_piece, spans
from nvme_ops.dcp.stored import Stored
from nvme_ops.errors import ChecksumError
from nvme_ops.future import IoFuture
from nvme_ops.handle import aio_handle
from nvme_ops.memory.carve import is_plain
from nvme_ops.memory.ring import InFlight, Place, Ring

_GROUP = 256 << 20  # bytes of items requested from the planner at once; two groups are in flight


@dataclass(frozen=True)
class Wanted:
    """An item of a plan and its place: ``length`` bytes of a file, in which ``stored`` is its tensor."""

    item: ReadItem
    path: str
    offset: int
    length: int
    checksum: int | None
    stored: Stored | None = None

    @property
    def name(self) -> str:
        """The name in the state dict."""
        return str(self.item.storage_index.fqn)


@dataclass
class _Group:
    """Reads in flight, and what has to be done when they end."""

    future: IoFuture
    targets: list[tuple[Wanted, torch.Tensor]] = field(default_factory=list)
    framed: list[tuple[Wanted, torch.Tensor, torch.Tensor, torch.Tensor]] = field(default_factory=list)


class Loading:
    """One ``load`` of one rank."""

    def __init__(self, handle: aio_handle, planner: LoadPlanner, verify: bool, folder: str) -> None:
        self._handle, self._planner, self._verify, self._folder = handle, planner, verify, folder
        self._ring = Ring()
        self._verified: set[tuple[str, int]] = set()
        self._wrong: dict[str, None] = {}  # names, each once, in order

    def verify_in_files(self, wanted: Iterable[Wanted]) -> None:
        """Reads the items for their checksums, each once; ``read`` raises the differences."""
        for one in wanted:
            if not self._verify or (one.path, one.offset) in self._verified:
                continue
            self._verified.add((one.path, one.offset))
            found = 0
            for piece in self._ring.read(self._handle, [Place(one.path, one.offset, one.length)]):
                found = checksum_of(piece, CHECKSUM, found)
            if found != one.checksum:
                self._wrong[one.name] = None

    def read(self, wanted: Sequence[Wanted]) -> None:
        """Fills the planner's tensors. Raises ChecksumError with the names of all damaged ones."""
        with InFlight() as in_flight:
            for wanted_group in _groups(wanted):
                group = self._start(wanted_group)
                in_flight.add(group.future, functools.partial(self._finish, group))
        if self._wrong:
            raise ChecksumError(self._folder, list(self._wrong))

    def _start(self, group: Sequence[tuple[Wanted, Stored]]) -> _Group:
        """Starts reads straight into the targets, and copies the rest."""
        targets: list[tuple[Wanted, torch.Tensor]] = []
        framed: list[tuple[Wanted, torch.Tensor, torch.Tensor, torch.Tensor]] = []
        reads: list[tuple[torch.Tensor, str, int]] = []
        others: list[tuple[Wanted, Stored, torch.Tensor]] = []
        for one, stored in group:
            target = self._planner.resolve_tensor(one.item).detach()
            if tuple(target.shape) != tuple(one.item.lengths):
                raise ValueError(
                    f"{one.path}: {one.name!r}: {tuple(one.item.lengths)} is to be read, and the tensor for it is "
                    f"{tuple(target.shape)}"
                )
            targets.append((one, target))
            start = in_one_piece(stored, one.item.storage_offsets, one.item.lengths)
            if start is None or target.dtype != stored.dtype or not is_plain(target):
                others.append((one, stored, target))
                continue
            reads.append((target, one.path, start))
            if self._verify and target.device.type == "cpu" and target.nbytes == stored.nbytes:
                around = torch.empty(one.length - stored.nbytes, dtype=torch.uint8)
                head, tail = around[: start - one.offset], around[start - one.offset :]
                reads.extend([(head, one.path, one.offset), (tail, one.path, start + stored.nbytes)])
                framed.append((one, head, target, tail))
            elif self._verify:
                self.verify_in_files([one])
        with InFlight() as in_flight:  # waits for what is in flight if this fails
            in_flight.add(future := self._handle.submit_preadv(*_columns(reads)))
            self.verify_in_files(one for one, *_ in others)
            self._copy(others)
            in_flight.hand_over()
        return _Group(future, targets, framed)

    def _copy(self, wanted: Iterable[tuple[Wanted, Stored, torch.Tensor]]) -> None:
        """Reads what cannot be read into its target, and copies the parts wanted."""
        parts = [
            (one.path, span)
            for one, stored, target in wanted
            for span in spans(stored, one.item.storage_offsets, one.item.lengths, target)
            if span.nbytes
        ]
        held = self._ring.read(self._handle, (Place(path, span.start, span.nbytes) for path, span in parts))
        for (_, span), found in zip(parts, held, strict=True):
            span.target.copy_(found.view(span.dtype).view(span.shape)[span.part])

    def _finish(self, group: _Group) -> None:
        payloads = checksums_of([target for _, _, target, _ in group.framed], CHECKSUM)
        for (one, head, target, tail), payload in zip(group.framed, payloads, strict=True):
            found = joined(checksum_of(head, CHECKSUM), payload, target.nbytes, CHECKSUM)
            if checksum_of(tail, CHECKSUM, found) != one.checksum:
                self._wrong[one.name] = None
        for one, target in group.targets:
            self._planner.commit_tensor(one.item, target)


def _groups(wanted: Sequence[Wanted]) -> Iterator[list[tuple[Wanted, Stored]]]:
    """Groups items in the order of the files, so that neighbours are read as one run."""
    found = [(one, one.stored) for one in wanted if one.stored is not None]
    found.sort(key=lambda each: (each[0].path, each[1].start))
    return grouped(found, lambda each: each[1].nbytes, _GROUP)


def _columns(reads: Sequence[tuple[torch.Tensor, str, int]]) -> tuple[list[torch.Tensor], list[str], list[int]]:
    return [each[0] for each in reads], [each[1] for each in reads], [each[2] for each in reads]
