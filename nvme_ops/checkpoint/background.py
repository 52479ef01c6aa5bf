"""``nvme_ops.save_async``: saves in the background while the tensors change."""

from __future__ import annotations

import asyncio
import os
import threading
import traceback
import weakref
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any, Literal, TypeAlias

import torch

from nvme_ops.base import lifetime
from nvme_ops.base.limits import free_memory
from nvme_ops.base.native import native
from nvme_ops.base.text import bytes_of, never_raising
from nvme_ops.checkpoint import FormatName, api
from nvme_ops.checkpoint.api import Turn, name_of
from nvme_ops.checkpoint.format import plan_for
from nvme_ops.checkpoint.request import Plan, SaveOptions
from nvme_ops.io.file import handle_of
from nvme_ops.io.handle import aio_handle
from nvme_ops.io.tensors import collector_paused, copy, empty, placed
from nvme_ops.memory.pieces import BorrowedTensors

Strategy: TypeAlias = Literal["copy", "copy_free"]
STRATEGIES: tuple[Strategy, ...] = ("copy", "copy_free")
_ALIGNMENT = 64  # bytes, as in torch's own allocations
_SHARE = 0.5  # of the memory that this process can still allocate: the default budget


class SaveFuture(Future[None], lifetime.Owned):
    """A save in progress. ``result()`` returns when it is complete, and durable if that was requested.

    It can be awaited in asyncio. It cannot be cancelled: ``cancel()`` returns False.
    """

    _forked_error = "{self.path}: this save runs in the parent process, and only that can wait for it"

    def __init__(self, path: str, borrowed: BorrowedTensors) -> None:
        super().__init__()
        self.path = path
        self._borrowed = borrowed
        self._retrieved = False
        lifetime.Owned.__init__(self)
        self.set_running_or_notify_cancel()  # from here on it cannot be cancelled

    def wait_until_safe(self, timeout: float | None = None) -> None:
        """Waits until the tensors may be changed: they were copied or written, or the save has failed.

        Raises:
            TimeoutError: they are still being read after ``timeout`` seconds.
        """
        if not self._is_ours():
            return  # the child has its own copies of the tensors
        if not self._borrowed.wait(timeout):
            raise TimeoutError(f"{self.path}: tensors are still being read after {timeout} s")

    def result(self, timeout: float | None = None) -> None:
        """Waits until the save is complete. Raises what ``nvme_ops.save`` raises."""
        self.exception(timeout)
        return super().result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Returns the exception of the save, or None. Raises RuntimeError in a forked child."""
        if not self.done():
            self._require_ours()
        failure = super().exception(timeout)
        self._retrieved = True  # only now: the wait may have been interrupted or timed out
        return failure

    @never_raising
    def __repr__(self) -> str:
        """Returns for example ``<SaveFuture 'model.pt': saving>``. Takes no lock, unlike that of other futures."""
        failure = self._exception
        state = "saved" if self._state == "FINISHED" else "saving"
        if state == "saving" and not self._is_ours():
            state = "saving in the parent process"
        return f"<SaveFuture {self.path!r}: {state if failure is None else f'failed, {type(failure).__name__}'}>"

    def __await__(self) -> Generator[Any, None, None]:
        """Waits in asyncio: ``await nvme_ops.save_async(state, path)`` returns when the save is complete."""
        return asyncio.wrap_future(self).__await__()


def save_async(
    obj: Any,
    path: str | os.PathLike[str],
    *,
    strategy: Strategy = "copy",
    memory: int | str | None = None,
    format: FormatName | None = None,
    durable: bool = True,
    checksums: bool = True,
    metadata: Mapping[str, str] | None = None,
    max_shard_size: int | str | None = None,
    recycle: bool = False,
    handle: aio_handle | None = None,
) -> SaveFuture:
    """Starts a save like ``nvme_ops.save`` on a thread; returns a future.

    Saves of one path, those by ``save`` included, run one at a time in the order of the calls: this call waits for
    earlier ones. Called by a signal handler that interrupts a save of the same path, it does not wait and copies all
    tensors; the thread saves them after that one. The program does not exit before all saves have ended, and then
    prints the errors that were never retrieved from their futures.

    Args:
        obj: as for ``save``.
        path: the file or folder.
        strategy: ``"copy"`` copies the tensors before it returns, so that they may be changed at once. ``"copy_free"``
            copies nothing: do not change the tensors before ``future.wait_until_safe()`` has returned.
        memory: bytes that the copies may take, or a size such as ``"4G"``; when None, half of what is free on the
            machine and within the limits of its cgroups (containers). What exceeds it is written before the call
            returns, straight from the tensors. The memory is kept for the next call: ``release_memory()`` frees it.
        format: as for ``save``.
        durable: as for ``save``.
        checksums: as for ``save``.
        metadata: as for ``save``.
        max_shard_size: as for ``save``.
        recycle: as for ``save``.
        handle: as for ``save``.

    Raises:
        ValueError: an unknown strategy, a negative budget, or what ``save`` refuses before it writes.
        TypeError: as for ``save``.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy must be {' or '.join(map(repr, STRATEGIES))}, not {strategy!r}")
    budget = None if memory is None else bytes_of("memory", memory, least=0)
    name = name_of(path, "save_async(obj, path)")
    place = os.path.abspath(name)  # the program may change its working directory meanwhile
    plan = plan_for(name, obj, format, SaveOptions(durable, checksums, metadata, max_shard_size, recycle))
    handle = handle_of(handle)
    turn = Turn(os.path.realpath(plan.target(name)))
    copies: _Copies | None = None
    thread: threading.Thread | None = None
    try:
        if not (in_handler := turn.begin()):
            turn.wait()
        if strategy == "copy":
            copies = _Copies(plan.tensors, None if in_handler else _budget() if budget is None else budget)
            plan.tensors = copies.tensors
        lent = plan.tensors if copies is None else copies.left_out
        future = SaveFuture(name, BorrowedTensors(lent))
        arguments = (future, place, plan, turn, handle, copies)
        thread = threading.Thread(target=_work, args=arguments, name=f"nvme_ops.save_async {name}", daemon=False)
        thread.start()
        _started.add(future)
    except BaseException:
        if thread is None or thread.ident is None:  # otherwise the thread saves and ends the turn itself
            turn.over = True
            _keep(copies)
            turn.end()
        raise
    if strategy == "copy":
        future.wait_until_safe()
    return future


