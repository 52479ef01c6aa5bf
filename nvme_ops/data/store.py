"""``SampleStore``: reads samples, many by one vectored request, from files that it keeps open."""

from __future__ import annotations

import contextlib
import copy
import errno
import functools
import json
import operator
import os
import resource
import stat
import threading
import time
import weakref
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.utils.data

from nvme_ops.base.errors import ChecksumError, FormatError, named, naming
from nvme_ops.base.lifetime import Closing, Owned, forkable_lock
from nvme_ops.base.native import native
from nvme_ops.base.settings import ALIGNMENT, PAGE
from nvme_ops.base.text import Counts, counted, never_raising, size_words
from nvme_ops.data import formats
from nvme_ops.data.columns import Columns, Sample, cpu_tensor
from nvme_ops.data.index import CLASS_NAMES, SampleIndex, aligned
from nvme_ops.filesystem.publication import FileState
from nvme_ops.io.arguments import require_callables, require_switches
from nvme_ops.io.engine import Priority
from nvme_ops.io.file import handle_of
from nvme_ops.io.future import IoFuture
from nvme_ops.io.handle import aio_handle
from nvme_ops.io.tensors import checksums_of, empty, groups

if TYPE_CHECKING:
    from nvme_ops.ops.async_io import OpenFile

#: Returns memory of the given number of bytes, ``torch.uint8``.
Allocate: TypeAlias = Callable[[int], torch.Tensor]

_BEYOND = 1 << 44  # bytes: no file is larger
_LOOKED_UP = 4096  # samples whose sizes are looked up at once
_MAX, _MIN = 1 << 14, 4  # bounds of the number of files that are kept open
_AT_ONCE = 256  # files that are opened at the beginning
_UINT32 = (1 << 32) - 1  # checksums, which torch holds as int32
_SHARE = 20  # descriptors of the process's limit for each file kept open, which may need four of them


@dataclass(repr=False)
class SampleStats(Counts):
    """Counts the samples that this process has read. ``print`` shows a table of what is not 0."""

    batches: int = 0  #: that a ``Loader`` has returned; not counted by a store
    samples: int = 0
    bytes_read: int = 0  #: of their records
    seconds_waited: float = 0.0  #: for samples, and for what ``decode`` makes of a ``Loader``'s


