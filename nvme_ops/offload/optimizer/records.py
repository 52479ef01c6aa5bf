"""``Records``: which states of an optimizer the next program continues with, however this one ends.

There are two files, and a step is recorded in the one that does not hold the step before. A record is valid for as long
as the machine runs, even if the process is killed; what it names may still be in the caches of devices. ``harden``
makes it valid after a power failure too, once all that it names is durable. ``settle`` then makes the other record
void: from then on, places that only that one names may be written to. So there always is a valid record whose places
are intact.

A file is a line of one sector, then JSON, whose CRC-32C the line has. The line has a CRC-32C of its own, and a mark:
the record is durable, void, or valid until the machine restarts, while the mark equals ``boot_id()``.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nvme_ops.base import lifetime, ranks
from nvme_ops.base.errors import FormatError, naming
from nvme_ops.base.reentrant_event import ReentrantEvent
from nvme_ops.base.text import parse_json
from nvme_ops.filesystem.files import boot_id, read_whole, write_whole
from nvme_ops.filesystem.publication import publish
from nvme_ops.memory.pieces import checksums_anywhere
from nvme_ops.storage.session import Session, file_of, kept_sessions
from nvme_ops.storage.store import TensorStore

_MAGIC = "nvme_ops commit 2"
_SECTOR = 512
_DURABLE, _VOID = "durable", "void"
# Version 1 was a value in a store with a journal, under this key. Version 0 was the same without the line.
_KEY, _EARLIER = "commit", "nvme_ops commit 1"
_ALONE = " of rank 0 of 1"  # earlier versions have named a launcher's only rank so
_NO_JOURNAL = b"a later version of nvme_ops has written these states\n"  # makes an earlier version refuse them


Folders = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


@dataclass(frozen=True)
class Record:
    """The content of a file. ``number`` counts the records; a void one has no content."""

    path: str
    number: int
    mark: str
    content: dict[str, Any]
    nbytes: int = 0
    checksum: int = 0

    @property
    def is_valid(self) -> bool:
        """Whether a program may continue with it."""
        return self.mark in (_DURABLE, boot_id() or _DURABLE)


class Records:
    """The two files of a session that is kept, in its first folder. Only one thread at a time may call a method.

    Args:
        session: one that is kept.

    Attributes:
        newest: the record to continue with.
        durable: the record that a power failure would leave: the same one, or the one before.

    Raises:
        FormatError: a record is damaged, empty or missing, and the one before is not valid any more.
        OSError: a file cannot be read or made.
    """

    def __init__(self, session: Session) -> None:
        self._paths = [session.path(0, f"record {number}") for number in range(2)]
        self._fd = -1  # of the file for the next record, or whose record is not durable
        self._line: tuple[int, int, int] = (0, 0, 0)  # of the newest record: number, bytes and checksum
        self._pending = False  # it may be valid
        self._marked = False  # it was marked as durable, without a flush since
        if not os.path.lexists(self._paths[0]):
            self._create(session)
        self.newest, self.durable = self._load()
        if _journal(session) != _NO_JOURNAL:
            publish(session.path(0, "index"), _NO_JOURNAL, durable=False)

    def _create(self, session: Session) -> None:
        """Makes the files. If the process is killed meanwhile, the next one starts again, or finds both complete."""
        other = None
        with contextlib.suppress(FileNotFoundError, FormatError):
            other = _read(self._paths[1])
        if other is not None and other.mark != _VOID:
            raise _missing(self._paths[0])
        content = json.dumps(_earlier(session) if _journal(session) else {}).encode()
        publish(self._paths[1], _line(-1, _VOID), durable=False)
        publish(self._paths[0], _line(0, _DURABLE, len(content), _checksum(content)) + content)

    def _load(self) -> tuple[Record, Record]:
        """Returns the newest valid record and the newest durable one. Raises FormatError."""
        records: list[Record] = []
        damaged: list[FormatError] = []
        for path in self._paths:
            try:
                records.append(_read(path))
            except FormatError as error:
                damaged.append(error)
            except FileNotFoundError:
                damaged.append(_missing(path))
        usable = sorted((record for record in records if record.is_valid), key=lambda record: record.number)
        durable = [record for record in usable if record.mark == _DURABLE]
        if not durable:  # places that a record of another kind names may have been written to
            raise (damaged or [FormatError(f"{self._paths[0]}: no record of an optimizer's step is valid any more")])[0]
        newest, before = usable[-1], durable[-1]
        self._line = newest.number, newest.nbytes, newest.checksum
        self._target = 1 - self._paths.index(before.path)  # the file for the next record
        self._outdated = newest is before and len(durable) > 1  # it has the durable record of the step before
        return newest, before

    def write(self, content: dict[str, Any]) -> None:
        """Records a step, for as long as the machine runs. Raises OSError; the record before stays valid."""
        text = json.dumps(content).encode()
        self._line, self._pending = (self._line[0] + 1, len(text), _checksum(text)), True
        self._mark(boot_id() or "-", text)

    def harden(self) -> None:
        """Makes the last record durable; all that it names must be so already. Raises OSError."""
        self._pending = self._marked = True
        self._mark(_DURABLE)
        self._sync()
        fd, target = self._fd, 1 - self._target
        self._fd, self._target, self._outdated, self._marked, self._pending = -1, target, True, False, False
        os.close(fd)

    def settle(self) -> None:
        """Makes a record void that was replaced by a durable one, or could not be made durable. Raises OSError.

        Until then, places that only that record names must not be written to.
        """
        if self._pending:
            self._put(_line(self._line[0], _VOID))
            if self._marked:
                self._sync()
            self._marked = self._pending = False
        if self._outdated:
            self._put(_line(-1, _VOID))
            self._outdated = False

    def _mark(self, mark: str, text: bytes = b"") -> None:
        number, *rest = self._line
        self._put(_line(number, mark, *rest) + text)

    def _put(self, content: bytes) -> None:
        """Writes the beginning of a file; the first sector is written in one piece."""
        if self._fd < 0:
            self._fd = _open(self._paths[self._target])
        with naming("write of the record of a step", self._paths[self._target]):
            write_whole(self._fd, content)

    def _sync(self) -> None:
        with naming("fdatasync of the record of a step", self._paths[self._target]):
            os.fdatasync(self._fd)

    def close(self) -> None:
        """Closes the files. Further calls do nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class Flush:
    """Makes something durable, once, on a thread that the program waits for before it exits.

    A failure that nobody has waited for is reported at exit.

    Args:
        what: names what is made durable.
        work: does it.
        slots: by a chunk's number: where its states are that are made durable.
    """

    def __init__(self, what: str, work: Callable[[], object], slots: Mapping[int, int | None]) -> None:
        self.what, self.slots = what, slots
        self.failure: Exception | None = None  #: of the work, once it has ended
        self._work: Callable[[], object] | None = work
        self._once, self._done = threading.Lock(), ReentrantEvent()
        self._thread = threading.Thread(target=self._run, name="nvme_ops.flush", daemon=False)

    def start(self) -> None:
        """Starts the thread, unless it was started."""
        if self._thread.ident is None:
            try:
                self._thread.start()
            except RuntimeError:  # there are too many threads, or Ctrl-C came here before
                self._run()

    def wait(self) -> None:
        """Waits for the end. Ctrl-C interrupts the wait, but not the work."""
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
                if threading.current_thread() is not self._thread:  # Ctrl-C: the next call starts again
                    raise
                self.failure = _unreported[self] = RuntimeError(f"the thread was ended by {type(error).__name__}")
            self._work = None  # with what it keeps alive
            self._done.set()


