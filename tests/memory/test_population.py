"""Memory without pages that a read will fill: it gets them ahead, and what has pages is left alone."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from nvme_ops import aio_handle
from nvme_ops.base.native import native
from tests.conftest import MIB, contents, pattern, store

HUGE = 2 * MIB
THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")

pytestmark = pytest.mark.skipif(not THP.exists(), reason="the kernel has no transparent huge pages")


def flags(address: int) -> list[str]:
    """How the mapping at an address was advised, in smaps' words: ``hg`` and ``nh`` for huge pages and none."""
    here = False
    for line in Path("/proc/self/smaps").read_text(encoding="ascii").splitlines():
        first, *rest = line.split()
        if "-" in first and not first.endswith(":"):
            start, end = (int(number, 16) for number in first.split("-"))
            here = start <= address < end
        elif here and first == "VmFlags:":
            return rest
    raise AssertionError(f"nothing is mapped at {address:#x}")


def wants_huge_pages(address: int) -> bool:
    return "hg" in flags(address)


def fresh(size: int) -> tuple[mmap.mmap, torch.Tensor, int]:
    """Memory that nobody has used, and the address of its first huge page."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    return memory, tensor, -(-tensor.data_ptr() // HUGE) * HUGE


def test_a_read_into_fresh_memory_asks_for_huge_pages(handle: aio_handle, folder: Path) -> None:
    path, (_, tensor, first) = store(folder / "file", pattern(8 * MIB)), fresh(14 * MIB)
    start = first - tensor.data_ptr()
    back = tensor[start : start + 8 * MIB]
    handle.submit_preadv(list(back.split(4 * MIB)), path, [0, 4 * MIB]).result()
    assert torch.equal(back, pattern(8 * MIB))
    assert wants_huge_pages(first)
    assert wants_huge_pages(first + 4 * MIB)
    assert not wants_huge_pages(first + 8 * MIB), "beyond what is read"


@pytest.mark.parametrize("size", [0, HUGE - 1, 2 * HUGE - 2])
def test_memory_in_use_written_from_or_without_a_huge_page_is_left_alone(folder: Path, size: int) -> None:
    handle, path, (_, tensor, first) = aio_handle(), folder / "file", fresh(8 * MIB)
    start = first - tensor.data_ptr() + 1
    native().populate(tensor[start : start + size], 0, size)
    handle.sync_pwrite(tensor, path)
    assert not bool(contents(path).any())
    tensor.fill_(1)
    handle.sync_pread(tensor, path)
    assert not bool(tensor.any())
    assert not wants_huge_pages(first)
    assert not wants_huge_pages(first + HUGE)


def resident(address: int, size: int) -> int:
    """Bytes of a range that have pages."""
    with open("/proc/self/pagemap", "rb") as file:
        file.seek(address // mmap.PAGESIZE * 8)
        entries = file.read(size // mmap.PAGESIZE * 8)
    return sum(entries[i + 7] >> 7 for i in range(0, len(entries), 8)) * mmap.PAGESIZE


def test_memory_filled_from_its_start_on_gets_pages_part_by_part() -> None:
    _, tensor, first = fresh(8 * HUGE)
    first += HUGE
    start = first - tensor.data_ptr() - mmap.PAGESIZE
    data, memory = tensor[start : start + 5 * HUGE], first - mmap.PAGESIZE  # four whole huge pages lie in it
    native().populate(data, 0, 1)
    assert resident(memory, 5 * HUGE) == 0, "none begins there"
    native().populate(data, mmap.PAGESIZE, mmap.PAGESIZE + HUGE + 1)
    assert resident(first, 2 * HUGE) == resident(memory, 6 * HUGE) == 2 * HUGE
    native().populate(data, HUGE, 5 * HUGE)
    assert resident(first, 4 * HUGE) == resident(memory, 6 * HUGE) == 4 * HUGE, "a part of one is left alone"


def test_memory_of_a_page_locked_tensor_is_all_there() -> None:
    size = 33 * HUGE
    tensor = aio_handle().new_cpu_locked_tensor(size, torch.empty(0, dtype=torch.uint8))
    assert resident(tensor.data_ptr(), size) == size
    assert wants_huge_pages(tensor.data_ptr())
