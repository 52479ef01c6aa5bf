"""A stream that is interrupted between any two of its statements: what calls that returned have done stays done."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import nvme_ops
from nvme_ops import file as file_module
from nvme_ops.memory import blocks
from nvme_ops.stream import stream
from tests.conftest import KIB, MIB, pattern

MODULES = (file_module, stream, blocks)
CODE = tuple(str(module.__file__) for module in MODULES)
RECORD = 10_000


class Interrupt(BaseException):
    """As KeyboardInterrupt, or what a signal handler raises."""


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK", 64 * KIB)
    monkeypatch.setattr(blocks, "SMALL", 16 * KIB)


@contextmanager
def interrupted_at(line: int) -> Iterator[list[int]]:
    """Raises Interrupt before the line of that number that runs in the stream or the file object; counts them."""
    count = [0]

    def local(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            count[0] += 1
            if count[0] == line:
                raise Interrupt  # which ends the tracing too
        return local

    def each(frame: FrameType, event: str, _: Any) -> Any:
        # not in the function around a ``with``: signals do not come between its block and its __exit__ (bpo-29988)
        wanted = frame.f_code.co_filename.startswith(CODE) and frame.f_code.co_name != "call"
        return local if wanted else None

    before = sys.gettrace()
    sys.settrace(each)
    try:
        yield count
    finally:
        sys.settrace(before)


def again(call: Callable[..., Any], *arguments: Any) -> Any:
    """Once more when it was interrupted, which happens once."""
    try:
        return call(*arguments)
    except Interrupt:
        return call(*arguments)


def write_records(path: Path, mode: str, line: int) -> tuple[int, list[tuple[int, bytes]], int]:
    """How many lines there were, where whole records are to be found, and how many calls were interrupted."""
    kept, interrupted = [], 0
    with interrupted_at(line) as count:
        file = again(nvme_ops.open, path, mode)
        for number in range(1, 45):
            data = bytes([number]) * RECORD
            position = again(file.tell)
            try:
                file.write(data)
            except Interrupt:
                interrupted += 1
            else:
                kept.append((position, data))
            if number == 20:
                again(file.flush)
        again(file.close)
    assert file.closed
    return count[0], kept, interrupted


def lines_of(run: Callable[[int], int]) -> range:
    """Every line there is, or so many of them as there is time for; all of them: STREAM_LINES=all."""
    total = run(0)
    assert total > 50  # or nothing was interrupted
    return range(1, total + 1, 1 if os.environ.get("STREAM_LINES") == "all" else 17)


@pytest.mark.parametrize("mode", ["w", "a"])
def test_what_was_written_is_in_the_file_in_order(folder: Path, mode: str) -> None:
    path, before = folder / "file", b"before" if mode == "a" else b""
    for line in lines_of(lambda line: write_records(path, mode, line)[0]):
        path.write_bytes(b"before")
        _, kept, interrupted = write_records(path, mode, line)
        content, place = path.read_bytes(), 0
        assert len(kept) == 44 - interrupted >= 43
        assert content.startswith(before)
        for position, data in kept:
            place = content.find(data, place) if mode == "a" else position
            assert content[place : place + RECORD] == data, (line, position, data[0])
            place += RECORD
        assert content.count(kept[-1][1]) == 1
        assert len(content) <= len(before) + (len(kept) + interrupted) * RECORD


def test_what_is_read_is_where_the_position_says(folder: Path) -> None:
    path, expected = folder / "file", pattern(MIB).numpy().tobytes()
    path.write_bytes(expected)

    def read_all(line: int) -> int:
        with interrupted_at(line) as count:
            file = again(nvme_ops.open, path)
            while (position := again(file.tell)) < len(expected):
                try:
                    data = file.read(RECORD)
                except Interrupt:
                    continue
                assert data == expected[position : position + len(data)], (line, position)
                assert data, (line, position)
            again(file.close)
        assert file.closed
        return count[0]

    for line in lines_of(read_all):
        read_all(line)
