"""Forking with a handle at work: the parent's transfers end, the child starts afresh."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import nvme_ops
from nvme_ops import aio_handle
from tests.conftest import MIB, HandleFactory, contents, in_child, pattern, round_trip, run_python, store


def test_both_processes_go_on(make_handle: HandleFactory, folder: Path) -> None:
    for lanes in (1, 2):
        handle, data = make_handle(intra_op_parallelism=lanes), pattern(3 * MIB + 1)
        path = store(folder / "file", data)
        back = torch.zeros_like(data)
        handle.sync_pread(back, path)
        handle.submit_pread(back, path).result()

        def child(handle: aio_handle = handle, data: torch.Tensor = data, path: Path = path) -> None:
            assert handle.wait() == 0
            for _ in range(3):
                back = torch.zeros_like(data)
                assert handle.sync_pread(back, path) == 1
                assert torch.equal(back, data)
                back.zero_()
                assert handle.submit_pread(back, path).result() == len(data)
                assert torch.equal(back, data)
                handle.async_pwrite(data, folder / "child")
                assert handle.wait() == 1
                assert torch.equal(contents(folder / "child"), data)

        in_child(child)
        back.zero_()
        assert handle.sync_pread(back, path) == 1
        assert torch.equal(back, data)


def test_fork_with_work_pending(make_handle: HandleFactory, folder: Path) -> None:
    handle = make_handle(block_size=4096, queue_depth=2, intra_op_parallelism=2, cache="direct")
    data, other = pattern(16 * MIB), pattern(100_000, 1)
    path, small = store(folder / "file", data), store(folder / "small", other)
    back = torch.zeros_like(data)
    handle.async_pwrite(data, folder / "copy")
    handle.async_pread(back, path)
    future = handle.submit_pread(torch.zeros_like(data), path)

    def child() -> None:
        target = torch.zeros_like(other)
        for _ in range(2):  # as good the second time
            for call in (handle.sync_pread, handle.read, lambda *a: handle.submit_pread(*a).result()):
                target.zero_()
                call(target, small)
                assert torch.equal(target, other)
            handle.async_pread(target, small)
            assert handle.wait() == 1
        assert handle.wait() == 0

    in_child(child)
    assert future.result() == len(data)
    assert handle.wait() == 2
    assert torch.equal(back, data)
    assert torch.equal(contents(folder / "copy"), data)


def test_a_parents_future_in_the_child(make_handle: HandleFactory, folder: Path) -> None:
    handle = make_handle(block_size=512, queue_depth=1, cache="direct")
    path = folder / "file"
    with path.open("wb") as file:
        file.truncate(96 * MIB)
    ended = handle.submit_pread(torch.zeros(4), path)
    assert ended.result() == 16
    pending = handle.submit_pread(torch.empty(96 * MIB, dtype=torch.uint8), path)

    def child() -> None:
        assert ended.result() == 16
        assert not pending.done()
        for call in (pending.result, pending.exception, lambda: pending.result(1)):
            with pytest.raises(RuntimeError, match="only the parent can wait"):
                call()

    in_child(child)
    assert pending.result() == 96 * MIB


def test_a_child_that_exits_normally(make_handle: HandleFactory, folder: Path) -> None:
    """With work of the parent's pending, through atexit and the interpreter's end."""
    handle = make_handle(block_size=4096, queue_depth=1, cache="direct")
    data = pattern(4 * MIB)
    path = store(folder / "file", data)
    back = torch.zeros_like(data)
    handle.async_pread(back, path)
    process = multiprocessing.get_context("fork").Process(target=_read, args=(handle, path))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert handle.wait() == 1
    assert torch.equal(back, data)


def _read(handle: aio_handle, path: Path) -> None:
    torch.set_num_threads(1)
    handle.submit_pread(torch.zeros(10), path)
    handle.read(torch.zeros(1000), path)


def test_children_of_children(handle: aio_handle, folder: Path) -> None:
    path = store(folder / "file", pattern(MIB))

    def read() -> None:
        back = torch.zeros(MIB, dtype=torch.uint8)
        assert handle.submit_pread(back, path).result() == MIB
        assert torch.equal(back, pattern(MIB))

    def child() -> None:
        read()
        in_child(read)
        read()

    read()
    in_child(child)
    read()


def test_pooled_memory_is_the_childs_own(handle: aio_handle, folder: Path) -> None:
    path, tensor = store(folder / "file", pattern(MIB)), nvme_ops.empty(MIB, dtype=torch.uint8)
    tensor.fill_(7)

    def child() -> None:
        handle.sync_pread(tensor, path)
        assert torch.equal(tensor, pattern(MIB))

    in_child(child)
    assert (tensor == 7).all()


RESERVED = Path("/proc/sys/vm/nr_hugepages")


@pytest.fixture
def two_reserved_huge_pages() -> Iterator[None]:
    """All that there are."""
    if not os.access(RESERVED, os.W_OK):
        pytest.skip("huge pages can be reserved by root only")
    before = RESERVED.read_text()
    try:
        RESERVED.write_text("2")
        if RESERVED.read_text().strip() != "2":
            pytest.skip("the kernel does not reserve huge pages as it is told")
        yield
    finally:
        RESERVED.write_text(before)


@pytest.mark.alone
@pytest.mark.usefixtures("two_reserved_huge_pages")
def test_a_child_reuses_no_memory_for_which_it_would_need_more_reserved_huge_pages() -> None:
    """The kernel kills a process that writes to such a page of its parent's when there is none for the copy."""
    program = """
        import os, sys, torch
        import nvme_ops
        torch.set_num_threads(1)  # OpenMP's would not be in the child
        nvme_ops.empty(1 << 20).fill_(1)  # 4 MiB, back in the pool at once
        with open("/proc/meminfo") as file:
            assert "HugePages_Free:        0" in file.read(), "others use the reserved huge pages"
        child = os.fork()
        if child == 0:
            nvme_ops.empty(1 << 20).fill_(2)
            os._exit(0)
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    run_python(program, NVME_OPS_HUGETLB="1")


@pytest.mark.usefixtures("two_reserved_huge_pages")
def test_reserved_huge_pages_are_left_alone_unless_asked_for() -> None:
    """Who inherits a live tensor in one is killed by the first write to it when none is left for the copy."""
    program = """
        import os, sys, torch
        import nvme_ops
        torch.set_num_threads(1)  # OpenMP's would not be in the child
        tensor = nvme_ops.empty(1 << 20).fill_(1)
        child = os.fork()
        if child == 0:
            tensor.fill_(2)
            os._exit(0)
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    run_python(program)


