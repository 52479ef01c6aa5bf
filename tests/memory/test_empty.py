"""``nvme_ops.empty`` and page-locked tensors: memory from the pool, and when it goes back."""

from __future__ import annotations

import gc
import math
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import nvme_ops
from nvme_ops import aio_handle
from nvme_ops._native import native
from nvme_ops.op_builder import AsyncIOBuilder
from tests.conftest import KIB, MIB, in_child, pattern

BYTE = torch.empty(0, dtype=torch.uint8)


@pytest.fixture(autouse=True)
def unlocked_is_fine() -> Iterator[None]:
    """Whether the system lets memory be locked is not the point here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the system refused to lock", category=RuntimeWarning)
        yield


def live_bytes() -> int:
    gc.collect()
    return native().pool_statistics()["live_bytes"]


SHAPES: list[tuple[Any, tuple[int, ...]]] = [
    ((), ()),
    ((5,), (5,)),
    ((2, 3, 4), (2, 3, 4)),
    (((2, 3),), (2, 3)),
    (([2, 3],), (2, 3)),
    ((torch.Size((1, 7)),), (1, 7)),
    (((),), ()),
    ((0,), (0,)),
    ((3, 0, 2), (3, 0, 2)),
]


@pytest.mark.parametrize(("size", "shape"), SHAPES, ids=str)
def test_shapes(size: tuple[Any, ...], shape: tuple[int, ...]) -> None:
    tensor = nvme_ops.empty(*size)
    assert tensor.shape == shape
    assert tensor.dtype == torch.get_default_dtype()
    assert tensor.is_contiguous()
    assert not tensor.requires_grad
    tensor.fill_(1)
    assert tensor.sum() == math.prod(shape)


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float64, torch.complex64, torch.float8_e4m3fn],
    ids=str,
)
def test_dtypes(dtype: torch.dtype) -> None:
    for tensor in (nvme_ops.empty(10, 3, dtype=dtype), aio_handle().new_cpu_locked_tensor(30, BYTE.view(dtype))):
        assert tensor.dtype == dtype
        assert tensor.numel() == 30
        assert tensor.nbytes == 30 * dtype.itemsize


def test_the_default_dtype() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        assert nvme_ops.empty(2).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("size", [1, 4096, 100_000, 2 * MIB, 5 * MIB + 1])
def test_alignment(size: int) -> None:
    boundary = 2 * MIB if size >= 2 * MIB else 4096
    assert nvme_ops.empty(size, dtype=torch.uint8).data_ptr() % boundary == 0
    assert aio_handle().new_cpu_locked_tensor(size, BYTE).data_ptr() % boundary == 0


def test_bad_sizes() -> None:
    for size in ((-1,), (3, -2), ((4, -4),)):
        with pytest.raises(ValueError, match="must not be negative"):
            nvme_ops.empty(*size)
    others: list[Any] = [(None,), (2.0,), ("ab",), ((2,), (3,)), (2, None)]
    for size in others:
        with pytest.raises(TypeError):
            nvme_ops.empty(*size)
    with pytest.raises(TypeError):
        nvme_ops.empty(3, dtype="float32")  # type: ignore[arg-type]


@pytest.mark.parametrize("elements", [1 << 48, 1 << 61, 1 << 63, 1 << 100])
def test_more_than_any_memory(elements: int) -> None:
    before = live_bytes()
    for make in (nvme_ops.empty, lambda n: aio_handle().new_cpu_locked_tensor(n, torch.empty(0))):
        with pytest.raises((MemoryError, ValueError)):
            make(elements)
    assert live_bytes() == before


def test_more_than_this_memory() -> None:
    """Refused like torch.empty's, instead of promised and killed when touched."""
    elements = 1 << 42
    try:
        torch.empty(elements, dtype=torch.uint8)
    except RuntimeError:
        with pytest.raises(MemoryError, match="Cannot allocate memory"):
            nvme_ops.empty(elements, dtype=torch.uint8)
    else:
        pytest.skip("this system promises memory that it does not have (vm.overcommit_memory=1)")


def test_locked_tensors() -> None:
    handle = aio_handle()
    for elements in (0, 1, 1000, MIB):
        tensor = handle.new_cpu_locked_tensor(elements, torch.empty(3, 3, dtype=torch.float64))
        assert (tensor.shape, tensor.dtype) == ((elements,), torch.float64)
        tensor.fill_(2)
        assert handle.free_cpu_locked_tensor(tensor) is True
        assert (tensor == 2).all()  # still there
        assert handle.free_cpu_locked_tensor(tensor) is False
    others: list[Any] = [None, "3", 2.5]
    for other in others:
        with pytest.raises(TypeError):
            handle.new_cpu_locked_tensor(other, BYTE)
    with pytest.raises(ValueError, match="num_elem must not be negative"):
        handle.new_cpu_locked_tensor(-1, BYTE)
    for example in (None, torch.uint8, 5):
        with pytest.raises(TypeError, match=r"example_tensor must be a torch\.Tensor"):
            handle.new_cpu_locked_tensor(5, example)  # type: ignore[arg-type]


def test_freeing_what_is_no_locked_tensor() -> None:
    handle = aio_handle()
    for tensor in (torch.zeros(10), nvme_ops.empty(10), torch.zeros(0), torch.empty(3, device="meta")):
        assert handle.free_cpu_locked_tensor(tensor) is False
    for other in (None, 5, [1]):
        with pytest.raises(TypeError):
            handle.free_cpu_locked_tensor(other)  # type: ignore[arg-type]


