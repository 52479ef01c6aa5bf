"""Tunes a device while the program is not using it.

One thread for each device, started by the first large transfer of a ``tuned_handle``. It measures only while no tuned
handle of the process moves anything, repeats passes that one of them disturbed, and ends after a bounded time, a
bounded number of written bytes, or with the program. Its scratch file has no name, so it disappears however the
process ends.
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
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from nvme_ops._native import native
from nvme_ops.handle import aio_handle
from nvme_ops.measuring.files import filled
from nvme_ops.settings import Settings
from nvme_ops.storage.identity import Identity
from nvme_ops.tensors import empty
from nvme_ops.text import GIB, MIB
from nvme_ops.tune import store
from nvme_ops.tune.duel import Rates
from nvme_ops.tune.passes import Passes
from nvme_ops.tune.search import Search, axes

if TYPE_CHECKING:
    from nvme_ops.engine import Engine
    from nvme_ops.ops.async_io import Operation
    from nvme_ops.tune.handle import tuned_handle

LARGE = 16 * MIB  # transfers from this size on start a tuning: rates matter then
SECONDS = 20.0  # of measuring at most
WRITTEN = 8 * GIB  # at most: devices wear
FILE = 128 * MIB  # scratch file, and as much memory while it lasts
QUIET = 0.25  # seconds without a transfer before a pass
PATIENCE = 600.0  # seconds in all, waiting included
_LEAVING = 5.0  # seconds that the exit of the program waits for the present pass


class _Over(Exception):  # noqa: N818  (not an error)
    """No settings will be found: the program ends, or uses the device all the time."""


class Watched:
    """The engine of a handle whose transfers a tuner observes."""

    def __init__(self, engine: Engine, tuner: Tuner) -> None:
        self.engine, self._tuner = engine, tuner
        self.run: Any = partial(tuner.watch, engine.run)
        self.submit: Any = partial(tuner.watch, engine.submit)
        self.submit_many: Any = partial(tuner.watch, engine.submit_many)
        self.backend, self.staging_bytes, self.paths = engine.backend, engine.staging_bytes, engine.paths
        self.statistics, self.sweep = engine.statistics, engine.sweep


class Tuner:
    """Tunes one device, for all tuned handles of this process that use it.

    Transfers are noted without locks, by operations that are atomic in Python: a process may be forked at any time.
    """

    def __init__(self, identity: Identity, make_handle: Callable[..., aio_handle]) -> None:
        self._identity, self._make_handle = identity, make_handle
        self._folder = ""
        self._process = os.getpid()
        self._handles: list[weakref.ref[tuned_handle]] = []
        self._once, self._stop = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._work, name="nvme_ops-tune", daemon=True)
        self._busy: set[object] = set()  # a token for each call of ``watch``
        self._pending: Operation | None = None  # the last asynchronous one
        self._latest = self._spent = self._deadline = 0.0

    def join(self, handle: tuned_handle, folder: str) -> None:
        """Registers a handle that will adopt the settings found; its folder, the latest, is the one to measure in."""
        self._folder = folder
        self._handles.append(weakref.ref(handle, self._handles.remove))

    def watch(self, transfer: Callable[..., Any], op: int, memory: Any, *rest: Any) -> Any:
        """Calls a method of an engine and returns its result; the first large transfer starts the thread."""
        token = object()
        self._busy.add(token)
        self._latest = time.monotonic()
        try:
            result = transfer(op, memory, *rest)
            if not isinstance(result, int):
                self._pending = result
        finally:
            self._latest = time.monotonic()
            self._busy.discard(token)
        if self._process == os.getpid() and _bytes(memory) >= LARGE and self._once.acquire(blocking=False):
            # after the op's own function, which thus finds no engine of ours at work
            atexit.register(self.leave)
            with contextlib.suppress(RuntimeError):  # no more threads
                self._thread.start()
        return result

    def leave(self) -> None:
        """Ends the thread after the pass in progress."""
        self._stop.set()
        if self._process == os.getpid() and self._thread.is_alive():
            self._thread.join(_LEAVING)

    def _work(self) -> None:
        found = None
        self._deadline = time.monotonic() + PATIENCE
        try:
            found = self._find()
            self._wait_until_idle()
        except _Over:
            pass
        except Exception as error:  # tuning must not make the program fail
            with contextlib.suppress(RuntimeWarning):  # if made an error, nobody could catch it
                words = f"{self._folder} was not tuned: {type(error).__name__}: {error}"
                warnings.warn(words, RuntimeWarning, stacklevel=2)
        _tuners.pop((self._process, self._identity), None)
        for reference in list(self._handles):
            if (handle := reference()) is not None:
                handle.adopt(found)
        atexit.unregister(self.leave)

    def _find(self) -> Settings | None:
        """Returns what another process has found or is finding, else what a search finds; None if there can be none."""
        while True:
            with store.sole(self._identity) as alone:
                found = store.load(self._identity)
                if found is not None or alone:
                    return found or self._search()
            self._pause(1.0)

    def _search(self) -> Settings | None:
        try:
            if shutil.disk_usage(self._folder).free < 4 * FILE:
                return None
            file = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115
        except OSError:  # nothing can be written there
            return None
        try:
            best = self._search_in(f"/proc/self/fd/{file.fileno()}")
        finally:
            file.truncate(0)  # a forked child may keep it open
            file.close()
            native().trim_pool()
        store.save(self._identity, best, {"in_background": True})
        return best

    def _search_in(self, path: str) -> Settings:
        passes = Passes(path, filled(empty(FILE, dtype=torch.uint8)), self._make_handle)
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

        return Search(measure, axes(len(os.sched_getaffinity(0))), spent).find().best

    def _wait_until_idle(self) -> None:
        while not self._idle():
            self._pause(QUIET / 5)
        self._pause(0)

    def _idle(self) -> bool:
        if self._pending is not None and self._pending.done():
            self._pending = None
            self._latest = time.monotonic()
        return not self._busy and self._pending is None and time.monotonic() - self._latest > QUIET

    def _pause(self, seconds: float) -> None:
        if self._stop.wait(seconds) or time.monotonic() > self._deadline:
            raise _Over


#: By process, so that a forked child makes its own.
_tuners: dict[tuple[int, Identity], Tuner] = {}


def tuner_of(identity: Identity, make_handle: Callable[..., aio_handle]) -> Tuner:
    """Returns the device's tuner in this process, making one if there is none."""
    return _tuners.setdefault((os.getpid(), identity), Tuner(identity, make_handle))


def _bytes(memory: Any) -> int:
    """Returns the bytes of a tensor, of a buffer, or of a list of these."""
    try:
        return memory.nbytes if isinstance(memory, torch.Tensor) else memoryview(memory).nbytes
    except TypeError:
        return sum(map(_bytes, memory))
