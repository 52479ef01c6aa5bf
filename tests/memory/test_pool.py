"""Memory of a bounded size: who gets it, who waits, and who is told that no wait will help."""

from __future__ import annotations

import contextlib
import gc
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch

from nvme_ops.base.errors import DeadlockError
from nvme_ops.base.native import native
from nvme_ops.memory.holes import Holes
from nvme_ops.memory.pool import Lease, Pool
from nvme_ops.memory.tier import HostTier
from tests import moments
from tests.conftest import KIB, MIB, in_child, in_threads
from tests.moments import Interrupt


def waiting_for(pool: Pool, nbytes: int) -> threading.Thread:
    """A thread that waits for a lease, and has it for a moment."""
    thread = threading.Thread(target=pool.lease, args=[nbytes], daemon=True)
    thread.start()
    while thread.ident not in [waiter.thread for waiter in list(pool._waiting)]:
        time.sleep(0.001)
    return thread


@contextmanager
def alarm(handler: Any) -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    yield
    signal.signal(signal.SIGALRM, before)


# What a lease is


@pytest.mark.parametrize(("nbytes", "charge"), [(1, 4096), (5000, 8192), (3 * MIB, 4 * MIB)])
def test_a_lease_is_memory_of_its_size_and_counts_with_what_it_takes(nbytes: int, charge: int) -> None:
    for pool in (Pool(8 * MIB), Pool(8 * MIB, pinned=True)):
        with pool.lease(nbytes) as memory:
            assert (memory.dtype, memory.shape) == (torch.uint8, (nbytes,))
            assert memory.data_ptr() % 4096 == 0
            memory.fill_(7)
            assert pool.bytes_in_use == charge
        del memory
        assert (pool.bytes_in_use, pool.peak) == (0, charge)