def release_memory() -> None:
    """Gives the memory kept for the copies of the next ``save_async`` back to the system."""
    with api.turns_lock:
        if _kept:
            _kept.clear()
            native().trim_pool()  # which may keep it for reuse


_kept: list[torch.Tensor] = []  # memory kept for the next save: one tensor or none
_failed: list[SaveFuture] = []
_started: weakref.WeakSet[SaveFuture] = weakref.WeakSet()


def _keep(copies: _Copies | None) -> None:
    """Keeps the memory of the copies for the next save."""
    if copies is None or copies.memory is None:
        return
    _kept.append(copies.memory)
    copies.memory, copies.tensors, copies.left_out = None, [], []  # the thread, not ended yet, holds ``copies``


def _work(future: SaveFuture, place: str, plan: Plan, turn: Turn, handle: aio_handle, copies: _Copies | None) -> None:
    failure = None
    turn.thread = threading.get_ident()
    try:
        turn.wait()
        plan.write(place, handle, future._borrowed)
    except BaseException as error:
        failure = error
        traceback.clear_frames(error.__traceback__)  # they hold the tensors
        _failed.append(future)
    plan.tensors = []
    _keep(copies)
    turn.over = True
    future._borrowed.release()
    if failure is None:
        future.set_result(None)
    else:
        future.set_exception(failure)
    turn.end()  # last, since it waits for a lock: a signal handler that has interrupted its holder may await the result
    with api.turns_lock:
        _kept[:] = [max(_kept, key=torch.Tensor.numel)] if _kept else []
        for earlier in [failed for failed in _failed if failed._retrieved]:
            _failed.remove(earlier)


class _Copies:
    """Copies as many tensors as fit into ``budget`` bytes (all when None) into one allocation."""

    @collector_paused
    def __init__(self, tensors: Sequence[torch.Tensor], budget: int | None) -> None:
        places: dict[int, int] = {}  # of the copies, by the number of the tensor
        size = 0
        for number, tensor in enumerate(tensors):
            if budget is None or size + tensor.nbytes <= budget:
                places[number] = size
                size = -(-(size + tensor.nbytes) // _ALIGNMENT) * _ALIGNMENT
        self.memory = _memory(size) if size else None
        self.tensors = list(tensors)
        self.left_out = [tensor for number, tensor in enumerate(tensors) if number not in places]
        if self.memory is None:
            return
        kinds = [(place, (tensors[number].dtype, tensors[number].shape)) for number, place in places.items()]
        with torch.no_grad():
            for number, held in zip(places, placed(self.memory, kinds), strict=True):
                copy(held, tensors[number])
                self.tensors[number] = held


def _memory(size: int) -> torch.Tensor:
    with api.turns_lock:
        kept = _kept.pop(0) if _kept and _kept[0].numel() >= size else None
        if kept is None:
            _kept.clear()  # freed before the larger one is allocated
    return empty(size, dtype=torch.uint8) if kept is None else kept


def _budget() -> int:
    return int(free_memory() * _SHARE) + sum(memory.numel() for memory in _kept)


def _print_failures() -> None:
    """Prints, at exit, the errors that were never retrieved from their futures."""
    wait(list(_started))  # a child of multiprocessing runs this before it joins its threads
    for future in _failed:
        if not future._retrieved:
            failure = "".join(traceback.format_exception(future.exception()))
            lifetime.tell(f"save_async({future.path!r}) failed, and its exception was never retrieved:\n{failure}")


for kept in (_kept, _failed, _started):
    lifetime.at_fork(kept.clear)  # what is of the parent's saves
lifetime.at_exit(_print_failures)
