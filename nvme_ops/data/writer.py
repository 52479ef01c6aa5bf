"""``SampleWriter``: writes a store of samples, which appears complete when the writer is closed, or not at all."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import re
import threading
import warnings
from array import array
from collections.abc import Iterable, Mapping, Sequence
from io import FileIO
from typing import Any

import torch

from nvme_ops.base.errors import FormatError, named, naming, paths_of
from nvme_ops.base.lifetime import Closing, Tracked, Usable, tell, track, untrack
from nvme_ops.base.settings import PAGE
from nvme_ops.base.text import bytes_of, counted, never_raising, parse_json
from nvme_ops.data.columns import Columns, Sample, Spec
from nvme_ops.data.index import CLASS_NAMES, NAME, DataFile, SampleIndex, aligned, read_index, write_index
from nvme_ops.data.store import trailer
from nvme_ops.filesystem.files import (
    HeldFile,
    abandoned,
    held,
    locked,
    make_last_folder,
    require_room,
    sync,
    sync_folder,
    try_lock,
    unlink,
    write_whole,
)
from nvme_ops.filesystem.publication import content_of
from nvme_ops.io.arguments import require_switches
from nvme_ops.io.file import File
from nvme_ops.io.file import open as open_file
from nvme_ops.io.tensors import checksums_of, joined_checksum

_SMALL_ALIGNMENT = 8  # bytes: what a float64 needs
_FIRST_BYTES = 1 << 20  # bytes of the first records, which decide the alignment
_MIN = 64  # bytes that each of these counts as at least
_PATIENCE = 5.0  # seconds that the end of the program waits for a thread that is adding or closing
_PREFIX = "samples-"
_MARK = ".nvme_ops-claim"
_MAX_CLAIM = 1 << 20  # bytes
_CLAIM = re.compile(r"\.samples-([0-9a-f]{16})" + re.escape(_MARK))


class SampleWriter(Closing, Usable, Tracked):
    """Writes samples to data files of ``shard_bytes`` each and, at the end, an index. Use it in a ``with`` block.

    Threads may share it; their samples are added in the order of the calls.

    Until it is closed, there is no store, or still the previous one. An exception in the block removes the data
    files, and so does the next writer in the folder after a crash. A store that is open while it is replaced can still
    be read, from the files that it has open. A writer that is never closed loses its samples: a RuntimeWarning says so
    where it is dropped, a line on stderr where the program ends.

    Args:
        folders: one, or several, each on a device of its own: data files are spread over all of them. The index goes to
            the first. Each is made if it is missing and its parent exists and is not ``/``, ``/mnt`` or ``/media``.
        columns: what a sample consists of: a dict of names and ``bytes``, ``str``, a dtype (for numbers), or a dtype
            and a shape, whose first dimension may be -1; ``int``, ``float`` and ``bool`` for numbers that are read as
            Python's. One of these alone for samples that are not dicts; ``bytes`` when None.
        shard_bytes: approximate size of a data file, in bytes.
        alignment: records begin at multiples of this many bytes. None: a page if padding to it adds at most a sixteenth
            to about the first MiB of records; else 8. Never less than the size of an element.
        checksums: keep a CRC-32C of each record, for ``verify``.
        overwrite: replace an existing store.
        class_names: what the labels 0, 1, ... in a column stand for; ``SampleStore.class_names`` returns them.

    Raises:
        FileExistsError: there is a store, and ``overwrite`` is False.
        ValueError, TypeError: invalid arguments.
        OSError: a folder cannot be written.
    """

    _closed = True  # until there is something to remove
    _closed_error = "the writer is closed"
    _forked_error = "this writer is the parent's: a forked child makes its own, in a folder of its own"

    def __init__(
        self,
        folders: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        columns: Mapping[str, Spec] | Spec | None = None,
        *,
        shard_bytes: int | str = "4G",
        alignment: int | None = None,
        checksums: bool = True,
        overwrite: bool = False,
        class_names: Sequence[str] = (),
    ) -> None:
        require_switches(checksums=checksums, overwrite=overwrite)
        self.columns = Columns(columns)
        self._folders = [os.path.realpath(named(folder)) for folder in paths_of(folders, "folders")]
        self._shard_bytes = bytes_of("shard_bytes", shard_bytes)
        if not self._folders or len(set(self._folders)) < len(self._folders):
            raise ValueError("folders must name at least one folder, and none twice")
        if alignment is not None and not (1 <= alignment <= PAGE and PAGE % alignment == 0):
            raise ValueError(f"alignment must be a power of two up to {PAGE}, not {alignment}")
        for folder in self._folders:
            make_last_folder(folder)
        self.path = os.path.join(self._folders[0], NAME)
        self._overwrite, self._class_names = overwrite, list(map(str, class_names))
        self._require_right_to_replace()
        self._alignment = alignment and max(alignment, self.columns.alignment)  # None until it is settled
        self._first_records: list[list[memoryview]] = []  # written once they have decided the alignment
        self._first_bytes = 0  # of those
        self._id = os.urandom(8).hex()
        self._ends = array("q")
        self._sums = array("I") if checksums else None
        self._files: list[DataFile] = []
        self._file: File | None = None
        self._end = self._first = 0
        super().__init__()
        self._lock = threading.RLock()
        settle_abandoned(self.path)
        self._claim = WriterClaim(self.path, self._id, self._folders)
        self._failed = self._closed = False
        track(self)

    def __len__(self) -> int:
        """Returns the number of samples added so far."""
        return len(self._ends) + len(self._first_records)

    def add(self, sample: Sample) -> int:
        """Adds a sample at the end; returns its number.

        Raises TypeError, ValueError or KeyError, which name the column; the writer is then as before. Raises OSError if
        the sample cannot be written; nothing more can be added then.
        """
        self._require_ours()
        parts = self.columns.packed(sample)
        checksum = 0 if self._sums is None else _checksum(parts)
        with self._lock:
            self._require_whole()
            self._failed = True  # until the whole record is in the file
            if self._sums is not None:
                self._sums.append(checksum)
            if self._alignment is not None:
                self._append(parts, self._alignment)
            else:
                self._first_records.append([memoryview(bytes(part)) for part in parts])  # the caller may change its own
                self._first_bytes += max(_MIN, sum(map(len, parts)))
                if self.columns.record_bytes is not None or self._first_bytes >= min(_FIRST_BYTES, self._shard_bytes):
                    self._settle_alignment()
            self._failed = False
            return len(self) - 1

    def _settle_alignment(self) -> int:
        """Returns the alignment; if it is not settled, settles it by the first records and writes them."""
        if self._alignment is None:
            records, self._first_records = self._first_records, []
            sizes = [sum(map(len, parts)) for parts in records]
            padding, together = sum(-nbytes % PAGE for nbytes in sizes), sum(sizes)
            cheap = together and padding * 16 <= together  # what is aligned to pages is read without a copy
            self._alignment = max(PAGE if cheap else _SMALL_ALIGNMENT, self.columns.alignment)
            for parts in records:
                self._append(parts, self._alignment)
        return self._alignment

    def _append(self, parts: Sequence[memoryview], alignment: int) -> None:
        nbytes = sum(map(len, parts))
        if self._file is not None and self._end + nbytes > self._shard_bytes and len(self._ends) > self._first:
            self._end_shard(alignment)
        self._write(self._file or self._begin_shard(), bytes(-self._end % alignment), *parts)
        self._ends.append(self._end)

    def extend(self, samples: Iterable[Sample]) -> None:
        """Adds samples one by one. Raises as ``add`` does."""
        for sample in samples:
            self.add(sample)

    def close(self) -> None:
        """Makes everything durable and the store visible. Further calls do nothing.

        If it fails, nothing is kept, unless the store is visible already. Raises OSError; FileExistsError if there is a
        store by now.
        """
        if self._closed:
            return
        self._require_ours()
        with self._lock:
            self._require_whole()
            try:
                self._end_shard(self._settle_alignment())
                self._publish()
                self._closed = True
            except BaseException:
                self.abort()
                raise

    def _publish(self) -> None:
        with locked(self.path):
            self._require_right_to_replace()
            with held(self._claim_what_is_replaced):
                for folder in self._folders:
                    sync_folder(folder)
                write_index(self.path, self._index())
                self._claim.close()

    def abort(self) -> None:
        """Removes what was written. Further calls do nothing."""
        if not self.is_usable():
            return
        with self._lock:
            self._closed = True
            file, self._file = self._file, None
            with contextlib.suppress(Exception):
                if file is not None:
                    file.close()
            self._claim.close()

    def _require_right_to_replace(self) -> None:
        if os.path.lexists(self.path) and not self._overwrite:
            raise FileExistsError(errno.EEXIST, "has a sample store already: overwrite=True replaces it", self.path)

    def _claim_what_is_replaced(self) -> WriterClaim | None:
        """Claims the data files of the store to be replaced: they are removed once no index names them."""
        try:
            before = read_index(self.path, ())
            if before.kind == "native" and before.id != self._id:
                others = {os.path.dirname(file.name) for file in before.files if os.path.isabs(file.name)}
                copied = before.more.get("path") != self.path  # the index is a copy: the files are the original's
                return WriterClaim(self.path, before.id, [self._folders[0], *([] if copied else sorted(others))])
        except FileNotFoundError:
            pass
        except (OSError, FormatError) as error:
            warnings.warn(f"the data files of the store that is replaced stay: {error}", RuntimeWarning, stacklevel=6)
        return None

    def _require_whole(self) -> None:
        self.require_open()
        if self._failed:
            raise ValueError("writing failed before: the store is incomplete and will not be kept")

    def _begin_shard(self) -> File:
        require_room(self._folder())
        file = self._file = open_file(os.path.join(self._folder(), data_file(self._id, len(self._files))), "x")
        self._end, self._first = 0, len(self._ends)
        return file

    def _folder(self) -> str:
        """Returns the folder of the current data file."""
        return self._folders[len(self._files) % len(self._folders)]

    def _end_shard(self, alignment: int) -> None:
        file, number = self._file, len(self._files)
        if file is None:
            return
        end = aligned(aligned(self._end, alignment), PAGE)
        self._write(file, bytes(end - self._end), trailer(self._id, number))
        file.sync()
        file.close()
        self._file = None
        name = data_file(self._id, number)
        name = name if self._folder() == self._folders[0] else os.path.join(self._folder(), name)
        self._files.append(DataFile(name, self._end, self._first))

    def _write(self, file: File, *parts: bytes | memoryview) -> None:
        for part in parts:
            if part:
                file.write(part)
                self._end += len(part)

    def _index(self) -> SampleIndex:
        fixed, count = self.columns.record_bytes, len(self._ends)
        made = SampleIndex(self._id, "native", count, self._files, self._settle_alignment(), fixed, path=self.path)
        made.columns, made.more = self.columns.as_json(), {"path": self.path} if len(self._folders) > 1 else {}
        made.more |= {CLASS_NAMES: self._class_names} if self._class_names else {}
        made.ends = _tensor(self._ends, torch.int64) if fixed is None else None
        made.checksums = None if self._sums is None else _tensor(self._sums, torch.int32)
        return made

    def __exit__(self, *error: object) -> None:
        self.close() if error[0] is None else self.abort()

    def __del__(self) -> None:
        if self.is_usable():
            warnings.warn(self._loss("was dropped without close()"), RuntimeWarning, stacklevel=2)
            self.abort()

    def _loss(self, what: str) -> str:
        return f"{self.path}: a SampleWriter {what}: its {len(self)} samples are not kept"

    def _at_exit(self) -> None:
        """Removes what was written, at the end of the program, unless a thread is still adding or closing.

        Such a thread is a daemon; the next writer in the folder removes what it has written.
        """
        if not self.is_usable():
            return
        if not self._lock.acquire(timeout=_PATIENCE):
            tell(self._loss("was still at work in a thread when the program ended"))
            untrack(self)  # reported once
            return
        try:
            if not self._closed:
                tell(self._loss("was not closed when the program ended"))
                self.abort()
        finally:
            self._lock.release()

    @never_raising
    def __repr__(self) -> str:
        """Returns for example ``<SampleWriter '/mnt/nvme/train/index.nvmedata': 1000 samples>``."""
        return f"<SampleWriter {self.path!r}: {counted(len(self), 'sample')}{', closed' * self._closed}>"


def _tensor(values: array[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(values, dtype=dtype) if values else torch.empty(0, dtype=dtype, device="cpu")


def _checksum(parts: Sequence[Any]) -> int:
    checksums = checksums_of(list(parts), "crc32c")
    value = checksums[0]
    for part, checksum in zip(parts[1:], checksums[1:], strict=True):
        value = joined_checksum(value, checksum, len(part), "crc32c")
    return value


# Data files that no index names, yet or any more. If their writer was killed, the next writer removes them


def data_file(store: str, number: int) -> str:
    """Returns the name of a data file."""
    return f"{_PREFIX}{store}-{number:05d}"


def is_data_file(name: str) -> bool:
    """Returns whether ``name`` is that of a data file."""
    return re.fullmatch(_PREFIX + r"[0-9a-f]{16}-\d{5,}", name) is not None


class WriterClaim(HeldFile):
    """A hidden file beside the index, locked while its writer lives.

    ``close`` removes it, and the data files unless the index names them.

    Args:
        index: the path of the index.
        store: the id of the store whose data files are claimed.
        folders: where the data files are.

    Raises:
        OSError: it cannot be written.
    """

    def __init__(self, index: str, store: str, folders: Sequence[str]) -> None:
        self._index, self._store = index, store
        folder = os.path.dirname(index)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        super().__init__(
            os.path.join(folder, f".{_PREFIX}{store}{_MARK}"),
            lambda path: FileIO(os.open(path, flags, 0o600), "r+"),
            # patient: another process may hold the lock for a moment, to check whether the claim is abandoned. Where
            # locks do not work, no claim counts as abandoned
            functools.partial(try_lock, patient=True),
        )
        try:
            with naming("write", self.path):
                os.ftruncate(self.fileno(), 0)
                write_whole(self.fileno(), json.dumps({"index": index, "folders": list(folders)}).encode())
            sync(self.fileno(), self.path, "fsync")
            sync_folder(folder)
        except BaseException:
            self._store = ""  # nothing is claimed, and a device that does not respond is not waited for
            self.close()
            raise

    def _finish(self, file: FileIO) -> None:  # noqa: ARG002
        if self._store:
            _settle(self._index, self.path, self._store)
        else:
            with contextlib.suppress(OSError):
                os.unlink(self.path)


def settle_abandoned(index: str) -> None:
    """Removes what killed writers of this store left behind."""
    folder = os.path.dirname(index)
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        # Another user's claim could name any folder.
        with contextlib.suppress(OSError):
            if (match := _CLAIM.fullmatch(name)) and os.lstat(path).st_uid == os.geteuid():
                with abandoned(path):
                    _settle(index, path, match[1])


def _settle(index: str, path: str, store: str) -> None:
    try:
        wanted = read_index(index, ()).id == store
    except FileNotFoundError:
        wanted = False
    except (FormatError, OSError):  # the index may be this store's
        return
    if not wanted:
        for folder in _folders(index, path):
            with contextlib.suppress(OSError, ValueError):  # a name that no folder can have
                for name in os.listdir(folder):
                    if is_data_file(name) and name.split("-")[1] == store:
                        unlink(os.path.join(folder, name))
    with contextlib.suppress(OSError):
        os.unlink(path)


def _folders(index: str, path: str) -> list[str]:
    """Returns the folder of the index, and those the claim names unless it is a copy, made for another index."""
    mine = os.path.dirname(index)
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        claim = parse_json(content_of(path, _MAX_CLAIM))
        if claim["index"] == index:
            return list(dict.fromkeys([mine, *map(str, claim["folders"])]))
    return [mine]
