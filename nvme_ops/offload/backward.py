"""``BackwardPass``: a step that begins during the backward pass, chunk by chunk as gradients become ready."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence

import torch

from nvme_ops.offload.chunks import Chunk
from nvme_ops.offload.states import States


class BackwardPass:
    """Updates chunks on a thread of its own: the next ones are read while it waits for the gradients of one.

    Args:
        states: has the chunks.
        order: of the chunks, that in which their gradients were ready the last time.
        update: changes a chunk's parameters and states.
    """

    def __init__(self, states: States, order: Sequence[Chunk], update: Callable[[Chunk, torch.Tensor], None]) -> None:
        self._states, self._order, self._update = states, order, update
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
        self._over = False  # given up
        self._failure: BaseException | None = None
        #: The chunks in the order in which their gradients were ready.
        self.found: list[Chunk] = []
        self._thread = threading.Thread(target=self._work, name="nvme_ops-optimizer", daemon=True)
        self._thread.start()

    def arrived(self, parameter: torch.Tensor) -> None:
        """Notes that the gradient of a parameter is complete. Raises RuntimeError the second time."""
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
                    self.found.append(chunk)
                    self._ready[chunk].set()

    def finish(self) -> None:
        """Updates the chunks of which some gradients are missing, and waits for all. Raises the first failure."""
        for event in self._ready.values():
            event.set()
        try:
            self._thread.join()
        except BaseException:  # Ctrl-C: nothing may use the states beside the program
            self.give_up()
            raise
        if self._failure is not None:
            raise self._failure

    def give_up(self) -> None:
        """Leaves chunks that were not updated as they are."""
        self._over = True
        for event in self._ready.values():
            event.set()
        self._thread.join()

    def order(self) -> list[Chunk]:
        """Returns the order for the next pass: those without all gradients come last."""
        seen = set(self.found)
        return [*self.found, *(chunk for chunk in self._order if chunk not in seen)]

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
                    self._ready[chunk].wait()
                    if not self._over:
                        self._update(chunk, buffer)
        except BaseException as error:
            self._failure = error
