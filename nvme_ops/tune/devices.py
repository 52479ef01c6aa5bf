"""Tunes each device by itself; removes everything at the end."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import time
import warnings
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TextIO

import torch

from nvme_ops.gds import gds_handle
from nvme_ops.handle import aio_handle
from nvme_ops.measuring.files import NotUsable, filled, make_cold
from nvme_ops.measuring.page_cache import cached_share, handles_read_it
from nvme_ops.measuring.scratch import scratch_folder
from nvme_ops.progress import Step, progress_bar
from nvme_ops.settings import Settings
from nvme_ops.storage.device import Identity, identify
from nvme_ops.text import MIB, share_words, size_words
from nvme_ops.tune.duel import Rates
from nvme_ops.tune.options import DROP_CACHES
from nvme_ops.tune.passes import Passes
from nvme_ops.tune.search import Outcome, Search

_HANDLES: dict[str, type[aio_handle]] = {"cpu": aio_handle, "gpu": aio_handle, "gds": gds_handle}

Say = Callable[[str], None]


@dataclass(frozen=True)
class Tuned:
    """One device and the settings found for it."""

    folders: list[str]  # all that lie on it
    identity: Identity
    outcome: Outcome
    seconds: float
    pass_size: int  # bytes of a full pass
    from_page_cache: float | None = None  # the share of what was read, the mean of all passes


@dataclass
class TuneResult:
    """What was found, also if Ctrl-C ended it early."""

    options: Namespace  # of ``options.parse``
    devices: list[Tuned] = field(default_factory=list)
    interrupted: bool = False

    @property
    def best(self) -> Settings:
        """The settings for all devices at once: those found for each of them if they are the same, or the default."""
        found = {tuned.outcome.best for tuned in self.devices}
        return found.pop() if len(found) == 1 else self.devices[0].outcome.baseline


def tune(options: Namespace, say: Say) -> TuneResult:
    """Tunes the devices. Raises ``files.NotUsable``, before anything is written, if a folder cannot be used."""
    result = TuneResult(options)
    devices: dict[Identity, list[str]] = {}
    backend = _HANDLES[options.way]().backend
    for folder in options.nvme_dir:
        devices.setdefault(identify(folder, options.way, backend), []).append(folder)
    with contextlib.ExitStack() as stack:
        places = [
            stack.enter_context(scratch_folder(folders[0], options.io_size + 64 * MIB, "--io_size or --nvme_dir"))
            for folders in devices.values()
        ]
        log = stack.enter_context(_open_log(options.log_dir)) if options.log_dir else None
        step = None if options.verbose else stack.enter_context(progress_bar(100 * len(devices)))
        try:
            for (identity, folders), place in zip(devices.items(), places, strict=True):
                say(f"tuning {folders[0]}, for {options.seconds:g} seconds at most")
                tuning = _Tuning(options, folders[0], place, log, say, step)
                try:
                    tuning.find()
                finally:
                    result.devices += tuning.found(folders, identity)
        except KeyboardInterrupt:
            result.interrupted = True
    return result


class _Tuning:
    """The search for one device's settings, with its scratch file, its log and its part of the progress bar."""

    def __init__(
        self, options: Namespace, folder: str, place: str, log: TextIO | None, say: Say, step: Step | None
    ) -> None:
        self._options, self._folder, self._log, self._say, self._step = options, folder, log, say, step
        self._start, self._shown = time.perf_counter(), 0
        self._cached: list[float] = []  # of each read, the share that lay in the page cache, where that is known
        self._path = os.path.join(place, "data")
        with open(self._path, "wb"):
            pass
        memory, make_handle = _memory(options), _HANDLES[options.way]
        self.passes = Passes(self._path, memory, make_handle, options.directions, options.loops, self._before_read)
        self._search = Search(self._measure, options.axes, self._spent, self._progress)

    def find(self) -> None:
        self._progress("writing the file")
        self.passes.calibrate(self._options.seconds)
        self._cached.clear()
        self._search.find()

    def found(self, folders: list[str], identity: Identity) -> list[Tuned]:
        """Returns what was found; empty if nothing was measured."""
        outcome, seconds = self._search.outcome(), time.perf_counter() - self._start
        tuned = Tuned(folders, identity, outcome, seconds, self.passes.full, _mean(self._cached))
        return [tuned] if outcome.rates else []

    def _spent(self) -> float:
        return (time.perf_counter() - self._start) / float(self._options.seconds)

    def _progress(self, words: str) -> None:
        """Advances the bar to the share of the time used: a hundred steps for each device."""
        while self._step is not None and self._shown < min(100, int(100 * self._spent())):
            self._step(f"{self._folder}: {words}")
            self._shown += 1

    def _before_read(self, size: int) -> None:
        if self._options.flush_page_cache:
            _flush()
        else:
            make_cold(self._path)
        share = cached_share(self._path, size) if handles_read_it() else None
        if share is not None:
            self._cached.append(share)

    def _measure(self, settings: Settings, full: bool) -> Rates:
        before = len(self._cached)
        rates = self.passes.measure(settings, full)
        share = _mean(self._cached[before:])
        seconds, size = time.perf_counter() - self._start, self.passes.full if full else self.passes.short
        if self._log is not None:
            about = {"nvme_dir": self._folder, "seconds": round(seconds, 3), "bytes": size, "aio": settings.as_json()}
            self._log.write(json.dumps({**about, **rates, "from_page_cache": share}) + "\n")
        if self._options.verbose:
            said = ", ".join(f"{name} {rate / 1e9:.3f} GB/s" for name, rate in rates.items())
            said += f" ({share_words(share)} from the page cache)" if share else ""
            self._say(f"{seconds:6.1f} s  {settings.words()}, {size_words(size)}: {said}")
        return rates


def _open_log(folder: str) -> TextIO:
    """Opens a file for one line of JSON for each pass. Raises NotUsable if it cannot be written."""
    try:
        os.makedirs(folder, exist_ok=True)
        return open(os.path.join(folder, "passes.jsonl"), "w", encoding="utf-8", buffering=1)
    except OSError as error:
        raise NotUsable(f"--log_dir {folder}: {error.strerror}") from error


def _mean(shares: list[float]) -> float | None:
    return statistics.fmean(shares) if shares else None


def _memory(options: Namespace) -> torch.Tensor:
    """Allocates a tensor, page-locked if possible, or on the current GPU. Raises NotUsable if it does not fit."""
    try:
        if options.way != "cpu":
            return torch.empty(options.io_size, dtype=torch.uint8, device="cuda").random_()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # memory that may not be locked is as fast here
            return filled(aio_handle().new_cpu_locked_tensor(options.io_size, torch.empty(0, dtype=torch.uint8)))
    except (MemoryError, OSError, RuntimeError) as error:
        raise NotUsable(f"no memory for --io_size: {error}".splitlines()[0]) from error


def _flush() -> None:
    os.sync()
    with open(DROP_CACHES, "w", encoding="ascii") as file:
        file.write("1")
