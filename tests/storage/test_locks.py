"""Locks between processes, and what interrupts whoever holds one."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from nvme_ops.storage import locks
from tests.moments import Interrupt


@pytest.mark.usefixtures("unraisable")  # what is raised while Python frees an object is lost
def test_ctrl_c_at_any_moment_leaves_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The traceback, and with it the block that was left, is still there when the next one comes."""
    monkeypatch.setattr(locks, "_PATIENCE", 0.0)
    monkeypatch.setattr(fcntl, "flock", without_waiting)
    path = str(tmp_path / "model")

    def hold() -> None:
        with locks.locked(path):
            pass

    with Interrupt() as all_of_it:
        hold()
    assert all_of_it.count > 10
    for number in range(2, all_of_it.count + 1):  # before the first there is nothing
        try:
            with Interrupt(number) as moment:
                hold()
        except KeyboardInterrupt:
            locks.Lock(path).release()
        assert os.listdir(tmp_path) == [], moment.where


def without_waiting(file: Any, kind: int, flock: Any = fcntl.flock) -> None:
    flock(file, kind | (0 if kind & fcntl.LOCK_UN else fcntl.LOCK_NB))
