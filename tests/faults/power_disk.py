"""A disk in memory that logs its writes and flushes, and images of what a power failure would have left of it.

``LoggedDisk`` answers the kernel's requests for one file (FUSE, spoken over ``/dev/fuse``); a loop device makes a disk
of it, which is mounted. All of it lies in mounts and a tmpfs of this process, and ends with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import struct
import subprocess
import threading
import time
from collections.abc import Iterator

from tests.faults.fuse import (
    Request,
    ServedFile,
    end_with_parent,
    have_own_mounts,
    libc,
    missing,
    mount,
    return_to,
    run,
)

MAKE = {
    "ext4": ["mkfs.ext4", "-q", "-E", "nodiscard,lazy_itable_init=0,lazy_journal_init=0", "-J", "size=8"],
    "xfs": ["mkfs.xfs", "-q", "-K"],
    "btrfs": ["mkfs.btrfs", "-q", "-K"],
}
SIZE = 320 << 20  # bytes: xfs takes no less than 300 MiB
_PIECE = 4096  # bytes that are written whole or not at all
_SYNC_FILE_RANGE_WRITE = 2
_ENTRY = struct.Struct("<QQQ")

_outside = -1  # the mount namespace that this process has left


def why_not(filesystem: str) -> str:
    """Returns what is missing for a disk with this file system; an empty string if nothing is."""
    needed = missing(MAKE[filesystem][0])
    return needed and f"a disk that loses its power needs {needed}"


def private_folder(place: str) -> str:
    """Mounts a tmpfs on ``place`` that ends with this process, as all that is mounted from now on does."""
    global _outside
    _outside = have_own_mounts()
    mount("tmpfs", place, "tmpfs", 0, "mode=700")
    return place


def sync(folder: str) -> None:
    """Makes all that is on the file system of a folder durable, as far as it reports errors."""
    fd = os.open(folder, os.O_RDONLY)
    libc.syncfs(fd)
    os.close(fd)


class Log:
    """The writes and flushes of a disk in their order. One process adds to it, another one reads it."""

    def __init__(self, folder: str) -> None:
        self._paths = [os.path.join(folder, name) for name in ("log", "log entries")]
        self._fd, self._entries = (os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600) for path in self._paths)
        self._end = 0

    def __len__(self) -> int:
        return os.fstat(self._entries).st_size // _ENTRY.size

    def add(self, offset: int = 0, content: memoryview | bytes = b"") -> None:
        """Adds a write; one without content is a flush."""
        os.pwrite(self._fd, content, self._end)
        os.write(self._entries, _ENTRY.pack(offset, len(content), self._end))
        self._end += len(content)

    def entries(self) -> list[tuple[int, int, int]]:
        content = os.pread(self._entries, len(self) * _ENTRY.size, 0)
        return list(_ENTRY.iter_unpack(content))

    def apply(self, disk: int, entry: tuple[int, int, int], torn: random.Random | None = None) -> None:
        """Writes an entry to an image; with ``torn`` some pieces of it."""
        offset, nbytes, place = entry
        step = nbytes if torn is None else _PIECE
        for begin in range(0, nbytes, step or 1):
            size = min(step, nbytes - begin)
            if torn is None or torn.random() < 0.5:
                os.pwrite(disk, os.pread(self._fd, size, place + begin), offset + begin)

    def close(self) -> None:
        os.close(self._fd)
        os.close(self._entries)
        for path in self._paths:
            os.unlink(path)


class LoggedDisk:
    """A new disk with a file system, mounted at ``mounted``, until ``close``.

    The file is served by a process that uses no disk itself and ends with this one: the kernel then fails what waits
    for the disk. Nothing that could wait for the disk has the descriptor, which would keep it waiting for ever.
    """

    def __init__(self, folder: str, filesystem: str) -> None:
        self.filesystem, self.mounted = filesystem, os.path.join(folder, "mounted")
        self.base = os.path.join(folder, "base")  # as the disk was before the log
        now, self._export = os.path.join(folder, "now"), os.path.join(folder, "disk")
        with open(self.base, "wb") as base:
            base.truncate(SIZE)
        run(*MAKE[filesystem], self.base)
        run("cp", "--sparse=always", self.base, now)
        self.log = Log(folder)
        os.makedirs(self.mounted, exist_ok=True)
        file = ServedFile(self._export, SIZE)
        self._server = os.fork()
        if not self._server:
            try:
                end_with_parent()
                self._serve(file, now)
            finally:
                os._exit(0)
        file.close()
        mount_image(self._export, filesystem, self.mounted, direct=True)

    def _serve(self, file: ServedFile, path: str) -> None:
        disk = os.open(path, os.O_RDWR)
        os.unlink(path)
        return_to(_outside)

        def meet(request: Request) -> None:
            if request.what == "write":
                os.pwrite(disk, request.data, request.place)
            if request.what != "read":  # a flush has no content
                self.log.add(request.place, request.data)
            file.done(request, os.pread(disk, request.nbytes, request.place) if request.what == "read" else b"")

        file.serve(meet)

    def close(self) -> None:
        try:
            run("umount", self.mounted)
        finally:
            for _ in range(500):  # the loop device goes a moment later
                if subprocess.run(["umount", self._export], capture_output=True).returncode == 0:
                    break
                time.sleep(0.02)
            os.kill(self._server, signal.SIGKILL)
            os.waitpid(self._server, 0)


class Crashes:
    """Images of a disk after power failures, at moments (entries of the log) that never go back."""

    def __init__(self, disk: LoggedDisk, folder: str) -> None:
        self._log, self._filesystem, self._folder = disk.log, disk.filesystem, folder
        self._entries = disk.log.entries()
        self._path, self._base, self._durable = disk.base, os.open(disk.base, os.O_RDWR), 0

    @contextlib.contextmanager
    def at(self, moment: int, chance: random.Random) -> Iterator[str]:
        """Mounts what is there after the power failed before the entry ``moment``.

        What was flushed is there; of what was written since, everything, or by chance each whole, in part, or not.
        """
        entries = self._entries
        flushed = max((number for number in range(self._durable, moment) if not entries[number][1]), default=None)
        if flushed is not None:
            for entry in entries[self._durable : flushed]:
                self._log.apply(self._base, entry)
            self._durable = flushed + 1
        image, mounted = os.path.join(self._folder, "crashed.image"), os.path.join(self._folder, "crashed")
        run("cp", "--sparse=always", self._path, image)
        everything = chance.random() < 0.4
        fd = os.open(image, os.O_RDWR)
        for entry in entries[self._durable : moment]:
            luck = 0.0 if everything else chance.random()
            if luck < 0.7:
                self._log.apply(fd, entry, None if luck < 0.45 else chance)
        os.close(fd)
        os.makedirs(mounted, exist_ok=True)
        mount_image(image, self._filesystem, mounted)
        try:
            yield mounted
        finally:
            run("umount", mounted)

    def close(self) -> None:
        os.close(self._base)


def mount_image(image: str, filesystem: str, place: str, direct: bool = False) -> None:
    """Mounts the file system in a file. Its loop device goes with the mount."""
    loop = run("losetup", f"--direct-io={'on' if direct else 'off'}", "--show", "--find", image)
    try:
        run("mount", "-t", filesystem, loop, place)
    finally:
        run("losetup", "--detach", loop)  # once nobody uses it


class Writeback:
    """Has the kernel write dirty pages now and then, without flushes, as it does by itself within half a minute."""

    def __init__(self, folder: str, seed: int) -> None:
        self._folder, self._chance, self._ended = folder, random.Random(seed), threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while not self._ended.wait(self._chance.expovariate(1 / 0.03)):
            with contextlib.suppress(OSError):
                for folder, _, names in os.walk(self._folder):
                    for name in names:
                        if self._chance.random() < 0.5:
                            self._write(os.path.join(folder, name))
            if self._chance.random() < 0.1:
                sync(self._folder)  # as a journal is committed every five seconds

    def _write(self, path: str) -> None:
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            whole = ctypes.c_int64(0)
            libc.sync_file_range(fd, whole, whole, _SYNC_FILE_RANGE_WRITE)
            os.close(fd)

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
