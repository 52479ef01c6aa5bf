"""``Records``: which states of an optimizer count for the next program, after whatever ended this one.

There are two files, and a step is recorded in that which does not have the step before. A record counts for as long as
the machine runs, also when the process is killed; what it names may still be in the caches of devices. ``harden`` makes
it count after a power failure too, once all that it names is durable, and then makes the other record void: the places
that only that one names may be written to from there on. So one record that counts always names what is whole.

A file is a line of one sector, then the JSON that its CRC-32C covers. The line has its own CRC-32C, and says whether
the record is durable, void, or counts until the machine starts again: as ``boot_id`` has it.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from nvme_ops.errors import FormatError
from nvme_ops.memory.pieces import checksums_anywhere
from nvme_ops.storage.locks import boot_id
from nvme_ops.storage.publication import replacing
from nvme_ops.storage.session import Session
from nvme_ops.storage.store import TensorStore
from nvme_ops.text import parse_json
from nvme_ops.whole import read_whole

_MAGIC = "nvme_ops commit 2"
_SECTOR = 512
_DURABLE, _VOID = "durable", "void"
# Version 1 was the value of this key in the store, and the store had a journal. Version 0 had no line before the JSON.
_KEY, _EARLIER = "commit", "nvme_ops commit 1"
_NO_JOURNAL = b"a later version of nvme_ops has written these states\n"  # has an earlier one refuse them


@dataclass(frozen=True)
class Record:
    """What a file says. ``number`` counts the records; one that is void has no content."""

    path: str
    number: int
    mark: str
    content: dict[str, Any]

    @property
    def counts(self) -> bool:
        """Whether a program may go on with it."""
        return self.mark in (_DURABLE, boot_id() or _DURABLE)


class Records:
    """The two files of a kept session, in its first folder. One thread at a time.

    Args:
        session: is kept.

    Attributes:
        newest: what to go on with.
        durable: what a power failure would leave; perhaps the one before, and None after an earlier version.

    Raises:
        FormatError: a record is damaged, empty or missing, and the one before does not count any more.
        OSError: a file cannot be read or made.
    """

    def __init__(self, session: Session) -> None:
        self._paths = [session.path(0, f"record {number}") for number in range(2)]
        self._fd = -1  # of the file with a record that is not durable
        self._line: tuple[int, int, int] = (0, 0, 0)  # its number, bytes and checksum
        self._pending = False  # it may count
        self._marked = False  # as durable, which was not flushed
        self._outdated = ""  # the path of the one before
        if not os.path.lexists(self._paths[0]):
            self._begin(session)
        self.newest, self.durable = self._load()
        if _journal(session) != _NO_JOURNAL:
            _replace(session.path(0, "index"), _NO_JOURNAL, durable=False)

    def _begin(self, session: Session) -> None:
        """Makes the files. Killed at any point, it is as if it had not begun, or was done."""
        other = None
        with contextlib.suppress(FileNotFoundError, FormatError):
            other = _read(self._paths[1])
        if other is not None and other.mark != _VOID:
            raise _missing(self._paths[0])
        content = json.dumps(_earlier(session) if _journal(session) else {}).encode()
        _replace(self._paths[1], _line(-1, _VOID), durable=False)
        _replace(self._paths[0], _line(0, _DURABLE, len(content), _checksum(content)) + content, durable=True)

    def _load(self) -> tuple[Record, Record]:
        found: list[Record] = []
        damaged: list[FormatError] = []
        for path in self._paths:
            try:
                found.append(_read(path))
            except FormatError as error:
                damaged.append(error)
            except FileNotFoundError:
                damaged.append(_missing(path))
        usable = sorted((each for each in found if each.counts), key=lambda each: each.number)
        durable = [each for each in usable if each.mark == _DURABLE]
        if not durable:  # the places that another one names may have been written to
            raise (damaged or [FormatError(f"{self._paths[0]}: no record of an optimizer's step counts any more")])[0]
        newest, before = usable[-1], durable[-1]
        self._number = newest.number
        self._target = self._paths[1 - self._paths.index(before.path)]
        if newest is not before:
            self._fd = _open(self._target)
            content = read_whole(self._fd)[_SECTOR:]
            self._line = (newest.number, len(content), _checksum(content))
        elif len(durable) > 1:
            self._outdated = durable[0].path
        return newest, before

    def write(self, content: dict[str, Any]) -> None:
        """Records a step, for as long as the machine runs. Raises OSError: the step before counts."""
        text = json.dumps(content).encode()
        if self._fd < 0:
            self._fd = _open(self._target)
        self._number += 1
        self._line, self._pending = (self._number, len(text), _checksum(text)), True
        number, *rest = self._line
        _put(self._fd, _line(number, boot_id() or "-", *rest) + text, self._target)

    def harden(self) -> None:
        """Makes the record that was written last durable, as all that it names is already. Raises OSError."""
        number, *rest = self._line
        self._pending = self._marked = True
        _put(self._fd, _line(number, _DURABLE, *rest), self._target)
        _sync(self._fd, self._target)
        fd, self._outdated = self._fd, self._paths[1 - self._paths.index(self._target)]
        self._fd, self._target, self._marked, self._pending = -1, self._outdated, False, False
        os.close(fd)

    def settle(self) -> None:
        """Makes void the record that the durable one has replaced, or that was not made durable. Raises OSError.

        Until then, the places that only this record names must not be written to.
        """
        if self._pending:
            _put(self._fd, _line(self._number, _VOID), self._target)
            if self._marked:
                _sync(self._fd, self._target)
            self._marked = self._pending = False
            self.close()
        if self._outdated:
            fd = _open(self._outdated)
            try:
                _put(fd, _line(-1, _VOID), self._outdated)
            finally:
                os.close(fd)
            self._outdated = ""

    def close(self) -> None:
        """Closes the files. Further calls do nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class Flush:
    """Does some work once, on a thread that the program waits for before it exits.

    Args:
        what: is made durable by it. A failure that nobody has asked for is reported at exit.
        work: what to do.
    """

    def __init__(self, what: str, work: Callable[[], object]) -> None:
        self.what = what
        self.failure: Exception | None = None  #: once it is done
        self._work: Callable[[], object] | None = work
        self._once, self._done = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="nvme_ops.flush", daemon=False)

    def start(self) -> None:
        """Begins, unless it has begun."""
        if self._thread.ident is None:
            try:
                self._thread.start()
            except RuntimeError:  # no more threads, or interrupted here before
                self._run()

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return self._done.is_set()

    def wait(self) -> None:
        """Waits for the end. Ctrl-C interrupts this, and not the work."""
        self.start()
        while not self._done.wait(1):
            pass
        _unreported.pop(self, None)

    def _run(self) -> None:
        with self._once:
            if self._work is None:
                return
            try:
                self._work()
            except Exception as error:
                self.failure = _unreported[self] = error
            except BaseException as error:
                if threading.current_thread() is not self._thread:  # Ctrl-C: it is begun again
                    raise
                self.failure = _unreported[self] = RuntimeError(f"the thread was ended by {type(error).__name__}")
            self._work = None  # and what it keeps alive
            self._done.set()


