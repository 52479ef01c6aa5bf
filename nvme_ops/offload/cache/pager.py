"""``Pager``: decides which layers of a cache are in memory, and brings them in the order in which they are used."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch

from nvme_ops.base.errors import free_frames
from nvme_ops.base.settings import PAGE
from nvme_ops.base.text import least_words, size_words
from nvme_ops.io.engine import Priority
from nvme_ops.io.file import handle_of
from nvme_ops.io.future import IoFuture
from nvme_ops.io.handle import aio_handle
from nvme_ops.memory.tier import Tier, in_pages, tier_on
from nvme_ops.offload.budgets import Budgets
from nvme_ops.offload.cache.host_segments import HostSegments
from nvme_ops.offload.cache.layer import PagedLayer
from nvme_ops.offload.cache.quantized_layer import QuantizedLayer
from nvme_ops.offload.cache.segments import Segments
from nvme_ops.offload.memory import Memory
from nvme_ops.offload.residency.account import Account, rate_of_folders
from nvme_ops.offload.residency.entry import Entry
from nvme_ops.offload.residency.placement import kept_as_they_grow, rank
from nvme_ops.offload.residency.policy import Policy, Read, Stats
from nvme_ops.offload.residency.residency import Residency
from nvme_ops.storage.session import Session
from nvme_ops.storage.striped import StripedSlabs

_PAGES = 512  # the fewest in a budget, as far as their alignment allows
_PAGES_SHARED = 2048  # the same in a shared Memory: the tails of many layers take less of it, more often a layer grows
_LARGEST_PAGE = 1 << 20  # bytes
_SPARE = 1.1  # how much more than it needs a layer may have
_SLOTS = 2  # layers that have room beside those that stay: one computes while the next arrives


@dataclass(repr=False)
class CacheStats(Stats):
    """What a cache has moved since it was made, and what it has now.

    The keys and values of each token are written at most once, except after ``crop``.
    """

    bytes_cached: int = 0  #: keys and values, in memory or in files


class _Room(Entry):
    """Memory of a layer beside that which its tokens are in."""

    def __init__(self, layer: PagedLayer, nbytes: int) -> None:
        super().__init__(nbytes)
        self.layer = layer


class _Tail(_Room):
    """Memory for the tail of a layer."""


class _Expanded(_Room):
    """Memory for what is expanded of a layer while attention uses it."""


class _Files:
    """The files of the layers."""

    def read(self, entry: Entry, memory: torch.Tensor, priority: Priority) -> Read:
        """Starts to fill a layer's memory; see ``Backing``."""
        transfer, nbytes = _layer(entry).load(memory, priority)
        return memory, transfer, nbytes

    def write(self, entry: Entry) -> tuple[IoFuture, int]:
        """Starts to write what the files do not have."""
        return _layer(entry).store()