_unreported: dict[Flush, Exception] = {}  # failures that nobody has waited for


def _report() -> None:
    while _unreported:
        flush, failure = _unreported.popitem()
        lifetime.tell(f"{flush.what} is not durable: {failure}")


lifetime.at_exit(_report)
lifetime.at_fork(_unreported.clear)


def _line(number: int, mark: str, nbytes: int = 0, checksum: int = 0) -> bytes:
    text = f"{_MAGIC} {number} {mark} {nbytes} {checksum:08x}"
    return f"{text} {_checksum(text.encode()):08x}".ljust(_SECTOR - 1).encode() + b"\n"


def _checksum(content: bytes) -> int:
    return checksums_anywhere([torch.frombuffer(bytearray(content), dtype=torch.uint8)])[0] if content else 0


def _read(path: str) -> Record:
    """Reads a record. Raises FileNotFoundError, OSError or FormatError."""
    whole = _content(path)
    try:
        if not whole.strip(b"\0"):
            raise ValueError("it is empty")
        fields = whole[:_SECTOR].decode("ascii").removeprefix(_MAGIC).split()
        number, mark, nbytes, checksum = int(fields[0]), fields[1], int(fields[2]), int(fields[3], 16)
        if whole[:_SECTOR] != _line(number, mark, nbytes, checksum):
            raise ValueError(f"its first line does not begin with {_MAGIC!r}, or its checksum does not match")
        if mark == _VOID:
            return Record(path, number, mark, {})
        text = whole[_SECTOR : _SECTOR + nbytes]
        if len(text) != nbytes or _checksum(text) != checksum:
            raise ValueError("its checksum does not match")
        parsed = parse_json(text)
        content = {} if parsed == {} else required(parsed, "places")
        return Record(path, number, mark, content, nbytes, checksum)
    except (ValueError, IndexError) as error:
        raise FormatError(f"{path}: the record of an optimizer's step is damaged: {error}") from error


def _missing(path: str) -> FormatError:
    return FormatError(f"{path}: the record of an optimizer's step is missing")


