"""Handles dropped and interpreters ended with work pending: the data arrive all the same, nothing hangs or aborts."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path

import torch

from tests.conftest import MIB, HandleFactory, contents, pattern, run_python, store

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
