"""``Experts``: those of a mixture that are in memory or being read.

Which experts a token needs is known when its router has computed, not before. So they are not read in a foreseen order,
as ``Window`` reads weights, but kept in memory by how often and how recently they were used, and those of a layer that
are missing are read together.
"""

from __future__ import annotations

import contextlib
import functools
import heapq
import math
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from nvme_ops.base.text import size_words
from nvme_ops.io.engine import Priority
from nvme_ops.io.future import IoFuture
from nvme_ops.io.handle import aio_handle
from nvme_ops.memory.tier import Share
from nvme_ops.offload.experts.expert import Expert
from nvme_ops.offload.experts.guesses import LayerGuesses, Trial
from nvme_ops.offload.experts.host_experts import HostExperts
from nvme_ops.offload.residency.copies import Copy
from nvme_ops.offload.residency.entry import current_stream
from nvme_ops.offload.residency.files import ModelFiles
from nvme_ops.offload.residency.policy import Policy, Stats
from nvme_ops.offload.residency.residency import Residency
from nvme_ops.storage.source import Source

_ALL_USED = 8  # passes that use all experts, one after the other, until a list of modules is taken for no mixture
_RISES = 1.0  # how much more than another one an expert is worth that takes its place on an accelerator: twice the uses
#: Blocks in flight, of 1 MiB. A device serves all that are in flight together, and those of the last expert would keep
#: back the first; four reach its rate.
_IN_FLIGHT = 4


@dataclass(repr=False)
class ExpertStats(Stats):
    """Counts how experts were found and read."""

    experts_used: int = 0  #: each once for a layer and batch
    expert_hits: int = 0  #: of these, those that were in memory
    bytes_hit: int = 0  #: of these
    experts_on_host: int = 0  #: of those used, those that the CPU computed with, beside an accelerator
    guesses_right: int = 0  #: experts that were read by a guess, and then used
    guesses_wrong: int = 0
    bytes_guessed_right: int = 0
    bytes_guessed_wrong: int = 0


class _Uses:
    """What one thread computes with."""

    def __init__(self) -> None:
        self.current: Expert | None = None
        self.expected: dict[Expert, None] = {}  # in the order of their use
        self.counted = set[Expert]()  # of the layer, whose use is counted already
        self.on_host = set[Expert]()  # of these, those that the CPU computes with
        self.layer, self.chosen = -1, list[int]()  # used last, and its experts
        self.likely: dict[Expert, int] = {}  # guessed for the next layer, with their quarters
        self.unread = list[Expert]()  # of these, the most likely one last
        self.step = 0, 0.0  # the latest one: its tokens, and when it began

    def spares(self, expert: Expert) -> bool:
        """Returns whether an expert is to stay: it is in use, or soon to be."""
        return expert is self.current or expert in self.expected or expert in self.likely


class _Layer:
    """How one layer's experts are used."""

    def __init__(self) -> None:
        self.now = 0.0  # tokens computed
        self.guesses = LayerGuesses()
        self.tried: dict[Expert, int] = {}  # guesses that were not read, to see whether they are right
        self.used = 0  # experts used since its router has computed
        self.tokens = 0  # for which it has computed
        self.full = 0  # passes, the latest ones, that used all experts
        self.per_token = 0  # experts that one token uses, where only the router's scores are seen
        #: How often experts followed each of the layer before; None while nobody asks.
        self.after: dict[int, Counter[int]] | None = None


