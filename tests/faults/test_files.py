"""Files that are missing, forbidden, too short or no files at all: an exception that says what and where."""

from __future__ import annotations

import errno
import itertools
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import nvme_ops
from nvme_ops import aio_handle
from tests.conftest import GIB, HandleFactory, contents, give_up_root, in_child, open_to_all, pattern, round_trip, store

CALLS = {
    "read": lambda handle, *arguments: handle.read(arguments[0], arguments[1], False, *arguments[2:]),
    "sync_pread": lambda handle, *arguments: handle.sync_pread(*arguments),
    "async_pread": lambda handle, *arguments: (handle.async_pread(*arguments), handle.wait()),
    "submit_pread": lambda handle, *arguments: handle.submit_pread(*arguments).result(),
    "write": lambda handle, *arguments: handle.write(arguments[0], arguments[1], False, *arguments[2:]),
    "sync_pwrite": lambda handle, *arguments: handle.sync_pwrite(*arguments),
    "async_pwrite": lambda handle, *arguments: (handle.async_pwrite(*arguments), handle.wait()),
    "submit_pwrite": lambda handle, *arguments: handle.submit_pwrite(*arguments).result(),
}
READS = {name: call for name, call in CALLS.items() if "read" in name}
WRITES = {name: call for name, call in CALLS.items() if "write" in name}


@pytest.fixture
def works(handle: aio_handle, folder: Path):
    """After the fault the handle moves data as before, and nothing is pending."""
    yield
    assert handle.wait() == 0
    round_trip(handle, folder / "afterwards")


T, FILE = torch.zeros(4), Path("file")  # which is there; paths are below the folder
NOT_PATHS: tuple[Any, ...] = (None, True, 1.5, ["file"], T[0])
NOT_TENSORS: tuple[Any, ...] = (None, [1, 2, 3], 5, "text", {})
#: What is wrong: the calls, what each is given, which exception follows, and what it says.
WRONG: list[tuple[dict[str, Any], list[tuple[Any, ...]], Any, str | None]] = [
    (READS, [(T, Path("missing"))], FileNotFoundError, "opening the file to read.*/missing'"),
    (WRITES, [(T, Path("no/file"))], FileNotFoundError, "opening the file to write.*/no/file'"),
    (WRITES, [(T, Path("file/below"))], NotADirectoryError, "file/below'"),
    (CALLS, [(T, Path())], IsADirectoryError, "Is a directory"),
    (CALLS, [(T, "")], FileNotFoundError, None),
    (CALLS, [(T, "a\0b")], ValueError, "null"),
    (CALLS, [(T, FILE, at) for at in (-1, -(1 << 63), 1 << 63, 1 << 100, -(1 << 100), (1 << 63) - 5)], ValueError,
        "file_offset"),
    (CALLS, [(T, FILE, (1 << 63) - 17)], (EOFError, OSError), None),
    (CALLS, [(T, FILE, at) for at in (1.5, "0", b"0", [0])], TypeError, None),
    (CALLS, [(tensor, FILE) for tensor in NOT_TENSORS], TypeError, r"buffer must be a torch\.Tensor"),
    (READS, [(b"0123", FILE)], TypeError, "writable"),
    (READS, [(T, "/proc/self/status")], EOFError, "which has 0 bytes: '/proc/self/status'"),
    (CALLS, [(T, file) for file in NOT_PATHS], TypeError, "a file must be a path or a file descriptor"),
    (CALLS, [(T, fd) for fd in (-1, -100, 1 << 31, 1 << 63, 1 << 100)], (ValueError, OverflowError), None),
]  # fmt: skip


@pytest.mark.usefixtures("works")
@pytest.mark.parametrize(("calls", "given", "error", "words"), WRONG)
def test_what_is_wrong_is_said_and_changes_nothing(
    handle: aio_handle, folder: Path, calls: dict[str, Any], given: list[tuple[Any, ...]], error: Any, words: str | None
) -> None:
    path = store(folder / FILE, pattern(100))
    for call, (tensor, file, *offset) in itertools.product(calls.values(), given):
        with pytest.raises(error, match=words) as caught:
            call(handle, tensor, folder / file if isinstance(file, Path) else file, *offset)
        if isinstance(caught.value, OSError) and file:
            assert caught.value.errno is not None
            assert caught.value.filename == (str(folder / file) if isinstance(file, Path) else file)
    assert torch.equal(contents(path), pattern(100))


