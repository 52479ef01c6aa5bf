"""nvme-bench that is stopped, by Ctrl-C or SIGTERM: it prints what was measured, and leaves no file and no process."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import multiprocessing
import os
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nvme_ops.bench import cli, files
from nvme_ops.bench.remote import Remote

ROOT = Path(__file__).parent.parent
COMMAND = [sys.executable, "-m", "nvme_ops.bench"]
SMALL = ["--io_size", "4M", "--no_reference"]


def living(group: int) -> list[str]:
    """The processes of a group that are more than an entry that nobody has waited for."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            name, _, rest = entry.read_text(errors="replace").rpartition(")")
            state, _, its_group = rest.split()[:3]
            found += [name] if int(its_group) == group and state not in "ZX" else []
    return found


class OnTerminal:
    """The command in a process group of its own, with a terminal as its standard error, where it tells its progress."""

    def __init__(self, *words: str) -> None:
        self.said = bytearray()
        self._ours, theirs = os.openpty()
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 200, 0, 0))
        self.process = subprocess.Popen(
            [*COMMAND, *words],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=theirs,
            text=True,
            start_new_session=True,
            # a job in the background of a shell ignores it, and so do its children
            preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        )
        os.close(theirs)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # EIO: nobody has the other end any more
            while True:
                self.said += os.read(self._ours, 4096)

    def wait_for(self, words: str) -> None:
        while words not in self.said.decode(errors="replace"):
            assert self.process.poll() is None, self.said.decode(errors="replace")
            time.sleep(0.02)

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
        os.close(self._ours)


@pytest.fixture
def start() -> Iterator[Callable[..., OnTerminal]]:
    with contextlib.ExitStack() as stack:

        def begin(*words: str) -> OnTerminal:
            begun = OnTerminal(*words)
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


def test_sigterm_leaves_no_file(tmp_path: Path, start: Callable[..., OnTerminal]) -> None:
    begun = start("--folder", str(tmp_path), *SMALL, "--loops", "100000", "--engine", "aio_handle", "torch")
    begun.wait_for("round 2")
    begun.process.terminate()
    begun.output()
    assert begun.process.returncode == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_ctrl_c_before_anything_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(files, "leave_on_sigterm", lambda: None)
    monkeypatch.setattr(files, "make_file", interrupted)
    assert cli.main(["--folder", str(tmp_path), *SMALL]) == 130
    out, errors = capsys.readouterr()
    assert (out, "interrupted before anything was measured; the files are removed" in errors) == ("", True)
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_while_a_process_is_started_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    remote = Remote(list)
    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        remote.send(0, "run")
    remote.close()
