"""``save_async``: what the file holds is what the tensors held, in the order of the calls, and no error is lost."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import errno
import gc
import itertools
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import nvme_ops
from nvme_ops.checkpoint import api, background
from nvme_ops.memory.pieces import BorrowedTensors
from tests.conftest import in_child, run_python
from tests.crashing_save import (
    NEW,
    OLD,
    Gated,
    assert_untouched,
    await_event,
    beside,
    content,
    interrupted_by,
    number_in,
    numbered,
    small_files,
)
from tests.dcp.states import equal


@pytest.fixture
def path(folder: Path) -> Path:
    """A file that holds OLD, alone in its folder."""
    path = folder / "models" / "model.safetensors"
    path.parent.mkdir()
    nvme_ops.save(OLD, path)
    return path


@pytest.fixture
def gate() -> Iterator[Gated]:
    """Closed, and opened at the end of the test, whatever happens."""
    gate = Gated()
    yield gate
    gate.open()


# What the file holds


def varied() -> dict[str, torch.Tensor]:
    return {
        "plain": torch.arange(1_000_000, dtype=torch.float32),
        "transposed": torch.arange(600_000).view(600, 1000).t(),
        "bytes": torch.arange(100_001).to(torch.int8),
        "conjugate": torch.arange(50).to(torch.complex64).conj(),
        "none": torch.zeros(0),
        "value": torch.tensor(3.5),
    }


def change(tensors: dict[str, torch.Tensor]) -> None:
    for tensor in tensors.values():
        tensor.copy_(torch.full_like(tensor, 77))


@pytest.mark.parametrize(
    "options",
    [{}, {"memory": 4_000_000}, {"strategy": "copy_free"}],
    ids=["all", "some", "lent"],
)
def test_tensors_can_be_changed_once_they_are_safe(path: Path, options: Any) -> None:
    for make in (varied, varied, dict):  # the second time in the memory of the first
        tensors = make()
        future = nvme_ops.save_async(tensors, path, **options)
        if "strategy" in options:
            future.wait_until_safe()
        change(tensors)
        future.result()
        assert equal(nvme_ops.load(path, verify=True), make())
        assert beside(path) == []


def test_tensors_are_safe_before_the_file_is_complete(path: Path, gate: Gated) -> None:
    tensors = numbered(1)
    future = nvme_ops.save_async(tensors, path, strategy="copy_free", handle=gate)
    with pytest.raises(TimeoutError, match=str(path)):
        future.wait_until_safe(0.01)
    gate.tensors.set()
    future.wait_until_safe()
    copied = nvme_ops.save_async(numbered(3), path.with_name("copied.safetensors"), handle=gate)
    copied.wait_until_safe(0)
    unlimited = nvme_ops.save_async(tensors, path.with_name("none.safetensors"), memory=0, handle=gate)
    change(tensors)
    for pending in (future, copied, unlimited):
        for wait in (pending.result, pending.exception):
            with pytest.raises(concurrent.futures.TimeoutError):
                wait(0.01)
        assert not pending.cancel()
        assert not pending.done()
    assert content(path) == "old"
    gate.open()
    assert [pending.exception() for pending in (future, copied, unlimited)] == [None] * 3
    assert number_in(path) == number_in(path.with_name("none.safetensors")) == 1
    assert number_in(path.with_name("copied.safetensors")) == 3


def test_options_and_a_relative_path_are_those_of_the_call(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Elsewhere(threading.Thread):
        def run(self) -> None:
            os.chdir("/")
            super().run()

    monkeypatch.chdir(folder)
    monkeypatch.setattr(threading, "Thread", Elsewhere)
    options: Any = {"format": "safetensors", "durable": False, "checksums": False, "metadata": {"step": "3"}}
    nvme_ops.save_async(NEW, "model.bak", **options).result()
    assert b'"step":"3"' in (folder / "model.bak").read_bytes()
    with pytest.raises(ValueError, match="no checksums"):
        nvme_ops.load(folder / "model.bak", format="safetensors", verify=True)


# One save of a path at a time


@pytest.fixture
def call() -> Iterator[Callable[..., Future[Any]]]:
    """Saves on a thread of its own, which has come as far as it gets when this returns."""
    with ThreadPoolExecutor(8) as pool:

        def begin(number: int, path: Path, blocking: bool = False) -> Future[Any]:
            save = nvme_ops.save if blocking else lambda *given: nvme_ops.save_async(*given).result()
            begun = pool.submit(save, numbered(number), path)
            concurrent.futures.wait([begun], 0.05)
            return begun

        yield begin


def test_the_last_one_called_wins_and_other_paths_do_not_wait(path: Path, gate: Gated, folder: Path, call: Any) -> None:
    link = folder / "link.safetensors"
    link.symlink_to(path)
    first = nvme_ops.save_async(numbered(0), path, handle=gate)
    callers = [call(number, (path, link)[number % 2], blocking=number % 3 == 0) for number in range(1, 7)]
    nvme_ops.save_async(numbered(9), folder / "other.safetensors").result()
    assert number_in(folder / "other.safetensors") == 9
    assert not any(caller.done() for caller in callers)
    assert content(path) == "old"
    gate.open()
    first.result()
    for caller in callers:
        caller.result()
    assert number_in(path) == 6
    assert beside(path) == []
    assert not api._turns, "nothing is kept of saves that have ended"


def test_interrupted_while_it_waits_it_gives_its_turn_away(path: Path, gate: Gated, call: Any) -> None:
    first = nvme_ops.save_async(numbered(1), path, handle=gate)
    with interrupted_by(signal.SIGALRM), pytest.raises(KeyboardInterrupt):
        nvme_ops.save(numbered(2), path)
    last = call(3, path)
    assert not last.done()
    gate.open()
    first.result()
    last.result()
    assert number_in(path) == 3


def preempted(begin: Callable[[Gated], object], handler: Callable[[], Future[None] | None]) -> None:
    """``handler`` runs as a signal's while ``begin`` waits at a closed gate, which opens soon after that."""
    gate = Gated()
    futures: list[Future[None] | None] = []

    def handle(*_: object) -> None:
        threading.Timer(0.1, gate.open).start()
        futures.append(handler())

    signal.signal(signal.SIGUSR1, handle)

    def send() -> None:
        await_event(gate.reached)
        os.kill(os.getpid(), signal.SIGUSR1)

    threading.Thread(target=send).start()
    begin(gate)
    for future in futures:
        if future is not None:
            future.result()


