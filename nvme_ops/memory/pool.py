"""``Pool``: a bounded amount of memory; a lease waits until enough of it is free.

``Held`` keeps account of what was handed out until its owner is freed, even if Ctrl-C interrupts the accounting.
"""

from __future__ import annotations

import ctypes
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from nvme_ops.base.errors import DeadlockError
from nvme_ops.base.lifetime import Tracked, track
from nvme_ops.base.native import native
from nvme_ops.base.settings import PAGE
from nvme_ops.base.text import bytes_of, never_raising, size_words
from nvme_ops.io.tensors import pool_buffer
from nvme_ops.memory.page_locked import PageLocked, reuse, wait_for_copies

T = TypeVar("T")


class Held(Generic[T]):
    """Things, each held until its owner is freed. Call its methods with a lock held; any thread may free an owner.

    Ctrl-C may come at any line without loss: functions written in C, which no signal handler interrupts, note that an
    owner was freed, and after an interruption the next ``collect`` recounts.
    """

    def __init__(self) -> None:
        self._all: dict[int, tuple[T, tuple[Any, Any]]] = {}  # by the id of the weak reference to the owner
        self._freed: deque[object] = deque()
        self.interrupted = False  #: set by a caller that was interrupted before a thing was held

    def add(self, owner: object, thing: T) -> object:
        """Holds a thing until ``owner`` is freed. Returns a token for ``end`` and ``pass_on``."""
        waking = weakref.ref(owner, native().note_ending)  # created first, so it is called last
        gone = weakref.ref(owner, self._freed.append)
        self._all[id(gone)] = thing, (gone, waking)
        return gone

    def end(self, held: object) -> None:
        """Lets the next ``collect`` give a thing back, even if its owner lives on. Needs no lock."""
        self._freed.append(held)
        native().note_ending()

    def pass_on(self, held: object, owner: object) -> None:
        """Makes another object the owner of a thing."""
        try:
            self.add(owner, self._all[id(held)][0])
            del self._all[id(held)]
        except BaseException:
            self.interrupted = True
            raise

    def left(self) -> list[T]:
        """Returns the things whose owners are not freed. Needs no lock."""
        freed = set(map(id, self._freed.copy()))
        return [thing for number, (thing, _) in list(self._all.items()) if number not in freed]

    def collect(self, give_back: Callable[[T], None], recount: Callable[[Iterable[T]], None]) -> None:
        """Gives back the things whose owners were freed since the last call.

        Args:
            give_back: is called with each of them.
            recount: is called with all things that are still held, after a call was interrupted.
        """
        try:
            while self.interrupted:
                held = list(self._all.values())
                recount([thing for thing, _ in held])
                self.interrupted = held != list(self._all.values())  # a signal handler may have been here
            while self._freed:
                gone = self._freed[0]  # removed only after it was given back
                entry = self._all.pop(id(gone), None)
                if entry is not None:
                    give_back(entry[0])
                if self._freed and self._freed[0] is gone:  # a signal handler may have been here
                    self._freed.popleft()
        except BaseException:
            self.interrupted = True
            raise


_RECHECK = 1.0  # seconds between looks for room, in case Ctrl-C has kept a thread from waking others
_HUGE = 2 << 20  # bytes of a huge page, in which larger leases are counted