class SampleStore(Closing, torch.utils.data.Dataset[Any]):
    """Samples in the files of one or several folders, read by number.

    Threads may share a store. A forked child may use it; unpickling it opens it again. It is a map-style dataset too: a
    ``torch.utils.data.DataLoader`` reads each batch by one request. ``Loader`` needs no workers and is faster.

    Args:
        path: a folder that ``SampleWriter`` wrote to, one with MosaicML's MDS shards, or one with WebDataset's tars (or
            a single tar). For the last two, an index is made once, and kept in the folder if that is writable.
        handle: moves the bytes; the store's own when None. If the files are in several folders, each has a copy of it.
        verify: compare each record read with its checksum, where the store has checksums.
        transform: called with each sample that is read by ``[]``, by ``read`` or by a DataLoader, in the worker; a
            ``Loader`` takes it as its ``decode``. ``submit`` reads samples as they are stored.

    Raises:
        FormatError: the index or a file is damaged, was cut off, or does not belong to the others.
        OSError: something is missing or cannot be read.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        handle: aio_handle | None = None,
        verify: bool = False,
        transform: Callable[[Sample], Any] | None = None,
    ) -> None:
        require_switches(verify=verify)
        require_callables(transform=transform)
        self.path, self.transform = os.path.abspath(named(path)), transform
        self._arguments = {"path": self.path, "handle": handle, "verify": verify, "transform": transform}
        while True:
            self.index: SampleIndex = formats.index_of(self.path, verify)
            try:
                self._files = DataFiles(self.index)
                break
            except FileNotFoundError:
                if formats.index_of(self.path).id == self.index.id:  # else the store has just been replaced
                    raise
        self._sample = formats.reader_of(self.index)
        self._columns = Columns.from_json(self.index.columns) if self.index.kind == "native" else None
        places = [os.path.dirname(path) for path in self._files.paths]
        folders = list(dict.fromkeys(places)) if self.index.kind == "native" else []
        first = aio_handle() if handle is None else handle_of(handle)
        self._handles = [first, *(copy.copy(first) for _ in folders[1:])]
        self._handle_of = [folders.index(place) if folders else 0 for place in places]
        self._verify = verify
        self._lock, self._stats = forkable_lock(), SampleStats()
        self._closed = False

    def __len__(self) -> int:
        return self.index.records

    @property
    def columns(self) -> Columns | None:
        """What a sample consists of; None where the files do not say so in advance."""
        return self._columns

    @property
    def class_names(self) -> list[str]:
        """The names of the classes, in the order of their labels; empty if the writer was given none."""
        names = self.index.more.get(CLASS_NAMES)
        return list(map(str, names)) if isinstance(names, list) else []

    @property
    def nbytes(self) -> int:
        """Bytes of the data files."""
        return sum(file.nbytes for file in self.index.files)

    def __getitem__(self, number: int | list[int]) -> Any:
        """Reads a sample, or a list of them. Raises IndexError, TypeError, and what ``read`` raises."""
        if isinstance(number, list):
            return self.read(number)
        if not hasattr(number, "__index__"):
            kind = type(number).__name__
            raise TypeError(f"{self.path}: the number of a sample must be an int, not {kind}: read() takes several")
        return self.read([operator.index(number)])[0]

    def __getitems__(self, numbers: Sequence[int]) -> list[Any]:
        """Reads a batch: torch's fetcher calls this."""
        return self.read(numbers)

    def read(self, numbers: Sequence[int] | torch.Tensor) -> list[Any]:
        """Reads samples, by one request. Numbers may be in any order and repeat; -1 is the last sample.

        Raises:
            IndexError: there is no such sample.
            OSError, EOFError: reading failed; the message names the file.
            FormatError: the bytes are not a sample, or the index is wrong.
            ChecksumError: with ``verify``: the bytes differ from those written.
        """
        samples = self.submit(numbers).samples()
        return samples if self.transform is None else [self.transform(sample) for sample in samples]

    def submit(
        self,
        numbers: Sequence[int] | torch.Tensor,
        *,
        priority: Priority = Priority.DEMAND,
        allocate: Allocate | None = None,
        limit: int | None = None,
    ) -> Read:
        """Starts reading samples, and returns the ``Read`` that will have them.

        Args:
            numbers: as for ``read``.
            priority: of the transfers.
            allocate: returns memory to read into, ``torch.uint8``, for a number of bytes; huge pages when None.
            limit: the most bytes that one sample may have.

        Raises:
            IndexError, FormatError, OSError: as in ``read``.
            ValueError: a sample is larger than ``limit``, or the store is closed.
        """
        if self._closed:
            raise ValueError(f"{self.path}: the store is closed")
        return Read(self, self.checked(numbers), priority, allocate or huge_pages, limit)

    def checked(self, numbers: Sequence[int] | torch.Tensor) -> torch.Tensor:
        """Returns sample numbers as a tensor of int64, none negative. Raises IndexError or TypeError."""
        count = len(self)
        wrong = TypeError("numbers of samples must be a sequence of integers")
        too_large = IndexError(f"{self.path}: there are no such samples: it has {count}")
        try:
            tensor = cpu_tensor(numbers)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            listed = not isinstance(numbers, str) and isinstance(numbers, Sequence)
            raise (too_large if listed and all(isinstance(number, int) for number in numbers) else wrong) from error
        no_integers = tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool
        if tensor.dim() != 1 or (tensor.numel() and no_integers):
            raise wrong
        if tensor.dtype == torch.uint64 and (tensor.view(torch.int64) < 0).any():
            raise too_large
        tensor = tensor.to(torch.int64)
        outside = (tensor < -count) | (tensor >= count)
        if outside.any():
            raise IndexError(f"{self.path}: there is no sample {int(tensor[outside][0])}: it has {count}")
        return torch.where(tensor < 0, tensor + count, tensor)

    def room(self, numbers: torch.Tensor) -> int:
        """Returns how many bytes ``submit`` allocates for these checked numbers. Raises FormatError."""
        if self.index.stride is not None:
            return len(numbers) * self.index.stride
        return int(_rooms(self.index, aligned(self.index.locate(numbers)[2], self.index.alignment)).sum())

    def ranges(self, nbytes: int) -> Iterator[range]:
        """Divides all samples into ranges of at most ``nbytes`` or one sample; yields them. Raises FormatError."""
        for start in range(0, len(self), _LOOKED_UP):
            numbers = torch.arange(start, min(len(self), start + _LOOKED_UP), device="cpu")
            for group in groups(self.index.locate(numbers)[2].tolist(), nbytes):
                yield range(start + group.start, start + group.stop)

    def stats(self) -> SampleStats:
        """Returns what this process has read so far, for a ``Loader`` too; workers of a DataLoader count their own."""
        with self._lock:
            return replace(self._stats)

    def close(self) -> None:
        """Closes the files; those being read once the reads have ended. Further calls do nothing."""
        self._closed = True
        self._files.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _open, (self._arguments, self._identity())

    def _identity(self) -> str | int:
        """Returns a value that differs for a store that replaces this one."""
        if self.index.kind == "native":
            return self.index.id
        return zlib.crc32(repr((self.index.files, self.index.more.get("about"))).encode())

    @never_raising
    def __repr__(self) -> str:
        """Returns for example ``<SampleStore '/mnt/nvme/train': 1000 samples, native>``."""
        content = f"{counted(len(self), 'sample')}, {self.index.kind}"
        return f"<SampleStore {self.path!r}: {content}{', closed' * self._closed}>"


