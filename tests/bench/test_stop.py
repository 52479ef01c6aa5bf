"""Commands that measure and are stopped: however they end, nothing stays for long, and nothing goes on."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import multiprocessing
import os
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nvme_ops.measure import bench, files, scratch, stop
from nvme_ops.measure.remote import Remote
from tests.conftest import REPOSITORY

BENCH = ("-m", "nvme_ops.bench", "--io_size", "4M", "--no_reference", "--loops", "100000")
RANKS = (*BENCH, "--multi_process", "2")
WORKLOAD = ("-m", "nvme_ops.bench", "workload", "retinanet", "--size", "8M", "--seconds", "60", "--reader")
TUNE = ("-m", "nvme_ops.measure.tune", "--io_size", "32M", "--seconds", "600", "--no_store")
RAW_IO = (str(REPOSITORY / "benchmarks"), "raw_io", "--size", "16M", "--rounds", "100000", "--only", "latency")


def living(session: int) -> list[str]:
    """The processes of a session that are more than an entry that nobody has waited for."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            name, _, rest = entry.read_text(errors="replace").rpartition(")")
            state, _, _, its_session = rest.split()[:4]
            found += [name] if int(its_session) == session and state not in "ZX" else []
    return found


def own_terminal(*ignored: signal.Signals) -> None:
    """In a process that begins a session: standard error is its terminal, and signals act as for a user's command."""
    fcntl.ioctl(2, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a job in the background of a shell ignores it, and its children do
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


class OnTerminal:
    """A command in a session of its own, on a terminal of its own, where it tells its progress."""

    def __init__(self, folder: Path, *words: str, ignored: tuple[signal.Signals, ...] = (), path: str = "") -> None:
        self.folder, self.said = folder, bytearray()
        self._lost = threading.Event()
        self._ours, theirs = os.openpty()
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 200, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, *words, "--folder", str(folder)],
            cwd=REPOSITORY,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=theirs,
            text=True,
            env={**os.environ, "PATH": path or os.environ["PATH"]},
            start_new_session=True,
            preexec_fn=functools.partial(own_terminal, *ignored),
        )
        os.close(theirs)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # EIO: nobody has the other end any more
            while not self._lost.is_set():
                if select.select([self._ours], [], [], 0.05)[0]:
                    self.said += os.read(self._ours, 4096)

    def wait_for(self, there: Callable[[], object]) -> None:
        while not there():
            assert self.process.poll() is None, self.said.decode(errors="replace")
            time.sleep(0.02)

    def begun(self) -> bool:
        """Whether it moves data."""
        patterns = ("data", "samples-*", "plain/*")
        return b"round 2" in self.said or any(any(self.folder.rglob(pattern)) for pattern in patterns)

    def hang_up(self) -> None:
        """The terminal is gone, as when its window is closed or its connection ends."""
        self._lost.set()
        self._reader.join()
        os.close(self._ours)

    def output(self) -> str:
        """All of it, once the command and every process of it ended."""
        out, _ = self.process.communicate(timeout=60)
        end = time.monotonic() + 20
        while living(self.process.pid) and time.monotonic() < end:
            time.sleep(0.05)
        assert living(self.process.pid) == []
        self._reader.join(20)
        return str(out)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join()
        if not self._lost.is_set():
            os.close(self._ours)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., OnTerminal]]:
    (tmp_path / "place").mkdir()
    with contextlib.ExitStack() as stack:

        def begin(*words: str, **more: Any) -> OnTerminal:
            begun = OnTerminal(tmp_path / "place", *words, **more)
            stack.callback(begun.close)
            begun.wait_for(begun.begun)
            time.sleep(0.3)
            return begun

        yield begin


@pytest.mark.parametrize(
    ("words", "number", "status"),
    [
        pytest.param(BENCH, signal.SIGHUP, 129, id="bench-hangup"),
        pytest.param((*WORKLOAD, "nvme_ops", "plain"), signal.SIGINT, 130, id="workload-ctrl-c"),
        pytest.param(TUNE, signal.SIGINT, 130, id="tune-ctrl-c"),
        pytest.param(RAW_IO, signal.SIGINT, 130, id="benchmarks-ctrl-c"),
    ],
)
def test_a_signal_ends_every_command_and_leaves_nothing(
    start: Callable[..., OnTerminal], words: tuple[str, ...], number: signal.Signals, status: int
) -> None:
    begun = start(*words)
    if words == TUNE:
        begun.wait_for(lambda: begun.said.count(b"searching") > 1)  # a pass, however slow, was measured
    begun.process.send_signal(number)
    out = begun.output()
    assert begun.process.returncode == status
    assert b"Traceback" not in begun.said
    if number == signal.SIGINT:
        assert b"interrupted" in begun.said
        assert ('"aio": {' in out) == (words == TUNE), "nvme-tune prints the best so far"
    assert list(begun.folder.iterdir()) == []


