"""Ctrl-C wherever Python can deliver it, in each kind of work: what was complete is there, and the same works again."""

from __future__ import annotations

import os
import random
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from torch.distributed.checkpoint import CheckpointException

import nvme_ops
from tests.faults import capabilities, capabilities_offload
from tests.faults.faulty_cells import NEEDS, Capability, cause_of, named, settled

OURS = str(Path(nvme_ops.__file__).parent)
KINDS = named(capabilities, capabilities_offload)
#: What has reasons of its own not to work again, or not to be complete.
APART = {
    "Log": "a flush that was interrupted may have appended its record, which is then there twice",
}
SLACK = 4 << 20  # bytes that an allocator may keep


class Interrupt:
    """Raises KeyboardInterrupt at the ``number``-th moment of this thread at which Python looks for signals.

    These are the beginning of each function and the end of each call of a function written in C, in files of ours.
    """

    def __init__(self, number: int = -1) -> None:
        self.number, self.count, self.where = number, 0, ""

    def _see(self, frame: FrameType, event: str, function: Any) -> None:
        if event not in ("call", "c_return") or not frame.f_code.co_filename.startswith(OURS):
            return
        if function in (sys.setprofile, os.open, os.dup, os.close):  # Python itself loses a descriptor there
            return
        self.count += 1
        if self.count == self.number:
            self.where = f"{frame.f_code.co_filename[len(OURS) :]}:{frame.f_lineno} {event} {function or ''}"
            raise KeyboardInterrupt

    def __enter__(self) -> Interrupt:
        sys.setprofile(self._see)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)


def interrupted(one: Capability, number: int) -> str:
    """Works, is interrupted, and returns where; nothing if it was not."""
    moment = Interrupt(number)
    try:
        with moment:
            one.work()
    except (KeyboardInterrupt, CheckpointException) as error:
        if not isinstance(cause_of(error), KeyboardInterrupt):
            raise
    return moment.where


def numbers(name: str, count: int, points: int) -> Iterator[int]:
    """Yields the first and the last moment, and others, always the same."""
    chance = random.Random(zlib.crc32(name.encode()))
    yield from sorted({1, count, *(chance.randint(1, count) for _ in range(points - 2))})


@pytest.mark.parametrize("points", [4, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", sorted(set(KINDS) - set(APART)))
def test_ctrl_c_at_any_moment_leaves_what_was_complete(
    name: str, points: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in NEEDS.get(name, "").split():
        pytest.importorskip(each)
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)  # Ctrl-C in what frees an object; pytest keeps it
    one = KINDS[name](tmp_path)
    try:
        one.work()
        one.check()
        with Interrupt() as all_of_it:
            one.work()
        before = settled()
        for number in numbers(name, all_of_it.count, points):
            where = interrupted(one, number)
            try:
                one.check()
                one.work()
                one.check()
            except BaseException as error:
                raise AssertionError(f"after Ctrl-C at moment {number}, {where}") from error
        after = settled()
        assert after["descriptors"] <= before["descriptors"]
        assert after["threads"] <= before["threads"]
        assert after["memory"] <= before["memory"] + SLACK
    finally:
        one.close()
