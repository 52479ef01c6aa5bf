"""``BackwardPass``: a step that begins during the backward pass, chunk by chunk as gradients become ready."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence

import torch

from nvme_ops.offload.optimizer.states import Chunk, States


class BackwardPass:
    """Updates chunks on a thread of its own: the next ones are read while it waits for the gradients of one.

    Args:
        states: has the chunks.
        order: of the chunks, that in which their gradients were ready the last time.
        update: changes a chunk's parameters and states, or leaves that to ``step``.
        most: the backward pass waits while more bytes of gradients than this wait for their update; None: it never
            does.
    """

    def __init__(
        self,
        states: States,
        order: Sequence[Chunk],
        update: Callable[[Chunk, torch.Tensor], None],
        most: int | None = None,
    ) -> None:
        self._states, self._order, self._update, self._most = states, order, update, most
        self._waiting_bytes = 0  # of gradients that are complete, and not freed
        self._moves = threading.Condition()
        self._awaited: Chunk | None = None  # whose gradients the thread waits for
        self._missing: dict[Chunk, int] = {}
        self._chunks_of: dict[int, list[Chunk]] = {}
        for chunk in order:
            parameters = {id(each.parameter) for each in chunk.slices}
            self._missing[chunk] = len(parameters)
            for parameter in parameters:
                self._chunks_of.setdefault(parameter, []).append(chunk)
        self._arrived: set[int] = set()
        self._lock = threading.Lock()  # several threads may run backward
        self._ready = {chunk: threading.Event() for chunk in order}
        self._over = False
        #: Whether ``give_up`` was called; it may have been interrupted.
        self.given_up = False
        self._ended = threading.Event()  # the thread
        self._failure: BaseException | None = None
        #: The chunks in the order in which their gradients were ready.
        self.completed: list[Chunk] = []
        self._thread = threading.Thread(target=self._work, name="nvme_ops-optimizer", daemon=True)

    def start(self) -> None:
        """Starts the thread. Call it once."""
        self._thread.start()

    def arrived(self, parameter: torch.Tensor) -> None:
        """Notes that the gradient of a parameter is complete, and waits where too many are. RuntimeError twice."""
        with self._lock:
            if id(parameter) in self._arrived:
                raise RuntimeError(
                    'with overlap="backward" a gradient was ready twice before step(): all backward passes but the '
                    "last one before a step belong in `with optimizer.accumulate():`"
                )
            self._arrived.add(id(parameter))
            for chunk in self._chunks_of.get(id(parameter), ()):
                self._missing[chunk] -= 1
                if not self._missing[chunk]:
                    self.completed.append(chunk)
                    self._ready[chunk].set()
        if self._most is not None and parameter.grad is not None:
            with self._moves:
                self._waiting_bytes += parameter.grad.nbytes
                self._moves.wait_for(self._may_go_on)

    def freed(self, nbytes: int) -> None:
        """Notes that gradients of so many bytes were freed."""
        with self._moves:
            self._waiting_bytes -= nbytes
            self._moves.notify_all()

    def _may_go_on(self) -> bool:
        """Whether backward goes on: it is within the budget, or waiting would deadlock with the thread that updates."""
        if self._most is None or self._waiting_bytes <= self._most or self._over:
            return True
        return self._awaited is not None and not self._ready[self._awaited].is_set()

    def _await(self, chunk: Chunk) -> None:
        if not self._ready[chunk].is_set():
            with self._moves:
                self._awaited = chunk
                self._moves.notify_all()
            self._ready[chunk].wait()
            self._awaited = None

    def finish(self) -> None:
        """Updates the chunks of which some gradients are missing, and waits for all. Raises the first failure.

        If it is interrupted, call ``give_up``: until that has returned the thread uses the states.
        """
        for event in self._ready.values():
            event.set()
        self._join()
        if self._failure is not None:
            raise self._failure

    def give_up(self) -> None:
        """Leaves chunks that were not updated as they are. If it is interrupted, call it again."""
        self.given_up = True
        with self._moves:
            self._over = True
            self._moves.notify_all()
        for event in self._ready.values():
            event.set()
        self._join()

    def _join(self) -> None:
        """Waits for the thread.

        ``Thread.join`` alone would not do: before Python 3.13, once Ctrl-C has interrupted it, it believes that the
        thread has ended (bpo-45274).
        """
        while not self._ended.wait(1):
            if self._thread.ident is None:  # it was not started
                return
        self._thread.join()

    def order(self) -> list[Chunk]:
        """Returns the order for the next pass: those without all gradients come last."""
        seen = set(self.completed)
        return [*self.completed, *(chunk for chunk in self._order if chunk not in seen)]

    def _waiting(self) -> Iterator[Chunk]:
        for chunk in self._order:
            if self._over:
                return
            yield chunk

    @torch.no_grad()
    def _work(self) -> None:
        try:
            with contextlib.closing(self._states.update(self._waiting())) as updates:
                for chunk, buffer in updates:
                    self._await(chunk)
                    if self._over:
                        break
                    self._update(chunk, buffer)
        except BaseException as error:
            self._failure = error
        finally:
            with self._moves:
                self._over = True
                self._moves.notify_all()
            self._ended.set()