_unreported: dict[Flush, Exception] = {}  # failures that nobody has asked for


def _report() -> None:
    for flush, failure in _unreported.items():
        sys.stderr.write(f"nvme_ops: {flush.what} is not durable: {failure}\n")


atexit.register(_report)
os.register_at_fork(after_in_child=_unreported.clear)


def _line(number: int, mark: str, nbytes: int = 0, checksum: int = 0) -> bytes:
    text = f"{_MAGIC} {number} {mark} {nbytes} {checksum:08x}"
    return f"{text} {_checksum(text.encode()):08x}".ljust(_SECTOR - 1).encode() + b"\n"


def _checksum(content: bytes) -> int:
    return checksums_anywhere([torch.frombuffer(bytearray(content), dtype=torch.uint8)])[0] if content else 0


def _read(path: str) -> Record:
    """Reads a file. Raises FileNotFoundError, OSError or FormatError."""
    fd = _open(path)
    try:
        content = read_whole(fd)
    finally:
        os.close(fd)
    try:
        if not content.strip(b"\0"):
            raise ValueError("it is empty")
        fields = content[:_SECTOR].decode("ascii").removeprefix(_MAGIC).split()
        number, mark, nbytes, checksum = int(fields[0]), fields[1], int(fields[2]), int(fields[3], 16)
        if content[:_SECTOR] != _line(number, mark, nbytes, checksum):
            raise ValueError(f"its first line is none of {_MAGIC!r}, or its checksum does not match")
        if mark == _VOID:
            return Record(path, number, mark, {})
        text = content[_SECTOR : _SECTOR + nbytes]
        if len(text) != nbytes or _checksum(text) != checksum:
            raise ValueError("its checksum does not match")
        found = parse_json(text)
        return Record(path, number, mark, {} if found == {} else required(found, "places"))
    except (ValueError, IndexError) as error:
        raise FormatError(f"{path}: the record of an optimizer's step is damaged: {error}") from error


