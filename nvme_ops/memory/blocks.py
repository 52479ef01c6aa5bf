"""Blocks of memory between a stream and its file, which a program fills or reads sequentially."""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING

import torch

from nvme_ops.tensors import pool_buffer

if TYPE_CHECKING:
    from nvme_ops.engine import Engine, Op
    from nvme_ops.ops.async_io import OpenFile, Operation

BLOCK, BLOCKS = 4 << 20, 4  # bytes of one, and how many a stream has in each direction
PAGE = 4096  # pages of a block hold pages of the file, which is what direct I/O can do without a copy
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
        self.start, self._begin, self.length = start, start % PAGE, 0
        self.operations: list[Operation] = []  # the last one is its transfer
        self.written = False  # by an ordinary write, without a transfer
        self.placed = False  # when appending: its offset is final

    @property
    def stop(self) -> int:
        """The offset in the file at which the block ends."""
        return self.start + self.length

    @property
    def room(self) -> int:
        """Bytes that can still be added."""
        return BLOCK - self._begin - self.length

    @property
    def full(self) -> bool:
        """True when no more bytes can be added."""
        return self.room == 0

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
