"""``HostSegments``: host memory for keys and values that an accelerator has no memory for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from nvme_ops.io.engine import Priority
from nvme_ops.io.future import IoFuture
from nvme_ops.memory.pool import charge_of
from nvme_ops.memory.tier import Share
from nvme_ops.offload.residency.copies import Copy, CopyStream
from nvme_ops.offload.residency.entry import Entry, tensors_over
from nvme_ops.offload.residency.policy import Policy, Read, Stats
from nvme_ops.offload.residency.residency import Residency
from nvme_ops.storage.striped import Piece

_SEGMENTS = 32  # the fewest in a budget, as far as pages allow
_MARGIN = 4  # that part of the memory is asked for at most, for one segment
_LARGEST = 256 << 20  # bytes of one: each row is copied by itself, and a large batch has short ones


#: Bytes in host memory, and as many elsewhere.
Pair = tuple[torch.Tensor, torch.Tensor]


class Owner(Protocol):
    """What has the segments of one layer."""

    token_bytes: int

    def first_full(self) -> TokenSegment | None:
        """Returns the first segment in host memory that nothing will be added to."""

    def store(self, segment: TokenSegment) -> tuple[IoFuture, int]:
        """Starts to write a segment that is in host memory; returns the transfer and its bytes. Raises OSError."""


class TokenSegment(Entry):
    """Room for consecutive tokens, in the files or in host memory.

    Args:
        segments: of which this is one.
        first: the first token.
        capacity: tokens.
    """

    def __init__(self, segments: Owner, first: int, capacity: int) -> None:
        super().__init__(capacity * segments.token_bytes)
        self.segments, self.first, self.capacity = segments, first, capacity
        self.used = 0  #: tokens that are there
        self.pieces: list[list[Piece]] = []  #: of the files, for each part of what a layer has

    @property
    def stop(self) -> int:
        """The first token that is not there."""
        return self.first + self.used

    def await_copy(self) -> None:
        """Waits until what is copied from it or to it has arrived."""
        if isinstance(self.queued, Copy):
            self.queued.wait(None)

    def is_idle(self) -> bool:
        """Returns whether nothing copies or writes it."""
        copy, leaving = self.queued, self.leaving
        return not (isinstance(copy, Copy) and not copy.done()) and (leaving is None or leaving.done())


#: A segment, and what is copied from it or to it.
Part = tuple[TokenSegment, Sequence[Pair]]


class HostSegments(Policy[TokenSegment]):
    """Tokens of all layers that leave an accelerator, in page-locked memory; what there is no memory for is in files.

    A segment stays where it is. Each step needs all of them once, so layers have equally much here: a layer that has
    less than others takes their memory, and what was there is written to files.

    Args:
        device: the accelerator.
        share: host memory.
        make_way: has others leave what is ``wanted``, as far as they give way.
    """

    name = "keys and values in host memory"
    _closed_error = "this NvmeCache is closed"
    _forked_error = "this NvmeCache is the parent process's: make one of its own in this one"

    def __init__(self, device: torch.device, share: Share, make_way: Callable[[], object]) -> None:
        self._residency, self._make_way, self._asked = Residency(), make_way, 0
        super().__init__(self._residency.lock, share, self, Stats())
        self.segment_bytes = min(_LARGEST, share.nbytes // _SEGMENTS)  #: of the largest
        self.streams = [CopyStream(device), CopyStream(device)]  # to the accelerator, and from there
        self._leaving = deque[Copy]()  # from the accelerator, the oldest first
        self._bytes: dict[Owner, int] = {}  # of each layer
        self._wanted: TokenSegment  # the one that asked for memory last
        self._residency.join(self)

    def take(self, segment: TokenSegment) -> bool:
        """Gives a segment memory, for which others may be written; returns False if it has to be in files.

        Raises OSError if others cannot be written.
        """
        with self.lock:
            self._wanted, self._asked = segment, max(self._asked, charge_of(segment.nbytes))
            self._make_way()
            while (memory := self._residency.memory_for(self, segment, -1)) is None:
                if self._asked < self.share.nbytes // _MARGIN:  # what others have may take more than they count
                    self._asked = max(2 * self._asked, charge_of(segment.nbytes))
                    self._make_way()
                elif victims := self.victims(-1):
                    self._residency.wait_until_written(self, victims[0])
                else:
                    return False
            segment.memory = segment.values = memory
            segment.own_tensors = tensors_over(memory)
            self.present[segment] = None
            self._bytes[segment.segments] = self._bytes.get(segment.segments, 0) + segment.nbytes
            return True

    def copy_from(self, parts: Sequence[Part]) -> Copy | None:
        """Starts to copy to the accelerator."""
        if not parts:
            return None
        copy, moves = Copy(self.streams[0]), [(there, here) for _, pairs in parts for here, there in pairs]
        self.counts.bytes_from_host += _begin(copy, parts, moves)
        return copy

    def copy_to(self, parts: Sequence[Part], source: torch.Tensor, transfers: list[IoFuture]) -> None:
        """Starts to copy here from ``source``, of the accelerator; adds to ``transfers`` the one that keeps it."""
        if not parts:
            return
        copy = Copy(self.streams[1])
        transfers.append(copy.future(source))  # first, or Ctrl-C could leave a copy that nobody waits for
        self._leaving.append(copy)
        self.counts.bytes_to_host += _begin(copy, parts, [pair for _, pairs in parts for pair in pairs])
        for segment, _ in parts:
            segment.changed = True

    def await_copy(self) -> bool:
        """Waits until the oldest copy from the accelerator has ended; returns False if there is none."""
        while self._leaving and self._leaving[0].done():
            self._leaving.popleft()
        if not self._leaving:
            return False
        self._leaving[0].wait(None)
        return True

    def drop(self, segment: TokenSegment) -> None:
        """Forgets a segment."""
        with self.lock:
            self.discard(segment)

    # The backing

    def read(self, entry: TokenSegment, memory: torch.Tensor, priority: Priority) -> Read:
        """Is never called."""
        raise NotImplementedError

    def write(self, entry: TokenSegment) -> tuple[IoFuture, int]:
        """Starts to write a segment to its layer's files, once it is complete."""
        entry.await_copy()
        return entry.segments.store(entry)

    # The policy

    def wanted(self) -> int:
        """Returns the bytes of what is here, and of one more segment, or what had to be asked for to get it."""
        return sum(charge_of(segment.nbytes) for segment in self.present) + self._asked

    def victims(self, after: int) -> Sequence[TokenSegment]:
        """Returns the first full segment of the layer that has most, if it has more than the one that asks will."""
        del after
        most = max(self._bytes, key=self._bytes.__getitem__, default=None)
        victim = None if most is None else most.first_full()
        if most is None or victim is None:
            return []
        asking = self._bytes.get(self._wanted.segments, 0) + self._wanted.nbytes
        return [victim] if self._bytes[most] - victim.nbytes >= asking else []

    def discard(self, entry: TokenSegment) -> None:
        """Frees the memory of a segment, once what is copied from it has arrived."""
        if entry in self.present:
            self._bytes[entry.segments] -= entry.nbytes
            if not self._bytes[entry.segments]:
                del self._bytes[entry.segments]
        entry.await_copy()
        super().discard(entry)
        self._asked = 0

    def out_of_memory(self, entry: TokenSegment) -> MemoryError:
        """Is never called."""
        raise NotImplementedError


def _begin(copy: Copy, parts: Sequence[Part], moves: Sequence[Pair]) -> int:
    """Starts a copy from or to segments; returns its bytes."""
    for segment, _ in parts:
        segment.queued = copy
    copy.begin(*moves)
    return sum(to.nbytes for to, _ in moves)
