"""``AsyncLog``: nothing is lost but what its window allows, whoever dies, and nobody waits who did not ask to."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from nvme_ops.data import AsyncLog
from nvme_ops.data.log_file import segments
from nvme_ops.errors import FormatError
from tests.conftest import MIB, REPOSITORY, give_up_root, in_child, in_threads, open_to_all


def record(number: int) -> bytes:
    return f"{number}:".encode() + bytes([number % 256]) * (number * 7 % 200)


def test_records_come_back(folder: Path) -> None:
    with AsyncLog(folder / "log") as log:
        for number in range(10_000):
            assert log.append(record(number))
    assert list(AsyncLog.read(folder / "log")) == [record(number) for number in range(10_000)]
    assert repr(log) == f"<AsyncLog {str(folder / 'log')!r}: nothing to be written>"


def test_text_and_dicts(folder: Path) -> None:
    with AsyncLog(folder / "log") as log:
        log.append("grün")
        log.append({"loss": 0.5, "step": 3})
        log.append(b"")
        log.append(bytearray(b"abc"))
    found = list(AsyncLog.read(folder / "log"))
    assert found[0].decode() == "grün"
    assert json.loads(found[1]) == {"loss": 0.5, "step": 3}
    assert found[2:] == [b"", b"abc"]


def test_what_is_flushed_can_be_read_while_the_log_is_open(folder: Path) -> None:
    with AsyncLog(folder / "log", window=60) as log:
        log.append(b"one")
        log.flush(timeout=30)
        assert list(AsyncLog.read(folder / "log")) == [b"one"]
        log.append(b"two")
        log.flush()
        assert list(AsyncLog.read(folder / "log")) == [b"one", b"two"]


def test_it_is_written_without_being_asked(folder: Path) -> None:
    with AsyncLog(folder / "log", window=0.05) as log:
        log.append(b"one")
        deadline = time.monotonic() + 20
        while list(AsyncLog.read(folder / "log")) != [b"one"]:
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.mark.parametrize("window", [0.05, 0.5])
def test_a_killed_process_loses_the_last_window_at_most(folder: Path, window: float) -> None:
    program = """if True:
        import sys, time
        from nvme_ops.data import AsyncLog
        log = AsyncLog(sys.argv[1], window=float(sys.argv[2]))
        number = 0
        while True:
            for _ in range(100):
                log.append(f"{number} {time.time()}")
                number += 1
            time.sleep(0.001)
            if number == 2000:
                print("running", flush=True)
    """
    words = [sys.executable, "-c", program, str(folder / "log"), str(window)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen(words, stdout=subprocess.PIPE, env=environment, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "running\n"
        time.sleep(3 * window)
        killed = time.time()
        process.send_signal(signal.SIGKILL)
    found = [entry.split() for entry in AsyncLog.read(folder / "log")]
    assert [int(number) for number, _ in found] == list(range(len(found)))
    # another second for a device that does not keep up, as this one may not while other tests run
    assert killed - float(found[-1][1]) < window + 1


@pytest.mark.parametrize("cut", [1, 5, 19, 30, 200])
def test_a_torn_end_is_skipped(folder: Path, cut: int) -> None:
    log = AsyncLog(folder / "log")
    for number in range(100):
        log.append(record(number))
    log.flush()
    log.append(b"x" * 300)
    log.flush()
    (path,) = segments(folder / "log")
    torn = folder / "torn.000000"
    torn.write_bytes(Path(path).read_bytes()[:-cut])
    assert list(AsyncLog.read(folder / "torn")) == [record(number) for number in range(100)]
    content = bytearray(Path(path).read_bytes())
    content[-cut] ^= 1
    torn.write_bytes(content)
    assert list(AsyncLog.read(folder / "torn")) == [record(number) for number in range(100)]
    log.close()
    with AsyncLog(folder / "torn") as other:
        other.append(b"after")
    assert list(AsyncLog.read(folder / "torn")) == [*(record(number) for number in range(100)), b"after"]


def test_damage_in_a_whole_file_is_told(folder: Path) -> None:
    with AsyncLog(folder / "log") as log:
        for number in range(1000):
            log.append(record(number))
    (path,) = segments(folder / "log")
    content = bytearray(Path(path).read_bytes())
    content[5000] ^= 1
    Path(path).write_bytes(content)
    with pytest.raises(FormatError, match=r"log\.000000: damaged at byte 0"):
        list(AsyncLog.read(folder / "log"))


def test_there_is_no_log(folder: Path) -> None:
    with pytest.raises(FileNotFoundError):
        list(AsyncLog.read(folder / "log"))


def test_rotation(folder: Path) -> None:
    with AsyncLog(folder / "log", rotate_bytes="10K", window=0.01) as log:
        for number in range(3000):
            log.append(record(number))
            if number % 100 == 0:
                log.flush()
    assert len(segments(folder / "log")) > 5
    assert list(AsyncLog.read(folder / "log")) == [record(number) for number in range(3000)]


def test_old_files_are_removed(folder: Path) -> None:
    other = AsyncLog(folder / "log")  # somebody writes to the first file
    other.append(b"other")
    other.flush()
    with AsyncLog(folder / "log", rotate_bytes=1000, keep=3) as log:
        for number in range(2000):
            log.append(record(number))
            if number % 50 == 0:
                log.flush()
    kept = segments(folder / "log")
    assert kept[0].endswith(".000000")
    assert 3 <= len(kept) <= 5
    found = list(AsyncLog.read(folder / "log"))
    assert found[0] == b"other"
    assert found[1:] == [record(number) for number in range(2000)][-len(found) + 1 :]
    other.close()


def test_threads_share_a_log(folder: Path) -> None:
    with AsyncLog(folder / "log", window=0.01) as log:
        in_threads(lambda thread: [log.append(f"{thread} {number}") for number in range(2000)] and None, 4)
    found = [tuple(map(int, entry.split())) for entry in AsyncLog.read(folder / "log")]
    assert len(found) == 8000
    for thread in range(4):
        assert [number for each, number in found if each == thread] == list(range(2000))


def test_processes_write_files_of_their_own(folder: Path) -> None:
    def child() -> None:
        with AsyncLog(folder / "log") as log:
            log.append(b"child")

    with AsyncLog(folder / "log") as log:
        log.append(b"parent")
        in_child(child)
    assert sorted(AsyncLog.read(folder / "log")) == [b"child", b"parent"]
    assert len(segments(folder / "log")) == 2


def test_at_exit_everything_is_written(folder: Path) -> None:
    program = """if True:
        import sys
        from nvme_ops.data import AsyncLog
        log = AsyncLog(sys.argv[1], window=60)
        for number in range(1000):
            log.append(str(number))
        del log
    """
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    subprocess.run([sys.executable, "-c", program, str(folder / "log")], check=True, env=environment)
    assert list(AsyncLog.read(folder / "log")) == [str(number).encode() for number in range(1000)]


class Slow:
    """Holds up what is written until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from nvme_ops.data.log_file import Segment

        self.held = True
        sync = Segment.sync

        def waiting(segment: Any) -> None:
            while self.held:
                time.sleep(0.005)
            sync(segment)

        monkeypatch.setattr(Segment, "sync", waiting)


