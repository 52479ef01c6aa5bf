"""``Pool``: memory of a bounded size, for which those who ask wait until there is some."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from nvme_ops._native import native
from nvme_ops.errors import DeadlockError
from nvme_ops.settings import PAGE
from nvme_ops.tensors import pool_buffer
from nvme_ops.text import size_words

_FOR_EVER = 1e9  # seconds
_HUGE = 2 << 20  # bytes of a huge page, in which larger leases are counted


class Lease:
    """Memory out of a pool: ``tensor``, bytes whose contents are arbitrary.

    As a context manager it gives the memory back at the end of the block, which must not leave tensors over it behind.
    Otherwise the memory goes back when the last tensor over it is gone, and the lease too.
    """

    def __init__(self, pool: Pool, tensor: torch.Tensor, charge: int) -> None:
        self._pool, self._charge = pool, charge
        self._tensor: torch.Tensor | None = tensor
        self._thread: int | None = None

    @property
    def tensor(self) -> torch.Tensor:
        """The memory, one-dimensional, of dtype ``torch.uint8``. Raises ValueError once it was given back."""
        if self._tensor is None:
            raise ValueError("the lease has ended")
        return self._tensor

    def release(self) -> None:
        """Gives the memory back as soon as no other tensor is over it. Once or more."""
        self._pool._leave(self)
        self._tensor = None

    def __enter__(self) -> torch.Tensor:
        self._pool._enter(self)
        return self.tensor

    def __exit__(self, *_: object) -> None:
        self.release()


class Pool:
    """Leases at most ``budget`` bytes of memory, in huge pages, aligned for direct I/O.

    Threads are served in the order in which they ask. A forked child begins with a pool of its own, which is empty:
    what its parent has leased is the parent's.

    Args:
        budget: bytes, at least 1. A lease counts with what it takes of the system: a power of two of pages, from 2 MiB
            on a multiple of 2 MiB.
        pinned: lease memory from which an accelerator copies at full speed, locked by torch where there is one.

    Raises:
        ValueError: a budget below 1.
    """

    def __init__(self, budget: int, *, pinned: bool = False) -> None:
        if isinstance(budget, bool) or not hasattr(budget, "__index__"):
            raise TypeError(f"budget must be an int, not {type(budget).__name__}")
        if budget < 1:
            raise ValueError(f"budget must be at least 1 byte, not {budget}")
        self._budget = budget
        self._pinned = pinned and can_pin()
        self._start_anew()
        _all.add(self)

    def _start_anew(self) -> None:
        self._lock = threading.RLock()
        self._in_use = self._peak = 0
        self._process = os.getpid()
        # Whatever frees a tensor may do so in the middle of anything, so it only adds here: that is one step.
        self._freed: deque[int] = deque()
        self._live: dict[int, Any] = {}  # weak references, whose callbacks tell of freed memory
        self._waiting: deque[_Waiting] = deque()  # first come, first served
        self._held: dict[int, int] = {}  # by thread: bytes that only the end of one of its blocks gives back

    @property
    def budget(self) -> int:
        """Bytes that there may be in all."""
        return self._budget

    @property
    def largest(self) -> int:
        """Bytes of the largest lease that there may be."""
        if self._budget >= _HUGE:
            return self._budget // _HUGE * _HUGE
        return 1 << (self._budget.bit_length() - 1) if self._budget >= PAGE else 0

    @property
    def bytes_in_use(self) -> int:
        """Bytes that are leased at the moment."""
        with self._lock:
            self._collect()
            return self._in_use

    @property
    def peak(self) -> int:
        """The most bytes that were leased at once."""
        return self._peak

    def lease(self, nbytes: int, timeout: float | None = None) -> Lease:
        """Memory of ``nbytes`` bytes; waits while the budget is spent. Ctrl-C ends the wait.

        Args:
            nbytes: at least 1.
            timeout: seconds to wait at most; for ever when None, not at all when 0.

        Raises:
            MemoryError: more than the budget, which no wait can bring, or than the system has.
            TimeoutError: there was none within ``timeout`` seconds.
            DeadlockError: those who hold what is missing are waiting for memory of this pool themselves.
        """
        if nbytes < 1:
            raise ValueError(f"nbytes must be at least 1, not {nbytes}")
        charge = _charge_of(nbytes)
        if charge > self._budget:
            raise MemoryError(
                f"{size_words(nbytes)}, in whole pages {size_words(charge)}, do not fit the pool's budget of "
                f"{size_words(self._budget)}"
            )
        self._admit(charge, timeout)
        try:
            return Lease(self, self._allocate(nbytes, charge), charge)
        except BaseException:
            self._give_back(charge)
            raise

    def _admit(self, charge: int, timeout: float | None) -> None:
        """Counts it as in use when its turn has come and there is room."""
        deadline = None if timeout is None else time.monotonic() + timeout
        mine = _Waiting(threading.get_ident(), charge)
        with self._lock:
            self._waiting.append(mine)
        try:
            while True:
                seen = native().endings()
                native().wait_for_ending(seen, 0)  # releases the memory of transfers that have ended
                with self._lock:
                    if self._take(mine):
                        return
                    self._require_an_end()
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise TimeoutError(
                        f"{size_words(charge)} were not free within {timeout} s: {size_words(self._in_use)} of "
                        f"{size_words(self._budget)} are in use"
                    )
                native().wait_for_ending(seen, _FOR_EVER if left is None else left)
        finally:
            with self._lock, contextlib.suppress(ValueError):  # a forked child has nobody waiting
                self._waiting.remove(mine)
            native().note_ending()  # whose turn it is now

    def _take(self, mine: _Waiting) -> bool:
        self._collect()
        if self._waiting[0] is not mine or self._in_use + mine.charge > self._budget:
            return False
        self._in_use += mine.charge
        self._peak = max(self._peak, self._in_use)
        return True

    def _collect(self) -> None:
        """Counts what was freed since."""
        while self._freed:
            self._in_use -= self._freed.popleft()

    def _give_back(self, charge: int) -> None:
        """Counts memory as free, from wherever a tensor ends: takes no lock."""
        self._freed.append(charge)
        native().note_ending()

    def _require_an_end(self) -> None:
        """Raises DeadlockError when the first who waits waits for what only others who wait could give back."""
        first = self._waiting[0]
        stuck = sum(self._held.get(thread, 0) for thread in {waiting.thread for waiting in self._waiting})
        if first.charge + stuck > self._budget:
            raise DeadlockError(
                f"{size_words(first.charge)} are asked for and will never be free: {size_words(stuck)} of the pool's "
                f"{size_words(self._budget)} are held by {len(self._waiting)} threads that wait for more of it"
            )

    def _allocate(self, nbytes: int, charge: int) -> torch.Tensor:
        owner: Any  # goes with the last tensor over the memory, and tells by a weak reference
        if self._pinned:
            locked = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
            owner = (ctypes.c_ubyte * nbytes).from_address(locked.data_ptr())
            owner.keeps = locked
        else:
            with self._lock:
                # what the process keeps for reuse must not come on top of the budget
                if self._in_use + native().pool_statistics()["cached_bytes"] - charge > self._budget:
                    native().trim_pool()
            owner = pool_buffer(nbytes)
        tensor = torch.frombuffer(owner, dtype=torch.uint8)
        key, process = id(owner), self._process

        def gone(_: object) -> None:
            self._live.pop(key, None)
            if process == self._process:
                self._give_back(charge)

        self._live[key] = weakref.ref(owner, gone)
        return tensor

    def _enter(self, lease: Lease) -> None:
        lease._thread = threading.get_ident()
        with self._lock:
            self._held[lease._thread] = self._held.get(lease._thread, 0) + lease._charge

    def _leave(self, lease: Lease) -> None:
        thread, lease._thread = lease._thread, None
        if thread is None:
            return
        with self._lock:
            self._held[thread] = self._held.get(thread, 0) - lease._charge
            if self._held[thread] <= 0:
                del self._held[thread]

    def __repr__(self) -> str:
        """For example ``Pool(268435456): 8388608 bytes in use``."""
        return f"Pool({self._budget}{', pinned=True' if self._pinned else ''}): {self.bytes_in_use} bytes in use"


@dataclass(eq=False)
class _Waiting:
    """A thread that waits for memory."""

    thread: int
    charge: int


def can_pin() -> bool:
    """Whether there is an accelerator that copies faster from page-locked memory."""
    return bool(torch.cuda.is_available() or (hasattr(torch, "xpu") and torch.xpu.is_available()))


def _charge_of(nbytes: int) -> int:
    """What the system gives for it: see ``size_class`` of csrc/engine/buffer_pool.cpp."""
    if nbytes >= _HUGE:
        return -(-nbytes // _HUGE) * _HUGE
    return max(PAGE, 1 << (nbytes - 1).bit_length())


_all: weakref.WeakSet[Pool] = weakref.WeakSet()


def _forked() -> None:
    for pool in list(_all):
        pool._start_anew()


os.register_at_fork(after_in_child=_forked)
