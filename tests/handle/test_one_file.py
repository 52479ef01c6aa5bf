"""A call moves one file, whatever becomes of its name meanwhile, and memory that stays where it is until the end."""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import nvme_ops
from nvme_ops import aio_handle
from tests.conftest import KIB, MIB, HandleFactory, in_child, pattern, store
from tests.crashing_save import save_under_strace

SIZE = 512 * KIB
LARGE = 3 * MIB


@pytest.fixture
def replaced(folder: Path) -> Iterator[Path]:
    """A file that another thread replaces all the time, by one full of 1, of 2, ..."""
    path, stop = folder / "file", threading.Event()
    for number in (1, 2):
        store(folder / f"old{number}", torch.full((SIZE,), number, dtype=torch.uint8))
    os.link(folder / "old1", path)

    def replace() -> None:
        turn = 0
        while not stop.is_set():
            turn += 1
            os.link(folder / f"old{turn % 2 + 1}", folder / "next")
            os.rename(folder / "next", path)

    thread = threading.Thread(target=replace)
    thread.start()
    yield path
    stop.set()
    thread.join()


def test_a_read_never_mixes_two_files(make_handle: HandleFactory, replaced: Path, folder: Path) -> None:
    """Nor does one of many parts, named in any order."""
    handle = make_handle(block_size=65536, intra_op_parallelism=4)
    back, rows = torch.zeros(SIZE, dtype=torch.uint8), torch.zeros(16, 4096, dtype=torch.uint8)
    other = store(folder / "other", torch.zeros(SIZE, dtype=torch.uint8))
    for _ in range(25):
        handle.sync_pread(back, replaced)
        assert back.min() == back.max()
        handle.submit_preadv(rows, [replaced, other] * 8, [i * 4096 for i in range(16)]).result()
        assert rows[::2].min() == rows[::2].max()
        assert not rows[1::2].any()


def test_a_write_goes_to_the_file_that_it_found(make_handle: HandleFactory, folder: Path) -> None:
    """Nothing is made under a name that was removed while the call was under way."""
    handle, data = make_handle(block_size=4096, queue_depth=1, intra_op_parallelism=4), pattern(SIZE)
    for round_ in range(6):
        path = folder / f"file{round_}"
        path.write_bytes(b"")
        with path.open("rb") as file:
            future = handle.submit_pwrite(data, path, 0)
            while os.fstat(file.fileno()).st_size == 0 and not future.done():
                pass
            path.unlink()
            assert future.result() == SIZE
            assert file.read() == data.numpy().tobytes()
        assert not path.exists()


def test_calls_by_descriptor_share_one_of_ours(make_handle: HandleFactory, folder: Path) -> None:
    data, path = pattern(1500 * 100).view(1500, 100), folder / "file"

    def cramped() -> None:
        handle = make_handle(cache="direct")
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
        for number, row in enumerate(data):
            handle.async_pwrite(row, descriptor, number * 100)
        os.close(descriptor)
        assert handle.wait() == 1500

    in_child(cramped)
    assert path.read_bytes() == data.numpy().tobytes()


# Memory


@pytest.fixture
def slow(make_handle: HandleFactory) -> nvme_ops.aio_handle:
    """A handle that is at it for a while."""
    return make_handle(block_size=4096, queue_depth=1, cache="direct")


def sevens(count: int) -> list[torch.Tensor]:
    """What gets the address of memory that was freed too early."""
    return [torch.full((LARGE,), 7, dtype=torch.uint8) for _ in range(count)]


def test_a_storage_freed_while_it_is_moved(slow: nvme_ops.aio_handle, folder: Path) -> None:
    """As FSDP frees the memory of parameters."""
    data = pattern(LARGE)
    path = store(folder / "file", data)
    for _ in range(2):
        read, written = torch.zeros_like(data), data.clone()
        future = slow.submit_pread(read, path)
        slow.async_pwrite(written, folder / "copy")
        for tensor in (read, written):
            tensor.untyped_storage().resize_(0)
        others = sevens(4)
        assert (future.result(), slow.wait()) == (LARGE, 1)
        assert all(bool((other == 7).all()) for other in others)
        assert read.untyped_storage().nbytes() == 0
        assert (folder / "copy").read_bytes() == data.numpy().tobytes()


