"""``Pager``: decides which layers of a cache are in memory, and reads ahead in the order in which they are used."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from nvme_ops._native import native
from nvme_ops.engine import Priority
from nvme_ops.file import handle_of
from nvme_ops.future import IoFuture
from nvme_ops.handle import aio_handle
from nvme_ops.memory.pool import Pool, charge_of
from nvme_ops.offload.cache.paged import PagedLayer
from nvme_ops.offload.residency.policy import Stats, Usable
from nvme_ops.storage.session import Session
from nvme_ops.storage.striped import StripedSlabs
from nvme_ops.text import least_words, size_words

_PAGES = 512  # the fewest in a budget, as far as their alignment allows
_LARGEST_PAGE = 1 << 20  # bytes
_GOLDEN = 0.6180339887498949
_SLOTS = 2  # layers that have room beside those that stay: one computes while the next arrives


@dataclass(repr=False)
class CacheStats(Stats):
    """What a cache has moved since it was made, and what it has now.

    The keys and values of each token are written at most once, except after ``crop``.
    """

    bytes_cached: int = 0  #: keys and values, in memory or in files


class Pager(Usable):
    """Keeps as many layers in memory as the budget allows, and reads the others while those before them are used.

    Layers are used in a cycle. Those that stay are spread evenly among the others, so that reads go on while they
    compute. A smaller set of them is part of each larger one: as the context grows, layers leave it one by one, and no
    layer is written before it leaves.

    Args:
        folders: where the files are, each on a device of its own.
        budget: bytes of memory.
        handle: moves the bytes.
    """

    _closed_error = "this NvmeCache is closed"
    _forked_error = "this NvmeCache is the parent process's: make one of its own in this one"

    def __init__(
        self, folders: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], budget: int, handle: aio_handle | None
    ) -> None:
        super().__init__()
        self.budget = budget
        self.page_bytes = min(_LARGEST_PAGE, budget // _PAGES)
        self._layers: list[PagedLayer] = []  # in the order in which they are used
        self._kept: set[PagedLayer] = set()
        self._current = -1  # the place of the layer in use
        self._cycled = False  # whether all layers are known
        self._leaving: list[tuple[Sequence[IoFuture], int]] = []  # writes, and bytes of memory that they will free
        self._pool: Pool | None = None
        self.moved = CacheStats()  #: counted by the layers, too
        with contextlib.ExitStack() as undo:
            self._session = Session(folders, name="keys and values")
            undo.callback(self._session.close)
            self.slabs = StripedSlabs(self._session, "keys and values", handle_of(handle), None)
            undo.callback(self.slabs.close)
            if not self.slabs.is_measured:
                self.slabs.measure()
            self._session.lend("", self)
            undo.pop_all()

    # Called by layers

    def lease(self, nbytes: int, layer: PagedLayer) -> torch.Tensor:
        """Returns memory for a layer, evicting others for it. Raises MemoryError, or OSError if none can be written."""
        begin = time.perf_counter()
        failed: dict[PagedLayer, OSError] = {}
        try:
            while charge_of(nbytes) <= self.budget:
                if (found := self._try_lease(nbytes, layer)) is not None:
                    return found
                if self._leaving:
                    for transfer in self._leaving[0][0]:
                        transfer.exception()
                    self._drop_left()
                elif victims := [each for each in self._by_worth() if each is not layer and each not in failed]:
                    try:
                        self._evict(victims[0])
                    except OSError as error:  # another layer may be in the files already
                        failed[victims[0]] = error
                elif failed:
                    raise next(iter(failed.values()))
                else:
                    gc.collect()
                    if (found := self._try_lease(nbytes, layer)) is not None:
                        return found
                    break
        finally:
            self.moved.seconds_waited += time.perf_counter() - begin
        raise self._too_little(nbytes, layer)

    def wait(self, transfers: Iterable[IoFuture]) -> None:
        """Waits for all transfers. Raises the first failure."""
        begin = time.perf_counter()
        failures = [each.exception() for each in transfers]
        self.moved.seconds_waited += time.perf_counter() - begin
        for failure in failures:
            if failure is not None:
                raise failure

    # Called by the cache

    def use(self, layer: PagedLayer) -> None:
        """Notes that this layer is in use until another one is. Raises as ``require_open`` does."""
        self.require_open()
        if layer not in self._layers:
            self._layers.append(layer)
        place = self._layers.index(layer)
        if place < self._current:
            self._cycled = True
        self._current = place

    def ahead(self, more: int) -> None:
        """Reads the next layers, each with room for ``more`` tokens. A read that fails is retried on demand."""
        if self._cycled:
            self._choose(more)
        with contextlib.suppress(OSError):
            self._read_ahead(more)

    def stats(self) -> CacheStats:
        """Returns what was moved so far, and what the cache has now."""
        return replace(
            self.moved,
            bytes_cached=sum(layer.nbytes for layer in self._layers),
            bytes_stored=sum(layer.bytes_stored for layer in self._layers),
            peak_bytes=self._pool.peak if self._pool else 0,
        )

    def close(self) -> None:
        """Waits for transfers, removes the files and releases the memory. Further calls do nothing."""
        if self._closed or self._process != os.getpid():
            return
        self._closed = True
        with contextlib.ExitStack() as last_first:
            last_first.callback(self._session.close)
            last_first.callback(self._session.take_back, "", self)
            last_first.callback(self.slabs.close)
            for layer in self._layers:
                layer.reset()
            self._leaving.clear()

    def leave_to_parent(self) -> None:
        """Closes descriptors in a forked child, since they would keep the space of removed files."""
        self.slabs.close_descriptors()

    # Below

    def _read_ahead(self, more: int) -> None:
        current = self._layers[self._current]
        wanted = {current}
        for layer in [*self._layers[self._current + 1 :], *self._layers[: self._current]]:
            if layer.resident or not layer.tokens:
                wanted.add(layer)
                continue
            if not self._cycled and layer in self._layers[: self._current]:
                break
            nbytes = layer.memory_needed(more)
            memory = self._try_lease(nbytes, layer) if self._make_room(nbytes, wanted) else None
            if memory is None:
                return
            layer.load(memory, Priority.PREFETCH)
            wanted.add(layer)
        if not self._cycled:  # a new layer of the same size may follow
            self._make_room(current.memory_needed(0), {current})

    def _try_lease(self, nbytes: int, layer: PagedLayer) -> torch.Tensor | None:
        if self._pool is None:
            self._pool = Pool(self.budget, pinned=layer.device.type != "cpu")
        try:
            return self._pool.lease(nbytes, timeout=0).tensor
        except TimeoutError:
            return None

    def _free(self) -> int:
        if self._pool is None:
            return self.budget
        native().wait_for_ending(native().endings(), 0)  # releases the memory of transfers that have ended
        return self.budget - self._pool.bytes_in_use

    def _drop_left(self) -> None:
        self._leaving = [each for each in self._leaving if not all(transfer.done() for transfer in each[0])]

    def _evict(self, layer: PagedLayer) -> None:
        nbytes = layer.memory_bytes
        if writes := layer.evict():
            self._leaving.append((writes, charge_of(nbytes)))

    def _make_room(self, nbytes: int, wanted: set[PagedLayer]) -> bool:
        """Evicts layers that are not ``wanted``; returns whether there is room now: writes may have to end first."""
        self._drop_left()
        charge = charge_of(max(1, nbytes))
        while self._free() + sum(each for _, each in self._leaving) < charge:
            found = [each for each in self._by_worth() if each not in wanted and each not in self._kept]
            if not found:
                return False
            self._evict(found[0])
        return self._free() >= charge

    def _by_worth(self) -> list[PagedLayer]:
        """Returns the layers in memory, in the order in which they are to leave it."""
        count = len(self._layers)

        def worth(place: int) -> tuple[bool, float]:
            if self._layers[place] in self._kept or not self._cycled:
                return self._layers[place] in self._kept, _worth(place)
            return False, -((place - self._current) % count)  # the layer whose next use is farthest away leaves first

        return [self._layers[place] for place in sorted(range(count), key=worth) if self._layers[place].resident]

    def _choose(self, more: int) -> None:
        """Decides which layers stay."""
        sizes = {layer: charge_of(max(1, layer.memory_needed(more))) for layer in self._layers if layer.started}
        room = self.budget - sum(charge_of(layer.tail_bytes) for layer in sizes)
        if sum(sizes.values()) <= room:
            self._kept = set(sizes)
            return
        room -= _SLOTS * max(sizes.values())
        self._kept = set()
        for place in sorted(range(len(self._layers)), key=_worth, reverse=True):
            layer = self._layers[place]
            if layer in sizes and sizes[layer] <= room:
                room -= sizes[layer]
                self._kept.add(layer)

    def _too_little(self, nbytes: int, layer: PagedLayer) -> MemoryError:
        tails = sum(charge_of(each.tail_bytes) for each in {*self._layers, layer} if each.tail_bytes)
        least = charge_of(nbytes) + tails
        if least > self.budget:
            return MemoryError(
                f"a memory_budget of {size_words(self.budget)} is too small: layer {layer.number}, with "
                f"{layer.tokens} tokens of a batch of {layer.batch} and what is added now, takes "
                f"{size_words(charge_of(nbytes))}, and the incomplete pages of the layers {size_words(tails)}: at "
                f"least {least_words(least)} are needed"
            )
        return MemoryError(
            f"no memory for layer {layer.number}, {size_words(nbytes)}: keys and values in use have "
            f"{size_words(self._pool.bytes_in_use if self._pool else 0)} of the memory_budget of "
            f"{size_words(self.budget)}"
        )


def _worth(place: int) -> float:
    """Returns the rank of a layer such that those above any rank are spread evenly, however many layers there are."""
    return place * _GOLDEN % 1
