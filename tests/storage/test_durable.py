"""What is kept is found again, or refused by name: after damage, short reads, and syncs that failed."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import nvme_ops
from nvme_ops._native import native
from nvme_ops.data.cli import main as nvme_data
from nvme_ops.errors import FormatError
from nvme_ops.storage import Session, TensorStore, journal
from tests.conftest import MIB, pattern, run_python, takes_direct_io

VALUES = {f"key {number}": pattern(3000 + number, number) for number in range(200)}


def kept(folder: Path) -> Session:
    return Session(folder, name="job", reuse=True)


@pytest.fixture
def left(folder: Path) -> Path:
    """The folder of a session that has kept ``VALUES``."""
    with kept(folder) as session, TensorStore(session) as store:
        for key, value in VALUES.items():
            store.put(key, value).result()
        store.sync()
        return Path(session.folders[0])


@pytest.mark.parametrize("nbytes", ["Infinity", "[" * 100_000], ids=["infinity", "nested deeply"])
def test_a_mark_that_says_nonsense_is_damage(nbytes: str, left: Path, folder: Path) -> None:
    assert left.exists()
    with kept(folder) as session, open(session.path(0, "index"), "ab") as file:
        file.write(journal._sealed(f'{{"mark": "0", "bytes": {nbytes}}}'.encode()))
    with kept(folder) as session, pytest.raises(FormatError, match="index is damaged"):
        TensorStore(session)


@pytest.mark.parametrize("content", [b"", b"\0" * 400], ids=["empty", "zeros"])
def test_an_owner_that_was_lost_is_no_licence_to_delete(content: bytes, left: Path, folder: Path) -> None:
    before = {each.name: each.stat().st_size for each in left.iterdir()}
    owner = (left / "owner").read_bytes()
    (left / "owner").write_bytes(content)
    Session(folder, name="another").close()  # which removes what was abandoned
    with pytest.raises(FileExistsError, match="may have what was kept"):
        kept(folder)
    (left / "owner").write_bytes(owner)
    assert {each.name: each.stat().st_size for each in left.iterdir()} == before
    with kept(folder) as session, TensorStore(session) as store:
        assert sorted(store) == sorted(VALUES)


@pytest.mark.parametrize("content", [b"", b"\0" * 512 + b'"name": "job"}', b"{"], ids=["empty", "torn", "cut"])
def test_an_owner_that_was_being_made_is_made_anew(content: bytes, folder: Path) -> None:
    with kept(folder) as session:
        left = Path(session.folders[0])
    (left / "owner").write_bytes(content)
    assert not kept(folder).found


@pytest.mark.parametrize("between", [["b", "a"], ["a"], ["b"], ["a", "c"], ["c", "b"], ["a", "b", "c"]])
def test_a_part_of_a_kept_session_is_not_emptied(folder: Path, between: list[str]) -> None:
    """As where a disk is not mounted. With another fingerprint it is."""
    for name in "abc":
        (folder / name).mkdir()
    both = [folder / "a", folder / "b"]
    with Session(both, name="job", reuse=True) as session:
        paths = [Path(session.path(number, "data")) for number in range(2)]
        for path in paths:
            path.write_bytes(b"content")
    with pytest.raises(FileNotFoundError, match=r"has part \d of 2 of the kept session 'job'"):
        Session([folder / name for name in between], name="job", reuse=True)
    assert list((folder / "c").iterdir()) == []
    with Session(both, name="job", reuse=True) as session:
        assert session.found
        assert [path.read_bytes() for path in paths] == [b"content"] * 2
    with Session([folder / name for name in between], name="job", reuse=True, fingerprint="2") as session:
        assert not session.found


def test_what_changes_in_an_owner_lies_in_one_sector(folder: Path) -> None:
    long = "x" * 3000
    with Session(folder, name=long, reuse=True, fingerprint=long) as session:
        owner = Path(session.folders[0]) / "owner"
        open_ = owner.read_bytes()
    closed = owner.read_bytes()
    assert open_ != closed
    assert open_[512:] == closed[512:]
    with Session(folder, name=long, reuse=True, fingerprint=long) as session:
        assert session.found


def short(read: Callable[..., bytes]) -> Callable[..., bytes]:
    """Reads that return less than was asked, as before a page that cannot be read."""
    return lambda fd, nbytes, offset: read(fd, min(nbytes, 1000), offset)


def test_a_journal_that_is_read_in_parts_is_not_cut(left: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", short(os.pread))
        with kept(folder) as session, TensorStore(session) as store:
            assert sorted(store) == sorted(VALUES)
    with kept(folder) as session, TensorStore(session) as store:
        assert sorted(store) == sorted(VALUES)


def failing(monkeypatch: pytest.MonkeyPatch, call: str, path: str) -> list[int]:
    """Lets the next ``call`` for the file fail, once; returns the list of those that did."""
    real, failed = getattr(os, call), list[int]()

    def fail(fd: int) -> None:
        if not failed and os.path.samefile(f"/proc/self/fd/{fd}", path):
            failed.append(fd)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(fd)

    monkeypatch.setattr(os, call, fail)
    return failed


def test_a_sync_that_failed_stays_failed_until_the_values_are_put_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with kept(folder) as session, TensorStore(session) as store:
        slab = session.path(0, "slab")
        store.put("old", torch.ones(5))
        store.sync()
        store.put("new", torch.ones(6))
        store.put("gone", torch.ones(7))
        assert failing(monkeypatch, "fdatasync", slab) == []
        with pytest.raises(OSError, match="fdatasync") as caught:
            store.sync()
        assert (caught.value.errno, caught.value.filename) == (errno.EIO, slab)
        for _ in range(2):
            with pytest.raises(OSError, match=r"2 tensors put before it may be lost.*'gone', 'new'"):
                store.sync()
        store.put("new", torch.ones(6))
        store.drop("gone")
        store.sync()


def test_a_journal_whose_sync_failed_is_written_anew(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with kept(folder) as session, TensorStore(session) as store:
        store.put("a", torch.ones(5)).result()
        path = session.path(0, "index")
        before = os.stat(path).st_ino
        failing(monkeypatch, "fdatasync", path)
        with pytest.raises(OSError, match="fdatasync") as caught:
            store.sync()
        assert caught.value.filename == path
        store.put("a", torch.ones(5))
        store.sync()
        assert os.stat(path).st_ino != before
    with kept(folder) as session, TensorStore(session) as store:
        assert list(store) == ["a"]


def test_the_last_page_of_a_tensor_does_not_wait_in_the_page_cache(folder: Path) -> None:
    if not takes_direct_io(folder):
        pytest.skip("no O_DIRECT here")
    with Session(folder, name="job") as session, TensorStore(session) as store:
        for key, value in {"small": pattern(100), "large": pattern(MIB + 100), "odd": pattern(5000)[1:]}.items():
            store.put(key, value).result()
            got = store.get(key)
            got.result()
            assert torch.equal(got.tensor, value)
        fd = os.open(session.path(0, "slab"), os.O_RDONLY)
        try:
            assert native().cached_pages(fd, 0, 0) in (0, None)
        finally:
            os.close(fd)


def damage(content: bytes, begin: int) -> bytes:
    return content[:begin] + bytes(min(100, len(content) - begin)) + content[begin + 100 :]


def test_after_a_restart_only_what_was_synced_must_be_whole(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = kept(folder)
    store = TensorStore(session)
    store.put("first", torch.ones(5))
    store.sync()
    lines = Path(session.path(0, "index"))
    durable = lines.stat().st_size
    store.put("second", torch.ones(5))
    store.sync()
    store.put("third", torch.ones(5)).result()
    content = lines.read_bytes()
    store.close()
    session.close()
    monkeypatch.setattr(journal, "boot_id", lambda: "another")
    for begin in range(0, len(content), 20):
        lines.write_bytes(damage(content, begin))
        with kept(folder) as session:
            if begin < durable - 200:
                with pytest.raises(FormatError, match="is damaged"):
                    TensorStore(session)
            elif begin >= durable:
                with TensorStore(session) as store:
                    assert "first" in store


# Files of nvme_ops.open


def test_a_file_whose_sync_failed_stays_failed_until_it_is_written_anew(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / "file"
    with nvme_ops.open(path, "w") as file:
        file.write(b"abc")
        file.flush()
        failing(monkeypatch, "fsync", str(path))
        with pytest.raises(OSError, match="fsync") as caught:
            file.sync()
        assert (caught.value.errno, caught.value.filename) == (errno.EIO, path)
        with pytest.raises(OSError, match="an earlier sync has failed"):
            file.sync()
        file.seek(0)
        file.truncate(0)
        file.write(b"abc")
        file.sync()
    assert path.read_bytes() == b"abc"


def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns a list of what is flushed from now on."""
    real, found = os.fsync, list[str]()

    def fsync(fd: int) -> None:
        found.append(os.readlink(f"/proc/self/fd/{fd}"))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    return found


