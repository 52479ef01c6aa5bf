"""Writes that gather in blocks, which go to the file while the next ones are filled."""

from __future__ import annotations

import os
from collections import deque
from typing import TYPE_CHECKING

from nvme_ops.engine import Op, engine_of
from nvme_ops.errors import naming
from nvme_ops.handle import aio_handle
from nvme_ops.memory.blocks import SMALL, Block, Blocks

if TYPE_CHECKING:
    from nvme_ops.ops.async_io import OpenFile

_LARGE = 64 << 20  # bytes of a write from which copying it first gains nothing


class WriteBehind:
    """What was written, one thing behind the other, and is not yet in the file. ``flush`` ends such a run.

    What goes wrong is raised by the next call and every one after it. The file lacks what was here then. A call that is
    interrupted by an exception, of a signal handler say, loses nothing of those before it: a block leaves what is under
    way only when it is in the file.

    Args:
        handle: moves the blocks.
        fd: of the file.
        file: the same, kept open for the handle.
        appends: the run begins at the end that the file has when its first bytes go there.
    """

    def __init__(self, handle: aio_handle, fd: int, file: OpenFile, appends: bool) -> None:
        self._handle, self._fd, self._file, self._appends = handle, fd, file, appends
        self._blocks = Blocks()
        self._under_way: deque[Block] = deque()  # those not in the file yet; the last one may be taking more
        self._failure: BaseException | None = None
        self._was_raised = False  # whether that was raised
        self._stop = 0

    @property
    def stop(self) -> int:
        """Where the run ends."""
        return self._under_way[-1].stop if self._under_way else self._stop

    @property
    def empty(self) -> bool:
        """Whether all is in the file."""
        return not self._under_way

    def write(self, data: memoryview, offset: int) -> None:
        """Takes a copy of ``data``, which ends in the file before it returns where it is very large."""
        self.raise_failure()
        if offset != self.stop:  # also when a call that was interrupted has added something
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
            if block.full:
                self._send(block)

    def flush(self) -> None:
        """Returns when all is in the file. Raises what went wrong."""
        block = self._filling()
        if block is not None:
            self._send(block)
        while self._under_way:
            self._settle()
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raises what went wrong before, if something did."""
        if self._failure is not None:
            self._was_raised = True
            raise self._failure

    def close(self) -> None:
        """``flush``, which raises only what was not raised before."""
        was_raised = self._was_raised
        try:
            self.flush()
        except BaseException:
            if not was_raised or not self.empty:
                raise

    def _filling(self) -> Block | None:
        """The block that takes what is written next."""
        block = self._under_way[-1] if self._under_way else None
        return None if block is None or block.written or block.operations else block

    def _send(self, block: Block) -> None:
        """Starts to write it; a small one is in the page cache when it returns. Interrupted, it is sent again."""
        if self._failure is None:
            try:
                self._start(block)
            except (OSError, MemoryError, RuntimeError) as error:
                self._fail(error)
        block.written = not block.operations

    def _start(self, block: Block) -> None:
        if self._appends and block is self._under_way[0] and not block.placed:  # others may have appended meanwhile
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
        while True:
            block = self._blocks.take(self._under_way)
            if block is not None:
                block.place(offset)
                self._under_way.append(block)
                return block
            self._settle()

    def _settle(self) -> None:
        """Waits for the oldest block."""
        block = self._under_way[0]
        failure = block.failure()
        if failure is not None:
            self._fail(failure)
        self._stop = block.stop
        self._under_way.popleft()

    def _fail(self, failure: BaseException) -> None:
        if self._failure is None:
            self._failure = failure
