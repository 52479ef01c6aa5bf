"""``AsyncLog``: an append-only log whose caller waits for storage only if the buffer is full."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import threading
import time
import warnings
import weakref
from collections.abc import Iterator, Mapping
from io import FileIO
from typing import Literal

from nvme_ops.base.errors import named
from nvme_ops.base.lifetime import Closing, Tracked, Usable, tell, track
from nvme_ops.base.text import bytes_of, never_raising, size_words
from nvme_ops.data.log_file import Segment, blocks, is_owned_by, records_of, segments
from nvme_ops.filesystem.files import make_last_folder, try_lock

_MAX = (1 << 32) - 1  # bytes of a record
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # safe if another user has put something there
_PARTS = 4  # flushes in a window: a record that just misses one waits for the next, and both take time

Full = Literal["block", "drop", "raise"]


class AsyncLog(Closing, Usable, Tracked):
    """Appends records, which are written in the background and are durable within ``window`` seconds.

    A process that is killed loses what it appended within the last window, and nothing older. Threads may share a log;
    several processes may write to one name, each to its own files. A forked child makes its own log. Failed writes are
    repeated until they succeed. A log that is dropped without ``close`` writes what is left, with a warning.

    Args:
        path: the name of the files, to which a number is added. Their folder is made if it is missing and its parent
            exists and is not ``/``, ``/mnt`` or ``/media``.
        window: seconds within which a record is durable (``fsync``), as long as the device keeps up.
        buffer_bytes: bytes of records that may wait to be written. Beyond that, ``on_full`` says what ``append`` does.
        on_full: ``"block"``: wait for room; ``"drop"``: return False, and count; ``"raise"``: BlockingIOError.
        rotate_bytes: approximate size of a file, in bytes.
        keep: how many of this user's files to keep besides the one being written; older ones are removed when a file
            is begun or ended, unless somebody is writing to them. None: all.

    Raises:
        ValueError, TypeError: invalid arguments.
        OSError: the folder cannot be written.
    """

    _closed = True  # until there is something to end
    _closed_error = "{self.path}: the log is closed"
    _forked_error = "{self.path}: this log is the parent's: a forked child makes its own"

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        window: float = 1.0,
        buffer_bytes: int | str = "64M",
        on_full: Full = "block",
        rotate_bytes: int | str = "1G",
        keep: int | None = None,
    ) -> None:
        self.path, self.window, self.on_full = os.path.abspath(named(path)), window, on_full
        self._limit = bytes_of("buffer_bytes", buffer_bytes)
        self._rotate = bytes_of("rotate_bytes", rotate_bytes)
        self._keep = keep
        if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int)):
            raise TypeError(f"keep must be an int, not {keep!r}")
        if keep is not None and keep < 1:
            raise ValueError(f"keep must be at least 1, not {keep}")
        if isinstance(window, bool) or not 0.001 <= window <= 3600:
            raise ValueError(f"window must be between 0.001 and 3600 seconds, not {window}")
        if on_full not in ("block", "drop", "raise"):
            raise ValueError(f"on_full must be 'block', 'drop' or 'raise', not {on_full!r}")
        make_last_folder(os.path.dirname(self.path))
        #: Records that ``append`` has dropped.
        self.dropped = 0
        super().__init__()
        self._lock = threading.RLock()  # held briefly; reentrant: a signal handler may append
        self._changed = threading.Condition(self._lock)
        self._records: list[bytes] = []
        self._bytes = 0  # of those, and of those being written
        self._asked = self._durable = self._failed = 0  # the latest flush that was asked for, succeeded, failed
        self._written = 0, 0  # records and bytes that are not durable yet
        self._failure: Exception | None = None
        self._closing = self._dropped = False
        self._segment: Segment | None = Segment.new(self.path)
        self._closed = False
        self._remove_oldest(self._segment)
        given = weakref.ref(self), self._changed, window / _PARTS
        self._thread = threading.Thread(target=_serve, args=given, name="nvme_ops.log", daemon=True)
        self._thread.start()
        track(self)

    @staticmethod
    def read(path: str | os.PathLike[str]) -> Iterator[bytes]:
        """Yields the records of a log, file by file; also those that a file still being written has so far.

        A file whose writer was killed, or has not ended it yet, may end within a block, which is skipped. Damage within
        such a file, as after a power failure, is skipped with a RuntimeWarning.

        Raises:
            FileNotFoundError: there is no such log.
            FormatError: a properly ended file is damaged; the message says where.
            OSError: a file cannot be read.
        """
        return records_of(path)

    def append(self, record: bytes | bytearray | memoryview | str | Mapping[str, object]) -> bool:
        """Adds a record: bytes, text (UTF-8), or a dict (JSON). Returns whether it was taken.

        Raises:
            OSError: writing failed, and has not succeeded since. Earlier records are tried again; this one is not.
            BlockingIOError: the buffer is full, with ``on_full="raise"``.
            ValueError: the log is closed, or the record has 4 GiB or more.
            RuntimeError: in a forked child.
        """
        if not isinstance(record, bytes):
            record = _encoded(record)
        if len(record) > _MAX:
            raise ValueError(f"a record must have less than 4 GiB, not {size_words(len(record))}")
        with self._lock:
            busy = self._closing or self._closed or self._failure is not None or self._bytes >= self._limit
            if busy and not self._admit():
                return False
            self._records.append(record)
            self._bytes += len(record) + 4
        return True

    def flush(self, timeout: float | None = None) -> None:
        """Waits until everything appended so far is durable.

        Raises OSError if it cannot be written; TimeoutError after ``timeout`` seconds; RuntimeError in a forked child.
        """
        self._require_ours()
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            if self._closed:
                return
            self._asked += 1
            mine = self._asked
            self._changed.notify_all()
            while self._durable < mine:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise TimeoutError(f"{self.path}: not durable after {timeout} s")
                self._changed.wait(min(self.window, 1.0 if left is None else left))
                if self._failure is not None and self._failed >= mine:  # not a failure from before this call
                    raise self._failure.with_traceback(None)  # a traceback keeps the frames of all callers

    def close(self) -> None:
        """Writes everything and ends the file. Raises OSError if that fails; it can be called again."""
        if not self._is_ours():
            return
        with self._changed:
            while not self._closed:
                self._closing = True
                self._changed.notify_all()
                while self._closing:
                    self._changed.wait(1.0)
                if self._failure is not None:
                    raise self._failure.with_traceback(None)  # a traceback keeps the frames of all callers
        self._thread.join()  # it is about to end. Before Python 3.13 an interrupted join may count as done

    def _admit(self) -> bool:
        """Waits for room if ``on_full`` says so; returns whether a record may be added. Raises as ``append`` does."""
        while True:
            self.require_open()
            if self._closing:
                raise ValueError(self._closed_error.format(self=self))
            if self._failure is not None:
                raise self._failure.with_traceback(None)  # a traceback keeps the frames of all callers
            if self._bytes < self._limit:
                return True
            if self.on_full == "drop":
                self.dropped += 1
                return False
            if self.on_full == "raise":
                words = f"{size_words(self._bytes)} wait to be written"
                raise BlockingIOError(errno.EAGAIN, words, self.path)
            self._asked += 1
            self._changed.notify_all()
            self._changed.wait(0.05)

    # On the thread that writes

    def _work(self) -> bool:
        """Writes all waiting records; returns whether the log is still open."""
        with self._changed:
            if not (self._records or self._asked != self._durable or self._closing or self._failure):
                return True
            records, self._records = self._records, []
            asked, closing = self._asked, self._closing
        failure: Exception | None = None
        try:
            self._abandon_failed()
            if records:
                self._write(records)
            if closing and self._segment is not None:
                self._end(self._segment)
        except Exception as error:
            failure = error
            self._recover(records)
        with self._changed:
            self._failure, self._closing = failure, False if closing else self._closing
            if failure is None:
                self._durable, self._closed = asked, closing
            else:
                self._failed = asked
                self._records[:0] = records  # those that are not durable
            self._changed.notify_all()
            if failure is not None:
                self._changed.wait(min(self.window, 0.2))
            return not self._closed

    def _write(self, records: list[bytes]) -> None:
        """Writes records durably; removes the durable ones from the list."""
        self._written = 0, 0
        for block in list(blocks(records)):
            if self._segment is None:
                self._segment = Segment.new(self.path)
            nbytes = self._segment.write(block)
            self._written = self._written[0] + len(block), self._written[1] + nbytes
            if self._segment.nbytes >= self._rotate:
                self._end(self._segment)
                self._drop_durable(records)
        if self._segment is not None and self._written[0]:
            self._segment.sync()
            self._drop_durable(records)

    def _end(self, segment: Segment) -> None:
        segment.end()
        self._segment = None
        self._remove_oldest(segment)

    def _recover(self, records: list[bytes]) -> None:
        """Makes the whole blocks durable after a failure, to continue after them; else abandons the file."""
        segment = self._segment
        if segment is None or segment.failed:
            return
        if not segment.sync_failed:  # another sync would report nothing: the kernel forgets what it could not write
            with contextlib.suppress(Exception):
                segment.cut()
                segment.sync()
                self._drop_durable(records)
                return
        segment.failed = True
        with contextlib.suppress(Exception):  # it is tried again before anything else is written
            self._abandon_failed()

    def _abandon_failed(self) -> None:
        """Abandons a file that cannot be continued. Raises OSError if it still has records to be written again."""
        if self._segment is not None and self._segment.failed:
            self._segment.abandon()
            self._segment = None

    def _drop_durable(self, records: list[bytes]) -> None:
        """Removes from ``records`` those written so far, which are durable now, and makes room for others."""
        (count, nbytes), self._written = self._written, (0, 0)
        del records[:count]
        with self._changed:
            self._bytes -= nbytes
            self._changed.notify_all()

    def _remove_oldest(self, mine: Segment) -> None:
        if self._keep is None:
            return
        present = mine.path if self._segment is not None else None
        with contextlib.suppress(OSError):  # other users' files, and the one being written, do not count
            ours = [path for path in segments(self.path) if path != present and is_owned_by(path, mine.owner)]
            for path in ours[: -self._keep]:
                with contextlib.suppress(OSError), FileIO(os.open(path, _FLAGS)) as file:
                    if try_lock(file.fileno()):  # nobody is writing to it
                        os.unlink(path)

    def _at_exit(self) -> None:
        try:
            self.close()
        except Exception as error:
            tell(_loss(self, error))

    def _after_fork(self) -> None:
        """Empties the log: the records are the parent's, whose threads may have held the lock."""
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._records, self._bytes = [], 0
        self._failure = RuntimeError("of the parent")  # so that append checks the process
        if self._segment is not None:
            self._segment.close()

    def __del__(self) -> None:
        """Writes what is left, since the thread can no longer reach the log."""
        self._dropped = True
        if not self.is_usable():
            return
        self._closing = True
        lost = self._work()
        if self._segment is not None:
            self._segment.close()
        if lost:
            warnings.warn(_loss(self, self._failure), RuntimeWarning, stacklevel=1)
        warnings.warn(f"{self.path}: a log was dropped without close()", ResourceWarning, stacklevel=1)

    @never_raising
    def __repr__(self) -> str:
        """Returns for example ``<AsyncLog '/mnt/nvme/requests': 12 KiB to be written>``."""
        waiting = f"{size_words(self._bytes) if self._bytes else 'nothing'} to be written"
        return f"<AsyncLog {self.path!r}: {'closed' if self._closed else waiting}>"


def _encoded(record: object) -> bytes:
    if isinstance(record, Mapping):
        return json.dumps(record).encode()
    if isinstance(record, str):
        return record.encode()
    if isinstance(record, bytearray | memoryview):
        return bytes(record)
    raise TypeError(f"a record must be bytes, a str or a dict, not {type(record).__name__}")


def _serve(reference: weakref.ref[AsyncLog], changed: threading.Condition, pause: float) -> None:
    """Writes for a log until it is closed or dropped; while idle, holds no reference to it."""
    while True:
        with changed:
            log = reference()
            if log is None or log._dropped:
                return
            idle = log._asked == log._durable and not log._closing
            del log
            if idle:
                changed.wait(pause)
        log = reference()
        if log is None or log._dropped or not log._work():
            return
        del log


def _loss(log: AsyncLog, error: Exception | None) -> str:
    return f"{log.path}: what was appended last could not be written: {error}"
