"""``save_async``: what the file holds is what the tensors held, and nothing that goes wrong is lost."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import errno
import gc
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import nvme_ops
from nvme_ops import aio_handle
from nvme_ops.checkpoint import background
from tests.conftest import MIB, in_child, in_threads, run_python
from tests.crashing_save import (
    NEW,
    OLD,
    Gated,
    assert_untouched,
    beside,
    content,
    interrupted_by,
    number_in,
    numbered,
    small_files,
)  # fmt: skip

BOTH = pytest.mark.parametrize("strategy", background.STRATEGIES)


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
    """Of all kinds, 7 MB and some."""
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


@pytest.mark.parametrize("memory", [None, 0, 1, 5 * MIB, 4_000_000, 100 * MIB])
def test_copied_tensors_can_be_changed_at_once(path: Path, memory: int | None) -> None:
    for _ in range(2):  # the second time in the memory of the first
        tensors = varied()
        future = nvme_ops.save_async(tensors, path, memory=memory)
        change(tensors)
        future.result()
        found, expected = nvme_ops.load(path, verify=True), varied()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
        assert beside(path) == []


def test_lent_tensors_can_be_changed_when_they_are_safe(path: Path) -> None:
    tensors = varied()
    future = nvme_ops.save_async(tensors, path, strategy="copy_free")
    future.wait_until_safe()
    change(tensors)
    future.result()
    found, expected = nvme_ops.load(path, verify=True), varied()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_what_exceeds_the_memory_is_written_before_the_call_returns(path: Path, gate: Gated) -> None:
    """And the rest of the file after that."""
    gate.tensors.set()
    tensors = numbered(1)
    future = nvme_ops.save_async(tensors, path, memory=0, handle=gate)
    change(tensors)
    assert not future.done()
    assert content(path) == "old"
    gate.head.set()
    future.result()
    assert number_in(path) == 1


def test_copies_wait_for_nothing(path: Path, gate: Gated) -> None:
    future = nvme_ops.save_async(numbered(1), path, handle=gate)
    future.wait_until_safe(0)
    assert not future.done()
    with pytest.raises(concurrent.futures.TimeoutError):
        future.result(0.01)
    with pytest.raises(concurrent.futures.TimeoutError):
        future.exception(0.01)
    gate.open()
    assert future.exception() is None
    assert number_in(path) == 1


def test_lent_tensors_are_safe_before_the_file_is_complete(path: Path, gate: Gated) -> None:
    tensors = numbered(1)
    future = nvme_ops.save_async(tensors, path, strategy="copy_free", handle=gate)
    with pytest.raises(TimeoutError, match=f"{path}: tensors are still being read after 0.01 s"):
        future.wait_until_safe(0.01)
    gate.tensors.set()
    future.wait_until_safe()
    change(tensors)
    assert not future.done()
    gate.open()
    future.result()
    assert number_in(path) == 1


@BOTH
def test_nothing_to_save(path: Path, strategy: Any) -> None:
    for tensors in ({}, {"none": torch.zeros(0)}):
        future = nvme_ops.save_async(tensors, path, strategy=strategy, memory=0)
        future.wait_until_safe()
        future.result()
        assert nvme_ops.load(path, verify=True).keys() == tensors.keys()


@BOTH
def test_options_of_save(folder: Path, strategy: Any) -> None:
    path = folder / "model.bak"
    nvme_ops.save_async(
        NEW, path, strategy=strategy, format="safetensors", durable=False, checksums=False, metadata={"step": "3"}
    ).result()
    assert b'"step":"3"' in path.read_bytes()
    with pytest.raises(ValueError, match="no checksums"):
        nvme_ops.load(path, format="safetensors", verify=True)


# One save of a path at a time


class Caller:
    """A thread that calls ``save_async`` and has come as far as it gets when this is made."""

    def __init__(self, number: int, path: Path, handle: aio_handle | None = None) -> None:
        self.future: Any = None

        def call() -> None:
            self.future = nvme_ops.save_async(numbered(number), path, handle=handle)

        self.thread = threading.Thread(target=call)
        self.thread.start()
        self.thread.join(0.05)

    @property
    def waits(self) -> bool:
        return self.thread.is_alive()

    def result(self) -> None:
        self.thread.join()
        self.future.result()


def test_the_next_save_of_a_path_waits(path: Path, gate: Gated, folder: Path) -> None:
    """By whatever name it is called; others do not."""
    link = folder / "link.safetensors"
    link.symlink_to(path)
    first = nvme_ops.save_async(numbered(1), path, handle=gate)
    second = Caller(2, link)
    nvme_ops.save_async(numbered(3), folder / "other.safetensors").result()
    assert number_in(folder / "other.safetensors") == 3
    assert second.waits
    assert content(path) == "old"
    gate.open()
    first.result()
    second.result()
    assert number_in(path) == 2


def test_the_last_one_called_wins(path: Path, gate: Gated) -> None:
    first = nvme_ops.save_async(numbered(0), path, handle=gate)
    callers = [Caller(number, path) for number in range(1, 8)]
    assert all(caller.waits for caller in callers)
    gate.open()
    first.result()
    for caller in callers:
        caller.result()
    assert number_in(path) == 7
    assert beside(path) == []


def test_the_last_one_called_wins_though_it_comes_just_in_time(path: Path, gate: Gated) -> None:
    """When the first save ends, one waits longer than the other."""
    first = nvme_ops.save_async(numbered(0), path, handle=gate)
    later: list[Any] = []
    first.add_done_callback(lambda _: later.append(nvme_ops.save_async(numbered(2), path)))
    waiting = Caller(1, path)
    gate.open()
    waiting.result()
    while not later:
        time.sleep(0.001)
    later[0].result()
    assert number_in(path) == 2


def test_different_paths_at_once(folder: Path, gate: Gated) -> None:
    futures = [nvme_ops.save_async(numbered(n), folder / f"{n}.safetensors", handle=gate) for n in range(6)]
    assert not any(future.done() for future in futures)
    gate.open()
    assert not concurrent.futures.wait(futures, 60).not_done
    assert [number_in(folder / f"{n}.safetensors") for n in range(6)] == list(range(6))


def test_many_threads_and_few_paths(folder: Path) -> None:
    failures: list[BaseException] = []

    def save(thread: int) -> None:
        try:
            for turn in range(15):
                number = thread * 100 + turn
                path = folder / f"{turn % 3}.safetensors"
                nvme_ops.save_async(numbered(number), path, strategy=background.STRATEGIES[turn % 2], durable=False)
        except BaseException as error:
            failures.append(error)

    in_threads(save, 4)
    for number in range(3):  # waits for those under way
        nvme_ops.save_async(numbered(number), folder / f"{number}.safetensors").result()
    assert failures == []
    assert [number_in(folder / f"{number}.safetensors") for number in range(3)] == [0, 1, 2]
    assert len(list(folder.iterdir())) == 3


def test_interrupted_while_it_waits_for_its_turn(path: Path, gate: Gated) -> None:
    first = nvme_ops.save_async(numbered(1), path, handle=gate)
    with interrupted_by(signal.SIGALRM), pytest.raises(KeyboardInterrupt):
        nvme_ops.save_async(numbered(2), path)
    last = Caller(3, path)
    assert last.waits
    gate.open()
    first.result()
    last.result()
    assert number_in(path) == 3


def test_interrupted_while_tensors_are_written(path: Path, gate: Gated) -> None:
    """The save goes on, and the next one waits for it."""
    with interrupted_by(signal.SIGALRM), pytest.raises(KeyboardInterrupt):
        nvme_ops.save_async(numbered(1), path, memory=0, handle=gate)
    last = Caller(2, path)
    assert last.waits
    gate.open()
    last.result()
    assert number_in(path) == 2


# What goes wrong


@BOTH
@pytest.mark.parametrize("memory", [0, None])
def test_an_error_comes_out_of_the_future(path: Path, strategy: Any, memory: int | None) -> None:
    with small_files():
        future = nvme_ops.save_async(varied(), path, strategy=strategy, memory=memory)
        future.wait_until_safe()
        for _ in range(2):
            with pytest.raises(OSError, match="File too large") as caught:
                future.result()
            assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(path))
        assert future.exception() is caught.value
    assert_untouched(path)
    nvme_ops.save_async(NEW, path, strategy=strategy).result()
    assert content(path) == "new"


@BOTH
def test_a_folder_for_a_file(path: Path, strategy: Any) -> None:
    future = nvme_ops.save_async(NEW, path.parent, strategy=strategy, format="safetensors")
    assert isinstance(future.exception(), IsADirectoryError)


@pytest.mark.parametrize(
    ("tensors", "options", "kind"),
    [
        ({"a": 1}, {}, TypeError),
        ({"a": torch.eye(2).to_sparse()}, {}, ValueError),
        (NEW, {"strategy": "move"}, ValueError),
        (NEW, {"memory": -1}, ValueError),
        (NEW, {"metadata": {"a": 1}}, TypeError),
        (NEW, {"format": "zip"}, ValueError),
    ],
)
def test_what_cannot_be_saved_is_refused_at_once(
    path: Path, tensors: Any, options: dict[str, Any], kind: type[Exception]
) -> None:
    with pytest.raises(kind):
        nvme_ops.save_async(tensors, path, **options)
    assert_untouched(path)
    nvme_ops.save_async(NEW, path).result()
    assert content(path) == "new"


class Memory(bytearray):
    """Memory whose end can be watched."""


@BOTH
@pytest.mark.parametrize("limit", [contextlib.nullcontext, small_files])
def test_tensors_are_let_go(folder: Path, strategy: Any, limit: Callable[[], Any]) -> None:
    """When the save has ended, well or not, though its future is kept."""
    memory, freed = Memory(4_000_000), threading.Event()
    weakref.finalize(memory, freed.set)
    tensor = torch.frombuffer(memory, dtype=torch.float32)
    with limit():
        future = nvme_ops.save_async({"a": tensor}, folder / "model.safetensors", strategy=strategy)
        assert isinstance(future.exception(), OSError) == (limit is small_files)
    del tensor, memory
    gc.collect()
    assert freed.wait(10)


def test_it_cannot_be_cancelled(path: Path, gate: Gated) -> None:
    """A save under way goes on, whoever loses interest in it."""
    future = nvme_ops.save_async(numbered(1), path, handle=gate)
    assert not future.cancel()
    gate.open()
    future.result()
    assert not future.cancelled()
    assert number_in(path) == 1


def test_asyncio(path: Path) -> None:
    async def save() -> None:
        await asyncio.wrap_future(nvme_ops.save_async(numbered(1), path))
        with small_files(), pytest.raises(OSError, match="File too large"):
            await asyncio.wrap_future(nvme_ops.save_async(varied(), path))

    asyncio.run(save())
    assert number_in(path) == 1


# Other processes, and the end of this one


def test_fork_with_a_save_under_way(path: Path, gate: Gated) -> None:
    """The child saves for itself, to the same path too, and its end harms nothing."""
    future = nvme_ops.save_async(numbered(1), path, handle=gate)
    assert gate.reached.wait(60)

    def child() -> None:
        nvme_ops.save_async(numbered(2), path).result()
        assert number_in(path) == 2
        nvme_ops.save_async(numbered(3), path.with_name("other.safetensors"), memory=0).result()
        background.release_memory()
        gc.collect()

    in_child(child)
    assert number_in(path) == 2
    assert number_in(path.with_name("other.safetensors")) == 3
    gate.open()
    future.result()
    assert number_in(path) == 1
    assert len(beside(path)) == 1


def test_a_parents_save_in_the_child(path: Path, gate: Gated) -> None:
    """Nobody there would ever say that it has ended."""
    gate.head.set()
    ended = nvme_ops.save_async(numbered(1), path)
    ended.result()
    future = nvme_ops.save_async(numbered(2), path, strategy="copy_free", handle=gate)

    def child() -> None:
        ended.result()
        ended.wait_until_safe()
        future.wait_until_safe()  # the parent's copies of these tensors are being read, not the child's
        for wait in (future.result, future.exception, lambda: future.result(1)):
            with pytest.raises(RuntimeError, match="parent"):
                wait()

    in_child(child)
    gate.open()
    future.result()


def test_a_child_that_exits_as_programs_do(folder: Path) -> None:
    """Its interpreter ends while the parent's save is under way."""
    program = """
import os, sys, torch, nvme_ops
tensors = {"a": torch.arange(300_000), "b": torch.arange(50_000).view(50, 1000).t()}
slow = nvme_ops.aio_handle(block_size=4096, queue_depth=1)
future = nvme_ops.save_async(tensors, sys.argv[1], handle=slow)
child = os.fork()
if child == 0:
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
future.result()
"""
    result = run_python(program, folder / "model.safetensors")
    assert (result.stdout, result.stderr) == ("", "")
    assert nvme_ops.load(folder / "model.safetensors", verify=True)["a"].tolist() == list(range(300_000))
    assert len(list(folder.iterdir())) == 1


