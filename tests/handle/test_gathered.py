"""Requests of one call that follow each other in a file: moved as one run, whatever their parts in memory are like."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import nvme_ops
from nvme_ops import aio_handle
from tests.conftest import MIB, HandleFactory, contents, pattern, store

SIZES = st.lists(st.one_of(st.integers(0, 9000), st.sampled_from([0, 512, 4096, 70_000, MIB])), min_size=1, max_size=60)


def ends(sizes: list[int], start: int) -> list[int]:
    return [start, *itertools.accumulate(sizes, initial=start)][1:-1]


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes=SIZES, start=st.sampled_from([0, 1, 512, 4096, 5000]), gap=st.integers(-1, 60), seed=st.integers(0, 99))
def test_parts_of_any_size(backend: str, folder: Path, sizes: list[int], start: int, gap: int, seed: int) -> None:
    handle, path = aio_handle(backend=backend, block_size=65536, intra_op_parallelism=1 + seed % 3), folder / "file"
    before = pattern(start + sum(sizes) + 10_000, seed)
    store(path, before)
    offsets = [offset + (100 if index > gap >= 0 else 0) for index, offset in enumerate(ends(sizes, start))]
    tensors = [pattern(size, seed + index) for index, size in enumerate(sizes)]
    assert handle.submit_pwritev(tensors, path, offsets).result() == sum(sizes)
    expected = before.clone()
    for tensor, offset in zip(tensors, offsets, strict=True):
        expected[offset : offset + len(tensor)] = tensor
    assert torch.equal(contents(path), expected)
    backs = [torch.zeros_like(tensor) for tensor in tensors]
    assert handle.submit_preadv(backs, path, offsets).result() == sum(sizes)
    assert all(torch.equal(back, tensor) for back, tensor in zip(backs, tensors, strict=True))


@pytest.mark.parametrize("cache", ["auto", "direct", "buffered"])
def test_thousands_of_small_parts(make_handle: HandleFactory, folder: Path, cache: str) -> None:
    handle, path = make_handle(cache=cache, intra_op_parallelism=2), folder / "file"
    tensors = [pattern(4100, index % 250) for index in range(3000)]
    offsets = ends([4100] * 3000, 72)
    handle.submit_pwritev(tensors, path, offsets).result()
    assert torch.equal(contents(path)[72:], torch.cat(tensors))
    for cold in (False, True):
        if cold:
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        backs = [torch.zeros_like(tensor) for tensor in tensors]
        handle.submit_preadv(backs, path, offsets).result()
        assert all(torch.equal(back, tensor) for back, tensor in zip(backs, tensors, strict=True))


def test_fast_and_ordinary_memory_side_by_side(handle: aio_handle, folder: Path) -> None:
    tensors = [nvme_ops.empty(MIB, dtype=torch.uint8), pattern(5), nvme_ops.empty(MIB, dtype=torch.uint8),
               nvme_ops.empty(3 * MIB + 1, dtype=torch.uint8), pattern(MIB)]  # fmt: skip
    for seed, tensor in enumerate(tensors):
        tensor.copy_(pattern(len(tensor), seed))
    offsets = ends([len(tensor) for tensor in tensors], 0)
    handle.submit_pwritev(tensors, folder / "file", offsets).result()
    assert torch.equal(contents(folder / "file"), torch.cat(tensors))
    backs = [tensor.clone() if index == 1 else nvme_ops.empty(len(tensor), dtype=torch.uint8)
             for index, tensor in enumerate(tensors)]  # fmt: skip
    handle.submit_preadv(backs, folder / "file", offsets).result()
    assert all(torch.equal(back, tensor) for back, tensor in zip(backs, tensors, strict=True))


def test_a_file_that_ends_within_the_parts(handle: aio_handle, folder: Path) -> None:
    path = store(folder / "file", pattern(10_000))
    backs = [torch.zeros(4000, dtype=torch.uint8) for _ in range(3)]
    with pytest.raises(EOFError, match="10000"):
        handle.submit_preadv(backs, path, [0, 4000, 8000]).result()


def test_parts_on_a_file_system_without_direct_io(handle: aio_handle) -> None:
    path = Path(f"/dev/shm/nvme_ops_test_{os.getpid()}")
    if not path.parent.is_dir():
        pytest.skip("no /dev/shm")
    try:
        tensors = [pattern(size, size) for size in (1, 5 * MIB, 4097, 0, 9)]
        offsets = ends([len(tensor) for tensor in tensors], 3)
        handle.submit_pwritev(tensors, path, offsets).result()
        assert torch.equal(contents(path)[3:], torch.cat(tensors))
        backs = [torch.zeros_like(tensor) for tensor in tensors]
        handle.submit_preadv(backs, path, offsets).result()
        assert all(torch.equal(back, tensor) for back, tensor in zip(backs, tensors, strict=True))
    finally:
        path.unlink(missing_ok=True)