def _missing(path: str) -> FormatError:
    return FormatError(f"{path}: the record of an optimizer's step is missing")


def required(content: Any, *more: str) -> dict[str, Any]:
    """Returns what describes states as JSON has it. Raises ValueError for anything else."""
    kinds = {"steps": int, "buffer": int, "made": list, "chunks": list, **dict.fromkeys(more, list)}
    if isinstance(content, dict) and all(type(content.get(name)) is kind for name, kind in kinds.items()):
        return content
    raise ValueError("it is not what describes the states of an optimizer")


def _open(path: str) -> int:
    return os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


def _put(fd: int, content: bytes, path: str) -> None:
    """Writes the beginning of a file: the first sector by one call with the rest."""
    done = 0
    try:
        while done < len(content):
            done += os.pwrite(fd, content[done:], done)
    except OSError as error:
        raise OSError(error.errno, f"write of the record of a step: {error.strerror}", path) from error


def _sync(fd: int, path: str) -> None:
    try:
        os.fdatasync(fd)
    except OSError as error:
        raise OSError(error.errno, f"fdatasync of the record of a step: {error.strerror}", path) from error


def _replace(path: str, content: bytes, durable: bool) -> None:
    with replacing(path, durable) as file:
        _put(file.fd, content, path)


def _journal(session: Session) -> bytes:
    """Returns the journal that an earlier version has kept of the store, or what stands in its place."""
    path = session.path(0, "index")
    if not os.path.lexists(path):
        return b""
    fd = _open(path)
    try:
        return read_whole(fd)
    finally:
        os.close(fd)


def _earlier(session: Session) -> dict[str, Any]:
    """Returns what an earlier version has recorded, and where the store has it. Raises FormatError."""
    with TensorStore(session) as store:
        if _KEY not in store:
            return {}
        future = store.get(_KEY)
        future.result()
        line, end, text = bytes(future.tensor.numpy()).partition(b"\n")
        try:
            if not end:
                text = line
            elif line != f"{_EARLIER} {_checksum(text):08x}".encode():
                raise ValueError(f"its checksum does not match, or it is none of {_EARLIER!r}")
            content = required(parse_json(text))
            keys = [f"{number}/{slot}" for number, (slot, _) in enumerate(content["chunks"])]
            content["places"] = store.described(key for key in keys if key in store)
        except (ValueError, TypeError) as error:
            path = session.path(0, "slab")
            raise FormatError(f"{path}: the record of the last step of an optimizer is damaged: {error}") from error
        store.sync()
        return content


def written(scalars: dict[str, Any] | None) -> dict[str, Any] | None:
    """Returns scalar states as JSON has them: a tensor as its dtype, value and whether it is in host memory."""
    if scalars is None:
        return None
    return {
        name: [str(value.dtype).removeprefix("torch."), value.item(), value.device.type == "cpu"]
        if isinstance(value, torch.Tensor)
        else value
        for name, value in scalars.items()
    }


def read_back(described: dict[str, Any] | None, device: torch.device) -> dict[str, Any] | None:
    """Undoes ``written``."""
    if described is None:
        return None
    found = dict(described)
    for name, value in found.items():
        if isinstance(value, list):
            dtype, number, on_host = value
            found[name] = torch.tensor(number, dtype=getattr(torch, dtype), device="cpu" if on_host else device)
    return found
