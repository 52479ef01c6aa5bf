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
from tests.conftest import KIB, MIB, in_child, in_threads, pattern

# Open files


def test_a_handle_takes_a_file_object(folder: Path, backend: str) -> None:
    data = pattern(300 * KIB)
    handle = aio_handle(backend=backend)
    with nvme_ops.open(folder / "file", "w+") as file:
        assert handle.submit_pwrite(data, file, 5000).result() == data.nbytes
        back = torch.empty_like(data)
        handle.read(back, file, file_offset=5000)
        assert torch.equal(back, data)
        rows = torch.empty(4, 1000, dtype=torch.uint8)
        handle.submit_preadv(rows, file, [5000 + 1000 * row for row in range(4)]).result()
        assert torch.equal(rows.view(-1), data[:4000])


def test_a_write_to_a_file_object_never_cuts_it(folder: Path) -> None:
    with nvme_ops.open(folder / "file", "w+") as file:
        file.pwrite(pattern(100_000), 0)
        aio_handle().write(pattern(10), file)
    assert (folder / "file").stat().st_size == 100_000


def test_a_file_that_was_cut_meanwhile_is_read_no_further(folder: Path) -> None:
    path = folder / "file"
    path.write_bytes(bytes(MIB))
    with nvme_ops.open(path, "r") as file:
        target = torch.full((MIB,), 7, dtype=torch.uint8)
        file.pread(target, 0)
        os.truncate(path, 1000)
        target.fill_(7)
        with pytest.raises(EOFError, match="1000"):
            file.pread(target, 0)
        assert target.eq(7).all()  # nothing was read


def test_a_file_that_has_grown_meanwhile_is_read_to_its_new_end(folder: Path) -> None:
    path = folder / "file"
    path.write_bytes(bytes(1000))
    with nvme_ops.open(path, "r") as file:
        file.pread(torch.empty(1000, dtype=torch.uint8), 0)
        path.write_bytes(b"x" * MIB)
        target = torch.empty(MIB, dtype=torch.uint8)
        assert file.pread(target, 0) == MIB
        assert target.eq(ord("x")).all()


def test_a_file_that_was_replaced_stays_the_one_that_was_opened(folder: Path) -> None:
    path = folder / "file"
    path.write_bytes(b"a" * 1000)
    with nvme_ops.open(path, "r") as file:
        (folder / "other").write_bytes(b"b" * 1000)
        os.replace(folder / "other", path)
        for _ in range(2):
            target = torch.empty(1000, dtype=torch.uint8)
            file.pread(target, 0)
            assert target.eq(ord("a")).all()


def test_a_closed_file_is_refused(folder: Path) -> None:
    file = nvme_ops.open(folder / "file", "w+")
    file.pwrite(pattern(100), 0)
    file.close()
    with pytest.raises(ValueError, match="closed"):
        aio_handle().read(torch.empty(100, dtype=torch.uint8), file)


def test_closing_leaves_no_descriptor_open(folder: Path) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    handle = aio_handle()
    with nvme_ops.open(folder / "file", "w+", handle=handle) as file:
        file.pwrite(pattern(MIB), 0)  # opens the ring
    before = descriptors()
    with nvme_ops.open(folder / "file", "r+", handle=handle) as file:
        file.pwrite(pattern(MIB), 0)
        file.pread(torch.empty(MIB, dtype=torch.uint8), 0)
        assert descriptors() > before
    assert descriptors() == before


def test_a_file_closed_while_it_is_read_is_read_to_the_end(folder: Path) -> None:
    data = pattern(8 * MIB)
    (folder / "file").write_bytes(data.numpy().tobytes())
    handle, target = aio_handle(), torch.empty_like(data)
    with nvme_ops.open(folder / "file", "r") as file:
        future = handle.submit_pread(target, file, 0)
    assert future.result() == data.nbytes
    assert torch.equal(target, data)


def test_a_forked_child_opens_the_file_anew(folder: Path) -> None:
    data = pattern(MIB)
    with nvme_ops.open(folder / "file", "w+") as file:
        file.pwrite(data, 0)

        def child() -> None:
            target = torch.empty_like(data)
            assert file.pread(target, 0) == MIB
            assert torch.equal(target, data)
            file.pwrite(data.flip(0), 0)

        in_child(child)
        target = torch.empty_like(data)
        file.pread(target, 0)
        assert torch.equal(target, data.flip(0))


