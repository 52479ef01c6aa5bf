"""``AsyncLog``: each record comes once, and nothing is lost but what its window allows, whoever dies or fails."""

from __future__ import annotations

import contextlib
import errno
import functools
import gc
import itertools
import os
import random
import signal
import struct
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nvme_ops.base.errors import FormatError
from nvme_ops.data import AsyncLog, log_file
from nvme_ops.data.log_file import Segment, segments
from nvme_ops.io.tensors import checksums_of
from tests.conftest import give_up_root, in_child, in_threads, open_to_all, watched
from tests.contract.faulty import flip


@pytest.fixture
def folder(quick_folder: Path) -> Path:
    return quick_folder


def read(folder: Path, name: str = "log") -> list[bytes]:
    return list(AsyncLog.read(folder / name))


def numbers(folder: Path) -> list[int]:
    return [int(record[:4]) for record in read(folder)]


def wait_until(said: Callable[[], object], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not said():
        assert time.monotonic() < deadline
        time.sleep(0.005)


# Records


@pytest.mark.parametrize("options", [{}, {"rotate_bytes": "10K", "window": 0.01}])
def test_records_come_back(folder: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    """Those of threads that share a log, and of a child that makes its own of the same name, too."""
    monkeypatch.setattr(log_file, "_BLOCK_BYTES", 1000)
    sizes = watched(monkeypatch, Segment, "write", lambda _, records: (len(records), sum(map(len, records))))
    given: list[Any] = [b"", bytearray(b"abc"), memoryview(b"view"), "grün", {"loss": 0.5}, bytes(5000)]
    with AsyncLog(folder / "log", **options) as made:
        assert all(map(made.append, given))

        def work(thread: int) -> None:
            for number in range(1000):
                assert made.append(f"{thread} {number} ".ljust(number % 200))
                if number % 200 == 0:
                    made.flush()

        def child() -> None:
            with AsyncLog(folder / "log") as own:
                own.append("2 0")

        in_threads(work, 2)
        in_child(child)
    records = read(folder)
    assert records[:6] == [b"", b"abc", b"view", "grün".encode(), b'{"loss": 0.5}', bytes(5000)]
    numbers = [tuple(map(int, record.split())) for record in records[6:]]
    for thread in range(3):
        assert [number for writer, number in numbers if writer == thread] == list(range(1 if thread == 2 else 1000))
    assert all(count == 1 or nbytes <= 1000 for count, nbytes in sizes)
    assert (len(segments(folder / "log")) > 5) == ("rotate_bytes" in options)
    with pytest.raises(FileNotFoundError):
        read(folder, "another")


def test_what_is_flushed_or_waits_for_its_window_can_be_read(folder: Path) -> None:
    with AsyncLog(folder / "log", window=60) as made, AsyncLog(folder / "other", window=0.05) as other:
        other.append(b"one")
        for count in (1, 2):
            made.append(b"flushed")
            made.flush(timeout=30)
            assert read(folder) == [b"flushed"] * count
        wait_until(lambda: read(folder, "other") == [b"one"])


def test_wrong_arguments(folder: Path) -> None:
    wrong: list[tuple[str, Any, type[Exception]]] = [
        ("window", 0, ValueError), ("window", 1e9, ValueError), ("on_full", "wait", ValueError),
        ("buffer_bytes", 0, ValueError), ("keep", 0, ValueError), ("rotate_bytes", 1.5, TypeError),
        ("buffer_bytes", True, TypeError),
    ]  # fmt: skip
    for name, value, error in wrong:
        with pytest.raises(error, match=name):
            AsyncLog(folder / "log", **{name: value})
    assert list(folder.iterdir()) == []
    with AsyncLog(folder / "log") as made, pytest.raises(TypeError, match="bytes, a str or a dict, not int"):
        made.append(5)  # type: ignore[arg-type]


# Files that are kept


def test_old_files_are_removed_but_not_what_somebody_writes_to(folder: Path) -> None:
    with AsyncLog(folder / "log") as other:
        other.append(b"0000")
        other.flush()
        with AsyncLog(folder / "log", window=0.01, rotate_bytes=1000, keep=3) as made:
            put(made, 1, 10)
            assert len(segments(folder / "log")) == 1 + 3
        assert numbers(folder) == [0, 7, 8, 9]
    with AsyncLog(folder / "log", keep=3):  # files of runs before count
        assert numbers(folder) == [7, 8, 9]
    assert numbers(folder) == [8, 9], "and one without a record"


def put(made: AsyncLog, first: int, last: int) -> None:
    """Each fills a file of 1000 bytes."""
    for number in range(first, last):
        made.append(b"%04d" % number * 300)
        made.flush()


def test_a_file_that_is_rotated_away_under_a_reader(folder: Path) -> None:
    with AsyncLog(folder / "log", window=0.01, rotate_bytes=1000, keep=3) as made:
        put(made, 0, 5)
        reader = AsyncLog.read(folder / "log")
        seen = [int(next(reader)[:4])]
        put(made, 5, 10)
        seen += [int(record[:4]) for record in reader]
    assert seen == sorted(seen)
    assert len(seen) < 5


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
    with AsyncLog(folder / "log", window=0.01, rotate_bytes=1000, keep=2) as made:
        put(made, 0, 5)
    assert (folder / "victim").read_bytes() == b"untouched"
    assert not (folder / "nowhere").exists()
    assert len(segments(folder / "log")) == 9 + 2, "theirs count for nothing, and are not removed"
    assert numbers(folder) == [3, 4]


# Processes that end


@pytest.mark.parametrize("cycle", [False, True])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_log_that_is_dropped_writes_what_it_has_and_is_gone(folder: Path, cycle: bool) -> None:
    holder: Any = SimpleNamespace(log=AsyncLog(folder / "log", window=0.5 if cycle else 0.05))
    thread, gone = holder.log._thread, weakref.ref(holder.log)
    holder.me = holder if cycle else None
    with warnings.catch_warnings(record=not cycle) as said:
        warnings.simplefilter("error" if cycle else "always")  # which must not keep it from writing
        for number in range(100):
            holder.log.append(b"%d" % number)
        del holder
        wait_until(lambda: gc.collect() < 0 or gone() is None)
        thread.join(30)
    assert not thread.is_alive()
    assert cycle or any("dropped without close" in str(warning.message) for warning in said or ())
    assert numbers(folder) == list(range(100))


# A device that is slow, and signals


@pytest.mark.parametrize("on_full", ["drop", "raise", "block"])
def test_a_device_that_does_not_keep_up(folder: Path, monkeypatch: pytest.MonkeyPatch, on_full: Any) -> None:
    go, sync = threading.Event(), Segment.sync
    monkeypatch.setattr(Segment, "sync", lambda segment: (go.wait(30), sync(segment)))
    made, taken = AsyncLog(folder / "log", window=0.01, buffer_bytes="10K", on_full=on_full), 0
    if on_full == "block":
        timer = threading.Timer(0.2, go.set)
        timer.start()
        taken = sum(made.append(bytes(100)) for _ in range(500))
        assert go.is_set(), "it has waited for the device"
    else:
        refused = pytest.raises(BlockingIOError, match="wait to be written")
        with refused if on_full == "raise" else contextlib.nullcontext():
            while made.append(bytes(100)):
                taken += 1
        assert made.dropped == (on_full == "drop")
        assert 90 < taken < 110
        with pytest.raises(TimeoutError):
            made.flush(timeout=0.05)
    go.set()
    made.close()
    assert len(read(folder)) == taken


def test_a_signal_handler_may_append(folder: Path) -> None:
    made, count = AsyncLog(folder / "log", window=0.01), itertools.count()
    before = signal.signal(signal.SIGALRM, lambda *_: next(count) >= 0 and made.append(b"signal"))
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    try:
        for _ in range(10_000):
            made.append(b"main")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    made.close()
    assert read(folder).count(b"main") == 10_000
    assert read(folder).count(b"signal") == next(count) > 0


# Writing fails for a while


class Disk:
    """Has the calls whose numbers are chosen fail on the thread that writes a log, as a device may let them."""

    def __init__(self, patch: pytest.MonkeyPatch, chosen: Callable[[int], bool]) -> None:
        self.calls, self.chosen, self.durable = 0, chosen, dict[str, int]()
        for name in ("open", "pwrite", "fdatasync", "fsync", "ftruncate", "unlink"):
            patch.setattr(os, name, functools.partial(self.call, getattr(os, name), name))

    def call(self, real: Callable[..., Any], name: str, *given: Any) -> Any:
        if threading.current_thread().name != "nvme_ops.log":
            return real(*given)
        self.calls += 1
        path = os.readlink(f"/proc/self/fd/{given[0]}") if name in ("pwrite", "fdatasync") else ""
        if self.chosen(self.calls):
            if name == "pwrite":
                real(given[0], bytes(given[1][: len(given[1]) // 2]) + b"torn" * 99, given[2])
            if name == "fdatasync":  # Linux tells of it once, and forgets the pages
                os.truncate(path, self.durable.get(path, 0))
            raise MemoryError("of the test") if self.calls % 3 == 0 else OSError(errno.EIO, "of the test")
        if name == "fdatasync":
            self.durable[path] = os.path.getsize(path)
        return real(*given)


def again(do: Callable[[], object]) -> None:
    """Does it until it succeeds."""
    for _ in range(1000):
        with contextlib.suppress(OSError, MemoryError):
            do()
            return
        time.sleep(0.0005)
    raise AssertionError("it fails for ever")


def survives(folder: Path, chosen: Callable[[int], bool], count: int = 24) -> int:
    """Writes records while calls fail, each of which must come once, in order; returns how many calls there were."""
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log_file, "_BLOCK", 5)
        made = AsyncLog(folder / "log", window=0.004, rotate_bytes=150)
        disk = Disk(patch, chosen)
        for number in range(count):
            again(lambda: made.append(b"%04d" % number))  # noqa: B023
            if number % 8 == 7:
                again(made.flush)
        again(made.close)
        made.close()
    assert numbers(folder) == list(range(count))
    assert not [fd for fd in Path("/proc/self/fd").iterdir() if str(folder) in os.path.realpath(fd)]
    return disk.calls


@pytest.mark.filterwarnings("error::RuntimeWarning")  # of what is damaged
def test_any_call_that_fails_once_loses_and_repeats_nothing(folder: Path) -> None:
    for number in range(1, survives(folder / "0", lambda _: False) + 1):
        survives(folder / str(number), lambda call: call == number)  # noqa: B023


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("seed", range(2))
def test_calls_that_fail_now_and_then_lose_and_repeat_nothing(folder: Path, seed: int) -> None:
    draw = random.Random(seed)
    survives(folder / "work", lambda _: draw.random() < 0.3, 200)


def test_a_failure_that_passes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All who append meanwhile are told, and no traceback keeps what theirs was made of."""

    def fail(*_: object) -> None:
        raise MemoryError("of the test")

    made = AsyncLog(folder / "log", window=0.1)
    with monkeypatch.context() as failing:
        failing.setattr(Segment, "write", fail)
        made.append(b"one")
        wait_until(lambda: made._failure)
        for _ in range(20):
            with pytest.raises(MemoryError, match="of the test") as caught:
                made.append(b"two")
        assert len(list(traceback.walk_tb(caught.value.__traceback__))) < 9
        with pytest.raises(MemoryError, match="of the test"):
            made.flush(5)
        assert len(segments(folder / "log")) == 1, "no file for each attempt"
    made.flush()
    made.close()
    assert read(folder) == [b"one"]


def test_a_file_that_is_removed_under_the_log(folder: Path) -> None:
    made, taken = AsyncLog(folder / "log", window=0.05), []
    made.append(b"gone")
    made.flush()
    os.unlink(folder / "log.000000")
    for number in range(100):
        with contextlib.suppress(FileNotFoundError):  # "was removed while it was written to"
            made.append(b"%d" % number)
            taken.append(number)
        time.sleep(0.002)
    with contextlib.suppress(FileNotFoundError):
        made.flush()
    made.close()
    assert numbers(folder) == taken
    assert len(taken) < 100


# Damage

RECORDS = [bytes([65 + number]) * 100 for number in range(10)]
BLOCK = 20 + 4 + 100  # bytes of a block of one of them


def unended(folder: Path, records: list[bytes]) -> Path:
    """A file with a block for each record, as a writer that was killed leaves it."""
    segment = Segment.new(str(folder / "log"))
    for record in records:
        segment.write([record])
    segment.sync()
    segment.close()
    return Path(segment.path)


@pytest.mark.parametrize("number", [0, 5])
def test_a_flipped_bit_loses_its_block_alone(folder: Path, number: int) -> None:
    path = unended(folder, RECORDS)
    words = f"log.000000: damaged from byte {number * BLOCK} to {(number + 1) * BLOCK}; what was there is lost"
    for place in (0, 5, 8, 12, 19, 20, 24, BLOCK - 1):
        flip(path, number * BLOCK + place)
        with pytest.warns(RuntimeWarning, match=words):
            assert read(folder) == RECORDS[:number] + RECORDS[number + 1 :]
        flip(path, number * BLOCK + place)


@pytest.mark.parametrize(("blocks", "searched"), [(1, 1 << 20), (3, 50), (1, 7)])
def test_zeros_lose_the_blocks_they_are_over(
    folder: Path, monkeypatch: pytest.MonkeyPatch, blocks: int, searched: int
) -> None:
    monkeypatch.setattr(log_file, "_SEARCHED", searched)
    path = unended(folder, RECORDS)
    content = path.read_bytes()
    path.write_bytes(content[: 2 * BLOCK] + bytes(blocks * BLOCK) + content[(2 + blocks) * BLOCK :])
    with pytest.warns(RuntimeWarning, match=f"from byte {2 * BLOCK} to {(2 + blocks) * BLOCK};"):
        assert read(folder) == RECORDS[:2] + RECORDS[2 + blocks :]


@pytest.mark.parametrize(("behind", "damaged"), [([], 0), ([b"last"], 1), ([], 2)])
def test_a_block_within_a_record_is_not_taken_for_one_of_the_log(
    folder: Path, behind: list[bytes], damaged: int
) -> None:
    (folder / "other").mkdir()
    inner = unended(folder / "other", [b"of another log"]).read_bytes() + b"end"
    path = unended(folder, [b"first", *[inner] * max(1, damaged), *behind])
    for number in range(damaged):
        flip(path, 20 + 4 + 5 + (number + 1) * (20 + 4 + len(inner)) - 1)
    if not damaged:  # its end is torn off
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.warns(RuntimeWarning, match="is lost") if behind or damaged > 1 else contextlib.nullcontext():
        assert read(folder) == [b"first", *behind]


def test_lengths_that_are_not_those_of_the_block_lose_it(folder: Path) -> None:
    """Though its checksum is right: whoever wrote it was wrong."""
    path = unended(folder, RECORDS[:2])
    whole = path.read_bytes()
    for sizes in ((4, 1), (3, 0), (2**32 - 1, 5)):
        rest = struct.pack("<IQ2I", 2, 4, *sizes) + b"abcd"
        liar = b"NVLG" + struct.pack("<I", checksums_of([rest], "crc32c")[0]) + rest
        path.write_bytes(whole[:BLOCK] + liar + whole[BLOCK:])
        with pytest.warns(RuntimeWarning, match=f"damaged from byte {BLOCK} to {BLOCK + len(liar)};"):
            assert read(folder) == RECORDS[:2]


def test_a_torn_end_is_skipped_and_damage_in_an_ended_file_is_an_error(folder: Path) -> None:
    whole = unended(folder, [*RECORDS, b"x" * 300]).read_bytes()
    torn = folder / "torn.000000"
    for cut in (1, 19, 30, 200, 323):
        for content in (whole[:-cut], whole[:-cut] + bytes([whole[-cut] ^ 1]) + whole[len(whole) - cut + 1 :]):
            torn.write_bytes(content)
            assert read(folder, "torn") == RECORDS
    with AsyncLog(folder / "torn") as made:
        made.append(b"after")
    assert read(folder, "torn") == [*RECORDS, b"after"]
    flip(folder / "torn.000001", 21)
    with pytest.raises(FormatError, match="damaged at byte 0"):
        read(folder, "torn")
