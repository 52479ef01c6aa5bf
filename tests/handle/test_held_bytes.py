"""A storage may give its bytes away while they are moved: they stay where they are until the transfer has ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import nvme_ops
from tests.conftest import MIB, HandleFactory, pattern, store

SIZE = 8 * MIB


@pytest.fixture
def slow(make_handle: HandleFactory) -> nvme_ops.aio_handle:
    """A handle that is at it for a while."""
    return make_handle(block_size=4096, queue_depth=1, cache="direct")


def test_a_storage_freed_while_it_is_read(slow: nvme_ops.aio_handle, folder: Path) -> None:
    """As FSDP frees the memory of parameters. What gets the address next must not be written to."""
    path = store(folder / "file", pattern(SIZE))
    for _ in range(3):
        tensor = torch.zeros(SIZE, dtype=torch.uint8)
        future = slow.submit_pread(tensor, path)
        tensor.untyped_storage().resize_(0)
        others = [torch.full((SIZE,), 7, dtype=torch.uint8) for _ in range(4)]
        assert future.result() == SIZE
        assert all(bool((other == 7).all()) for other in others)
        assert tensor.untyped_storage().nbytes() == 0


def test_a_storage_freed_while_it_is_written(slow: nvme_ops.aio_handle, folder: Path) -> None:
    data = pattern(SIZE)
    for _ in range(3):
        tensor = data.clone()
        slow.async_pwrite(tensor, folder / "file")
        tensor.untyped_storage().resize_(0)
        others = [torch.full((SIZE,), 7, dtype=torch.uint8) for _ in range(4)]
        assert slow.wait() == 1
        assert (folder / "file").read_bytes() == data.numpy().tobytes()
        del others


@pytest.mark.parametrize("make", [torch.zeros_like, lambda like: nvme_ops.empty(len(like), dtype=like.dtype)])
def test_memory_that_becomes_shared_meanwhile(slow: nvme_ops.aio_handle, folder: Path, make) -> None:
    path = store(folder / "file", pattern(SIZE))
    tensor = make(pattern(SIZE)).fill_(1)
    futures = [slow.submit_pread(tensor[part : part + SIZE // 2], path, part) for part in (0, SIZE // 2)]
    tensor.share_memory_()
    others = [torch.full((SIZE,), 7, dtype=torch.uint8) for _ in range(2)]
    others += [nvme_ops.empty(SIZE, dtype=torch.uint8).fill_(7) for _ in range(2)]
    assert [future.result() for future in futures] == [SIZE // 2] * 2
    assert all(bool((other == 7).all()) for other in others)
    assert tensor.is_shared()


def test_a_storage_is_afterwards_what_it_was(slow: nvme_ops.aio_handle, folder: Path) -> None:
    path, data = store(folder / "file", pattern(SIZE)), pattern(SIZE)
    tensor = torch.zeros(SIZE, dtype=torch.uint8)
    shared = torch.zeros(SIZE, dtype=torch.uint8).share_memory_()
    lazy = torch._lazy_clone(tensor)
    futures = [slow.submit_pread(one, path) for one in (tensor, shared, tensor)]
    assert shared.is_shared()
    slow.sync_pwrite(lazy, folder / "copy")
    for future in futures:
        future.result()
    assert torch.equal(torch._lazy_clone(tensor), data)
    assert torch.equal(tensor, data)
    assert not lazy.any()
    tensor.untyped_storage().resize_(2 * SIZE)
    tensor.untyped_storage().resize_(0)


def test_what_cannot_be_held_cannot_be_resized_meanwhile(slow: nvme_ops.aio_handle, folder: Path) -> None:
    """A copy-on-write storage: its bytes are not its own."""
    source = pattern(SIZE)
    lazy = torch._lazy_clone(source)
    future = slow.submit_pwrite(lazy, folder / "file")
    with pytest.raises(RuntimeError, match="not resizable"):
        lazy.untyped_storage().resize_(0)
    assert future.result() == SIZE
    lazy.untyped_storage().resize_(0)
    assert (folder / "file").read_bytes() == source.numpy().tobytes()


def test_arguments_that_change_while_they_are_looked_at(slow: nvme_ops.aio_handle, folder: Path) -> None:
    path = store(folder / "file", pattern(1000))
    offsets: list[Any] = []
    tensors = [torch.zeros(10, dtype=torch.uint8) for _ in range(50)]

    class Index:
        def __index__(self) -> int:
            offsets.clear()
            tensors.clear()
            return 0

    offsets += [Index() for _ in range(50)]
    kept = list(tensors)
    assert slow.submit_preadv(tensors, path, offsets).result() == 500
    assert all(torch.equal(tensor, pattern(1000)[:10]) for tensor in kept)


def test_a_finaliser_that_asks_for_the_transfer_that_ends_it(slow: nvme_ops.aio_handle, folder: Path) -> None:
    asked = []

    class Memory(bytearray):
        def __del__(self) -> None:
            asked.append(future.done())

    memories: list[Any] = [Memory(100) for _ in range(40)]
    future = slow.submit_pwritev(memories, folder / "file", range(0, 4000, 100))
    del memories
    assert future.result() == 4000
    assert asked == [True] * 40