def test_threads_share_an_open_file(folder: Path) -> None:
    data = pattern(16 * MIB)
    with nvme_ops.open(folder / "file", "w+") as file:
        file.pwrite(data, 0)

        def read(number: int) -> None:
            for step in range(20):
                start = (number * 7919 + step * 104729) % (15 * MIB)
                target = torch.empty(100_000, dtype=torch.uint8)
                file.pread(target, start)
                assert torch.equal(target, data[start : start + 100_000])

        in_threads(read, 8)


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


def test_every_priority_moves_the_same_bytes(folder: Path, backend: str) -> None:
    handle = aio_handle(64 * KIB, 8, backend=backend)
    for priority in nvme_ops.Priority:
        data, back = pattern(3 * MIB + 17, seed=int(priority)), torch.empty(3 * MIB + 17, dtype=torch.uint8)
        handle.submit_pwrite(data, folder / priority.name, priority=priority).result()
        handle.submit_preadv([back], [folder / priority.name], priority=priority).result()
        assert torch.equal(back, data)


def test_a_priority_that_there_is_not_is_refused(folder: Path) -> None:
    for wrong in (-1, 4):
        with pytest.raises(ValueError, match="priority must lie between 0 and 3"):
            aio_handle().submit_pwrite(pattern(10), folder / "file", priority=wrong)  # type: ignore[arg-type]
    for function in (aio_handle().submit_pwrite, aio_handle().submit_pwritev):
        data: Any = pattern(10) if function.__name__ == "submit_pwrite" else [pattern(10)]
        with pytest.raises(TypeError, match=r"one of nvme_ops\.Priority, such as Priority\.PREFETCH, not 'high'"):
            function(data, folder / "file", priority="high")  # type: ignore[arg-type]


def test_priorities_meet_in_one_handle(folder: Path) -> None:
    handle = aio_handle()
    data = pattern(64 * MIB)
    handle.write(data[:MIB], folder / "small")
    write = handle.submit_pwrite(data, folder / "large", priority=nvme_ops.Priority.WRITEBACK)
    target = torch.empty(MIB, dtype=torch.uint8)
    for _ in range(10):
        handle.submit_pread(target, folder / "small").result()
        assert torch.equal(target, data[:MIB])
    assert write.result() == data.nbytes
    back = torch.empty_like(data)
    handle.read(back, folder / "large")
    assert torch.equal(back, data)


# Statistics


def test_statistics_count_what_a_handle_moves(folder: Path, backend: str) -> None:
    handle = aio_handle(64 * KIB, 16, backend=backend, cache="direct")
    assert handle.statistics().bytes == handle.statistics().requests == 0
    data = pattern(MIB)
    handle.write(data, folder / "file")
    handle.submit_pread(torch.empty_like(data), folder / "file").result()
    found = handle.statistics()
    assert found.written_bytes == found.read_bytes == MIB
    assert found.requests >= 2
    assert 1 <= found.mean_in_flight <= found.max_in_flight <= 16
    assert 0 <= found.staged_bytes <= found.bytes
    assert 0 <= found.cached_share <= 1
    assert found.kernel_seconds > 0


def test_statistics_tell_what_the_page_cache_served(folder: Path) -> None:
    path = folder / "file"
    path.write_bytes(bytes(MIB))
    handle = aio_handle(cache="buffered")
    handle.read(torch.empty(MIB, dtype=torch.uint8), path)
    found = handle.statistics()
    assert found.read_bytes == found.cached_bytes == MIB
    assert found.cached_share == 1


def test_statistics_begin_anew_in_a_forked_child(folder: Path) -> None:
    handle = aio_handle()
    handle.write(pattern(MIB), folder / "file")

    def child() -> None:
        assert handle.statistics().bytes == 0

    in_child(child)
    assert handle.statistics().written_bytes == MIB


# The interface


def test_a_closed_engine_has_every_method_of_an_engine() -> None:
    methods = [name for name in vars(Engine) if not name.startswith("_")]
    assert len(methods) > 5
    for name in methods:
        with pytest.raises(ValueError, match="closed"):
            getattr(ClosedEngine(), name)()


def test_the_native_engine_has_every_method_of_an_engine() -> None:
    engine = engine_of(aio_handle())
    for name in vars(Engine):
        if not name.startswith("_"):
            assert callable(getattr(engine, name)), name


def test_op_counts_as_the_native_module_does(folder: Path) -> None:
    engine, data = engine_of(aio_handle()), pattern(1000)
    assert engine.run(Op.WRITE, data, folder / "file", None, False) == 1000
    back = torch.empty_like(data)
    assert engine.run(Op.READ, back, folder / "file", 0, False) == 1000
    assert torch.equal(back, data)
