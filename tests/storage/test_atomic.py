"""Whatever befalls a save, the file is the old one or the new one, whole, and the next save clears what was left."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import signal
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import nvme_ops
from nvme_ops import aio_handle
from nvme_ops._native import native
from nvme_ops.storage.publication import replacing
from tests.conftest import KIB, MIB, give_up_root, in_child, in_threads, open_to_all
from tests.crashing_save import (
    ERRORS,
    NEW,
    OLD,
    Hooked,
    NoStraceError,
    Outcome,
    Tensors,
    assert_untouched,
    beside,
    content,
    fail_at,
    kill_at,
    save_under_strace,
    small_files,
)  # fmt: skip

MARK = ".nvme_ops-tmp"


@pytest.fixture
def path(folder: Path) -> Path:
    """A file that holds OLD, alone in its folder."""
    (folder / "models").mkdir()
    path = folder / "models" / "model.safetensors"
    nvme_ops.save(OLD, path)
    return path


# Killed, and failing, at every system call


@pytest.fixture
def trace(folder: Path) -> Callable[..., Outcome]:
    """``save_under_strace`` with NEW and a handle, where strace works."""

    def run(path: Path, handle: aio_handle, *injections: str, durable: bool = True) -> Outcome:
        def save() -> None:
            nvme_ops.save(NEW, path, handle=handle, durable=durable)

        try:
            return save_under_strace(save, folder, *injections)
        except NoStraceError as error:
            pytest.skip(f"strace cannot trace: {error}")

    return run


ONE_BACKEND = pytest.mark.parametrize(
    "handle", ["io_uring", pytest.param("threads", marks=pytest.mark.slow)], indirect=True
)
#: In make test the first and the last system call of each name.
SOME_CALLS = pytest.mark.parametrize(
    "ends", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["first and last", "each"]
)


@pytest.fixture(params=["io_uring", "threads"])
def handle(request: pytest.FixtureRequest) -> aio_handle:
    reason = native().backends()[request.param]
    if reason is not None:
        pytest.skip(f"{request.param}: {reason}")
    return aio_handle(backend=request.param)


def test_what_makes_a_save_durable_comes_in_order(
    path: Path, trace: Callable[..., Outcome], handle: aio_handle
) -> None:
    """Data, then the name, then the folder. Without durable nothing waits for the device."""
    wanted = ("fdatasync", "rename", "fsync")
    outcome = trace(path, handle)
    assert (outcome.status, content(path)) == (0, "new")
    assert [name for _, name in outcome.calls if name in wanted] == [*wanted]
    outcome = trace(path, handle, durable=False)
    assert [name for _, name in outcome.calls if name in wanted] == ["rename"]


@ONE_BACKEND
@SOME_CALLS
@pytest.mark.parametrize("before", ["old", pytest.param(None, marks=pytest.mark.slow)])
def test_killed_at_any_system_call(
    path: Path, trace: Callable[..., Outcome], handle: aio_handle, before: str | None, ends: bool
) -> None:
    """A call of one thread stands for those of the others that have its name and number."""

    def prepare() -> None:
        nvme_ops.save(OLD, path, handle=handle)
        assert beside(path) == []
        if before is None:
            path.unlink()

    prepare()
    points = trace(path, handle).points(ends)
    assert {name for name, _ in points} >= {"openat", "flock", "fdatasync", "rename", "fsync", "close"}
    found = set()
    for name, number in points:
        prepare()
        outcome = trace(path, handle, kill_at(name, number))
        assert outcome.status in (0, -signal.SIGKILL), (name, number, outcome)  # 0: it made a call less of a kind
        after = content(path)
        assert after in (before, "new"), (name, number)
        assert after == "new" or outcome.status, (name, number)
        found.add(after)
    assert found == {before, "new"}
    prepare()


@ONE_BACKEND
@SOME_CALLS
def test_an_error_of_any_system_call(path: Path, trace: Callable[..., Outcome], handle: aio_handle, ends: bool) -> None:
    """The save succeeds in spite of it, or names the target and leaves it; a signal is no error."""
    points = trace(path, handle).points(ends)
    failed = set()
    for name, number in points:
        for error in ERRORS.get(name, ()):
            nvme_ops.save(OLD, path, handle=handle)
            assert beside(path) == []
            outcome = trace(path, handle, fail_at(name, number, error))
            where = (name, number, error, outcome)
            after = content(path)
            assert beside(path) == [], where
            if outcome.status == 0:
                assert after == "new", where
                continue
            assert error != "EINTR", where
            assert (outcome.status, outcome.code, outcome.filename) == (1, getattr(errno, error), str(path)), where
            # by then the new file has its name, though a power failure may take it
            assert after == ("new" if name == "fsync" else "old"), where
            failed.add(name)
    assert failed >= {"openat", "fchmod", "fdatasync", "rename", "fsync", "close"}


def test_an_error_and_no_way_to_clean_up(path: Path, trace: Callable[..., Outcome], handle: aio_handle) -> None:
    outcome = trace(path, handle, fail_at("fdatasync", 1, "ENOSPC"), fail_at("unlink", 1, "EIO"))
    assert (outcome.status, outcome.code, outcome.filename) == (1, errno.ENOSPC, str(path))
    assert content(path) == "old"
    assert len(beside(path)) == 1
    nvme_ops.save(OLD, path)
    assert_untouched(path)


# Failing without strace's help


def refuses(path: Path, code: int, tensors: Tensors = NEW, handle: aio_handle | None = None) -> None:
    """``save`` raises this error of the target."""
    with pytest.raises(OSError, match=re.escape(f"'{path}'") + "$") as caught:
        nvme_ops.save(tensors, path, handle=handle)
    assert (caught.value.errno, caught.value.filename) == (code, str(path))


@pytest.mark.parametrize("size", [32 * MIB, 15 * MIB + 600 * KIB])
def test_a_full_file_system(make_file_system: Callable[..., Path], handle: aio_handle, size: int) -> None:
    path = make_file_system(16 * MIB) / "model.safetensors"
    nvme_ops.save(OLD, path)
    litter = beside(path)
    refuses(path, errno.ENOSPC, {"a": torch.ones(size, dtype=torch.uint8)}, handle)
    assert (content(path), beside(path)) == ("old", litter)
    nvme_ops.save(NEW, path, handle=handle)
    assert content(path) == "new"


def test_a_limit_of_file_sizes(path: Path, handle: aio_handle) -> None:
    with small_files():
        for tensor in (torch.ones(MIB), torch.ones(1000, 900).t()):
            refuses(path, errno.EFBIG, {"a": tensor}, handle)
            assert_untouched(path)
        nvme_ops.save(NEW, path, handle=handle)
    assert content(path) == "new"


def test_no_more_descriptors(path: Path) -> None:
    """Wherever the last one is used up, nothing is replaced by halves."""

    def child() -> None:
        nvme_ops.save(OLD, path)  # the handle has its own
        in_use = max(map(int, os.listdir("/proc/self/fd")))
        for more in range(12):
            resource.setrlimit(resource.RLIMIT_NOFILE, (in_use + more, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
            failure = None
            try:
                nvme_ops.save(NEW, path)
            except OSError as error:
                failure = error
            resource.setrlimit(resource.RLIMIT_NOFILE, (1000, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
            if failure is not None:
                assert (failure.errno, failure.filename) == (errno.EMFILE, str(path))
                assert_untouched(path)
        assert content(path) == "new"

    in_child(child)


@pytest.mark.parametrize("mode", [0o555, 0o333])
def test_a_folder_without_rights(path: Path, mode: int) -> None:
    """To write in, or to open it and make it durable."""
    open_to_all(path.parent)
    path.chmod(0o644)
    path.parent.chmod(mode)

    def child() -> None:
        give_up_root()
        assert content(path) == "old"
        refuses(path, errno.EACCES)

    in_child(child)
    assert_untouched(path)


def test_a_read_only_file_is_replaced_and_stays_one(path: Path) -> None:
    """By somebody who may not write to it, but to the folder."""
    open_to_all(path.parent)
    path.chmod(0o444)

    def child() -> None:
        give_up_root()
        nvme_ops.save(NEW, path)

    in_child(child)
    assert content(path) == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o444


def test_a_read_only_file_system(make_file_system: Callable[..., Path]) -> None:
    path = make_file_system(16 * MIB) / "model.safetensors"
    nvme_ops.save(OLD, path)
    subprocess.run(["mount", "-o", "remount,ro", path.parent], check=True)
    refuses(path, errno.EROFS)
    assert content(path) == "old"


def test_a_folder_for_a_file(path: Path) -> None:
    folder = path.parent / "folder.safetensors"
    (folder / "precious").mkdir(parents=True)
    for target in (folder, path.parent):
        with pytest.raises(IsADirectoryError) as caught:
            nvme_ops.save(NEW, target, format="safetensors")
        assert caught.value.filename == str(target)
    assert list(folder.iterdir()) == [folder / "precious"]
    assert beside(path) == [folder.name]


def test_a_folder_that_is_none(path: Path) -> None:
    refuses(path / "model.safetensors", errno.ENOTDIR)
    with pytest.raises(FileNotFoundError, match=f"is a disk not mounted.*'{path.parent / 'no'}'"):
        nvme_ops.save(NEW, path.parent / "no" / "such" / "model.safetensors")


def test_a_loop_of_links(path: Path) -> None:
    loop = path.parent / "loop.safetensors"
    loop.symlink_to(loop)
    refuses(loop, errno.ELOOP)
    assert content(path) == "old"
    assert beside(path) == [loop.name]


def test_interrupted(path: Path) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        nvme_ops.save(NEW, path, handle=Hooked(interrupt))
    assert_untouched(path)


# While others change the folder


def test_the_target_is_removed_meanwhile(path: Path) -> None:
    nvme_ops.save(NEW, path, handle=Hooked(path.unlink))
    assert (content(path), beside(path)) == ("new", [])


def test_the_target_becomes_a_folder_meanwhile(path: Path) -> None:
    def replace() -> None:
        path.unlink()
        path.mkdir()

    refuses(path, errno.EISDIR, handle=Hooked(replace))
    assert beside(path) == []


def test_the_folder_goes_away_meanwhile(path: Path) -> None:
    moved = path.parent.with_name("moved")
    with pytest.raises(FileNotFoundError, match=f"no such folder.*'{path.parent}'"):
        nvme_ops.save(NEW, path, handle=Hooked(lambda: path.parent.rename(moved)))
    assert content(moved / path.name) == "old"


def test_the_new_file_goes_away_meanwhile(path: Path) -> None:
    def remove() -> None:
        for name in beside(path):
            (path.parent / name).unlink()

    refuses(path, errno.ENOENT, handle=Hooked(remove))
    assert_untouched(path)


# What is kept of the target


def test_a_symbolic_link_is_kept(path: Path, folder: Path) -> None:
    elsewhere = folder / "links"
    elsewhere.mkdir()
    (elsewhere / "latest.safetensors").symlink_to("next.safetensors")
    (elsewhere / "next.safetensors").symlink_to("../models/model.safetensors")
    nvme_ops.save(NEW, elsewhere / "latest.safetensors")
    assert content(path) == "new"
    assert beside(path) == []
    assert all(each.is_symlink() for each in elsewhere.iterdir())
    path.unlink()
    nvme_ops.save(NEW, elsewhere / "latest.safetensors")
    assert content(path) == "new"
    assert len(list(elsewhere.iterdir())) == 2


def test_a_path_from_the_current_folder(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent)
    nvme_ops.save(NEW, "model.safetensors")
    assert (content(path), beside(path)) == ("new", [])


@pytest.mark.parametrize(
    "stem", ["m" * 243, "é" * 121, "\U0001f600" * 60, "a\nb", os.fsdecode(b"\xff\xfe"), "[*].1-2", "-"], ids=ascii
)
def test_unusual_names(path: Path, stem: str) -> None:
    """As long as names may be, in no encoding, with characters that mean something elsewhere."""
    other = path.with_name(f"{stem}.safetensors")
    for tensors in (NEW, OLD):
        nvme_ops.save(tensors, other)
        leave_litter(other)
        nvme_ops.save(tensors, other)
    assert content(other) == "old"
    assert beside(path) == [other.name]


# What dead and living processes leave


def leave_litter(path: Path) -> None:
    """A child dies while it saves to ``path``."""
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        with contextlib.suppress(BaseException):
            nvme_ops.save(NEW, path, handle=Hooked(lambda: os.kill(os.getpid(), signal.SIGKILL)))
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def test_litter_of_the_dead_is_removed(path: Path) -> None:
    for _ in range(3):
        leave_litter(path)
        assert len(beside(path)) == 1
        assert content(path) == "old"
    nvme_ops.save(NEW, path)
    assert (content(path), beside(path)) == ("new", [])


def test_what_is_nobodys_litter_is_kept(path: Path) -> None:
    kept = [".model.safetensors.notes" + MARK, "model.safetensors.1-2" + MARK, ".model.safetensors.1-2", MARK]
    for name in kept:
        path.with_name(name).write_text("mine")
    precious = path.with_name("precious")
    precious.write_text("mine")
    path.with_name(f".model.safetensors.7-8{MARK}").symlink_to(precious)
    path.with_name(f".model.safetensors.7-9{MARK}").mkdir()
    other = path.with_name("model.safetensors.1-2.safetensors")
    leave_litter(other)
    (litter,) = [name for name in beside(path) if name.startswith(f".{other.name}")]
    nvme_ops.save(NEW, path)
    assert set(beside(path)) >= {*kept, "precious"}
    assert litter not in beside(path)
    assert precious.read_text() == "mine"


@contextlib.contextmanager
def another_process_saves(path: Path) -> Iterator[None]:
    """Another process is amid saving NEW until the end of the block."""
    (begun, begin), (told, tell) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        os.close(tell)

        def wait() -> None:
            os.write(begin, b"1")
            os.read(told, 1)

        with contextlib.suppress(BaseException):
            nvme_ops.save(NEW, path, handle=Hooked(wait))
            os._exit(0)
        os._exit(1)
    for unused in (begin, told):
        os.close(unused)
    try:
        assert os.read(begun, 1) == b"1"
        yield
    finally:
        for pipe in (tell, begun):
            os.close(pipe)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == 0


def test_the_file_of_a_living_writer_is_kept(path: Path) -> None:
    with another_process_saves(path):
        living = beside(path)
        leave_litter(path)
        nvme_ops.save(OLD, path)
        assert content(path) == "old"
        assert beside(path) == living
    assert (content(path), beside(path)) == ("new", [])


def test_processes_saving_to_one_path(path: Path) -> None:
    """Each save succeeds, and the file is whole whenever somebody looks."""

    def save(tensors: Tensors) -> Callable[[], None]:
        def body() -> None:
            for _ in range(150):
                nvme_ops.save(tensors, path, durable=False)

        return body

    children = []
    for tensors in (OLD, NEW, OLD, NEW):
        child = os.fork()
        if child == 0:
            status = 1
            with contextlib.suppress(BaseException):
                torch.set_num_threads(1)
                save(tensors)()
                status = 0
            os._exit(status)
        children.append(child)
    for _ in range(50):
        assert content(path) in ("old", "new")
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * 4
    assert content(path) in ("old", "new")
    assert beside(path) == []


def test_threads_saving_to_one_path(path: Path) -> None:
    failures: list[BaseException] = []

    def save(number: int) -> None:
        try:
            for _ in range(40):
                nvme_ops.save((OLD, NEW)[number % 2], path, durable=False)
        except BaseException as error:
            failures.append(error)

    in_threads(save, 4)
    assert failures == []
    assert content(path) in ("old", "new")
    assert beside(path) == []


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
