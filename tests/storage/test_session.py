"""``Session``: folders of ours that others cannot meet, removed when they are done with, whatever happened."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nvme_ops.data import AsyncLog, SampleWriter
from nvme_ops.filesystem import files
from nvme_ops.offload import NvmeOptimizer, save_on_nvme, stream_weights, swap_params
from nvme_ops.storage import Session, TensorStore
from tests.conftest import NOBODY, killed_in, living
from tests.storage.conftest import kept


def ours(folder: Path) -> list[Path]:
    return sorted(folder.glob(".nvme_ops-*"))


def write(session: Session, name: str = "data", content: bytes = b"content") -> Path:
    fd = session.open(0, name)
    os.write(fd, content)
    os.close(fd)
    return Path(session.path(0, name))


def crashed(folder: Path, **options: Any) -> Path:
    """What a process leaves that is killed with a session."""
    held: list[Session] = []

    def leave() -> None:
        held.append(Session(folder, name="job", **options))
        write(held[0], content=b"left")

    killed_in(leave)
    (left,) = ours(folder)
    return left


def test_its_folders_are_for_this_user_alone_and_removed_at_close(folder: Path) -> None:
    places = [folder / "a", folder / "b"]
    with Session(places, name="../läufe/\ud800/" + "x" * 300) as session:
        made = [ours(place) for place in places]
        assert [[Path(place)] for place in session.folders] == made
        path = write(session, "a/../b" * 100)
        assert path.parent == made[0][0]
        assert path.parent.stat().st_mode & 0o777 == 0o700
        assert path.stat().st_mode & 0o777 == 0o600
        assert Path(session.path(1, "data")).parent == made[1][0]
    assert [ours(place) for place in places] == [[], []]
    for call in (lambda: session.path(0, "data"), lambda: TensorStore(session)):
        with pytest.raises(ValueError, match="closed"):
            call()


def test_one_that_is_dropped_or_left_by_a_crash_is_removed(folder: Path) -> None:
    session = Session(folder, name="job")
    del session
    assert ours(folder) == []
    left = crashed(folder)
    with Session(folder, name="another"):
        assert not left.exists()


@contextlib.contextmanager
def held(folder: Path, **options: Any) -> Iterator[tuple[int, Path]]:
    """Another process has a session, until it is killed: its number, and the session's folder."""
    sessions: list[Session] = []

    def hold() -> str:
        sessions.append(Session(folder, name="job", **options))
        return sessions[0].folders[0]

    with living(hold) as (child, told):
        yield child, Path(told)