def test_ctrl_c_prints_what_was_measured_until_then(start: Callable[..., OnTerminal]) -> None:
    begun = start(*RANKS)
    begun.wait_for(lambda: b"round 3 of 100000: aio_handle" in begun.said)
    os.killpg(begun.process.pid, signal.SIGINT)  # a terminal sends it to all of them
    out = begun.output()
    assert begun.process.returncode == 130
    assert "Task Write Speed = " in out
    assert out.endswith("interrupted: this is what was measured until then; the files are removed\n")
    assert b"Traceback" not in begun.said
    assert list(begun.folder.iterdir()) == []


def test_ctrl_c_to_torch_s_workers_too_leaves_nothing(start: Callable[..., OnTerminal]) -> None:
    """Torch raises where it likes then; its traceback may be seen."""
    begun = start(*WORKLOAD, "plain")
    begun.wait_for(lambda: len(living(begun.process.pid)) > 2)
    time.sleep(0.5)
    os.killpg(begun.process.pid, signal.SIGINT)
    begun.output()
    assert list(begun.folder.iterdir()) == []


def test_a_lost_terminal_and_signals_one_after_the_other_leave_nothing(start: Callable[..., OnTerminal]) -> None:
    """Of a lost terminal the kernel and the shell both tell; a service manager may send several signals too."""
    begun = start(*RANKS)
    begun.hang_up()
    while begun.process.poll() is None:
        for number in (signal.SIGHUP, signal.SIGTERM):
            with contextlib.suppress(ProcessLookupError):
                begun.process.send_signal(number)
        time.sleep(0.001)
    begun.output()
    assert list(begun.folder.iterdir()) == []


def test_who_asked_for_it_goes_on_without_a_terminal(start: Callable[..., OnTerminal]) -> None:
    """``nohup`` ignores SIGHUP, and so does what it starts."""
    begun = start(*BENCH, "--loops", "200", ignored=(signal.SIGHUP,))
    begun.process.send_signal(signal.SIGHUP)
    assert "Task Write Speed = " in begun.output()
    assert begun.process.returncode == 0


def test_what_a_killed_run_leaves_the_next_one_removes(start: Callable[..., OnTerminal]) -> None:
    first = start(*RANKS)
    first.process.kill()
    first.output()  # its ranks have ended with it
    (left,) = first.folder.iterdir()
    begun = start(*BENCH)
    begun.wait_for(lambda: b"round 2" in begun.said)
    assert not left.exists()
    assert len(left_by_the_next_run(begun.folder)) == 1, "the run that goes on has its folder still"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_fio_ends_with_the_run_and_its_huge_pages_are_given_back(tmp_path: Path, number: signal.Signals) -> None:
    if number == signal.SIGKILL and not stop._setpriv():
        pytest.skip("setpriv is not installed, or does not know --pdeathsig")
    (tmp_path / "bin").mkdir()
    (tmp_path / "place").mkdir()
    fio, path = tmp_path / "bin" / "fio", f"{tmp_path}/bin:{os.environ['PATH']}"
    fio.write_text(f"#!/bin/sh\ntouch {tmp_path}/bin/begun\nexec sleep 10000\n")
    fio.chmod(0o755)
    begun = OnTerminal(tmp_path / "place", *RANKS, "--engine", "fio", path=path)
    with contextlib.closing(begun):
        begun.wait_for((tmp_path / "bin" / "begun").exists)
        begun.process.send_signal(number)
        begun.output()
        assert begun.process.returncode == (143 if number == signal.SIGTERM else -number)
        assert b"Traceback" not in begun.said
        end = time.monotonic() + 20
        while (left := [*processes_of(path), *left_by_the_next_run(begun.folder)]) and time.monotonic() < end:
            time.sleep(0.02)
        assert left == []


def processes_of(path: str) -> list[str]:
    """What still runs with this PATH, in whatever session: the process that keeps the huge pages, too."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"PATH={path}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append((entry / "cmdline").read_text())
    return found


def left_by_the_next_run(place: Path) -> list[Path]:
    """What its look for litter overlooks. What ends closes its terminal first, then the files that say it lives."""
    scratch.sweep(str(place))
    return list(place.iterdir())


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_ctrl_c_before_anything_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stop, "leave_on_signals", lambda: None)
    monkeypatch.setattr(files, "make_file", interrupted)
    assert bench.main(["--folder", str(tmp_path), "--io_size", "4M"]) == 130
    out, errors = capsys.readouterr()
    assert (out, "nvme-bench: interrupted" in errors) == ("", True)
    assert list(tmp_path.iterdir()) == []
    remote = Remote(list)
    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        remote.send(0, "run")
    remote.close()


def test_a_forked_child_of_the_run_dies_of_the_signal() -> None:
    stop.leave_on_signals()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, b".")  # a signal that comes earlier is lost in Python
            time.sleep(60)
        finally:  # an exit would pass here
            os._exit(1)
    os.read(reading, 1)
    os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    os.close(reading)
    os.close(writing)
