"""Forks, handles that are dropped and interpreters that end with work pending: the data arrive, nothing hangs."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import stat
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import nvme_ops
from nvme_ops import aio_handle
from tests.conftest import MIB, HandleFactory, contents, in_child, pattern, round_trip, run_python, store


def test_fork_with_work_pending(make_handle: HandleFactory, folder: Path) -> None:
    handle = make_handle(block_size=4096, queue_depth=2, intra_op_parallelism=2, cache="direct")
    data, other = pattern(3 * MIB), pattern(100_000, 1)
    path, small = store(folder / "file", data), store(folder / "small", other)
    back, pooled = torch.zeros_like(data), nvme_ops.empty(100_000, dtype=torch.uint8).fill_(7)
    ended = handle.submit_pread(torch.zeros(4), path)
    assert ended.result() == 16
    handle.async_pwrite(data, folder / "copy")
    handle.async_pread(back, path)
    future = handle.submit_pread(torch.zeros_like(data), path)

    def child() -> None:
        assert ended.result() == 16
        assert not future.done()
        for call in (future.result, future.exception, lambda: future.result(1)):
            with pytest.raises(RuntimeError, match="only the parent can wait"):
                call()
        for _ in range(2):  # as good the second time
            for read in (handle.sync_pread, handle.read, lambda *a: handle.submit_pread(*a).result()):
                read(pooled.zero_(), small)
                assert torch.equal(pooled, other)
            handle.async_pread(pooled, small)
            assert handle.wait() == 1
        assert handle.wait() == 0
        in_child(lambda: round_trip(handle, folder / "grandchild"))
        round_trip(handle, folder / "child")

    in_child(child)
    process = multiprocessing.get_context("fork").Process(target=_read, args=(handle, path))
    process.start()
    process.join(60)
    assert process.exitcode == 0, "one that ends normally, through atexit"
    assert future.result() == len(data)
    assert handle.wait() == 2
    assert torch.equal(back, data)
    assert torch.equal(contents(folder / "copy"), data)
    assert (pooled == 7).all()


def _read(handle: aio_handle, path: Path) -> None:
    torch.set_num_threads(1)
    handle.submit_pread(torch.zeros(10), path)
    handle.read(torch.zeros(1000), path)


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
@pytest.mark.parametrize("asked_for", [True, False])
def test_a_child_writes_to_no_reserved_huge_page_of_its_parents(asked_for: bool) -> None:
    """The kernel kills it when there is none for the copy: unless asked for, they are left alone."""
    program = """
        import os, sys, torch
        import nvme_ops
        torch.set_num_threads(1)  # OpenMP's would not be in the child
        tensor = nvme_ops.empty(1 << 20).fill_(1)  # 4 MiB
        if sys.argv[1] == "True":
            del tensor  # back in the pool
            with open("/proc/meminfo") as file:
                assert "HugePages_Free:        0" in file.read(), "others use the reserved huge pages"
        child = os.fork()
        if child == 0:
            (nvme_ops.empty(1 << 20) if sys.argv[1] == "True" else tensor).fill_(2)
            os._exit(0)
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    run_python(program, asked_for, NVME_OPS_HUGETLB="1" if asked_for else "")


def test_a_daemons_own_descriptors_are_left_alone(make_handle: HandleFactory, folder: Path) -> None:
    """A daemon forks, closes all descriptors and opens its own, under the numbers of the parent's rings and files."""
    handle, path = make_handle(intra_op_parallelism=2), store(folder / "file", pattern(3 * MIB))
    round_trip(handle, folder / "other")
    futures = [handle.submit_pread(torch.zeros(3 * MIB, dtype=torch.uint8), path) for _ in range(8)]

    def daemon() -> None:
        for descriptor in map(int, os.listdir("/proc/self/fd")):  # in_child's pipe, out of the way
            with contextlib.suppress(OSError):
                if stat.S_ISFIFO(os.fstat(descriptor).st_mode) and descriptor > 2:
                    os.dup2(descriptor, 64 + descriptor)
        os.closerange(3, 64)
        own = [os.open(path, os.O_RDONLY) for _ in range(40)]
        inodes = [os.fstat(descriptor).st_ino for descriptor in own]
        round_trip(handle, folder / "of the daemon")
        del futures[:]
        gc.collect()
        assert [os.fstat(descriptor).st_ino for descriptor in own] == inodes

    in_child(daemon)
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


@pytest.mark.parametrize(
    ("backend", "kind"),
    [
        ("io_uring", "one lane"),
        ("libaio", "one lane"),
        ("threads", "one lane"),
        ("io_uring", "two lanes"),
        ("io_uring", "a cached read that is divided"),
    ],
    indirect=["backend"],
)
def test_a_signals_handler_that_forks(make_handle: HandleFactory, folder: Path, kind: str) -> None:
    """In the middle of a blocking call: the parent's ends well, the child's raises or does, its handle starts anew."""
    divided = kind == "a cached read that is divided"
    slow = {"block_size": 4096, "queue_depth": 1, "intra_op_parallelism": 1 + (kind == "two lanes"), "cache": "direct"}
    handle, data = make_handle(**({} if divided else slow)), pattern((64 if divided else 6) * MIB)
    path, back = store(folder / "file", data), torch.zeros_like(data)
    if divided:
        path.read_bytes()
        handle.sync_pread(back, path)
    told = SimpleNamespace(child=-1, error=None)
    missed = 2  # the status of a child that was forked before or after the call, not in it

    def fork(*_: object) -> None:
        told.child = os.fork()
        if told.child == 0:
            signal.alarm(30)
            torch.set_num_threads(1)

    before = signal.signal(signal.SIGALRM, fork)
    try:
        for attempt in range(1000):
            back.zero_()
            signal.setitimer(signal.ITIMER_REAL, 0.002 + 0.001 * (attempt % 8))
            try:
                handle.sync_pread(back, path)
            except RuntimeError as error:
                told.error = error
            if told.child == 0:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                status = 1
                try:
                    assert told.error is None or "only the parent" in str(told.error)
                    round_trip(handle, folder / "child")
                    status = 0 if divided or told.error is not None else missed
                finally:
                    os._exit(status)
            if told.child > 0:
                assert told.error is None
                assert torch.equal(back, data)
                status = os.waitstatus_to_exitcode(os.waitpid(told.child, 0)[1])
                told.child = -1
                if status != missed:
                    break
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert status == 0
    round_trip(handle, folder / "parent")


