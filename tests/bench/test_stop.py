"""Commands that measure and are stopped: however they end, nothing stays for long, and nothing goes on."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nvme_ops.filesystem.files import boot_id
from nvme_ops.measure import files, scratch, stop
from nvme_ops.measure.scratch import scratch_folder, sweep
from tests.conftest import REPOSITORY

RANKS = ("--io_size", "4M", "--loops", "100000", "--multi_process", "2")
WORKLOAD = ("workload", "cosmoflow", "--size", "8M", "--seconds", "60", "--reader", "plain")
#: Runs nvme-bench, which says each step.
PROGRAM = """
import sys
from nvme_ops.base import progress
from nvme_ops.measure.bench import main
progress._LINE_INTERVAL = 0.0
sys.exit(main())
"""


def living(session: int) -> list[str]:
    """The processes of a session that are more than an entry that nobody has waited for."""
    names = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            name, _, rest = entry.read_text(errors="replace").rpartition(")")
            state, _, _, its_session = rest.split()[:4]
            names += [name] if int(its_session) == session and state not in "ZX" else []
    return names


def within(seconds: float, there: Callable[[], object]) -> None:
    end = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < end
        time.sleep(0.02)


@contextlib.contextmanager
def begun(folder: Path, words: tuple[str, ...]) -> Iterator[subprocess.Popen[str]]:
    """A command in a session of its own."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *words, "--folder", str(folder)], cwd=REPOSITORY, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background ignores it
    )  # fmt: skip
    try:
        yield process
        within(20, lambda: not living(process.pid))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def wait_for(words: str, process: subprocess.Popen[str]) -> None:
    assert any(words in line for line in process.stderr or ())


def test_ctrl_c_prints_what_was_measured_until_then(folder: Path) -> None:
    with begun(folder, RANKS) as process:
        wait_for("round 3 of 100000: aio_handle", process)
        os.killpg(process.pid, signal.SIGINT)  # a terminal sends it to all of them
        out, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Task Write Speed = " in out
    assert out.endswith("interrupted: this is what was measured until then; the files are removed\n")
    assert "Traceback" not in errors
    assert list(folder.iterdir()) == []


def test_ctrl_c_to_torch_s_workers_too_leaves_nothing(folder: Path) -> None:
    """Torch raises where it likes then; its traceback may be seen."""
    with begun(folder, WORKLOAD) as process:
        within(60, lambda: any(folder.rglob("plain/*")) and len(living(process.pid)) > 2)
        time.sleep(0.5)
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=60)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("numbers", [[signal.SIGHUP, signal.SIGTERM], [signal.SIGKILL]], ids=["signals", "killed"])
def test_however_a_run_ends_its_processes_do(folder: Path, numbers: list[signal.Signals]) -> None:
    """Of a lost terminal the kernel and the shell both tell; a service manager may send several signals too."""
    with begun(folder, RANKS) as process:
        wait_for("round 1 of 100000: aio_handle", process)
        while process.poll() is None:
            for number in numbers:
                process.send_signal(number)
            time.sleep(0.001)
    killed = signal.SIGKILL in numbers
    assert process.returncode in ([-signal.SIGKILL] if killed else [129, 143])  # whichever comes first
    assert len(list(folder.iterdir())) == killed
    scratch.sweep(str(folder))  # by the next run
    assert list(folder.iterdir()) == []


def test_a_forked_child_of_the_run_dies_of_the_signal_and_nohup_stays() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as ``nohup`` does
    stop.leave_on_signals()
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    child = os.fork()
    if child == 0:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        finally:  # an exit would pass here
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM


# The folder of a run


NAME = "nvme_ops-bench-{}123456789abcdef"


def left_by_killed(folder: Path, number: int = 0, boot: str = "") -> Path:
    """As a run leaves it that is killed."""
    made = folder / NAME.format(number)
    made.mkdir(mode=0o700)
    (made / f".lock-{boot or boot_id()}").touch()
    (made / "data").write_bytes(b"x")
    return made


def test_what_a_killed_run_had_is_removed_and_nothing_of_one_that_is_alive(tmp_path: Path) -> None:
    gone, stays = left_by_killed(tmp_path), left_by_killed(tmp_path, 1)
    with open(stays / f".lock-{boot_id()}", "r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with scratch_folder(str(tmp_path), 0) as mine:
            assert not gone.exists()
            assert sorted(tmp_path.iterdir()) == sorted([stays, Path(mine)])
            with scratch_folder(str(tmp_path), 0):
                assert Path(mine).exists(), "the same process is alive too"
    assert list(tmp_path.iterdir()) == [stays]
    (tmp_path / NAME.format(2)).mkdir()  # of a run that was killed before it had a lock
    with pytest.raises(files.NotUsable, match="of free space are needed"), scratch_folder(str(tmp_path), 1 << 60):
        pass
    assert list(tmp_path.iterdir()) == []


def test_what_others_have_under_a_similar_name_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / NAME.format("g")).mkdir()
    (tmp_path / NAME.format(0)).write_text("a file")
    left_by_killed(tmp_path, 1).rename(tmp_path / "elsewhere")
    (tmp_path / NAME.format(1)).symlink_to(tmp_path / "elsewhere")
    (tmp_path / NAME.format(2) / "without a lock").mkdir(parents=True)
    earlier = left_by_killed(tmp_path, 3, "00000000-0000-0000-0000-000000000000")
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr(scratch, "_is_local", lambda _: False)
    sweep(str(tmp_path))
    assert sorted(tmp_path.rglob("*")) == before
    monkeypatch.setattr(scratch, "_is_local", lambda _: True)  # no other host writes there: its owner is dead
    sweep(str(tmp_path))
    assert not earlier.exists()


def test_what_is_still_pending_makes_no_file_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an asynchronous write that a signal has left behind does, which opens its file when its turn comes."""
    late, unlink = list[bool](), os.unlink

    def unlink_beside_a_writer(path: str) -> None:
        unlink(path)
        late.append(Path(made).exists())

    with scratch_folder(str(tmp_path), 1 << 20) as made:
        (Path(made) / "data").write_text("data")
        monkeypatch.setattr(os, "unlink", unlink_beside_a_writer)
    assert late == [False, False]  # the data and the lock
    assert list(tmp_path.iterdir()) == []
