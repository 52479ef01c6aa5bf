"""``Loader``: batches that are read ahead of the program, without worker processes."""

from __future__ import annotations

import operator
import os
import threading
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import default_collate

from nvme_ops.base import ranks
from nvme_ops.base.lifetime import forks, in_this_process
from nvme_ops.base.text import MIB, bytes_of, never_raising
from nvme_ops.data.columns import Sample
from nvme_ops.data.order import EpochOrder, Shuffle
from nvme_ops.data.store import Read, SampleStats, SampleStore, huge_pages
from nvme_ops.io.arguments import require_callables, require_switches
from nvme_ops.io.engine import Priority
from nvme_ops.memory.pool import Pool, can_pin, charge_of
from nvme_ops.memory.tier import HostTier, Share

_AHEAD_BYTES, _AHEAD_SAMPLES = 64 * MIB, 512  # enough to keep a device busy
_MAX_BATCHES = 64
_LARGE = 64 * MIB  # bytes from which on a few batches are more than the buffer pool keeps for reuse
_CHUNK = 1 << 14  # positions whose samples are looked up at once; for more, torch would wake its threads, which spin


class Loader:
    """Iterates over the batches of one rank, epoch after epoch. While one batch is used, the next ones are read.

    A batch is one tensor, or a dict of them by column, where sizes are fixed; values of varying size are lists of
    tensors. ``decode`` and ``collate_fn`` turn it into something else.

    The order of an epoch depends only on ``seed`` and the epoch. All ranks share it: each step takes the next
    ``batch_size`` samples for every rank. All ranks have the same number of batches, of the same sizes: at the end,
    samples from the beginning are repeated, as in torch's ``DistributedSampler``.

    Args:
        store: a ``SampleStore``, or the path of one.
        batch_size: samples in a batch, on each rank.
        shuffle: False: in order; True: at random; ``"shards"``: the data files at random, and the samples within each.
        seed: determines the order; the same on all ranks.
        drop_last: leave out the last step if it has fewer than ``batch_size`` samples for each rank.
        decode: called with each sample, on one of ``threads`` threads; the store's ``transform`` when None.
        collate_fn: turns a list of samples into a batch; with ``decode``, torch's ``default_collate`` when None.
        threads: how many threads run ``decode``; when None, one for each processor, at most 8.
        prefetch: the most batches to read ahead; None: as many as keep a device busy; 0: none.
        memory_budget: bytes for the batches that are read ahead, such as ``"512M"``; with ``decode``, also for
            its results. A larger batch is read alone. For batches of 64 MiB and more, this much memory plus that of
            one batch is kept for reuse.
        rank: this process's rank; by default that in ``torch.distributed``, which must already be initialized if
            ``WORLD_SIZE`` is more than 1.
        num_replicas: how many processes share the samples; by default the world size of ``torch.distributed``.
        device: where batches are copied to, from page-locked memory.

    Raises:
        ValueError, TypeError: invalid arguments.
        RuntimeError: ``WORLD_SIZE`` is more than 1, ``torch.distributed`` is not initialized, and no rank was given.
    """

    def __init__(
        self,
        store: SampleStore | str | os.PathLike[str],
        batch_size: int = 1,
        *,
        shuffle: Shuffle = False,
        seed: int = 0,
        drop_last: bool = False,
        decode: Callable[[Sample], Any] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        threads: int | None = None,
        prefetch: int | None = None,
        memory_budget: int | str = "512M",
        rank: int | None = None,
        num_replicas: int | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        require_switches(drop_last=drop_last)
        require_callables(decode=decode, collate_fn=collate_fn)
        self.store = store if isinstance(store, SampleStore) else SampleStore(store)
        self.batch_size = _int("batch_size", batch_size, 1)
        self.shuffle, self.drop_last = shuffle, drop_last
        self.seed = operator.index(seed)
        decode = self.decode = decode or self.store.transform
        self.collate_fn = collate_fn
        self.rank, self.num_replicas = _ranks(rank, num_replicas)
        self.device = None if device is None else torch.device(device)
        self._budget = bytes_of("memory_budget", memory_budget)
        if threads is not None and decode is None:
            raise ValueError("threads are for decode, which is not given")
        self._threads = min(8, len(os.sched_getaffinity(0))) if threads is None else _int("threads", threads, 1)
        self._prefetch = None if prefetch is None else _int("prefetch", prefetch, 0)
        self._share: Share | None = None
        self._forks = forks()
        self._order(0)  # raises for an unknown shuffle
        files = zlib.crc32(repr(self.store.index.counts()).encode()) if shuffle == "shards" else None
        self._identity = {"seed": self.seed, "shuffle": shuffle, "samples": len(self.store), "files": files}
        self._next = self._state = _State(0, 0)
        self._stats = SampleStats()
        self._loaded = False  # the next iteration continues from what load_state_dict was given

    def __len__(self) -> int:
        """Returns the number of batches in an epoch."""
        whole, rest = divmod(len(self.store), self.batch_size * self.num_replicas)
        return whole + (rest > 0 and not self.drop_last)

    def set_epoch(self, epoch: int) -> None:
        """Makes the next iteration go through this epoch from its beginning. Without it, each is the next epoch.

        Right after ``load_state_dict``, the loaded epoch continues where it was.
        """
        epoch = operator.index(epoch)
        if not (self._loaded and epoch == self._next.epoch):
            self._next = self._state = _State(epoch, 0)

    def state_dict(self) -> dict[str, Any]:
        """Returns what ``load_state_dict`` needs to continue after the batch that was returned last.

        After the last batch of an epoch, this is the beginning of the next one, as in ``StatefulDataLoader``.
        """
        return {**asdict(self._state), **self._identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Makes the next iteration continue where another loader was, which may have had other ranks and batches.

        Raises ValueError if its seed, shuffle or number of samples differs, or with ``"shards"`` its files; KeyError
        if ``state`` is not of a loader.
        """
        for name, mine in self._identity.items():
            if state[name] != mine:
                raise ValueError(f"the state has {name}={state[name]!r}, and this loader {mine!r}")
        position = int(state["position"])
        if not 0 <= position <= len(self.store):
            raise ValueError(f"the state has the position {position} of {len(self.store)} samples")
        self._next = self._state = _State(int(state["epoch"]), position)
        self._loaded = True
        if next(self._steps(self._next), None) is None and position:
            self._next = _State(self._next.epoch + 1, 0)

    def stats(self) -> SampleStats:
        """Returns what was returned so far, in all epochs of this process."""
        with self.store._lock:
            return replace(self._stats)

    def __iter__(self) -> Iterator[Any]:
        """Yields the batches. Raises what ``SampleStore.read`` and ``decode`` raise; then the iteration ends."""
        state = self._state = self._next
        self._next, self._loaded = _State(state.epoch + 1, 0), False
        return self._batches(state)

    def _batches(self, state: _State) -> Iterator[Any]:
        is_ours = in_this_process()
        pool = ThreadPoolExecutor(self._threads, "nvme_ops.data") if self.decode else None
        steps, ahead = self._steps(state), deque[_Batch]()
        stop = threading.Event()
        _stops.add(stop)
        try:
            in_flight, room, step = 0, -1, next(steps, None)  # bytes; room: of the next batch, -1 if not known
            decoded: int | None = None  # bytes of the latest batch
            failure: Exception | None = None
            while True:
                while step is not None and self._wants_more(ahead, in_flight, decoded):
                    try:
                        if ahead:
                            room = self.store.room(step[0]) if room < 0 else room
                            if in_flight + room > self._budget:
                                break
                        batch = self._begin(*step, pool, stop, urgent=not ahead)
                    except Exception as error:  # raised when it is this batch's turn
                        failure, step = error, None
                        break
                    ahead.append(batch)
                    in_flight += batch.read.nbytes
                    room, step = -1, next(steps, None)
                if not ahead:
                    if failure is not None:
                        raise failure
                    return
                batch = ahead[0]
                made = [self._end(batch)]
                decoded = sum(int(getattr(part, "nbytes", 0)) for part in tree_leaves(made))
                ahead.popleft()
                in_flight -= batch.read.nbytes
                state.position = batch.position
                del batch
                yield made.pop()  # keeps no reference: the next batch needs its memory
                if not is_ours():
                    raise RuntimeError("this iterator is the parent's: a forked child iterates over the loader anew")
        finally:
            stop.set()
            if pool is not None and is_ours():  # a child has none of its threads
                pool.shutdown(wait=True, cancel_futures=True)

    def _steps(self, state: _State) -> Iterator[tuple[torch.Tensor, int]]:
        """Yields the numbers of the samples of each batch of this rank, and the position after it."""
        order, count = self._order(state.epoch), len(self.store)
        step = self.batch_size * self.num_replicas
        position, begin, chunk = state.position, 0, torch.empty(0, dtype=torch.int64, device="cpu")
        while position < count:
            if position + step > count:
                if self.drop_last:
                    return
                share = -(-(count - position) // self.num_replicas)
                places = range(position + self.rank * share, position + (self.rank + 1) * share)
                yield torch.cat([order.at(place % count, place % count + 1) for place in places]), count
                return
            if not begin <= position <= position + step <= begin + len(chunk):
                begin = position
                chunk = order.at(begin, min(count, begin + max(_CHUNK // step, 1) * step))
            mine = position - begin + self.rank * self.batch_size
            position += step
            yield chunk[mine : mine + self.batch_size], position

    def _wants_more(self, ahead: deque[_Batch], in_flight: int, decoded: int | None) -> bool:
        if not ahead:
            return True
        if self.store._files.crowded():
            return False
        if self.decode is not None and (decoded is None or (len(ahead) + 1) * decoded > self._budget - in_flight):
            return decoded is None and len(ahead) < 2
        if self._prefetch is not None:
            return len(ahead) <= self._prefetch
        samples = sum(len(batch.read) for batch in ahead)
        busy = in_flight >= _AHEAD_BYTES or samples >= _AHEAD_SAMPLES * len(self.store._handles)
        return len(ahead) < 2 or (not busy and len(ahead) < _MAX_BATCHES)

    def _begin(
        self, numbers: torch.Tensor, position: int, pool: ThreadPoolExecutor | None, stop: threading.Event, urgent: bool
    ) -> _Batch:
        priority = Priority.DEMAND if urgent else Priority.PREFETCH
        read = self.store.submit(numbers, priority=priority, allocate=self._allocate, limit=self._budget)
        if pool is None or self.decode is None:
            return _Batch(read, position, [])
        given = [(read, self.decode, first, self._threads, stop) for first in range(self._threads)]
        return _Batch(read, position, [pool.submit(_decoded, *arguments) for arguments in given])

    def _end(self, batch: _Batch) -> Any:
        begin = time.perf_counter()
        parts = [task.result() for task in batch.tasks]
        batch.read.wait()
        with self.store._lock:
            self._stats.batches += 1
            self._stats.samples += len(batch.read)
            self._stats.bytes_read += batch.read.nbytes_of_records
            self._stats.seconds_waited += time.perf_counter() - begin
        if self.decode is not None:
            samples = [parts[k % len(parts)][k // len(parts)] for k in range(len(batch.read))]
            made = (self.collate_fn or default_collate)(samples)
        else:
            made = batch.read.batch() if self.collate_fn is None else self.collate_fn(batch.read.samples())
        return made if self.device is None else tree_map(self._copied, made)

    def _allocate(self, nbytes: int) -> torch.Tensor:
        if self.device is not None and self.device.type != "cpu" and can_pin():
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        if nbytes >= _LARGE:  # new memory costs as much as reading
            if self._share is None or self._forks != forks():  # a write to huge pages that a child shares splits them
                self._forks = forks()
                room = charge_of(self._budget + nbytes)  # what is read ahead, and the batch that the program has
                self._share = HostTier(room, Pool(room)).share()
            memory = self._share.allocate(nbytes)
            if memory is not None:
                return memory
        return huge_pages(nbytes)

    def _copied(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value.to(self.device, non_blocking=value.is_pinned())  # pageable memory could be freed before the copy

    @never_raising
    def __repr__(self) -> str:
        """Returns for example ``<Loader '/mnt/nvme/train': 16 batches of 64, rank 0 of 1>``."""
        ranks = f"rank {self.rank} of {self.num_replicas}"
        return f"<Loader {self.store.path!r}: {len(self)} batches of {self.batch_size}, {ranks}>"

    def _order(self, epoch: int) -> EpochOrder:
        return EpochOrder(self.store.index.counts(), self.shuffle, self.seed, epoch)


@dataclass
class _State:
    epoch: int
    position: int  # samples returned so far, by all ranks


@dataclass
class _Batch:
    read: Read
    position: int  # the state's, after this batch
    tasks: list[Future[list[Any]]]


_stops: weakref.WeakSet[threading.Event] = weakref.WeakSet()  # each ends the decoding of one iteration


def _stop_all() -> None:
    for stop in list(_stops):
        stop.set()


# At exit, concurrent.futures waits for all submitted tasks; what was registered last is called first.
if hasattr(threading, "_register_atexit"):
    threading._register_atexit(_stop_all)


def _decoded(read: Read, decode: Callable[[Sample], Any], first: int, step: int, stop: threading.Event) -> list[Any]:
    """Returns every ``step``-th sample from ``first`` on, decoded. Raises CancelledError once ``stop`` is set."""
    made = []
    for sample in read.samples(slice(first, None, step)):
        if stop.is_set():
            raise CancelledError
        made.append(decode(sample))
    return made


def _int(name: str, value: Any, least: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or number < least:
        raise ValueError(f"{name} must be an int of at least {least}, not {value!r}")
    return number


def _ranks(rank: int | None, num_replicas: int | None) -> tuple[int, int]:
    if (rank is None) != (num_replicas is None):
        raise ValueError("rank and num_replicas must be given together")
    if rank is not None:
        rank, num_replicas = _int("rank", rank, 0), _int("num_replicas", num_replicas, 1)
        if rank >= num_replicas:
            raise ValueError(f"rank must be between 0 and {num_replicas - 1}, not {rank}")
        return rank, num_replicas
    if (me := ranks.distributed()) is not None:
        return me.rank, me.world_size
    if (size := ranks.started().world_size) != 1:
        raise RuntimeError(
            f"WORLD_SIZE is {size}, and torch.distributed is not initialized: every rank would get the same "
            "batches; call init_process_group first, or give rank and num_replicas"
        )
    return 0, 1
