"""Files that are missing, forbidden, too short or no files at all: an exception that says what and where."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from nvme_ops import aio_handle
from tests.conftest import (
    GIB,
    MIB,
    HandleFactory,
    contents,
    give_up_root,
    in_child,
    open_to_all,
    pattern,
    run_python,
    store,
)

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


@pytest.fixture(params=CALLS)
def call(request: pytest.FixtureRequest):
    return CALLS[request.param]


@pytest.fixture(params=READS)
def read(request: pytest.FixtureRequest):
    return READS[request.param]


@pytest.fixture(params=WRITES)
def write(request: pytest.FixtureRequest):
    return WRITES[request.param]


@pytest.fixture
def works(handle: aio_handle, folder: Path):
    """After the fault the handle moves data as before, and nothing is pending."""
    yield
    data, path = pattern(MIB + 3), folder / "afterwards"
    back = torch.zeros_like(data)
    assert handle.wait() == 0
    assert handle.sync_pwrite(data, path) == 1
    assert handle.sync_pread(back, path) == 1
    assert torch.equal(back, data)


@pytest.mark.usefixtures("works")
def test_missing_file(handle: aio_handle, folder: Path, read) -> None:
    with pytest.raises(FileNotFoundError, match="opening the file to read") as caught:
        read(handle, torch.zeros(4), folder / "missing")
    assert (caught.value.errno, caught.value.filename) == (errno.ENOENT, str(folder / "missing"))


@pytest.mark.usefixtures("works")
def test_missing_folder(handle: aio_handle, folder: Path, write) -> None:
    with pytest.raises(FileNotFoundError, match="opening the file to write"):
        write(handle, torch.zeros(4), folder / "missing" / "file")
    with pytest.raises(NotADirectoryError):
        write(handle, torch.zeros(4), store(folder / "file", pattern(1)) / "below")


@pytest.mark.usefixtures("works")
def test_a_directory(handle: aio_handle, folder: Path, call) -> None:
    with pytest.raises(IsADirectoryError) as caught:
        call(handle, torch.zeros(4), folder)
    assert caught.value.filename == str(folder)
    fd = os.open(folder, os.O_RDONLY)
    with pytest.raises(OSError, match=r"Is a directory|not open to write"):
        call(handle, torch.zeros(4), fd)
    os.close(fd)


def test_no_permission(make_handle: HandleFactory, folder: Path) -> None:
    data = pattern(5000)
    secret, fixed, open_file = (store(folder / name, data) for name in ("secret", "fixed", "open"))
    open_to_all(folder)
    secret.chmod(0)
    fixed.chmod(0o444)
    open_file.chmod(0o666)

    def unprivileged() -> None:
        give_up_root()
        handle, back = make_handle(), torch.zeros_like(data)
        for call in CALLS.values():
            with pytest.raises(PermissionError) as caught:
                call(handle, back, secret)
            assert caught.value.filename == str(secret)
        for call in WRITES.values():
            with pytest.raises(PermissionError):
                call(handle, back, fixed)
        for call in READS.values():
            back.zero_()
            call(handle, back, fixed)
            assert torch.equal(back, data)
        for call in CALLS.values():
            call(handle, data.clone(), open_file)

    in_child(unprivileged)
    assert torch.equal(contents(secret), data)
    assert torch.equal(contents(fixed), data)


@pytest.mark.usefixtures("works")
@pytest.mark.parametrize(("size", "wanted", "offset"), [(0, 1, 0), (999, 1000, 0), (4096, 1, 4096), (5000, 4096, 4096)])
def test_short_file(handle: aio_handle, folder: Path, read, size: int, wanted: int, offset: int) -> None:
    path, target = store(folder / "short", pattern(size)), torch.full((wanted,), 7, dtype=torch.uint8)
    with pytest.raises(EOFError) as caught:
        read(handle, target, path, offset)
    message = f"read of {wanted} bytes at offset {offset} passes the end of the file, which has {size} bytes: '{path}'"
    assert str(caught.value) == message
    assert (target == 7).all()


@pytest.mark.usefixtures("works")
def test_a_file_cut_while_reads_of_it_are_pending(make_handle: HandleFactory, folder: Path) -> None:
    handle = make_handle(block_size=4096, queue_depth=1, cache="direct")
    path, size = folder / "file", 128 * MIB
    with path.open("wb") as file:
        file.truncate(size)
    target = torch.zeros(size, dtype=torch.uint8)
    future = handle.submit_pread(target, path)
    os.truncate(path, MIB + 100)
    with pytest.raises(EOFError, match=rf"passes the end of the file, which has {MIB + 100} bytes: '{path}'"):
        future.result()


@pytest.mark.usefixtures("works")
def test_offsets_out_of_range(handle: aio_handle, folder: Path, call) -> None:
    path, target = store(folder / "file", pattern(100)), torch.zeros(10, dtype=torch.uint8)
    for offset in (-1, -(1 << 63), 1 << 63, 1 << 100, -(1 << 100), (1 << 63) - 5):
        with pytest.raises(ValueError, match="file_offset"):
            call(handle, target, path, offset)
    with pytest.raises((EOFError, OSError)):
        call(handle, target, path, (1 << 63) - 11)
    others: list[Any] = [1.5, "0", b"0", [0]]
    for other in others:
        with pytest.raises(TypeError):
            call(handle, target, path, other)
    assert torch.equal(contents(path), pattern(100))


@pytest.mark.usefixtures("works")
def test_closed_and_impossible_descriptors(handle: aio_handle, folder: Path, call) -> None:
    fd = os.open(folder / "file", os.O_RDWR | os.O_CREAT)
    os.close(fd)
    with pytest.raises(OSError, match=f"file descriptor {fd}") as caught:
        call(handle, torch.zeros(4), fd)
    assert caught.value.errno == errno.EBADF
    for bad in (-1, -100, 1 << 31, 1 << 63, 1 << 100):
        with pytest.raises((ValueError, OverflowError)):
            call(handle, torch.zeros(4), bad)


@pytest.mark.usefixtures("works")
def test_descriptors_of_what_is_no_file(handle: aio_handle, call) -> None:
    reading, writing = os.pipe()
    left, right = socket.socketpair()
    event = os.eventfd(0)
    device = os.open("/dev/zero", os.O_RDWR)
    for fd in (reading, writing, left.fileno(), event, device):
        with pytest.raises(OSError) as caught:  # noqa: PT011  (the errno is what counts)
            call(handle, torch.zeros(4), fd)
        assert caught.value.errno in (errno.ESPIPE, errno.EBADF)
    for fd in (reading, writing, event, device):
        os.close(fd)  # all still open
    left.close()
    right.close()


def test_a_named_pipe_does_not_block(folder: Path) -> None:
    """In a process of its own: a call stuck in open(2) could not be stopped here."""
    os.mkfifo(folder / "fifo")
    program = """
    import sys, threading, torch, nvme_ops, os
    handle = nvme_ops.aio_handle()
    threading.Timer(20, os._exit, (7,)).start()
    for call in (handle.read, handle.write):
        try:
            call(torch.zeros(4), sys.argv[1])
        except OSError as error:
            print(error.errno)
    for mode in ("r", "w", "r+"):
        try:
            nvme_ops.open(sys.argv[1], mode)
            print("opened")
        except OSError as error:
            print(error.errno)
    os._exit(0)
    """
    result = run_python(program, folder / "fifo", check=False)
    assert result.returncode == 0, f"blocked for ever: {result}"
    assert set(map(int, result.stdout.split())) <= {errno.ESPIPE, errno.ENXIO}


@pytest.mark.usefixtures("works")
def test_descriptors_opened_the_other_way(handle: aio_handle, folder: Path) -> None:
    path = store(folder / "file", pattern(5000))
    for flags, calls in ((os.O_RDONLY, WRITES), (os.O_WRONLY, READS)):
        fd = os.open(path, flags)
        for call in calls.values():
            with pytest.raises(OSError, match=f"file descriptor {fd} is not open to") as caught:
                call(handle, torch.zeros(4), fd)
            assert caught.value.errno == errno.EBADF
        os.close(fd)
    assert torch.equal(contents(path), pattern(5000))


@pytest.mark.parametrize("direct", [0, os.O_DIRECT])
@pytest.mark.parametrize("append", [0, os.O_APPEND])
def test_descriptors_stay_open_and_as_they_were(handle: aio_handle, folder: Path, direct: int, append: int) -> None:
    path, data = folder / "file", pattern(10_001)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | direct | append)
    os.truncate(fd, 20_000)
    for skew in (0, 1, 4096):
        for write in WRITES.values():
            os.truncate(fd, 20_000)
            write(handle, data, fd, skew)
            expected = contents(path)
            assert torch.equal(expected[skew : skew + len(data)], data)
            assert len(expected) == 20_000
        for read in READS.values():
            back = torch.zeros_like(data)
            read(handle, back, fd, skew)
            assert torch.equal(back, data)
    handle.sync_pwrite(data[:10], fd)  # a descriptor's file is never cut
    assert os.fstat(fd).st_size == 20_000
    assert os.lseek(fd, 0, os.SEEK_CUR) == 0
    os.close(fd)


def test_a_descriptor_closed_while_its_transfer_is_pending(make_handle: HandleFactory, folder: Path) -> None:
    handle, path = make_handle(block_size=4096, queue_depth=1), store(folder / "file", pattern(4 * MIB))
    back, fd = torch.zeros(4 * MIB, dtype=torch.uint8), os.open(path, os.O_RDONLY)
    handle.async_pread(back, fd)
    os.close(fd)
    assert handle.wait() == 1
    assert torch.equal(back, pattern(4 * MIB))


def test_unlinked_and_renamed_files(handle: aio_handle, folder: Path) -> None:
    path, data = folder / "file", pattern(MIB + 5)
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    path.unlink()
    store(path, torch.zeros(10, dtype=torch.uint8))  # another file of that name
    handle.sync_pwrite(data, fd, 0)
    back = torch.zeros_like(data)
    handle.pread(back, fd, True, False, 0)
    assert torch.equal(back, data)
    assert path.stat().st_size == 10
    os.close(fd)


def test_memory_files(handle: aio_handle) -> None:
    fd, data = os.memfd_create("memory"), pattern(MIB + 5)
    handle.sync_pwrite(data, fd, 3)
    back = torch.zeros_like(data)
    handle.sync_pread(back, fd, 3)
    assert torch.equal(back, data)
    os.close(fd)


@pytest.mark.usefixtures("works")
def test_wrong_types(handle: aio_handle, folder: Path, call) -> None:
    path = store(folder / "file", pattern(100))
    for tensor in (None, [1, 2, 3], 5, "text", {}, object()):
        with pytest.raises(TypeError, match=r"buffer must be a torch\.Tensor"):
            call(handle, tensor, path)
    for file in (None, True, 1.5, [str(path)], torch.tensor(0), object()):
        with pytest.raises(TypeError, match="a file must be a path or a file descriptor"):
            call(handle, torch.zeros(4), file)
    with pytest.raises(ValueError, match="null"):
        call(handle, torch.zeros(4), "a\0b")
    with pytest.raises(FileNotFoundError):
        call(handle, torch.zeros(4), "")


def test_read_only_buffers_are_not_read_into(handle: aio_handle, folder: Path, read) -> None:
    with pytest.raises(TypeError, match="writable"):
        read(handle, b"0123", store(folder / "file", pattern(4)))


@pytest.mark.usefixtures("works")
def test_tensors_of_nothing(handle: aio_handle, folder: Path) -> None:
    path = store(folder / "file", pattern(100))
    for empty in (torch.empty(0), torch.empty(3, 0, 5, dtype=torch.int64)):
        for read in READS.values():
            read(handle, empty, path)
            read(handle, empty, path, 100)
        for write in WRITES.values():
            write(handle, empty, path, 0)
            write(handle, empty, path, 10 * GIB)
            assert path.stat().st_size == 100
            write(handle, empty, path)
            assert path.stat().st_size == 0
            store(path, pattern(100))
