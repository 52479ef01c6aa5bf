"""``Tier``: bounded memory of a device, for short-lived tensors; each part comes back with the last tensor over it."""

from __future__ import annotations

import ctypes
import mmap
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from nvme_ops.base.errors import note
from nvme_ops.base.lifetime import forkable_lock
from nvme_ops.base.limits import free_memory, less_an_eighth
from nvme_ops.base.settings import PAGE
from nvme_ops.base.text import size_words
from nvme_ops.memory.holes import Holes
from nvme_ops.memory.pool import AwaitedPool, Held, Pool, charge_of

_HUGE = 2 << 20  # bytes: a pool counts large allocations in such units
_REFUSED = 1.0  # seconds: torch frees all that it has cached before it says that an accelerator has no more memory
_libc = ctypes.CDLL(None)

Made = tuple[Any, Any]  # what gives a part back when it is freed, and what is handed out


def _whole(tensor: torch.Tensor) -> Made:
    """Returns the storage, which all tensors over it share and keep, and the tensor itself."""
    return tensor.untyped_storage(), tensor


def in_pages(nbytes: int) -> int:
    """Returns bytes rounded up to whole pages, as memory is charged."""
    return -(-nbytes // PAGE) * PAGE


class Lent:
    """Stands for memory that is used elsewhere."""


class Share:
    """What one user of a tier may have of it.

    Args:
        tier: has the memory.
        nbytes: the most bytes at once; may be changed at any time.
    """

    at_end = False  #: all of it is taken from the end of the memory
    refusal: RuntimeError | None = None  #: why an accelerator had no memory for this when it was last asked

    def __init__(self, tier: Tier, nbytes: int) -> None:
        self.nbytes, self.device = nbytes, tier.device
        self.in_use = 0  #: as the tier counts; see ``bytes_in_use``
        self.peak = 0  #: the most bytes that were handed out at once
        self.ref = weakref.ref(self)
        self._tier = tier

    @property
    def bytes_in_use(self) -> int:
        """Bytes handed out now."""
        self._tier.collect()
        return self.in_use

    def collect(self) -> None:
        """Has the tier take back what nobody uses any more."""
        self._tier.collect()

    @property
    def largest(self) -> int:
        """Bytes of the largest part that can be allocated now."""
        return min(self._tier.largest, self.nbytes - self.bytes_in_use)

    def ask_again(self) -> bool:
        """Has an accelerator asked for more memory, although it has just refused some; returns whether it has."""
        self.refusal = None
        return self._tier.ask_again()

    def allocate(self, nbytes: int, at_end: bool = False) -> torch.Tensor | None:
        """Returns a ``torch.uint8`` tensor of ``nbytes`` (at least 1), in whole pages; None if there is no room.

        With ``at_end`` it is taken from the end of the memory, so that parts of two kinds do not lie among each other.
        """
        return self._tier.allocate(nbytes, self, at_end)

    def place(self, memory: torch.Tensor) -> int:
        """Returns at which byte of the tier memory begins that was allocated; 0 where all places are alike."""
        return self._tier.place(memory)

    def is_inside(self, memory: torch.Tensor) -> bool:
        """Returns whether memory that was allocated lies on this share's side of the boundary."""
        place, boundary = self.place(memory), self._tier.boundary
        return place >= boundary if self.at_end else place + memory.nbytes <= boundary

    def lend(self, nbytes: int) -> object | None:
        """Gives up ``nbytes`` for memory that others allocate; they are back with the last reference to the result.

        Returns None if there is no room.
        """
        return self._tier.lend(nbytes, self)


#: At which byte a part begins, its bytes in whole pages, and whose they are; weak, or parts would keep their tier.
_Part = tuple[int, int, weakref.ref[Share]]


class Tier:
    """Bounded memory of a device, divided among the tensors of all shares, in whole pages.

    Any thread may call any method, and tensors may be freed in any thread.

    Args:
        nbytes: bytes, in whole pages.
        device: an accelerator; its memory comes from torch's allocator, which reuses it in the order of the current
            stream.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes, self.device = nbytes, device
        self.boundary = nbytes  #: where the memory begins of shares that take it from the end; may be changed
        self._most, self._until = nbytes, 0.0  # what an accelerator has had, and until when it is not asked for more
        self._in_use = 0
        self._lock = forkable_lock()
        self._held: Held[_Part] = Held()
        self._shares: weakref.WeakSet[Share] = weakref.WeakSet()

    def share(self, nbytes: int | None = None) -> Share:
        """Returns a share, by default of all bytes. Those of several may be more than there are."""
        share = Share(self, self.nbytes if nbytes is None else nbytes)
        self._shares.add(share)
        return share

    def allocate(self, nbytes: int, share: Share, at_end: bool = False) -> torch.Tensor | None:
        """Returns memory for a share; see there."""
        if nbytes < 1:
            raise ValueError(f"nbytes must be at least 1, not {nbytes}")
        made = self._hand_out(nbytes, share, at_end, self._part)
        return None if made is None else made[1]

    def place(self, memory: torch.Tensor) -> int:
        """Returns where allocated memory begins; see ``Share``."""
        del memory
        return 0

    def lend(self, nbytes: int, share: Share) -> object | None:
        """Gives up memory of a share; see there."""
        made = self._hand_out(nbytes, share, True, self._give_up)
        return None if made is None else made[0]

    def _hand_out(self, nbytes: int, share: Share, at_end: bool, make: Callable[[int, int], Made]) -> Made | None:
        size = in_pages(nbytes)
        with self._lock:
            self.collect()
            if share.in_use + size > share.nbytes:
                return None
            try:
                start = self._reserve(size, share, at_end)
                if start is None:
                    return None
                owner, made = make(start, nbytes)
                self._in_use += size
                share.in_use += size
                self._held.add(owner, (start, size, share.ref))
            except torch.cuda.OutOfMemoryError as error:  # torch's, of any accelerator: nothing was counted yet
                share.refusal = error.with_traceback(None)
                self._most, self._until = self._in_use, time.monotonic() + _REFUSED
                return None
            except BaseException:
                self._held.interrupted = True
                raise
            share.peak = max(share.peak, share.in_use)
        return owner, made

    def collect(self) -> None:
        """Takes back the parts that nobody uses any more."""
        with self._lock:
            self._held.collect(self._give_back, self._recount)

    @property
    def largest(self) -> int:
        """Bytes of the largest part that there is memory for now."""
        return self.nbytes - self._in_use

    def ask_again(self) -> bool:
        """See ``Share``."""
        until, self._until = self._until, 0.0
        return time.monotonic() < until

    def _reserve(self, size: int, share: Share, at_end: bool) -> int | None:
        """Takes a part; returns where it begins, or None if there is no room in one piece."""
        del share, at_end
        most = self.nbytes if time.monotonic() >= self._until else min(self._most, self.nbytes)
        return 0 if self._in_use + size <= most else None

    def _give_up(self, start: int, nbytes: int) -> Made:
        """Returns what stands for memory that is used elsewhere."""
        del start, nbytes
        return Lent(), None

    def _part(self, start: int, nbytes: int) -> Made:
        """Returns what is freed with the last tensor over a part, and a tensor over it."""
        del start
        return _whole(torch.empty(nbytes, dtype=torch.uint8, device=self.device))

    def _give_back(self, part: _Part) -> None:
        _, size, ref = part
        self._in_use -= size
        if (share := ref()) is not None:
            share.in_use -= size

    def _recount(self, parts: Iterable[_Part]) -> None:
        self._in_use = 0
        for share in list(self._shares):
            share.in_use = 0
        for _, size, ref in parts:
            self._in_use += size
            if (owner := ref()) is not None:
                owner.in_use += size


class HostTier(Tier):
    """Memory of the host, in one piece: it is reused, so that the system need not supply any while data arrives.

    Args:
        nbytes: as above.
        pool: supplies the memory, all of which is leased until the tier and all tensors over it are gone.
        two_ended: some parts are taken from the end; the others then lie at the start, and before ``boundary``.
    """

    def __init__(self, nbytes: int, pool: Pool, two_ended: bool = False) -> None:
        super().__init__(nbytes // PAGE * PAGE, torch.device("cpu"))
        self._memory = pool.lease(self.nbytes).tensor
        self._holes = Holes()
        self._holes.add(0, self.nbytes)
        self._two_ended = two_ended

    @property
    def largest(self) -> int:
        """Bytes of the largest part that there is memory for now."""
        return self._holes.largest

    def place(self, memory: torch.Tensor) -> int:
        """Returns where allocated memory begins; see ``Share``."""
        return memory.data_ptr() - self._memory.data_ptr()

    def _reserve(self, size: int, share: Share, at_end: bool) -> int | None:
        at_end = at_end or share.at_end
        which = "last" if at_end else "first" if self._two_ended else "smallest"
        boundary = self.nbytes if share.at_end else self.boundary
        while (hole := self._holes.find(size, which, boundary)) is not None:
            start, free = hole
            from_end = at_end and start + free <= boundary
            if self._holes.take(start, free, size, from_end):  # else a signal handler was here
                return start + (free - size if from_end else 0)
        return None

    def _give_up(self, start: int, nbytes: int) -> Made:
        memory = self._memory.data_ptr() + start
        # where the system refuses, it cannot have the memory back: that costs memory, not the program
        _libc.madvise(ctypes.c_void_p(memory), ctypes.c_size_t(in_pages(nbytes)), mmap.MADV_DONTNEED)
        return super()._give_up(start, nbytes)

    def _part(self, start: int, nbytes: int) -> Made:
        owner: Any = (ctypes.c_ubyte * nbytes).from_address(self._memory.data_ptr() + start)
        owner.keeps = self._memory  # freed with the last tensor over this part
        return owner, torch.frombuffer(owner, dtype=torch.uint8)

    def _give_back(self, part: _Part) -> None:
        super()._give_back(part)
        self._holes.merge(*part[:2])

    def _recount(self, parts: Iterable[_Part]) -> None:
        """Rebuilds the holes: everything is free but these parts."""
        parts = sorted(parts, key=lambda part: part[0])
        super()._recount(parts)
        self._holes.clear()
        free = 0
        for start, size, _ in parts:
            if start > free:
                self._holes.add(free, start - free)
            free = start + size
        if free < self.nbytes:
            self._holes.add(free, self.nbytes - free)


class PooledTier(Tier):
    """Page-locked memory of the host, from which an accelerator copies at full speed: each part is a piece of its own.

    It is registered when it is first needed, and reused for parts of the same size. An eighth of what the machine has
    now is left to others, whatever the budget is. Whoever frees a part has waited for the copies from and to it.

    Args:
        nbytes: as above.
    """

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes, torch.device("cpu"))
        self._pool, self._spare = AwaitedPool(max(1, nbytes)), free_memory() // 8

    def _reserve(self, size: int, share: Share, at_end: bool) -> int | None:
        charge = charge_of(size)
        if charge > self._pool.budget - self._pool.bytes_in_use:
            return None
        if not self._pool.has_piece(charge) and free_memory() - charge < self._spare:
            return None
        return super()._reserve(size, share, at_end)

    def _part(self, start: int, nbytes: int) -> Made:
        del start
        return _whole(self._pool.lease(nbytes, timeout=0).tensor)


def tier_on(device: torch.device, nbytes: int, two_ended: bool = False) -> Tier:
    """Returns memory of ``nbytes`` bytes on a device; see ``HostTier`` for ``two_ended``."""
    if device.type == "cpu":
        try:
            return HostTier(nbytes, Pool(-(-nbytes // _HUGE) * _HUGE), two_ended)
        except MemoryError as error:
            free = size_words(less_an_eighth(free_memory()))
            note(error, f"the budget is more than the system gives: give less ({free} are free)")
            raise
    return Tier(nbytes, device)
