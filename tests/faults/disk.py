"""A disk in memory, for root: it logs its writes, fails, tears and stalls them on command, and may lose its power.

    disk = Disk("ext4 without a journal")   # mounted at ``disk.mounted``
    disk.rule("write", "error", count=1)    # the next write of a file's data fails with EIO
    disk.clear()                            # the disk is well again, what was stalled goes on

A process answers the kernel's requests for one file (FUSE, spoken over ``/dev/fuse``); a loop device makes a disk of
it. The mounts are in a mount namespace of this process: when its last process ends, by SIGKILL too, the kernel removes
every mount, and every loop device that is detached while it is mounted. What answers for the file has to be outside of
that namespace: a process that ends as the last one in it waits for the disk before it lets go of what would answer, and
every sync() of the machine waits with it. Nor may anything that can wait for the disk have the descriptor.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import json
import mmap
import os
import random
import re
import select
import shutil
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path("/mnt")  # where a file system in memory has the disks, for this process and its children only
MAKE = {
    "ext4": "mkfs.ext4 -q -E nodiscard,lazy_itable_init=0,lazy_journal_init=0 -J size=8",
    "xfs": "mkfs.xfs -q -K",
    "btrfs": "mkfs.btrfs -q -K",
    # which a flush that fails does not shut down
    "ext4 without a journal": "mkfs.ext4 -q -m 0 -b 4096 -O ^has_journal -E nodiscard,lazy_itable_init=0",
}
SIZE = 512 << 20  # bytes: xfs takes no less than 300 MiB; what was interrupted is freed when its stalled writes end
_PIECE = 4096  # bytes that are written whole or not at all
_ENTRY = struct.Struct("<QQ")  # of the log: where, how many bytes follow; none for a flush
_NEWNS, _PRIVATE, _DEATH_SIGNAL, _SYNC_FILE_RANGE_WRITE = 0x20000, 1 << 14 | 1 << 18, 1, 2

_LARGEST = 1 << 20  # bytes of a write
_DATA = {15: "read", 16: "write", 20: "flush"}
_ATTR, _OPEN, _STATFS, _INIT, _FALLOCATE = (3, 4), 14, 17, 26, 43
_NOTHING_TO_DO = 18, 25, 34, 38  # RELEASE, FLUSH, ACCESS, DESTROY
_NO_ANSWER = 2, 36, 42  # FORGET, INTERRUPT, BATCH_FORGET

_libc = ctypes.CDLL(None, use_errno=True)


def missing(filesystem: str) -> str:
    """Returns why there can be no disk with this file system; an empty string if there can."""
    needed = "" if os.geteuid() == 0 else "root"
    for name in ("mount", "umount", "unshare", "losetup", "dumpe2fs", MAKE[filesystem].split()[0]):
        needed = needed or ("" if shutil.which(name) else name)
    for path in ("/dev/fuse", "/dev/loop-control", str(ROOT)):
        needed = needed or ("" if os.path.exists(path) else path)
    try_it = ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", str(ROOT)]
    if not needed and subprocess.run(try_it, capture_output=True).returncode:
        needed = "the right to have mounts of its own (CAP_SYS_ADMIN)"
    return needed and f"a disk that fails, or loses its power, needs {needed}"


def run(*command: object) -> str:
    """Runs a program of the system; raises RuntimeError with what it says."""
    words, environment = [str(word) for word in command], {**os.environ, "LC_ALL": "C"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, env=environment)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout.strip()


def end_with_parent() -> None:
    """Has the kernel kill this process when its parent ends."""
    _libc.prctl(_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() == 1:
        os._exit(1)


def sync(folder: Path) -> None:
    """Makes all that is on the file system of a folder durable, as far as it reports errors."""
    fd = os.open(folder, os.O_RDONLY)
    _libc.syncfs(fd)
    os.close(fd)


def _check(what: str, status: int) -> None:
    if status:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def _mount(kind: str, target: Path, flags: int = 0, options: str = "") -> None:
    given = (b"none", bytes(target), kind.encode(), flags, options.encode())
    _check(f"mount of {kind} at {target}", _libc.mount(*given))


@functools.cache
def _own_mounts() -> int:
    """Gives this process mounts of its own; returns a descriptor of the namespace that it was in."""
    outside = os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    _check("unshare", _libc.unshare(_NEWNS))
    _mount("", Path("/"), _PRIVATE)
    _mount("tmpfs", ROOT, options="mode=700,size=75%")
    return outside


class _Request(NamedTuple):
    what: str  # read, write or flush
    unique: int  # the kernel's number
    place: int
    nbytes: int
    data: memoryview


class _Server:
    """Answers the kernel and ``Disk``. A request of data is done, fails, is done in half, or waits until ``clear``.

    What a rule says: ``what`` of requests, ``do`` (error, torn, stall), ``count`` (-1: always), ``least`` bytes, and
    ``outside``: ranges that it does not concern, which are the file system's own.
    """

    def __init__(self, path: Path, image: Path, log: Path | None, address: str) -> None:
        path.touch()
        self._image = os.open(image, os.O_RDWR)
        self._log = os.open(log, os.O_WRONLY | os.O_APPEND) if log else -1
        self._fuse = os.open("/dev/fuse", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        _mount("fuse", path, options=f"fd={self._fuse},rootmode=100000,user_id=0,group_id=0")
        self._control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.bind(address)
        self._control.listen(16)
        self._rules: list[dict[str, Any]] = []
        self._stalled: list[_Request] = []
        self._hits = 0

    def close(self) -> None:
        """Closes the descriptors; where another process serves the file that goes on."""
        os.close(self._fuse)
        self._control.close()

    def serve(self, parent: int) -> None:
        """Answers until the file is unmounted, or the parent has ended, which may itself be waiting for the disk."""
        watched: list[Any] = [self._fuse, self._control]
        while True:
            ready = select.select(watched, [], [], 0.1)[0]
            if self._control in ready:
                self._obey()
            if self._fuse in ready:
                try:
                    self._answer(memoryview(os.read(self._fuse, _LARGEST + 8192)))
                except OSError as error:
                    if error.errno not in (errno.ENOENT, errno.EINTR, errno.EAGAIN):
                        return
            if not ready and not Path(f"/proc/{parent}/cmdline").read_bytes():  # it has given its memory back
                return

    def _obey(self) -> None:
        """Adds a rule, or removes all, and says how many requests have met one, and how many are stalled."""
        connection, _ = self._control.accept()
        with connection, contextlib.suppress(ValueError, ConnectionError):  # who asks was killed
            rule, clear = json.loads(connection.recv(1 << 20))
            if rule is not None:
                self._rules.append(rule)
                self._hits = 0
            connection.send(json.dumps([self._hits, len(self._stalled)]).encode())
            if clear:
                self._rules, released, self._stalled = [], self._stalled, []
                for request in released:
                    self._meet(request)

    def _meet(self, request: _Request) -> None:
        rule = next((rule for rule in self._rules if self._concerns(rule, request)), None)
        if rule is not None:
            self._hits += 1
            rule["count"] -= rule["count"] > 0
            if rule["do"] == "stall":
                self._stalled.append(request)
                return
            if rule["do"] == "torn":
                os.pwrite(self._image, request.data[: request.nbytes // 2], request.place)
            self._reply(request.unique, error=errno.EIO)
            return
        if request.what == "write":
            os.pwrite(self._image, request.data, request.place)
        if request.what != "read" and self._log >= 0:
            os.writev(self._log, [_ENTRY.pack(request.place, len(request.data)), request.data])
        data = os.pread(self._image, request.nbytes, request.place) if request.what == "read" else b""
        self._reply(request.unique, struct.pack("<II", request.nbytes, 0) if request.what == "write" else data)

    @staticmethod
    def _concerns(rule: dict[str, Any], request: _Request) -> bool:
        begin, end = request.place, request.place + request.nbytes
        concerned = request.what == "flush" or (
            request.nbytes >= rule["least"] and not any(begin < stop and start < end for start, stop in rule["outside"])
        )
        return bool(rule["what"] == request.what and rule["count"] and concerned)

    def _answer(self, message: memoryview) -> None:
        kind, unique = struct.unpack_from("<IQ", message, 4)
        body = message[40:]
        if kind in _DATA:
            place, nbytes = struct.unpack_from("<QI", body, 8) if _DATA[kind] != "flush" else (0, 0)
            self._meet(_Request(_DATA[kind], unique, place, nbytes, body[40 : 40 + nbytes]))
        elif kind == _INIT:
            flags = 1 | 1 << 5 | 1 << 15 | 1 << 22  # reads and direct I/O out of order, large writes, their size
            numbers = 7, 38, 0, flags, 512, 512, _LARGEST, 1, _LARGEST // 4096, 0, 0, 0, *[0] * 6
            self._reply(unique, struct.pack("<IIIIHHIIHHII6I", *numbers))
        elif kind in _ATTR:
            numbers = 60, 0, 0, 1, SIZE, SIZE // 512, 0, 0, 0, 0, 0, 0, 0o100600, 1, 0, 0, 0, 4096, 0
            self._reply(unique, struct.pack("<QIIQQQQQQIIIIIIIIII", *numbers))
        elif kind == _OPEN:
            self._reply(unique, struct.pack("<QII", 1, 1 | 1 << 6, 0))  # no page cache between, writes in parallel
        elif kind == _STATFS:
            numbers = 1 << 20, 1 << 19, 1 << 19, 1, 1, 4096, 255, 4096, 0, *[0] * 6
            self._reply(unique, struct.pack("<QQQQQIIII6I", *numbers))
        elif kind not in _NO_ANSWER:
            error = errno.EOPNOTSUPP if kind == _FALLOCATE else errno.ENOSYS
            self._reply(unique, error=0 if kind in _NOTHING_TO_DO else error)

    def _reply(self, unique: int, data: bytes = b"", error: int = 0) -> None:
        with contextlib.suppress(FileNotFoundError):  # nobody waits for it any more
            os.writev(self._fuse, [struct.pack("<IiQ", 16 + len(data), -error, unique), data])


class Disk:
    """A new disk with a file system, mounted at ``mounted``, until ``close``; for a process of its own.

    With ``logged`` what is written is added to the file ``log``, and ``Crashes`` has what a power failure would leave.
    """

    def __init__(self, filesystem: str, logged: bool = False) -> None:
        outside, self._process = _own_mounts(), os.getpid()
        self.filesystem, self.mounted, self.path = filesystem, ROOT / "mounted", ROOT / f"disk of {self._process}"
        self.base, self.log, image = ROOT / "base", ROOT / "log", ROOT / "image"  # base: as it was before the log
        self._address = f"\0nvme_ops {self.path}"
        for path in (self.base, self.log):
            path.unlink(missing_ok=True)
            path.touch()
        os.truncate(self.base, SIZE)
        run(*MAKE[filesystem].split(), self.base)
        run("cp", "--sparse=always", self.base, image)
        self._own = _own_ranges(run("dumpe2fs", self.base)) if filesystem.startswith("ext") else []
        server = _Server(self.path, image, self.log if logged else None, self._address)
        image.unlink()
        self._server = os.fork()
        if not self._server:
            try:
                end_with_parent()
                _check("setns", _libc.setns(outside, _NEWNS))
                server.serve(self._process)
            finally:
                os._exit(0)
        server.close()
        _mount_image(self.path, filesystem, self.mounted, direct=True)

    def rule(self, what: str, do: str, count: int = -1, least: int = 0) -> None:
        """Has the next ``count`` requests (-1: all) fail with EIO (``error``), be done in half (``torn``), or stall.

        Of reads and writes these are the files' own, of at least so many bytes.
        """
        outside = [*self._own, *(place for path, _, _ in os.walk(self.mounted) for place in _places(path))]
        self._ask({"what": what, "do": do, "count": count, "least": least, "outside": outside})

    def clear(self) -> int:
        """Makes the disk well; what has stalled is done now. Returns how many requests have met a rule."""
        return self._ask(clear=True)[0]

    def stalled(self) -> int:
        return self._ask()[1]

    def _ask(self, rule: dict[str, Any] | None = None, clear: bool = False) -> list[int]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.connect(self._address)
            connection.send(json.dumps([rule, clear]).encode())
            answer: list[int] = json.loads(connection.recv(100))
            return answer

    def logged(self) -> int:
        """Returns the bytes of the log: a moment."""
        return self.log.stat().st_size

    def close(self) -> None:
        if os.getpid() != self._process:  # a child ends
            return
        self.clear()
        run("umount", "--lazy", self.mounted)
        for _ in range(500):  # the loop device goes a moment later
            if subprocess.run(["umount", self.path], capture_output=True).returncode == 0:
                break
            time.sleep(0.02)
        os.kill(self._server, signal.SIGKILL)
        os.waitpid(self._server, 0)


def _mount_image(image: Path, filesystem: str, place: Path, direct: bool = False) -> None:
    """Mounts the file system in a file. Its loop device goes with the mount."""
    place.mkdir(exist_ok=True)
    loop = run("losetup", f"--direct-io={'on' if direct else 'off'}", "--show", "--find", image)
    try:
        run("mount", "-t", filesystem.split()[0], loop, place)
    finally:
        run("losetup", "--detach", loop)  # once nobody uses it


def _own_ranges(description: str) -> list[tuple[int, int]]:
    """Returns where ext4 keeps what it needs itself."""
    kinds = "superblock|Group descriptors|Reserved GDT blocks|bitmap|Inode table"
    matches = re.findall(rf"(?:{kinds}) at (\d+)(?:-(\d+))?", description)
    return [(int(first) * 4096, (int(last or first) + 1) * 4096) for first, last in matches]


def _places(path: str) -> list[tuple[int, int]]:
    """Returns where a folder lies on the device (FIEMAP)."""
    fd = os.open(path, os.O_RDONLY)
    try:
        reply = bytearray(struct.pack("=QQLLLL", 0, 1 << 62, 0, 0, 64, 0) + bytes(56 * 64))
        fcntl.ioctl(fd, 0xC020660B, reply)
    finally:
        os.close(fd)
    extents = [struct.unpack_from("=QQQ", reply, 32 + 56 * at) for at in range(struct.unpack_from("=L", reply, 20)[0])]
    return [(place, place + nbytes) for _, place, nbytes in extents]


class Crashes:
    """What power failures leave of a disk that was closed, at moments that never go back: before each of its writes."""

    def __init__(self, disk: Disk) -> None:
        self._disk, self._durable, self.ends = disk, 0, [0]  # ends: where in the log each moment is
        self._writes: list[tuple[int, memoryview]] = []
        with disk.log.open("rb") as file:
            log = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        while self.ends[-1] < len(log):
            offset, nbytes = _ENTRY.unpack_from(log, self.ends[-1])
            self.ends.append(self.ends[-1] + _ENTRY.size + nbytes)
            self._writes.append((offset, log[self.ends[-1] - nbytes : self.ends[-1]]))

    @contextlib.contextmanager
    def at(self, moment: int, chance: random.Random) -> Iterator[Path]:
        """Mounts what is there after the power failed before the write of this number.

        What was flushed is there; of what was written since, everything, or by chance each whole, in part, or not.
        """
        image, mounted = ROOT / "crashed image", ROOT / "crashed"
        everything, writes = chance.random() < 0.4, self._writes
        flushes = (number + 1 for number in range(self._durable, moment) if not writes[number][1])
        flushed = max(flushes, default=self._durable)
        with self._disk.base.open("r+b", buffering=0) as base:
            for write in writes[self._durable : flushed]:
                self._apply(base.fileno(), *write)
        self._durable = flushed
        run("cp", "--sparse=always", self._disk.base, image)
        with image.open("r+b", buffering=0) as crashed:
            for write in writes[flushed:moment]:
                luck = 0.0 if everything else chance.random()
                if luck < 0.7:
                    self._apply(crashed.fileno(), *write, None if luck < 0.45 else chance)
        _mount_image(image, self._disk.filesystem, mounted)
        try:
            yield mounted
        finally:
            run("umount", mounted)

    @staticmethod
    def _apply(image: int, offset: int, content: memoryview, torn: random.Random | None = None) -> None:
        """Writes what was written to an image; with ``torn`` some pieces of it."""
        step = _PIECE if torn else len(content)
        for begin in range(0, len(content), step or 1):
            if torn is None or torn.random() < 0.5:
                os.pwrite(image, content[begin : begin + step], offset + begin)


@contextlib.contextmanager
def writeback(folder: Path, chance: random.Random) -> Iterator[None]:
    """Has the kernel write dirty pages now and then, without flushes, as it does by itself within half a minute."""
    ended = threading.Event()

    def work() -> None:
        while not ended.wait(chance.expovariate(1 / 0.03)):
            paths = [os.path.join(parent, name) for parent, _, names in os.walk(folder) for name in names]
            for path in paths:
                if chance.random() < 0.5:
                    with contextlib.suppress(OSError):
                        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
                        _libc.sync_file_range(fd, ctypes.c_int64(0), ctypes.c_int64(0), _SYNC_FILE_RANGE_WRITE)
                        os.close(fd)
            if chance.random() < 0.1:
                sync(folder)  # as a journal is committed every five seconds

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
