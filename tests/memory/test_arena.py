"""``Arena`` and ``Holes``: parts of one memory, of which no two overlap, and which come back with their last tensor."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from nvme_ops.memory.arena import Arena
from nvme_ops.memory.holes import Holes
from nvme_ops.memory.pool import Pool
from tests.conftest import KIB, MIB, in_threads

PAGE = 4 * KIB


@pytest.fixture
def pool() -> Iterator[Pool]:
    pool = Pool(8 * MIB)
    yield pool
    assert pool.bytes_in_use == 0, "the arena has kept memory"


def test_a_part_comes_back_with_the_last_tensor_over_it(pool: Pool) -> None:
    arena = Arena(pool, 4 * MIB)
    part = arena.allocate(3 * MIB)
    assert part is not None
    assert part.nbytes == 3 * MIB
    assert part.data_ptr() % PAGE == 0
    view = part[PAGE:].view(torch.float32)
    del part
    assert arena.allocate(2 * MIB) is None
    assert arena.bytes_in_use == 3 * MIB
    del view
    assert arena.bytes_in_use == 0
    assert arena.allocate(4 * MIB) is not None
    assert arena.peak == 4 * MIB


def test_its_memory_outlives_it_as_long_as_a_part_does(pool: Pool) -> None:
    arena = Arena(pool, 4 * MIB)
    part = arena.allocate(MIB)
    assert part is not None
    part.fill_(7)
    del arena
    assert pool.bytes_in_use == 4 * MIB
    assert int(part.sum()) == 7 * MIB


def test_parts_never_overlap_and_none_is_lost(pool: Pool) -> None:
    arena, generator = Arena(pool, 4 * MIB), random.Random(1)
    held: list[tuple[int, torch.Tensor]] = []
    for number in range(3000):
        if held and generator.random() < 0.5:
            mark, part = held.pop(generator.randrange(len(held)))
            assert bool((part == mark).all())
            del part
        elif (made := arena.allocate(generator.randrange(1, 300 * KIB))) is not None:
            held.append((number % 251, made.fill_(number % 251)))
            del made
    used = [(part.data_ptr(), part.data_ptr() + part.nbytes) for _, part in held]
    assert all(end <= start for (_, end), (start, _) in zip(sorted(used), sorted(used)[1:], strict=False))
    held.clear()
    assert arena.bytes_in_use == 0
    assert arena.largest == 4 * MIB


def test_threads_share_it(pool: Pool) -> None:
    arena = Arena(pool, 4 * MIB)

    def work(number: int) -> None:
        for _ in range(500):
            if (part := arena.allocate(96 * KIB)) is not None:
                part.fill_(number)
                assert bool((part == number).all())
                del part

    in_threads(work, 4)
    assert arena.bytes_in_use == 0
    assert arena.largest == 4 * MIB


@pytest.mark.parametrize("nbytes", [0, -1])
def test_a_part_has_bytes(pool: Pool, nbytes: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Arena(pool, MIB).allocate(nbytes)


def test_the_smallest_hole_that_is_large_enough_is_found() -> None:
    holes = Holes()
    for start, size in ((0, 30), (100, 10), (200, 20)):
        holes.add(start, size)
    assert holes.find(10) == (100, 10)
    assert holes.find(11) == (200, 20)
    assert holes.find(31) is None
    holes.merge(30, 70)
    assert holes.find(31) == (0, 110)
    assert holes.ending_at(110) == 0
    assert holes.largest == 110
