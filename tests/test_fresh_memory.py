"""Memory without pages that a read will fill: it gets huge ones, and what has pages is left alone."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch
from conftest import MIB, contents, pattern, store

from nvme_ops import aio_handle
from nvme_ops._native import native

HUGE = 2 * MIB
THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")

pytestmark = pytest.mark.skipif(not THP.exists(), reason="the kernel has no transparent huge pages")


def wants_huge_pages(address: int) -> bool:
    """Whether the mapping at an address was advised so."""
    here = False
    for line in Path("/proc/self/smaps").read_text(encoding="ascii").splitlines():
        first, *rest = line.split()
        if "-" in first and not first.endswith(":"):
            start, end = (int(number, 16) for number in first.split("-"))
            here = start <= address < end
        elif here and first == "VmFlags:":
            return "hg" in rest
    raise AssertionError(f"nothing is mapped at {address:#x}")


def fresh(size: int) -> tuple[mmap.mmap, torch.Tensor, int]:
    """Memory that nobody has used, and the address of its first huge page."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    return memory, tensor, -(-tensor.data_ptr() // HUGE) * HUGE


def test_a_read_into_fresh_memory_asks_for_huge_pages(handle: aio_handle, folder: Path) -> None:
    path, (_, tensor, first) = store(folder / "file", pattern(9 * MIB)), fresh(12 * MIB)
    handle.sync_pread(tensor[: 9 * MIB], path)
    assert torch.equal(tensor[: 9 * MIB], pattern(9 * MIB))
    assert wants_huge_pages(first)
    assert not wants_huge_pages(tensor.data_ptr() + 11 * MIB), "beyond what is read"


def test_a_read_of_many_parts_does_so_too(handle: aio_handle, folder: Path) -> None:
    path, (_, tensor, first) = store(folder / "file", pattern(8 * MIB)), fresh(10 * MIB)
    start = first - tensor.data_ptr()
    parts = [tensor[start : start + 4 * MIB], tensor[start + 4 * MIB : start + 8 * MIB]]
    handle.submit_preadv(parts, path, [0, 4 * MIB]).result()
    assert torch.equal(tensor[start : start + 8 * MIB], pattern(8 * MIB))
    assert wants_huge_pages(first)
    assert wants_huge_pages(first + 4 * MIB)


def test_memory_in_use_is_left_alone(handle: aio_handle, folder: Path) -> None:
    path, (_, tensor, first) = store(folder / "file", pattern(8 * MIB)), fresh(12 * MIB)
    tensor.fill_(1)
    handle.sync_pread(tensor[: 8 * MIB], path)
    assert torch.equal(tensor[: 8 * MIB], pattern(8 * MIB))
    assert not wants_huge_pages(first)


def test_a_write_leaves_memory_alone(handle: aio_handle, folder: Path) -> None:
    _, tensor, first = fresh(8 * MIB)
    handle.sync_pwrite(tensor, folder / "file")
    assert not bool(contents(folder / "file").any())
    assert not wants_huge_pages(first)


@pytest.mark.parametrize("size", [0, 1, HUGE - 1, 2 * HUGE - 2])
def test_memory_without_a_whole_huge_page_is_left_alone(size: int) -> None:
    _, tensor, first = fresh(4 * HUGE)
    start = first - tensor.data_ptr() + 1
    native().expect_to_fill(tensor[start : start + size])
    assert not wants_huge_pages(first)
    assert not wants_huge_pages(first + HUGE)
