"""``Slab``: extents of one file, of which no two overlap and none gets lost; and which folder's slab has what."""

from __future__ import annotations

import errno
import itertools
import math
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from nvme_ops import aio_handle
from nvme_ops.storage import Session, TensorStore, striped
from nvme_ops.storage.slab import Extent, Slab
from nvme_ops.storage.striped import Striping, measured
from tests.conftest import KIB, MIB, in_threads, pattern, watched
from tests.crashing_save import small_files
from tests.storage.conftest import got

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


def test_extents_are_whole_pages_and_a_slab_grows_by_what_is_missing(slab: Slab, fd: int) -> None:
    assert (slab.allocate(1), slab.allocate(PAGE + 1)) == (Extent(0, PAGE), Extent(PAGE, 2 * PAGE))
    assert (slab.bytes_in_use, slab.size) == (3 * PAGE, MIB)
    assert blocks(fd) >= MIB
    slab.allocate(MIB)
    assert slab.size == 2 * MIB
    assert slab.allocate(5 * MIB).start == MIB + 3 * PAGE  # begins with the hole at the end
    assert slab.size == os.fstat(fd).st_size == 6 * MIB + 3 * PAGE


def test_what_is_free_is_not_freed_again(slab: Slab) -> None:
    slab.free(extent := slab.allocate(3 * PAGE))
    kept = slab.allocate(3 * PAGE)
    slab.free(slab.allocate(PAGE))
    for wrong in (Extent(PAGE, PAGE), Extent(0, PAGE), Extent(0, 4 * PAGE), Extent(3 * PAGE, PAGE)):
        with pytest.raises(ValueError, match="the slab is not in use"):
            slab.free(wrong)
    assert (extent, slab.bytes_in_use) == (kept, 3 * PAGE)


def test_reserve_refuses_what_cannot_be(fd: int) -> None:
    os.ftruncate(fd, MIB + 100)
    slab = Slab(fd, "the slab")
    single = ((MIB, PAGE), (MIB - PAGE, 2 * PAGE), (-PAGE, PAGE), (0, 0), (1, PAGE), (0, 1))
    overlapping = [Extent(0, 2 * PAGE), Extent(PAGE, PAGE)]
    for wrong in (overlapping, *([Extent(*bounds)] for bounds in single)):
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
    slab.allocate(3 * MIB)
    assert slab.size == 3 * MIB, "there is no room for a step"
    space = os.fstatvfs(small).f_bfree
    with pytest.raises(OSError, match=r"No space left on device: making room for .*MiB") as caught:
        slab.allocate(64 * MIB)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, "the slab")
    assert (os.fstat(small).st_size, slab.size, slab.bytes_in_use) == (3 * MIB, 3 * MIB, 3 * MIB)
    assert os.fstatvfs(small).f_bfree >= space - 4  # ext4 may keep a block that named the others


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
        holes, end = [], 0
        for extent in [*sorted(self.extents), Extent(self.slab.size, 0)]:
            if extent.start > end:
                holes.append((end, extent.start - end))
            end = extent.end
        return holes

    @invariant()
    def nothing_overlaps_and_nothing_is_lost(self) -> None:
        ordered = sorted(self.extents)
        assert all(first.end <= second.start for first, second in itertools.pairwise(ordered))
        assert self.slab.bytes_in_use == sum(extent.nbytes for extent in ordered)
        assert self.slab.size == os.fstat(self.fd).st_size
        assert sorted(self.slab._holes) == self.holes()


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)


# Which parts of a tensor go to which folder: all of it, once, in proportion to the rates


weights_of = st.lists(st.floats(1e-3, 1e12), min_size=1, max_size=8)


@given(weights_of, st.integers(0, 1 << 40))
def test_the_parts_are_the_tensor_in_proportion_to_the_weights(weights: list[float], nbytes: int) -> None:
    parts = Striping(weights).parts(nbytes)
    assert [part.begin for part in parts] == [0, *(part.begin + part.nbytes for part in parts)][:-1]
    assert sum(part.nbytes for part in parts) == nbytes
    assert all(part.nbytes % PAGE == 0 for part in parts[:-1])
    folders = [part.folder for part in parts]
    assert folders == sorted(set(folders))
    assert set(folders) <= set(range(len(weights)))
    if nbytes >= 8 * MIB:
        sizes = {part.folder: part.nbytes for part in parts}
        for folder, weight in enumerate(weights):
            assert abs(sizes.get(folder, 0) - nbytes * weight / sum(weights)) <= PAGE + nbytes * 1e-9


@settings(max_examples=25)
@given(st.lists(st.floats(0.5, 20), min_size=2, max_size=5), st.lists(st.integers(1, 8 * MIB - 1), min_size=50))
def test_small_tensors_stay_whole_and_are_balanced(weights: list[float], sizes: list[int]) -> None:
    striping, given_to = Striping(weights), [0.0] * len(weights)
    for size in sizes:
        (part,) = striping.parts(size)
        assert (part.begin, part.nbytes) == (0, size)
        given_to[part.folder] += size
    busy = [amount / weight for amount, weight in zip(given_to, weights, strict=True)]
    assert max(busy) - min(busy) <= max(sizes) / min(weights) + 1


def test_weights_are_positive_numbers_one_for_each_folder(folder: Path) -> None:
    with Session([folder / "a", folder / "b"], name="job") as session:
        for weights in ([0.0, 1.0], [math.nan, 1.0], [1.0, math.inf], [1.0] * 3):
            with pytest.raises(ValueError, match=r"weights must be positive|weights for 2 folders"):
                TensorStore(session, weights=weights)
        TensorStore(session, weights=[1, 1])  # nothing has stayed of the other


def test_rates_are_measured_once_at_the_first_put(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def others_meanwhile(*_: Any) -> None:
        in_threads(lambda _: (len(store), store.bytes_in_use), 1)

    calls = watched(monkeypatch, striped, "measured", others_meanwhile)
    monkeypatch.setattr(striped, "_SECONDS", 0.01)
    with Session([folder / "a", folder / "b"], name="job") as session, TensorStore(session) as store:
        assert not calls
        in_threads(lambda number: store.put(str(number), pattern(9 * MIB, number)).result(), 3)
        assert len(calls) == 1
        for number in range(3):
            assert torch.equal(got(store, str(number)), pattern(9 * MIB, number))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_rates_without_room_to_measure_are_the_same_for_all(fd: int, slab: Slab, code: int) -> None:
    class Failing(Slab):
        def allocate(self, nbytes: int) -> Any:
            raise OSError(code, "is full")

    with nullcontext() if code == errno.ENOSPC else pytest.raises(OSError, match="is full"):
        assert measured([aio_handle()] * 2, [slab, Failing(fd, "failing")], [fd, fd]) == [1.0, 1.0]
    assert slab.bytes_in_use == 0
