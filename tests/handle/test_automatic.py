"""What the engine decides by itself: lanes for large reads that the page cache has, the cache for reads in a row."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import nvme_ops
from nvme_ops import aio_handle
from nvme_ops.measure.files import cached_share
from tests.conftest import MIB, HandleFactory, pattern, store

LARGE = 64 * MIB


@pytest.mark.parametrize(
    ("size", "cached", "lanes", "threads"),
    [(LARGE, True, None, 1), (LARGE, True, 1, 0), (LARGE - 1, True, None, 0), (LARGE, False, None, 0)],
)
def test_a_large_read_that_is_cached_has_a_second_lane(
    folder: Path, size: int, cached: bool, lanes: int | None, threads: int
) -> None:
    """The first lane of a blocking call is its caller's thread."""
    data, back = pattern(size), pattern(size, 1)  # memory that has its pages
    path = store(folder / "file", data)
    if cached_share(str(path), size) != 0:
        pytest.skip("what is in the page cache cannot be told, or not be changed, here")
    if cached:
        path.read_bytes()
    before = set(os.listdir("/proc/self/task"))
    with aio_handle(intra_op_parallelism=lanes) as handle:
        handle.sync_pread(back, path)
        assert len(set(os.listdir("/proc/self/task")) - before) == threads
        assert handle.statistics().cached_bytes == size * cached
        assert torch.equal(back, data)
        assert handle.submit_pread(back, path).result() == size


def test_many_tensors_are_divided_too(handle: aio_handle, folder: Path) -> None:
    data = pattern(LARGE + 5 * MIB)
    path, back = store(folder / "file", data), torch.zeros_like(data)
    parts = list(back.split(3 * MIB + 77))
    offsets = [(3 * MIB + 77) * i for i in range(len(parts))]
    for _ in range(2):  # cold, then cached
        assert handle.submit_preadv(parts, path, offsets).result() == data.numel()
        assert torch.equal(back, data)
        path.read_bytes()
        back.zero_()


@pytest.mark.parametrize("opened", [False, True])
def test_small_reads_in_a_row_go_through_the_page_cache(make_handle: HandleFactory, folder: Path, opened: bool) -> None:
    data = pattern(MIB)
    path = store(folder / "file", data)
    if cached_share(str(path), MIB) != 0:
        pytest.skip("what is in the page cache cannot be told, or not be changed, here")
    handle, back = make_handle(), torch.zeros(4096, dtype=torch.uint8)
    with nvme_ops.open(path, "rb") as file:
        for index in (9, 40, 41, 20, 60):  # nothing in a row
            handle.sync_pread(back, file if opened else path, index * 4096)
        assert handle.statistics().cached_bytes == 0
        for index in range(100, 110):
            handle.sync_pread(back, file if opened else path, index * 4096)
            assert torch.equal(back, data[index * 4096 :][:4096])
        assert handle.statistics().cached_bytes == 8 * 4096  # from the third on
