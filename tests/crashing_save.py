"""Saves that end badly: in children that strace kills, or to whose system calls it answers with errors, or held up.

A forked child of a process that has imported everything starts in milliseconds; it stops itself before it saves, strace
takes hold of it, and it goes on.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

import nvme_ops
from nvme_ops import aio_handle
from tests.conftest import MIB, limited

Tensors = dict[str, torch.Tensor]
OLD: Tensors = {"a": torch.zeros(1000), "b": torch.arange(3000).view(50, 60).t(), "none": torch.zeros(0)}
NEW: Tensors = {"a": torch.ones(1000), "b": OLD["b"] + 1, "none": torch.zeros(0), "more": torch.ones(5).to(torch.int8)}

_SET_TRACER = 0x59616D61  # PR_SET_PTRACER

#: Those between which the state on the disk may differ: a kill at any other is like one at the next of these.
CHANGING = {
    *("openat", "mkdir", "pwrite64", "write", "io_uring_enter", "io_submit", "ftruncate", "fallocate", "fchmod"),
    *("rename", "unlink"),
}
#: In make test the first and the last system call of each name.
SOME_CALLS = pytest.mark.parametrize(
    "ends", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["first and last", "each"]
)


@dataclass(frozen=True)
class Outcome:
    """How a child ended: its exit code or the negative signal, what its save raised, and its system calls in order."""

    status: int
    error: str | None = None
    code: int | None = None
    filename: str | None = None
    calls: list[tuple[int, str]] = field(default_factory=list)

    def points(self, ends: bool = False) -> list[tuple[str, int]]:
        """Each call as strace counts it: the name, and which one of that name it is in its thread.

        With ``ends`` the first and the last one of each name.
        """
        most: dict[str, int] = {}
        for (_, name), count in Counter(self.calls).items():
            most[name] = max(count, most.get(name, 0))
        numbers = {name: sorted({1, count}) if ends else range(1, count + 1) for name, count in most.items()}
        return [(name, number) for name in numbers for number in numbers[name]]


def save_under_strace(save: Callable[[], object], folder: Path, *injections: str) -> Outcome:
    """Runs ``save`` in a child under strace, which traces all calls, or injects something into some.

    ``folder`` takes the trace. Skips the test where strace is missing, or may not trace.
    """
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    log = folder / "strace.log"
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _save_when_told(save, writing)
    os.close(writing)
    os.waitpid(child, os.WUNTRACED)
    with open(reading, encoding="utf-8") as report:
        try:
            command = ["strace", "-f", "-p", str(child), "-o", str(log)]
            for injection in injections:
                command += ["-e", f"inject={injection}"]
            if injections:
                command += ["-e", "trace=" + ",".join(injection.partition(":")[0] for injection in injections)]
            with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as tracer:
                assert tracer.stderr is not None
                said = tracer.stderr.readline()
                if "attached" not in said:
                    pytest.skip(f"strace cannot trace: {said.strip()}")
                os.kill(child, signal.SIGCONT)
                status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                child = 0
                tracer.communicate()
        finally:
            if child:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
        told = json.loads(report.read() or "{}")
    matches = (re.match(r"(\d+)\s+(\w+)\(", line) for line in log.read_text(errors="replace").splitlines())
    log.unlink()
    return Outcome(status, calls=[(int(match[1]), match[2]) for match in matches if match], **told)


def _save_when_told(save: Callable[[], object], report: int) -> NoReturn:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(60)  # a child that hangs ends too
    torch.set_num_threads(1)  # OpenMP's threads are the parent's
    ctypes.CDLL(None).prctl(_SET_TRACER, ctypes.c_ulong(-1))  # strace is no ancestor: Yama asks for leave
    os.kill(os.getpid(), signal.SIGSTOP)
    try:
        save()
    except BaseException as error:
        told: dict[str, Any] = {"error": f"{type(error).__name__}: {error}"}
        if isinstance(error, OSError):
            told |= {"code": error.errno, "filename": error.filename}
        os.write(report, json.dumps(told).encode())
        os._exit(1)
    os._exit(0)


def kill_at(name: str, number: int) -> str:
    """For strace: the process dies where a thread enters this call of its, before the call does anything."""
    return f"{name}:signal=KILL:when={number}"


def fail_at(name: str, number: int, error: str) -> str:
    """For strace: this call of a thread does nothing and returns an error."""
    return f"{name}:error={error}:when={number}"


def killed_at_each_step(save: Callable[[], object]) -> Iterator[int]:
    """Has children save until one ends well: the first dies at its first step, the next one at its second."""
    for number in itertools.count(1):
        child = os.fork()
        if child == 0:
            torch.set_num_threads(1)
            with contextlib.suppress(BaseException):
                _die_at(number)
                save()
                os._exit(0)
            os._exit(1)
        status = os.waitpid(child, 0)[1]
        assert status in (0, signal.SIGKILL), status
        yield number
        if status == 0:
            return


def _die_at(number: int) -> None:
    """Kills this process in place of the step of this number that a save takes."""
    steps = itertools.count(1)

    def watched(real: Callable[..., Any]) -> Callable[..., Any]:
        def step(*given: Any, **options: Any) -> Any:
            if next(steps) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*given, **options)

        return step

    for name in ("open", "mkdir", "rename", "unlink", "fsync", "fdatasync", "write"):
        setattr(os, name, watched(getattr(os, name)))


# What a save leaves, and what may come between


def content(path: Path) -> str | None:
    """``"old"`` or ``"new"``; None where there is no file. Fails for anything else."""
    if not path.exists():
        return None
    loaded = nvme_ops.load(path, verify=True)
    for name, tensors in (("old", OLD), ("new", NEW)):
        if loaded.keys() == tensors.keys() and all(torch.equal(loaded[key], tensors[key]) for key in tensors):
            return name
    raise AssertionError(f"neither the old tensors nor the new ones: {loaded}")


def beside(path: Path) -> list[str]:
    """What else is in the folder."""
    return sorted(entry.name for entry in path.parent.iterdir() if entry != path)


def assert_untouched(path: Path) -> None:
    assert content(path) == "old"
    assert beside(path) == []


class Hooked(aio_handle):
    """Does something once, when the first tensors are on their way to the file."""

    def __init__(self, hook: Callable[[], object]) -> None:
        super().__init__()
        self.hook = hook

    def submit_pwritev(self, *arguments: Any, **options: Any) -> Any:
        future = super().submit_pwritev(*arguments, **options)
        hook, self.hook = self.hook, lambda: None
        hook()
        return future


def at_second(act: Callable[[], object]) -> Callable[[int], contextlib.AbstractContextManager[Callable[[int], None]]]:
    """As ``on_progress``: does something when the second piece of the source is about to be read."""

    @contextlib.contextmanager
    def on_progress(_: int) -> Iterator[Callable[[int], None]]:
        calls = list[int]()

        def advance(count: int) -> None:
            calls.append(count)
            if len(calls) == 2:
                act()

        yield advance

    return on_progress


def await_event(event: threading.Event) -> None:
    """Waits in short steps: a signal that comes just before a wait is handled after it."""
    assert any(event.wait(0.05) for _ in range(1200))


class Gated(aio_handle):
    """Lets tensors, and then the head of the file, pass when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.tensors, self.head = threading.Event(), threading.Event(), threading.Event()

    def submit_pwritev(self, *arguments: Any, **options: Any) -> Any:
        self.reached.set()
        await_event(self.tensors)
        return super().submit_pwritev(*arguments, **options)

    def submit_pwrite(self, tensor: Any, file: Any, file_offset: int | None = None, **options: Any) -> Any:
        if file_offset == 0:
            await_event(self.head)
        return super().submit_pwrite(tensor, file, file_offset, **options)

    def open(self) -> None:
        self.tensors.set()
        self.head.set()


def numbered(number: int) -> dict[str, torch.Tensor]:
    return {"a": torch.full((1000,), float(number)), "b": torch.full((30, 40), number).t()}


def number_in(path: Path) -> int:
    """Of ``numbered``'s, if they are whole."""
    loaded = nvme_ops.load(path, verify=True)
    number = int(loaded["a"][0])
    assert all((tensor == number).all() for tensor in loaded.values())
    return number


def small_files() -> contextlib.AbstractContextManager[None]:
    """No file may be longer than 1 MiB."""
    return limited(resource.RLIMIT_FSIZE, MIB)


@contextlib.contextmanager
def interrupted_by(code: int) -> Iterator[None]:
    """The signal comes in a moment, and raises KeyboardInterrupt."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(code, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(code, before)