class Lease:
    """Memory leased from a pool: ``tensor``, uninitialized bytes.

    As a context manager it returns the memory at the end of the block, after which no tensor may use it. Otherwise the
    memory goes back once the lease and the last tensor over it are gone.
    """

    def __init__(self, pool: Pool, tensor: torch.Tensor, charge: int) -> None:
        self._pool, self._charge = pool, charge
        self._tensor: torch.Tensor | None = tensor
        self._thread: int | None = None

    @property
    def tensor(self) -> torch.Tensor:
        """The memory: one-dimensional, dtype ``torch.uint8``. Raises ValueError after ``release``."""
        if self._tensor is None:
            raise ValueError("the lease has ended")
        return self._tensor

    def release(self) -> None:
        """Returns the memory to the pool as soon as no other tensor uses it. Further calls do nothing."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._pool._count(thread, -self._charge)
        self._tensor = None

    @never_raising
    def __repr__(self) -> str:
        """Returns for example ``<Lease of 8 MiB>``."""
        return f"<Lease of {size_words(self._charge)}{', released' if self._tensor is None else ''}>"

    def __enter__(self) -> torch.Tensor:
        self._thread = threading.get_ident()
        self._pool._count(self._thread, self._charge)
        return self.tensor

    def __exit__(self, *_: object) -> None:
        self.release()


class Pool(Tracked):
    """Leases at most ``budget`` bytes of huge-page memory, aligned for direct I/O.

    Threads are served in the order in which they ask. A forked child starts with an empty pool: the leases are its
    parent's.

    Args:
        budget: bytes, or a size such as ``"64M"``. A lease counts as what is allocated for it: a power of two of
            pages, from 2 MiB on a multiple of 2 MiB.
        pinned: lease page-locked memory, from which an accelerator copies at full speed; ignored without one. Ordinary
            memory where the system refuses to lock it, which a RuntimeWarning says once. Memory that was leased before
            is leased again when all GPUs have done what was queued. In a forked child, a GPU's has zeros in it.

    Raises:
        ValueError: a budget below 1.
        TypeError: a budget that is neither an int nor a str.
    """

    _waits_for_copies = True  # before page-locked memory is leased again

    def _most(self) -> int:
        """Returns the most bytes of page-locked pieces, those that are free included."""
        return self._budget

    def __init__(self, budget: int | str, *, pinned: bool = False) -> None:
        self._budget = bytes_of("budget", budget)
        self._pinned = pinned and can_pin()
        self._after_fork()
        track(self)

    def _after_fork(self) -> None:
        self._lock = threading.RLock()
        self._in_use = self._peak = 0
        self._leased: Held[int] = Held()  # the charge of each lease
        self._pieces: list[PageLocked] = []  # those that are free are reused
        self._waiting: deque[_Waiting] = deque()  # first come, first served
        self._by_thread: dict[int, int] = {}  # bytes leased in with blocks

    @property
    def budget(self) -> int:
        """The most bytes that can be leased at once."""
        return self._budget

    @property
    def largest(self) -> int:
        """Bytes of the largest possible lease."""
        if self._budget >= _HUGE:
            return self._budget // _HUGE * _HUGE
        return 1 << (self._budget.bit_length() - 1) if self._budget >= PAGE else 0

    @property
    def bytes_in_use(self) -> int:
        """Bytes leased now."""
        with self._lock:
            self._leased.collect(self._give_back, self._recount)
            return self._in_use

    @property
    def peak(self) -> int:
        """The most bytes that were leased at once."""
        return self._peak

    def lease(self, nbytes: int | str, timeout: float | None = None) -> Lease:
        """Leases ``nbytes`` bytes; waits while the budget is spent. Ctrl-C ends the wait.

        Args:
            nbytes: bytes, or a size such as ``"8M"``.
            timeout: the most seconds to wait; without limit when None, not at all when 0.

        Raises:
            ValueError: ``nbytes`` is below 1.
            MemoryError: more than the whole budget, or more than the system has.
            TimeoutError: not enough was freed within ``timeout`` seconds.
            DeadlockError: the threads that hold the missing memory are themselves waiting for memory of this pool.
        """
        nbytes = bytes_of("nbytes", nbytes)
        charge = charge_of(nbytes)
        if charge > self._budget:
            raise MemoryError(
                f"{size_words(nbytes)}, in whole pages {size_words(charge)}, do not fit the pool's budget of "
                f"{size_words(self._budget)}"
            )
        mine = _Waiting(threading.get_ident(), charge)
        try:
            self._admit(mine, timeout)
            return Lease(self, self._allocate(nbytes, mine), charge)
        except BaseException:
            if mine.held is not None:
                self._leased.end(mine.held)
            raise
        finally:
            mine.over = True

    def _admit(self, mine: _Waiting, timeout: float | None) -> None:
        """Waits for this thread's turn and for room, then counts its charge as in use."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            while self._waiting and self._waiting[-1].over:
                self._waiting.pop()
            self._waiting.append(mine)
        try:
            while True:
                seen = native().endings()
                native().wait_for_ending(seen, 0)  # releases the memory of transfers that have ended
                with self._lock:
                    if self._take(mine):
                        return
                    self._refuse_deadlock()
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise TimeoutError(
                        f"{size_words(mine.charge)} were not free within {timeout} s: {size_words(self._in_use)} of "
                        f"{size_words(self._budget)} are in use"
                    )
                native().wait_for_ending(seen, _RECHECK if left is None else min(left, _RECHECK))
        finally:
            mine.over = True  # first, since Ctrl-C may come at the beginning of any call
            native().note_ending()  # wakes the next in line

    def _take(self, mine: _Waiting) -> bool:
        self._leased.collect(self._give_back, self._recount)
        while self._waiting[0].over:
            self._waiting.popleft()
        if self._waiting[0] is not mine or self._in_use + mine.charge > self._budget:
            return False
        try:
            self._in_use += mine.charge
            mine.held = self._leased.add(mine, mine.charge)
        except BaseException:
            self._leased.interrupted = True
            raise
        self._peak = max(self._peak, self._in_use)
        return True

    def _give_back(self, charge: int) -> None:
        self._in_use -= charge

    def _recount(self, charges: Iterable[int]) -> None:
        self._in_use = sum(charges)

    def _refuse_deadlock(self) -> None:
        """Raises DeadlockError if the memory that the first thread waits for is held by threads that also wait."""
        first = self._waiting[0]
        waiting = [waiter for waiter in self._waiting if not waiter.over]
        stuck = sum(self._by_thread.get(thread, 0) for thread in {waiter.thread for waiter in waiting})
        if first.charge + stuck > self._budget:
            raise DeadlockError(
                f"{size_words(first.charge)} are requested and will never be free: {size_words(stuck)} of the pool's "
                f"{size_words(self._budget)} are held by {len(waiting)} threads that wait for more of it"
            )

    def _allocate(self, nbytes: int, mine: _Waiting) -> torch.Tensor:
        owner: Any = None  # freed with the last tensor over the memory, which ``_leased`` notices
        if self._pieces:
            with self._lock:
                owner, unfitting = reuse(self._pieces, mine.charge, self._most() - self._in_use)
            unfitting.clear()  # without the lock, as it may take a while
        with self._lock:
            # memory cached for reuse must not come on top of the budget
            if self._in_use + native().pool_statistics()["cached_bytes"] - mine.charge > self._budget:
                native().trim_pool()
        if owner is not None:
            if self._waits_for_copies:
                wait_for_copies()
        elif not self._pinned:
            owner = pool_buffer(nbytes)
        elif _has_xpu():  # which registers no memory
            locked = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
            owner = (ctypes.c_ubyte * nbytes).from_address(locked.data_ptr())
            owner.keeps = locked
        else:
            piece = PageLocked(mine.charge).warn()
            with self._lock:
                self._pieces.append(piece)
                owner = piece.lend()
        tensor = torch.frombuffer(owner, dtype=torch.uint8, count=nbytes)
        with self._lock:
            self._leased.pass_on(mine.held, owner)
        return tensor

    def _count(self, thread: int, nbytes: int) -> None:
        """Counts what a thread has leased in with blocks."""
        with self._lock:
            self._by_thread[thread] = self._by_thread.get(thread, 0) + nbytes
            if self._by_thread[thread] <= 0:
                del self._by_thread[thread]

    @never_raising
    def __repr__(self) -> str:
        """Returns for example ``<Pool of 256 MiB: 8 MiB in use>``."""
        used, kind = size_words(sum(self._leased.left())), ", page-locked" if self._pinned else ""
        return f"<Pool of {size_words(self._budget)}{kind}: {used} in use>"


