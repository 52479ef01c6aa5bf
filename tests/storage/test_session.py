"""``Session``: folders of ours that others cannot meet, removed when they are done with, whatever happened."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nvme_ops.storage import Session, locks
from tests.conftest import NOBODY, REPOSITORY, give_up_root, in_child, in_threads, open_to_all, run_python


def ours(folder: Path) -> list[Path]:
    return sorted(folder.glob(".nvme_ops-*"))


def write(session: Session, name: str = "data", content: bytes = b"content") -> Path:
    fd = session.open(0, name)
    os.write(fd, content)
    os.close(fd)
    return Path(session.path(0, name))


def crashed(folder: Path, name: str = "job", options: str = "") -> Path:
    """What a process leaves that is killed with a session."""
    run_python(
        f"""
        import os, signal, sys
        from nvme_ops.storage import Session
        session = Session(sys.argv[1], name={name!r}{options})
        os.write(session.open(0, "data"), b"left")
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        folder,
        check=False,
    )
    (left,) = ours(folder)
    return left


class Holder:
    """Another process with a session."""

    def __init__(self, folder: Path, options: str) -> None:
        program = f"""import sys
from nvme_ops.storage import Session
session = Session(sys.argv[1], {options})
print(session.folders[0], flush=True)
sys.stdin.readline()"""
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, str(folder)],
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.folder = Path(self.process.stdout.readline().strip())

    def end(self, kill: bool = False) -> None:
        if kill:
            self.process.kill()
        self.process.communicate()


def test_the_folder_is_for_this_user_alone_and_removed_at_close(folder: Path) -> None:
    with Session(folder, name="job") as session:
        (made,) = ours(folder)
        assert session.folders == [str(made)]
        assert made.stat().st_mode & 0o777 == 0o700
        assert write(session).stat().st_mode & 0o777 == 0o600
    assert session.closed
    assert ours(folder) == []
    session.close()


def test_names_are_hashed(folder: Path) -> None:
    with Session(folder, name="../läufe/\ud800/" + "x" * 300) as session:
        path = write(session, "a/../b" * 100)
        assert path.parent.parent == folder
        assert path.read_bytes() == b"content"


def test_each_place_has_a_folder(folder: Path) -> None:
    places = [folder / "a", folder / "b"]
    for place in places:
        place.mkdir()
    with Session(places, name="job") as session:
        assert [Path(each).parent for each in session.folders] == places
        assert Path(session.path(1, "data")).parent.parent == places[1]
    assert [ours(place) for place in places] == [[], []]


@pytest.mark.parametrize("ending", ["pass", "1 / 0", "del session", "sys.exit(3)"])
def test_removed_at_exit(folder: Path, ending: str) -> None:
    program = "import sys\nfrom nvme_ops.storage import Session\nsession = Session(sys.argv[1], name='job')\n"
    run_python(program + f"session.open(0, 'data')\n{ending}", folder, check=False)
    assert ours(folder) == []


def test_one_that_is_dropped_is_removed(folder: Path) -> None:
    session = Session(folder, name="job")
    del session
    assert ours(folder) == []


def test_the_next_one_removes_what_a_crash_has_left(folder: Path) -> None:
    left = crashed(folder)
    with Session(folder, name="another"):
        assert not left.exists()


def test_one_in_use_is_not_taken_for_a_leftover(folder: Path) -> None:
    holder = Holder(folder, "name='job'")
    with Session(folder, name="job") as session:
        assert holder.folder.exists()
        assert session.folders != [str(holder.folder)]
    assert holder.folder.exists()
    holder.end()
    assert ours(folder) == []


@pytest.mark.parametrize("foreign", ["notes.txt", "f" * 31, "folder/"])
def test_a_foreign_file_in_our_folder_stays(folder: Path, foreign: str) -> None:
    left = crashed(folder)
    planted = left / foreign
    if foreign.endswith("/"):
        planted.mkdir()
    else:
        planted.write_text("mine")
    Session(folder, name="job").close()
    assert planted.exists()
    assert sorted(each.name for each in left.iterdir()) == sorted([planted.name, "owner"])


