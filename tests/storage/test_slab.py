"""``Slab``: extents of one file, of which no two overlap and none gets lost."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from nvme_ops.storage.slab import Extent, Slab
from tests.conftest import KIB, MIB
from tests.crashing_save import small_files

PAGE = 4 * KIB


@pytest.fixture
def fd(folder: Path) -> Iterator[int]:
    number = os.open(folder / "slab", os.O_RDWR | os.O_CREAT)
    yield number
    os.close(number)


@pytest.fixture
def slab(fd: int) -> Slab:
    return Slab(fd, "the slab", step=MIB)


def blocks(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


def test_extents_are_whole_pages_with_blocks_and_it_grows_by_steps_or_by_what_is_missing(slab: Slab, fd: int) -> None:
    assert (slab.allocate(1), slab.allocate(PAGE + 1)) == (Extent(0, PAGE), Extent(PAGE, 2 * PAGE))
    assert (slab.bytes_in_use, slab.size) == (3 * PAGE, MIB)
    assert blocks(fd) >= MIB
    slab.allocate(MIB)
    assert slab.size == 2 * MIB
    assert slab.allocate(5 * MIB).start == MIB + 3 * PAGE  # begins with the hole at the end
    assert slab.size == os.fstat(fd).st_size == 6 * MIB + 3 * PAGE


def test_what_is_free_is_not_freed_again(slab: Slab) -> None:
    extent = slab.allocate(3 * PAGE)
    for wrong in (Extent(PAGE, PAGE), Extent(0, PAGE), Extent(0, 4 * PAGE), Extent(MIB, PAGE), Extent(-PAGE, PAGE)):
        with pytest.raises(ValueError, match="the slab is not in use"):
            slab.free(wrong)
    slab.free(extent)
    with pytest.raises(ValueError, match="not in use"):
        slab.free(extent)
    assert slab.bytes_in_use == 0
    assert slab.allocate(MIB) == Extent(0, MIB)


def test_reserve_refuses_what_cannot_be(fd: int) -> None:
    os.ftruncate(fd, MIB + 100)
    slab = Slab(fd, "the slab")
    single = ((MIB, PAGE), (MIB - PAGE, 2 * PAGE), (-PAGE, PAGE), (0, 0), (1, PAGE), (0, 1))
    for wrong in (
        [Extent(0, 2 * PAGE), Extent(PAGE, PAGE)],
        [Extent(0, PAGE)] * 2,
        *([Extent(*each)] for each in single),
    ):
        with pytest.raises(ValueError, match=r"pages|overlaps another one or lies beyond"):
            slab.reserve(wrong)
    assert slab.allocate(MIB) == Extent(0, MIB)  # the file is one hole, and gets blocks
    assert blocks(fd) >= MIB
    with pytest.raises(ValueError, match="in use"):
        slab.reserve([])


# A full disk


@pytest.fixture
def small(make_file_system: Callable[..., Path]) -> Iterator[int]:
    number = os.open(make_file_system(16 * MIB) / "slab", os.O_RDWR | os.O_CREAT)
    yield number
    os.close(number)


def test_a_full_disk_changes_nothing(small: int) -> None:
    slab = Slab(small, "the slab", step=64 * MIB)
    first = slab.allocate(3 * MIB)
    assert slab.size == 3 * MIB, "there is no room for a step"
    before, space = os.fstat(small), os.fstatvfs(small).f_bfree
    with pytest.raises(OSError, match=r"No space left on device: making room for .*MiB") as caught:
        slab.allocate(64 * MIB)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, "the slab")
    after = os.fstat(small)
    assert (after.st_size, slab.size, slab.bytes_in_use) == (before.st_size, before.st_size, 3 * MIB)
    assert os.fstatvfs(small).f_bfree >= space - 4  # ext4 may keep a block that named the others
    slab.free(first)
    assert slab.allocate(3 * MIB) == first


@pytest.mark.parametrize("place", ["a hole", "the end"])
def test_a_disk_that_others_filled_after_trim_changes_nothing(small: int, place: str) -> None:
    slab = Slab(small, "the slab", step=PAGE)
    first, second = slab.allocate(6 * MIB), slab.allocate(PAGE)
    slab.free(first)
    slab.trim()
    if place == "the end":
        slab.free(second)
        slab = Slab(small, "the slab", step=PAGE)  # of one hole with one block
    wanted = 6 * MIB if place == "a hole" else 7 * MIB
    with Path(os.readlink(f"/proc/self/fd/{small}")).with_name("other").open("wb") as other:
        os.posix_fallocate(other.fileno(), 0, os.fstatvfs(small).f_bavail * 4 * KIB - 2 * MIB)
        size, used = os.fstat(small).st_size, blocks(small)
        with pytest.raises(OSError, match="No space left"):
            slab.allocate(wanted)
        assert (os.fstat(small).st_size, slab.size) == (size, size)
        assert blocks(small) <= used + 4 * PAGE
        other.truncate(0)
        assert slab.allocate(wanted).start == 0


def test_the_limit_of_a_file_is_a_full_disk(fd: int) -> None:
    slab = Slab(fd, "the slab", step=4 * MIB)
    with small_files():
        slab.allocate(MIB)
        with pytest.raises(OSError, match="File too large"):
            slab.allocate(PAGE)
    assert slab.size == MIB


class Model(RuleBasedStateMachine):
    """The pages that are handed out, one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.fd = os.memfd_create("slab")
        self.slab = Slab(self.fd, "the slab", step=8 * PAGE)
        self.extents: list[Extent] = []

    def teardown(self) -> None:
        os.close(self.fd)

    @rule(nbytes=st.integers(1, 12 * PAGE))
    def allocate(self, nbytes: int) -> None:
        holes = self.holes()
        extent = self.slab.allocate(nbytes)
        assert extent.start % PAGE == 0
        assert extent.nbytes == -(-nbytes // PAGE) * PAGE
        fitting = [size for _, size in holes if size >= extent.nbytes]
        if fitting:
            assert (extent.start, min(fitting)) in holes
        self.extents.append(extent)

    @precondition(lambda self: self.extents)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self.slab.free(self.extents.pop(data.draw(st.integers(0, len(self.extents) - 1))))

    @rule(wrong=st.integers(-1, 0))
    def allocate_nothing(self, wrong: int) -> None:
        with pytest.raises(ValueError, match="at least 1"):
            self.slab.allocate(wrong)

    @rule()
    def trim(self) -> None:
        self.slab.trim()
        assert self.slab.size == max((extent.end for extent in self.extents), default=0)
        assert blocks(self.fd) <= self.slab.bytes_in_use

    @rule()
    def reopen(self) -> None:
        self.slab = Slab(self.fd, "the slab", step=8 * PAGE)
        self.slab.reserve(self.extents)

    def holes(self) -> list[tuple[int, int]]:
        found, end = [], 0
        for extent in [*sorted(self.extents), Extent(self.slab.size, 0)]:
            if extent.start > end:
                found.append((end, extent.start - end))
            end = extent.end
        return found

    @invariant()
    def nothing_overlaps_and_nothing_is_lost(self) -> None:
        ordered = sorted(self.extents)
        assert all(first.end <= second.start for first, second in itertools.pairwise(ordered))
        assert self.slab.bytes_in_use == sum(extent.nbytes for extent in ordered)
        assert self.slab.size == os.fstat(self.fd).st_size
        assert sorted(self.slab._holes) == self.holes()


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)