class Experts(Policy[Expert]):
    """Experts in a bounded amount of memory: those that are used often and were used lately.

    Any thread may call any method. An expert's memory is freed with the last tensor over it.

    Args:
        residency: may be shared.
        share: memory where they are used, at least for the largest expert.
        groups: the experts of each layer, in the order of use.
        host: has those that leave an accelerator.
    """

    patience = 60.0
    gives_way = True
    _closed_error = "the weights of this model were closed"
    _forked_error = "these weights are streamed by the parent process: load the model in this one"
    counts: ExpertStats

    def __init__(
        self, residency: Residency, share: Share, groups: Sequence[Sequence[Expert]], host: HostExperts | None = None
    ) -> None:
        self._residency, self.host = residency, host
        super().__init__(residency.lock, share, host or ModelFiles(), ExpertStats())
        self.groups = groups
        self.largest = max(expert.nbytes for group in groups for expert in group)
        self._sinking = deque[tuple[Copy, torch.Tensor]]()  # memory that has been given up, but for these copies
        self._of = {source: expert for group in groups for expert in group for source in expert.places}
        self._layers = [_Layer() for _ in groups]
        self.guessing = True
        self._trial = Trial()
        self.all_used = False  #: in so many passes that these are no experts
        self._threads: dict[int, _Uses] = {}
        self._offered: list[tuple[float, int, Expert]] = []  # a heap, by worth; those with another number are stale
        self._offers = 0
        residency.join(self)

    def __contains__(self, source: Source) -> bool:
        """Returns whether these are bytes of an expert's weight."""
        return any(holder in self._of for holder, _ in source.holders())

    def fetch(self, source: Source) -> torch.Tensor:
        """Returns a weight as it is stored, not to be changed. Raises what ``Window.fetch`` does."""
        return self.fetch_together([source])[0]

    def fetch_together(self, sources: Sequence[Source]) -> list[torch.Tensor]:
        """Returns several weights of one expert, or parts of these."""
        placed = [next(place for place in source.holders() if place[0] in self._of) for source in sources]
        expert = self._of[placed[0][0]]
        memory = self._residency.fetch(self, expert, expert)
        return _over(memory, expert, placed, sources)

    def on_host(self, sources: Sequence[Source]) -> list[torch.Tensor] | None:
        """Returns weights in host memory if the CPU is to compute with that expert, and tells ``computed`` later."""
        with self.lock:
            self._require_ours()
            if self.host is None or not (on_host := self._uses().on_host):
                return None
            placed = [next(place for place in source.holders() if place[0] in self._of) for source in sources]
            expert = self._of[placed[0][0]]
            if expert not in on_host or (memory := self.host.values(expert)) is None:
                return None
            self.counts.experts_on_host += 1
        return _over(memory, expert, placed, sources)

    def computed(self, source: Source, tokens: int, seconds: float) -> None:
        """Counts how long the CPU has computed with an expert, one of whose weights is ``source``."""
        with self.lock:
            if self.host is not None and self.host.computing is not None:
                expert = self._of[next(holder for holder, _ in source.holders() if holder in self._of)]
                self.host.computing.note_computing(expert.nbytes, tokens, seconds)

    def expect(self, group: int, tokens: Mapping[int, int], among: int) -> None:
        """Begins to read what is missing of the experts that the calling thread uses next.

        Args:
            group: the layer.
            tokens: by the index of an expert, in the order of use: how many tokens use it.
            among: tokens of the batch.
        """
        with self.lock:
            if not self.is_usable():
                return
            uses = self._uses()
            released = self._release(uses)
            uses.expected = {self.groups[group][index]: None for index in tokens}
            uses.counted = set(uses.expected)
            self._note_pass(uses, group, among)
            self._layers[group].now += among
            for index, count in tokens.items():
                self._note(self.groups[group][index], count, among)
            self._settle(group)
            self._offer(released)
            after = self._layers[group].after
            if after is not None and among == 1 and uses.layer == group - 1:
                for before in uses.chosen:
                    after[before].update(tokens)
            uses.layer, uses.chosen = group, list(tokens)
            if self.host is not None and self.host.computing is not None:
                uses.on_host = {
                    self.groups[group][index] for index, count in tokens.items() if self._stays(group, index, count)
                }
                uses.expected = {expert: None for expert in uses.expected if expert not in uses.on_host}
            self._read_expected(uses)

    def _stays(self, group: int, index: int, tokens: int) -> bool:
        """Returns whether the CPU is to compute with an expert, as it is sooner and others here are used as often."""
        expert, host = self.groups[group][index], self.host
        if host is None or host.computing is None or expert.values is not None or expert not in host.entries():
            return False
        while self._offered and self._is_stale(self._offered[0]):
            heapq.heappop(self._offered)
        least = self._offered[0][0] if self._offered else math.inf
        return expert.worth < least + _RISES and host.computing.is_sooner(tokens)

    def may_guess(self, group: int) -> bool:
        """Returns whether a guess of a layer's experts is worth the time to make it."""
        layer = self._layers[group]
        return (
            self.guessing
            and self._trial.guessing
            and layer.guesses.is_due(layer.now)
            and any(expert.values is None for expert in self.groups[group])
        )

    def guess(self, group: int, indices: Collection[int]) -> None:
        """Begins to read experts that will perhaps be used soon, with bandwidth that nothing else needs.

        Once it is known which are used, reads of the others end.

        Args:
            group: the layer.
            indices: the experts, the most likely ones first.
        """
        with self.lock:
            if not self.is_usable():
                return
            layer, uses = self._layers[group], self._uses()
            likely = {
                self.groups[group][index]: LayerGuesses.quarter(place, len(indices))
                for place, index in enumerate(indices)
            }
            missing = {expert: quarter for expert, quarter in likely.items() if expert.values is None}
            layer.tried = {
                expert: quarter for expert, quarter in missing.items() if not layer.guesses.is_worth_it(quarter)
            }
            self._offer(uses.likely)
            uses.likely = likely
            uses.unread = [expert for expert in missing if expert not in layer.tried][::-1]
            self._read_expected(uses)

    def following(self, group: int, indices: Collection[int]) -> list[int]:
        """Returns the experts of a layer that most often followed these of the layer before, as many as these."""
        followers = Counter[int]()
        with self.lock:
            layer = self._layers[group]
            if layer.after is None:
                layer.after = defaultdict(Counter)
            for index in indices:
                followers.update(layer.after[index])
        return [index for index, _ in followers.most_common(len(indices))]

    def begin_pass(self, group: int, tokens: int) -> int:
        """Records that a layer's router has computed; returns how many experts a token uses, 0 if that is not known."""
        with self.lock:
            layer = self._layers[group]
            if layer.tokens == 1:
                layer.per_token = layer.used
            layer.full = layer.full + 1 if layer.used == len(self.groups[group]) else 0
            self.all_used = all(usage.full >= _ALL_USED for usage in self._layers)
            layer.tokens, layer.used = tokens, 0
            self._note_pass(self._uses(), group, tokens)
            self._settle(group)
            return layer.per_token

    def in_memory(self, group: int, index: int) -> bool:
        """Returns whether an expert's values are there, without a wait."""
        expert = self.groups[group][index]
        return (expert.values is not None and not expert.is_arriving()) or self.is_on_host(group, index)

    def is_on_host(self, group: int, index: int) -> bool:
        """Returns whether the CPU is to compute with an expert."""
        return self.host is not None and self.groups[group][index] in self._uses().on_host

    def stats(self) -> ExpertStats:
        """Returns what was used and read so far."""
        with self.lock:
            stats = replace(self.counts, bytes_in_memory=self.share.bytes_in_use, peak_bytes=self.share.peak)
            if (host := self.host) is not None:
                stats.note_host(host.share, host.counts, *host.streams)
            return stats

    # The policy

    def allocate(self, entry: Expert) -> torch.Tensor | None:
        """Returns memory apart from that of other weights."""
        while (memory := self.share.allocate(entry.nbytes, at_end=True)) is None and self._sinking:
            self._end_sinking()
        if self.host is not None:
            entry.stream = current_stream(self.share.device)
        return memory

    def _end_sinking(self) -> None:
        """Frees the memory of the expert that began to sink first: the current stream waits for its copy."""
        copying, _ = self._sinking[0]
        copying.before(self.share.device)
        copying.release()
        self._sinking.popleft()

    def give_back(self) -> None:
        """Frees the memory of experts that sink."""
        while self._sinking:
            self._end_sinking()

    def _sink_ahead(self) -> None:
        """Has memory for one more expert, so that the next one need not wait until another one has sunk."""
        if self.host is not None:
            needed = self.largest - sum(memory.nbytes for _, memory in self._sinking)
            if self.share.nbytes - self.share.bytes_in_use < needed:
                self._residency.make_room(self, needed, 0)

    def note_use(self, use: Expert) -> None:
        """Records a use, and reads what the thread uses next."""
        uses = self._uses()
        if uses.current is use:  # another weight of the same expert
            return
        before, uses.current = uses.current, use
        uses.likely.pop(use, None)
        if use in uses.expected:
            del uses.expected[use]
        elif use not in uses.counted:  # another weight of each expert, after the first of each
            self._layers[use.group].now += 1
            self._note(use, 1, 1)
        if before is not None:
            self._offer([before])
        self._read_expected(uses)

    def _note(self, expert: Expert, tokens: int, among: int) -> None:
        """Counts a use."""
        layer = self._layers[expert.group]
        layer.used += 1
        self.counts.experts_used += 1
        if expert.guessed is not None:
            layer.guesses.judge(expert.guessed, True)
            layer.guesses.note_read(needed=True)
            expert.guessed = None
            self.counts.guesses_right += 1
            self.counts.bytes_guessed_right += expert.nbytes
        elif expert.values is not None and not (expert.demanded and expert.arrival is not None):  # begun for this use
            self.counts.expert_hits += 1
            self.counts.bytes_hit += expert.nbytes
        else:
            layer.guesses.note_read(needed=True)
            if expert in layer.tried:
                layer.guesses.judge(layer.tried.pop(expert), True)
        expert.note_use(tokens, among, layer.now)

    def _read_expected(self, uses: _Uses) -> None:
        """Fetches, as far as memory allows, what the thread uses next: the first read is the first needed."""
        # each by a call of its own: one for all, once there is memory for the last, is no faster for experts of 3 MiB
        # and a tenth slower for small ones
        for expert in uses.expected:
            if expert.values is None and not self._residency.begin(self, expert, Priority.DEMAND, 0):
                return
        while uses.unread:
            expert = uses.unread[-1]
            quarter = uses.likely.get(expert)
            if expert.values is None and quarter is not None:
                if not self._residency.begin(self, expert, Priority.PREFETCH, 0):
                    return
                expert.guessed = quarter
            uses.unread.pop()
        self._sink_ahead()

    def _note_pass(self, uses: _Uses, group: int, tokens: int) -> None:
        """Counts, at its first layer, how long the step before took, if it had as many tokens."""
        if group == 0:
            now, (before, began) = time.perf_counter(), uses.step
            uses.step = tokens, now
            if tokens == before:
                self._trial.note_step(tokens, now - began)

    def _settle(self, group: int) -> None:
        """Counts the guesses for a layer that were wrong, and ends their reads."""
        layer = self._layers[group]
        for quarter in layer.tried.values():
            layer.guesses.judge(quarter, False)
        layer.tried = {}
        for expert in self.groups[group]:
            if expert.guessed is not None:
                self._refute(expert)
                if expert.is_arriving():
                    self.discard(expert)
                self._offer([expert])

    def _refute(self, expert: Expert) -> None:
        if expert.guessed is not None:
            guesses = self._layers[expert.group].guesses
            guesses.judge(expert.guessed, False)
            guesses.note_read(needed=False)
            expert.guessed = None
            self.counts.guesses_wrong += 1
            self.counts.bytes_guessed_wrong += expert.nbytes

    def _uses(self) -> _Uses:
        """Returns the uses of the calling thread, and forgets those of threads that have ended."""
        thread = threading.get_ident()
        if thread not in self._threads:
            alive = {running.ident for running in threading.enumerate()}
            for ended in self._threads.keys() - alive:
                self._offer(self._release(self._threads.pop(ended)))
            self._threads[thread] = _Uses()
        return self._threads[thread]

    def _release(self, uses: _Uses) -> list[Expert]:
        """Forgets what a thread was about to use, and returns it."""
        before = [*uses.expected, *uses.likely]
        if uses.current is not None:
            before.append(uses.current)
        uses.expected, uses.likely, uses.unread, uses.current, uses.on_host = {}, {}, [], None, set()
        return before

    def _offer(self, experts: Iterable[Expert]) -> None:
        """Lets experts leave memory when another needs it."""
        for expert in experts:
            if expert.values is not None:
                self._offers += 1
                expert.offered = self._offers
                heapq.heappush(self._offered, (expert.worth, expert.offered, expert))
        if len(self._offered) > 4 * len(self.present) + 64:
            self._offered = [item for item in self._offered if not self._is_stale(item)]
            heapq.heapify(self._offered)

    @staticmethod
    def _is_stale(item: tuple[float, int, Expert]) -> bool:
        return item[2].values is None or item[1] != item[2].offered

    def victims(self, after: int) -> Iterator[Expert]:
        """Yields the experts that are worth least, but none that a thread is about to use unless this one must wait."""
        stayed = []
        try:
            while self._offered:
                item = heapq.heappop(self._offered)
                expert = item[2]
                if self._is_stale(item):
                    continue
                if expert.guessed is not None or any(uses.spares(expert) for uses in self._threads.values()):
                    continue  # who uses it offers it again
                stayed.append(item)
                yield expert
        finally:
            for item in stayed:
                if item[2].values is not None:
                    heapq.heappush(self._offered, item)
        if after < 0:
            guessed = [expert for expert in self.present if expert.guessed is not None]
            expected = [expert for uses in self._threads.values() for expert in [*uses.expected, *uses.likely]]
            # all in memory at last: Ctrl-C may have come before something was offered
            last = dict.fromkeys([*guessed, *reversed(expected), *self.present])
            yield from [expert for expert in last if expert.values is not None]

    def note_eviction(self, entry: Expert) -> None:
        """Counts a guess that was in vain, and has an expert sink that is complete."""
        self._refute(entry)
        memory, arrival = entry.memory, entry.arrival
        if self.host is None or memory is None or (arrival is not None and not _has_arrived(arrival)):
            return
        with contextlib.suppress(RuntimeError):  # else it is read again
            if (copying := self.host.sink(entry)) is not None:
                if entry.stream == current_stream(memory.device):
                    self._sinking.append((copying, memory))
                else:
                    copying.wait(None)

    def close(self) -> None:
        """Closes the experts in host memory, too. See ``Policy.close``."""
        super().close()
        if self.host is not None and self._is_ours():
            self.host.close()  # waits for what sinks
            self._sinking.clear()

    def out_of_memory(self, entry: Expert) -> MemoryError:
        """Returns an error that says what others have."""
        return MemoryError(
            f"no memory for an expert of {size_words(entry.nbytes)}: others that are in use have "
            f"{size_words(self.share.bytes_in_use)} of {size_words(self.share.nbytes)}"
        )


def _over(
    memory: torch.Tensor, expert: Expert, placed: Sequence[tuple[Source, int]], sources: Sequence[Source]
) -> list[torch.Tensor]:
    """Returns weights, or parts of these, over the memory of their expert."""
    starts = [expert.places[holder] + begin for holder, begin in placed]
    return [
        memory[start : start + source.nbytes].view(source.dtype).view(source.shape)
        for start, source in zip(starts, sources, strict=True)
    ]


def _has_arrived(transfer: IoFuture) -> bool:
    return transfer.done() and transfer.exception() is None


@functools.cache
def handle_in_order() -> aio_handle:
    """Returns a handle, one for the whole process, by which what was requested first arrives first."""
    return aio_handle(queue_depth=_IN_FLIGHT)
