"""A stream that Ctrl-C interrupts at any moment: what calls that returned have done stays done."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import nvme_ops
from nvme_ops.io import blocks
from tests.conftest import KIB, MIB, pattern
from tests.moments import Interrupt, numbers

RECORD = 10_000
POINTS = 60  # moments that are tried


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK", 64 * KIB)
    monkeypatch.setattr(blocks, "SMALL", 16 * KIB)


def again(call: Callable[..., Any], *arguments: Any) -> Any:
    """Once more when it was interrupted, which happens once."""
    try:
        return call(*arguments)
    except KeyboardInterrupt:
        return call(*arguments)


def write_records(path: Path, mode: str, number: int) -> tuple[int, list[tuple[int, bytes]], int]:
    """How many moments there were, where whole records are to be found, and how many calls were interrupted."""
    kept, interrupted = [], 0
    with Interrupt(number) as moment:
        file = again(nvme_ops.open, path, mode)
        for record in range(1, 45):
            data = bytes([record]) * RECORD
            position = again(file.tell)
            try:
                file.write(data)
            except KeyboardInterrupt:
                interrupted += 1
            else:
                kept.append((position, data))
            if record == 20:
                again(file.flush)
        again(file.close)
    assert file.closed
    return moment.count, kept, interrupted


@pytest.mark.parametrize("mode", ["w", "a"])
def test_what_was_written_is_in_the_file_in_order(folder: Path, mode: str, unraisable: list[Any]) -> None:
    path, before = folder / "file", b"before" if mode == "a" else b""
    for number in numbers(mode, write_records(path, mode, -1)[0], POINTS):
        path.write_bytes(b"before")
        _, kept, interrupted = write_records(path, mode, number)
        content, place = path.read_bytes(), 0
        assert len(kept) == 44 - interrupted >= 43
        assert content.startswith(before)
        for position, data in kept:
            place = content.find(data, place) if mode == "a" else position
            assert content[place : place + RECORD] == data, (number, position, data[0])
            place += RECORD
        assert content.count(kept[-1][1]) == 1
        assert len(content) <= len(before) + (len(kept) + interrupted) * RECORD
    assert not unraisable, "of what was interrupted before it was open"


def test_what_is_read_is_where_the_position_says(folder: Path) -> None:
    path, expected = folder / "file", pattern(MIB).numpy().tobytes()
    path.write_bytes(expected)

    def read_all(number: int) -> int:
        with Interrupt(number) as moment:
            file = again(nvme_ops.open, path)
            while (position := again(file.tell)) < len(expected):
                try:
                    data = file.read(RECORD)
                except KeyboardInterrupt:
                    continue
                assert data == expected[position : position + RECORD], (number, position)
            again(file.close)
        assert file.closed
        return moment.count

    for number in numbers("read", read_all(-1), POINTS):
        read_all(number)
