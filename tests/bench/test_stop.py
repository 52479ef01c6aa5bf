"""nvme-bench that is stopped: after Ctrl-C it prints what was measured, and however it ends, nothing stays for long."""

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

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "nvme_ops.bench"]
SMALL = ["--io_size", "4M", "--no_reference"]


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
    """The command in a session of its own, on a terminal of its own, where it tells its progress."""

    def __init__(self, *words: str, ignored: tuple[signal.Signals, ...] = (), path: str = "") -> None:
        self.said = bytearray()
        self._lost = threading.Event()
        self._ours, theirs = os.openpty()
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 200, 0, 0))
        self.process = subprocess.Popen(
            [*COMMAND, *words],
            cwd=ROOT,
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

    def wait_for(self, words: str) -> None:
        while words not in self.said.decode(errors="replace"):
            assert self.process.poll() is None, self.said.decode(errors="replace")
            time.sleep(0.02)

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
def start() -> Iterator[Callable[..., OnTerminal]]:
    with contextlib.ExitStack() as stack:

        def begin(*words: str, **more: Any) -> OnTerminal:
            begun = OnTerminal(*words, **more)
            stack.callback(begun.close)
            return begun

        yield begin


def test_ctrl_c_prints_what_was_measured_until_then(tmp_path: Path, start: Callable[..., OnTerminal]) -> None:
    begun = start("--folder", str(tmp_path), *SMALL, "--multi_process", "2", "--loops", "100000")
    begun.wait_for("round 3 of 100000: aio_handle")
    assert list(tmp_path.glob("*/data.1.0"))
    os.killpg(begun.process.pid, signal.SIGINT)  # a terminal sends it to all of them
    out = begun.output()
    assert begun.process.returncode == 130
    assert "aio_handle  -  " not in out
    assert "Task Write Speed = " in out
    assert out.endswith("interrupted: this is what was measured until then; the files are removed\n")
    assert b"Traceback" not in begun.said
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_while_processes_are_started_is_quiet(tmp_path: Path, start: Callable[..., OnTerminal]) -> None:
    begun = start("--folder", str(tmp_path), *SMALL, "--multi_process", "2")
    begun.wait_for("first pass")
    os.killpg(begun.process.pid, signal.SIGINT)
    begun.output()
    assert begun.process.returncode == 130
    assert b"Traceback" not in begun.said
    assert list(tmp_path.iterdir()) == []


ENDLESS = ("--loops", "100000")
ONE_PROCESS, RANKS = ("--engine", "aio_handle", "torch"), ("--multi_process", "2")


@pytest.mark.parametrize(
    ("words", "number"),
    [
        (ONE_PROCESS, signal.SIGHUP),
        (RANKS, signal.SIGTERM),
        *(pytest.param(ONE_PROCESS, number, marks=pytest.mark.slow) for number in (signal.SIGTERM, signal.SIGQUIT)),
        *(pytest.param(RANKS, number, marks=pytest.mark.slow) for number in (signal.SIGHUP, signal.SIGQUIT)),
    ],
)
def test_a_signal_to_end_leaves_nothing(
    tmp_path: Path, start: Callable[..., OnTerminal], number: signal.Signals, words: tuple[str, ...]
) -> None:
    begun = start("--folder", str(tmp_path), *SMALL, *ENDLESS, *words)
    begun.wait_for("round 2")
    begun.process.send_signal(number)
    begun.output()
    assert begun.process.returncode == 128 + number
    assert b"Traceback" not in begun.said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words",
    [pytest.param((), id="one process", marks=pytest.mark.slow), pytest.param(("--multi_process", "2"), id="ranks")],
)
def test_a_lost_terminal_leaves_nothing(
    tmp_path: Path, start: Callable[..., OnTerminal], words: tuple[str, ...]
) -> None:
    begun = start("--folder", str(tmp_path), *SMALL, *ENDLESS, *words)
    begun.wait_for("round 2")
    begun.hang_up()
    begun.output()
    assert list(tmp_path.iterdir()) == []


