"""What ``filesystem/files.py`` adds to ``os``: what is flushed, locks of processes, files freed in the background."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import nvme_ops
from nvme_ops.base.native import native
from nvme_ops.data.cli import main as nvme_data
from nvme_ops.filesystem import files
from nvme_ops.filesystem.files import Lock, locked, unlink, wait_until_free
from nvme_ops.filesystem.publication import Publication, ReadLease
from nvme_ops.storage import Session, TensorStore
from tests.conftest import MIB, in_child, living, pattern, watched
from tests.contract.faulty import failing_calls
from tests.moments import Interrupt
from tests.storage.conftest import failing, got, kept

# What is flushed, in which order; and failed flushes


def test_the_last_page_of_a_tensor_does_not_wait_in_the_page_cache(session: Session) -> None:
    with TensorStore(session) as store:
        for key, value in {"small": pattern(100), "large": pattern(MIB + 100), "odd": pattern(5000)[1:]}.items():
            store.put(key, value).result()
            assert torch.equal(got(store, key), value)
        fd = session.open(0, "slab")
        assert native().cached_pages(fd, 0, 0) in (0, None)
        os.close(fd)


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


def test_a_file_system_without_fsync_of_folders_has_durable_saves(folder: Path) -> None:
    """As several network and FUSE file systems, which make names durable by themselves or not at all."""
    for refusal in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
        with failing_calls(["fsync"], refusal) as met:  # data are flushed by fdatasync
            nvme_ops.save({"a": torch.ones(5)}, folder / "saved.pt")
            with kept(folder) as session, TensorStore(session) as store:
                store.put("a", torch.ones(5)).result()
                store.sync()
        assert met
    with failing_calls(["fsync"], errno.EIO), pytest.raises(OSError, match="fsync"):
        nvme_ops.save({"a": torch.ones(5)}, folder / "saved.pt")


def test_a_mode_that_cannot_be_set_may_only_be_stricter(folder: Path) -> None:
    path = folder / "saved.pt"
    for mode in (0o666, 0o640, 0o600):
        nvme_ops.save({"a": torch.ones(5)}, path)
        path.chmod(mode)
        with failing_calls(["fchmod"], errno.EPERM):
            nvme_ops.save({"a": torch.zeros(5)}, path)
        assert stat.S_IMODE(path.stat().st_mode) & ~mode == 0
        assert not nvme_ops.load(path)["a"].any()
    with open(path, "rb") as file, failing_calls(["fchmod"], errno.EPERM):
        files.set_mode(file.fileno(), 0o600)
        with pytest.raises(PermissionError):
            files.set_mode(file.fileno(), 0o400)


def test_a_manifest_that_was_not_replaced_has_one_name(folder: Path) -> None:
    manifest = folder / "manifest"
    with Publication(str(manifest)) as publication:
        publication.publish(b"old")
        with failing_calls(["rename"], errno.EIO), pytest.raises(OSError, match="rename: Input/output error"):
            publication.publish(b"new", leases=True)
    assert [path.read_bytes() for path in folder.iterdir()] == [b"old"]


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is flushed from now on."""
    return watched(monkeypatch, os, "fsync", lambda fd: os.readlink(f"/proc/self/fd/{fd}"))


def test_new_names_are_flushed(folder: Path, synced: list[str]) -> None:
    with nvme_ops.open(folder / "file", "w") as file:
        for _ in range(2):
            file.write(b"abc")
            file.sync()
    assert synced == [str(folder / "file"), str(folder), str(folder / "file")]
    (folder / "source").mkdir()
    (folder / "source" / "file").write_bytes(b"abc")
    assert nvme_data(["convert", str(folder / "source"), str(folder / "a" / "b")]) == 0
    nvme_ops.save({"x": torch.ones(5)}, folder / "c" / "d" / "model")
    assert {str(folder), str(folder / "a"), str(folder / "c"), str(folder / "c" / "d")} <= set(synced)


def test_what_is_written_over_is_no_name_s_any_more(
    folder: Path, monkeypatch: pytest.MonkeyPatch, synced: list[str]
) -> None:
    """The program that replaced it may have been killed before it had flushed the new name."""
    path = folder / "a.safetensors"
    for _ in range(3):
        synced.clear()
        nvme_ops.save({"x": torch.ones(5)}, path, recycle=True)
    assert synced == [str(folder), str(folder)]
    failing(monkeypatch, "fsync", str(folder))
    with pytest.raises(OSError, match="Input/output"):
        nvme_ops.save({"x": torch.ones(5)}, path, recycle=True)
    assert nvme_ops.load(path)["x"].tolist() == [1.0] * 5


