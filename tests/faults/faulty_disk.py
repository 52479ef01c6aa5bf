"""A disk that fails on command: one file, served by hand over /dev/fuse, below a loop device with ext4 on it.

    with FaultyDisk() as disk:
        disk.rule("write", "error", count=1)    # the next write of a file's data fails with EIO
        ...
        disk.clear()                            # the disk is well again, what was stalled goes on

Needs root. The mounts are in a mount namespace of this process and its children, and the device is detached with its
mount: all of it is gone with the last process, however that ends. What answers is outside of the namespace: a process
that ends as the last one in it waits for the disk before it lets go of what would answer, and every sync() of the
machine waits with it. ``python -m tests.faults.faulty_disk`` runs the table of ``faulty_cells`` on one. The file system
has no journal, so that a flush that fails does not shut it down.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

SIZE = 256 << 20
_ROOT = Path("/mnt")  # where a file system in memory has the folders of the mounts, for these processes only
_SOCKET, _EXPORT, MOUNTED = _ROOT / "control", _ROOT / "export", _ROOT / "disk"
_NEWNS, _PRIVATE, _DEATH_SIGNAL = 0x20000, 1 << 14 | 1 << 18, 1  # unshare, mount (MS_REC too), prctl
_TOOLS = "losetup", "mkfs.ext4", "dumpe2fs", "mount"

libc = ctypes.CDLL(None, use_errno=True)


def missing() -> str | None:
    """Returns what the disk needs and is not there, or None."""
    if os.geteuid() != 0:
        return "root"
    for each in ("/dev/fuse", "/dev/loop-control", _ROOT):
        if not os.path.exists(each):
            return str(each)
    for each in _TOOLS:
        if shutil.which(each) is None:
            return each
    child = os.fork()
    if child == 0:
        os._exit(0 if libc.unshare(_NEWNS) == 0 else 1)
    return "the right to have mounts of its own (CAP_SYS_ADMIN)" if os.waitpid(child, 0)[1] else None


def end_with_parent() -> None:
    """Has this process killed when its parent ends."""
    libc.prctl(_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() == 1:
        os._exit(1)


def _mount(source: str, target: Path, kind: str, flags: int = 0, options: str = "") -> None:
    if libc.mount(source.encode(), str(target).encode(), kind.encode(), flags, options.encode()):
        raise OSError(ctypes.get_errno(), f"mount of {kind}: {os.strerror(ctypes.get_errno())}", str(target))


class _Request(NamedTuple):
    what: str  # read, write or flush
    unique: int
    place: int
    nbytes: int
    data: bytes


class _Server:
    """Serves the file. Each request of its data is done, fails, is done in half, or waits until ``clear``.

    What a rule says: ``what`` of requests, ``do`` (error, torn, stall), ``count`` (-1: always), ``least`` bytes, and
    ``outside``: ranges that it does not concern, which are the file system's own.
    """

    def __init__(self) -> None:
        self._image = os.open(_ROOT, os.O_RDWR | os.O_TMPFILE)
        os.ftruncate(self._image, SIZE)
        _EXPORT.touch()
        self._fuse = os.open("/dev/fuse", os.O_RDWR)
        _mount("faulty", _EXPORT, "fuse", 0, f"fd={self._fuse},rootmode=100000,user_id=0,group_id=0")
        self._lock = threading.Lock()
        self._rules: list[dict[str, Any]] = []
        self._stalled: list[_Request] = []
        self._hits = 0

    def serve(self) -> None:
        """Answers the kernel until the file is unmounted. Two threads do: one may be in a read of the image."""
        while True:
            try:
                message = os.read(self._fuse, (1 << 20) + 8192)
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.EINTR, errno.EAGAIN):
                    continue
                return
            kind, unique = struct.unpack_from("<IQ", message, 4)
            body = message[40:]
            if kind == 26:  # INIT: asynchronous reads, large writes, parallel writes
                flags = 1 | 1 << 5 | 1 << 15 | 1 << 22
                numbers = 7, 38, 0, flags, 512, 512, 1 << 20, 1, 256, 0, 0, 0, *[0] * 6
                self._reply(unique, 0, struct.pack("<IIIIHHIIHHII6I", *numbers))
            elif kind in (3, 4):  # GETATTR, SETATTR
                numbers = 1, 0, 0, 1, SIZE, SIZE // 512, 0, 0, 0, 0, 0, 0, 0o100600, 1, 0, 0, 0, 4096, 0
                self._reply(unique, 0, struct.pack("<QIIQQQQQQIIIIIIIIII", *numbers))
            elif kind == 14:  # OPEN: direct I/O, parallel writes
                self._reply(unique, 0, struct.pack("<QII", 1, 1 | 1 << 6, 0))
            elif kind == 15:
                place, nbytes = struct.unpack_from("<QI", body, 8)
                self._meet(_Request("read", unique, place, max(0, min(nbytes, SIZE - place)), b""))
            elif kind == 16:
                place, nbytes = struct.unpack_from("<QI", body, 8)
                self._meet(_Request("write", unique, place, nbytes, body[40 : 40 + nbytes]))
            elif kind == 20:  # FSYNC
                self._meet(_Request("flush", unique, 0, 0, b""))
            elif kind == 17:  # STATFS
                self._reply(
                    unique,
                    0,
                    struct.pack("<QQQQQIIII6I", 1 << 20, 1 << 19, 1 << 19, 1, 1, 4096, 255, 4096, 0, *[0] * 6),
                )
            elif kind in (18, 25, 34, 38):  # RELEASE, FLUSH, ACCESS, DESTROY
                self._reply(unique)
            elif kind not in (2, 36, 42):  # FORGET, INTERRUPT: no answer
                self._reply(unique, errno.EOPNOTSUPP if kind == 43 else errno.ENOSYS)

    def _meet(self, request: _Request) -> None:
        with self._lock:
            rule = self._rule_for(request)
            if rule is not None:
                self._hits += 1
                rule["count"] -= rule["count"] > 0
            if rule is not None and rule["do"] == "stall":
                self._stalled.append(request)
                return
            if rule is not None:
                if rule["do"] == "torn":
                    os.pwrite(self._image, request.data[: request.nbytes // 2], request.place)
                self._reply(request.unique, errno.EIO)
                return
            if request.what == "write":
                os.pwrite(self._image, request.data, request.place)
        if request.what == "read":
            self._reply(request.unique, 0, os.pread(self._image, request.nbytes, request.place))
        else:
            self._reply(request.unique, 0, struct.pack("<II", request.nbytes, 0) * (request.what == "write"))

    def _rule_for(self, request: _Request) -> dict[str, Any] | None:
        begin, end = request.place, request.place + request.nbytes
        for rule in self._rules:
            concerned = request.nbytes >= rule["least"] and not any(
                begin < stop and start < end for start, stop in rule["outside"]
            )
            if rule["what"] == request.what and rule["count"] and (request.what == "flush" or concerned):
                return rule
        return None

    def _reply(self, unique: int, error: int = 0, data: bytes = b"") -> None:
        try:
            os.writev(self._fuse, [struct.pack("<IiQ", 16 + len(data), -error, unique), data])
        except OSError as failure:
            if failure.errno != errno.ENOENT:  # else nobody waits for it any more
                raise

    def command(self, rule: dict[str, Any] | None, clear: bool) -> dict[str, int]:
        """Adds a rule, or removes all of them, and returns how many requests have met one, and how many stall."""
        with self._lock:
            if rule is not None:
                self._rules.append(rule)
                self._hits = 0
            stalled = len(self._stalled)
            released: list[_Request] = []
            if clear:
                self._rules, released, self._stalled = [], self._stalled, []
            hits = self._hits
        for request in released:
            self._meet(request)
        return {"hits": hits, "stalled": stalled}


def _end_with(process: int) -> None:
    """Ends when a process does, which may itself be waiting for the disk: it has given its memory back then."""
    while Path(f"/proc/{process}/cmdline").read_bytes():
        time.sleep(0.1)
    os._exit(1)


def _serve(outside: int) -> None:
    end_with_parent()
    parent = os.getppid()
    server = _Server()
    control = socket.socket(socket.AF_UNIX)
    control.bind(str(_SOCKET))
    if libc.setns(outside, _NEWNS):
        raise OSError(ctypes.get_errno(), "setns")
    control.listen(16)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    for _ in range(2):
        threading.Thread(target=server.serve, daemon=True).start()
    while True:
        connection, _ = control.accept()
        with connection, connection.makefile("rw") as words:
            words.write(json.dumps(server.command(**json.loads(words.readline()))) + "\n")


class FaultyDisk:
    """The disk, mounted at ``folder``. Makes this process have mounts of its own: it is for a process of its own."""

    folder = MOUNTED

    def __enter__(self) -> FaultyDisk:
        self._process = os.getpid()
        outside = os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
        if libc.unshare(_NEWNS):
            raise OSError(ctypes.get_errno(), "unshare")
        _mount("none", Path("/"), "", _PRIVATE)
        _mount("none", _ROOT, "tmpfs", 0, "size=75%")
        self._server = subprocess.Popen([sys.executable, __file__, "serve", str(outside)], pass_fds=[outside])
        os.close(outside)
        self._answered()
        loop = _run("losetup", "--find", "--show", "--direct-io=on", str(_EXPORT)).strip()
        held = os.open(loop, os.O_RDONLY | os.O_CLOEXEC)
        _run("losetup", "--detach", loop)  # once nobody has it open or mounted, whatever comes
        options = "nodiscard,lazy_itable_init=0"
        _run("mkfs.ext4", "-q", "-F", "-m", "0", "-b", "4096", "-O", "^has_journal", "-E", options, loop)
        self._own = _own_ranges(_run("dumpe2fs", loop))
        MOUNTED.mkdir()
        _run("mount", loop, str(MOUNTED))
        os.close(held)
        return self

    def __exit__(self, *_: object) -> None:
        if os.getpid() != self._process:  # a child ends
            return
        self.clear()
        _run("umount", "--lazy", str(MOUNTED))
        libc.umount2(str(_EXPORT).encode(), 2)
        self._server.kill()
        self._server.wait()

    def rule(self, what: str, do: str, count: int = -1, least: int = 0) -> None:
        """Has the next ``count`` requests (-1: all) fail with EIO, be done in half (``torn``), or ``stall``.

        Of reads and writes these are the files' own, of at least so many bytes.
        """
        outside = [*self._own, *(place for each, _, _ in os.walk(MOUNTED) for place in _places(Path(each)))]
        self._ask(rule={"what": what, "do": do, "count": count, "least": least, "outside": outside}, clear=False)

    def _answered(self) -> None:
        while self._server.poll() is None:
            with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
                self._ask(rule=None, clear=False)
                return
            time.sleep(0.01)
        raise RuntimeError("the disk did not start")

    def clear(self) -> int:
        """Makes the disk well; what has stalled is done now. Returns how many requests have met a rule."""
        return self._ask(rule=None, clear=True)["hits"]

    def stalled(self) -> int:
        """Returns how many requests wait for ``clear``."""
        return self._ask(rule=None, clear=False)["stalled"]

    def _ask(self, **command: Any) -> dict[str, int]:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(_SOCKET))
            with connection.makefile("rw") as words:
                words.write(json.dumps(command) + "\n")
                words.flush()
                answer: dict[str, int] = json.loads(words.readline())
                return answer


def _own_ranges(description: str) -> list[tuple[int, int]]:
    """Returns where the file system keeps what it needs itself."""
    kinds = "superblock|Group descriptors|Reserved GDT blocks|bitmap|Inode table"
    found = re.findall(rf"(?:{kinds}) at (\d+)(?:-(\d+))?", description)
    return [(int(first) * 4096, (int(last or first) + 1) * 4096) for first, last in found]


def _places(path: Path) -> list[tuple[int, int]]:
    """Returns where a file or folder lies on the device (FIEMAP)."""
    fd = os.open(path, os.O_RDONLY)
    try:
        found = bytearray(struct.pack("=QQLLLL", 0, 1 << 62, 0, 0, 64, 0) + bytes(56 * 64))
        fcntl.ioctl(fd, 0xC020660B, found)
    finally:
        os.close(fd)
    extents = [struct.unpack_from("=QQQ", found, 32 + 56 * at) for at in range(struct.unpack_from("=L", found, 20)[0])]
    return [(place, place + nbytes) for _, place, nbytes in extents]


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        _serve(int(sys.argv[2]))
    else:
        from tests.faults.faulty_cells import main

        sys.exit(main())
