"""Blocks of memory between a stream and its file, which a program fills or reads sequentially.

``ReadAhead`` fills blocks in advance while reads are sequential. ``WriteBehind`` gathers writes in blocks, which are
written to the file while the next ones are filled.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Container
from typing import TYPE_CHECKING

import torch

from nvme_ops.base.errors import naming
from nvme_ops.base.native import native
from nvme_ops.base.settings import PAGE
from nvme_ops.io.engine import Op, engine_of
from nvme_ops.io.handle import aio_handle
from nvme_ops.io.tensors import pool_buffer

if TYPE_CHECKING:
    from nvme_ops.ops.async_io import Engine, OpenFile, Operation


BLOCK, BLOCKS = 4 << 20, 4  # bytes of one, and how many a stream has in each direction
SMALL = 256 << 10  # bytes below which a transfer is left to the page cache, which gathers small ones


class Block:
    """Memory that holds ``length`` bytes of the file from ``start`` on, or will once its transfer has ended."""

    def __init__(self) -> None:
        buffer = pool_buffer(BLOCK)
        self._memory = memoryview(buffer)
        self._tensor = torch.frombuffer(buffer, dtype=torch.uint8)
        self._begin = 0
        self.place(0)

    def place(self, start: int) -> None:
        """Empties the block and places it at ``start`` in the file."""
        # page offsets equal to the file's: direct I/O then needs no staging copy
        self.start, self._begin, self.length = start, start % PAGE, 0
        self.operations: list[Operation] = []  # the last one is its transfer
        self.written = False  # by pwrite, without a transfer
        self.placed = False  # when appending: its offset is final

    @property
    def stop(self) -> int:
        """The offset in the file at which the block ends."""
        return self.start + self.length

    @property
    def room(self) -> int:
        """Bytes that can still be added."""
        return BLOCK - self._begin - self.length

    def add(self, data: memoryview) -> int:
        """Copies as much of ``data`` as there is room for; returns how many bytes."""
        count = min(len(data), self.room)
        end = self._begin + self.length
        self._memory[end : end + count] = data[:count]
        self.length += count
        return count

    def part(self, start: int, count: int) -> memoryview:
        """Returns at most ``count`` bytes of the file from ``start`` on, which must lie in the block."""
        first = start - self.start
        return self._memory[self._begin + first : self._begin + min(first + count, self.length)]

    def submit(self, engine: Engine, op: Op, file: OpenFile) -> None:
        """Starts the block's transfer, in one call in C: no signal can come between submitting and recording it."""
        arguments = (op,), (self.tensor(),), (file,), (self.start,), (False,)
        self.operations.extend(map(engine.submit, *arguments))

    def done(self) -> bool:
        """Returns whether no transfer is in flight."""
        return all(operation.done() for operation in self.operations)

    def failure(self) -> BaseException | None:
        """Waits for the transfer; returns the exception it failed with, or None."""
        failure = None
        for operation in self.operations:
            operation.wait(None)
            failure = failure or operation.exception()
        return failure

    def tensor(self) -> torch.Tensor:
        """Returns the bytes that the block holds."""
        return self._tensor[self._begin : self._begin + self.length]


class Blocks:
    """At most ``BLOCKS`` blocks, allocated when they are first needed."""

    def __init__(self) -> None:
        self._all: list[Block] = []

    def take(self, used: Container[Block]) -> Block | None:
        """Returns a block that is not in ``used`` and has no transfer in flight, or None."""
        for block in self._all:
            if block not in used and block.done():
                return block
        if len(self._all) < BLOCKS:
            self._all.append(Block())
            return self._all[-1]
        return None

    def settle(self) -> None:
        """Waits until no transfer is in flight."""
        for block in self._all:
            block.failure()


_AHEAD = 2  # blocks that are read beyond the one in use
_GAP = 64 << 10  # bytes that a read may skip and still count as sequential


