"""``submit_preadv`` and ``submit_pwritev``: many requests in one call; those that follow each other are one run."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import nvme_ops
from nvme_ops import aio_handle
from nvme_ops.base.native import native
from tests.conftest import MIB, contents, pattern, store

SIZES = st.lists(st.one_of(st.integers(0, 9000), st.sampled_from([0, 512, 4096, 70_000, MIB])), min_size=1, max_size=30)


def places(sizes: list[int], start: int) -> list[int]:
    return list(itertools.accumulate(sizes, initial=start))[:-1]


def same(some: Any, others: Any) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes=SIZES, start=st.sampled_from([0, 1, 512, 4096, 5000]), gap=st.integers(-1, 30), seed=st.integers(0, 99))
def test_parts_of_any_size(backend: str, folder: Path, sizes: list[int], start: int, gap: int, seed: int) -> None:
    """Some in ordinary memory and some in huge pages, with a gap in the file somewhere."""
    handle, path = aio_handle(backend=backend, block_size=65536, intra_op_parallelism=1 + seed % 3), folder / "file"
    expected = pattern(start + sum(sizes) + 10_000, seed)
    store(path, expected)
    offsets = [offset + (100 if index > gap >= 0 else 0) for index, offset in enumerate(places(sizes, start))]
    tensors = [pattern(size, seed + index) for index, size in enumerate(sizes)]
    for index in range(seed % 2, len(tensors), 2):
        tensors[index] = nvme_ops.empty(sizes[index], dtype=torch.uint8).copy_(tensors[index])
    assert handle.submit_pwritev(tensors, path, offsets).result() == sum(sizes)
    for tensor, offset in zip(tensors, offsets, strict=True):
        expected[offset : offset + len(tensor)] = tensor
    assert torch.equal(contents(path), expected)
    backs = [tensor.clone().zero_() if index % 3 else nvme_ops.empty(len(tensor), dtype=torch.uint8)
             for index, tensor in enumerate(tensors)]  # fmt: skip
    assert handle.submit_preadv(tensors=backs, files=path, file_offsets=offsets).result() == sum(sizes)
    assert same(backs, tensors)


def test_files_named_several_times(handle: aio_handle, folder: Path) -> None:
    path, other = store(folder / "file", pattern(100_000)), store(folder / "größe \udcff", pattern(100_000, 1))
    fd = os.open(path, os.O_RDONLY)
    backs, offsets = torch.zeros(6, 1000, dtype=torch.uint8), [0, 10, 50_000, 99_000, 3, 4]
    files: list[Any] = [path, other, path, str(path), os.fsencode(other), fd]
    assert handle.submit_preadv(backs, files, torch.tensor(offsets)).result() == 6000
    os.close(fd)
    assert same(backs, [pattern(100_000, int(i in (1, 4)))[at : at + 1000] for i, at in enumerate(offsets)])
    for nothing, at in (([], []), (torch.zeros(0, 10), []), (torch.zeros(3, 0), [0, 1, 100])):
        assert handle.submit_preadv(nothing, path, at).result() == 0
    assert handle.submit_pwritev([], []).result() == 0


def test_arguments_that_do_not_fit(folder: Path) -> None:
    handle, path, two = aio_handle(), store(folder / "file", pattern(100)), [torch.zeros(1), torch.zeros(1)]
    refused: list[tuple[type[Exception], str, tuple[Any, ...]]] = [
        (ValueError, "file_offsets has 1 entries for 2 tensors", (two, path, [0])),
        (ValueError, "file_offsets has 3 entries for 2 tensors", (two, path, torch.zeros(3, dtype=torch.int64))),
        (ValueError, "files has 1 entries for 2 tensors", (two, [path])),
        (ValueError, "file_offsets is needed", (two, path)),
        (ValueError, "at least one dimension", (torch.tensor(1.0), path, [0])),
        (ValueError, "contiguous", (torch.zeros(4, 4).t(), path, [0] * 4)),
        (ValueError, "file_offset must not be negative: -1", (two, path, [0, -1])),
        (TypeError, "tensors must be", ([torch.zeros(1), None], path, [0, 0])),
        (TypeError, "integer", (two, path, torch.tensor([0.0, 4.0]))),
        *((TypeError, "", args) for args in ((None, path, [0]), (5, path, [0]), (two, 1.5, [0, 0]), (two, path, 5))),
        (TypeError, "", (two, path, [0, "1"])),
    ]
    for error, match, arguments in refused:
        with pytest.raises(error, match=match):
            handle.submit_preadv(*arguments)
    for later, arguments in (
        (EOFError, (two, path, [96, 100])),
        (FileNotFoundError, (two, [path, folder / "missing"])),
    ):
        with pytest.raises(later):
            handle.submit_preadv(*arguments).result()


def test_arguments_that_change_while_they_are_looked_at(handle: aio_handle, folder: Path) -> None:
    path, offsets = store(folder / "file", pattern(1000)), list[Any]()
    tensors = [torch.zeros(10, dtype=torch.uint8) for _ in range(50)]

    class Index:
        def __index__(self) -> int:
            offsets.clear()
            tensors.clear()
            return 0

    offsets += [Index() for _ in range(50)]
    kept = list(tensors)
    assert handle.submit_preadv(tensors, path, offsets).result() == 500
    assert all(torch.equal(tensor, pattern(1000)[:10]) for tensor in kept)


# Functions of the native module that take thousands of tensors at once


def test_tensors_that_share_memory_are_found() -> None:
    """Of interleaved columns it is said too, as safetensors does: their areas overlap."""
    overlapping = native().overlapping
    memory, square = torch.zeros(100), torch.zeros(4, 4)
    apart = [memory[:10], torch.zeros(10), memory[10:20], memory[90:]]
    for tensors in ([], apart, [square[:2], square[2:]], [square[0].expand(5, 4), square[1]], [memory, memory[2:2]]):
        assert overlapping(tensors) is None
    assert overlapping([*apart, memory[19:30]]) == (2, 4)
    assert overlapping([*apart, memory[89:91]]) == (4, 3)
    assert overlapping([memory, memory]) == overlapping([square[:, 0], square[:, 1]]) == (0, 1)
    for error, wrong in ((TypeError, [torch.zeros(1), 3]), (ValueError, [torch.eye(3).to_sparse()]), (TypeError, 3)):
        with pytest.raises(error):
            overlapping(wrong)


def test_tensors_are_moved_within_their_storage_and_not_out_of_it() -> None:
    move, memory = native().set_storage_offsets, torch.arange(12)
    tensors = [memory[:3].data, memory[:4].view(2, 2).data]
    move(tensors, [9, 5])
    assert tensors[0].tolist() == [9, 10, 11]
    assert tensors[1].tolist() == [[5, 6], [7, 8]]
    wrong: Any = ["1"]
    for offsets, error in (([-1], ValueError), ([10], ValueError), ([2**63 - 1], ValueError), ([], ValueError),
                           (wrong, TypeError), ([2**64], OverflowError)):  # fmt: skip
        with pytest.raises(error):
            move(tensors[:1], offsets)
    with pytest.raises(ValueError, match="does not fit"):
        move([torch.zeros(4, 4).t()], [0])
    assert tensors[0].tolist() == [9, 10, 11]