@pytest.mark.parametrize(("name", "memory"), [("model.safetensors", None), ("model.pt", 0), ("folder", None)])
def test_a_signal_handler_may_save_the_path_that_it_interrupts_the_save_of(
    tmp_path: Path, name: str, memory: int | None
) -> None:
    path = tmp_path / name

    def save(gate: Gated) -> None:
        if memory is None:
            nvme_ops.save(numbered(1), path, handle=gate)
        else:
            nvme_ops.save_async(numbered(1), path, memory=0, handle=gate).result()

    def would_wait_for_ever() -> None:
        with pytest.raises(RuntimeError, match="save_async"):
            nvme_ops.save(numbered(2), path)

    def body() -> None:
        preempted(save, lambda: nvme_ops.save_async(numbered(2), path, memory=memory))
        assert number_in(path) == 2
        if memory is None:  # otherwise another thread saves
            preempted(save, would_wait_for_ever)
            assert number_in(path) == 1

    in_child(body)


# What goes wrong


def test_a_signal_handler_may_await_a_save_wherever_it_interrupts_another(path: Path, folder: Path) -> None:
    """The main thread may just have the lock of all saves."""
    for _ in range(2):
        with api.turns_lock:
            nvme_ops.save_async(varied(), folder / "other.pt").result(timeout=30)
    with api.turns_lock, pytest.raises(OSError, match="No space left"):
        nvme_ops.save_async(varied(), "/dev/full", format="pt").result(timeout=30)


def test_a_signal_handler_may_save_at_any_line_of_a_wait_for_another(path: Path) -> None:
    """What the wait calls in Python may be interrupted as well, with the locks that it holds."""

    def interrupted_at(line: int) -> bool:
        gate, lines = Gated(), itertools.count(1)

        def trace(frame: Any, event: str, _: object) -> Any:
            while frame is not None and frame.f_code is not BorrowedTensors.wait.__code__:
                frame = frame.f_back
            if frame is None:
                return None
            if event == "line" and next(lines) == line:
                sys.settrace(None)
                threading.Timer(0.1, gate.open).start()
                nvme_ops.save_async(numbered(2), path, memory=0)
            return trace

        threading.Timer(0.2, gate.open).start()
        sys.settrace(trace)
        nvme_ops.save_async(numbered(1), path, memory=0, handle=gate)
        sys.settrace(None)
        return next(lines) > line

    def body() -> None:
        assert next(line for line in itertools.count(1) if not interrupted_at(line)) > 5

    in_child(body, limit=30)


