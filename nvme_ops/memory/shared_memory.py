"""``SharedTier``: host memory that processes have in common, in which each finds what another one has read.

It is one memfd, found through ``/proc`` in the processes of the same user, so it ends with the last of them, killed or
not, and nothing has to be removed. It is divided into pieces. What has to end with a process are its locks on bytes of
the memfd (fcntl(2), open file description locks): one that it keeps a piece, one that it fills it. A piece has a key,
which names its bytes; whoever is the only one to keep a piece may give it another key, and frees it in the end.

Rejected: the page cache, which is shared, too. CPUs have to copy from it, 0.1 to 0.2 s for each GiB: to an H200, at 24
to 27 GB/s by four of them, while the bus moves 55 from page-locked memory without any (docs/gpu-results.md). And nobody
can say what stays in it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import mmap
import os
import socket
import struct
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, TypeVar

import torch

from nvme_ops.base.lifetime import Tracked, track
from nvme_ops.base.limits import free_memory
from nvme_ops.base.settings import PAGE
from nvme_ops.memory.page_locked import PageLocked, unregister
from nvme_ops.memory.tier import Share, Tier, in_pages

T = TypeVar("T")
Key = tuple[int, int]  # 128 bits
_NAMELESS: Key = 0, 0

_LAYOUT = 1  # changes with what a key or a record means
_HEADER = 2 << 20  # bytes at the start: records of pieces
_RECORD = struct.Struct("=qqq3B5x")  # the key, at which byte the piece ends, its state; of the first: how many follow
_FILLING, _COMPLETE, _REFILLED = range(3)  # of its state, 1 where that is so
_KEPT, _FILLED, _TABLE = 0, 1 << 60, 1 << 61  # the bytes to lock: of a piece, beginning there; of all records
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW  # who maps it finds all of it there
_PATIENCE = 5.0  # seconds that others may take for what takes them a moment
_PERIOD = 1.0  # seconds between looks for pieces whose processes have ended

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)
_KEEP_SIZE_PUNCH_HOLE = 1 | 2
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_CHUNK = 8 << 20  # bytes that the system supplies by one call: a signal makes it begin anew


def _flock(place: int, kind: int) -> bytes:
    return struct.pack("hhqqi0q", kind, os.SEEK_SET, place, 1, 0)


_UNLOCKED = _flock(_TABLE, fcntl.F_UNLCK)


def key_of(*what: object) -> Key:
    """Returns the key of bytes that ``what`` identifies."""
    first, second = struct.unpack("=qq", hashlib.blake2b(repr(what).encode(), digest_size=16).digest())
    return first, second


def shared_memory(what: object, nbytes: int) -> SharedMemory | None:
    """Returns the memory for bytes of ``what``; None if the system gives none, or registers none for a GPU.

    Only processes of one user that see the same file systems share it, and only if they agree about its layout.

    Args:
        what: identifies the bytes, for example those of unchanged files.
        nbytes: the most bytes that all pieces of different keys have together.
    """
    with contextlib.suppress(OSError):
        name, nbytes = _name(what, nbytes), _HEADER + in_pages(nbytes)
        memory = SharedMemory(_open(name, nbytes), nbytes)
        locked = memory.locked(memory.page_locked, 0, PAGE)  # not every system that has a memfd has such locks
        if locked is None or not locked.refusal:
            return memory
    return None


def _name(what: object, nbytes: int) -> str:
    key = key_of(_LAYOUT, os.geteuid(), os.readlink("/proc/self/ns/mnt"), nbytes, what)
    return "nvme_ops-{:016x}{:016x}".format(*(word % 2**64 for word in key))


def _open(name: str, nbytes: int) -> int:
    """Returns a descriptor of the memfd that others of this user have, or of a new one."""
    with socket.socket(socket.AF_UNIX) as lock:  # an abstract name, which one process at a time can have
        deadline = time.monotonic() + _PATIENCE
        while True:
            try:
                lock.bind(f"\0{name}")
                break
            except OSError as error:
                if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                    raise
                time.sleep(0.002)
        if (found := _find(name, nbytes)) is not None:
            return found
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, nbytes)
            os.pwrite(fd, _RECORD.pack(0, 0, _HEADER, 0, 0, 0), 0)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        except BaseException:
            os.close(fd)
            raise
        return fd


def _find(name: str, nbytes: int) -> int | None:
    """Opens a memfd anew, as locks belong to who has opened it."""
    for process in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has ended, or is none of ours
            if os.stat(f"/proc/{process}").st_uid != os.geteuid():
                continue
            for number in os.listdir(f"/proc/{process}/fd"):
                link = f"/proc/{process}/fd/{number}"
                with contextlib.suppress(OSError):
                    if os.readlink(link) == f"/memfd:{name} (deleted)":
                        fd = os.open(link, os.O_RDWR | os.O_CLOEXEC)
                        if _is_ours(fd, nbytes):
                            return fd
                        os.close(fd)
    return None


def _is_ours(fd: int, nbytes: int) -> bool:
    """Returns whether this user has made it, who may have got others' from them, and whether it stays as it is."""
    status = os.fstat(fd)
    with contextlib.suppress(OSError):
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        return (status.st_uid, status.st_size, seals & _SEALS) == (os.geteuid(), nbytes, _SEALS)
    return False