def test_one_in_use_is_not_taken_for_a_leftover(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without locks it is told by its number, and the start of the machine."""
    with held(folder) as (_, other):
        with Session(folder, name="job") as session:
            assert other.exists()
            assert session.folders != [str(other)]
        monkeypatch.setattr(fcntl, "flock", refuse_locks)
        Session(folder, name="another").close()
        assert other.exists()
    owner = json.loads((other / "owner").read_text())
    changes: list[tuple[dict[str, object], bool]] = [
        ({"boot": "before", "machine": "elsewhere"}, True),  # which may still be running there
        ({"pid": 1}, True),
        ({"boot": "before", "pid": 1}, False),
    ]
    for change, stays in changes:
        (other / "owner").write_text(json.dumps({**owner, **change}))
        Session(folder, name="another").close()
        assert other.exists() == stays


def refuse_locks(*_: object) -> None:
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


# What is not ours


def test_foreign_files_in_our_folder_stay(folder: Path) -> None:
    left = crashed(folder)
    (left / "folder").mkdir()
    (left / ("f" * 31)).write_text("mine")
    Session(folder, name="job").close()
    assert sorted(path.name for path in left.iterdir()) == ["f" * 31, "folder", "owner"]


def test_what_is_planted_under_a_name_of_ours_is_refused(folder: Path) -> None:
    victim = folder / "victim"
    victim.write_text("mine")
    with Session(folder, name="job") as session:
        planted = [Path(session.path(0, str(number))) for number in range(4)]
        planted[0].symlink_to(victim)
        os.link(victim, planted[1])
        os.mkfifo(planted[2])
        planted[3].mkdir()
        for number, path in enumerate(planted):
            with pytest.raises(OSError, match=r"that belongs to this session alone|directory|symbolic") as caught:
                session.open(0, str(number))
            assert caught.value.filename == str(path)
    assert victim.read_text() == "mine"
    assert planted[0].is_symlink()  # which nobody but its owner removes


@pytest.mark.parametrize("others", ["may write to it", "own it"])
def test_a_folder_of_others_is_left_alone_and_refused(folder: Path, others: str) -> None:
    def give_away(path: Path) -> None:
        path.chmod(0o722) if others == "may write to it" else os.chown(path, NOBODY, NOBODY)

    if others == "own it" and os.geteuid() != 0:
        pytest.skip("to give a folder to another user needs root")
    left = crashed(folder)
    give_away(left)
    Session(folder, name="job").close()
    assert len(list(left.iterdir())) == 2
    with kept(folder) as session:
        path = Path(session.folders[0])
    give_away(path)
    with pytest.raises(PermissionError, match="not a folder that this user owns and nobody else may") as caught:
        kept(folder)
    assert caught.value.filename == str(path)


def test_an_owner_that_is_a_link_is_not_followed(folder: Path) -> None:
    left, victim = crashed(folder, reuse=True), folder / "victim"
    (left / "owner").rename(victim)
    (left / "owner").symlink_to(victim)
    before = victim.read_bytes()
    with pytest.raises(OSError, match="symbolic links"):
        kept(folder)
    Session(folder, name="another").close()
    assert victim.read_bytes() == before
    assert len(list(left.iterdir())) == 2


def test_an_owner_that_was_lost_or_is_no_session_s_is_no_licence_to_delete(folder: Path) -> None:
    left = crashed(folder, reuse=True)
    owner = (left / "owner").read_bytes()
    for content in (b"\x00\xff", b"[]", b'{"magic": "another program"}', b"", b"\0" * 400):
        (left / "owner").write_bytes(content)
        Session(folder, name="another").close()  # which removes what was abandoned
        words = "not the owner file" if content.strip(b"\0") else "may hold what was kept"
        with pytest.raises(FileExistsError, match=words) as caught:
            kept(folder)
        assert caught.value.filename == str(left / "owner")
        assert (left / "owner").read_bytes() == content
    (left / "owner").write_bytes(owner)
    with kept(folder) as session:
        path = Path(session.path(0, "data"))
        assert path.read_bytes() == b"left"
    path.unlink()
    for content in (b"", b"\0" * 512 + b'"name": "job"}', b"{"):  # as while it was being made: it is made anew
        (left / "owner").write_bytes(content)
        assert not kept(folder).found


def test_a_folder_without_an_owner_is_a_leftover_when_it_is_empty(folder: Path) -> None:
    left = crashed(folder)
    (left / "owner").unlink()
    Session(folder, name="job").close()
    (file,) = left.iterdir()
    file.unlink()
    Session(folder, name="job").close()
    assert not left.exists()


# What is kept


def test_a_kept_session_outlives_a_crash_but_not_another_fingerprint(folder: Path) -> None:
    for fingerprint in ("1", "", "2", "x" * 100_000):
        with kept(folder, fingerprint) as session:
            assert not session.found
            path = Path(session.path(0, "data"))
            assert not path.exists()
            write(session)
        Session(folder, name="another").close()
        with kept(folder, fingerprint) as session:
            assert session.found
            assert path.read_bytes() == b"content"
    left = crashed(folder, reuse=True, fingerprint="crashed")
    with kept(folder, "crashed") as session:
        assert session.found
        assert session.folders == [str(left)]
        assert path.read_bytes() == b"left"


def test_a_part_of_a_kept_session_is_not_emptied(folder: Path) -> None:
    """As where a disk is not mounted. With another fingerprint it is."""
    (folder / "c").mkdir()

    def session(places: str, fingerprint: str = "") -> Session:
        return Session([folder / name for name in places], name="job", reuse=True, fingerprint=fingerprint)

    with session("ab") as first:
        paths = [Path(first.path(number, "data")) for number in range(2)]
        for path in paths:
            path.write_bytes(b"content")
    for others in ("ba", "a", "b", "ac", "cb", "abc"):
        with pytest.raises(FileNotFoundError, match=r"has part \d of 2 of the kept session 'job'"):
            session(others)
        assert list((folder / "c").iterdir()) == []
    with session("ab") as second:
        assert second.found
        assert [path.read_bytes() for path in paths] == [b"content"] * 2
    with session("cb", "2") as third:
        assert not third.found


def test_a_kept_session_in_use_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with held(folder, reuse=True) as (process, other):
        for locks in (fcntl.flock, refuse_locks):
            monkeypatch.setattr(fcntl, "flock", locks)
            with pytest.raises(BlockingIOError, match=f"'job' is in use by process {process}") as caught:
                kept(folder)
            assert caught.value.filename == str(other)
    for _ in range(2):  # closed by this process, which lives
        with kept(folder) as session:
            assert session.found


def test_what_changes_in_an_owner_is_one_sector_and_written_as_a_whole(folder: Path) -> None:
    with kept(folder, "x" * 6000) as session:
        owner = Path(session.folders[0]) / "owner"
        open_ = owner.read_bytes()
    closed = owner.read_bytes()
    assert open_ != closed
    assert open_[512:] == closed[512:]
    with kept(folder, "2"):  # over a longer one
        assert json.loads(owner.read_text())["fingerprint"] == "2"
    assert kept(folder, "2").found


# Threads, processes


def test_a_child_forked_while_somebody_looks_has_no_lock(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    children = []
    take = files.try_lock

    def take_and_fork(fd: int, *arguments: Any, **options: Any) -> bool:
        taken = take(fd, *arguments, **options)
        children.append(os.fork())  # as another thread may
        if children[-1] == 0:
            signal.pause()
        return taken

    monkeypatch.setattr("nvme_ops.storage.session.try_lock", take_and_fork)
    try:
        for expected in (False, True, True):
            with kept(folder) as session:
                assert session.found == expected
        assert len(children) == 5  # each looked at what there was, and opened it
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


# Places that cannot be used


def test_what_is_no_folder(folder: Path, unraisable: list[Any]) -> None:
    (folder / "file").touch()
    with pytest.raises(NotADirectoryError) as caught:
        Session([folder, folder / "file"], name="job")
    assert caught.value.filename == str(folder / "file")
    with pytest.raises(ValueError, match="at least one"):
        Session([], name="job")
    with pytest.raises(TypeError, match="name must be a str"):
        Session(folder, name=1)  # type: ignore[arg-type]
    assert ours(folder) == []
    del caught
    gc.collect()
    assert unraisable == [], "what was not made needs no end"


# The folder that a capability is given


def network() -> Any:
    return nn.Linear(64, 64)


MAKERS: tuple[Callable[[Path], Any], ...] = (
    lambda folder: AsyncLog(folder / "log"),
    SampleWriter,
    lambda folder: NvmeOptimizer(network().parameters(), torch.optim.AdamW, folder),
    lambda folder: swap_params(network(), folder, memory_budget="8M", min_bytes=1),
    save_on_nvme,
    lambda folder: stream_weights(network().requires_grad_(False), folder, memory_budget="8M"),
)


@pytest.mark.parametrize("maker", MAKERS)
def test_the_last_folder_of_a_path_is_made(maker: Callable[[Path], Any], folder: Path) -> None:
    with pytest.raises(FileNotFoundError, match="only the last one of a path is made") as missing:
        maker(folder / "disk" / "job" / "new")
    assert missing.value.filename == str(folder / "disk")
    (folder / "file").write_bytes(b"")
    with pytest.raises(NotADirectoryError, match="Not a directory") as no_folder:
        maker(folder / "file")
    assert no_folder.value.filename == str(folder / "file")
    assert list(folder.iterdir()) == [folder / "file"]
    made = maker(folder / "new")
    assert (folder / "new").is_dir()
    made.close()
