"""Tunes a device while the program that uses it leaves it alone.

One thread for each device, begun by the first large transfer of a ``tuned_handle``. It measures only while none of the
process' tuned handles moves anything, throws away what was measured when one of them began meanwhile, and ends after a
bounded time, a bounded number of written bytes, or with the program. Its scratch file has no name, so that nothing is
left of it however the process ends.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import tempfile
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch

from nvme_ops._native import native
from nvme_ops.bench.settings import Settings
from nvme_ops.bench.work import filled
from nvme_ops.handle import aio_handle
from nvme_ops.tensors import empty
from nvme_ops.text import GIB, KIB, MIB
from nvme_ops.tune import store
from nvme_ops.tune.duel import Rates
from nvme_ops.tune.identity import Identity
from nvme_ops.tune.passes import Passes
from nvme_ops.tune.search import Axis, Search

if TYPE_CHECKING:
    from nvme_ops.engine import Engine
    from nvme_ops.ops.async_io import Operation

LARGE = 16 * MIB  # a transfer of this size says that rates matter
SECONDS = 20.0  # of measuring at most
WRITTEN = 8 * GIB  # at most: devices wear
FILE = 128 * MIB  # scratch file, and as much memory while it lasts
QUIET = 0.25  # seconds without a transfer before a pass
PATIENCE = 600.0  # seconds in all, waiting included
_LEAVING = 5.0  # seconds that the end of the program waits for the pass under way


class Adopter(Protocol):
    """A handle that waits for settings."""

    def adopt(self, settings: Settings | None) -> None:
        """Nobody watches its transfers any more; with None it stays as it is."""


class _Over(Exception):  # noqa: N818  (not an error)
    """No settings will come: the program ends, or uses the device all the time."""


class Watched:
    """An engine that tells a tuner what passes through it. Everything else is the engine's."""

    def __init__(self, engine: Engine, tuner: Tuner) -> None:
        self.engine, self._tuner = engine, tuner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def run(self, write: bool, memory: Any, *rest: Any) -> int:
        """As the engine's."""
        token = self._tuner.begin()
        try:
            return self.engine.run(write, memory, *rest)
        finally:
            self._tuner.end(token, _bytes(memory))

    def submit(self, write: bool, memory: Any, *rest: Any) -> Operation:
        """As the engine's."""
        operation = self.engine.submit(write, memory, *rest)
        self._tuner.submitted(operation, _bytes(memory))
        return operation

    def submit_many(self, write: bool, memories: Any, *rest: Any) -> Operation:
        """As the engine's."""
        operation = self.engine.submit_many(write, memories, *rest)
        size = _bytes(memories) if isinstance(memories, torch.Tensor) else sum(map(_bytes, memories))
        self._tuner.submitted(operation, size)
        return operation


