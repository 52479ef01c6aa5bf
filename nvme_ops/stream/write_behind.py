"""Writes that gather in blocks, which go to the file while the next ones are filled."""

from __future__ import annotations

import os
from collections import deque

from nvme_ops.handle import aio_handle
from nvme_ops.stream.blocks import BLOCKS, SMALL, Block

_LARGE = 64 << 20  # bytes of a write from which copying it first gains nothing


class WriteBehind:
    """What was written, one thing behind the other, and is not yet in the file. ``flush`` ends such a run.

    What goes wrong is raised by the next call and every one after it. The file lacks what was here then.

    Args:
        handle: moves the blocks.
        fd: of the file.
        appends: the run begins at the end that the file has when its first bytes go there.
    """

    def __init__(self, handle: aio_handle, fd: int, appends: bool) -> None:
        self._handle, self._fd, self._appends = handle, fd, appends
        self._current: Block | None = None
        self._under_way: deque[Block] = deque()
        self._free: list[Block] = []
        self._made = 0
        self._failure: BaseException | None = None
        self._told = False  # whether that was raised
        self.stop = 0  # where the run ends

    @property
    def empty(self) -> bool:
        """Whether all is in the file."""
        return self._current is None and not self._under_way

    def write(self, data: memoryview, offset: int) -> None:
        """Takes a copy of ``data``, which ends in the file before it returns where it is very large."""
        self.raise_failure()
        if offset != self.stop:
            self.flush()
        self.stop = offset
        while len(data):
            if len(data) >= _LARGE and not self._appends:
                self._submit()
                lanes = self._handle.get_thread_count()
                self._handle._engine.run(True, data, self._fd, self.stop, False, lanes > 1)
                self.stop += len(data)
                return
            if self._current is None:
                self._current = self._take(self.stop)
            count = self._current.add(data)
            self.stop += count
            data = data[count:]
            if self._current.full:
                self._submit()

    def flush(self) -> None:
        """Returns when all is in the file. Raises what went wrong."""
        self._submit()
        while self._under_way:
            self._settle()
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raises what went wrong before, if something did."""
        if self._failure is not None:
            self._told = True
            raise self._failure

    def close(self) -> None:
        """``flush``, which raises only what was not raised before."""
        told = self._told
        try:
            self.flush()
        except BaseException:
            if not told or not self.empty:
                raise

    def _submit(self) -> None:
        """Starts to write the current block; a small one is in the page cache when it returns."""
        block, self._current = self._current, None
        if block is None:
            return
        if self._failure is None:
            try:
                self._start(block)
            except BaseException as error:
                self._fail(error)
        (self._free if block.transfer is None else self._under_way).append(block)

    def _start(self, block: Block) -> None:
        if self._appends and not self._under_way:  # others may have appended in the meantime
            block.start = os.fstat(self._fd).st_size
            self.stop = block.stop
        if block.length < SMALL:
            offset = block.start
            while offset < block.stop:
                offset += os.pwrite(self._fd, block.part(offset, block.length), offset)
            return
        block.transfer = self._handle.submit_pwrite(block.tensor(), self._fd, block.start)

    def _take(self, offset: int) -> Block:
        if not self._free and self._made < BLOCKS:
            self._free.append(Block())
            self._made += 1
        while not self._free:
            self._settle()
        block = self._free.pop()
        block.place(offset)
        return block

    def _settle(self) -> None:
        """Waits for the oldest block."""
        transfer = self._under_way[0].transfer
        failure = transfer.exception() if transfer is not None else None
        self._free.append(self._under_way.popleft())
        if failure is not None:
            self._fail(failure)

    def _fail(self, failure: BaseException) -> None:
        if self._failure is None:
            self._failure = failure
