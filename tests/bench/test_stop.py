"""Commands that measure and are stopped: however they end, nothing stays for long, and nothing goes on."""

from __future__ import annotations

import concurrent.futures
import contextlib
import fcntl
import multiprocessing
import os
import select
import signal
import struct
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks import raw_io
from nvme_ops.measure import bench, files, scratch, stop
from nvme_ops.measure.remote import Remote
from tests import prepared
from tests.conftest import REPOSITORY
from tests.made_up import executable

RANKS = ("nvme_ops.bench", "--io_size", "4M", "--no_reference", "--loops", "100000", "--multi_process", "2")
WORKLOAD = ("nvme_ops.bench", "workload", "cosmoflow", "--size", "8M", "--seconds", "60", "--reader", "plain")
BENCHMARK = ("benchmarks", "raw_io", "--size", "4M", "--rounds", "100", "--only", "cached", "latency", "--no-deepspeed")
BEGIN = """
import os, runpy, signal, sys
os.setsid()
os.dup2(os.open(sys.argv[1], os.O_RDWR), 2)  # the first terminal that a session opens is its own
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background of a shell ignores it
open(sys.argv[2], "w").write(f"{os.getpid()}\\n")
del sys.argv[:3]
runpy.run_module(sys.argv[0], run_name="__main__")
"""


def living(session: int) -> list[str]:
    """The processes of a session that are more than an entry that nobody has waited for."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            name, _, rest = entry.read_text(errors="replace").rpartition(")")
            state, _, _, its_session = rest.split()[:4]
            found += [name] if int(its_session) == session and state not in "ZX" else []
    return found


class OnTerminal:
    """A command in a session of its own, on a terminal of its own, where it tells its progress."""

    def __init__(self, folder: Path, *words: str, path: str) -> None:
        self.folder, self.said = folder, bytearray()
        self._lost = threading.Event()
        self._ours, theirs = os.openpty()
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 200, 0, 0))
        identity = folder.with_name("identity")
        command = ("-c", BEGIN, os.ttyname(theirs), str(identity), *words, "--folder", str(folder))
        self._threads = concurrent.futures.ThreadPoolExecutor(2)
        self.done = self._threads.submit(prepared.run, *command, environment={"PATH": path}, folder=REPOSITORY)
        self._reader = self._threads.submit(self._read)
        self.wait_for(lambda: identity.exists() and identity.read_text().endswith("\n"))
        self.process = int(identity.read_text())
        os.close(theirs)

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # EIO: nobody has the other end any more
            while not self._lost.is_set():
                if select.select([self._ours], [], [], 0.05)[0]:
                    self.said += os.read(self._ours, 4096)

    def wait_for(self, there: Callable[[], object]) -> None:
        while not there():
            assert not self.done.done(), self.said.decode(errors="replace")
            time.sleep(0.02)

    def hang_up(self) -> None:
        """The terminal is gone, as when its window is closed or its connection ends."""
        self._lost.set()
        self._reader.result()
        os.close(self._ours)

    def ended(self) -> tuple[int, str]:
        """Its status and output, once the command and every process of it ended."""
        done = self.done.result(60)
        end = time.monotonic() + 20
        while living(self.process) and time.monotonic() < end:
            time.sleep(0.05)
        assert living(self.process) == []
        self._reader.result(20)
        return done.returncode, done.stdout

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process, signal.SIGKILL)
        self._threads.shutdown()
        if not self._lost.is_set():
            os.close(self._ours)


Start = Callable[..., OnTerminal]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    (tmp_path / "place").mkdir()
    with contextlib.ExitStack() as stack:

        def begin(*words: str, path: str = os.environ["PATH"]) -> OnTerminal:
            return stack.enter_context(contextlib.closing(OnTerminal(tmp_path / "place", *words, path=path)))

        yield begin


@pytest.mark.parametrize(
    ("words", "moment", "printed"),
    [
        (RANKS, b"round 3 of 100000: aio_handle", "Task Write Speed = "),
        (BENCHMARK, b"round 2 of 100: nvme_ops handle.read", raw_io.GROUPS["cached"]),
    ],
    ids=["nvme-bench", "benchmarks"],
)
def test_ctrl_c_prints_what_was_measured_until_then(
    start: Start, words: tuple[str, ...], moment: bytes, printed: str
) -> None:
    begun = start(*words)
    begun.wait_for(lambda: moment in begun.said)
    os.killpg(begun.process, signal.SIGINT)  # a terminal sends it to all of them
    status, out = begun.ended()
    assert status == 130
    assert printed in out
    end = "interrupted: this is what was measured until then; the files are removed\n"
    assert out.endswith(end) if words is RANKS else b"raw_io: interrupted" in begun.said
    assert b"Traceback" not in begun.said
    assert list(begun.folder.iterdir()) == []


def test_ctrl_c_to_torch_s_workers_too_leaves_nothing(start: Start) -> None:
    """Torch raises where it likes then; its traceback may be seen."""
    begun = start(*WORKLOAD)
    begun.wait_for(lambda: any(begun.folder.rglob("plain/*")) and len(living(begun.process)) > 2)
    time.sleep(0.5)
    os.killpg(begun.process, signal.SIGINT)
    begun.ended()
    assert list(begun.folder.iterdir()) == []


@pytest.mark.parametrize("killed", [False, True], ids=["signals", "killed"])
def test_however_a_run_ends_its_processes_fio_and_huge_pages_do(start: Start, tmp_path: Path, killed: bool) -> None:
    """Of a lost terminal the kernel and the shell both tell; a service manager may send several signals too."""
    if killed and not stop._setpriv():
        pytest.skip("setpriv is not installed, or does not know --pdeathsig")
    executable(tmp_path / "bin" / "fio", f"touch {tmp_path}/bin/begun\nexec sleep 10000")
    path = f"{tmp_path}/bin:{os.environ['PATH']}"
    begun = start(*RANKS, "--engine", "fio", path=path)
    begun.wait_for((tmp_path / "bin" / "begun").exists)
    if not killed:
        begun.hang_up()
    while not begun.done.done():
        for number in [signal.SIGKILL] if killed else [signal.SIGHUP, signal.SIGTERM]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(begun.process, number)
        time.sleep(0.001)
    status, _ = begun.ended()
    assert status in ([-signal.SIGKILL] if killed else [129, 143])  # whichever its main thread hears of first
    assert len(list(begun.folder.iterdir())) == killed
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


def test_a_forked_child_of_the_run_dies_of_the_signal_and_nohup_stays() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as ``nohup`` does
    stop.leave_on_signals()
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
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