def test_is_pinned() -> None:
    handle = aio_handle()
    locked, pooled = handle.new_cpu_locked_tensor(100_000, torch.empty(0)), nvme_ops.empty(100, 100)
    for tensor in (locked, pooled):
        flat = tensor.view(-1)
        views = [tensor, flat[5:6], flat.narrow(0, 3, 999), flat[::7], flat[:100].view(10, 10).t(), flat[:0]]
        assert [handle.is_pinned(view) for view in views] == [True] * len(views)
        assert not handle.is_pinned(tensor.clone())
    for tensor in (torch.zeros(10), torch.zeros(0), torch.eye(3).to_sparse(), torch.empty(3, device="meta")):
        assert handle.is_pinned(tensor) is False
    for other in (None, 5, b"bytes"):
        with pytest.raises(TypeError):
            handle.is_pinned(other)  # type: ignore[arg-type]
    if torch.cuda.is_available():
        assert handle.is_pinned(torch.zeros(10).pin_memory())


@pytest.mark.parametrize("size", [KIB, 300_000, 4 * MIB])
def test_memory_is_never_reused_under_a_view(size: int) -> None:
    handle = aio_handle()
    makers = [lambda: nvme_ops.empty(size, dtype=torch.uint8), lambda: handle.new_cpu_locked_tensor(size, BYTE)]
    for make in makers:
        views = []
        for i in range(4):
            tensor = make()
            tensor.copy_(pattern(size, i))
            views.append((tensor[size // 3 : size // 2], tensor.numpy()[-7:], memoryview(tensor[:5].numpy().data)))
            handle.free_cpu_locked_tensor(tensor)
            del tensor
        for i, (view, array, window) in enumerate(views):
            assert torch.equal(view, pattern(size, i)[size // 3 : size // 2])
            assert array.tobytes() == pattern(size, i)[-7:].numpy().tobytes()
            assert window.tobytes() == pattern(size, i)[:5].numpy().tobytes()


def test_memory_is_not_reused_while_a_transfer_needs_it(folder: Path) -> None:
    handle = aio_handle(block_size=4096, queue_depth=1, cache="direct")
    for i in range(4):
        tensor = nvme_ops.empty(2 * MIB, dtype=torch.uint8)
        tensor.copy_(pattern(2 * MIB, i))
        handle.async_pwrite(tensor, folder / str(i))
        del tensor
        nvme_ops.empty(2 * MIB, dtype=torch.uint8).zero_()
    assert handle.wait() == 4
    for i in range(4):
        assert (folder / str(i)).read_bytes() == pattern(2 * MIB, i).numpy().tobytes()


def test_freed_memory_is_reused_and_bounded() -> None:
    def body() -> None:
        before = live_bytes()
        native().trim_pool()
        rest = native().pool_statistics()["cached_bytes"]  # of huge pages of which an earlier test has a part
        tensor = nvme_ops.empty(4 * MIB, dtype=torch.uint8)
        address = tensor.data_ptr()
        assert live_bytes() == before + 4 * MIB
        del tensor
        assert live_bytes() == before
        again = nvme_ops.empty(4 * MIB, dtype=torch.uint8)
        assert again.data_ptr() == address
        del again
        tensors = [nvme_ops.empty(64 * MIB, dtype=torch.uint8) for _ in range(8)]
        del tensors
        assert live_bytes() == before
        assert 4 * MIB <= native().pool_statistics()["cached_bytes"] - rest <= 256 * MIB
        native().trim_pool()
        assert native().pool_statistics()["cached_bytes"] == rest

    in_child(body)  # where no thread that an earlier test left frees memory meanwhile


def test_threads_share_the_pool() -> None:
    before, wrong = live_bytes(), []

    def churn(seed: int) -> None:
        for i in range(100):
            size = 1 + (seed * 7919 + i * 104729) % 300_000
            tensor = nvme_ops.empty(size, dtype=torch.uint8)
            tensor.fill_(seed)
            view = tensor[size // 2 :]
            del tensor
            if not bool((view == seed).all()):
                wrong.append((seed, i))

    threads = [threading.Thread(target=churn, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert live_bytes() == before


def test_tensors_outlive_their_handle() -> None:
    handle = aio_handle()
    tensor = handle.new_cpu_locked_tensor(1000, BYTE)
    del handle
    gc.collect()
    tensor.fill_(5)
    assert aio_handle().is_pinned(tensor)
    assert AsyncIOBuilder().load().aio_handle().free_cpu_locked_tensor(tensor)


def test_small_tensors_are_read_through_staging_memory(folder: Path) -> None:
    """Their pages are small: in place costs more than a copy. From 512 KiB on they are in huge pages."""
    data = pattern(MIB)
    (folder / "file").write_bytes(data.numpy().tobytes())
    handle = aio_handle(cache="direct")
    for tensor, staged in (
        (nvme_ops.empty(128 * KIB, dtype=torch.uint8), 128 * KIB),
        (nvme_ops.empty(512 * KIB, dtype=torch.uint8), 0),
        (nvme_ops.empty(MIB, dtype=torch.uint8), 0),
        (nvme_ops.empty(4 * MIB, dtype=torch.uint8)[MIB : 2 * MIB], 0),
    ):
        before = handle.statistics().staged_bytes
        handle.sync_pread(tensor, folder / "file")
        assert torch.equal(tensor, data[: tensor.numel()])
        assert handle.statistics().staged_bytes - before == staged