def _open(arguments: dict[str, Any], identity: str | int) -> SampleStore:
    store = SampleStore(**arguments)
    if store._identity() != identity:
        raise FormatError(f"{store.path}: was replaced since the process that sent it here opened it")
    return store


class Read(Owned):
    """Samples that are being read. Their memory is shared with nothing else, and is freed with the last of them.

    Args:
        store: where they are.
        numbers: their numbers, checked.
        priority: the priority of the transfer.
        allocate: returns the memory.
        limit: the most bytes that one sample may have.

    Raises:
        ValueError: a sample is larger than ``limit``.
        FormatError, OSError: as for ``SampleStore.read``.
    """

    def __init__(
        self, store: SampleStore, numbers: torch.Tensor, priority: Priority, allocate: Allocate, limit: int | None
    ) -> None:
        super().__init__()
        self._store, self._numbers = store, numbers
        self._futures: list[IoFuture] = []
        self._files: dict[int, OpenDataFile] = {}
        self._waited = self._interrupted = False
        self._lock = threading.Lock()  # held by the first of several threads while it waits for the bytes
        index = store.index
        files, begins, self._lengths = index.locate(numbers)
        if limit is not None and len(numbers) and int(self._lengths.max()) > limit:
            place = int(self._lengths.argmax())
            raise ValueError(
                f"{store.path}: sample {int(numbers[place])} has {size_words(int(self._lengths[place]))}, and only "
                f"{size_words(limit)} are allowed"
            )
        spans = aligned(self._lengths, index.alignment)  # with padding, so that neighbours touch and are read together
        self._rooms = _rooms(index, spans)
        self.memory = allocate(int(self._rooms.sum()))
        self.nbytes = self.memory.nbytes
        self.nbytes_of_records = int(self._lengths.sum())  #: without what is between them in memory
        self._rows = self.memory.view(len(numbers), index.stride) if index.stride else None
        try:
            self._submit(files, begins, spans, priority)
        except BaseException:
            self._settle()
            raise

    def wait(self) -> None:
        """Waits for the bytes. Raises as ``SampleStore.read`` does."""
        with self._lock:
            if self._waited:
                return
            begin = time.perf_counter()
            try:
                for future in self._futures:
                    future.result()
            except BaseException as error:
                self._interrupted = not isinstance(error, Exception)
                raise
            seconds = time.perf_counter() - begin
            if self._store._verify:
                self._compare()
            self._check_files()
            self._futures, self._waited = [], True
            with self._store._lock:
                stats = self._store._stats
                stats.samples += len(self)
                stats.bytes_read += self.nbytes_of_records
                stats.seconds_waited += seconds

    def records(self) -> list[torch.Tensor]:
        """Waits, then returns the bytes of each record."""
        self.wait()
        return list(self._split(self._lengths))

    def samples(self, which: slice = slice(None)) -> list[Sample]:
        """Waits for all, then returns the samples, or ``which`` of them. Raises as ``SampleStore.read`` does."""
        self.wait()
        records, made = self._split(self._lengths), []
        for place in range(len(self))[which]:
            try:
                made.append(self._store._sample(records[place]))
            except FormatError as error:
                words = f"{self._store.path}: sample {int(self._numbers[place])}: {error}"
                raise type(error)(words) from error
        return made

    def batch(self) -> Any:
        """Waits, then returns the samples by column: one tensor where their size is fixed, else a list of values.

        Samples of fixed size are not copied. A store of unnamed samples gives one value, any other a dict of them.
        """
        columns = self._store.columns
        if columns is not None and self._rows is not None and columns.record_bytes:
            self.wait()
            return columns.stacked(self._rows)
        samples = self.samples()
        if columns is not None:
            return columns.gathered(samples)
        names = dict.fromkeys(name for sample in samples for name in sample)
        return {name: [sample.get(name) for sample in samples] for name in names}

    def _submit(self, files: torch.Tensor, begins: torch.Tensor, spans: torch.Tensor, priority: Priority) -> None:
        if self.memory.numel() == 0:
            return
        store = self._store
        order = torch.argsort(files * _BEYOND + begins)
        few, which, starts = len(store.index.files) <= store._files.most, files[order], begins[order]
        follow = (starts[1:] - starts[:-1] == spans[:1]) & (which[1:] == which[:-1])
        targets: Sequence[torch.Tensor] | torch.Tensor
        if self._rows is not None and few and int(follow.sum()) * 8 <= len(begins):  # few are adjacent
            targets = self._rows  # costs less than a tensor for each
        else:
            files, begins, parts = which, starts, self._split(spans)
            targets = [parts[k] for k in order.tolist()]
        numbers, offsets = files.tolist(), begins.tolist()
        first = 0
        for end in [len(numbers)] if few else _ends_of_groups(numbers, store._files.most):
            for future in self._futures:  # their files cannot be open at the same time
                future.result()
            self._check_files()
            self._submit_group(targets[first:end], numbers[first:end], offsets[first:end], priority)
            first = end

    def _submit_group(
        self, targets: Sequence[torch.Tensor] | torch.Tensor, numbers: list[int], offsets: list[int], priority: Priority
    ) -> None:
        store = self._store
        opened = {number: store._files.open(number) for number in dict.fromkeys(numbers)}
        self._files = opened
        for which, handle in enumerate(store._handles):
            mine: Sequence[int] = range(len(numbers))
            if len(store._handles) > 1:
                mine = [k for k in mine if store._handle_of[numbers[k]] == which]
            if mine:
                self._futures.append(
                    handle.submit_preadv(
                        targets if len(mine) == len(targets) else [targets[k] for k in mine],
                        [opened[numbers[k]].file for k in mine],
                        [offsets[k] for k in mine],
                        priority=priority,
                    )
                )

    def _check_files(self) -> None:
        """Raises FormatError if a file has been changed: anything may have been read from it."""
        for number, opened in self._files.items():
            self._store._files.check(number, opened.fd)
        self._files = {}

    def _split(self, sizes: torch.Tensor) -> Sequence[torch.Tensor]:
        """Returns the first ``sizes`` bytes of each record's memory."""
        parts: Sequence[torch.Tensor] = self.memory.split(
            torch.stack([sizes, self._rooms - sizes], 1).view(-1).tolist()
        )
        return parts[::2]

    def _compare(self) -> None:
        index = self._store.index
        if index.checksums is None:
            return
        crcs, wanted = checksums_of(self._split(self._lengths), "crc32c"), index.checksums[self._numbers].tolist()
        wrong = [k for k, (one, other) in enumerate(zip(crcs, wanted, strict=True)) if one != other & _UINT32]
        if wrong:
            files = index.locate(self._numbers)[0]
            names = [f"sample {int(self._numbers[k])}" for k in wrong]
            raise ChecksumError(self._store._files.paths[int(files[wrong[0]])], names)

    def _settle(self) -> None:
        """Cancels reads that nobody waits for, so that the files can be closed."""
        for future in self._futures:
            if not future.done():
                future.request_cancel()
        for future in self._futures if not self._interrupted else ():  # after an interruption it may not wait
            future.exception()

    def __len__(self) -> int:
        return len(self._numbers)

    @never_raising
    def __repr__(self) -> str:
        """Returns for example ``<Read of 64 samples, 4 MiB: pending>``."""
        done = self._waited or all(future._has_ended() for future in self._futures.copy())
        return f"<Read of {counted(len(self), 'sample')}, {size_words(self.nbytes)}: {'done' if done else 'pending'}>"

    def __del__(self) -> None:
        if getattr(self, "_futures", None) and self._is_ours():
            self._settle()


