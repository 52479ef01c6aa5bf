"""Logs with damage lose only what was damaged; logs of processes that end, and over restarts."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from nvme_ops.data import AsyncLog, log_file
from nvme_ops.data.log_file import Segment, segments
from nvme_ops.errors import FormatError
from tests.contract.faulty import flip

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


@pytest.mark.parametrize("place", [0, 5, 8, 10, 12, 17, 19, 20, 23, 24, 70, BLOCK - 1])
@pytest.mark.parametrize("number", [0, 5])
def test_a_flipped_bit_loses_its_block_alone(folder: Path, number: int, place: int) -> None:
    path = unended(folder, RECORDS)
    flip(path, number * BLOCK + place)
    words = f"log.000000: damaged from byte {number * BLOCK} to {(number + 1) * BLOCK}; what was there is lost"
    with pytest.warns(RuntimeWarning, match=words):
        found = list(AsyncLog.read(folder / "log"))
    assert found == RECORDS[:number] + RECORDS[number + 1 :]


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
        assert list(AsyncLog.read(folder / "log")) == RECORDS[:2] + RECORDS[2 + blocks :]


@pytest.mark.parametrize("behind", [[], [b"last"]])
@pytest.mark.parametrize("damaged", [1, 2])
def test_a_block_within_a_record_is_not_taken_for_one_of_the_log(
    folder: Path, behind: list[bytes], damaged: int
) -> None:
    (folder / "other").mkdir()
    record = unended(folder / "other", [b"of another log"]).read_bytes() + b"end"
    path = unended(folder, [b"first", *[record] * damaged, *behind])
    for number in range(damaged):
        flip(path, 20 + 4 + 5 + (number + 1) * (20 + 4 + len(record)) - 1)
    if behind or damaged > 1:
        with pytest.warns(RuntimeWarning, match="what was there is lost"):
            assert list(AsyncLog.read(folder / "log")) == [b"first", *behind]
    else:
        assert list(AsyncLog.read(folder / "log")) == [b"first"]


def test_a_torn_end_within_a_record_that_holds_a_block(folder: Path) -> None:
    (folder / "other").mkdir()
    record = unended(folder / "other", [b"of another log"]).read_bytes() + b"end"
    path = unended(folder, [b"first", record])
    path.write_bytes(path.read_bytes()[:-1])
    assert list(AsyncLog.read(folder / "log")) == [b"first"]


def test_damage_in_a_file_that_was_ended_is_an_error(folder: Path) -> None:
    with AsyncLog(folder / "log") as log:
        for each in RECORDS:
            log.append(each)
            log.flush()
    flip(Path(segments(folder / "log")[0]), 5 * BLOCK + 50)
    with pytest.raises(FormatError, match=f"damaged at byte {5 * BLOCK}"):
        list(AsyncLog.read(folder / "log"))


# Processes and restarts

_KEPT: list[AsyncLog] = []


def _append_and_end(path: str) -> None:
    log = AsyncLog(path, window=60)
    _KEPT.append(log)
    for number in range(1000):
        log.append(b"%d" % number)


def test_a_process_of_multiprocessing_that_ends_without_close(folder: Path) -> None:
    with AsyncLog(folder / "parent") as log:  # whose process has its own end of logs registered
        log.append(b"parent")
        process = multiprocessing.get_context("fork").Process(target=_append_and_end, args=[str(folder / "log")])
        process.start()
        process.join(60)
    assert process.exitcode == 0
    assert [int(each) for each in AsyncLog.read(folder / "log")] == list(range(1000))
    assert list(AsyncLog.read(folder / "parent")) == [b"parent"]


def test_keep_counts_the_files_of_runs_before(folder: Path) -> None:
    for number in range(6):
        with AsyncLog(folder / "log") as log:
            log.append(b"%d" % number)
    with AsyncLog(folder / "log", keep=3) as log:
        assert list(AsyncLog.read(folder / "log")) == [b"3", b"4", b"5"]
        log.append(b"6")
    assert list(AsyncLog.read(folder / "log")) == [b"4", b"5", b"6"]
    assert len(segments(folder / "log")) == 3
