"""A disk that fails on command: one file, served by hand over /dev/fuse, below a loop device with ext4 on it.

    with FaultyDisk() as disk:
        disk.rule("write", "error", count=1)    # the next write of a file's data fails with EIO
        ...
        disk.clear()                            # the disk is well again, what was stalled goes on

Its mounts are those of this process and its children, and end with them (``fuse``). The file system has no journal, so
that a flush that fails does not shut it down. ``python -m tests.faults.faulty_disk`` runs ``faulty_cells``' table.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from tests.faults import fuse
from tests.faults.fuse import Request, ServedFile, detach, end_with_parent, have_own_mounts, mount, return_to, run

SIZE = 512 << 20  # bytes: what was interrupted is freed only once its last stalled write has ended
_REPOSITORY = Path(__file__).parents[2]
_ROOT = Path("/mnt")  # where a file system in memory has the folders of the mounts, for these processes only
_SOCKET, _EXPORT, MOUNTED = _ROOT / "control", _ROOT / "export", _ROOT / "disk"


def missing() -> str:
    """Returns what the disk needs and is not there; an empty string if nothing is."""
    return fuse.missing("mkfs.ext4", "dumpe2fs")


class _Server:
    """Serves the file. Each request of its data is done, fails, is done in half, or waits until ``clear``.

    What a rule says: ``what`` of requests, ``do`` (error, torn, stall), ``count`` (-1: always), ``least`` bytes, and
    ``outside``: ranges that it does not concern, which are the file system's own.
    """

    def __init__(self) -> None:
        self._image = os.open(_ROOT, os.O_RDWR | os.O_TMPFILE)
        os.ftruncate(self._image, SIZE)
        self._file = ServedFile(str(_EXPORT), SIZE)
        self._lock = threading.Lock()
        self._rules: list[dict[str, Any]] = []
        self._stalled: list[Request] = []
        self._hits = 0

    def serve(self) -> None:
        """Answers the kernel until the file is unmounted. Two threads do: one may be in a read of the image."""
        self._file.serve(self._meet)

    def _meet(self, request: Request) -> None:
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
                self._file.failed(request)
                return
            if request.what == "write":
                os.pwrite(self._image, request.data, request.place)
        self._file.done(
            request, os.pread(self._image, request.nbytes, request.place) if request.what == "read" else b""
        )

    def _rule_for(self, request: Request) -> dict[str, Any] | None:
        begin, end = request.place, request.place + request.nbytes
        for rule in self._rules:
            concerned = request.nbytes >= rule["least"] and not any(
                begin < stop and start < end for start, stop in rule["outside"]
            )
            if rule["what"] == request.what and rule["count"] and (request.what == "flush" or concerned):
                return rule
        return None

    def command(self, rule: dict[str, Any] | None, clear: bool) -> dict[str, int]:
        """Adds a rule, or removes all of them, and returns how many requests have met one, and how many stall."""
        with self._lock:
            if rule is not None:
                self._rules.append(rule)
                self._hits = 0
            stalled = len(self._stalled)
            released: list[Request] = []
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
    return_to(outside)
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
        outside = have_own_mounts()
        mount("none", str(_ROOT), "tmpfs", 0, "size=75%")
        self._server = subprocess.Popen(
            [sys.executable, "-m", __spec__.name, "serve", str(outside)], cwd=_REPOSITORY, pass_fds=[outside]
        )
        os.close(outside)
        self._answered()
        loop = run("losetup", "--find", "--show", "--direct-io=on", str(_EXPORT))
        held = os.open(loop, os.O_RDONLY | os.O_CLOEXEC)
        run("losetup", "--detach", loop)  # once nobody has it open or mounted, whatever comes
        options = "nodiscard,lazy_itable_init=0"
        run("mkfs.ext4", "-q", "-F", "-m", "0", "-b", "4096", "-O", "^has_journal", "-E", options, loop)
        self._own = _own_ranges(run("dumpe2fs", loop))
        MOUNTED.mkdir()
        run("mount", loop, str(MOUNTED))
        os.close(held)
        return self

    def __exit__(self, *_: object) -> None:
        if os.getpid() != self._process:  # a child ends
            return
        self.clear()
        run("umount", "--lazy", str(MOUNTED))
        detach(str(_EXPORT))
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


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        _serve(int(sys.argv[2]))
    else:
        from tests.faults.faulty_cells import main

        sys.exit(main())
