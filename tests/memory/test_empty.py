"""``nvme_ops.empty`` and torch's large tensors: memory from the pool, what it is like, and when it goes back."""

from __future__ import annotations

import copy
import gc
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import nvme_ops
from nvme_ops import aio_handle
from nvme_ops.base.native import native
from tests.conftest import MIB, contents, pattern, run_python, store

BYTE = torch.empty(0, dtype=torch.uint8)
SIZE = 8 * MIB

pytestmark = pytest.mark.filterwarnings("ignore:the system refused to lock:RuntimeWarning")


def live() -> int:
    return native().pool_statistics()["live_bytes"]


def test_shapes_dtypes_and_alignment() -> None:
    sizes: list[Any] = [(), (5,), (2, 3, 4), ([2, 3],), (torch.Size((1, 7)),), ((),), (3, 0, 2)]
    for dtype in (None, torch.bool, torch.float8_e4m3fn):
        for size in sizes:
            tensor, expected = nvme_ops.empty(*size, dtype=dtype), torch.empty(*size or [()], dtype=dtype)
            assert (tensor.shape, tensor.dtype) == (expected.shape, expected.dtype)
            assert int(tensor.fill_(1).bool().sum()) == expected.numel()
    for nbytes, boundary in ((1, 4096), (100_000, 4096), (5 * MIB + 1, 2 * MIB)):
        assert nvme_ops.empty(nbytes, dtype=torch.uint8).data_ptr() % boundary == 0
        assert aio_handle().new_cpu_locked_tensor(nbytes, BYTE).data_ptr() % boundary == 0


@pytest.mark.parametrize("elements", [1 << 42, 1 << 61, 1 << 100])
def test_more_than_there_is(elements: int) -> None:
    """Refused like torch.empty's, instead of promised and killed when touched."""
    if elements == 1 << 42 and Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "1":
        pytest.skip("this system promises memory that it does not have")
    before = live()
    for make in (nvme_ops.empty, lambda n: aio_handle().new_cpu_locked_tensor(n, torch.empty(0))):
        with pytest.raises((MemoryError, ValueError)):
            make(elements)
    assert live() == before


def test_memory_is_never_reused_under_a_view() -> None:
    handle, size = aio_handle(), 300_000
    for make in (lambda: nvme_ops.empty(size, dtype=torch.uint8), lambda: handle.new_cpu_locked_tensor(size, BYTE)):
        views = []
        for i in range(4):
            tensor = make().copy_(pattern(size, i))
            views.append((tensor[size // 3 : size // 2], tensor.numpy()[-7:], memoryview(tensor[:5].numpy().data)))
            handle.free_cpu_locked_tensor(tensor)
            del tensor
        for i, (view, array, window) in enumerate(views):
            assert torch.equal(view, pattern(size, i)[size // 3 : size // 2])
            assert array.tobytes() == pattern(size, i)[-7:].numpy().tobytes()
            assert window.tobytes() == pattern(size, i)[:5].numpy().tobytes()


# torch's allocator of CPU memory, while large tensors get theirs from the pool


@pytest.fixture
def pooled() -> Iterator[None]:
    gc.collect()  # what earlier tests left must not be freed while this one counts
    use = native().pool_large_tensors()
    assert use is not None
    yield
    del use


def made(size: int = SIZE) -> torch.Tensor:
    return torch.full((size,), 7, dtype=torch.uint8)


def test_what_was_made_before_and_after_is_freed_as_usual() -> None:
    """In a fresh process: elsewhere a graph that somebody still has may have activations on storage."""
    program = """
from nvme_ops.base.native import native
from tests.memory.test_empty import live, made

earlier, before = made(), live()
uses = [native().pool_large_tensors() for _ in range(2)]
uses.pop()
kept = made()
uses.pop()
later = made()
assert [native().in_pool(each) for each in (earlier, kept, later)] == [False, True, False]
del earlier, later
assert int(kept[-1]) == 7
del kept
assert live() == before
"""
    run_python(program)


def test_whatever_torch_does_with_memory(pooled: None) -> None:
    assert not native().in_pool(made(MIB // 2 - 1))
    before = live()
    tensor = made()
    copied = copy.deepcopy(tensor)
    tensor.resize_(2 * SIZE)
    assert int(tensor[SIZE - 1]) == 7
    tensor.untyped_storage().resize_(0)
    copied.share_memory_()
    lazy = torch._lazy_clone(other := made())
    lazy[0] = 1
    assert int(other[0]) == 7
    assert int(copied[3]) == 7
    del tensor, copied, lazy, other
    assert live() == before


def test_transfers_and_a_storage_that_is_freed_meanwhile(pooled: None, folder: Path) -> None:
    handle, before = aio_handle(), live()
    tensor = made()
    assert handle.submit_pwrite(tensor, folder / "file").result() == SIZE
    assert handle.statistics().staged_bytes == 0, "it goes as it is"
    write = handle.submit_pwrite(tensor, folder / "file")
    tensor.untyped_storage().resize_(0)
    assert write.result() == SIZE
    assert (folder / "file").read_bytes() == b"\7" * SIZE
    del write, tensor
    handle.close()
    assert live() == before


# Pages ahead of a read


HUGE = 2 * MIB
THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")

has_huge_pages = pytest.mark.skipif(not THP.exists(), reason="the kernel has no transparent huge pages")


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


@has_huge_pages
def test_a_read_into_fresh_memory_asks_for_huge_pages(handle: aio_handle, folder: Path) -> None:
    path, (_, tensor, first) = store(folder / "file", pattern(8 * MIB)), fresh(14 * MIB)
    start = first - tensor.data_ptr()
    back = tensor[start : start + 8 * MIB]
    handle.submit_preadv(list(back.split(4 * MIB)), path, [0, 4 * MIB]).result()
    assert torch.equal(back, pattern(8 * MIB))
    assert wants_huge_pages(first)
    assert wants_huge_pages(first + 4 * MIB)
    assert not wants_huge_pages(first + 8 * MIB), "beyond what is read"


@has_huge_pages
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


@has_huge_pages
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


@has_huge_pages
def test_memory_of_a_page_locked_tensor_is_all_there() -> None:
    size = 33 * HUGE
    tensor = aio_handle().new_cpu_locked_tensor(size, torch.empty(0, dtype=torch.uint8))
    assert resident(tensor.data_ptr(), size) == size
    assert wants_huge_pages(tensor.data_ptr())


# Native checksums


def test_published_check_values() -> None:
    assert native().checksums("crc32c", [b"123456789", b""]) == [0xE3069283, 0]
    assert native().checksums("crc32", [b"123456789", b""]) == [0xCBF43926, 0]
    tensor = torch.arange(10_000, dtype=torch.float32).view(100, 100)
    expected = native().checksums("crc32c", [tensor.numpy().tobytes(), tensor.t().numpy().tobytes()])
    assert native().checksums("crc32c", [tensor, tensor.t()]) == expected
