"""``Window``: the weights of a streamed model that are in memory or being read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate

import torch

from nvme_ops.base.settings import ALIGNMENT, PAGE
from nvme_ops.base.text import size_words
from nvme_ops.io.engine import Priority
from nvme_ops.io.future import IoFuture
from nvme_ops.io.tensors import DEVICE_ALIGNMENT, empty
from nvme_ops.memory.tier import Share, tier_on
from nvme_ops.offload.experts.experts import Experts, ExpertStats
from nvme_ops.offload.residency.entry import QueuedWork
from nvme_ops.offload.residency.files import FileEntry, ModelFiles
from nvme_ops.offload.residency.host_copies import HostCopies
from nvme_ops.offload.residency.order import Order
from nvme_ops.offload.residency.placement import STAYED, placements
from nvme_ops.offload.residency.policy import Policy
from nvme_ops.offload.residency.residency import Residency
from nvme_ops.storage.source import FileExtent, Source, submit_reads

#: An embedding is read as a whole if more than 1 / MANY_ROWS of its rows are used.
MANY_ROWS = 4
# How often reading ahead is planned while the memory is used once: planning looks at every weight that fits.
_PLANS = 64


@dataclass(repr=False)
class WindowStats(ExpertStats):
    """Counts what was read of a model's weights."""

    uses: int = 0  #: of weights
    bytes_kept: int = 0  #: of weights chosen to stay that are in memory now
    quantization_error: float = 0.0  #: root mean square error of weights quantized here, relative to their own


class _Weight(FileEntry):
    """A weight as it is stored, or the ``expanded`` bytes that it is computed with."""

    def __init__(self, source: Source, device: torch.device, expanded: int = 0) -> None:
        skipped, span = source.skipped, source.span
        if device.type != "cpu" and skipped % DEVICE_ALIGNMENT:
            skipped, span = 0, source.nbytes
        if skipped or span > source.nbytes:  # whole pages: read without a copy
            file, start, _ = source.extents[0]
            end = min(file.size, start - skipped + span)
            reads = [(FileExtent(file, start - skipped, end - start + skipped), 0)]
        else:
            reads = list(source.placed())
        super().__init__(reads, expanded or source.span)
        self.source, self.is_expanded, self.room = source, expanded > 0, source.room
        self._skipped = skipped

    def over(self, memory: torch.Tensor) -> torch.Tensor:
        """Returns the weight in its memory."""
        source = self.source
        return memory[self._skipped : self._skipped + source.nbytes].view(source.dtype).view(source.shape)