def test_memory_that_becomes_shared_meanwhile(slow: nvme_ops.aio_handle, folder: Path) -> None:
    path = store(folder / "file", pattern(LARGE))
    for make in (torch.empty, nvme_ops.empty):
        tensor = make(LARGE, dtype=torch.uint8).fill_(1)
        futures = [slow.submit_pread(tensor[part : part + LARGE // 2], path, part) for part in (0, LARGE // 2)]
        tensor.share_memory_()
        others = [*sevens(2), *(nvme_ops.empty(LARGE, dtype=torch.uint8).fill_(7) for _ in range(2))]
        assert [future.result() for future in futures] == [LARGE // 2] * 2
        assert all(bool((other == 7).all()) for other in others)
        assert tensor.is_shared()


def test_a_storage_is_afterwards_what_it_was(slow: nvme_ops.aio_handle, folder: Path) -> None:
    path, data = store(folder / "file", pattern(LARGE)), pattern(LARGE)
    tensor, shared = torch.zeros_like(data), torch.zeros_like(data).share_memory_()
    lazy = torch._lazy_clone(tensor)
    futures = [slow.submit_pread(one, path) for one in (tensor, shared, tensor)]
    assert shared.is_shared()
    futures.append(slow.submit_pwrite(lazy, folder / "copy"))
    with pytest.raises(RuntimeError, match="not resizable"):  # copy on write: its bytes are not its own
        lazy.untyped_storage().resize_(0)
    for future in futures:
        future.result()
    assert not any((folder / "copy").read_bytes())
    assert torch.equal(torch._lazy_clone(tensor), data)
    assert torch.equal(tensor, data)
    assert not lazy.any()
    tensor.untyped_storage().resize_(2 * LARGE)
    tensor.untyped_storage().resize_(0)


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


# Files of nvme_ops.open


def test_a_handle_takes_a_file_object(folder: Path) -> None:
    handle, data = aio_handle(), pattern(300 * KIB)
    with nvme_ops.open(folder / "file", "w+") as file:
        assert handle.submit_pwrite(data, file, 5000).result() == data.nbytes
        back, rows = torch.empty_like(data), torch.empty(4, 1000, dtype=torch.uint8)
        handle.read(back, file, file_offset=5000)
        assert torch.equal(back, data)
        handle.submit_preadv(rows, file, [5000 + 1000 * row for row in range(4)]).result()
        assert torch.equal(rows.view(-1), data[:4000])
        handle.write(data[:10], file)  # never cuts it
        assert (folder / "file").stat().st_size == 5000 + 300 * KIB
        future = handle.submit_pread(back.zero_(), file, 5000)  # goes on to the end when the file is closed
    assert future.result() == data.nbytes
    assert torch.equal(back[10:], data[10:])
    with pytest.raises(ValueError, match="closed"):
        handle.read(back, file)
    with pytest.raises(ValueError, match="priority must lie between 0 and 3"):
        handle.submit_pwrite(data, folder / "file", priority=4)  # type: ignore[arg-type]


def test_a_file_that_is_cut_grows_or_is_replaced_meanwhile(folder: Path) -> None:
    path, target = folder / "file", torch.empty(MIB, dtype=torch.uint8)
    path.write_bytes(bytes(MIB))
    with nvme_ops.open(path, "r") as file:
        file.pread(target, 0)
        os.truncate(path, 1000)
        with pytest.raises(EOFError, match="1000"):
            file.pread(target.fill_(7), 0)
        assert target.eq(7).all()  # nothing was read
        path.write_bytes(b"x" * MIB)
        assert file.pread(target, 0) == MIB
        assert target.eq(ord("x")).all()
        (folder / "other").write_bytes(b"b" * MIB)
        os.replace(folder / "other", path)
        for _ in range(2):
            file.pread(target.fill_(7), 0)
            assert target.eq(ord("x")).all()


def test_an_open_file_costs_few_system_calls(folder: Path) -> None:
    """Beside the futexes by which two threads hand a transfer over, and the waits that a slow device adds to a turn."""
    path = store(folder / "file", pattern(16 * MIB))
    aio_handle().close()  # compiles the op, where that has not been done yet

    def read() -> None:
        file, handle = nvme_ops.open(path), aio_handle()
        large, rows = nvme_ops.empty(MIB, dtype=torch.uint8), torch.empty(64, 4 * KIB, dtype=torch.uint8)
        for turn in range(4):  # the first one sets up
            places = [(8 + turn) * MIB + 4 * KIB * row for row in range(64)]
            time.sleep(0.2)  # the lane has gone to sleep
            os.getpriority(os.PRIO_PROCESS, 0)  # a mark in the trace
            file.pread(large, turn * MIB)
            os.getpriority(os.PRIO_PROCESS, 0)
            handle.submit_preadv(rows, file, places).result()
            os.getpriority(os.PRIO_PROCESS, 0)

    outcome = save_under_strace(read, folder)
    assert (outcome.status, outcome.error) == (0, None)
    calls = [name for _, name in outcome.calls]
    marks = [number for number, name in enumerate(calls) if name == "getpriority"]
    waits = {"futex", "sched_yield", "restart_syscall", "mmap", "munmap", "madvise", "mprotect", "brk"}
    turns = [marks[first : first + 3] for first in range(3, 12, 3)]
    lone = [calls[begin + 1 : second] for begin, second, _ in turns]
    many = [[name for name in calls[second + 1 : end] if name not in waits] for _, second, end in turns]
    assert min(map(len, lone)) <= 3, lone
    assert min(map(len, many)) <= 4, many
