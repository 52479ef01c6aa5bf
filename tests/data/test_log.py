"""``AsyncLog``: each record comes once, and nothing is lost but what its window allows, whoever dies or fails."""

from __future__ import annotations

import contextlib
import errno
import functools
import gc
import json
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

from nvme_ops.data import AsyncLog, log_file
from nvme_ops.data.log_file import Segment, segments
from nvme_ops.errors import FormatError
from nvme_ops.tensors import checksums_of
from tests.conftest import give_up_root, in_child, in_threads, open_to_all, watched
from tests.contract.faulty import flip


@pytest.fixture
def folder(quick_folder: Path) -> Path:
    return quick_folder


def record(number: int) -> bytes:
    return f"{number}:".encode() + bytes([number % 256]) * (number * 7 % 200)


def read(folder: Path, name: str = "log") -> list[bytes]:
    return list(AsyncLog.read(folder / name))


def numbers(folder: Path) -> list[int]:
    return [int(each[:4]) for each in read(folder)]


def wait_until(said: Callable[[], object], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not said():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


# Records


@pytest.mark.parametrize("options", [{}, {"rotate_bytes": "10K", "window": 0.01}])
def test_records_come_back(folder: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    monkeypatch.setattr(log_file, "_BLOCK_BYTES", 1000)
    sizes = watched(monkeypatch, Segment, "write", lambda _, records: (len(records), sum(map(len, records))))
    given: list[Any] = [record(number) for number in range(3000)]
    given += [b"", bytearray(b"abc"), memoryview(b"view"), "grün", {"loss": 0.5, "step": 3}, bytes(5000)]
    with AsyncLog(folder / "log", **options) as made:
        for number, each in enumerate(given):
            assert made.append(each)
            if number % 200 == 0:
                made.flush()
    found = read(folder)
    assert found[:3000] == given[:3000]
    assert found[3000:3004] == [b"", b"abc", b"view", "grün".encode()]
    assert json.loads(found[3004]) == {"loss": 0.5, "step": 3}
    assert found[3005:] == [bytes(5000)]
    assert all(count == 1 or nbytes <= 1000 for count, nbytes in sizes)
    assert (len(segments(folder / "log")) > 5) == ("rotate_bytes" in options)
    with pytest.raises(FileNotFoundError):
        read(folder, "another")


def test_what_is_flushed_or_waits_for_its_window_can_be_read(folder: Path) -> None:
    with AsyncLog(folder / "log", window=60) as made:
        for count in (1, 2):
            made.append(b"flushed")
            made.flush(timeout=30)
            assert read(folder) == [b"flushed"] * count
    with AsyncLog(folder / "other", window=0.05) as made:
        made.append(b"one")
        wait_until(lambda: read(folder, "other") == [b"one"])


def test_threads_and_processes(folder: Path) -> None:
    """Threads share a log; a child makes its own of the same name."""
    with AsyncLog(folder / "log", window=0.01) as made:
        in_threads(lambda thread: [made.append(f"{thread} {number}") for number in range(2000)] and None, 3)

        def child() -> None:
            with AsyncLog(folder / "log") as own:
                own.append("3 0")

        in_child(child)
    found = [tuple(map(int, entry.split())) for entry in AsyncLog.read(folder / "log")]
    for thread in range(4):
        assert [number for each, number in found if each == thread] == list(range(1 if thread == 3 else 2000))
    assert len(segments(folder / "log")) == 2


@pytest.mark.parametrize(
    ("wrong", "error"),
    [({name: value}, ValueError) for name, value in (
        ("window", 0), ("window", 1e9), ("on_full", "wait"), ("buffer_bytes", 0), ("rotate_bytes", 0), ("keep", 0))]
    + [({name: value}, TypeError) for name, value in (("keep", 1.5), ("rotate_bytes", 1.5), ("buffer_bytes", True))],
)  # fmt: skip
def test_wrong_arguments(folder: Path, wrong: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=next(iter(wrong))):
        AsyncLog(folder / "log", **wrong)
    assert list(folder.iterdir()) == []
    with AsyncLog(folder / "log") as made, pytest.raises(TypeError, match="bytes, a str or a dict, not int"):
        made.append(5)  # type: ignore[arg-type]


# Files that are kept


def test_old_files_are_removed_but_not_what_somebody_writes_to(folder: Path) -> None:
    with AsyncLog(folder / "log") as other:
        other.append(b"other")
        other.flush()
        with AsyncLog(folder / "log", rotate_bytes=1000, keep=3) as made:
            for number in range(1000):
                made.append(record(number))
                if number % 50 == 0:
                    made.flush()
        assert segments(folder / "log")[0].endswith(".000000")
        assert len(segments(folder / "log")) == 3 + 1
        found = read(folder)
        assert found[0] == b"other"
        assert found[1:] == [record(number) for number in range(1000)][-len(found) + 1 :]


def test_keep_counts_the_files_of_runs_before(folder: Path) -> None:
    for number in range(7):
        with AsyncLog(folder / "log", keep=3 if number == 6 else None) as made:
            assert number < 6 or numbers(folder) == [3, 4, 5]
            made.append(b"%d" % number)
    assert numbers(folder) == [4, 5, 6]


def put(made: AsyncLog, first: int, last: int) -> None:
    """Each fills a file of 1000 bytes."""
    for number in range(first, last):
        made.append(b"%04d" % number * 300)
        made.flush()


def test_a_file_that_is_rotated_away_under_a_reader(folder: Path) -> None:
    with AsyncLog(folder / "log", window=0.01, rotate_bytes=1000, keep=3) as made:
        put(made, 0, 5)
        found = []
        for each in AsyncLog.read(folder / "log"):
            found.append(int(each[:4]))
            if len(found) == 1:
                put(made, 5, 10)
    assert found == sorted(found)
    assert len(found) < 5


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
    holder: Any = SimpleNamespace(log=AsyncLog(folder / "log", window=0.05 if not cycle else 0.5))
    thread, gone = holder.log._thread, weakref.ref(holder.log)
    holder.me = holder if cycle else None
    with warnings.catch_warnings(record=not cycle) as said:
        warnings.simplefilter("error" if cycle else "always")  # which must not keep it from writing
        for number in range(100):
            holder.log.append(b"%d" % number)
        time.sleep(0.05 * cycle)
        del holder
        wait_until(lambda: gc.collect() < 0 or gone() is None)
        thread.join(30)
    assert not thread.is_alive()
    assert cycle or any("dropped without close" in str(each.message) for each in said or ())
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
    made, count = AsyncLog(folder / "log", window=0.01), 0

    def handler(*_: object) -> None:
        nonlocal count
        made.append(b"signal")
        count += 1

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    try:
        for _ in range(20_000):
            made.append(b"main")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    made.close()
    assert read(folder).count(b"main") == 20_000
    assert read(folder).count(b"signal") == count > 0


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
@pytest.mark.parametrize("seed", range(3))
def test_calls_that_fail_now_and_then_lose_and_repeat_nothing(folder: Path, seed: int) -> None:
    draw = random.Random(seed)
    survives(folder / "work", lambda _: draw.random() < 0.3, 300)


@pytest.mark.parametrize("kind", [OSError, MemoryError])
def test_a_failure_that_passes(folder: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]) -> None:
    """All who append meanwhile are told, and no traceback keeps what theirs was made of."""

    def fail(*_: object) -> None:
        raise kind("of the test")

    made = AsyncLog(folder / "log", window=0.1)
    with monkeypatch.context() as failing:
        failing.setattr(Segment, "write", fail)
        made.append(b"one")
        wait_until(lambda: made._failure)
        for _ in range(20):
            with pytest.raises(kind, match="of the test") as caught:
                made.append(b"two")
        assert len(list(traceback.walk_tb(caught.value.__traceback__))) < 9
        with pytest.raises(kind, match="of the test"):
            made.flush(5)
        assert len(segments(folder / "log")) == 1, "no file for each attempt"
    made.flush()
    made.close()
    assert read(folder) == [b"one"]


def test_a_file_that_is_removed_under_the_log(folder: Path) -> None:
    made = AsyncLog(folder / "log", window=0.05)
    made.append(b"gone")
    made.flush()
    os.unlink(folder / "log.000000")
    failed = 0
    for number in range(200):
        try:
            made.append(b"%d" % number)
        except FileNotFoundError as error:
            assert "was removed while it was written to" in str(error)  # noqa: PT017
            failed += 1
        time.sleep(0.001)
    with contextlib.suppress(FileNotFoundError):
        made.flush()
    made.close()
    assert numbers(folder) == sorted(numbers(folder))
    assert len(numbers(folder)) == 200 - failed, "all that was taken"


# Damage

RECORDS = [bytes([65 + number]) * 100 for number in range(10)]
BLOCK = 20 + 4 + 100  # bytes of a block of one of them


def unended(folder: Path, records: list[bytes]) -> Path:
    """A file with a block for each record, as a writer that was killed leaves it."""
    segment = Segment.new(str(folder / "log"))
    for each in records:
        segment.write([each])
    segment.sync()
    segment.close()
    return Path(segment.path)


@pytest.mark.parametrize("number", [0, 5])
def test_a_flipped_bit_loses_its_block_alone(folder: Path, number: int) -> None:
    path = unended(folder, RECORDS)
    words = f"log.000000: damaged from byte {number * BLOCK} to {(number + 1) * BLOCK}; what was there is lost"
    for place in (0, 5, 8, 10, 12, 17, 19, 20, 23, 24, 70, BLOCK - 1):
        flip(path, number * BLOCK + place)
        with pytest.warns(RuntimeWarning, match=words):
            assert read(folder) == RECORDS[:number] + RECORDS[number + 1 :]
        flip(path, number * BLOCK + place)


@pytest.mark.parametrize("searched", [1 << 20, 50, 7])
@pytest.mark.parametrize("blocks", [1, 3])
def test_zeros_lose_the_blocks_they_are_over(
    folder: Path, monkeypatch: pytest.MonkeyPatch, blocks: int, searched: int
) -> None:
    monkeypatch.setattr(log_file, "_SEARCHED", searched)
    path = unended(folder, RECORDS)
    content = path.read_bytes()
    path.write_bytes(content[: 2 * BLOCK] + bytes(blocks * BLOCK) + content[(2 + blocks) * BLOCK :])
    with pytest.warns(RuntimeWarning, match=f"from byte {2 * BLOCK} to {(2 + blocks) * BLOCK};"):
        assert read(folder) == RECORDS[:2] + RECORDS[2 + blocks :]


@pytest.mark.parametrize(("behind", "damaged"), [([], 0), ([], 1), ([b"last"], 1), ([], 2), ([b"last"], 2)])
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


def test_a_torn_end_is_skipped(folder: Path) -> None:
    whole = unended(folder, [*RECORDS, b"x" * 300]).read_bytes()
    torn = folder / "torn.000000"
    for cut in (1, 5, 19, 30, 200, 323):
        for content in (whole[:-cut], whole[:-cut] + bytes([whole[-cut] ^ 1]) + whole[len(whole) - cut + 1 :]):
            torn.write_bytes(content)
            assert read(folder, "torn") == RECORDS
    with AsyncLog(folder / "torn") as made:
        made.append(b"after")
    assert read(folder, "torn") == [*RECORDS, b"after"]


def head(count: int, payload: int, body: bytes) -> bytes:
    """A block that says this of itself, under the right checksum."""
    rest = struct.pack("<IQ", count, payload) + body
    return b"NVLG" + struct.pack("<I", checksums_of([rest], "crc32c")[0]) + rest


@pytest.mark.parametrize("sizes", [(4, 1), (3, 3), (0, 0), (2**32 - 1, 5)])
def test_lengths_that_are_not_those_of_the_block_lose_it(folder: Path, sizes: tuple[int, int]) -> None:
    """Though its checksum is right: whoever wrote it was wrong."""
    path = unended(folder, RECORDS[:2])
    liar = head(2, 4, struct.pack("<2I", *sizes) + b"abcd")
    path.write_bytes(path.read_bytes()[:BLOCK] + liar + path.read_bytes()[BLOCK:])
    with pytest.warns(RuntimeWarning, match=f"damaged from byte {BLOCK} to {BLOCK + len(liar)};"):
        assert read(folder) == RECORDS[:2]


def test_damage_in_a_file_that_was_ended_is_an_error(folder: Path) -> None:
    with AsyncLog(folder / "log") as made:
        for each in RECORDS:
            made.append(each)
            made.flush()
    flip(folder / "log.000000", 5 * BLOCK + 50)
    with pytest.raises(FormatError, match=f"damaged at byte {5 * BLOCK}"):
        read(folder)