# The end

SLOW = 'nvme_ops.aio_handle(block_size=4096, queue_depth=1, cache="direct", backend=sys.argv[1])'


def test_dropped_with_work_pending(make_handle: HandleFactory, folder: Path) -> None:
    handle = make_handle(block_size=4096, queue_depth=1, cache="direct", intra_op_parallelism=2)
    tensors, data = [pattern(MIB + i, i) for i in range(2)], pattern(MIB)
    path, backs = store(folder / "file", data), [torch.zeros_like(data) for _ in range(2)]
    for i, tensor in enumerate(tensors):
        handle.async_pwrite(tensor.clone(), folder / str(i))  # only the handle keeps the copy
        handle.submit_pwrite(tensor.clone(), folder / f"future{i}")
    lent = data.clone()
    watcher, write = weakref.ref(lent), handle.submit_pwrite(lent, folder / "lent")
    del lent
    handle.async_pread(backs[0], path)
    future = handle.submit_pread(backs[1], path)
    thread = threading.Thread(target=[handle].pop)  # drops it there
    del handle
    thread.start()
    thread.join()
    del thread
    gc.collect()
    assert future.done()  # dropping the handle waited
    assert write.result() == len(data)
    assert torch.equal(contents(folder / "lent"), data)
    assert watcher() is None
    assert future.result() == len(data)
    assert all(torch.equal(back, data) for back in backs)
    for i, tensor in enumerate(tensors):
        assert torch.equal(contents(folder / str(i)), tensor)
        assert torch.equal(contents(folder / f"future{i}"), tensor)


def test_the_interpreter_ends_with_work_pending(backend: str, folder: Path) -> None:
    program = f"""
import sys, torch, nvme_ops
from pathlib import Path
from tests.conftest import pattern
handle = {SLOW}
folder = Path(sys.argv[2])
kept = []
for i in range(2):
    handle.async_pwrite(pattern(1 << 20, i), folder / str(i))
    kept.append(handle.submit_pwrite(pattern(1 << 20, i), folder / f"future{{i}}"))
handle.submit_pwrite(pattern(1000), folder / "callback").add_done_callback(lambda f: print("called", f.result()))
handle.pwrite(pattern(1000), folder / "validated", True, True)
sys.exit(3)
"""
    result = run_python(program, backend, folder, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (3, "called 1000\n", "")
    for i in range(2):
        assert torch.equal(contents(folder / str(i)), pattern(MIB, i))
        assert torch.equal(contents(folder / f"future{i}"), pattern(MIB, i))
    assert torch.equal(contents(folder / "validated"), pattern(1000))


def test_the_interpreter_ends_while_other_threads_are_at_it(folder: Path) -> None:
    """Daemon threads in blocking calls, and making and dropping handles."""
    path = store(folder / "file", pattern(MIB))
    program = """
import sys, threading, time, torch, nvme_ops
handle, path = nvme_ops.aio_handle(intra_op_parallelism=2), sys.argv[1]
rounds = [0] * 4
def use(index):
    tensor = torch.zeros(1 << 20, dtype=torch.uint8)
    while True:
        if index == 0:
            handle.read(tensor, path)
        elif index == 1:
            handle.submit_pread(tensor, path).result()
        elif index == 2:
            handle.pread(tensor, path, True, False)
        else:
            others = [nvme_ops.aio_handle() for _ in range(20)]
            for other in others:
                other.async_pread(tensor, path)
        rounds[index] += 1
for index in range(4):
    threading.Thread(target=use, args=(index,), daemon=True).start()
while not all(rounds):
    time.sleep(0.01)
"""
    result = run_python(program, path, check=False)
    assert (result.returncode, result.stderr) == (0, "")


def test_work_started_by_an_exit_handler(folder: Path) -> None:
    program = """
import atexit, sys
started = []
def late():
    import torch
    handle = started[0]
    handle.async_pwrite(torch.arange(100_000), sys.argv[1])
    handle.submit_pwrite(torch.arange(100_000), sys.argv[1] + "2").result()
atexit.register(late)  # before the op is loaded: runs after the op's own
import nvme_ops
started.append(nvme_ops.aio_handle())
started[0].async_pwrite(b"first", sys.argv[1] + "1")
started[0].async_pread(bytearray(10), sys.argv[1] + "3")  # a failure, which is told
"""
    assert "No such file" in run_python(program, folder / "file").stderr
    for name in ("file", "file2"):
        assert torch.equal(contents(folder / name).clone().view(torch.int64), torch.arange(100_000))
    assert (folder / "file1").read_bytes() == b"first"
