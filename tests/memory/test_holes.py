"""``Holes`` and ``HostTier``: what is free is handed out once, also when Ctrl-C comes in the middle, and comes back."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch

from nvme_ops.memory.holes import Holes
from nvme_ops.memory.pool import Pool
from nvme_ops.memory.tier import HostTier
from tests import moments
from tests.conftest import KIB, MIB, in_threads

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