def _ends_of_groups(numbers: list[int], most: int) -> list[int]:
    """Divides sorted numbers into groups of at most ``most`` different ones; returns where each group ends."""
    changes = [k for k in range(1, len(numbers)) if numbers[k] != numbers[k - 1]]
    return [*changes[most - 1 :: most], len(numbers)]


def _rooms(index: SampleIndex, spans: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of memory for each record."""
    return spans if index.stride is not None else aligned(spans, PAGE if index.alignment == PAGE else ALIGNMENT)


#: Returns so many bytes of memory from the buffer pool.
huge_pages: Allocate = functools.partial(empty, dtype=torch.uint8)


# The files


def trailer(store: str, number: int) -> bytes:
    """Returns the last page of a data file, which says which file of which store it is."""
    return json.dumps({"nvme_ops": "samples", "store": store, "file": number}).encode().ljust(PAGE)


class OpenDataFile:
    """A data file that stays open as long as a read or the store refers to it; the store may drop it first."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.file: OpenFile = native().OpenFile(fd)

    def __del__(self) -> None:
        if hasattr(self, "file"):
            self.file.close()
            os.close(self.fd)


class DataFiles:
    """The data files of a store, opened when they are first read. Threads may share them; a forked child inherits them.

    Raises:
        FormatError: a file's size or modification time is not what the index says, or it has changed since.
        OSError: a file is missing or cannot be read.
    """

    def __init__(self, index: SampleIndex) -> None:
        folder = os.path.dirname(index.path)
        self._index, self.paths = index, [os.path.join(folder, file.name) for file in index.files]
        self._seen: dict[int, FileState] = {}
        self._lock = forkable_lock()
        self._open: OrderedDict[int, OpenDataFile] = OrderedDict()
        self._alive = weakref.WeakValueDictionary[int, OpenDataFile]()  # also those that only reads refer to
        #: The most files that are kept open, and that one read has open at a time.
        self.most = _MIN
        with contextlib.suppress(OSError):  # a filter refuses it
            self.most = max(_MIN, min(_MAX, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // _SHARE))
        for number, path in enumerate(self.paths):
            self.check(number, path)
        for number in range(min(len(self.paths), self.most, _AT_ONCE)):
            self.open(number)

    def crowded(self) -> bool:
        """Returns whether reads have so many files open that further ones should wait."""
        return len(self._alive) > 2 * self.most

    def open(self, number: int) -> OpenDataFile:
        """Returns an open file, to be kept while a transfer uses it. Raises what the constructor raises."""
        opened = self._open.get(number) or self._alive.get(number)
        if opened is not None:
            return opened
        with self._lock:
            while len(self._open) >= self.most:
                self._open.popitem(last=False)
            opened = self._open[number] = self._alive[number] = self._open_file(number)
            return opened

    def close(self) -> None:
        """Closes the files that no transfer uses, and the others when their transfers have ended."""
        self._open.clear()

    def _open_file(self, number: int) -> OpenDataFile:
        path = self.paths[number]
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            self.check(number, fd)
            if self._index.kind == "native":
                with naming("read of the end", path):
                    end = os.pread(fd, PAGE, self._index.files[number].nbytes - PAGE)
                if end != trailer(self._index.id, number):
                    raise FormatError(f"{path}: belongs to another store than its index, or is damaged at its end")
            return OpenDataFile(fd)
        except BaseException:
            os.close(fd)
            raise

    def check(self, number: int, where: str | int) -> None:
        """Raises what the constructor raises if a file, given by path or descriptor, is not the one first seen."""
        file, path, status = self._index.files[number], self.paths[number], os.stat(where)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "is no regular file", path)
        if status.st_size != file.nbytes:
            raise FormatError(
                f"{path}: has {status.st_size} bytes, and {file.nbytes} by the index: it was cut off or replaced"
            )
        if file.stamp is not None and status.st_mtime_ns != file.stamp:
            raise FormatError(f"{path}: was changed after its index was made: make the index again")
        fd = where if isinstance(where, int) else -1
        if (seen := self._seen.get(number)) is None:
            self._seen[number] = FileState(status, fd)
        elif not seen.holds(status, fd):
            raise FormatError(f"{path}: was replaced or changed while the store was open")