def test_signals_one_after_the_other_leave_nothing(tmp_path: Path, start: Callable[..., OnTerminal]) -> None:
    """Of a lost terminal the kernel and the shell both tell; a service manager may send several too."""
    begun = start("--folder", str(tmp_path), *SMALL, *ENDLESS, "--multi_process", "2")
    begun.wait_for("round 2")
    while begun.process.poll() is None:
        for number in (signal.SIGHUP, signal.SIGTERM):
            with contextlib.suppress(ProcessLookupError):
                begun.process.send_signal(number)
        time.sleep(0.001)
    begun.output()
    assert list(tmp_path.iterdir()) == []


def test_who_asked_for_it_goes_on_without_a_terminal(tmp_path: Path, start: Callable[..., OnTerminal]) -> None:
    """``nohup`` ignores SIGHUP, and so does what it starts."""
    begun = start("--folder", str(tmp_path), *SMALL, "--loops", "200", ignored=(signal.SIGHUP,))
    begun.wait_for("round 2")
    begun.process.send_signal(signal.SIGHUP)
    assert "Task Write Speed = " in begun.output()
    assert begun.process.returncode == 0
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_run_leaves_the_next_one_removes(tmp_path: Path, start: Callable[..., OnTerminal]) -> None:
    first = start("--folder", str(tmp_path), *SMALL, *ENDLESS, "--multi_process", "2")
    first.wait_for("round 2")
    first.process.kill()
    first.output()  # its ranks have ended with it
    (left,) = tmp_path.iterdir()
    foreign = tmp_path / left.name[:-1]
    foreign.mkdir()
    (foreign / "data").touch()
    begun = start("--folder", str(tmp_path), *SMALL, *ENDLESS)
    begun.wait_for("round 2")
    assert not left.exists()
    other = start("--folder", str(tmp_path), *SMALL)
    other.output()
    assert other.process.returncode == 0
    assert len(list(tmp_path.iterdir())) == 2, "the run that goes on has its folder still"
    begun.process.send_signal(signal.SIGINT)
    assert "interrupted" in begun.output()
    assert begun.process.returncode == 130
    assert [entry.name for entry in tmp_path.iterdir()] == [foreign.name]


@pytest.fixture
def endless_fio(tmp_path: Path) -> str:
    """A PATH where fio does not end by itself."""
    (tmp_path / "bin").mkdir()
    fio = tmp_path / "bin" / "fio"
    fio.write_text(f"#!/bin/sh\ntouch {tmp_path}/bin/begun\nexec sleep 10000\n")
    fio.chmod(0o755)
    return f"{tmp_path}/bin:{os.environ['PATH']}"


@pytest.mark.parametrize(
    "number",
    [
        *(pytest.param(number, marks=pytest.mark.slow) for number in (signal.SIGHUP, signal.SIGQUIT)),
        signal.SIGTERM,
        signal.SIGKILL,
    ],
)
@pytest.mark.parametrize(
    "words",
    [pytest.param((), id="one process", marks=pytest.mark.slow), pytest.param(("--multi_process", "2"), id="ranks")],
)
def test_fio_ends_with_the_run_and_its_huge_pages_are_given_back(
    tmp_path: Path, start: Callable[..., OnTerminal], endless_fio: str, number: signal.Signals, words: tuple[str, ...]
) -> None:
    if number == signal.SIGKILL and not stop._setpriv():
        pytest.skip("setpriv is not installed, or does not know --pdeathsig")
    place = tmp_path / "place"
    place.mkdir()
    begun = start("--folder", str(place), "--io_size", "4M", *words, "--engine", "fio", path=endless_fio)
    while not (tmp_path / "bin" / "begun").exists():
        assert begun.process.poll() is None, begun.said.decode(errors="replace")
        time.sleep(0.02)
    begun.process.send_signal(number)
    begun.output()
    end = time.monotonic() + 20
    while (left := [*processes_of(endless_fio), *left_by_the_next_run(place)]) and time.monotonic() < end:
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
    assert bench.main(["--folder", str(tmp_path), *SMALL]) == 130
    out, errors = capsys.readouterr()
    assert (out, "interrupted; the files are removed" in errors) == ("", True)
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_while_a_process_is_started_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
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
