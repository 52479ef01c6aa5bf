"""``BackwardPass``: a step that begins during the backward pass, chunk by chunk as gradients become ready."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Sequence

import torch

from nvme_ops.base.reentrant_event import ReentrantEvent
from nvme_ops.offload.optimizer.chunks import Chunk
from nvme_ops.offload.optimizer.states import States


class BackwardPass:
    """Updates chunks on a thread of its own, which reads the next ones while it waits for the gradients of one.

    Args:
        states: has the chunks.
        order: the chunks in the order in which their gradients were complete in the last pass.
        update: changes a chunk's parameters and states, or leaves that to ``step``.
        most: the bytes of gradients that may wait for their update before the backward pass waits; None: any.
    """

    def __init__(
        self,
        states: States,
        order: Sequence[Chunk],
        update: Callable[[Chunk, torch.Tensor], None],
        most: int | None = None,
    ) -> None:
        self._states, self._order, self._update, self._most = states, order, update, most
        self._changed = threading.Condition()
        self._waiting_bytes = 0  # of gradients that are complete and not freed yet
        self._awaited: Chunk | None = None  # the chunk whose gradients the thread waits for
        self._parts = states.division.parts
        self._missing = {chunk: len(chunk.slices) for chunk in order}  # how many gradients are not complete yet
        self._arrived: set[int] = set()
        self._is_last = False  # no more gradients come
        self._has_ended = False
        #: Whether ``abandon`` was called; it may have been interrupted.
        self.abandoned = False
        self._thread_ended = ReentrantEvent()
        self._failure: BaseException | None = None
        #: The chunks whose gradients are complete, in the order in which they became so.
        self.completed: list[Chunk] = []
        self._thread = threading.Thread(target=self._work, name="nvme_ops-optimizer", daemon=True)

    def start(self) -> None:
        """Starts the thread. May be called only once."""
        self._thread.start()

    def arrived(self, parameter: torch.Tensor) -> None:
        """Records a complete gradient, and waits if too many await their update. Raises RuntimeError if repeated."""
        with self._changed:
            if id(parameter) in self._arrived:
                raise RuntimeError(
                    'with overlap="backward" a gradient was ready twice before step(): all backward passes but the '
                    "last one before a step belong in `with optimizer.accumulate():`"
                )
            self._arrived.add(id(parameter))
            for chunk, _ in self._parts.get(parameter, ()):
                self._missing[chunk] -= 1
                if not self._missing[chunk]:
                    self.completed.append(chunk)
            self._changed.notify_all()
            if self._most is not None and parameter.grad is not None:
                self._waiting_bytes += parameter.grad.nbytes
                self._changed.wait_for(self._may_go_on)

    def freed(self, nbytes: int) -> None:
        """Records that ``nbytes`` of gradients were freed."""
        with self._changed:
            self._waiting_bytes -= nbytes
            self._changed.notify_all()

    def _may_go_on(self) -> bool:
        """Returns whether backward goes on: it is within the budget, or waiting would deadlock with the update."""
        if self._most is None or self._waiting_bytes <= self._most or self._has_ended:
            return True
        return self._awaited is not None and not self._is_ready(self._awaited)

    def _is_ready(self, chunk: Chunk) -> bool:
        return self._is_last or not self._missing[chunk]

    def _await(self, chunk: Chunk) -> None:
        """Waits for the gradients of a chunk."""
        with self._changed:
            if not self._is_ready(chunk):
                self._awaited = chunk
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._is_ready(chunk))
                self._awaited = None

    def finish(self) -> None:
        """Updates chunks of which some gradients are missing, too, and waits for the thread. Raises its failure.

        If this is interrupted, call ``abandon``: the thread uses the states until that has returned.
        """
        self._is_last = True
        self._join()
        if self._failure is not None:
            raise self._failure

    def abandon(self) -> None:
        """Ends the thread, and leaves chunks that are not updated as they are. If interrupted, call it again."""
        self.abandoned = self._has_ended = self._is_last = True
        self._join()

    def _join(self) -> None:
        """Waits for the thread.

        ``Thread.join`` alone is not enough: before Python 3.13, once Ctrl-C has interrupted it, it takes the thread for
        ended (bpo-45274).
        """
        with self._changed:
            self._changed.notify_all()
        while not self._thread_ended.wait(1):
            if self._thread.ident is None:  # it was not started
                return
        self._thread.join()

    def order(self) -> list[Chunk]:
        """Returns the chunks in the order for the next pass; those without all gradients come last."""
        return list(dict.fromkeys([*self.completed, *self._order]))

    @torch.no_grad()
    def _work(self) -> None:
        try:
            until_abandoned = itertools.takewhile(lambda _: not self._has_ended, self._order)
            with contextlib.closing(self._states.update(until_abandoned)) as updates:
                for chunk, buffer in updates:
                    self._await(chunk)
                    if self._has_ended:
                        break
                    self._update(chunk, buffer)
        except BaseException as error:
            self._failure = error
        finally:
            with self._changed:
                self._has_ended = True
                self._changed.notify_all()
            self._thread_ended.set()
