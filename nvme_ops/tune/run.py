"""One run of ``nvme-tune``: each device by itself, then all of them at once, everything removed at the end."""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from nvme_ops.bench.files import NotUsable
from nvme_ops.bench.scratch import scratch_folder
from nvme_ops.bench.settings import Settings
from nvme_ops.bench.work import filled
from nvme_ops.handle import aio_handle
from nvme_ops.progress import Step, progress_bar
from nvme_ops.text import MIB
from nvme_ops.tune.duel import Contest, Duel, Rates
from nvme_ops.tune.identity import Identity, identify
from nvme_ops.tune.log import Log
from nvme_ops.tune.options import DROP_CACHES, Options
from nvme_ops.tune.passes import Passes
from nvme_ops.tune.search import DEFAULT, Outcome, Search

_ROUNDS_TOGETHER = 7


@dataclass(frozen=True)
class Tuned:
    """One device, and what was found for it."""

    folders: list[str]  # all that lie on it
    identity: Identity
    outcome: Outcome
    seconds: float
    pass_size: int  # bytes of a full pass
    from_page_cache: float | None = None  # the share of all that was read


@dataclass
class Result:
    """What was found, until the end or until Ctrl-C."""

    options: Options
    devices: list[Tuned]
    together: list[Duel] | None = None  # all devices at once: each candidate against the default
    interrupted: bool = False

    @property
    def best(self) -> Settings:
        """For all devices at once: what was fastest then, beyond the noise."""
        found = {tuned.outcome.best for tuned in self.devices}
        if len(found) == 1:
            return found.pop()
        won = [duel for duel in self.together or [] if duel.won]
        return max(won, key=lambda duel: duel.ratio).challenger if won else self.devices[0].outcome.baseline


def run(options: Options, say: Callable[[str], None]) -> Result:
    """Tunes. Raises ``files.NotUsable`` where a folder cannot be used, before anything is written."""
    result = Result(options, [])
    with contextlib.ExitStack() as stack:
        devices = _devices(options)
        places = [stack.enter_context(_place(options, folders[0])) for folders in devices.values()]
        log = stack.enter_context(contextlib.closing(Log(options.log_dir, say if options.verbose else None)))
        step = stack.enter_context(_bar(100 * len(devices), hidden=options.verbose))
        ready: list[Passes] = []
        try:
            for (identity, folders), place in zip(devices.items(), places, strict=True):
                say(f"tuning {folders[0]}, for {options.seconds:g} seconds at most")
                tuning = _Tuning(options, identity, folders, place, log, _Percent(step))
                try:
                    tuning.run()
                finally:
                    result.devices += tuning.result()
                ready.append(tuning.passes)
            result.together = _together(result, ready, say)
        except KeyboardInterrupt:
            result.interrupted = True
    return result


class _Tuning:
    """Of one device."""

    def __init__(
        self, options: Options, identity: Identity, folders: list[str], place: str, log: Log, show: _Percent
    ) -> None:
        self._options, self._identity, self._folders = options, identity, folders
        self._log, self._show = log, show
        self._start = time.perf_counter()
        path = os.path.join(place, "data")
        with open(path, "wb"):
            pass
        self.passes = Passes(
            path, _memory(options), _maker(options.way), options.directions, options.loops,
            _flush if options.flush_page_cache else None,
        )  # fmt: skip
        self._search = Search(self._measure, options.axes, self._spent, self._progress)

    def run(self) -> None:
        self._progress("writing the file")
        self.passes.calibrate(self._options.seconds)
        self._search.run()

    def result(self) -> list[Tuned]:
        """Nothing where nothing was measured."""
        outcome = self._search.outcome()
        seconds = time.perf_counter() - self._start
        if not outcome.rates:
            return []
        cached = self.passes.all_from_page_cache
        return [Tuned(self._folders, self._identity, outcome, seconds, self.passes.full, cached)]

    def _spent(self) -> float:
        return (time.perf_counter() - self._start) / self._options.seconds

    def _progress(self, words: str) -> None:
        self._show(f"{self._folders[0]}: {words}", self._spent())

    def _measure(self, settings: Settings, full: bool) -> Rates:
        rates = self.passes.measure(settings, full)
        size = self.passes.full if full else self.passes.short
        cached = self.passes.from_page_cache
        self._log.write(self._folders[0], time.perf_counter() - self._start, settings, size, rates, cached)
        return rates


class _Percent:
    """A hundred steps of the progress bar."""

    def __init__(self, step: Step) -> None:
        self._step, self._shown = step, 0

    def __call__(self, words: str, share: float) -> None:
        for _ in range(self._shown, min(100, int(100 * share))):
            self._step(words)
            self._shown += 1


def _devices(options: Options) -> dict[Identity, list[str]]:
    """The folders by device."""
    backend = _maker(options.way)(DEFAULT).backend
    found: dict[Identity, list[str]] = {}
    for folder in options.folders:
        found.setdefault(identify(folder, options.way, backend), []).append(folder)
    return found


def _place(options: Options, folder: str) -> contextlib.AbstractContextManager[str]:
    return scratch_folder(folder, options.size + 64 * MIB, "--io_size or --nvme_dir")


@contextlib.contextmanager
def _bar(total: int, hidden: bool) -> Iterator[Step]:
    if hidden:
        yield lambda _: None
        return
    with progress_bar(total) as step:
        yield step


def _maker(way: str) -> Callable[[Settings], aio_handle]:
    if way == "gds":
        from nvme_ops.gds import gds_handle

        return lambda settings: gds_handle(**settings.as_json())
    return lambda settings: aio_handle(**settings.as_json())


def _memory(options: Options) -> torch.Tensor:
    """Page-locked as far as the system lets us, or on the current GPU. NotUsable where it does not fit."""
    try:
        if options.way != "cpu":
            return torch.empty(options.size, dtype=torch.uint8, device="cuda").random_()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # memory that may not be locked is as fast here
            return filled(aio_handle().new_cpu_locked_tensor(options.size, torch.empty(0, dtype=torch.uint8)))
    except (MemoryError, OSError, RuntimeError) as error:
        raise NotUsable(f"no memory for --io_size: {error}".splitlines()[0]) from error


def _flush() -> None:
    os.sync()
    with open(DROP_CACHES, "w", encoding="ascii") as file:
        file.write("1")


def _together(result: Result, ready: list[Passes], say: Callable[[str], None]) -> list[Duel] | None:
    """The devices' own settings against the default, in passes over all devices at once; None where all agree."""
    candidates = list(dict.fromkeys(tuned.outcome.best for tuned in result.devices))
    if len(candidates) < 2:
        return None
    say("comparing what was found for each device, on all of them at once")
    with ThreadPoolExecutor(len(ready)) as threads:

        def measure(settings: Settings) -> Rates:
            all_rates = list(threads.map(lambda passes: passes.measure(settings, True), ready))
            return {name: sum(rates[name] for rates in all_rates) for name in all_rates[0]}

        baseline = result.devices[0].outcome.baseline
        contest = Contest(baseline, [settings for settings in candidates if settings != baseline])
        while contest.rounds < _ROUNDS_TOGETHER:
            contest.round(measure)
    return contest.duels()