def test_memory_comes_back_with_the_last_tensor_over_it() -> None:
    pool = Pool(4 * MIB)
    lease = pool.lease(2 * MIB)
    part: Any = lease.tensor[100:200].view(torch.int32)
    lease.release()
    lease.release()
    assert pool.bytes_in_use == 2 * MIB
    with pytest.raises(ValueError, match="ended"):
        print(lease.tensor)
    part = [part]
    part.append(part)  # a cycle
    del part
    gc.collect()
    assert pool.bytes_in_use == 0


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: Pool(0), ValueError, "budget must be at least 1"),
        (lambda: Pool(1.5), TypeError, "budget must be bytes or a size"),  # type: ignore[arg-type]
        (lambda: Pool(True), TypeError, "budget must be bytes or a size"),
        (lambda: Pool(MIB).lease(0), ValueError, "nbytes must be at least 1"),
        (lambda: Pool(3 * MIB).lease(3 * MIB), MemoryError, "in whole pages 4 MiB, do not fit the pool's budget"),
        (lambda: Pool(1 << 60).lease(1 << 59), MemoryError, "."),  # the system cannot give it
    ],
)
def test_sizes_that_cannot_be_are_refused(call: Callable[[], object], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()


def test_the_largest_possible_lease() -> None:
    for budget in (4096, 5000, MIB + 1, 3 * MIB):
        pool = Pool(budget)
        pool.lease(pool.largest)
        with pytest.raises(MemoryError, match="do not fit"):
            pool.lease(pool.largest + 1)
    assert Pool(4095).largest == 0


# Waiting


def test_who_asks_first_is_served_first() -> None:
    pool = Pool(4 * MIB)
    lease, large, small = pool.lease(2 * MIB), waiting_for(pool, 4 * MIB), waiting_for(pool, 4096)
    small.join(0.05)
    assert small.is_alive(), "it would fit before"
    del lease
    for thread in (large, small):
        thread.join(60)
        assert not thread.is_alive()


def test_a_wait_ends_with_its_timeout_and_who_gave_up_is_in_nobodys_way() -> None:
    pool = Pool(4 * MIB)
    lease, waiting = pool.lease(2 * MIB), waiting_for(pool, 4 * MIB)
    for timeout in (0, 0.01):
        with pytest.raises(TimeoutError, match="2 MiB of 4 MiB are in use"):
            pool.lease(4096, timeout=timeout)  # behind the one that waits
    for _ in range(20):
        with pytest.raises(TimeoutError):
            pool.lease(MIB, timeout=0)
    assert len(pool._waiting) <= 2
    del lease
    waiting.join(60)
    lease = pool.lease(2 * MIB)
    with pytest.raises(TimeoutError):
        pool.lease(4 * MIB, timeout=0.01)
    with pool.lease(2 * MIB, timeout=0):
        pass
    del lease


@pytest.mark.usefixtures("no_collection")
def test_a_signal_handler_may_end_a_wait_or_release_what_it_waits_for() -> None:
    pool = Pool(2 * MIB)
    leases: list[Lease] = [pool.lease(2 * MIB)]
    with alarm(signal.default_int_handler), pytest.raises(KeyboardInterrupt):
        pool.lease(2 * MIB)
    with alarm(lambda *_: leases.clear()):
        assert pool.lease(2 * MIB, timeout=60).tensor.numel() == 2 * MIB


def test_ctrl_c_at_any_moment_of_a_lease_loses_nothing_and_holds_nobody_up() -> None:
    """Of one that is served, and of one whose time is up while another thread waits behind it."""
    for wanted in (MIB, 3 * MIB):
        with Interrupt() as moments, contextlib.suppress(TimeoutError):
            pool = Pool(4 * MIB)
            held = pool.lease(2 * MIB)
            pool.lease(wanted, timeout=0.01)
        del held
        for number in range(1, moments.count + 1):
            pool = Pool(4 * MIB)
            held = pool.lease(2 * MIB)
            behind = threading.Thread(target=pool.lease, args=[2 * MIB], daemon=True)
            threading.Timer(0.005, behind.start).start()
            with contextlib.suppress(KeyboardInterrupt, TimeoutError), Interrupt(number):
                pool.lease(wanted, timeout=0.01)
            while behind.ident is None:
                time.sleep(0.001)
            behind.join(20)
            assert not behind.is_alive(), number
            assert pool.bytes_in_use == 2 * MIB, number
            del held
            pool.lease(4 * MIB, timeout=20)


def test_threads_never_have_more_than_the_budget() -> None:
    pool = Pool(8 * MIB)

    def work(number: int) -> None:
        for step in range(30):
            with pool.lease((number * 31 + step * 17) % 6 * MIB + 1) as memory:
                memory[-1] = 1
                assert pool.bytes_in_use <= 8 * MIB
                del memory

    in_threads(work, 8)
    assert pool.peak <= 8 * MIB
    assert pool.bytes_in_use == 0


# Waits that would never end


def test_threads_that_wait_for_themselves_or_each_other_are_told() -> None:
    pool, both = Pool(4 * MIB), threading.Barrier(2)
    with pool.lease(4 * MIB), pytest.raises(DeadlockError, match="will never be free"):
        pool.lease(4096)
    assert pool.bytes_in_use == 0
    told, served = list[BaseException](), list[int]()

    def work(number: int) -> None:
        try:
            with pool.lease(2 * MIB):
                both.wait(60)
                with pool.lease(2 * MIB, timeout=60):
                    served.append(number)
        except DeadlockError as error:
            told.append(error)

    in_threads(work, 2)
    assert len(told) == len(served) == 1  # the memory of the one who was told is the other's
    assert "held by 2 threads" in str(told[0])


# Beside others


def test_a_forked_child_has_an_empty_pool_also_while_others_wait() -> None:
    pool = Pool(4 * MIB)
    leases = [pool.lease(4 * MIB)]
    waiting = waiting_for(pool, 2 * MIB)

    def child() -> None:
        assert pool.bytes_in_use == 0
        with pool.lease(4 * MIB, timeout=1):
            pass
        leases.clear()  # the parent's
        assert pool.bytes_in_use == 0

    in_child(child)
    assert pool.bytes_in_use == 4 * MIB
    leases.clear()
    waiting.join(60)
    assert not waiting.is_alive()
    assert pool.bytes_in_use == 0


def test_what_is_kept_for_reuse_does_not_come_on_top() -> None:
    native().trim_pool()
    pool = Pool(64 * MIB)
    with pool.lease(64 * MIB):
        pass
    leases = [pool.lease(2 * MIB) for _ in range(32)]  # of a size that the kept memory does not fit
    assert native().pool_statistics()["cached_bytes"] + pool.bytes_in_use <= 64 * MIB + 2 * MIB
    del leases


# Holes and HostTier


SIZE = 64


@pytest.mark.parametrize("seed", range(6))
def test_nothing_is_handed_out_twice_and_the_smallest_hole_is_found(seed: int) -> None:
    """Nor is anything lost, without Ctrl-C: seed 0."""
    chance, free, used = random.Random(seed), Holes(), dict[int, int]()
    free.add(0, SIZE)
    for _ in range(100):
        with contextlib.suppress(KeyboardInterrupt), moments.Interrupt(chance.randint(1, 25) if seed else -1):
            if used and chance.random() < 0.5:
                start = chance.choice(list(used))
                free.merge(start, used.pop(start))
            elif (hole := free.find(wanted := chance.randint(1, 9))) is not None:
                free.take(*hole, wanted)
                used[hole[0]] = wanted
        everything = sorted([*used.items(), *free])
        assert all(one[0] + one[1] <= other[0] for one, other in pairwise(everything))
        sizes = sorted(size for _, size in free)
        assert free.largest == max(sizes, default=0)
        for wanted in (1, 5, free.largest + 1):
            hole = free.find(wanted)
            assert (hole and hole[1]) == next((size for size in sizes if size >= wanted), None)
            assert hole is None or hole in list(free)
            fitting = sorted(hole for hole in free if hole[1] >= wanted)
            ends = (free.find(wanted, "first"), free.find(wanted, "last"))
            assert ends == ((fitting[0], fitting[-1]) if fitting else (None, None))
        if seed == 0:
            assert sum(sizes) + sum(used.values()) == SIZE
            assert not any(one[0] + one[1] == other[0] for one, other in pairwise(sorted(free))), "they are joined"


@pytest.fixture
def pool() -> Iterator[Pool]:
    pool = Pool(8 * MIB)
    yield pool
    assert pool.bytes_in_use == 0, "the tier has kept memory"


def test_a_part_comes_back_with_the_last_tensor_over_it(pool: Pool) -> None:
    share = HostTier(4 * MIB, pool).share()
    assert share.peak == 0
    part: Any = share.allocate(3 * MIB)
    assert (part.nbytes, part.data_ptr() % 4096) == (3 * MIB, 0)
    view = part[4096:].view(torch.float32)
    del part
    assert share.allocate(2 * MIB) is None
    assert share.bytes_in_use == 3 * MIB
    del view
    assert share.bytes_in_use == 0
    part = share.allocate(4 * MIB)
    assert share.peak == 4 * MIB
    part.fill_(7)
    with pytest.raises(ValueError, match="at least 1"):
        share.allocate(0)
    del share  # its memory outlives it as long as a part does
    assert pool.bytes_in_use == 4 * MIB
    assert int(part.sum()) == 7 * 4 * MIB


@pytest.mark.parametrize("raises", [True, False])
def test_no_part_is_lost_whatever_a_signal_handler_does_at_any_moment(pool: Pool, raises: bool) -> None:
    share = HostTier(4 * MIB, pool).share()

    def use() -> None:
        parts = [share.allocate(nbytes) for nbytes in (MIB // 2, MIB, MIB)]
        del parts[1]
        parts.append(share.allocate(2 * MIB))

    with moments.Interrupt() as all_of_it:
        use()
    act = moments.ctrl_c if raises else lambda: share.allocate(MIB)
    for number in range(1, all_of_it.count + 1):
        with contextlib.suppress(KeyboardInterrupt), moments.Interrupt(number, act) as moment:
            use()
        assert (share.bytes_in_use, share.largest) == (0, share.nbytes), moment.where


def test_parts_never_overlap_and_none_is_lost(pool: Pool) -> None:
    share = HostTier(4 * MIB, pool).share()

    def work(number: int) -> None:
        chance, held = random.Random(number), list[tuple[int, torch.Tensor]]()
        for step in range(300):
            if held and chance.random() < 0.5:
                mark, part = held.pop(chance.randrange(len(held)))
                assert bool((part == mark).all())
                del part
            elif (made := share.allocate(chance.randrange(1, 300 * KIB))) is not None:
                mark = (4 * step + number) % 251
                held.append((mark, made.fill_(mark)))
                del made

    in_threads(work, 4)
    assert share.bytes_in_use == 0
    assert share.largest == 4 * MIB
