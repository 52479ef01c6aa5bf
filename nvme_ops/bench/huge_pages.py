"""Huge pages that are reserved while fio runs, as many as before afterwards, whatever happens to the run.

Each reservation is a file in RECORDS that its process keeps locked (flock). One that can be locked belongs to a process
that was killed: whoever comes next gives back what it says. The file is written before the kernel's counter is, and the
counter is changed by one process at a time, which first settles what is left of others; so each is exact.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from nvme_ops.bench import stop
from nvme_ops.bench.boot import boot_id
from nvme_ops.text import MIB

COUNTER = "/proc/sys/vm/nr_hugepages"
RECORDS = "/run/nvme_ops"  # empty after a start of the machine, as the counter is
SIZE = 160 * MIB  # fio's best: 32 blocks of 4 MiB, and room to align them
_NAME = re.compile("huge-pages-[0-9a-f]{16}")


@contextmanager
def huge_pages(wanted: bool = True) -> Iterator[None]:
    """``SIZE`` of them in the block, or as much as there is memory for; none more where we may not reserve them.

    Only as long as fio runs, lest others of the run take them.
    """
    held: _Record | None = None
    try:
        if wanted:
            with stop.deferred(), contextlib.suppress(OSError):  # not root: what is reserved may do
                held = _reserve(SIZE // page_size())
        yield
    finally:
        if held is not None:
            with stop.deferred(), contextlib.suppress(OSError):
                _give_back(held)


def settle() -> None:
    """Gives back what processes that were killed had reserved. Nothing where we may not."""
    with contextlib.suppress(OSError):
        if any(map(_NAME.fullmatch, os.listdir(RECORDS))):
            with stop.deferred(), _counter():
                pass


def page_size() -> int:
    """Of a huge page, in bytes."""
    with open("/proc/meminfo", encoding="ascii") as file:
        return next((int(line.split()[1]) * 1024 for line in file if line.startswith("Hugepagesize")), 2 * MIB)


@dataclass(frozen=True)
class _Record:
    """One reservation. Its file is locked as long as the descriptor is open."""

    path: str
    descriptor: int
    before: int  # what the counter was

    def write(self, pages: int = 0, without: int | None = None) -> None:
        """``without``: while the counter is being changed, what it must be once this reservation is gone."""
        words = {"boot": boot_id(), "before": self.before, "pages": pages, "without": without}
        os.pwrite(self.descriptor, f"{json.dumps(words):200}\n".encode(), 0)  # of one length: written over whole

    def remove(self) -> None:
        os.unlink(self.path)
        os.close(self.descriptor)


def _reserve(pages: int) -> _Record:
    with _counter() as counter:
        before = _read(counter)
        path = os.path.join(_folder(), f"huge-pages-{secrets.token_hex(8)}")
        record = _Record(path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), before)
        fcntl.flock(record.descriptor, fcntl.LOCK_EX)
        record.write(without=before)
        _set(counter, before + pages)
        record.write(pages=max(0, _read(counter) - before))
        return record


def _give_back(record: _Record) -> None:
    with _counter() as counter:
        pages = _pages_of(record.descriptor).get("pages", 0)
        left = max(0, _read(counter) - pages)
        record.write(pages, without=left)
        _set(counter, left)
        record.remove()


@contextmanager
def _counter() -> Iterator[int]:
    """The kernel's, ours alone in the block, and without what dead processes had reserved. OSError unless root."""
    counter = os.open(COUNTER, os.O_RDWR)
    try:
        fcntl.flock(counter, fcntl.LOCK_EX)
        for name in filter(_NAME.fullmatch, os.listdir(_folder())):
            _settle(counter, os.path.join(RECORDS, name))
        yield counter
        with contextlib.suppress(OSError):  # others have records there
            os.rmdir(RECORDS)
    finally:
        os.close(counter)


def _settle(counter: int, path: str) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        found = _pages_of(descriptor)
        if found.get("boot") == boot_id():  # else the counter began anew: /run may outlive the machine's start
            without = found["without"]
            _set(counter, max(0, _read(counter) - found["pages"]) if without is None else without)
        os.unlink(path)
    except BlockingIOError:
        pass  # its process is alive
    finally:
        os.close(descriptor)


def _folder() -> str:
    """Where the records are: ours, and nobody else can write there. OSError otherwise."""
    os.makedirs(RECORDS, mode=0o700, exist_ok=True)
    about = os.lstat(RECORDS)
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid() or about.st_mode & 0o022:
        raise PermissionError(f"{RECORDS} is not a folder that only this user can write to")
    return RECORDS


def _pages_of(descriptor: int) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(os.pread(descriptor, 4096, 0))
    except ValueError:  # killed before it wrote, and so before it reserved anything
        return {}
    return found


def _read(counter: int) -> int:
    return int(os.pread(counter, 64, 0).split()[0])


def _set(counter: int, pages: int) -> None:
    os.pwrite(counter, f"{pages}\n".encode(), 0)
