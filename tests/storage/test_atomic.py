"""Whatever befalls a save, the file is the old one or the new one, whole, and the next save clears what was left."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

import nvme_ops
from nvme_ops import aio_handle
from nvme_ops.base.native import native
from nvme_ops.filesystem.publication import replacing
from tests.conftest import give_up_root, in_child, killed_in, open_to_all
from tests.crashing_save import (
    NEW,
    OLD,
    Hooked,
    Outcome,
    assert_untouched,
    beside,
    content,
    fail_at,
    save_under_strace,
)  # fmt: skip

MARK = ".nvme_ops-tmp"
#: What the kernel may answer to the calls by which a file is replaced. EINTR says to try again: the save goes on.
ERRORS = {
    "openat": ("EMFILE", "EINTR"),
    **dict.fromkeys(("newfstatat", "statx", "readlink"), ("EIO",)),
    **dict.fromkeys(("fchmod", "rename"), ("ENOSPC",)),
    "getdents64": ("EIO", "EINTR"),
    "flock": ("EINTR", "ENOLCK"),
    "fcntl": ("EMFILE",),
    **dict.fromkeys(("pwrite64", "io_uring_enter", "io_submit", "fdatasync", "fsync", "close"), ("EIO", "EINTR")),
}


@pytest.fixture
def path(folder: Path) -> Path:
    """A file that holds OLD, alone in its folder."""
    (folder / "models").mkdir()
    path = folder / "models" / "model.safetensors"
    nvme_ops.save(OLD, path)
    return path


# Killed, and failing, at every system call


@pytest.fixture(params=["io_uring"])
def saved(request: pytest.FixtureRequest, path: Path, folder: Path) -> Callable[..., Outcome]:
    """Saves NEW over OLD, or where there was no file, under strace."""
    if (reason := native().backends()[request.param]) is not None:
        pytest.skip(f"{request.param}: {reason}")
    handle = aio_handle(backend=request.param)

    def save(*injections: str, before: str | None = "old", durable: bool = True) -> Outcome:
        nvme_ops.save(OLD, path)
        assert beside(path) == []
        if before is None:
            path.unlink()
        return save_under_strace(lambda: nvme_ops.save(NEW, path, handle=handle, durable=durable), folder, *injections)

    return save


#: In make test the first and the last system call of each name.
CALLS = pytest.mark.parametrize(
    ("saved", "before", "ends"),
    [("io_uring", "old", True), pytest.param("threads", None, False, marks=pytest.mark.slow)],
    indirect=["saved"],
)


def test_what_makes_a_save_durable_comes_in_order(path: Path, saved: Callable[..., Outcome]) -> None:
    """Data, then the name, then the folder. Without durable nothing waits for the device."""
    wanted = ["fdatasync", "rename", "fsync"]
    for durable, calls in ((True, wanted), (False, ["rename"])):
        assert [name for _, name in saved(durable=durable).calls if name in wanted] == calls
        assert content(path) == "new"


@CALLS
def test_an_error_of_any_system_call(path: Path, saved: Callable[..., Outcome], before: str | None, ends: bool) -> None:
    """The save succeeds in spite of it, or names the target and leaves it; a signal is no error."""
    failed = set()
    for name, number in saved(before=before).points(ends):
        for error in ERRORS.get(name, ()):
            outcome = saved(fail_at(name, number, error), before=before)
            where, after = (name, number, error, outcome), content(path)
            assert beside(path) == [], where
            if outcome.status == 0:
                assert after == "new", where
                continue
            assert error != "EINTR", where
            assert (outcome.status, outcome.code, outcome.filename) == (1, getattr(errno, error), str(path)), where
            # by then the new file has its name, though a power failure may take it
            assert after == ("new" if name == "fsync" else before), where
            failed.add(name)
    assert failed >= {"openat", "fdatasync", "rename", "fsync", "close"}


def test_an_error_and_no_way_to_clean_up(path: Path, saved: Callable[..., Outcome]) -> None:
    outcome = saved(fail_at("fdatasync", 1, "ENOSPC"), fail_at("unlink", 1, "EIO"))
    assert (outcome.status, outcome.code, outcome.filename) == (1, errno.ENOSPC, str(path))
    assert content(path) == "old"
    assert len(beside(path)) == 1
    saved()  # which finds no litter


# Failing without strace's help


def refuses(path: Path, code: int, handle: aio_handle | None = None) -> None:
    """``save`` raises this error of the target."""
    with pytest.raises(OSError, match=r"'$") as caught:
        nvme_ops.save(NEW, path, handle=handle, format="safetensors")
    assert (caught.value.errno, caught.value.filename) == (code, str(path))


@pytest.mark.parametrize("mode", [0o555, 0o333, 0o777])
def test_a_folder_without_rights_and_a_read_only_file(path: Path, mode: int) -> None:
    """To write in it, or to open it and make it durable. Who may write to the folder replaces a read-only file."""
    open_to_all(path.parent)
    path.chmod(0o444)
    path.parent.chmod(mode)

    def child() -> None:
        give_up_root()
        assert content(path) == "old"
        if mode == 0o777:
            nvme_ops.save(NEW, path)
        else:
            refuses(path, errno.EACCES)

    in_child(child)
    assert content(path) == ("new" if mode == 0o777 else "old")
    assert beside(path) == []
    assert stat.S_IMODE(path.stat().st_mode) == 0o444


def test_a_target_that_cannot_be_a_file(path: Path) -> None:
    folder, loop = path.parent / "folder.safetensors", path.parent / "loop.safetensors"
    (folder / "precious").mkdir(parents=True)
    loop.symlink_to(loop)
    for target, code in (
        (folder, errno.EISDIR),
        (path.parent, errno.EISDIR),
        (path / "model.safetensors", errno.ENOTDIR),
        (loop, errno.ELOOP),
    ):
        refuses(target, code)
    with pytest.raises(FileNotFoundError, match=f"is a disk not mounted.*'{path.parent / 'no'}'"):
        nvme_ops.save(NEW, path.parent / "no" / "such" / "model.safetensors")
    assert list(folder.iterdir()) == [folder / "precious"]
    assert beside(path) == [folder.name, loop.name]
    assert content(path) == "old"


# While others change the folder


def test_the_target_goes_away_or_becomes_a_folder_meanwhile(path: Path) -> None:
    nvme_ops.save(NEW, path, handle=Hooked(path.unlink))
    assert (content(path), beside(path)) == ("new", [])

    def replace() -> None:
        path.unlink()
        path.mkdir()

    refuses(path, errno.EISDIR, Hooked(replace))
    assert beside(path) == []


def test_the_folder_or_the_new_file_goes_away_meanwhile(path: Path) -> None:
    def remove() -> None:
        for name in beside(path):
            (path.parent / name).unlink()

    refuses(path, errno.ENOENT, Hooked(remove))
    assert_untouched(path)
    moved = path.parent.with_name("moved")
    with pytest.raises(FileNotFoundError, match=f"no such folder.*'{path.parent}'"):
        nvme_ops.save(NEW, path, handle=Hooked(lambda: path.parent.rename(moved)))
    assert content(moved / path.name) == "old"


# What is kept of the target


def test_a_symbolic_link_is_kept(path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = folder / "links"
    elsewhere.mkdir()
    (elsewhere / "latest.safetensors").symlink_to("next.safetensors")
    (elsewhere / "next.safetensors").symlink_to("../models/model.safetensors")
    nvme_ops.save(NEW, elsewhere / "latest.safetensors")
    assert content(path) == "new"
    assert beside(path) == []
    path.unlink()
    monkeypatch.chdir(elsewhere)
    nvme_ops.save(NEW, "latest.safetensors")
    assert content(path) == "new"
    assert [entry.is_symlink() for entry in elsewhere.iterdir()] == [True, True]


def test_litter_of_the_dead_is_removed_whatever_its_name(path: Path) -> None:
    """As long as names may be, in no encoding, with characters that mean something elsewhere."""
    for stem in ("\U0001f600" * 60, "a\nb", os.fsdecode(b"\xff\xfe"), "[*].1-2"):
        other = path.with_name(f"{stem}.safetensors")
        for _ in range(2):
            leave_litter(other)
            assert len(beside(path)) == 1
        nvme_ops.save(NEW, other)
        assert beside(path) == [other.name]
        other.unlink()


# What dead and living processes leave


def leave_litter(path: Path) -> None:
    """A child dies while it saves to ``path``."""
    saving = contextlib.ExitStack()
    killed_in(lambda: saving.enter_context(replacing(path)))


def test_what_is_nobodys_litter_is_kept(path: Path) -> None:
    kept = [".model.safetensors.notes" + MARK, "model.safetensors.1-2" + MARK, ".model.safetensors.1-2", MARK]
    for name in [*kept, "precious"]:
        path.with_name(name).write_text("mine")
    precious = path.with_name("precious")
    path.with_name(f".model.safetensors.7-8{MARK}").symlink_to(precious)
    path.with_name(f".model.safetensors.7-9{MARK}").mkdir()
    nvme_ops.save(NEW, path)
    assert set(beside(path)) >= {*kept, "precious"}
    assert precious.read_text() == "mine"


def test_a_child_that_is_forked_meanwhile_neither_replaces_nor_removes(folder: Path) -> None:
    target, stack = folder / "file", contextlib.ExitStack()
    file = stack.enter_context(replacing(target))
    os.write(file.fd, b"parent")

    def end() -> None:
        with pytest.raises(RuntimeError, match="only the parent process"):
            stack.close()

    def fail() -> None:
        with pytest.raises(ValueError, match="of the child"), stack:
            raise ValueError("of the child")

    in_child(end)
    in_child(fail)
    assert os.path.exists(file.path)
    stack.close()
    assert target.read_bytes() == b"parent"