def test_a_short_read_is_not_the_end_of_a_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content, real = bytes(range(250)) * 80, os.preadv
    (folder / "file").write_bytes(content)
    monkeypatch.setattr(os, "preadv", lambda fd, parts, offset: real(fd, [parts[0][:3000]], offset))
    with nvme_ops.open(folder / "file") as file:
        assert file.read() == content


# Locks, and what interrupts whoever holds one


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
            Lock(path).close()
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


def test_a_forked_child_has_no_lock_of_its_parents(tmp_path: Path) -> None:
    held = Lock(str(tmp_path / "model"))

    def child() -> None:
        assert held.path not in open_files()
        held.close()

    in_child(child)
    assert held.excludes()
    held.close()
    assert os.listdir(tmp_path) == []


def test_a_manifest_stays_while_it_is_read_but_not_for_a_forked_child(folder: Path) -> None:
    manifest = folder / "manifest"
    manifest.write_bytes(b"old")
    lease = ReadLease(str(manifest))
    with living(), Publication(str(manifest)) as publication:
        publication.publish(b"new", leases=True)
        names_in = lambda _, fd: [os.pread(fd, 9, 0).decode()]  # noqa: E731
        assert publication.leased(names_in) == {"old"}
        lease.close()
        assert publication.leased(names_in) == set()
    assert [path.name for path in folder.iterdir()] == ["manifest"]
    assert manifest.read_bytes() == b"new"


# Large files that lose their names: nobody waits until their blocks are free, and nothing keeps them longer

LARGE = {"a": torch.ones(5 * MIB)}


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Closing the files that lost their names takes until the event."""
    close, free = os.close, threading.Event()

    def wait_and_close(fd: int) -> None:
        if threading.current_thread().name == "nvme_ops.filesystem.files":
            assert free.wait(60)
        close(fd)

    monkeypatch.setattr(os, "close", wait_and_close)
    yield free
    free.set()
    wait_until_free()


def open_files() -> list[str]:
    return [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]


def held(folder: Path) -> int:
    """Files of the folder without a name that this process has open."""
    return sum(name.startswith(f"{folder}/") and name.endswith(" (deleted)") for name in open_files())


def test_a_save_does_not_wait_until_what_it_replaced_is_free(folder: Path, slow: threading.Event) -> None:
    for _ in range(2):
        nvme_ops.save(LARGE, folder / "a.safetensors")
        nvme_ops.save(LARGE, folder, format="sharded")
    assert held(folder) == 2
    slow.set()
    wait_until_free()
    assert held(folder) == 0


@pytest.mark.usefixtures("slow")
def test_small_files_and_those_with_another_name_are_no_matter(folder: Path) -> None:
    for _ in range(2):
        nvme_ops.save({"a": torch.ones(3)}, folder / "small.pt")
    nvme_ops.save(LARGE, folder / "linked.pt")
    os.link(folder / "linked.pt", folder / "other.pt")
    nvme_ops.save(LARGE, folder / "linked.pt")
    assert held(folder) == 0


def test_a_save_waits_where_space_is_scarce(
    folder: Path, slow: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / "a.safetensors"
    for _ in range(2):
        nvme_ops.save(LARGE, path)
    space = os.statvfs(folder)
    scarce = type(space)([*space[:4], 30 * MIB // space.f_frsize, *space[5:]])
    monkeypatch.setattr(os, "statvfs", lambda _: scarce)
    saving = threading.Thread(target=nvme_ops.save, args=(LARGE, path))
    saving.start()
    saving.join(0.2)
    assert saving.is_alive()
    slow.set()
    saving.join()


def test_a_forked_child_keeps_no_blocks(folder: Path) -> None:
    def save() -> None:
        for _ in range(2):
            nvme_ops.save(LARGE, folder / "a.safetensors")
        wait_until_free()
        assert held(folder) == 0

    nvme_ops.save(LARGE, folder / "a.safetensors")
    nvme_ops.save(LARGE, folder / "a.safetensors")
    in_child(save)


def test_without_a_thread_it_is_freed_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    path = folder / "a.safetensors"
    nvme_ops.save(LARGE, path)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    unlink(str(path))
    assert held(folder) == 0
    wait_until_free()
