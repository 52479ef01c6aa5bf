"""``Residency``: entries whose bytes are on storage, and in bounded memory while they are used or soon will be.

Streamed weights, experts, swapped parameters, and keys and values differ in what is used when, and in what is worth
keeping: each is a ``Policy``. The rest is here, once for all: an entry is fetched on demand or ahead of its use, others
leave memory to make room for it, what was changed is written first, a failed prefetch or write is tried again, and a
wait for memory ends with an error after a while.
"""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.profiler import record_function

from nvme_ops.base.errors import free_frames
from nvme_ops.base.lifetime import Patience, forkable_lock
from nvme_ops.base.native import native
from nvme_ops.io.engine import Priority
from nvme_ops.io.future import IoFuture
from nvme_ops.offload.residency.entry import Entry
from nvme_ops.offload.residency.policy import E, Policy

_log = logging.getLogger("nvme_ops")


class Residency:
    """Moves the entries of policies between storage and memory. Any thread may call any method.

    ``logging.getLogger("nvme_ops")`` says at level DEBUG what is brought, evicted and waited for; a trace of
    ``torch.profiler`` has the waits.
    """

    def __init__(self) -> None:
        self.lock = forkable_lock()  #: a policy's own data, too, changes under it
        self._policies: weakref.WeakSet[Policy[Any]] = weakref.WeakSet()

    def join(self, policy: Policy[Any]) -> None:
        """Adds a policy, whose share is of the same memory as those of others."""
        self._policies.add(policy)

    # To memory

    def fetch(self, policy: Policy[E], entry: E, use: Any, *, change: bool = False) -> torch.Tensor:
        """Returns a tensor over the values of an entry once they have arrived, and reads ahead what follows ``use``."""
        return self.fetch_together(policy, {entry: use}, change=change)[0]

    def fetch_together(self, policy: Policy[E], uses: Mapping[E, Any], *, change: bool = False) -> list[torch.Tensor]:
        """Returns the same for entries that are used at once, each with its use; ``change``: they will be changed."""
        patience = Patience(policy.patience)
        while True:
            for entry in uses:
                policy.require_room(entry)
                if entry.values is None:
                    if entry.leaving is not None:
                        self.wait_until_written(policy, entry)
                    policy.bring_below(entry)
            seen = native().endings()
            with self.lock:
                policy.require_open()
                begun = [entry for entry in uses if entry.values is None]
                values: list[torch.Tensor] = []
                if not begun or self._begin_together(policy, begun, uses):
                    values = [entry.values.detach() for entry in uses if entry.values is not None]
                    arrivals = [entry.arrival for entry in uses]
                    for use in uses.values():
                        policy.note_use(use)
            try:
                if not values:
                    self._wait_for_memory(policy, max(uses, key=_size), patience, seen)
                elif all(
                    arrival is None or self.await_arrival(policy, entry, arrival, entry in begun)
                    for entry, arrival in zip(uses, arrivals, strict=True)
                ):
                    for entry in uses:
                        if (queued := entry.queued) is not None:
                            queued.before(values[0].device)  # first, or Ctrl-C could have what has not arrived written
                    if not change or all(self._note_change(policy, *pair) for pair in zip(uses, values, strict=True)):
                        return values
            except BaseException:
                values.clear()  # the traceback would keep them alive
                raise

    def _begin_together(self, policy: Policy[E], missing: Iterable[E], together: Collection[E]) -> bool:
        """Starts to fetch what is ``missing`` of entries that are used ``together``; returns False if it does not fit.

        Between those that are in memory, others may not fit in one piece. Then all leave, to arrive side by side.
        """
        for entry in sorted(missing, key=_size, reverse=True):
            if not self.begin(policy, entry, Priority.DEMAND, spared=together):
                if len(together) > 1:
                    for victim in together:
                        self.evict(policy, victim)
                return False
        return True

    def begin(
        self, policy: Policy[E], entry: E, priority: Priority, after: int = -1, spared: Collection[E] = ()
    ) -> bool:
        """Starts to fetch an entry; returns False if there is no memory for it now, unless those ``spared`` leave.

        Call it with the lock. Of others only those leave that are not used within the next ``after`` + 1 uses.
        """
        # inference tensors could not be changed outside of that mode
        with torch.inference_mode(False) if torch.is_inference_mode_enabled() else contextlib.nullcontext():
            memory = self.memory_for(policy, entry, after, spared)
            if memory is None:
                return False
            try:
                values, entry.arrival, nbytes = policy.backing.read(entry, memory, priority)
                entry.demanded = priority is Priority.DEMAND
                policy.present[entry] = None  # first, or Ctrl-C could leave values that nobody releases
                entry.values, entry.memory = values, memory
            except BaseException as error:
                if entry.queued is not None:
                    entry.queued.release()
                if entry.values is None:
                    policy.present.pop(entry, None)
                    entry.arrival = entry.queued = None
                del memory
                free_frames(error)
                raise
        policy.counts.bytes_read += nbytes
        policy.counts.bytes_on_demand += nbytes * entry.demanded
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug("%s: brings %s, %s", _name(policy), entry, priority.name)
        return True

    def room(
        self, policy: Policy[E], entry: E, after: int, take: Callable[[E], torch.Tensor | None] | None = None
    ) -> torch.Tensor:
        """Waits for memory that is not to hold an entry's stored values; see ``memory_for``."""
        patience = Patience(policy.patience)
        while True:
            seen = native().endings()
            with self.lock:
                policy.require_open()
                memory = self.memory_for(policy, entry, after, take=take)
            if memory is not None:
                return memory
            self._wait_for_memory(policy, entry, patience, seen)

    def _wait_for_memory(self, policy: Policy[E], entry: E, patience: Patience, seen: int) -> None:
        begin = time.perf_counter()
        with record_function("nvme_ops: wait for memory"):
            is_patient = policy.await_copy() or patience.wait(seen, _bytes_leaving(policy) > 0)
        if not is_patient:
            raise policy.out_of_memory(entry)
        policy.counts.seconds_waited += (waited := time.perf_counter() - begin)
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug("%s: has waited %.6f s for memory for %s", _name(policy), waited, entry)

    def memory_for(
        self,
        policy: Policy[E],
        entry: E,
        after: int,
        spared: Collection[E] = (),
        take: Callable[[E], torch.Tensor | None] | None = None,
    ) -> torch.Tensor | None:
        """Evicts entries until there is memory in one piece; returns None if there is none now. Call it with the lock.

        Raises torch's own error if an accelerator has none, and what may leave has left.

        Args:
            policy: has the entry.
            entry: needs memory.
            after: see ``begin``.
            spared: entries that stay.
            take: returns the memory; ``policy.allocate`` when None.
        """
        take = take or policy.allocate
        memory = take(entry)
        if memory is not None:
            return memory
        native().wait_for_ending(native().endings(), 0)  # releases the memory of transfers that have ended
        if len(self._policies) > 1:
            for other in list(self._policies):
                if other is not policy:
                    other.give_back()
            if (memory := take(entry)) is not None:
                return memory
        for owner, victim in self._leavers(policy, entry, after):
            if victim not in spared and self.evict(owner, victim):
                memory = take(entry)
                if memory is not None:
                    return memory
        if after < 0 and policy.share.ask_again():
            if (memory := take(entry)) is not None:
                return memory
            is_leaving = any(other.leaving is not None and not other.is_used() for other in policy.present)
            if policy.share.refusal is not None and not is_leaving:
                raise policy.share.refusal
        return None

    def borrow(self, policy: Policy[Any], nbytes: int, patient: bool = False) -> object | None:
        """Gives up memory of a policy's share for what others allocate; see ``Share.lend``. Call it with the lock.

        A ``patient`` call, which is made without the lock, waits for it as ``room`` does.
        """
        lend, entry = policy.share.lend, Entry(nbytes)

        def take(_: Entry) -> Any:  # what stands for memory
            return lend(nbytes)

        return self.room(policy, entry, -1, take) if patient else self.memory_for(policy, entry, -1, take=take)

    def _leavers(self, policy: Policy[E], entry: E, after: int) -> Iterator[tuple[Policy[Any], Any]]:
        """Yields what may leave for an entry, and whose it is: what others have beyond their shares, then its own.

        On demand others lose more than that, for one piece: those that give way first, and the rest in the end.
        """
        others: list[Policy[Any]] = []
        if len(self._policies) > 1 and policy.has_share_for(entry):
            others = sorted(
                (other for other in self._policies if other is not policy), key=lambda other: not other.gives_way
            )
        for other in others:
            for victim in _nearest(policy, other):
                is_astray = other.gives_way and not other.share.is_inside(victim.memory)
                if is_astray or other.share.bytes_in_use > other.share.nbytes:
                    yield other, victim
        first = [other for other in others if after < 0 and other.gives_way > policy.gives_way]
        for other in first:
            yield from ((other, victim) for victim in _nearest(policy, other))
        yield from ((policy, victim) for victim in policy.victims(after))
        for other in others if after < 0 else ():
            if other not in first:
                yield from ((other, victim) for victim in _nearest(policy, other))

    def await_arrival(self, policy: Policy[E], entry: E, arrival: IoFuture, begun: bool) -> bool:
        """Waits for the transfer of an entry. Raises why it failed if it was ``begun`` for this wait.

        Returns False if one begun earlier has failed: it is to be read again, for storage may be well by now.
        """
        begin = time.perf_counter()
        if arrival.done():
            failure = arrival.exception()
        else:
            with record_function("nvme_ops: wait for storage"):
                failure = arrival.exception()
        if failure is not None:
            with self.lock:
                if entry.arrival is arrival:
                    policy.discard(entry)
            del arrival
            free_frames(failure)
            try:
                if begun:
                    raise failure
                return False
            finally:
                del failure  # whose traceback has this frame
        with self.lock:
            if entry.arrival is arrival:
                entry.arrival = None
                policy.note_arrival(entry)
            policy.counts.seconds_waited += (waited := time.perf_counter() - begin)
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug("%s: has waited %.6f s for %s", _name(policy), waited, entry)
        return True

    # From memory

    def evict(self, policy: Policy[E], entry: E) -> bool:
        """Takes an entry out of memory, once it is written if it was changed; returns False if it cannot leave now."""
        if not policy.drops_used and entry.is_used():
            return False
        if entry.arrival is None and (entry.changed or entry.leaving is not None):
            if entry.changed:
                self.write_back(policy, entry)
            if entry.leaving is not None and not (entry.leaving.done() and self._end_write(policy, entry)):
                return False
            if entry.changed or (not policy.drops_used and entry.is_used()):  # changed since that write began
                return False
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug("%s: evicts %s", _name(policy), entry)
        policy.note_eviction(entry)
        policy.discard(entry)
        return True

    def make_room(self, policy: Policy[E], nbytes: int, after: int) -> None:
        """Evicts entries, or starts to write them, until so much will be free. Call it with the lock."""
        room = policy.share.nbytes - policy.share.bytes_in_use + _bytes_leaving(policy)
        for victim in policy.victims(after):
            if room >= nbytes:
                return
            if victim.memory is not None and (victim.leaving is None or victim.leaving.done()):
                memory = victim.memory.nbytes
                room += memory * (self.evict(policy, victim) or victim.leaving is not None)

    def put_away(self, policy: Policy[E], entry: E) -> None:
        """Takes an entry out of memory now, and waits until it is written. Raises MemoryError if it is in use."""
        self.settle(policy, [entry])
        with self.lock:
            is_away = self.evict(policy, entry)
        if not is_away:
            raise policy.out_of_memory(entry)

    def _note_change(self, policy: Policy[E], entry: E, values: torch.Tensor) -> bool:
        """Records that ``values`` are about to change; returns False if the entry has got other memory meanwhile."""
        with self.lock:
            current = entry.values
            if current is None or current.untyped_storage()._cdata != values.untyped_storage()._cdata:
                return False  # another thread, in which the read failed, has dropped it
            entry.changed = True
            policy.to_write.pop(entry, None)
            policy.to_write[entry] = None
            policy.note_change(entry)
            return True

    def write_back(self, policy: Policy[E], entry: E) -> None:
        """Starts to write values that were changed. If in use, they may change further, and are written again later.

        Call it with the lock.
        """
        if not entry.changed or entry.values is None:
            return
        if entry.leaving is not None and not entry.leaving.done():
            return  # it is retried later
        try:
            entry.changed = not policy.drops_used and entry.is_used()
            policy.to_write.pop(entry, None)
            transfer, nbytes = policy.backing.write(entry)
            entry.leaving = transfer
        except BaseException as error:
            entry.changed = True
            free_frames(error)
            raise
        policy.counts.bytes_written += nbytes

    def wait_until_written(self, policy: Policy[E], entry: E) -> None:
        """Waits until a write under way has ended. One that failed is retried once, if the values are in memory.

        Raises OSError. Values in memory then stay there; others are lost, and each use of them raises this again.
        """
        while entry.leaving is not None and not self._end_write(policy, entry):
            pass

    def _end_write(self, policy: Policy[E], entry: E) -> bool:
        """Waits for the write. Returns False if there is another one to wait for, such as the retry of this one.

        Raises what ``wait_until_written`` does.
        """
        leaving = entry.leaving
        failure = None if leaving is None else leaving.exception()
        with self.lock:
            if entry.leaving is not leaving:  # another thread has handled it
                return False
            in_memory = entry.values is not None
            if failure is None or in_memory:
                entry.changed = entry.changed or failure is not None
                entry.leaving = None
            entry.rewritten = again = failure is not None and in_memory and not entry.rewritten
            if again:
                self.write_back(policy, entry)
        if failure is not None and not again:
            raise failure
        return not again

    def settle(self, policy: Policy[E], entries: Collection[E]) -> None:
        """Writes all changes and waits until they are stored. Raises OSError; the values then stay in memory."""
        for entry in entries:
            self.wait_until_written(policy, entry)  # a write may have begun before the last change
            with self.lock:
                self.write_back(policy, entry)
        for entry in entries:
            self.wait_until_written(policy, entry)


def _nearest(policy: Policy[Any], other: Policy[Any]) -> list[Any]:
    """Returns what may leave of another's memory, first what lies nearest to that of a policy, for one piece."""
    once = dict.fromkeys(other.victims(-1))
    victims = [victim for victim in once if victim.memory is not None and not victim.is_used()]
    return sorted(victims, key=lambda victim: other.share.place(victim.memory), reverse=policy.share.at_end)


def _bytes_leaving(policy: Policy[E]) -> int:
    """Returns the memory of entries that are being written."""
    with policy.lock:
        leaving = [entry for entry in policy.present if entry.leaving is not None and not entry.leaving.done()]
    return sum(entry.memory.nbytes for entry in leaving if entry.memory is not None)


def _size(entry: Entry) -> int:
    return entry.nbytes


def _name(policy: Policy[E]) -> str:
    return type(policy).__name__