def test_what_a_planted_link_points_to_stays(folder: Path) -> None:
    victim = folder / "victim"
    victim.write_text("mine")
    with Session(folder, name="job") as session:
        path = Path(session.path(0, "data"))
        path.symlink_to(victim)
        with pytest.raises(OSError, match="symbolic links") as caught:
            session.open(0, "data")
        assert (caught.value.errno, caught.value.filename) == (errno.ELOOP, str(path))
        made = path.parent
    assert victim.read_text() == "mine"
    assert path.is_symlink()  # which nobody but its owner removes
    path.unlink()
    assert made.exists()


@pytest.mark.parametrize("kind", ["hard link", "pipe", "folder"])
def test_what_is_planted_under_a_name_of_ours_is_refused(folder: Path, kind: str) -> None:
    victim = folder / "victim"
    victim.write_text("mine")
    with Session(folder, name="job") as session:
        path = Path(session.path(0, "data"))
        make: Callable[[], object] = {
            "hard link": lambda: os.link(victim, path),
            "pipe": lambda: os.mkfifo(path),
            "folder": path.mkdir,
        }[kind]
        make()
        with pytest.raises(OSError, match=r"not a file of this session's alone|directory") as caught:
            session.open(0, "data")
        assert caught.value.filename == str(path)
    assert victim.read_text() == "mine"


def test_a_folder_that_others_may_write_to_is_left_alone(folder: Path) -> None:
    left = crashed(folder)
    left.chmod(0o777)
    Session(folder, name="job").close()
    assert len(list(left.iterdir())) == 2


def test_a_kept_session_in_a_folder_that_others_may_write_to_is_refused(folder: Path) -> None:
    left = crashed(folder, options=", reuse=True")
    left.chmod(0o722)
    with pytest.raises(PermissionError, match="nobody else may write to") as caught:
        Session(folder, name="job", reuse=True)
    assert caught.value.filename == str(left)


