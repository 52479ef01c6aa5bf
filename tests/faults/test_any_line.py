"""Ctrl-C wherever Python can deliver it, in each kind of work: what was complete is there, and the same works again."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import CheckpointException

from tests.faults import capabilities, capabilities_offload
from tests.faults.faulty_cells import NEEDS, Capability, cause_of, named, settled
from tests.moments import Interrupt, numbers

KINDS = named(capabilities, capabilities_offload)
#: What has reasons of its own not to work again, or not to be complete.
APART = {
    "Log": "a flush that was interrupted may have appended its record, which is then there twice",
}
SLACK = 4 << 20  # bytes that an allocator may keep


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


@pytest.mark.parametrize("points", [4, pytest.param(16, marks=pytest.mark.slow)])
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
                assert torch.is_grad_enabled()
                one.check()
                one.work()
                one.check()
            except BaseException as error:
                raise AssertionError(f"after Ctrl-C at moment {number}, {where}") from error
        after = settled()
        lost = 1 + points // 16  # where Ctrl-C comes just as a function of Python returns one
        assert after["descriptors"] <= before["descriptors"] + lost
        assert after["threads"] <= before["threads"] + 1  # one that ends writes is begun when it is first needed
        assert after["memory"] <= before["memory"] + SLACK
    finally:
        torch.set_grad_enabled(True)
        one.close()
