"""``nvme_ops.empty`` and torch's large tensors: memory from the pool, what it is like, and when it goes back."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import nvme_ops
from nvme_ops import aio_handle
from nvme_ops.base.native import native
from tests.conftest import MIB, pattern, run_python

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
    assert native().allocate_from_pool(True)
    yield
    native().allocate_from_pool(False)


def made(size: int = SIZE) -> torch.Tensor:
    return torch.full((size,), 7, dtype=torch.uint8)


def test_what_was_made_before_and_after_is_freed_as_usual() -> None:
    """In a fresh process: elsewhere a graph that somebody still has may have activations on storage."""
    program = """
from nvme_ops.base.native import native
from tests.memory.test_empty import live, made

earlier, before = made(), live()
assert native().allocate_from_pool(True)
assert native().allocate_from_pool(True)
native().allocate_from_pool(False)
kept = made()
native().allocate_from_pool(False)
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