def test_a_folder_of_another_user_is_left_alone_and_refused(folder: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("to give a folder to another user needs root")
    left = crashed(folder)
    os.chown(left, NOBODY, NOBODY)
    Session(folder, name="job").close()
    assert len(list(left.iterdir())) == 2
    with Session(folder, name="kept", reuse=True) as session:
        path = Path(session.folders[0])
    os.chown(path, NOBODY, NOBODY)
    with pytest.raises(PermissionError, match="not a folder of this user's"):
        Session(folder, name="kept", reuse=True)


def test_an_owner_that_is_a_link_is_not_followed(folder: Path) -> None:
    left = crashed(folder, options=", reuse=True")
    victim = folder / "victim"
    victim.write_bytes((left / "owner").read_bytes())
    (left / "owner").unlink()
    (left / "owner").symlink_to(victim)
    before = victim.read_bytes()
    with pytest.raises(OSError, match="symbolic links"):
        Session(folder, name="job", reuse=True)
    Session(folder, name="another").close()
    assert victim.read_bytes() == before
    assert len(list(left.iterdir())) == 2


@pytest.mark.parametrize("garbage", [b"\x00\xff", b"[]", b'{"magic": "another program"}', b"{", b"12"])
def test_an_owner_that_is_no_session_s_is_left_alone(folder: Path, garbage: bytes) -> None:
    left = crashed(folder, options=", reuse=True")
    (left / "owner").write_bytes(garbage)
    Session(folder, name="another").close()
    with pytest.raises(FileExistsError, match="not the file of a session") as caught:
        Session(folder, name="job", reuse=True)
    assert caught.value.filename == str(left / "owner")
    assert (left / "owner").read_bytes() == garbage
    assert len(list(left.iterdir())) == 2


def test_a_folder_without_an_owner_is_a_leftover_when_it_is_empty(folder: Path) -> None:
    left = crashed(folder)
    (left / "owner").unlink()
    Session(folder, name="job").close()
    assert len(list(left.iterdir())) == 1
    next(left.iterdir()).unlink()
    Session(folder, name="job").close()
    assert ours(folder) == []


def test_a_kept_session_is_taken_over(folder: Path) -> None:
    with Session(folder, name="job", reuse=True, fingerprint="1") as session:
        assert not session.found
        path = write(session)
    Session(folder, name="another").close()
    with Session(folder, name="job", reuse=True, fingerprint="1") as session:
        assert session.found
        assert path.read_bytes() == b"content"


def test_a_kept_session_outlives_a_crash(folder: Path) -> None:
    left = crashed(folder, options=f", reuse=True, fingerprint={'x' * 100_000!r}")
    with Session(folder, name="job", reuse=True, fingerprint="x" * 100_000) as session:
        assert session.found
        assert session.folders == [str(left)]
        assert Path(session.path(0, "data")).read_bytes() == b"left"


@pytest.mark.parametrize("fingerprint", ["", "2", "1" * 9])
def test_with_another_fingerprint_it_is_emptied(folder: Path, fingerprint: str) -> None:
    with Session(folder, name="job", reuse=True, fingerprint="1") as session:
        path = write(session)
    with Session(folder, name="job", reuse=True, fingerprint=fingerprint) as session:
        assert not session.found
        assert not path.exists()
    with Session(folder, name="job", reuse=True, fingerprint=fingerprint) as session:
        assert session.found


def test_a_kept_session_in_use_is_refused(folder: Path) -> None:
    holder = Holder(folder, "name='job', reuse=True")
    with pytest.raises(BlockingIOError, match=f"'job' is in use by process {holder.process.pid}") as caught:
        Session(folder, name="job", reuse=True)
    assert caught.value.filename == str(holder.folder)
    holder.end(kill=True)
    with Session(folder, name="job", reuse=True) as session:
        assert session.found


def test_of_those_who_come_at_once_one_gets_a_kept_session(folder: Path) -> None:
    got: list[Session] = []

    def ask(_: int) -> None:
        try:
            got.append(Session(folder, name="job", reuse=True))
        except BlockingIOError:
            return

    for _ in range(10):
        in_threads(ask, 4)
        assert len(got) == 1
        got.pop().close()


def test_sessions_begin_and_end_beside_each_other(folder: Path) -> None:
    def work(number: int) -> None:
        for turn in range(30):
            with Session(folder, name=f"job{turn % 2}") as session:
                path = write(session, content=str(number).encode())
                assert path.read_bytes() == str(number).encode()

    in_threads(work, 4)
    assert ours(folder) == []


@pytest.mark.parametrize("depth", [1, 2])
def test_a_forked_child_neither_removes_nor_keeps_the_lock(folder: Path, depth: int) -> None:
    session = Session(folder, name="job", reuse=True)
    path = write(session)

    def child() -> None:
        with pytest.raises(PermissionError, match="the parent's"):
            session.open(0, "data")
        other = os.open("/dev/null", os.O_RDONLY)  # perhaps of the number that the lock had
        if depth == 2:
            in_child(lambda: os.fstat(other) and None)
        session.close()
        os.fstat(other)

    in_child(child)
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:  # lives on while the session ends
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    try:
        session.close()
        with Session(folder, name="job", reuse=True) as again:
            assert again.found
            assert path.exists()
    finally:
        os.close(writing)
        os.waitpid(pid, 0)


def test_a_child_forked_while_somebody_looks_has_no_lock_for_as_long_as_it_lives(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    children = []
    take = locks.take

    def take_and_fork(fd: int, *arguments: Any, **options: Any) -> bool:
        taken = take(fd, *arguments, **options)
        children.append(os.fork())  # as another thread may
        if children[-1] == 0:
            signal.pause()
        return taken

    monkeypatch.setattr(locks, "take", take_and_fork)
    try:
        for found in (False, True, True):
            with Session(folder, name="job", reuse=True) as session:
                assert session.found == found
        assert len(children) == 5  # each looked at what there was, and opened it
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def test_the_exit_of_a_forked_child_removes_nothing(folder: Path) -> None:
    program = """
    import os, sys
    from nvme_ops.storage import Session
    session = Session(sys.argv[1], name="job")
    if os.fork() == 0:
        sys.exit()
    os.wait()
    assert os.path.exists(session.folders[0])
    """
    run_python(program, folder)
    assert ours(folder) == []


def test_a_folder_that_vanished(folder: Path) -> None:
    session = Session(folder, name="job")
    (made,) = ours(folder)
    (made / "owner").unlink()
    made.rmdir()
    with pytest.raises(FileNotFoundError) as caught:
        session.open(0, "data")
    assert str(caught.value.filename).startswith(str(made))
    session.close()


def test_what_is_no_folder(folder: Path) -> None:
    (folder / "file").touch()
    with pytest.raises(NotADirectoryError) as caught:
        Session(folder / "file", name="job")
    assert caught.value.filename == str(folder / "file")
    with pytest.raises(FileNotFoundError):
        Session([folder, folder / "none" / "below"], name="job")
    with pytest.raises(ValueError, match="at least one"):
        Session([], name="job")
    assert ours(folder) == []


def test_no_permission(folder: Path) -> None:
    open_to_all(folder)
    (folder / "place").mkdir(mode=0o755)
    (folder / "closed" / "inner").mkdir(parents=True)
    (folder / "closed").chmod(0o700 if os.geteuid() == 0 else 0)

    def child() -> None:
        give_up_root()
        if os.access(folder / "place", os.W_OK):
            (folder / "place").chmod(0o555)
        for place in ("place", "closed/inner"):
            with pytest.raises(PermissionError) as caught:
                Session(folder / place, name="job")
            assert str(caught.value.filename).startswith(str(folder / place))

    in_child(child)
    (folder / "closed").chmod(0o700)


def refuse_locks(*_: object) -> None:
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def test_without_locks_a_living_process_is_told_by_its_number(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    holder = Holder(folder, "name='job', reuse=True")
    monkeypatch.setattr(fcntl, "flock", refuse_locks)
    with pytest.raises(BlockingIOError, match=f"process {holder.process.pid}"):
        Session(folder, name="job", reuse=True)
    holder.end()
    for _ in range(2):  # closed by this process, which lives
        Session(folder, name="job", reuse=True).close()


def test_without_locks_a_leftover_is_told_by_number_and_boot(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    holder = Holder(folder, "name='job'")
    monkeypatch.setattr(fcntl, "flock", refuse_locks)
    Session(folder, name="another").close()
    assert holder.folder.exists()
    holder.end(kill=True)
    owner = json.loads((holder.folder / "owner").read_text())
    changes: list[tuple[dict[str, object], bool]] = [
        ({"boot": "before", "machine": "elsewhere"}, True),  # which may still be running there
        ({"pid": 1}, True),
        ({"boot": "before", "pid": 1}, False),
    ]
    for change, stays in changes:
        (holder.folder / "owner").write_text(json.dumps({**owner, **change}))
        Session(folder, name="another").close()
        assert holder.folder.exists() == stays


def test_two_open_stores_of_one_name_are_refused(folder: Path) -> None:
    class Store:
        def close(self) -> None:
            session.take_back("", self)

        def leave_to_parent(self) -> None:
            """Nothing."""

    session = Session(folder, name="job")
    session.lend("", Store())
    with pytest.raises(ValueError, match="has an open store"):
        session.lend("", Store())
    session.lend("second", Store())
    session.close()
    with pytest.raises(ValueError, match="closed"):
        session.lend("", Store())
    with pytest.raises(ValueError, match="closed"):
        session.path(0, "data")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_owner_written_over_a_longer_one_is_whole(folder: Path, number: int) -> None:
    """Half an owner, written over a longer one, would be neither the old session's nor the new one's."""
    with Session(folder, name="job", reuse=True, fingerprint="long" * 100) as session:
        write(session)
        owner = Path(session.folders[0]) / "owner"
    with Session(folder, name="job", reuse=True, fingerprint="2"):
        assert json.loads(owner.read_text())["fingerprint"] == "2"
    holder = Holder(folder, "name='job', reuse=True, fingerprint='2'")
    holder.process.send_signal(number)
    holder.end()
    with Session(folder, name="job", reuse=True, fingerprint="2") as session:
        assert session.found


def test_a_closed_one_that_is_freed_at_the_very_end_says_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules lose their names before the last object is freed."""
    said: list[Any] = []
    monkeypatch.setattr("sys.unraisablehook", said.append)
    one = Session(folder, name="job")
    one.close()
    with monkeypatch.context() as names:
        names.setattr("nvme_ops.storage.session.contextlib", None)
        del one
    assert said == []