NO_PLACES = {errno.ESPIPE, errno.EBADF}
#: Descriptors that do not serve: the calls, how they are had of the file and the folder, the errnos, and words.
DESCRIPTORS: list[tuple[dict[str, Any], Callable[[Path], int], set[int], str | None]] = [
    (CALLS, lambda file: os.open(file.parent, os.O_RDONLY), {errno.EISDIR, errno.EBADF}, "directory|not open to write"),
    (CALLS, lambda _: 1 << 20, {errno.EBADF}, r"file descriptor \d+"),
    (CALLS, lambda file: os.open(file.with_name("pipe"), os.O_RDWR), NO_PLACES, None),
    (CALLS, lambda _: socket.socket().detach(), NO_PLACES, None),
    (CALLS, lambda _: os.eventfd(0), NO_PLACES, None),
    (CALLS, lambda _: os.open("/dev/zero", os.O_RDWR), NO_PLACES, None),
    (WRITES, lambda file: os.open(file, os.O_RDONLY), {errno.EBADF}, r"file descriptor \d+ is not open to"),
    (READS, lambda file: os.open(file, os.O_WRONLY), {errno.EBADF}, r"file descriptor \d+ is not open to"),
]


@pytest.mark.usefixtures("works")
@pytest.mark.parametrize(("calls", "opened", "codes", "words"), DESCRIPTORS)
def test_descriptors_that_do_not_serve_are_told_and_stay_open(
    handle: aio_handle, folder: Path, calls: dict[str, Any], opened: Any, codes: set[int], words: str | None
) -> None:
    path = store(folder / FILE, pattern(100))
    os.mkfifo(folder / "pipe")
    fd = opened(path)
    for call in calls.values():
        with pytest.raises(OSError, match=words) as caught:
            call(handle, T, fd)
        assert caught.value.errno in codes
    if fd != 1 << 20:  # that was never open
        os.close(fd)
    assert torch.equal(contents(path), pattern(100))


def test_no_permission(make_handle: HandleFactory, folder: Path) -> None:
    secret, fixed = (store(folder / name, pattern(5000)) for name in ("secret", "fixed"))
    open_to_all(folder)
    secret.chmod(0)
    fixed.chmod(0o444)

    def unprivileged() -> None:
        give_up_root()
        handle, back = make_handle(), torch.zeros(5000, dtype=torch.uint8)
        for calls, path in ((CALLS, secret), (WRITES, fixed)):
            for call in calls.values():
                with pytest.raises(PermissionError) as caught:
                    call(handle, back, path)
                assert caught.value.filename == str(path)
        for call in READS.values():
            call(handle, back.zero_(), fixed)
            assert torch.equal(back, pattern(5000))

    in_child(unprivileged)
    assert torch.equal(contents(fixed), pattern(5000))


@pytest.mark.usefixtures("works")
@pytest.mark.parametrize(("size", "wanted", "offset"), [(0, 1, 0), (5000, 4096, 4096)])
def test_short_file(handle: aio_handle, folder: Path, size: int, wanted: int, offset: int) -> None:
    path, target = store(folder / "short", pattern(size)), torch.full((wanted,), 7, dtype=torch.uint8)
    words = f"read of {wanted} bytes at offset {offset} passes the end of the file, which has {size} bytes: '{path}'"
    for read in READS.values():
        with pytest.raises(EOFError, match=re.escape(words)):
            read(handle, target, path, offset)
        assert (target == 7).all()


def test_a_named_pipe_does_not_block(folder: Path) -> None:
    """In a process of its own: a call stuck in open(2) could not be stopped here."""
    path = folder / "fifo"
    os.mkfifo(path)

    def body() -> None:
        calls: list[tuple[Any, ...]] = [(aio_handle().read, T, path), (aio_handle().write, T, path)]
        for call, *given in [*calls, *((nvme_ops.open, path, mode) for mode in ("r", "w", "r+"))]:
            with pytest.raises(OSError, match="fifo") as caught:
                call(*given)
            assert caught.value.errno in (errno.ESPIPE, errno.ENXIO)

    in_child(body)


@pytest.mark.parametrize("flags", [0, os.O_DIRECT | os.O_APPEND])
def test_descriptors_stay_open_and_as_they_were(handle: aio_handle, folder: Path, flags: int) -> None:
    path, data = folder / "file", pattern(10_001)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | flags)
    os.truncate(fd, 20_000)
    for skew, (write, read) in itertools.product((0, 1, 4096), zip(WRITES.values(), READS.values(), strict=True)):
        write(handle, data, fd, skew)
        assert torch.equal(contents(path)[skew : skew + len(data)], data)
        back = torch.zeros_like(data)
        read(handle, back, fd, skew)
        assert torch.equal(back, data)
    handle.sync_pwrite(data[:10], fd)
    assert os.fstat(fd).st_size == 20_000, "a descriptor's file is never cut"
    assert os.lseek(fd, 0, os.SEEK_CUR) == 0
    os.close(fd)


@pytest.mark.usefixtures("works")
def test_tensors_of_nothing(handle: aio_handle, folder: Path) -> None:
    path, empty = store(folder / "file", pattern(100)), torch.empty(3, 0, 5)
    for call, place in itertools.product(CALLS.values(), (0, 100, 10 * GIB)):
        call(handle, empty, path, place)
        assert path.stat().st_size == 100
    for write in WRITES.values():
        write(handle, empty, store(path, pattern(100)))
        assert path.stat().st_size == 0