def test_an_error_comes_out_of_the_future(path: Path) -> None:
    async def awaited(tensors: dict[str, torch.Tensor]) -> None:
        await nvme_ops.save_async(tensors, path)

    with small_files():
        future = nvme_ops.save_async(varied(), path, strategy="copy_free")
        future.wait_until_safe()
        for _ in range(2):
            with pytest.raises(OSError, match="File too large") as caught:
                future.result()
            assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(path))
        assert future.exception() is caught.value
        with pytest.raises(OSError, match="File too large"):
            asyncio.run(awaited(varied()))
    assert_untouched(path)
    asyncio.run(awaited(NEW))
    assert content(path) == "new"


def test_what_cannot_be_saved_is_refused_at_once_and_keeps_no_turn(path: Path) -> None:
    with pytest.raises(ValueError, match="sparse"):
        nvme_ops.save_async({"a": torch.eye(2).to_sparse()}, path)
    assert_untouched(path)
    nvme_ops.save_async(NEW, path).result()


class Memory(bytearray):
    """Memory whose end can be watched."""


@pytest.mark.parametrize("strategy", background.STRATEGIES)
def test_tensors_are_freed_when_the_save_has_ended(folder: Path, strategy: Any) -> None:
    for limit in (contextlib.nullcontext, small_files):
        memory, freed = Memory(4_000_000), threading.Event()
        weakref.finalize(memory, freed.set)
        tensor = torch.frombuffer(memory, dtype=torch.float32)
        with limit():
            future = nvme_ops.save_async({"a": tensor}, folder / "model.safetensors", strategy=strategy)
            assert isinstance(future.exception(), OSError) == (limit is small_files)
        del tensor, memory
        gc.collect()
        assert freed.wait(10)


# Other processes, and the end of this one


def test_fork_with_a_save_under_way(path: Path, gate: Gated) -> None:
    """The child saves for itself, to the same path too, is told what it cannot wait for, and its end harms nothing."""
    future = nvme_ops.save_async(numbered(1), path, strategy="copy_free", handle=gate)
    assert gate.reached.wait(60)

    def child() -> None:
        future.wait_until_safe()  # the parent's copies of these tensors are being read, not the child's
        for wait in (future.result, future.exception, lambda: future.result(1)):
            with pytest.raises(RuntimeError, match="parent"):
                wait()
        nvme_ops.save_async(numbered(2), path).result()
        assert number_in(path) == 2
        background.release_memory()

    in_child(child)
    assert number_in(path) == 2
    gate.open()
    future.result()
    assert number_in(path) == 1
    assert beside(path) == []


def test_the_interpreter_waits_for_its_own_saves(folder: Path) -> None:
    program = """
        import os, sys, torch, nvme_ops
        slow = nvme_ops.aio_handle(block_size=4096, queue_depth=1)
        for strategy in ("copy", "copy_free"):
            path = f"{sys.argv[1]}/{strategy}.safetensors"
            nvme_ops.save_async({"a": torch.arange(20_000)}, path, strategy=strategy, handle=slow)
        child = os.fork()
        assert not child or os.waitpid(child, 0)[1] == 3 << 8
        sys.exit(3)
    """
    result = run_python(program, folder, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (3, "", "")
    for strategy in background.STRATEGIES:
        assert nvme_ops.load(folder / f"{strategy}.safetensors", verify=True)["a"].tolist() == list(range(20_000))


def test_errors_that_nobody_asked_for_are_printed_at_exit() -> None:
    program = """
        import asyncio, torch, nvme_ops
        from contextlib import suppress
        def save(name, **options):
            return nvme_ops.save_async({"a": torch.ones(9)}, f"/no/such/{name}.safetensors", durable=False, **options)
        async def wrapped():
            await asyncio.wrap_future(save("asked"))
        with suppress(OSError):
            save("asked").result(60)
        with suppress(OSError):
            asyncio.run(wrapped())
        assert save("asked").exception()
        save("asked").add_done_callback(lambda future: future.exception())
        save("forgotten")
    """
    said = run_python(program, check=False).stderr
    assert "forgotten.safetensors') failed" in said
    assert "asked.safetensors" not in said