class SharedMemory(Tracked):
    """A memfd with pieces, mapped in one piece. A forked child finds zeros in it.

    Args:
        fd: is closed, and so all locks end, when this is freed.
        nbytes: all of it.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        self._fd, self._nbytes = fd, nbytes
        self._address = self._map(None, mmap.MAP_SHARED)
        if self._address == ctypes.c_void_p(-1).value:
            os.close(fd)
            raise OSError(ctypes.get_errno(), "mmap")
        self._header = memoryview(self.buffer(0, _HEADER)).cast("B")
        self._words = self._header.cast("q")
        self._ending = weakref.finalize(self, _unmap, fd, self._address, nbytes)
        self._ending.atexit = False  # then the system does it
        track(self)

    def _map(self, address: int | None, flags: int) -> int:
        access = mmap.PROT_READ | mmap.PROT_WRITE
        mapped: int = _libc.mmap(address, self._nbytes, access, flags | _MAP_NORESERVE, self._fd, 0)
        return mapped

    def _after_fork(self) -> None:
        self._ending.detach()
        fd, self._fd = self._fd, -1
        self._map(self._address, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED)
        os.close(fd)

    def buffer(self, start: int, nbytes: int) -> Any:
        """Returns a buffer over a part of it. It does not keep the memory mapped."""
        return (ctypes.c_ubyte * nbytes).from_address(self._address + start)

    def tensor(self, start: int, nbytes: int) -> torch.Tensor:
        """Returns a tensor over a part of it, which keeps it mapped."""
        buffer = self.buffer(start, nbytes)
        buffer.keeps = self
        return torch.frombuffer(buffer, dtype=torch.uint8)

    def page_locked(self, start: int, nbytes: int) -> PageLocked | None:
        """Registers a part of it with CUDA; returns None without a GPU."""
        return PageLocked(nbytes, self.tensor(start, nbytes)) if torch.cuda.is_available() else None

    def place(self, memory: torch.Tensor) -> int:
        """Returns at which byte of this a tensor begins."""
        return memory.data_ptr() - self._address

    def _lock(self, place: int, kind: int) -> bool:
        """Takes, changes or ends a lock of this process; returns False if another one's is in the way."""
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _flock(place, kind))
        except (BlockingIOError, PermissionError):
            return False
        return True

    def locked(self, work: Callable[..., T], *arguments: object, patience: float | None = None) -> T:
        """Calls a function while no other process keeps, frees or names pieces. OSError if it waits in vain."""
        if self._fd < 0:
            raise OSError(errno.EBADF, "the memory that processes share is the parent's")
        deadline = time.monotonic() + (_PATIENCE if patience is None else patience)
        try:
            while not self._lock(_TABLE, fcntl.F_WRLCK):
                if time.monotonic() > deadline:
                    raise TimeoutError("another process, which shares its host memory, does not go on")
                time.sleep(0.0005)
            return work(*arguments)
        finally:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _UNLOCKED)  # at once: Ctrl-C may come at the beginning of any call

    # The pieces, from 1

    def _records(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        count = 1 + self._words[0]
        return enumerate(_RECORD.iter_unpack(self._header[_RECORD.size : count * _RECORD.size]), 1)

    def _name(self, piece: int, key: Key) -> None:
        self._words[4 * piece], self._words[4 * piece + 1] = key

    def _is(self, piece: int, state: int) -> bool:
        return self._header[_RECORD.size * piece + 24 + state] != 0

    def _set(self, piece: int, state: int, value: bool) -> None:
        self._header[_RECORD.size * piece + 24 + state] = value

    def span(self, piece: int) -> tuple[int, int]:
        """Returns at which byte a piece begins, and its bytes."""
        start, end = self._words[4 * piece - 2], self._words[4 * piece + 2]
        return start, end - start

    def bytes_complete(self) -> int:
        """Returns the bytes of the pieces that are complete."""
        return sum(self.span(piece)[1] for piece, _ in self._records() if self.is_complete(piece))

    def piece_of(self, key: Key) -> int | None:
        """Returns the piece of a key, if there is one."""
        records = bytes(self._header[: (1 + self._words[0]) * _RECORD.size])
        at = records.find(struct.pack("=qq", *key), _RECORD.size)
        return None if at < 0 else at // _RECORD.size

    def keep(self, key: Key, nbytes: int, free: Iterable[int]) -> int | None:
        """Keeps the piece of this key, or one that gets it; None if there is no room. Call it with the lock.

        Args:
            key: names the bytes.
            nbytes: of the piece, in whole pages.
            free: pieces of such size that this process keeps and does not use, one of which is preferred to others.
        """
        if (piece := self.piece_of(key)) is not None:
            return piece if self._lock(_KEPT + piece, fcntl.F_RDLCK) else None
        reusable = [piece for piece in free if not self._is(piece, _FILLING) and not self._is(piece, _REFILLED)]
        nameless = [piece for piece, record in self._records() if record[:2] == _NAMELESS]
        for piece in (*reusable, *(piece for piece in nameless if self.span(piece)[1] == nbytes)):
            if self._rename(piece, key, is_kept=piece in reusable):
                return piece
        piece, end = 1 + self._words[0], self._words[4 * self._words[0] + 2]
        if end + nbytes > self._nbytes or (1 + piece) * _RECORD.size > _HEADER:
            return None
        self._header[piece * _RECORD.size :][: _RECORD.size] = _RECORD.pack(*_NAMELESS, end + nbytes, 0, 0, 0)
        self._words[0] = piece
        return piece if self._rename(piece, key) else None

    def _rename(self, piece: int, key: Key, is_kept: bool = False) -> bool:
        """Keeps a piece under another key, if no other process keeps it."""
        kept, released = (_flock(_KEPT + piece, kind) for kind in (fcntl.F_RDLCK, fcntl.F_UNLCK))
        then = kept if is_kept else released
        try:
            if self._lock(_KEPT + piece, fcntl.F_WRLCK):
                self._set(piece, _COMPLETE, False)
                self._name(piece, key)
                then = kept
                return True
            return False
        finally:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, then)

    def release(self, pieces: Iterable[int]) -> None:
        """Frees pieces, unless others keep them. Call it with the lock."""
        for piece in pieces:
            released = _flock(_KEPT + piece, fcntl.F_UNLCK)
            try:
                if self._lock(_KEPT + piece, fcntl.F_WRLCK):
                    self._set(piece, _COMPLETE, False)
                    # fresh pages: what a device still does for a process that was killed, it does to the old ones
                    if _libc.fallocate(self._fd, _KEEP_SIZE_PUNCH_HOLE, *self.span(piece)) == 0:
                        self._set(piece, _FILLING, False)
                        self._set(piece, _REFILLED, False)
                        self._name(piece, _NAMELESS)
            finally:
                fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, released)

    def left(self, kept: Collection[int]) -> list[int]:
        """Returns the pieces that have bytes, but for those that this process keeps."""
        return [piece for piece, record in self._records() if record[:2] != _NAMELESS and piece not in kept]

    def populate(self, piece: int) -> None:
        """Has the system supply a piece's memory. Raises OSError if it has none: later, that would end the program."""
        start, nbytes = self.span(piece)
        for place in range(start, start + nbytes, _CHUNK):
            os.posix_fallocate(self._fd, place, min(_CHUNK, start + nbytes - place))

    # What is in a piece; call these while it is kept

    def is_complete(self, piece: int) -> bool:
        """Returns whether all its bytes are there."""
        return self._is(piece, _COMPLETE)

    def begin_to_fill(self, piece: int, anyhow: bool = False) -> bool:
        """Returns whether this process may fill it now; ``anyhow``: even while another one does so."""
        is_alone = self._lock(_FILLED + piece, fcntl.F_WRLCK)
        if is_alone and self.is_complete(piece):
            self._lock(_FILLED + piece, fcntl.F_UNLCK)
            return False
        if not is_alone and not anyhow:
            return False
        if self._is(piece, _FILLING):  # by one that was killed, for which a device may still do so: it keeps its key
            self._set(piece, _REFILLED, True)
        self._set(piece, _FILLING, True)
        return True

    def end_to_fill(self, piece: int, complete: bool) -> None:
        """Ends what ``begin_to_fill`` began, once nothing more of it is under way."""
        if complete:
            self._set(piece, _COMPLETE, True)
        self._set(piece, _FILLING, False)
        self._lock(_FILLED + piece, fcntl.F_UNLCK)