def test_the_interpreter_waits_for_saves(folder: Path) -> None:
    program = """
import sys, torch, nvme_ops
slow = nvme_ops.aio_handle(block_size=4096, queue_depth=1)
for strategy in ("copy", "copy_free"):
    tensors = {"a": torch.arange(200_000), "b": torch.arange(50_000).view(50, 1000).t()}
    nvme_ops.save_async(tensors, f"{sys.argv[1]}/{strategy}.safetensors", strategy=strategy, handle=slow)
sys.exit(3)
"""
    result = run_python(program, folder, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (3, "", "")
    for strategy in background.STRATEGIES:
        found = nvme_ops.load(folder / f"{strategy}.safetensors", verify=True)
        assert found["a"].tolist() == list(range(200_000))
    assert len(list(folder.iterdir())) == 2


FAILING = """
import sys, concurrent.futures, torch, nvme_ops
def save(name):
    return nvme_ops.save_async({"a": torch.ones(10)}, f"/no/such/folder/{name}.safetensors", durable=False)
"""


def test_errors_that_nobody_asked_for_are_printed_at_exit() -> None:
    program = FAILING + 'kept = [save("first"), save("second")]\nsave("third")\n'
    result = run_python(program, check=False)
    for name in ("first", "second", "third"):
        assert f"save_async('/no/such/folder/{name}.safetensors') failed, and nobody asked" in result.stderr
    assert result.stderr.count("FileNotFoundError: [Errno 2] no such folder; is a disk not mounted?: '/no'") == 3


def test_errors_that_somebody_asked_for_are_not_printed() -> None:
    program = (
        FAILING
        + """
import asyncio
from contextlib import suppress
async def wrapped():
    await asyncio.wrap_future(save("asyncio"))
with suppress(OSError):
    save("result").result()
with suppress(OSError):
    save("result in time").result(60)
with suppress(OSError):
    asyncio.run(wrapped())
assert save("exception").exception()
assert save("exception in time").exception(60)
save("callback").add_done_callback(lambda future: future.exception())
"""
    )
    assert run_python(program).stderr == ""


def test_an_interrupted_question_is_none(folder: Path) -> None:
    """The error has gone nowhere, so it is printed."""
    program = """
import signal, sys, threading, nvme_ops, torch
class Slow(nvme_ops.aio_handle):
    def submit_pwritev(self, *arguments, **options):
        asked.wait()
        raise OSError(5, "no disk")
asked = threading.Event()
future = nvme_ops.save_async({"a": torch.ones(10)}, sys.argv[1], handle=Slow())
def interrupt(*_):
    raise KeyboardInterrupt
signal.signal(signal.SIGALRM, interrupt)
signal.setitimer(signal.ITIMER_REAL, 0.1)
try:
    future.result()
except KeyboardInterrupt:
    asked.set()
"""
    assert "no disk" in run_python(program, folder / "model.safetensors").stderr
