"""Blocks of a file that are read before they are asked for, while reads follow each other."""

from __future__ import annotations

import os
from collections import deque
from typing import TYPE_CHECKING

from nvme_ops._native import native
from nvme_ops.engine import Op, engine_of
from nvme_ops.errors import naming
from nvme_ops.handle import aio_handle
from nvme_ops.memory.blocks import BLOCK, PAGE, SMALL, Block, Blocks

if TYPE_CHECKING:
    from nvme_ops.ops.async_io import OpenFile

_AHEAD = 2  # blocks under way beyond the one that is being used
_GAP = 64 << 10  # bytes that a read may skip and still follow the one before


class ReadAhead:
    """Parts of the file as they were some time ago: what else changes the file has to ``drop`` them."""

    def __init__(self, handle: aio_handle, fd: int, file: OpenFile) -> None:
        self._handle, self._fd, self._file = handle, fd, file
        self._all = Blocks()
        self._blocks: deque[Block] = deque()  # of them, without gaps; what the others read nobody waits for any more
        self._expected = -1  # where the next read follows the last one

    def read_into(self, data: memoryview, offset: int) -> int:
        """Fills ``data``, unless the file ends before; returns how much."""
        done, follows = 0, self._follows(offset)
        while done < len(data):
            block = self._block_at(offset + done)
            if block is None and follows and self._begin(offset + done):
                continue
            if block is None:
                done += self._read_directly(data[done:], offset + done)
                break
            if not self._has_arrived(block):
                follows = False  # as if there had been no blocks; what is wrong is met again, by who asks for it
                continue
            part = block.part(offset + done, len(data) - done)
            if len(data) >= BLOCK:
                native().populate(data, done, done + len(part))
            data[done : done + len(part)] = part
            done += len(part)
            self._go_on()
        self._expected = offset + done
        return done

    def read(self, count: int, offset: int) -> bytes | None:
        """The bytes where they lie in a block, else None."""
        block = self._block_at(offset)
        if block is None or offset + count > block.stop or not self._has_arrived(block):
            return None
        self._go_on()
        self._expected = offset + count
        return bytes(block.part(offset, count))

    def peek(self, count: int, offset: int) -> bytes:
        """Some bytes from there on, at most ``count``; none at the end of the file."""
        block = self._block_at(offset)
        if block is None and self._begin(offset):
            block = self._block_at(offset)
        if block is not None and self._has_arrived(block):
            return bytes(block.part(offset, count))
        with naming("read", self._fd):
            return os.pread(self._fd, min(count, PAGE), offset)

    def drop(self) -> None:
        """Forgets what was read."""
        self._blocks.clear()

    def close(self) -> None:
        """Returns when nothing is under way."""
        self.drop()
        self._all.settle()

    def _follows(self, offset: int) -> bool:
        return 0 <= offset - self._expected <= _GAP and self._expected >= 0

    def _block_at(self, offset: int) -> Block | None:
        """The block with this byte; those before it are not needed any more."""
        for number, block in enumerate(self._blocks):
            if block.start <= offset < block.stop:
                for _ in range(number):
                    self._blocks.popleft()
                return block
        return None

    def _begin(self, offset: int) -> bool:
        """Reads a block from there on; False at the end of the file."""
        if offset >= os.fstat(self._fd).st_size:
            return False
        self.drop()
        self._fetch(offset)
        return True

    def _go_on(self) -> None:
        """Reads ahead of the first block."""
        while 0 < len(self._blocks) <= _AHEAD and self._blocks[-1].full:
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
        """Waits for it; when that failed, all blocks are forgotten: the file may have been cut."""
        if block.failure() is not None:
            self.drop()
            return False
        return True

    def _read_directly(self, data: memoryview, offset: int) -> int:
        count = max(0, min(len(data), os.fstat(self._fd).st_size - offset))
        if count < SMALL:
            done = 0  # a read that returns less has met a page that cannot be read, or the end
            with naming("read", self._fd):
                while done < count and (got := os.preadv(self._fd, [data[done:count]], offset + done)):
                    done += got
            return done
        lanes = self._handle.get_thread_count()
        engine_of(self._handle).run(Op.READ, data[:count], self._file, offset, False, lanes > 1)
        return count

    def _take(self) -> Block:
        """One that nothing is read into."""
        block = self._all.take(self._blocks)
        if block is None:  # what is under way in the others is of no use any more
            self._all.settle()
            block = self._all.take(self._blocks)
        if block is None:
            raise RuntimeError("every block of a stream is in use")
        return block
