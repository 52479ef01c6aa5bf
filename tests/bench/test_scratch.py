"""What a run takes of a machine, a folder and huge pages: given back at its end, however it ends, and nothing else."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nvme_ops.filesystem.files import boot_id
from nvme_ops.measure import files, fio, scratch
from nvme_ops.measure.fio import huge_pages
from nvme_ops.measure.scratch import scratch_folder, sweep
from tests.conftest import give_up_root, in_child, in_threads, open_to_all

NAME = "nvme_ops-bench-0123456789abcdef"
WANTED = fio.SIZE // fio.page_size()


@pytest.fixture
def counter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with a number, as /proc/sys/vm/nr_hugepages."""
    monkeypatch.setattr(fio, "COUNTER", str(tmp_path / "nr_hugepages"))
    (tmp_path / "nr_hugepages").write_text("7\n")
    return tmp_path / "nr_hugepages"


def there(counter: Path) -> int:
    return int(counter.read_text().split()[0])


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "place").mkdir()
    return tmp_path / "place"


Hold = Callable[[], tuple[int, Path]]


@pytest.fixture
def hold(place: Path, counter: Path) -> Iterator[Hold]:
    """A process in a session of its own that has a folder and huge pages until SIGUSR1; what it has."""
    started = []

    def start() -> tuple[int, Path]:
        reading, writing = os.pipe()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        child = os.fork()
        if child == 0:
            try:
                os.setsid()
                with scratch_folder(str(place), 0) as made, huge_pages():
                    Path(made, "folder").mkdir()
                    Path(made, "folder", "data").touch()
                    os.write(writing, made.encode())
                    signal.sigwait({signal.SIGUSR1})
            finally:
                os._exit(0)
        started.append(child)
        os.close(writing)
        with open(reading) as pipe:
            return child, Path(pipe.read(len(str(place)) + 1 + len(NAME)))

    yield start
    for child in started:
        with contextlib.suppress(OSError):  # it has been waited for
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})


def left_by_killed(folder: Path, boot: str = "", name: str = NAME) -> Path:
    """As a run leaves it that is killed."""
    made = folder / name
    made.mkdir(mode=0o700)
    (made / f".lock-{boot or boot_id()}").touch()
    (made / "data").write_bytes(b"x")
    return made


def test_what_a_killed_run_had_is_given_back_and_nothing_of_one_that_is_alive(
    place: Path, counter: Path, hold: Hold
) -> None:
    (killed, gone), (alive, stays) = hold(), hold()
    assert there(counter) == 7 + 2 * WANTED
    os.killpg(killed, signal.SIGKILL)  # a terminal tells all processes of a session
    os.waitpid(killed, 0)
    end = time.monotonic() + 10  # a process that keeps them outlives the one that it keeps them for
    while there(counter) != 7 + WANTED and time.monotonic() < end:
        time.sleep(0.01)
    assert there(counter) == 7 + WANTED
    os.kill(alive, signal.SIGSTOP)  # one that is stopped for a while is alive
    with scratch_folder(str(place), 0) as mine:
        assert not gone.exists()
        assert sorted(place.iterdir()) == sorted([stays, Path(mine)])
        with scratch_folder(str(place), 0):
            assert Path(mine).exists(), "the same process is alive too"
    assert (stays / "folder" / "data").exists()
    os.kill(alive, signal.SIGCONT)
    os.kill(alive, signal.SIGUSR1)
    os.waitpid(alive, 0)
    assert list(place.iterdir()) == []
    assert there(counter) == 7


def test_lack_of_space_is_said_when_what_is_left_is_gone(tmp_path: Path) -> None:
    left_by_killed(tmp_path)
    (tmp_path / "nvme_ops-bench-1111111111111111").mkdir()  # of a run that was killed before it had a lock
    with pytest.raises(files.NotUsable, match="of free space are needed"), scratch_folder(str(tmp_path), 1 << 60):
        pass
    assert list(tmp_path.iterdir()) == []


def test_what_others_have_under_a_similar_name_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvme_ops-bench-notes").mkdir()
    (tmp_path / "nvme_ops-bench-0123456789abcdeg").mkdir()
    (tmp_path / NAME).write_text("a file")
    (tmp_path / "nvme_ops-bench-1111111111111111").symlink_to(tmp_path / "elsewhere")
    left_by_killed(tmp_path, name="elsewhere")
    without_lock = tmp_path / "nvme_ops-bench-2222222222222222"
    without_lock.mkdir()
    (without_lock / "data").touch()
    (without_lock / ".lock").touch()
    earlier = left_by_killed(tmp_path, "00000000-0000-0000-0000-000000000000", "nvme_ops-bench-3333333333333333")
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    monkeypatch.setattr(scratch, "_is_local", lambda _: False)
    sweep(str(tmp_path))
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before
    monkeypatch.setattr(scratch, "_is_local", lambda _: True)  # no other host writes there: its owner is dead
    sweep(str(tmp_path))
    assert not earlier.exists()


def test_what_another_user_left_stays(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("another user is needed, which needs root")
    open_to_all(tmp_path)
    theirs = left_by_killed(tmp_path)
    theirs.chmod(0o777)

    def body() -> None:
        give_up_root()
        with scratch_folder(str(tmp_path), 0):
            pass

    in_child(body)
    assert (theirs / "data").exists()


def test_runs_that_begin_at_once_do_not_take_each_other_for_dead(tmp_path: Path) -> None:
    def work(_: int) -> None:
        for _ in range(20):
            with scratch_folder(str(tmp_path), 0) as made:
                Path(made, "data").write_bytes(b"x")
                sweep(str(tmp_path))
                assert Path(made, "data").exists()

    in_threads(work, 4)
    assert list(tmp_path.iterdir()) == []


def test_what_is_still_pending_makes_no_file_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an asynchronous write that a signal has left behind does, which opens its file when its turn comes."""
    late: list[OSError] = []
    with scratch_folder(str(tmp_path), 1 << 20) as made:
        (Path(made) / "data").write_text("data")
        unlink = os.unlink

        def unlink_beside_a_writer(path: str) -> None:
            unlink(path)
            try:
                (Path(made) / "data").write_text("again")
            except OSError as error:
                late.append(error)

        monkeypatch.setattr(os, "unlink", unlink_beside_a_writer)
    assert [type(error) for error in late] == [FileNotFoundError] * 2  # the data and the lock
    assert list(tmp_path.iterdir()) == []


def test_huge_pages_become_as_many_as_before_and_what_others_reserve_meanwhile_stays(
    counter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.suppress(RuntimeError), huge_pages():
        assert there(counter) == 7 + WANTED
        counter.write_text(f"{there(counter) + 3}\n")
        raise RuntimeError
    assert there(counter) == 10
    with huge_pages():
        counter.write_text("5\n")
    assert there(counter) == 0, "what others take back is not taken twice"
    # a kernel without memory for all of them sets its counter to less than was written
    most = "os.pwrite(counter, b'%d\\n' % min(20, int(os.pread(counter, 64, 0))), 0)\n    changed ="
    monkeypatch.setattr(fio, "_KEEPER", fio._KEEPER.replace("changed =", most))
    counter.write_text("17\n")
    with huge_pages():
        assert there(counter) == 20
    assert there(counter) == 17
