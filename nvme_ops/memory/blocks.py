"""Blocks of memory between a stream and its file, which the program fills or uses one byte after the other."""

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
    """Memory that holds ``length`` bytes of the file from ``start`` on, or will when its transfer ends."""

    def __init__(self) -> None:
        buffer = pool_buffer(BLOCK)
        self._memory = memoryview(buffer)
        self._tensor = torch.frombuffer(buffer, dtype=torch.uint8)
        self._begin = 0
        self.place(0)

    def place(self, start: int) -> None:
        """Makes it an empty block of the file from ``start`` on."""
        self.start, self._begin, self.length = start, start % PAGE, 0
        self.operations: list[Operation] = []  # the last one is its transfer
        self.written = False  # without a transfer
        self.placed = False  # what was appended does not move any more

    @property
    def stop(self) -> int:
        """Where in the file it ends."""
        return self.start + self.length

    @property
    def room(self) -> int:
        """Bytes that it can take in addition."""
        return BLOCK - self._begin - self.length

    @property
    def full(self) -> bool:
        """Whether it holds as much as it can."""
        return self.room == 0

    def add(self, data: memoryview) -> int:
        """Takes as much as there is room for; returns how much."""
        count = min(len(data), self.room)
        end = self._begin + self.length
        self._memory[end : end + count] = data[:count]
        self.length += count
        return count

    def part(self, start: int, count: int) -> memoryview:
        """At most ``count`` bytes of the file from ``start`` on, which must be in the block."""
        first = start - self.start
        return self._memory[self._begin + first : self._begin + min(first + count, self.length)]

    def submit(self, engine: Engine, op: Op, file: OpenFile) -> None:
        """Starts its transfer. One call in C: no signal comes between the begin of a transfer and its being known."""
        arguments = (op,), (self.tensor(),), (file,), (self.start,), (False,)
        self.operations.extend(map(engine.submit, *arguments))

    def done(self) -> bool:
        """Whether nothing is under way."""
        return all(operation.done() for operation in self.operations)

    def failure(self) -> BaseException | None:
        """Waits for its transfer and returns what went wrong, or None."""
        failure = None
        for operation in self.operations:
            operation.wait(None)
            failure = failure or operation.exception()
        return failure

    def tensor(self) -> torch.Tensor:
        """All that it holds."""
        return self._tensor[self._begin : self._begin + self.length]


class Blocks:
    """At most ``BLOCKS`` of them, made as they are needed."""

    def __init__(self) -> None:
        self._all: list[Block] = []

    def take(self, used: Container[Block]) -> Block | None:
        """One that is not among the ``used`` ones and has nothing under way; None where there is none."""
        for block in self._all:
            if block not in used and block.done():
                return block
        if len(self._all) < BLOCKS:
            self._all.append(Block())
            return self._all[-1]
        return None

    def settle(self) -> None:
        """Waits until nothing is under way."""
        for block in self._all:
            block.failure()