def _unmap(fd: int, address: int, nbytes: int) -> None:
    _libc.munmap(address, nbytes)
    os.close(fd)


class _Kept:
    """A piece that this process keeps."""

    def __init__(self, piece: int, nbytes: int, locked: PageLocked | None) -> None:
        self.piece, self.nbytes, self.locked = piece, nbytes, locked
        self.user: Callable[[], Any] = lambda: None  #: returns the buffer that is handed out, while it is used


class SharedTier(Tier):
    """The part of it that this process keeps, page-locked where there is a GPU.

    A piece that is no longer used is kept for others of its size, as in ``PooledTier``, until there is need of more
    than ``nbytes`` in all. An eighth of what the machine has now is left to others.

    Args:
        nbytes: the most bytes to keep.
        memory: is shared.
    """

    def __init__(self, nbytes: int, memory: SharedMemory) -> None:
        super().__init__(nbytes, torch.device("cpu"))
        self.memory, self._spare = memory, free_memory() // 8
        self._kept: dict[int, _Kept] = {}  # by where they begin
        self.is_held_up = False  #: another process does not go on, for which nobody waits again
        self._looked = 0.0  # when pieces were looked for whose processes have ended

    def allocate_for(self, key: Key, nbytes: int, share: Share) -> torch.Tensor | None:
        """Returns memory for the bytes of a key, in which they may be already; see ``Share.allocate``."""
        with self._lock:
            if share.bytes_in_use + in_pages(nbytes) > share.nbytes:
                return None
            with contextlib.suppress(OSError):  # the system has no memory, or another process does not go on
                if (owner := self._keep(key, in_pages(nbytes))) is not None:
                    made = owner, torch.frombuffer(owner, dtype=torch.uint8, count=nbytes)
                    return None if self._hand_out(nbytes, share, False, lambda *_: made) is None else made[1]
            return None

    def piece_of(self, memory: torch.Tensor) -> int | None:
        """Returns which piece was handed out; None if this is other memory."""
        kept = self._kept.get(self.memory.place(memory))
        return None if kept is None else kept.piece

    def _keep(self, key: Key, size: int) -> Any:
        """Keeps the piece of a key, and returns a buffer over it; None if there is no room. Raises OSError."""
        memory = self.memory
        free = [kept.piece for kept in self._free() if kept.nbytes == size]
        patience, self.is_held_up = 0 if self.is_held_up else None, True
        piece = memory.locked(memory.keep, key, size, free, patience=patience)
        self.is_held_up = False
        if piece is None:
            return None
        start, _ = memory.span(piece)
        if start not in self._kept:
            self._make_room(size, memory.is_complete(piece))
            memory.populate(piece)
            locked = memory.page_locked(start, size)
            self._kept[start] = _Kept(piece, size, locked and locked.warn())
        kept = self._kept[start]
        if (owner := kept.user()) is None:
            owner = memory.buffer(start, size)
            owner.keeps = memory, kept.locked
            kept.user = weakref.ref(owner)
        return owner

    def _make_room(self, size: int, is_there: bool) -> None:
        """Gives up pieces for another one, which others may have filled. Raises OSError if that is not enough."""
        unused = self._free()
        while unused and sum(kept.nbytes for kept in self._kept.values()) + size > self.nbytes:
            self._release([unused.pop(0)])
        kept = sum(kept.nbytes for kept in self._kept.values())
        if kept + size > self.nbytes or not (is_there or free_memory() - size >= self._spare):
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    def _free(self) -> list[_Kept]:
        return [kept for kept in self._kept.values() if kept.user() is None]

    def _release(self, pieces: Iterable[_Kept]) -> None:
        """Gives up pieces, but those that cannot be unregistered: a GPU would go on to use the memory that they had."""
        released = []
        for kept in pieces:
            kept.locked, (start, nbytes) = None, self.memory.span(kept.piece)
            if unregister(self.memory.tensor(start, nbytes)):
                released.append(kept.piece)
                del self._kept[start]
        self.memory.locked(self.memory.release, released)

    def collect(self) -> None:
        """Takes back the parts that nobody uses any more, and frees now and then what ended processes have left."""
        with self._lock:
            super().collect()
            if (now := time.monotonic()) < self._looked + _PERIOD:
                return
            self._looked = now
            if left := self.memory.left({kept.piece for kept in self._kept.values()}):
                with contextlib.suppress(OSError):  # another process is at it, or does not go on
                    self.memory.locked(self.memory.release, left, patience=0)

    def close(self) -> None:
        """Gives up what is not used."""
        with self._lock, contextlib.suppress(OSError):
            self.collect()
            self._release(self._free())