class Window(Policy[_Weight]):
    """Weights of a model: read ahead of their use into a bounded amount of memory; those stay that are worth it.

    Any thread may call any method. A weight's memory is freed with the last tensor over it.

    Args:
        residency: may be shared.
        share: memory for weights as they are stored, at least ``least_budget`` of them, where they are used.
        foreseen: weights in the order in which they are likely to be used.
        expanding: bytes of memory, beside ``share``, that a weight is expanded into while it is used.
        experts: weights that are read as a router chooses, with a share of the same memory.
        packed: weights that hold those of experts.
        share_of_experts: how many of so many bytes for all weights are for those of experts.
        host: has some of the weights that do not stay, on an accelerator.
        budget_name: of the argument that says how much memory there is.
    """

    patience = 60.0
    gives_way = drops_used = True
    name = "streamed weights"
    _closed_error = "the weights of this model were closed"
    _forked_error = "these weights are streamed by the parent process: load the model in this one"
    counts: WindowStats

    def __init__(
        self,
        residency: Residency,
        share: Share,
        foreseen: Sequence[Source],
        expanding: int = 0,
        experts: Experts | None = None,
        packed: Container[Source] = (),
        share_of_experts: Callable[[int], int] = lambda _: 0,
        host: HostCopies | None = None,
        budget_name: str = "device_budget",
    ) -> None:
        self._residency, self._host, self._budget_name = residency, host, budget_name
        super().__init__(residency.lock, share, host or ModelFiles(), WindowStats())
        # Memory of its own: else prefetched weights would have to leave whenever the gaps between them are too small.
        self._expanding = tier_on(share.device, expanding).share() if expanding else None
        self._weights: dict[Source, _Weight] = {}
        weights = [self._weight(source) for source in foreseen]
        self._order = Order(weights)
        self._keep: set[_Weight] = set()
        self._passed = 0  # bytes of weights used since reading ahead was planned
        self._complete = False  # all weights that the model uses are in memory
        self.experts, self._packed, self._share_of_experts = experts, packed, share_of_experts
        self._counts: Sequence[tuple[_Weight, float]] = [(weight, 1.0) for weight in weights]  # how often each is used
        self._whole = set[Source]()  # packed weights that were used as a whole
        self._left_below = self.host_bytes  # that others leave
        self._most_below = 0 if host is None else host.share.nbytes  # for others than experts, which come after them
        self._place()
        residency.join(self)

    @property
    def nbytes(self) -> int:
        """Bytes of memory for weights as they are stored."""
        return self.share.nbytes + (0 if self.experts is None else self.experts.share.nbytes)

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory for weights, beside that of an accelerator."""
        parts = [self._host, None if self.experts is None else self.experts.host]
        return sum(part.share.nbytes for part in parts if part is not None)

    def fetch(self, source: Source) -> torch.Tensor:
        """Returns a weight as it is stored, not to be changed, and reads ahead what is likely to be used next.

        Raises:
            OSError, EOFError: the weight cannot be read.
            FormatError: its file was changed.
            MemoryError: tensors that the program holds over other weights leave no memory for it.
            ValueError: the window was closed.
        """
        return next(self.fetch_together([source]))

    def fetch_together(self, sources: Sequence[Source]) -> Iterator[torch.Tensor]:
        """Yields weights that are used one after the other; those of one expert are fetched at once."""
        if (experts := self.experts) is not None:
            if experts.all_used:
                self._absorb()
            elif sources[0] in experts:
                try:
                    return iter(experts.fetch_together(sources))
                except ValueError:
                    if self.experts is experts:
                        raise
            elif any(holder in self._packed for holder, _ in sources[0].holders()):
                self._note_whole(sources[0])
        return (self._residency.fetch(self, weight, weight) for weight in map(self._weight, sources))

    def fetch_all(self, sources: Collection[Source]) -> dict[Source, torch.Tensor]:
        """Returns weights that one operation uses at once. Raises what ``fetch`` does."""
        experts = self.experts
        apart = [source for source in sources if experts is not None and (source in experts or source in self._packed)]
        fetched = {source: self.fetch(source) for source in apart}
        rest = [source for source in sources if source not in fetched]
        if (size := sum(source.room for source in rest)) > self.share.nbytes and len(rest) > 1:
            raise MemoryError(
                f"one operation uses {len(rest)} weights, {size_words(size)} together, but the {self._budget_name} "
                f"leaves only {size_words(self.share.nbytes)} for them"
            )
        weights = {weight: weight for weight in map(self._weight, rest)}
        return fetched | dict(zip(rest, self._residency.fetch_together(self, weights) if weights else (), strict=True))

    def room(self, source: Source, nbytes: int) -> torch.Tensor:
        """Returns memory to expand a weight into, a uint8 tensor; it is freed with the last tensor over it.

        If several weights are expanded at once, others leave memory, or this waits. More than ``expanding`` bytes are
        needed only for a conversion by the program itself, and come on top of the budget. Raises MemoryError as
        ``fetch`` does.
        """
        with torch.inference_mode(False):
            if self._expanding is None or not 0 < nbytes <= self._expanding.nbytes:
                return torch.empty(nbytes, dtype=torch.uint8, device=self.share.device)
            expanded = _Weight(source, self.share.device, nbytes)
            return self._residency.room(self, expanded, -1 if nbytes <= self.share.nbytes else 0)

    def _note_whole(self, source: Source) -> None:
        """Records that packed experts are used all at once."""
        if 2 * source.room <= self.share.nbytes and source not in self._whole:
            self._whole.add(source)  # it may have been looked at, no more
        else:
            self._absorb()

    def _absorb(self) -> None:
        """Has experts streamed as other weights are, in the same memory: the model uses them all in each pass."""
        with self.lock:
            if (experts := self.experts) is None:
                return
            self.share.nbytes, self.experts = self.nbytes, None
            experts.close()
            _add(self.counts, experts.stats())
            if self._host is not None and experts.host is not None:
                self._host.share.nbytes += experts.host.share.nbytes

    def _weight(self, source: Source) -> _Weight:
        return self._weights.get(source) or self._weights.setdefault(source, _Weight(source, self.share.device))

    def rows(self, source: Source, indices: Sequence[int], count: int) -> torch.Tensor | None:
        """Returns what is stored of some rows of a matrix that has so many, in new memory.

        None if it is better read as a whole.
        """
        if len(indices) * MANY_ROWS > count:
            return None
        shape = source.shape[1:] if source.shape[0] == count else (source.nbytes // source.dtype.itemsize // count,)
        weight = self._weight(source)
        while (held := self._found(weight)) is not None:  # not recorded as a use: it would be read ahead again
            values, arrival, queued = held
            if arrival is None or self._residency.await_arrival(self, weight, arrival, begun=False):
                if queued is not None:
                    queued.before(values.device)
                return values.view(count, *shape)[list(indices)]
        row = source.nbytes // count
        memory = torch.empty((len(indices), *shape), dtype=source.dtype, device=self.share.device)
        targets, extents = [], []
        for place, index in enumerate(indices):
            parts = source.range(index * row, row)
            if len(parts) != 1:
                return None
            extents += parts
            targets.append(memory[place])
        for transfer in submit_reads(zip(extents, targets, strict=True)):
            transfer.result()
        with self.lock:
            self.counts.bytes_read += row * len(indices)
            self.counts.bytes_on_demand += row * len(indices)
        return memory

    def stats(self) -> WindowStats:
        """Returns what was read so far."""
        with self.lock:
            kept = sum(weight.source.nbytes for weight in self.present if weight in self._keep)
            peak = self.share.peak + (0 if self._expanding is None else self._expanding.peak)
            stats = replace(self.counts, bytes_kept=kept, bytes_in_memory=self.share.bytes_in_use, peak_bytes=peak)
            if (host := self._host) is not None:
                stats.bytes_read += host.counts.bytes_read
                stats.seconds_waited += host.counts.seconds_waited
                stats.note_host(host.share, host.counts, *host.streams)
        if self.experts is not None:
            _add(stats, self.experts.stats())
        return stats

    def note_error(self, error: float) -> None:
        """Sets ``quantization_error`` of ``stats``."""
        self.counts.quantization_error = error

    # The policy

    def require_room(self, entry: _Weight) -> None:
        """Raises MemoryError for a weight that is larger than the budget."""
        if entry.nbytes > self.share.nbytes:
            raise MemoryError(
                f"a weight of {size_words(entry.source.nbytes)} is used as a whole, but the {self._budget_name} leaves "
                f"only {size_words(self.share.nbytes)} for it"
            )

    def bring_below(self, entry: _Weight) -> None:
        """Waits until a weight is in host memory that comes from there."""
        if self._host is not None:
            self._host.bring(entry)

    def allocate(self, entry: _Weight) -> torch.Tensor | None:
        """Returns memory of the share, or that for expanded weights."""
        if entry.is_expanded and self._expanding is not None:
            memory = self._expanding.allocate(entry.nbytes)
            if memory is not None:
                return memory
        return super().allocate(entry)

    def out_of_memory(self, entry: _Weight) -> MemoryError:
        """Returns an error that says what others have."""
        return MemoryError(
            f"no memory for a weight of {size_words(entry.source.nbytes)}: other weights that are in use have "
            f"{size_words(self.share.bytes_in_use)} of {size_words(self.share.nbytes)}"
        )

    def note_use(self, use: _Weight) -> None:
        """Records a use; chooses anew what stays, and reads ahead, from time to time."""
        self.counts.uses += 1
        self._passed += use.room
        as_planned = self._order.use(use) and not use.demanded
        if counts := self._order.end_round():
            self._choose(counts)
            as_planned = False
        if not self._complete and not (as_planned and self._passed * _PLANS < self.share.nbytes):
            self._passed = 0
            self._read_ahead()

    def least(self) -> int:
        """Returns the bytes of memory for the largest weights as they are stored."""
        return self._least

    def wanted(self) -> int:
        """Returns the bytes of memory for all weights as they are stored."""
        return self._wanted

    def set_needs(self, least: int, wanted: int) -> None:
        """Sets what ``least`` and ``wanted`` return."""
        self._least, self._wanted = least, wanted

    def resize(self, nbytes: int) -> None:
        """Sets how much memory there is for weights as they are stored."""
        if self.experts is not None:
            self.experts.share.nbytes = self._share_of_experts(nbytes)
            nbytes -= self.experts.share.nbytes
        if nbytes != self.share.nbytes:
            self.share.nbytes, self._passed = nbytes, nbytes  # has reading ahead planned anew
            self._place()

    def resize_below(self, nbytes: int) -> None:
        """Sets how much host memory there is for weights; experts have what others leave."""
        if self._host is None or nbytes == self._left_below:
            return
        self._left_below, rest = nbytes, nbytes
        if self.experts is not None and self.experts.host is not None:
            rest = min(nbytes, self._most_below)
            below = self.experts.host
            below.share.nbytes = nbytes - rest
            below.resize(below.room([self.experts.largest]))
        self._host.share.nbytes = rest
        self._passed = self.share.nbytes  # has reading ahead planned anew
        self._place()

    def _choose(self, counts: Sequence[tuple[_Weight, float]]) -> None:
        """Chooses anew which weights stay in memory, by how often each was used."""
        self._counts = counts
        self._place()

    def _place(self) -> None:
        """Chooses which weights stay, rather those that have stayed, or many would be read at each change."""
        stayed = {weight for weight in self._keep if weight.memory is None or self.share.is_inside(weight.memory)}
        weights = [
            (weight, uses * (STAYED if weight in stayed else 1.0), weight.room)
            for weight, uses in self._counts
            if uses > 0
        ]
        host, in_host = 0, set[FileEntry]()
        if self._host is not None:
            host = self._host.room([nbytes for _, _, nbytes in weights])
            in_host = self._host.entries(weight for weight, _, _ in weights)
        self._keep, below = placements(weights, self.share.nbytes, host, in_host)
        if self._host is not None:
            self._host.keep(below)
        self._complete = len(self._keep) == len(weights) and self._keep <= self.present.keys()

    def _read_ahead(self) -> None:
        """Fetches, as far as memory allows, weights that stay, those in use and the next ones; drops the others."""
        wanted: list[_Weight] = []
        always = self._keep | self._order.current()
        room = self.share.nbytes - sum([weight.room for weight in always])
        for weight in self._order.ahead():
            if weight not in always:
                room -= weight.room
                if room < 0:
                    break
            wanted.append(weight)
        used = always.union(wanted)
        for unused in [weight for weight in self.present if weight not in used]:
            self.discard(unused)
        for number, weight in enumerate(wanted):
            if weight.values is not None or (self._host is not None and self._host.is_awaited(weight)):
                continue
            if not self._residency.begin(self, weight, Priority.PREFETCH, number):
                break
        if self._host is not None:
            self._host.read_ahead(self._order.ahead())

    def victims(self, after: int) -> Iterable[_Weight]:
        """Returns prefetched weights, those used last first, then weights that are kept, then those in use."""
        if after >= 0:  # a prefetch evicts nothing: unwanted weights have left already
            return []
        current = self._order.current()
        ahead = {weight: number for number, weight in enumerate(self._order.ahead())}

        def worth(weight: _Weight) -> tuple[bool, bool, int]:
            return weight in current, weight in self._keep, -ahead.get(weight, len(ahead))

        return sorted(self.present, key=worth)

    def note_eviction(self, entry: _Weight) -> None:
        """Has reading ahead planned anew."""
        del entry
        self._complete, self._passed = False, self.share.nbytes

    def _found(self, weight: _Weight) -> tuple[torch.Tensor, IoFuture | None, QueuedWork | None] | None:
        with self.lock:
            self.require_open()
            return None if weight.values is None else (weight.values.detach(), weight.arrival, weight.queued)


def _add(stats: WindowStats, others: ExpertStats) -> None:
    for field in fields(others):
        setattr(stats, field.name, getattr(stats, field.name) + getattr(others, field.name))


def memory_for(budget: int, sources: Iterable[Source]) -> int:
    """Returns the bytes of memory that a budget gives to these weights: no more than they take."""
    return max(PAGE, min(budget // PAGE * PAGE, sum(source.room for source in sources)))


def least_budget(sources: Sequence[Source]) -> int:
    """Returns the least budget, in bytes: the largest matrix and bias, which one operation may use together."""
    largest = max((source.room for source in sources), default=0)
    vectors = [source for source in sources if len(source.shape) < 2 and source.dtype != torch.uint8]  # packed matrices
    return largest + max((source.room for source in vectors), default=0)


def read_now(sources: Sequence[Source]) -> list[torch.Tensor]:
    """Returns weights, read into one block of memory, which is freed with the last of them."""
    *starts, size = accumulate((-(-source.nbytes // ALIGNMENT) * ALIGNMENT for source in sources), initial=0)
    memory = empty(size, dtype=torch.uint8)
    pieces = [
        (extent, memory[at + skipped : at + skipped + extent.nbytes])
        for source, at in zip(sources, starts, strict=True)
        for extent, skipped in source.placed()
    ]
    for transfer in submit_reads(pieces):
        transfer.result()
    return [
        memory[at : at + source.nbytes].view(source.dtype).view(source.shape)
        for source, at in zip(sources, starts, strict=True)
    ]