def test_a_new_file_s_name_is_flushed_with_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = synced(monkeypatch)
    with nvme_ops.open(folder / "file", "w") as file:
        for _ in range(2):
            file.write(b"abc")
            file.sync()
    assert found == [str(folder / "file"), str(folder), str(folder / "file")]


def test_new_folders_names_are_flushed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = synced(monkeypatch)
    (folder / "source").mkdir()
    (folder / "source" / "file").write_bytes(b"abc")
    assert nvme_data(["convert", str(folder / "source"), str(folder / "a" / "b")]) == 0
    nvme_ops.save({"x": torch.ones(5)}, folder / "c" / "d" / "model")
    assert {str(folder), str(folder / "a"), str(folder / "c"), str(folder / "c" / "d")} <= set(found)


def test_what_is_written_over_is_no_name_s_any_more(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program that replaced it may have been killed before it had flushed the new name."""
    path = folder / "a.safetensors"
    for _ in range(2):
        nvme_ops.save({"x": torch.ones(5)}, path, recycle=True)
    found = synced(monkeypatch)
    nvme_ops.save({"x": torch.ones(5)}, path, recycle=True)
    assert found == [str(folder), str(folder)]
    failing(monkeypatch, "fsync", str(folder))
    with pytest.raises(OSError, match="Input/output"):
        nvme_ops.save({"x": torch.ones(5)}, path, recycle=True)
    assert nvme_ops.load(path)["x"].tolist() == [1.0] * 5


def test_a_short_read_is_not_the_end_of_a_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = pattern(20_000).numpy().tobytes()
    (folder / "file").write_bytes(content)
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, parts, offset: real(fd, [parts[0][:3000]], offset))
    with nvme_ops.open(folder / "file") as file:
        assert file.read() == content


# The end of the program


def test_a_save_begun_by_a_daemon_thread_is_waited_for(folder: Path) -> None:
    program = """
import sys, threading, torch, nvme_ops
slow = nvme_ops.aio_handle(block_size=4096, queue_depth=1)
def begin():
    nvme_ops.save_async({"a": torch.arange(1_000_000)}, sys.argv[1], handle=slow)
    begun.set()
    threading.Event().wait()
begun = threading.Event()
threading.Thread(target=begin, daemon=True).start()
begun.wait()
"""
    run_python(program, folder / "a.safetensors")
    assert nvme_ops.load(folder / "a.safetensors")["a"].tolist() == list(range(1_000_000))