class Rows(Dataset):
    def __init__(self, handle: aio_handle, path: Path, rows: int, width: int) -> None:
        self.handle, self.path, self.rows, self.width = handle, path, rows, width

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, row: int) -> tuple[int, int, torch.Tensor]:
        tensor = torch.zeros(self.width, dtype=torch.uint8)
        self.handle.sync_pread(tensor, self.path, row * self.width)
        return row, os.getpid(), tensor


@pytest.mark.parametrize("used_before", [False, True])
def test_data_loader(folder: Path, used_before: bool) -> None:
    """Its workers inherit the handle."""
    handle, rows, width = aio_handle(), 40, 10_007
    data = pattern(rows * width).view(rows, width)
    path = store(folder / "file", data)
    if used_before:
        handle.submit_pread(torch.zeros(4), path).result()
        handle.async_pread(torch.zeros(100_000, dtype=torch.uint8), path)
    loader = DataLoader(Rows(handle, path, rows, width), batch_size=4, num_workers=2, multiprocessing_context="fork")
    processes = set()
    for batch, process, tensors in loader:
        assert torch.equal(tensors, data[batch])
        processes |= set(process.tolist())
    assert len(processes) == 2
    assert os.getpid() not in processes
    assert handle.wait() == int(used_before)


def test_a_daemons_own_descriptors_are_left_alone(make_handle: HandleFactory, folder: Path) -> None:
    """A daemon forks, closes all descriptors and opens its own, under the numbers of the parent's rings and files."""
    handle, path = make_handle(intra_op_parallelism=2), store(folder / "file", pattern(3 * MIB))
    round_trip(handle, folder / "other")
    futures = [handle.submit_pread(torch.zeros(3 * MIB, dtype=torch.uint8), path) for _ in range(8)]

    def daemon() -> None:
        report = 64  # in_child's pipe, out of the way
        os.closerange(3, report)
        own = [os.open(path, os.O_RDONLY) for _ in range(40)]
        inodes = [os.fstat(descriptor).st_ino for descriptor in own]
        round_trip(handle, folder / "of the daemon")
        del futures[:]
        gc.collect()
        assert [os.fstat(descriptor).st_ino for descriptor in own] == inodes

    def moved(body: Callable[[], None]) -> None:
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            with contextlib.suppress(OSError):
                if stat.S_ISFIFO(os.fstat(descriptor).st_mode) and descriptor > 2:
                    os.dup2(descriptor, 64 + descriptor)
        body()

    in_child(lambda: moved(daemon))
    assert all(future.result() == 3 * MIB for future in futures)
    round_trip(handle, folder / "other")


def test_a_ring_whose_number_stands_for_another(folder: Path) -> None:
    """Closed behind our back, it is neither used nor closed again; another handle's ring may have its number."""
    program = """
        import contextlib, os, sys, torch
        from tests.conftest import pattern, round_trip
        from nvme_ops import aio_handle
        first = aio_handle()
        round_trip(first, sys.argv[1])
        os.closerange(3, 256)
        own = [os.open("/dev/null", os.O_RDONLY) for _ in range(3)]
        second = aio_handle()
        round_trip(second, sys.argv[1])
        own += [os.open("/dev/null", os.O_RDONLY) for _ in range(10)]
        kinds = [os.readlink(f"/proc/self/fd/{number}") for number in own]
        for handle in (first, second):
            for _ in range(2):  # each of its rings may fail once
                with contextlib.suppress(OSError):
                    round_trip(handle, sys.argv[1])
            round_trip(handle, sys.argv[1])
        del first, handle
        round_trip(second, sys.argv[1])
        assert [os.readlink(f"/proc/self/fd/{number}") for number in own] == kinds
    """
    run_python(program, folder / "file")


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_signals_handler_that_forks(make_handle: HandleFactory, folder: Path, lanes: int) -> None:
    """In the middle of a blocking call: the parent's ends well, the child's raises, and its handle starts anew."""
    handle = make_handle(block_size=4096, queue_depth=1, intra_op_parallelism=lanes, cache="direct")
    data = pattern(24 * MIB)
    path, back, children = store(folder / "file", data), torch.zeros_like(data), []

    def fork(*_: object) -> None:
        children.append(os.fork())
        if children[-1] == 0:
            signal.alarm(30)
            torch.set_num_threads(1)

    before = signal.signal(signal.SIGALRM, fork)
    caught = None
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        try:
            handle.sync_pread(back, path)
        except RuntimeError as error:
            caught = error
        if children and children[-1] == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            status = 1
            try:
                assert "only the parent" in str(caught)
                round_trip(handle, folder / "child")
                status = 0
            finally:
                os._exit(status)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert caught is None
    assert torch.equal(back, data)
    if not children:
        pytest.skip("the read had ended before the signal came")
    assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == 0
    round_trip(handle, folder / "parent")