def required(content: Any, *more: str) -> dict[str, Any]:
    """Returns JSON content that describes states, with lists named ``more``. Raises ValueError for other content."""
    kinds = {"steps": int, "buffer": int, "made": list, "chunks": list, **dict.fromkeys(more, list)}
    if isinstance(content, dict) and all(type(content.get(name)) is kind for name, kind in kinds.items()):
        return content
    raise ValueError("it does not describe the states of an optimizer")


def _open(path: str) -> int:
    return os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


def _content(path: str) -> bytes:
    fd = _open(path)
    try:
        return read_whole(fd)
    finally:
        os.close(fd)


def _journal(session: Session) -> bytes:
    """Returns the journal of the store that an earlier version has kept, or the text in its place."""
    path = session.path(0, "index")
    return _content(path) if os.path.lexists(path) else b""


def _earlier(session: Session) -> dict[str, Any]:
    """Returns the content of an earlier version's record, and the places in its store. Raises FormatError."""
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
                raise ValueError(f"its checksum does not match, or it does not begin with {_EARLIER!r}")
            content = required(parse_json(text))
            keys = [f"{number}/{slot}" for number, (slot, _) in enumerate(content["chunks"])]
            content["places"] = store.described(key for key in keys if key in store)
        except (ValueError, TypeError) as error:
            path = session.path(0, "slab")
            raise FormatError(f"{path}: the record of the last step of an optimizer is damaged: {error}") from error
        store.sync()
        return content


# The sessions of ranks, each of which has records of its own


def session_name(folders: Folders, name: str, reuse: bool) -> str:
    """Returns the name of this rank's session: ``name`` for the only one, whether a launcher has started it or not."""
    me = ranks.distributed()
    if me is not None and me.world_size > 1:
        return f"{name} of rank {me.rank} of {me.world_size}"
    sessions = [session for session, *_ in kept_sessions(_first(folders))] if reuse else []
    return name + _ALONE if name + _ALONE in sessions and name not in sessions else name


def warn_of_others(folders: Folders, name: str) -> None:
    """Warns that states begin anew although others have kept some under this name in the first folder."""
    pattern = re.compile(re.escape(name) + r"(?: of rank \d+ of \d+)?")
    others: dict[str, tuple[int, str]] = {}  # steps and path, by session
    for session, path, in_use in kept_sessions(_first(folders)):
        if not in_use and pattern.fullmatch(session) and (steps := _steps_in(path)) is not None:
            others[session] = steps, path
    if not others:
        return
    me = ranks.distributed() or ranks.Rank(0, 1)
    those = ", ".join(f"step {steps} of {session!r} in {path}" for session, (steps, path) in others.items())
    if me.world_size == 1:
        take = f"If each of those ranks had all parameters, name={next(iter(others))!r} continues with its states"
    else:
        take = "If each rank has all parameters, save_states there and load_states here are enough"
    warnings.warn(
        f"{name!r} begins without states, at step 0, as rank {me.rank} of {me.world_size}, but other ranks have kept "
        f"some here: {those}. The same number of ranks would continue with them. To take them over, save the result of "
        "get_optimizer_state_dict there and give it to set_optimizer_state_dict here, both of "
        f"torch.distributed.checkpoint. {take}. Remove these folders if nobody needs them",
        stacklevel=3,
    )


def _first(folders: Folders) -> str | os.PathLike[str]:
    """Returns the folder that has the records; an empty text if none is given, which ``Session`` will refuse."""
    return folders if isinstance(folders, str | os.PathLike) else next(iter(folders), "")


def _steps_in(path: str) -> int | None:
    """Returns the steps that the session at ``path`` has recorded, or None if it has none that can be read."""
    records: list[Record] = []
    for number in range(2):
        with contextlib.suppress(OSError, FormatError):
            records.append(_read(file_of(path, f"record {number}")))
    content = max((record for record in records if record.is_valid), key=lambda record: record.number, default=None)
    return content.content.get("steps") if content is not None else None


def scalars_to_json(scalars: dict[str, Any] | None) -> dict[str, Any] | None:
    """Returns scalar states for JSON: a tensor as its dtype, value and whether it is in host memory."""
    if scalars is None:
        return None
    return {
        name: [str(value.dtype).removeprefix("torch."), value.item(), value.device.type == "cpu"]
        if isinstance(value, torch.Tensor)
        else value
        for name, value in scalars.items()
    }


def scalars_from_json(described: dict[str, Any] | None, device: torch.device) -> dict[str, Any] | None:
    """Undoes ``scalars_to_json``; tensors that are not in host memory are put on ``device``."""
    if described is None:
        return None
    scalars = dict(described)
    for name, value in scalars.items():
        if isinstance(value, list):
            dtype, number, on_host = value
            scalars[name] = torch.tensor(number, dtype=getattr(torch, dtype), device="cpu" if on_host else device)
    return scalars