class ReadAhead:
    """Blocks of the file that were read in advance. Whoever changes the file by other means has to ``drop`` them."""

    def __init__(self, handle: aio_handle, fd: int, file: OpenFile) -> None:
        self._handle, self._fd, self._file = handle, fd, file
        self._all = Blocks()
        self._blocks: deque[Block] = deque()  # adjacent ones of the file; transfers of all others are abandoned
        self._expected = -1  # where a sequential read would begin

    def read_into(self, data: memoryview, offset: int) -> int:
        """Fills ``data`` from ``offset`` on, up to the end of the file; returns the bytes read."""
        done, sequential = 0, self._expected >= 0 and 0 <= offset - self._expected <= _GAP
        while done < len(data):
            block = self._block_at(offset + done)
            if block is None and sequential and self._begin_at(offset + done):
                continue
            if block is None:
                done += self._read_directly(data[done:], offset + done)
                break
            if not self._has_arrived(block):
                sequential = False  # go on without blocks: a direct read meets the error again, and raises it
                continue
            part = block.part(offset + done, len(data) - done)
            if len(data) >= BLOCK:
                native().populate(data, done, done + len(part))
            data[done : done + len(part)] = part
            done += len(part)
            self._continue()
        self._expected = offset + done
        return done

    def read(self, count: int, offset: int) -> bytes | None:
        """Returns ``count`` bytes from ``offset`` on if one block has them all, else None."""
        block = self._block_at(offset)
        if block is None or offset + count > block.stop or not self._has_arrived(block):
            return None
        self._continue()
        self._expected = offset + count
        return bytes(block.part(offset, count))

    def peek(self, count: int, offset: int) -> bytes:
        """Returns at least one and at most ``count`` bytes from ``offset`` on; none at the end of the file."""
        block = self._block_at(offset)
        if block is None and self._begin_at(offset):
            block = self._block_at(offset)
        if block is not None and self._has_arrived(block):
            return bytes(block.part(offset, count))
        with naming("read", self._fd):
            return os.pread(self._fd, min(count, PAGE), offset)

    def drop(self) -> None:
        """Discards what was read ahead."""
        self._blocks.clear()

    def close(self) -> None:
        """Waits until no transfer is in flight."""
        self._all.settle()

    def _block_at(self, offset: int) -> Block | None:
        """Returns the block with this byte of the file, or None; drops the blocks before it."""
        for number, block in enumerate(self._blocks):
            if block.start <= offset < block.stop:
                for _ in range(number):
                    self._blocks.popleft()
                return block
        return None

    def _begin_at(self, offset: int) -> bool:
        """Starts to read a block at ``offset``; returns False at the end of the file."""
        if offset >= os.fstat(self._fd).st_size:
            return False
        self.drop()
        self._fetch(offset)
        return True

    def _continue(self) -> None:
        """Starts reads until ``_AHEAD`` blocks follow the first one."""
        while 0 < len(self._blocks) <= _AHEAD and not self._blocks[-1].room:
            if self._blocks[-1].stop >= os.fstat(self._fd).st_size:
                return
            self._fetch(self._blocks[-1].stop)

    def _fetch(self, offset: int) -> None:
        block = self._take()
        block.place(offset)
        block.length = min(block.room, os.fstat(self._fd).st_size - offset)
        block.submit(engine_of(self._handle), Op.READ, self._file)
        self._blocks.append(block)

    def _has_arrived(self, block: Block) -> bool:
        """Waits for the block; if its read failed, drops all blocks: the file may have been truncated."""
        if block.failure() is not None:
            self.drop()
            return False
        return True

    def _read_directly(self, data: memoryview, offset: int) -> int:
        count = max(0, min(len(data), os.fstat(self._fd).st_size - offset))
        if count < SMALL:
            done = 0  # a read that returns less has met a page that cannot be read, or the end
            with naming("read", self._fd):
                while done < count and (got := _read_into(self._fd, data[done:count], offset + done)):
                    done += got
            return done
        lanes = self._handle.get_thread_count()
        engine_of(self._handle).run(Op.READ, data[:count], self._file, offset, False, lanes > 1)
        return count

    def _take(self) -> Block:
        """Returns a block that is not in use; there is one, since at most ``_AHEAD + 1`` of ``BLOCKS`` are."""
        while (block := self._all.take(self._blocks)) is None:
            self._all.settle()  # of abandoned transfers
        return block


