"""What handles share below their names: files that stay open, priorities, statistics."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import nvme_ops
from nvme_ops.engine import ClosedEngine, Engine, Op, engine_of
from nvme_ops.handle import aio_handle
from tests.conftest import KIB, MIB, HandleFactory, in_child, in_threads, pattern

# Open files


def test_a_handle_takes_a_file_object(handle: aio_handle, folder: Path) -> None:
    data = pattern(300 * KIB)
    with nvme_ops.open(folder / "file", "w+") as file:
        assert handle.submit_pwrite(data, file, 5000).result() == data.nbytes
        back, rows = torch.empty_like(data), torch.empty(4, 1000, dtype=torch.uint8)
        handle.read(back, file, file_offset=5000)
        assert torch.equal(back, data)
        handle.submit_preadv(rows, file, [5000 + 1000 * row for row in range(4)]).result()
        assert torch.equal(rows.view(-1), data[:4000])
        handle.write(data[:10], file)  # never cuts it
        assert (folder / "file").stat().st_size == 5000 + 300 * KIB
    with pytest.raises(ValueError, match="closed"):
        handle.read(back, file)


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


def test_a_file_closed_while_it_is_read_is_read_to_the_end(folder: Path) -> None:
    data = pattern(8 * MIB)
    (folder / "file").write_bytes(data.numpy().tobytes())
    handle, target = aio_handle(), torch.empty_like(data)
    with nvme_ops.open(folder / "file", "r") as file:
        future = handle.submit_pread(target, file, 0)
    assert future.result() == data.nbytes
    assert torch.equal(target, data)


def test_threads_and_a_forked_child_share_an_open_file(folder: Path) -> None:
    data, size = pattern(16 * MIB), 100_000
    with nvme_ops.open(folder / "file", "w+") as file:
        file.pwrite(data, 0)

        def read(number: int) -> None:
            for step in range(20):
                start = (number * 7919 + step * 104729) % (15 * MIB)
                target = torch.empty(size, dtype=torch.uint8)
                file.pread(target, start)
                assert torch.equal(target, data[start : start + size])

        def child() -> None:
            read(1)
            file.pwrite(data[:size].flip(0), 0)

        in_threads(read, 8)
        in_child(child)
        target = torch.empty(size, dtype=torch.uint8)
        file.pread(target, 0)
        assert torch.equal(target, data[:size].flip(0))


_CALLS = """
import os, sys, time, torch, nvme_ops
path = sys.argv[1]
file, handle = nvme_ops.open(path, "r"), nvme_ops.aio_handle()
large, rows = nvme_ops.empty(1 << 20, dtype=torch.uint8), torch.empty(64, 4096, dtype=torch.uint8)
for turn in range(4):
    places = [(8 + turn << 20) + 4096 * row for row in range(64)]
    time.sleep(0.2)  # the lane has gone to sleep
    os.write(2, b"BEGIN")
    file.pread(large, turn << 20)
    os.write(2, b"SECOND")
    handle.submit_preadv(rows, file, places).result()
    os.write(2, b"END")
"""


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_an_open_file_costs_few_system_calls(folder: Path) -> None:
    """Beside the futexes by which two threads hand a transfer over, and the waits that a slow device adds to a turn."""
    path, log = folder / "file", folder / "log"
    aio_handle().write(pattern(16 * MIB), path)
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    command = ["strace", "-f", "-o", str(log), sys.executable, "-c", _CALLS, str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode and "ptrace" in done.stderr:
        pytest.skip("strace may not trace here")
    assert done.returncode == 0, done.stderr
    calls = re.findall(r"^\d+ +(?:<\.\.\. )?(\w+)\((.*)", log.read_text(), re.MULTILINE)
    marks = [number for number, (name, rest) in enumerate(calls) if name == "write" and rest.startswith('2, "')]
    waits = {"futex", "sched_yield", "restart_syscall", "mmap", "munmap", "madvise", "mprotect", "brk"}
    turns = [marks[first : first + 3] for first in range(len(marks) - 9, len(marks), 3)]  # the first turn sets up
    lone = [[name for name, _ in calls[begin + 1 : second]] for begin, second, _ in turns]
    many = [[name for name, _ in calls[second + 1 : end] if name not in waits] for _, second, end in turns]
    assert min(map(len, lone)) <= 3, lone
    assert min(map(len, many)) <= 4, many


# Priorities


def test_every_priority_moves_the_same_bytes(make_handle: HandleFactory, folder: Path) -> None:
    handle, data = make_handle(64 * KIB, 8), pattern(16 * MIB)
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


def test_a_priority_that_there_is_not_is_refused(folder: Path) -> None:
    handle = aio_handle()
    for wrong in (-1, 4):
        with pytest.raises(ValueError, match="priority must lie between 0 and 3"):
            handle.submit_pwrite(pattern(10), folder / "file", priority=wrong)  # type: ignore[arg-type]
    high: Any = "high"
    for write in (lambda: handle.submit_pwrite(pattern(10), folder / "file", priority=high),
                  lambda: handle.submit_pwritev([pattern(10)], folder / "file", priority=high)):  # fmt: skip
        with pytest.raises(TypeError, match=r"one of nvme_ops\.Priority, such as Priority\.PREFETCH, not 'high'"):
            write()


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


# The interface


def test_every_engine_has_every_method_of_an_engine(folder: Path) -> None:
    engine, data = engine_of(aio_handle()), pattern(1000)
    methods = [name for name in vars(Engine) if not name.startswith("_")]
    assert len(methods) > 5
    for name in methods:
        assert callable(getattr(engine, name)), name
        with pytest.raises(ValueError, match="closed"):
            getattr(ClosedEngine(), name)()
    back: Any = torch.empty_like(data)
    assert engine.run(Op.WRITE, data, folder / "file", None, False) == 1000
    assert engine.run(Op.READ, back, folder / "file", 0, False) == 1000
    assert torch.equal(back, data)