class AwaitedPool(Pool):
    """One of page-locked memory that is freed only when its copies have ended: leasing it waits for no accelerator.

    Pieces of sizes that are no longer needed have at most as much memory as was ever in use at once.
    """

    _waits_for_copies = False

    def __init__(self, budget: int) -> None:
        super().__init__(budget, pinned=True)

    def _most(self) -> int:
        return min(self._budget, 2 * self._peak)

    def has_piece(self, charge: int) -> bool:
        """Returns whether memory of this size is there already."""
        with self._lock:
            return any(piece.nbytes == charge and piece.user() is None for piece in self._pieces)


@dataclass(eq=False)
class _Waiting:
    """A thread that waits for memory."""

    thread: int
    charge: int
    held: object = None  # the token of its charge, until memory is allocated
    over: bool = False  # it no longer waits


def can_pin() -> bool:
    """Returns whether there is an accelerator that copies faster from page-locked memory."""
    return torch.cuda.is_available() or _has_xpu()


def _has_xpu() -> bool:
    return hasattr(torch, "xpu") and torch.xpu.is_available()


def charge_of(nbytes: int) -> int:
    """Returns the bytes allocated for a lease: see ``size_class`` in csrc/engine/buffer_pool.cpp."""
    if nbytes >= _HUGE:
        return -(-nbytes // _HUGE) * _HUGE
    return max(PAGE, 1 << (nbytes - 1).bit_length())
