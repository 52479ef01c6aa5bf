"""``nvme_ops.empty`` and torch's large tensors: memory from the pool, what it is like, and when it goes back."""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import nvme_ops
from nvme_ops import aio_handle
from nvme_ops._native import native
from tests.conftest import KIB, MIB, in_child, pattern, run_python

BYTE = torch.empty(0, dtype=torch.uint8)
SIZE = 8 * MIB

pytestmark = pytest.mark.filterwarnings("ignore:the system refused to lock:RuntimeWarning")


def live() -> int:
    return native().pool_statistics()["live_bytes"]


def cached() -> int:
    return native().pool_statistics()["cached_bytes"]


SHAPES: list[tuple[Any, tuple[int, ...]]] = [
    ((), ()),
    ((5,), (5,)),
    ((2, 3, 4), (2, 3, 4)),
    (((2, 3),), (2, 3)),
    (([2, 3],), (2, 3)),
    ((torch.Size((1, 7)),), (1, 7)),
    (((),), ()),
    ((3, 0, 2), (3, 0, 2)),
]


@pytest.mark.parametrize("dtype", [None, torch.bool, torch.bfloat16, torch.complex64, torch.float8_e4m3fn], ids=str)
def test_shapes_and_dtypes(dtype: torch.dtype | None) -> None:
    for size, shape in SHAPES:
        tensor = nvme_ops.empty(*size, dtype=dtype)
        assert (tensor.shape, tensor.dtype) == (shape, dtype or torch.get_default_dtype())
        assert tensor.is_contiguous()
        assert not tensor.requires_grad
        assert int(tensor.fill_(1).bool().sum()) == math.prod(shape)


@pytest.mark.parametrize("size", [1, 4096, 100_000, 2 * MIB, 5 * MIB + 1])
def test_alignment(size: int) -> None:
    boundary = 2 * MIB if size >= 2 * MIB else 4096
    assert nvme_ops.empty(size, dtype=torch.uint8).data_ptr() % boundary == 0
    assert aio_handle().new_cpu_locked_tensor(size, BYTE).data_ptr() % boundary == 0


@pytest.mark.parametrize("elements", [1 << 42, 1 << 48, 1 << 61, 1 << 63, 1 << 100])
def test_more_than_there_is(elements: int) -> None:
    """Refused like torch.empty's, instead of promised and killed when touched."""
    if elements == 1 << 42 and Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "1":
        pytest.skip("this system promises memory that it does not have")
    before = live()
    for make in (nvme_ops.empty, lambda n: aio_handle().new_cpu_locked_tensor(n, torch.empty(0))):
        with pytest.raises((MemoryError, ValueError)):
            make(elements)
    assert live() == before


@pytest.mark.parametrize("size", [KIB, 300_000, 4 * MIB])
def test_memory_is_never_reused_under_a_view(size: int) -> None:
    handle = aio_handle()
    makers = [lambda: nvme_ops.empty(size, dtype=torch.uint8), lambda: handle.new_cpu_locked_tensor(size, BYTE)]
    for make in makers:
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


def test_freed_memory_is_reused_bounded_and_given_back() -> None:
    def body() -> None:
        before = live()
        native().trim_pool()
        rest = cached()  # of huge pages of which an earlier test has a part
        tensor = nvme_ops.empty(4 * MIB, dtype=torch.uint8)
        address = tensor.data_ptr()
        assert live() == before + 4 * MIB
        del tensor
        again = nvme_ops.empty(4 * MIB, dtype=torch.uint8)
        assert again.data_ptr() == address
        del again
        tensors = [nvme_ops.empty(64 * MIB, dtype=torch.uint8) for _ in range(8)]
        del tensors
        assert live() == before
        assert 4 * MIB <= cached() - rest <= 256 * MIB
        native().trim_pool(2 * MIB)
        assert cached() - rest <= 2 * MIB
        native().trim_pool()
        assert cached() == rest

    in_child(body)  # where no thread that an earlier test left frees memory meanwhile


def test_small_tensors_are_read_through_staging_memory(folder: Path) -> None:
    """Their pages are small: in place costs more than a copy. From 512 KiB on they are in huge pages."""
    data = pattern(MIB)
    (folder / "file").write_bytes(data.numpy().tobytes())
    handle = aio_handle(cache="direct")
    for tensor, staged in (
        (nvme_ops.empty(128 * KIB, dtype=torch.uint8), 128 * KIB),
        (nvme_ops.empty(512 * KIB, dtype=torch.uint8), 0),
        (nvme_ops.empty(4 * MIB, dtype=torch.uint8)[MIB : 2 * MIB], 0),
    ):
        before = handle.statistics().staged_bytes
        handle.sync_pread(tensor, folder / "file")
        assert torch.equal(tensor, data[: tensor.numel()])
        assert handle.statistics().staged_bytes - before == staged


# torch's allocator of CPU memory, while large tensors get theirs from the pool


@pytest.fixture
def pooled() -> Iterator[None]:
    gc.collect()  # what earlier tests left must not be freed while this one counts
    assert native().allocate_from_pool(True)
    yield
    native().allocate_from_pool(False)


def made(size: int = SIZE) -> torch.Tensor:
    return torch.full((size,), 7, dtype=torch.uint8)


def test_large_tensors_and_what_they_lose_to_rounding(pooled: None) -> None:
    for size in (MIB // 2, MIB // 2 + 1, MIB, MIB + 1, 2 * MIB, 5 * MIB, SIZE, SIZE + 1, 49 * MIB + 3):
        before = live()
        kept = made(size)
        assert native().in_pool(kept)
        assert size <= live() - before <= 1.25 * size
        del kept
        assert live() == before
    assert not native().in_pool(made(MIB // 2 - 1))


def test_what_was_made_before_and_after_is_freed_as_usual() -> None:
    """In a fresh process: elsewhere a graph that somebody still has may have activations on storage."""
    program = """
from nvme_ops._native import native
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
