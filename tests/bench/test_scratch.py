"""The folder of a run: removed at its end, however it ends, and nothing else."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from nvme_ops.filesystem.files import boot_id
from nvme_ops.measure import files, scratch
from nvme_ops.measure.scratch import scratch_folder, sweep

NAME = "nvme_ops-bench-{}123456789abcdef"


def left_by_killed(folder: Path, number: int = 0, boot: str = "") -> Path:
    """As a run leaves it that is killed."""
    made = folder / NAME.format(number)
    made.mkdir(mode=0o700)
    (made / f".lock-{boot or boot_id()}").touch()
    (made / "data").write_bytes(b"x")
    return made


def test_what_a_killed_run_had_is_removed_and_nothing_of_one_that_is_alive(tmp_path: Path) -> None:
    gone, stays = left_by_killed(tmp_path), left_by_killed(tmp_path, 1)
    with open(stays / f".lock-{boot_id()}", "r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with scratch_folder(str(tmp_path), 0) as mine:
            assert not gone.exists()
            assert sorted(tmp_path.iterdir()) == sorted([stays, Path(mine)])
            with scratch_folder(str(tmp_path), 0):
                assert Path(mine).exists(), "the same process is alive too"
    assert list(tmp_path.iterdir()) == [stays]
    (tmp_path / NAME.format(2)).mkdir()  # of a run that was killed before it had a lock
    with pytest.raises(files.NotUsable, match="of free space are needed"), scratch_folder(str(tmp_path), 1 << 60):
        pass
    assert list(tmp_path.iterdir()) == []


def test_what_others_have_under_a_similar_name_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / NAME.format("g")).mkdir()
    (tmp_path / NAME.format(0)).write_text("a file")
    left_by_killed(tmp_path, 1).rename(tmp_path / "elsewhere")
    (tmp_path / NAME.format(1)).symlink_to(tmp_path / "elsewhere")
    (tmp_path / NAME.format(2) / "without a lock").mkdir(parents=True)
    earlier = left_by_killed(tmp_path, 3, "00000000-0000-0000-0000-000000000000")
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr(scratch, "_is_local", lambda _: False)
    sweep(str(tmp_path))
    assert sorted(tmp_path.rglob("*")) == before
    monkeypatch.setattr(scratch, "_is_local", lambda _: True)  # no other host writes there: its owner is dead
    sweep(str(tmp_path))
    assert not earlier.exists()


def test_what_is_still_pending_makes_no_file_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an asynchronous write that a signal has left behind does, which opens its file when its turn comes."""
    late, unlink = list[bool](), os.unlink

    def unlink_beside_a_writer(path: str) -> None:
        unlink(path)
        late.append(Path(made).exists())

    with scratch_folder(str(tmp_path), 1 << 20) as made:
        (Path(made) / "data").write_text("data")
        monkeypatch.setattr(os, "unlink", unlink_beside_a_writer)
    assert late == [False, False]  # the data and the lock
    assert list(tmp_path.iterdir()) == []