def append_for_ever(log: AsyncLog) -> None:
    while True:
        log.append(bytes(100))


@pytest.mark.parametrize("on_full", ["drop", "raise", "block"])
def test_a_device_that_does_not_keep_up(folder: Path, monkeypatch: pytest.MonkeyPatch, on_full: Any) -> None:
    slow = Slow(monkeypatch)
    log = AsyncLog(folder / "log", window=0.01, buffer_bytes="10K", on_full=on_full)
    taken = 0
    if on_full == "drop":
        while log.append(bytes(100)):
            taken += 1
        assert log.dropped == 1
    elif on_full == "raise":
        with pytest.raises(BlockingIOError, match="wait to be written"):
            append_for_ever(log)
        taken = log._bytes // 104
    else:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        before = signal.signal(signal.SIGALRM, lambda *_: setattr(slow, "held", False))
        try:
            for _ in range(500):
                log.append(bytes(100))
            assert not slow.held, "it has waited for the device"
        finally:
            signal.signal(signal.SIGALRM, before)
        taken = 500
    assert taken < 110 or on_full == "block"
    with pytest.raises(TimeoutError) if slow.held else _nothing():
        log.flush(timeout=0.05 if slow.held else None)
    slow.held = False
    log.close()
    assert len(list(AsyncLog.read(folder / "log"))) == taken


class _nothing:  # noqa: N801
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def _try_again(log: AsyncLog) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            return log.flush()
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_a_file_that_may_not_grow(folder: Path) -> None:
    def child() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        log = AsyncLog(folder / "log", window=0.02)
        resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, resource.RLIM_INFINITY))
        log.append(bytes(2 * MIB))
        with pytest.raises(OSError, match="File too large"):
            log.close()
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        _try_again(log)
        log.close()

    in_child(child)
    assert [len(entry) for entry in AsyncLog.read(folder / "log")] == [2 * MIB]


def test_a_signal_handler_may_append(folder: Path) -> None:
    log = AsyncLog(folder / "log", window=0.01)
    count = 0

    def handler(*_: object) -> None:
        nonlocal count
        log.append(b"signal")
        count += 1

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        for _ in range(50_000):
            log.append(b"main")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    log.close()
    found = list(AsyncLog.read(folder / "log"))
    assert found.count(b"main") == 50_000
    assert found.count(b"signal") == count > 0


def test_after_the_end(folder: Path) -> None:
    log = AsyncLog(folder / "log")
    log.close()
    log.close()
    log.flush()
    with pytest.raises(ValueError, match="the log is closed"):
        log.append(b"x")


@pytest.mark.parametrize(
    "wrong",
    [{"window": 0}, {"window": 1e9}, {"on_full": "wait"}, {"buffer_bytes": 0}, {"rotate_bytes": 0}, {"keep": 0}],
)
def test_wrong_arguments(folder: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        AsyncLog(folder / "log", **wrong)
    with AsyncLog(folder / "log") as log, pytest.raises(TypeError, match="bytes, a str or a dict, not int"):
        log.append(5)  # type: ignore[arg-type]


def test_folders_that_cannot_be(folder: Path) -> None:
    with pytest.raises(FileNotFoundError):
        AsyncLog(folder / "nothing" / "below" / "log")
    with AsyncLog(folder / "log") as log:
        log.append(b"private")
    open_to_all(folder)
    folder.chmod(0o755)

    def child() -> None:
        give_up_root()
        if os.geteuid() != 0:
            with pytest.raises(PermissionError):
                AsyncLog(folder / "log")

    in_child(child)
