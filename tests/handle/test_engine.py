"""What handles share below their names: files that stay open, priorities, statistics."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest
import torch

import nvme_ops
from nvme_ops.handle import aio_handle
from tests.conftest import KIB, MIB, HandleFactory, in_child, in_threads, pattern, store

# Open files


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


def test_threads_and_a_forked_child_share_an_open_file(folder: Path) -> None:
    data, size = pattern(4 * MIB), 100_000
    with nvme_ops.open(folder / "file", "w+") as file:
        file.pwrite(data, 0)

        def read(number: int) -> None:
            for step in range(20):
                start = (number * 7919 + step * 104729) % (3 * MIB)
                target = torch.empty(size, dtype=torch.uint8)
                file.pread(target, start)
                assert torch.equal(target, data[start : start + size])

        def child() -> None:
            read(1)
            file.pwrite(data[:size].flip(0), 0)

        in_threads(read, 4)
        in_child(child)
        target = torch.empty(size, dtype=torch.uint8)
        file.pread(target, 0)
        assert torch.equal(target, data[:size].flip(0))


def _traced_turns(path: Path, log: Path) -> None:
    """Has strace write down what this process does while it reads one large piece, and then many small ones."""
    ctypes.CDLL(None).prctl(0x59616D61, -1, 0, 0, 0)  # PR_SET_PTRACER: whoever wants to
    file, handle = nvme_ops.open(path, "r"), aio_handle()
    large, rows = nvme_ops.empty(1 << 20, dtype=torch.uint8), torch.empty(64, 4096, dtype=torch.uint8)
    with log.with_name("errors").open("w") as errors:
        strace = subprocess.Popen(["strace", "-f", "-o", log, "-p", str(os.getpid())], stderr=errors)
    while "TracerPid:\t0" in Path("/proc/self/status").read_text():
        if strace.poll() is not None:
            return
        time.sleep(0.01)
    for turn in range(4):  # the first one sets up
        places = [(8 + turn << 20) + 4096 * row for row in range(64)]
        time.sleep(0.2)  # the lane has gone to sleep
        os.write(2, b"BEGIN")
        file.pread(large, turn << 20)
        os.write(2, b"SECOND")
        handle.submit_preadv(rows, file, places).result()
        os.write(2, b"END")
    strace.terminate()
    strace.wait()


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_an_open_file_costs_few_system_calls(folder: Path) -> None:
    """Beside the futexes by which two threads hand a transfer over, and the waits that a slow device adds to a turn."""
    path, log = store(folder / "file", pattern(16 * MIB)), folder / "log"
    aio_handle().close()  # compiles the op, where that has not been done yet
    in_child(lambda: _traced_turns(path, log))
    if "ptrace" in (folder / "errors").read_text():
        pytest.skip("strace may not trace here")
    calls = re.findall(r"^\d+ +(?:<\.\.\. )?(\w+)\((.*)", log.read_text(), re.MULTILINE)
    marks = [number for number, (name, rest) in enumerate(calls) if name == "write" and rest.startswith('2, "')]
    waits = {"futex", "sched_yield", "restart_syscall", "mmap", "munmap", "madvise", "mprotect", "brk"}
    turns = [marks[first : first + 3] for first in range(3, 12, 3)]
    lone = [[name for name, _ in calls[begin + 1 : second]] for begin, second, _ in turns]
    many = [[name for name, _ in calls[second + 1 : end] if name not in waits] for _, second, end in turns]
    assert min(map(len, lone)) <= 3, lone
    assert min(map(len, many)) <= 4, many


# Priorities


def test_every_priority_moves_the_same_bytes(make_handle: HandleFactory, folder: Path) -> None:
    handle, data = make_handle(64 * KIB, 8), pattern(4 * MIB)
    handle.write(data, folder / "small")
    writes = [handle.submit_pwrite(data, folder / each.name, priority=each) for each in nvme_ops.Priority]
    back = torch.empty_like(data)
    for _ in range(3):  # passes what is less urgent
        handle.submit_pread(back.zero_(), folder / "small").result()
        assert torch.equal(back, data)
    for each, write in zip(nvme_ops.Priority, writes, strict=True):
        assert write.result() == data.nbytes
        handle.submit_preadv([back.zero_()], [folder / each.name], priority=each).result()
        assert torch.equal(back, data)


# Statistics


@pytest.mark.parametrize("cache", ["direct", "buffered"])
def test_statistics_count_what_a_handle_moves(make_handle: HandleFactory, folder: Path, cache: str) -> None:
    handle, data = make_handle(64 * KIB, 16, cache=cache), pattern(MIB)
    assert handle.statistics().bytes == handle.statistics().requests == 0
    handle.write(data, folder / "file")
    handle.submit_pread(torch.empty_like(data), folder / "file").result()
    found = handle.statistics()
    assert found.written_bytes == found.read_bytes == MIB
    assert found.cached_share == (cache == "buffered")
    assert 0 <= found.staged_bytes <= found.bytes
    if cache == "direct":
        assert found.requests >= 2
        assert 1 <= found.mean_in_flight <= found.max_in_flight <= 16
        assert found.kernel_seconds > 0

    def child() -> None:
        assert handle.statistics().bytes == 0

    in_child(child)
    assert handle.statistics().written_bytes == MIB
