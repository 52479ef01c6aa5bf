"""A file on ``/dev/fuse`` that a process answers for itself, and mounts that end with the process; for root.

The mounts are in a mount namespace of the process: when its last process ends, by SIGKILL too, the kernel removes every
mount, and every loop device that is detached while it is mounted. What answers for the file has to be outside of that
namespace: a process that ends as the last one in it waits for the disk before it lets go of what would answer, and
every sync() of the machine waits with it. Nor may anything that can wait for the disk have the descriptor.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import signal
import struct
import subprocess
from collections.abc import Callable
from typing import NamedTuple

_NEWNS, _PRIVATE, _DETACH, _DEATH_SIGNAL = 0x20000, 1 << 14 | 1 << 18, 2, 1  # unshare, mount, umount2, prctl
_LARGEST = 1 << 20  # bytes of a write
_GETATTR, _SETATTR, _OPEN, _READ, _WRITE, _STATFS, _FSYNC, _INIT = 3, 4, 14, 15, 16, 17, 20, 26
_NOTHING_TO_DO = 18, 25, 34, 38  # RELEASE, FLUSH, ACCESS, DESTROY
_NO_ANSWER = 2, 36, 42  # FORGET, INTERRUPT, BATCH_FORGET
_FALLOCATE = 43

libc = ctypes.CDLL(None, use_errno=True)


def missing(*tools: str) -> str:
    """Returns what a mounted file needs and is not there; an empty string if nothing is."""
    if os.geteuid() != 0:
        return "root"
    for name in ("mount", "umount", "unshare", "losetup", *tools):
        if shutil.which(name) is None:
            return name
    for path in ("/dev/fuse", "/dev/loop-control", "/mnt"):
        if not os.path.exists(path):
            return path
    tried = subprocess.run(["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True)
    return "" if tried.returncode == 0 else "the right to have mounts of its own (CAP_SYS_ADMIN)"


def have_own_mounts() -> int:
    """Gives this process mounts of its own; returns a descriptor of the namespace that it was in."""
    outside = os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    if libc.unshare(_NEWNS):
        raise OSError(ctypes.get_errno(), "unshare")
    mount("none", "/", "", _PRIVATE)
    return outside


def return_to(namespace: int) -> None:
    """Puts this process into the namespace of a descriptor."""
    if libc.setns(namespace, _NEWNS):
        raise OSError(ctypes.get_errno(), "setns")


def mount(source: str, target: str, kind: str, flags: int = 0, options: str = "") -> None:
    if libc.mount(source.encode(), target.encode(), kind.encode(), flags, options.encode()):
        raise OSError(ctypes.get_errno(), f"mount of {kind}: {os.strerror(ctypes.get_errno())}", target)


def detach(target: str) -> None:
    """Unmounts, at once or when it is no longer used."""
    libc.umount2(target.encode(), _DETACH)


def end_with_parent() -> None:
    """Has the kernel kill this process when its parent ends."""
    libc.prctl(_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() == 1:
        os._exit(1)


def run(*command: str) -> str:
    """Runs a program of the system; raises RuntimeError with what it says."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, "LC_ALL": "C"})
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout.strip()


class Request(NamedTuple):
    what: str  # read, write or flush
    unique: int  # the kernel's number
    place: int
    nbytes: int
    data: memoryview


class ServedFile:
    """A file of ``size`` bytes at ``path``, whose content is whatever answers say."""

    def __init__(self, path: str, size: int) -> None:
        self._size = size
        open(path, "wb").close()
        self._fuse = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        mount("nvme_ops", path, "fuse", 0, f"fd={self._fuse},rootmode=100000,user_id=0,group_id=0")

    def close(self) -> None:
        """Closes the descriptor; where another process serves the file that goes on."""
        os.close(self._fuse)

    def serve(self, meet: Callable[[Request], None]) -> None:
        """Has each request of data answered by ``meet``, now or later, until the file is unmounted."""
        while True:
            try:
                message = memoryview(os.read(self._fuse, _LARGEST + 8192))
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.EINTR, errno.EAGAIN):
                    continue
                return
            kind, unique = struct.unpack_from("<IQ", message, 4)
            body = message[40:]
            place, nbytes = struct.unpack_from("<QI", body, 8) if kind in (_READ, _WRITE) else (0, 0)
            if kind == _READ:
                meet(Request("read", unique, place, max(0, min(nbytes, self._size - place)), body[:0]))
            elif kind == _WRITE:
                meet(Request("write", unique, place, nbytes, body[40 : 40 + nbytes]))
            elif kind == _FSYNC:
                meet(Request("flush", unique, 0, 0, body[:0]))
            elif kind not in _NO_ANSWER:
                self._reply(unique, *self._answer(kind))

    def _answer(self, kind: int) -> tuple[bytes, int]:
        if kind == _INIT:
            flags = 1 | 1 << 5 | 1 << 15 | 1 << 22  # reads and direct I/O out of order, large writes, their size
            numbers = 7, 38, 0, flags, 512, 512, _LARGEST, 1, _LARGEST // 4096, 0, 0, 0, *[0] * 6
            return struct.pack("<IIIIHHIIHHII6I", *numbers), 0
        if kind in (_GETATTR, _SETATTR):
            size = self._size
            numbers = 60, 0, 0, 1, size, size // 512, 0, 0, 0, 0, 0, 0, 0o100600, 1, 0, 0, 0, 4096, 0
            return struct.pack("<QIIQQQQQQIIIIIIIIII", *numbers), 0
        if kind == _OPEN:
            return struct.pack("<QII", 1, 1 | 1 << 6, 0), 0  # no page cache between, writes in parallel
        if kind == _STATFS:
            return struct.pack("<QQQQQIIII6I", 1 << 20, 1 << 19, 1 << 19, 1, 1, 4096, 255, 4096, 0, *[0] * 6), 0
        if kind in _NOTHING_TO_DO:
            return b"", 0
        return b"", errno.EOPNOTSUPP if kind == _FALLOCATE else errno.ENOSYS

    def done(self, request: Request, data: bytes = b"") -> None:
        """Answers that it was done; ``data`` is what a read has found."""
        self._reply(request.unique, struct.pack("<II", request.nbytes, 0) if request.what == "write" else data)

    def failed(self, request: Request) -> None:
        self._reply(request.unique, b"", errno.EIO)

    def _reply(self, unique: int, data: bytes, error: int = 0) -> None:
        with contextlib.suppress(FileNotFoundError):  # nobody waits for it any more
            os.writev(self._fuse, [struct.pack("<IiQ", 16 + len(data), -error, unique), data])
