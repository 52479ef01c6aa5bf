"""AsyncLog where writing fails for a while, or the program does what it should not: each record comes once."""

from __future__ import annotations

import contextlib
import errno
import functools
import gc
import multiprocessing
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nvme_ops.data import AsyncLog, log, log_file
from nvme_ops.data.log_file import segments
from tests.conftest import MIB, give_up_root, in_child, open_to_all, sync_file_system


def free(folder: Path) -> int:
    space = os.statvfs(folder)
    return space.f_bavail * space.f_frsize


def wait_until(said: Callable[[], object], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not said():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_disk_that_is_full_for_a_while(make_file_system: Callable[..., Path]) -> None:
    folder = make_file_system(64 * MIB)
    ballast: list[Path] = []
    while free(folder) > 4 * MIB:
        ballast.append(folder / f"ballast{len(ballast)}")
        ballast[-1].write_bytes(bytes(MIB))
        sync_file_system(folder)
    kept = AsyncLog(folder / "log", window=0.05)
    taken = 0
    with contextlib.suppress(OSError):
        while taken < 300_000:
            kept.append(b"%020d" % taken)
            taken += 1
    wait_until(lambda: kept._failure is not None)
    time.sleep(1)
    assert len(segments(folder / "log")) == 1, "no file for each attempt"
    for path in ballast[:12]:
        path.unlink()
    sync_file_system(folder)
    wait_until(lambda: kept._failure is None)
    kept.close()
    assert [int(each) for each in AsyncLog.read(folder / "log")] == list(range(taken))


class Failing(log_file.Segment):
    """Fails now and then, some of it written."""

    calls, period = 0, 5

    def write(self, records: list[bytes]) -> int:
        Failing.calls += 1
        if Failing.calls % Failing.period == 0:
            os.pwrite(self._fd, b"torn" * 100, self.nbytes)
            raise OSError(errno.EIO, "Input/output error")
        return super().write(records)

    def sync(self) -> None:
        Failing.calls += 1
        if Failing.calls % 7 == 0:
            raise MemoryError("of the test")
        super().sync()


@pytest.mark.parametrize("cut", [True, False])
def test_writing_that_fails_now_and_then(folder: Path, monkeypatch: pytest.MonkeyPatch, cut: bool) -> None:
    monkeypatch.setattr(log, "Segment", Failing)
    if not cut:  # nor can what was written be removed, most of the time
        real: dict[str, Callable[..., None]] = {"ftruncate": os.ftruncate, "unlink": os.unlink}
        calls = iter(range(1 << 30))

        def fail(name: str, *arguments: Any) -> None:
            if next(calls) % 3:
                _full()
            real[name](*arguments)

        monkeypatch.setattr(os, "ftruncate", functools.partial(fail, "ftruncate"))
        monkeypatch.setattr(os, "unlink", functools.partial(fail, "unlink"))
        monkeypatch.setattr(Failing, "period", 61)  # nothing is kept of what fails in part
    monkeypatch.setattr(log_file, "_BLOCK", 50)
    kept = AsyncLog(folder / "log", window=0.004, rotate_bytes=3000)
    number = 0
    while number < 2000:
        try:
            kept.append(b"%07d" % number)
            number += 1
        except (OSError, MemoryError):
            time.sleep(0.001)
    for _ in range(1000):
        try:
            kept.close()
            break
        except (OSError, MemoryError):
            pass
    found = [int(each) for each in AsyncLog.read(folder / "log")]
    assert found == list(range(2000)), "each once, in order"
    monkeypatch.undo()  # others need to unlink
    assert len(os.listdir("/proc/self/fd")) < 100


def test_close_can_be_repeated(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = AsyncLog(folder / "log", window=0.01)
    with monkeypatch.context() as failing:
        failing.setattr(log_file.Segment, "end", _full)
        kept.append(b"one")
        with pytest.raises(OSError, match="No space left"):
            kept.close()
        with pytest.raises(OSError, match="No space left"):
            kept.close()
    wait_until(lambda: kept._failure is None)
    kept.append(b"two")
    kept.close()
    kept.close()
    assert list(AsyncLog.read(folder / "log")) == [b"one", b"two"]
    with pytest.raises(ValueError, match="is closed"):
        kept.append(b"three")


def _full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_any_exception_is_a_failure_that_passes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = AsyncLog(folder / "log", window=0.01)

    def fail(*_: object) -> None:
        raise MemoryError("of the test")

    with monkeypatch.context() as failing:
        failing.setattr(log_file.Segment, "write", fail)
        kept.append(b"one")
        wait_until(lambda: kept._failure)
        with pytest.raises(MemoryError, match="of the test"):
            kept.append(b"two")
        with pytest.raises(MemoryError, match="of the test"):
            kept.flush()
    kept.flush()
    kept.close()
    assert list(AsyncLog.read(folder / "log")) == [b"one"]


def test_flush_waits_for_an_attempt_of_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = AsyncLog(folder / "log", window=0.01)
    write = log_file.Segment.write

    def slowly(segment: log_file.Segment, each: list[bytes]) -> int:
        time.sleep(0.1)  # longer than the window, after which flush looks at what became of it
        return write(segment, each)

    with monkeypatch.context() as failing:
        failing.setattr(log_file.Segment, "write", _full)
        kept.append(b"one")
        wait_until(lambda: kept._failure)
    monkeypatch.setattr(log_file.Segment, "write", slowly)
    kept.flush()
    kept.close()
    assert list(AsyncLog.read(folder / "log")) == [b"one"]


def test_blocks_have_bounded_bytes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_file, "_BLOCK_BYTES", 1000)
    sizes: list[int] = []
    write = log_file.Segment.write

    def noted(segment: log_file.Segment, each: list[bytes]) -> int:
        sizes.append(sum(map(len, each)))
        return write(segment, each)

    monkeypatch.setattr(log_file.Segment, "write", noted)
    records = [bytes([number]) * (5000 if number == 30 else number) for number in range(100)]
    with AsyncLog(folder / "log", window=60) as kept:
        for each in records:
            kept.append(each)
    assert list(AsyncLog.read(folder / "log")) == records
    assert sorted(sizes)[-2] <= 1000 < sizes[sizes.index(max(sizes))] == 5000


def test_a_forked_child_is_told_by_the_first_append(folder: Path) -> None:
    kept = AsyncLog(folder / "log", window=0.05)
    stop = threading.Event()

    def append() -> None:
        while not stop.is_set():
            kept.append(b"parent")

    thread = threading.Thread(target=append)
    thread.start()

    def body() -> None:
        with pytest.raises(RuntimeError, match="forked child"):
            kept.append(b"child")
        with pytest.raises(RuntimeError, match="forked child"):
            kept.flush()
        kept.close()
        assert not kept._records

    for _ in range(10):
        in_child(body)
    stop.set()
    thread.join()
    kept.close()
    assert set(AsyncLog.read(folder / "log")) == {b"parent"}


def _work(_: int) -> str:
    try:
        return f"taken: {_SHARED[0].append('worker')}"
    except RuntimeError as error:
        return str(error)


_SHARED: list[AsyncLog] = []


def test_workers_of_multiprocessing_are_told(folder: Path) -> None:
    with AsyncLog(folder / "log", window=0.1) as kept:
        _SHARED[:] = [kept]
        with multiprocessing.get_context("fork").Pool(2) as pool:
            assert all("forked child" in each for each in pool.map(_work, range(4)))
        _SHARED.clear()
    assert list(AsyncLog.read(folder / "log")) == []


def test_a_file_that_is_rotated_away_under_a_reader(folder: Path) -> None:
    with AsyncLog(folder / "log", window=0.01, rotate_bytes=1000, keep=3) as kept:

        def put(first: int) -> None:
            for number in range(first, first + 5):
                kept.append(b"%04d" % number * 300)
                kept.flush()

        put(0)
        found = []
        for each in AsyncLog.read(folder / "log"):
            found.append(int(each[:4]))
            if len(found) == 1:
                put(5)
    assert found == sorted(found)
    assert len(found) < 5


def test_a_log_that_is_dropped_writes_what_it_has_and_is_gone(folder: Path) -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        kept = AsyncLog(folder / "log", window=0.05)
        thread, gone = kept._thread, weakref.ref(kept)
        for number in range(100):
            kept.append(b"%d" % number)
        del kept
        thread.join(30)
        gc.collect()
        assert not thread.is_alive()
        assert gone() is None
    assert any("dropped without close" in str(each.message) for each in said)
    assert [int(each) for each in AsyncLog.read(folder / "log")] == list(range(100))


def test_a_sync_that_failed_is_not_believed_the_next_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux reports an error of writing back once, and forgets the pages."""
    synced = os.fdatasync
    failing: list[int] = []

    def fail_once(fd: int) -> None:
        if not failing:
            failing.append(fd)
            os.ftruncate(fd, 0)  # what was written is gone
            raise OSError(errno.EIO, "Input/output error")
        synced(fd)

    monkeypatch.setattr(os, "fdatasync", fail_once)
    kept = AsyncLog(folder / "log", window=0.02)
    kept.append(b"one")
    wait_until(lambda: failing and kept._failure is None)
    kept.append(b"two")
    kept.close()
    assert list(AsyncLog.read(folder / "log")) == [b"one", b"two"]
    assert len(segments(folder / "log")) == 1, "nothing was durable in the first file"


def _fewest_descriptors() -> int:
    """Returns how many are open between the attempts of the log's thread."""
    counts = []
    for _ in range(50):
        counts.append(len(os.listdir("/proc/self/fd")))
        time.sleep(0.002)
    return min(counts)


def test_a_file_that_cannot_be_begun_is_not_left_open(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = AsyncLog(folder / "log", window=0.01, rotate_bytes=1)
    with monkeypatch.context() as failing:
        failing.setattr(log_file, "sync_folder", _full)
        with contextlib.suppress(OSError):
            for number in range(1000):
                kept.append(b"%d" % number)
                time.sleep(0.001)
        before = _fewest_descriptors()
        time.sleep(0.5)
        assert _fewest_descriptors() == before
    wait_until(lambda: kept._failure is None)
    kept.close()
    found = [int(each) for each in AsyncLog.read(folder / "log")]
    assert found == list(range(len(found)))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_log_in_a_cycle_is_collected_and_written(folder: Path) -> None:
    class Holder:
        pass

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # which must not keep it from writing
        holder: Any = Holder()
        holder.me, holder.log = holder, AsyncLog(folder / "log", window=0.5)
        holder.log.append(b"one")
        gone = weakref.ref(holder.log)
        time.sleep(0.05)
        del holder

        def collected() -> bool:
            gc.collect()
            return gone() is None

        wait_until(collected)
    assert list(AsyncLog.read(folder / "log")) == [b"one"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_what_another_user_plants_where_everybody_may_write(folder: Path) -> None:
    open_to_all(folder)
    folder.chmod(0o1777)
    (folder / "victim").write_bytes(b"untouched")

    def plant() -> None:
        give_up_root()
        os.symlink(folder / "victim", folder / "log.000000")
        os.symlink(folder / "nowhere", folder / "log.000001")
        os.mkfifo(folder / "log.000002")
        os.mkdir(folder / "log.000003")
        for number in range(4, 9):
            (folder / f"log.{number:06d}").write_bytes(b"no block")

    in_child(plant)
    with AsyncLog(folder / "log", window=0.01, rotate_bytes=1000, keep=2) as kept:
        for number in range(5):
            kept.append(b"%04d" % number * 300)
            kept.flush()
    assert (folder / "victim").read_bytes() == b"untouched"
    assert not (folder / "nowhere").exists()
    assert len(segments(folder / "log")) == 9 + 2, "theirs count for nothing, and are not removed"
    assert [int(each[:4]) for each in AsyncLog.read(folder / "log")] == [3, 4]


def test_a_file_that_is_removed_under_the_log(folder: Path) -> None:
    kept = AsyncLog(folder / "log", window=0.05)
    kept.append(b"gone")
    kept.flush()
    os.unlink(folder / "log.000000")
    failed = 0
    for number in range(200):
        try:
            kept.append(b"%d" % number)
        except FileNotFoundError as error:
            assert "was removed while it was written to" in str(error)  # noqa: PT017
            failed += 1
        time.sleep(0.001)
    with contextlib.suppress(FileNotFoundError):
        kept.flush()
    kept.close()
    found = [int(each) for each in AsyncLog.read(folder / "log")]
    assert found == sorted(found)
    assert len(found) == 200 - failed, "all that was taken"


def test_failures_keep_no_frames_of_those_who_are_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Batch:
        pass

    kept = AsyncLog(folder / "log", window=0.01)
    alive: weakref.WeakSet[Batch] = weakref.WeakSet()

    def step() -> None:
        batch = Batch()
        alive.add(batch)
        with contextlib.suppress(OSError):
            kept.append(b"record")
        with contextlib.suppress(OSError):
            kept.flush(timeout=5)

    with monkeypatch.context() as failing:
        failing.setattr(log_file.Segment, "write", _full)
        for _ in range(50):
            step()
        assert len(alive) <= 2
    kept.close()


def test_a_log_without_anything_to_do_rests(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = AsyncLog(folder / "log", window=0.01)
    kept.append(b"one")
    kept.flush()
    worked = 0
    work = AsyncLog._work

    def counted(self: AsyncLog) -> bool:
        nonlocal worked
        worked += 1
        return work(self)

    monkeypatch.setattr(AsyncLog, "_work", counted)
    time.sleep(0.3)
    assert worked == 0
    kept.append(b"two")
    wait_until(lambda: worked)
    kept.close()
    assert list(AsyncLog.read(folder / "log")) == [b"one", b"two"]


@pytest.mark.parametrize("given", [{"keep": 1.5}, {"rotate_bytes": 1.5}, {"buffer_bytes": True}])
def test_sizes_that_are_no_ints(folder: Path, given: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="must be an int"):
        AsyncLog(folder / "log", **given)
    assert list(folder.iterdir()) == []