class Pager(Policy[Entry]):
    """Keeps as many layers in memory as the budget allows, and brings the others while those before them are used.

    Layers are used in a cycle. Those that stay are spread evenly among the others, so that reads go on while they
    compute. A smaller set of them is part of each larger one: as the context grows, layers leave it one by one, and no
    layer is written before it leaves.

    Args:
        folders: where the files are, each on a device of its own.
        memory: is shared; None: there are budgets.
        given: says, for the device that the first keys and values come from, where they are and how much memory there
            is; None: in ``memory``, of the host.
        handle: moves the bytes.
        dtype: in which keys and values are stored; None: their own.
    """

    _closed_error = "this NvmeCache is closed"
    _forked_error = "this NvmeCache is the parent process's: make one of its own in this one"
    patience = 0.0  # one thread uses it: nobody else will give memory back
    counts: CacheStats
    _budget_name = "memory_budget"  # until it is known what says how much memory there is

    def __init__(
        self,
        folders: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        memory: Memory | None,
        given: Callable[[torch.device], tuple[torch.device, Budgets]] | None,
        handle: aio_handle | None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._memory, self._given = memory, given  # until it is known where they are used
        self._dtype = dtype
        self._residency = Residency() if memory is None else memory.residency
        super().__init__(self._residency.lock, Tier(0, torch.device("cpu")).share(), _Files(), CacheStats())
        self._host: HostSegments | None = None
        self._layers: list[PagedLayer] = []  # in the order in which they are used
        self._kept: set[PagedLayer] = set()
        self._current = -1  # the place of the layer that was used last
        self._using = False  # it is being used: later its memory is in use as long as tensors are over it
        self._asked = 0  # bytes of memory that were needed last
        self._cycled = False  # whether all layers are known
        with contextlib.ExitStack() as undo:
            self._session = Session(folders, name="keys and values")
            undo.callback(self._session.close)
            self.account = Account(rate_of_folders(self._session.folders))
            self._slabs = StripedSlabs(self._session, "keys and values", handle_of(handle), None)
            undo.callback(self._slabs.close)
            if not self._slabs.is_measured:
                self._slabs.measure()
            self._session.lend("", self)
            if memory is not None and given is None:
                self._share(memory, torch.device("cpu"))
            undo.pop_all()
        self._residency.join(self)

    def layer(self, number: int, window: int | None) -> PagedLayer:
        """Returns a new layer."""
        return PagedLayer(number, window) if self._dtype is None else QuantizedLayer(number, window, self._dtype)

    def _set_budget(self, nbytes: int, pages: int = _PAGES) -> None:
        self.budget, self._page_bytes = nbytes, min(_LARGEST_PAGE, nbytes // pages)

    def _share(self, memory: Memory, device: torch.device) -> None:
        """Takes a part of memory that is shared. Raises ValueError if that is another device's, or too small."""
        self.share = memory.share(device)
        self._budget_name = "memory_budget" if device.type == "cpu" else "device_budget"
        self.share.at_end = device.type == "cpu"  # layers do not lie among what gives way to them
        self.patience = Policy.patience  # for what others are reading into it
        self._set_budget(memory.nbytes, _PAGES_SHARED)
        memory.join(self)

    def _place(self, device: torch.device) -> None:
        """Takes memory where the first keys and values are."""
        if self._given is None:
            return
        device, budgets = self._given(device)
        if isinstance(budgets.own, Memory):
            self._share(budgets.own, device)
        else:
            self.share = tier_on(device, max(PAGE, budgets.nbytes // PAGE * PAGE)).share()
            self._budget_name = budgets.name
            self._set_budget(budgets.nbytes)
        if host := budgets.host():
            self._host = HostSegments(device, budgets.host_tier().share(host), self._balance)
        self._given = None

    # What is done with a layer

    def start(self, layer: PagedLayer, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Takes shapes and dtypes from keys and values, ``[batch, heads, tokens, width]``. Raises as ``append``."""
        self.require_open()
        self._place(keys.device)
        self._use(layer)
        layer.device = keys.device
        try:
            kinds = [(states.shape[1], states.shape[3], states.dtype) for states in (keys, values)]
            layer.shape(keys.shape[0], kinds, self._page_bytes)
            layer.files = self._segments(layer)
            layer.tail = self._room(_Tail(layer, layer.tail_bytes))
        except BaseException:
            layer.batch = layer.tail_bytes = 0
            raise

    def append(self, layer: PagedLayer, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds tokens; returns the keys and values that attention sees: views, or copies if it is on another device.

        Raises:
            MemoryError: they do not fit the budget.
            OSError: the disk is full, or a read or a write failed. The layer is as it was.
            ValueError: the shape is not that of the tokens before; what is to be quantized is not finite, and the layer
                is as it was; or it is closed.
        """
        self._use(layer)
        if not layer.batch:
            self.start(layer, keys, values)
        layer.require_like(keys, values)
        memory = self._open(layer, keys.shape[2])
        try:
            visible = layer.append(keys, values, memory)
        except BaseException as error:  # whose traceback would keep the memory
            del memory
            free_frames(error)
            raise
        self._using = False
        self._ahead(keys.shape[2])
        return visible[0].to(layer.device), visible[1].to(layer.device)

    def half(self, layer: PagedLayer, half: int) -> torch.Tensor:
        """Returns the keys (0) or the values (1) that are kept. Raises as ``append``."""
        self._use(layer)
        states = layer.half(half, self._open(layer, 0)).to(layer.device)
        self._using = False
        self._ahead(0)
        return states

    def crop(self, layer: PagedLayer, tokens: int) -> None:
        """Forgets all but the first ``tokens`` tokens; see ``PagedLayer.crop``."""
        self.require_open()
        self._end_transfers(layer)
        layer.crop(tokens)
        self._shrink(layer)

    def reorder(self, layer: PagedLayer, rows: torch.Tensor) -> None:
        """Makes row ``rows[i]`` of the batch its row i; ``rows`` is on the CPU. Writes nothing if the size stays.

        Raises ValueError for rows that there are not, and for none.
        """
        self.require_open()
        if not layer.tokens or torch.equal(rows, torch.arange(layer.batch, device="cpu")):
            return
        if not len(rows) or not 0 <= int(rows.min()) <= int(rows.max()) < layer.batch:
            raise ValueError(f"a batch of {layer.batch} cannot become one of its rows {rows.tolist()}")
        if len(rows) == layer.batch:
            self._end_transfers(layer)
            layer.reorder(rows)
            return
        self._use(layer)  # or it could be written in the shape that it is to have
        self._bring(layer, 0)
        self._end_transfers(layer)
        old, batch, kinds = layer.content(), layer.batch, layer.layout.kinds
        layer.shape(len(rows), kinds, self._page_bytes)
        try:
            memory = self._room(_Room(layer, layer.memory_needed(0)))
            tail = self._room(_Tail(layer, layer.tail_bytes))
        except BaseException:
            layer.shape(batch, kinds, self._page_bytes)
            raise
        layer.select(rows, old, memory, tail, self._segments(layer))
        self._using = False

    def reset(self, layer: PagedLayer) -> None:
        """Forgets a layer's tokens and shape."""
        self.require_open()
        self._forget(layer)
        self._ask(0)

    def stats(self) -> CacheStats:
        """Returns what was moved so far, and what the cache has now."""
        stats = replace(
            self.counts,
            bytes_cached=sum(layer.bytes_cached for layer in self._layers),
            bytes_stored=sum(layer.bytes_stored for layer in self._layers),
            bytes_in_memory=self.share.bytes_in_use,
            peak_bytes=self.share.peak,
        )
        if (host := self._host) is not None:
            stats.bytes_written += host.counts.bytes_written
            stats.note_host(host.share, host.counts, *host.streams)
        return stats

    def close(self) -> None:
        """Waits for transfers, removes the files and releases the memory. Further calls do nothing."""
        if not self.is_usable():
            return
        super().close()
        with contextlib.ExitStack() as last_first:
            last_first.callback(self._session.close)
            last_first.callback(self._session.take_back, "", self)
            last_first.callback(self._slabs.close)
            if self._host is not None:
                last_first.callback(self._host.close)
            for layer in self._layers:
                self._forget(layer)
            if self._memory is not None:
                self._memory.leave(self)

    # The policy

    name = "an NvmeCache"

    def least(self) -> int:
        """Returns the bytes of memory for tails and the largest layer."""
        sizes, tails = self._sizes()
        return max([*sizes.values(), self._asked]) + tails

    def wanted(self) -> int:
        """Returns the bytes of memory for all layers, and for one that grows."""
        sizes, tails = self._sizes()
        taken = sum(max(size, 0 if layer.memory is None else layer.memory.nbytes) for layer, size in sizes.items())
        return taken + max([*sizes.values(), self._asked]) + tails

    def wanted_below(self) -> int:
        """Returns the bytes of host memory for keys and values."""
        return 0 if self._host is None else self._host.wanted()

    def allocate(self, entry: Entry) -> torch.Tensor | None:
        """Returns memory; tails, which never leave, lie at its end, and nowhere among what others need."""
        is_tail = isinstance(entry, _Tail)
        memory = self.share.allocate(entry.nbytes, at_end=is_tail or isinstance(entry, _Expanded))
        if memory is not None and is_tail and self.share.at_end and not self.share.is_inside(memory):
            return None
        return memory

    def require_room(self, entry: Entry) -> None:
        """Raises MemoryError for a layer that is larger than the budget."""
        if in_pages(entry.nbytes) > self.share.nbytes:
            raise self.out_of_memory(entry)

    def note_arrival(self, entry: Entry) -> None:
        """Applies what was done to the layer while it was away."""
        _layer(entry).arrive()

    def note_eviction(self, entry: Entry) -> None:
        """Keeps the tokens that no file has."""
        _layer(entry).leave_memory()

    def await_copy(self) -> bool:
        """Waits until what is copied of one more layer is in host memory."""
        return self._host is not None and self._host.await_copy()

    def victims(self, after: int) -> Iterator[Entry]:
        """Yields the layers in memory, in the order in which they are to leave it; for a prefetch not those kept.

        None begins to be written while those that leave suffice.
        """
        count, spared = len(self._layers), {self._layers[self._current]} if self._using or after >= 0 else set()
        if after >= 0:
            spared |= {self._layers[(self._current + number) % count] for number in range(1, after + 2)} | self._kept

        def worth(place: int) -> tuple[bool, float]:
            if self._layers[place] in self._kept or not self._cycled:
                return self._layers[place] in self._kept, rank(place)
            return False, -((place - self._current) % count)  # the layer whose next use is farthest away leaves first

        places = [self._layers[place] for place in sorted(range(count), key=worth)]
        for layer in places:
            if layer.memory is not None and layer not in spared and (not layer.changed or self._are_too_few_leaving()):
                yield layer

    def _are_too_few_leaving(self) -> bool:
        leaving = [layer for layer in self._layers if layer.leaving is not None and not layer.leaving.done()]
        return sum(0 if layer.memory is None else layer.memory.nbytes for layer in leaving) < self._asked

    def out_of_memory(self, entry: Entry) -> MemoryError:
        """Returns an error that says what is needed, or what others have."""
        layer = _layer(entry)
        stored = layer.nbytes if isinstance(entry, _Expanded) else entry.nbytes
        nbytes = in_pages(stored) + in_pages(layer.expanded_bytes(stored))
        tails = sum(in_pages(paged.tail_bytes) for paged in {*self._layers, layer})
        if nbytes + tails > self.share.nbytes:
            return MemoryError(
                f"a {self._budget_name} of {size_words(self.budget)} is too small: layer {layer.number}, with "
                f"{layer.tokens} tokens of a batch of {layer.batch} and what is added now, takes "
                f"{size_words(nbytes)}, and the incomplete pages of the layers {size_words(tails)}: at "
                f"least {least_words(nbytes + tails)} are needed"
            )
        return MemoryError(
            f"no memory for layer {layer.number}, {size_words(nbytes)}: keys and values in use have "
            f"{size_words(self.share.bytes_in_use)} of the {self._budget_name} of {size_words(self.budget)}"
        )

    # Below

    def _segments(self, layer: PagedLayer) -> Segments:
        return Segments(self._slabs, layer.number, layer.stored.rows, layer.page, self._host)

    def _use(self, layer: PagedLayer) -> None:
        """Notes that this layer is in use until another one is. Raises as ``require_open`` does."""
        self.require_open()
        if layer not in self._layers:
            self._layers.append(layer)
        place = self._layers.index(layer)
        if place < self._current:
            self._cycled = True
        self._current, self._using = place, True

    def _open(self, layer: PagedLayer, more: int) -> torch.Tensor:
        """Brings a layer; returns the memory in which attention sees it. Raises as ``append`` does."""
        self._bring(layer, more)
        if layer.memory is None:
            raise RuntimeError(f"layer {layer.number} is not in memory")
        if not (nbytes := layer.expanded_bytes(layer.memory.nbytes)):
            return layer.memory
        try:
            memory = self._room(_Expanded(layer, nbytes))
        except MemoryError:  # there is no room in one piece: what is read ahead may leave, and this layer comes back
            for other in self._layers:
                if other.arrival is not None:
                    other.arrival.exception()
            self._residency.put_away(self, layer)
            for other in self._layers:
                self._close_gap(other)
            self._fetch(layer)
            memory = self._room(_Expanded(layer, nbytes))
        try:
            layer.expand(memory)
        except BaseException as error:  # whose traceback would keep the memory
            del memory
            free_frames(error)
            raise
        return memory

    def _bring(self, layer: PagedLayer, more: int) -> None:
        """Brings all needed tokens into memory, with room for ``more``. Raises as ``append`` does."""
        layer.nbytes = nbytes = layer.memory_needed(more)
        if layer.memory is None or not layer.has_room(more):
            self._ask(nbytes)
        self._fetch(layer)
        if layer.has_room(more):
            return
        pages = layer.pages()
        try:
            layer.move_to(self._room(_Room(layer, nbytes)), pages)
            self._close_gap(layer)
        except MemoryError:  # there is no room beside the old memory
            pages.clear()
            self._residency.put_away(self, layer)
            self._fetch(layer)

    def _fetch(self, layer: PagedLayer) -> None:
        self._residency.fetch(self, layer, layer)
        layer.arrive()

    def _close_gap(self, layer: PagedLayer) -> None:
        """Moves a layer's tail to the end of the memory, where layers that have grown have left gaps between tails."""
        with self.lock:
            tail, before = self.share.allocate(max(1, layer.tail_bytes), at_end=True), layer.tail
            if tail is not None and before is not None and self.share.place(tail) > self.share.place(before):
                layer.tail = tail.copy_(before)

    def _room(self, room: _Room) -> torch.Tensor:
        self._ask(room.nbytes)
        self.require_room(room)
        with torch.inference_mode(False):  # or its memory could be changed in that mode only
            return self._residency.room(self, room, -1)

    def _ask(self, nbytes: int) -> None:
        """Has others give way if they are to."""
        self._asked = in_pages(nbytes)
        self._balance()

    def _balance(self) -> None:
        if self._memory is not None:
            self._memory.balance()

    def _shrink(self, layer: PagedLayer) -> None:
        """Moves a layer that has much more memory than it needs, if that is possible without others' leaving."""
        needed = layer.memory_needed(0)
        if layer.memory is not None and _SPARE * needed < layer.memory.nbytes:
            with self.lock:
                memory = self.allocate(_Room(layer, needed))
            if memory is not None:
                layer.move_to(memory, layer.pages())
        self._ask(0)

    def _sizes(self, more: int = 0) -> tuple[dict[PagedLayer, int], int]:
        """Returns the memory that each layer takes with ``more`` tokens, and that of tails and of an expanded layer."""
        layers = [layer for layer in self._layers if layer.batch]
        sizes = {layer: in_pages(layer.memory_needed(more)) for layer in layers}
        expanded = max((in_pages(layer.expanded_bytes(size)) for layer, size in sizes.items()), default=0)
        return sizes, sum(in_pages(layer.tail_bytes) for layer in layers) + expanded

    def _end_transfers(self, layer: PagedLayer) -> None:
        """Waits for those of a layer, which is to be changed."""
        if layer.arrival is not None:
            self._residency.await_arrival(self, layer, layer.arrival, begun=False)
        layer.arrive()
        self._residency.wait_until_written(self, layer)

    def _forget(self, layer: PagedLayer) -> None:
        for arrival in (layer.arrival, layer.leaving):
            if arrival is not None:
                arrival.exception()
        layer.leaving = None
        with self.lock:
            self.discard(layer)
        layer.clear()

    def _ahead(self, more: int) -> None:
        """Brings the next layers, each with room for ``more`` tokens. What fails is tried again on demand."""
        if self._cycled:
            self._choose(more)
        with contextlib.suppress(OSError, RuntimeError):
            current, begun = self._layers[self._current], False
            if self._cycled and current not in self._kept:
                with self.lock:
                    self._residency.write_back(self, current)  # now, for its memory is needed soon
            for number, layer in enumerate([*self._layers[self._current + 1 :], *self._layers[: self._current]]):
                if layer.memory is not None or not layer.tokens:
                    continue
                if not self._cycled and layer in self._layers[: self._current]:
                    break
                layer.nbytes = layer.memory_needed(more)
                while not self._begin(layer, number):
                    if begun or not self.await_copy():
                        return
                begun = True
            if not self._cycled:  # a new layer of the same size may follow
                self._ask(nbytes := current.memory_needed(0))
                with self.lock:
                    self._residency.make_room(self, nbytes, 0)

    def _begin(self, layer: PagedLayer, number: int) -> bool:
        with self.lock:
            return self._residency.begin(self, layer, Priority.PREFETCH, number)

    def _choose(self, more: int) -> None:
        """Decides which layers stay."""
        sizes, tails = self._sizes(more)
        room = self.share.nbytes - tails
        if sum(sizes.values()) <= room:
            self._kept = set(sizes)
            return
        room -= _SLOTS * max(sizes.values())
        every = [sizes.get(layer, room + 1) for layer in self._layers]  # without tokens there is nothing to keep
        kept = kept_as_they_grow(every, room)
        self._kept = {self._layers[place] for place in kept}


def _layer(entry: Entry) -> PagedLayer:
    return entry.layer if isinstance(entry, _Room) else cast("PagedLayer", entry)
