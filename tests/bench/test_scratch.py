"""The folder of a run: removed at its end, and by the next run where it was killed; never one of anybody else."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nvme_ops.measure import files, scratch
from nvme_ops.measure.scratch import scratch_folder, sweep
from nvme_ops.storage.locks import boot_id
from tests.conftest import NOBODY, REPOSITORY, give_up_root, in_child, open_to_all

NAME = "nvme_ops-bench-0123456789abcdef"
HOLDER = """
    import os, sys
    from nvme_ops.measure.scratch import scratch_folder
    with scratch_folder(sys.argv[1], 0) as place:
        os.mkdir(os.path.join(place, "folder"))
        open(os.path.join(place, "folder", "data"), "w").close()
        print(place, flush=True)
        sys.stdin.readline()
"""


@pytest.fixture
def hold(tmp_path: Path) -> Iterator[Callable[..., tuple[subprocess.Popen[str], Path]]]:
    """A process with a folder in ``tmp_path``, until a line is sent to it."""
    started = []

    def start() -> tuple[subprocess.Popen[str], Path]:
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(HOLDER), str(tmp_path)],
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout is not None
        return process, Path(process.stdout.readline().strip())

    yield start
    for process in started:
        process.kill()
        process.communicate()


def left_by_killed(folder: Path, boot: str = "", name: str = NAME) -> Path:
    """As a run leaves it that is killed."""
    place = folder / name
    place.mkdir(mode=0o700)
    (place / f".lock-{boot or boot_id()}").touch()
    (place / "data").write_bytes(b"x")
    return place


def test_it_is_removed_and_lack_of_space_is_said(tmp_path: Path) -> None:
    with scratch_folder(str(tmp_path), 1) as place:
        Path(place, "data").write_bytes(b"x")
    with pytest.raises(files.NotUsable, match="of free space are needed"), scratch_folder(str(tmp_path), 1 << 60):
        pass
    assert list(tmp_path.iterdir()) == []


def test_the_next_run_removes_what_a_killed_one_left_and_nothing_of_one_that_is_alive(
    tmp_path: Path, hold: Callable[..., tuple[subprocess.Popen[str], Path]]
) -> None:
    (killed, gone), (alive, stays) = hold(), hold()
    killed.kill()
    killed.wait()
    assert (gone / "folder" / "data").exists()
    with scratch_folder(str(tmp_path), 0) as place:
        assert sorted(tmp_path.iterdir()) == sorted([stays, Path(place)])
        with scratch_folder(str(tmp_path), 0):
            assert Path(place).exists(), "the same process is alive too"
    assert (stays / "folder" / "data").exists()
    alive.communicate("\n")
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_is_stopped_for_a_while_is_alive(
    tmp_path: Path, hold: Callable[..., tuple[subprocess.Popen[str], Path]]
) -> None:
    process, place = hold()
    process.send_signal(signal.SIGSTOP)
    sweep(str(tmp_path))
    process.send_signal(signal.SIGCONT)
    assert (place / "folder" / "data").exists()


def test_what_is_left_counts_as_free_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def only_without(folder: str, _: int, __: str) -> None:
        assert os.listdir(folder) == []

    left_by_killed(tmp_path)
    monkeypatch.setattr(scratch, "require_space", only_without)
    with scratch_folder(str(tmp_path), 1):
        pass


def test_a_run_that_was_killed_before_it_had_a_lock_leaves_an_empty_folder_that_goes(tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir()
    sweep(str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_what_others_have_under_a_similar_name_stays(tmp_path: Path) -> None:
    (tmp_path / "nvme_ops-bench-notes").mkdir()
    (tmp_path / "nvme_ops-bench-0123456789abcdeg").mkdir()
    (tmp_path / NAME).write_text("a file")
    (tmp_path / "nvme_ops-bench-1111111111111111").symlink_to(tmp_path / "elsewhere")
    left_by_killed(tmp_path, name="elsewhere")
    without_lock = tmp_path / "nvme_ops-bench-2222222222222222"
    without_lock.mkdir()
    (without_lock / "data").touch()
    (without_lock / ".lock").touch()
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    sweep(str(tmp_path))
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before


def test_a_link_in_it_is_removed_and_not_what_it_points_to(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").touch()
    place = left_by_killed(tmp_path)
    (place / "folder").symlink_to(tmp_path / "kept")
    (place / "file").symlink_to(tmp_path / "kept" / "file")
    sweep(str(tmp_path))
    assert list(tmp_path.iterdir()) == [tmp_path / "kept"]
    assert (tmp_path / "kept" / "file").exists()


def test_another_users_is_passed_over_in_silence(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("another user is needed, which needs root")
    open_to_all(tmp_path)
    theirs = left_by_killed(tmp_path)
    os.chown(theirs, NOBODY, NOBODY)
    sweep(str(tmp_path))
    assert (theirs / "data").exists()
    os.chown(theirs, 0, 0)

    def body() -> None:
        give_up_root()
        with scratch_folder(str(tmp_path), 0):
            pass

    in_child(body)
    assert (theirs / "data").exists()


@pytest.mark.parametrize(("local", "stays"), [(True, False), (False, True)])
def test_one_of_an_earlier_start_is_dead_where_no_other_host_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, local: bool, stays: bool
) -> None:
    place = left_by_killed(tmp_path, "00000000-0000-0000-0000-000000000000")
    monkeypatch.setattr(scratch, "_is_local", lambda _: local)
    sweep(str(tmp_path))
    assert place.exists() == stays


def test_what_cannot_be_removed_now_is_removed_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: str) -> None:
        raise PermissionError

    place = left_by_killed(tmp_path)
    (place / "folder").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", refuse)
        sweep(str(tmp_path))
    assert place.exists()
    sweep(str(tmp_path))
    assert not place.exists()


def test_runs_that_begin_at_once_do_not_take_each_other_for_dead(tmp_path: Path) -> None:
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(50):
                with scratch_folder(str(tmp_path), 0) as place:
                    Path(place, "data").write_bytes(b"x")
                    sweep(str(tmp_path))
                    assert Path(place, "data").exists()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert list(tmp_path.iterdir()) == []


def test_what_is_still_pending_makes_no_file_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an asynchronous write that a signal has left behind does, which opens its file when its turn comes."""
    late: list[OSError] = []
    with scratch_folder(str(tmp_path), 1 << 20) as place:
        (Path(place) / "data").write_text("data")
        unlink = os.unlink

        def unlink_beside_a_writer(path: str) -> None:
            unlink(path)
            try:
                (Path(place) / "data").write_text("again")
            except OSError as error:
                late.append(error)

        monkeypatch.setattr(os, "unlink", unlink_beside_a_writer)
    assert all(isinstance(error, FileNotFoundError) for error in late)
    assert len(late) == 2  # the data and the lock
    assert list(tmp_path.iterdir()) == []