class Tuner:
    """Of one device, for all tuned handles of this process that use it.

    Transfers are noted without locks, by operations that are atomic in Python: a process may be forked at any time.
    """

    def __init__(self, identity: Identity, folder: str, make_handle: Callable[[Settings], aio_handle]) -> None:
        self._identity, self._folder, self._make_handle = identity, folder, make_handle
        self._process = os.getpid()
        self._handles: list[weakref.ref[Adopter]] = []
        self._once, self._stop = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None
        self._busy: set[object] = set()
        self._submitted: Operation | None = None
        self._latest = 0.0
        self._spent = 0.0

    def join(self, handle: Adopter) -> None:
        """The handle will be told what is found."""
        self._handles.append(weakref.ref(handle, self._handles.remove))

    # Told by the engines

    def begin(self) -> object:
        """A blocking transfer begins."""
        token = object()
        self._busy.add(token)
        self._latest = time.monotonic()
        return token

    def end(self, token: object, size: int) -> None:
        """And ends."""
        self._busy.discard(token)
        self._latest = time.monotonic()
        self._start_after(size)

    def submitted(self, operation: Operation, size: int) -> None:
        """A transfer has begun that ends by itself."""
        self._submitted = operation
        self._latest = time.monotonic()
        self._start_after(size)

    def _start_after(self, size: int) -> None:
        if size >= LARGE and self._process == os.getpid() and self._once.acquire(blocking=False):
            self._thread = threading.Thread(target=self._work, name="nvme_ops-tune", daemon=True)
            # after the op's own function, which thus finds no engine of ours at work
            atexit.register(self.leave)
            with contextlib.suppress(RuntimeError):  # no more threads
                self._thread.start()

    # The thread

    def leave(self) -> None:
        """Ends the thread, with the pass that is under way."""
        self._stop.set()
        if self._thread is not None and self._thread.is_alive() and self._process == os.getpid():
            self._thread.join(_LEAVING)

    def _work(self) -> None:
        found = None
        try:
            found = self._find()
            self._wait_until_idle()
        except _Over:
            pass
        except Exception as error:  # a program must not suffer from what it did not ask for
            _warn(f"{self._folder} was not tuned: {type(error).__name__}: {error}")
        _tuners.pop((self._process, self._identity), None)
        for reference in list(self._handles):
            if (handle := reference()) is not None:
                handle.adopt(found)
        atexit.unregister(self.leave)

    def _find(self) -> Settings | None:
        """Another process may be at it, or have been."""
        self._deadline = time.monotonic() + PATIENCE
        while True:
            with store.sole(self._identity) as alone:
                found = store.load(self._identity)
                if found is not None or alone:
                    return found or self._search()
            self._pause(1.0)

    def _search(self) -> Settings | None:
        """None where there is no room for it, or nothing may be written."""
        try:
            if shutil.disk_usage(self._folder).free < 4 * FILE:
                return None
            file = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115
        except OSError:
            return None
        try:
            outcome = self._search_in(file.fileno())
        finally:
            file.truncate(0)  # a forked child may keep it open
            file.close()
            native().trim_pool()
        store.save(self._identity, outcome, {"in_background": True})
        return outcome

    def _search_in(self, file: int) -> Settings:
        passes = Passes(file, filled(empty(FILE, dtype=torch.uint8)), self._make_handle)
        self._wait_until_idle()
        passes.calibrate(SECONDS)

        def measure(settings: Settings, full: bool) -> Rates:
            while True:
                self._wait_until_idle()
                seen, start = self._latest, time.monotonic()
                rates = passes.measure(settings, full)
                self._spent += time.monotonic() - start
                if self._latest == seen:
                    return rates
                if spent() >= 1:
                    raise _Over

        def spent() -> float:
            return max(self._spent / SECONDS, passes.written / WRITTEN)

        return Search(measure, _axes(), spent).run().best

    def _wait_until_idle(self) -> None:
        while not self._idle():
            self._pause(QUIET / 5)
        self._pause(0)

    def _idle(self) -> bool:
        if self._submitted is not None and self._submitted.done():
            self._submitted = None
            self._latest = time.monotonic()
        return not self._busy and self._submitted is None and time.monotonic() - self._latest > QUIET

    def _pause(self, seconds: float) -> None:
        if self._stop.wait(seconds) or time.monotonic() > self._deadline:
            raise _Over


#: By process, so that a forked child makes its own.
_tuners: dict[tuple[int, Identity], Tuner] = {}


def tuner_of(identity: Identity, folder: str, make_handle: Callable[[Settings], aio_handle]) -> Tuner:
    """The one of this process."""
    return _tuners.setdefault((os.getpid(), identity), Tuner(identity, folder, make_handle))


def _axes() -> list[Axis]:
    """A coarse grid: what nvme-tune finds beyond it is worth little, and its passes more than a guest may take."""
    processors = len(os.sched_getaffinity(0))
    return [
        Axis("block_size", [256 * KIB, MIB, 4 * MIB]),
        Axis("queue_depth", [16, 32, 128]),
        Axis("intra_op_parallelism", [count for count in (1, 2, 4, 8) if count <= processors]),
        Axis("overlap_events", [False, True]),
    ]


def _bytes(memory: Any) -> int:
    size = getattr(memory, "nbytes", None)
    return size if isinstance(size, int) else len(memory)


def _warn(words: str) -> None:
    with contextlib.suppress(RuntimeWarning):  # where it is made an error there is nobody to catch it
        warnings.warn(words, RuntimeWarning, stacklevel=2)
