"""Locks between processes, and what interrupts whoever holds one."""

from __future__ import annotations

import fcntl
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from nvme_ops.storage import files
from nvme_ops.storage.files import Lock, locked
from nvme_ops.storage.publication import Publication, ReadLease
from tests.moments import Interrupt


@pytest.mark.usefixtures("unraisable")  # what is raised while Python frees an object is lost
def test_ctrl_c_at_any_moment_leaves_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The traceback, and with it the block that was left, is still there when the next one comes."""
    monkeypatch.setattr(files, "_PATIENCE", 0.0)
    monkeypatch.setattr(fcntl, "flock", without_waiting)
    path = str(tmp_path / "model")

    def hold() -> None:
        with locked(path):
            pass

    with Interrupt() as all_of_it:
        hold()
    assert all_of_it.count > 10
    for number in range(2, all_of_it.count + 1):  # before the first there is nothing
        try:
            with Interrupt(number) as moment:
                hold()
        except KeyboardInterrupt:
            Lock(path).release()
        assert os.listdir(tmp_path) == [], moment.where


def without_waiting(file: Any, kind: int, flock: Any = fcntl.flock) -> None:
    flock(file, kind | (0 if kind & fcntl.LOCK_UN else fcntl.LOCK_NB))


def test_who_is_patient_waits_for_one_that_only_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lock").touch()
    looking, taking = (os.open(tmp_path / "lock", os.O_RDWR) for _ in range(2))
    monkeypatch.setattr(time, "sleep", lambda seconds: fcntl.flock(looking, fcntl.LOCK_UN) if seconds else None)
    fcntl.flock(looking, fcntl.LOCK_EX)
    assert not files.try_lock(taking)
    assert files.try_lock(taking, patient=True)
    os.close(looking)
    os.close(taking)


def test_a_manifest_stays_while_it_is_read_and_no_longer_for_a_child_that_lives_on(folder: Path) -> None:
    manifest = folder / "manifest"
    manifest.write_bytes(b"old")
    lease = ReadLease(str(manifest))
    child = os.fork()
    if child == 0:
        signal.pause()
    try:
        with Publication(str(manifest)) as publication:
            publication.publish(b"new", leases=True)
            names_in = lambda _, fd: [os.pread(fd, 9, 0).decode()]  # noqa: E731
            assert publication.leased(names_in) == {"old"}
            lease.end()
            assert publication.leased(names_in) == set()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert [each.name for each in folder.iterdir()] == ["manifest"]
    assert manifest.read_bytes() == b"new"