def _read_into(fd: int, data: memoryview, offset: int) -> int:
    try:
        return os.preadv(fd, [data], offset)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
        # Python calls preadv2, which the filters of some containers refuse
        part = os.pread(fd, len(data), offset)
        data[: len(part)] = part
        return len(part)


_LARGE = 64 << 20  # bytes from which a write gains nothing from being copied first


class WriteBehind:
    """Consecutive writes that are not yet in the file; ``flush`` ends such a run.

    A failure is raised by the next call and by every one after it; what has not reached the file by then is lost. If an
    exception interrupts a call, for example from a signal handler, nothing of the calls before it is lost: a block is
    removed from ``_unfinished`` only when it is in the file.

    Args:
        handle: moves the blocks.
        fd: the file's descriptor.
        file: the same file, kept open for the handle.
        appends: a run begins at the end of the file, as it is when the run's first bytes are written there.
    """

    def __init__(self, handle: aio_handle, fd: int, file: OpenFile, appends: bool) -> None:
        self._handle, self._fd, self._file, self._appends = handle, fd, file, appends
        self._blocks = Blocks()
        self._unfinished: deque[Block] = deque()  # not in the file yet; the last one may have room for more
        self._failure: BaseException | None = None
        self._was_raised = False  # whether ``_failure`` was
        self._stop = 0

    @property
    def stop(self) -> int:
        """The offset in the file at which the run ends."""
        return self._unfinished[-1].stop if self._unfinished else self._stop

    @property
    def empty(self) -> bool:
        """True when everything written is in the file."""
        return not self._unfinished

    def write(self, data: memoryview, offset: int) -> None:
        """Copies ``data`` into blocks; 64 MiB and more are in the file on return, unless the stream appends."""
        self.raise_failure()
        if offset != self.stop:  # also after an interrupted call that has added something
            self.flush()
            self._stop = offset
        while len(data):
            if len(data) >= _LARGE and not self._appends:
                self.flush()
                lanes = self._handle.get_thread_count()
                engine_of(self._handle).run(Op.WRITE, data, self._file, self._stop, False, lanes > 1)
                self._stop += len(data)
                return
            block = self._filling() or self._take(self.stop)
            data = data[block.add(data) :]
            if not block.room:
                self._send(block)

    def flush(self) -> None:
        """Waits until everything is in the file. Raises the failure, if there is one."""
        block = self._filling()
        if block is not None:
            self._send(block)
        while self._unfinished:
            self._settle()
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raises the failure of an earlier write, if there is one."""
        if self._failure is not None:
            self._was_raised = True
            raise self._failure

    def close(self) -> None:
        """Flushes; does not raise again a failure that was raised before."""
        was_raised = self._was_raised
        try:
            self.flush()
        except BaseException:
            if not was_raised or not self.empty:
                raise

    def _filling(self) -> Block | None:
        """Returns the block that the next bytes are copied to, if there is one."""
        block = self._unfinished[-1] if self._unfinished else None
        return None if block is None or block.written or block.operations else block

    def _send(self, block: Block) -> None:
        """Starts to write a block; a small one is in the page cache on return. If interrupted, it is sent again."""
        if self._failure is None:
            try:
                self._start(block)
            except (OSError, MemoryError, RuntimeError) as error:
                self._failure = self._failure or error
        block.written = not block.operations

    def _start(self, block: Block) -> None:
        if self._appends and block is self._unfinished[0] and not block.placed:  # others may have appended meanwhile
            block.start = os.fstat(self._fd).st_size
        block.placed = True
        if block.length >= SMALL:
            block.submit(engine_of(self._handle), Op.WRITE, self._file)
            return
        offset = block.start
        with naming("write", self._fd):
            while offset < block.stop:
                offset += os.pwrite(self._fd, block.part(offset, block.length), offset)

    def _take(self, offset: int) -> Block:
        while (block := self._blocks.take(self._unfinished)) is None:
            self._settle()
        block.place(offset)
        self._unfinished.append(block)
        return block

    def _settle(self) -> None:
        """Waits for the oldest block."""
        block = self._unfinished[0]
        failure = block.failure()
        self._failure = self._failure or failure
        self._stop = block.stop
        self._unfinished.popleft()
