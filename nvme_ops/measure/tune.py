"""The command ``nvme-tune``: tunes each device by itself; ds_nvme_tune's flags, with the same meaning, and ours."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
import sys
import textwrap
import time
import warnings
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import nvme_ops
from nvme_ops import __version__
from nvme_ops.base.command_line import command_line, positive, say, size
from nvme_ops.base.settings import Settings
from nvme_ops.base.text import MIB, columns_text, share_words, size_words
from nvme_ops.filesystem.device import Identity, identify
from nvme_ops.io.tuning import store
from nvme_ops.measure import search
from nvme_ops.measure.files import NotUsable, filled
from nvme_ops.measure.scratch import scratch_folder
from nvme_ops.measure.stop import measuring
from nvme_ops.measure.tables import add_outputs, check_outputs, deliver, show_progress

if TYPE_CHECKING:
    import torch


@measuring("nvme-tune")
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0; 2 for wrong arguments and unusable folders; 130 after Ctrl-C."""
    args = parse(argv)
    shown_by_the_bar = sys.stderr.isatty() and not args.verbose
    result = tune(args, (lambda _: None) if shown_by_the_bar else say)
    if result.interrupted:
        say("\nnvme-tune: interrupted; the files are removed")
    if result.devices:
        deliver(args, as_document(result), text(result))
        if not args.no_store and not result.interrupted:
            _keep(result)
    return 130 if result.interrupted else 0


def _keep(result: TuneResult) -> None:
    for tuned in result.devices:
        found = details(tuned)
        known = None if result.options.replace else store.load(tuned.identity)
        if known and (problem := why_keep(known, found)):
            say(f"not kept for aio_handle.tuned, which has the result of {known.get('date')}: {problem}; "
                 "--replace keeps this one")  # fmt: skip
            continue
        try:
            path = store.keep(tuned.identity, tuned.outcome.best, found)
        except (OSError, RuntimeError) as error:
            say(f"nvme-tune: warning: not kept for aio_handle.tuned: {error}")
        else:
            say(f"kept for aio_handle.tuned in {path}")


def parser() -> argparse.ArgumentParser:
    """Finds the settings with which aio_handle is fastest on a device.

    Takes less than 20 seconds for each device. Prints the settings as the section
    "aio" that DeepSpeed's configuration and aio_handle(**section) take, and keeps
    them for aio_handle.tuned. A difference inside the noise keeps the default.

    Examples:
      nvme-tune --folder /mnt/nvme                       read and write, CPU memory
      nvme-tune --folder /mnt/nvme --explain --output aio.json
                                                         why; and a file
      nvme-tune --folder /mnt/nvme0 /mnt/nvme1           each by itself
      nvme-tune --folder /mnt/nvme --device cuda --no-write
                                                         reads into GPU memory

    A sweep configuration is a JSON file with lists of values, ds_nvme_tune's, to
    which the search is restricted:
      {"block_size": ["1M", "8M"], "queue_depth": [32, 128],
       "sequential_requests": [true, false], "single_submit": [false, true],
       "io_parallel": [1, 2, 4, 8]}

    exit status: 0; 2 for wrong arguments and for folders that cannot be used or
    lack the space; 130 after Ctrl-C, which prints the best so far
    """
    made = command_line("nvme-tune", parser.__doc__ or "")
    add = made.add_argument
    add("--folder", "--nvme-dir", metavar="DIR", nargs="+", action="extend", required=True,
        help="folders on the devices to tune, each with --io-size of free space")  # fmt: skip
    add("--sweep-config", metavar="FILE.json", help="the values to try, see below")
    add("--no-read", action="store_true", help="do not measure reads")
    add("--no-write", action="store_true", help="do not measure writes")
    words = "the most bytes of a pass, at least 32M; most passes are shorter (default 400M)"
    add("--io-size", type=size, default="400M", metavar="SIZE", help=words)
    add("--device", choices=["cpu", "cuda"], default="cpu", help="where tensors are (default cpu)")
    add("--gpu", dest="device", action="store_const", const="cuda", help="the same as --device cuda")
    add("--gds", action="store_true", help="tensors in GPU memory, with gds_handle")
    add("--log-dir", metavar="DIR", help="write every pass to DIR/passes.jsonl")
    add("--loops", type=positive, default=1, metavar="N", help="repetitions in each pass (default 1)")
    add("--verbose", action="store_true", help="show every pass")
    add("--seconds", type=float, default=16.0, metavar="S", help="for each device (default 16)")
    add("--explain", action="store_true", help="also compare every value of each setting with the best")
    add_outputs(add, ".json")
    add("--no-store", action="store_true", help="do not keep the result for aio_handle.tuned")
    add("--replace", action="store_true", help="keep the result even if a more reliable one is kept already")
    made.add_argument("--version", action="version", version=f"nvme-tune {__version__}")
    return made


def parse(argv: Sequence[str] | None) -> Namespace:
    """Returns the flags, checked, and what follows from them: ``axes``, ``directions`` and ``way`` (``device.WAYS``).

    Exits with status 2 and a message on wrong arguments.
    """
    made = parser()
    args = made.parse_args(argv)
    args.folder = list(dict.fromkeys(args.folder))
    args.directions = [name for name in search.DIRECTIONS if not getattr(args, f"no_{name}")]
    args.way = "gds" if args.gds else "gpu" if args.device == "cuda" else "cpu"
    try:
        _check(args)
    except ValueError as error:
        made.error(str(error))
    try:
        path = args.sweep_config
        args.axes = search.axes(len(os.sched_getaffinity(0))) if path is None else _sweep_axes(path)
    except ValueError as error:
        made.error(f"--sweep-config {args.sweep_config}: {error}")
    return args


def _check(args: Namespace) -> None:
    if not args.directions:
        raise ValueError("--no-read and --no-write together leave nothing to measure")
    for folder in args.folder:
        if not os.path.isdir(folder):
            raise ValueError(f"--folder {folder}: no such folder")
    if args.io_size < search.MIN_PASS:
        least = size_words(search.MIN_PASS)
        words = f"a pass of less than {least} mostly measures how it begins and ends"
        raise ValueError(f"--io-size {size_words(args.io_size)}: {words}")
    if not 0 < args.seconds < math.inf:
        raise ValueError(f"--seconds: {args.seconds:g} is not a number of seconds above 0")
    if args.no_store and args.replace:
        raise ValueError("--replace with --no-store: nothing is kept")
    check_outputs(args.output)
    if args.way != "cpu":
        import torch

        if not torch.cuda.is_available():
            flag = "--gds" if args.gds else "--device cuda"
            raise ValueError(f"{flag}: torch.cuda is not available: no GPU, or torch without CUDA")
    if args.way == "gds":
        try:
            nvme_ops.gds_handle()
        except RuntimeError as error:
            raise ValueError(f"--gds: {error}") from None


def _sweep_axes(path: str) -> list[search.Axis]:
    """Parses a sweep configuration; settings that it omits keep their default. Raises ValueError for a wrong one."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(error.strerror) from None
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError("not an object with lists of values")
    for key, values in found.items():
        if key not in search.SWEPT:
            raise ValueError(f"{key!r} is none of {', '.join(search.SWEPT)}")
        if not isinstance(values, list) or not values:
            raise ValueError(f"{key} must be a list of values")
    made = [search.swept(key, values) for key, values in found.items()]
    return [replace(axis, values=sorted(axis.values)) for axis in made]


def _handle_class(way: str) -> type[nvme_ops.aio_handle]:
    return nvme_ops.gds_handle if way == "gds" else nvme_ops.aio_handle


Say = Callable[[str], None]


@dataclass(frozen=True)
class Tuned:
    """One device and the settings found for it."""

    folders: list[str]  # all given ones on this device
    identity: Identity
    outcome: search.Outcome
    seconds: float
    pass_size: int  # bytes of a full pass
    from_page_cache: float | None = None  # the mean share of what the passes read


@dataclass
class TuneResult:
    """What was found, also if Ctrl-C ended it early."""

    options: Namespace  # of ``parse``
    devices: list[Tuned] = field(default_factory=list)
    interrupted: bool = False

    @property
    def best(self) -> Settings:
        """The settings for all devices: those found if they are the same for each, else the default."""
        found = {tuned.outcome.best for tuned in self.devices}
        return found.pop() if len(found) == 1 else self.devices[0].outcome.baseline


def tune(options: Namespace, say: Say) -> TuneResult:
    """Tunes the devices. Raises ``files.NotUsable``, before anything is written, if a folder cannot be used."""
    result = TuneResult(options)
    devices: dict[Identity, list[str]] = {}
    backend = _handle_class(options.way)().backend
    for folder in options.folder:
        devices.setdefault(identify(folder, options.way, backend), []).append(folder)
    with contextlib.ExitStack() as stack:
        places = [
            stack.enter_context(scratch_folder(folders[0], options.io_size + 64 * MIB, "--io-size or --folder"))
            for folders in devices.values()
        ]
        log = stack.enter_context(_open_log(options.log_dir)) if options.log_dir else None
        stack.callback(show_progress, "")
        try:
            for (identity, folders), place in zip(devices.items(), places, strict=True):
                say(f"tuning {folders[0]}, for {options.seconds:g} seconds at most")
                _tune_device(result, folders, identity, place, log, say)
        except KeyboardInterrupt:
            result.interrupted = True
    return result


def _tune_device(
    result: TuneResult, folders: list[str], identity: Identity, place: str, log: TextIO | None, say: Say
) -> None:
    """Searches the settings of one device; adds what was found to ``result``, even if an exception ends the search."""
    options, folder, start = result.options, folders[0], time.perf_counter()
    path = os.path.join(place, "data")
    Path(path).touch()
    passes = search.Passes(path, _memory(options), _handle_class(options.way), options.directions, options.loops)

    def spent() -> float:
        return (time.perf_counter() - start) / float(options.seconds)

    def progress(words: str) -> None:
        if not options.verbose:
            show_progress(f"{folder}: {words}, {min(1, spent()):.0%}")

    def measure(settings: Settings, full: bool) -> search.Rates:
        before = len(passes.cached)
        rates = passes.measure(settings, full)
        share = _mean(passes.cached[before:])
        seconds, size = time.perf_counter() - start, passes.full if full else passes.short
        if log is not None:
            about = {"nvme_dir": folder, "seconds": round(seconds, 3), "bytes": size, "aio": settings.as_json()}
            log.write(json.dumps({**about, **rates, "from_page_cache": share}) + "\n")
        if options.verbose:
            line = ", ".join(f"{name} {rate / 1e9:.3f} GB/s" for name, rate in rates.items())
            line += f" ({share_words(share)} from the page cache)" if share else ""
            say(f"{seconds:6.1f} s  {settings.words()}, {size_words(size)}: {line}")
        return rates

    found = search.Search(measure, options.axes, spent, progress)
    try:
        progress("writing the file")
        passes.calibrate(options.seconds)
        found.find()
    finally:
        if (outcome := found.outcome()).rates:
            seconds = time.perf_counter() - start
            tuned = Tuned(folders, identity, outcome, seconds, passes.full, _mean(passes.cached))
            result.devices.append(tuned)


def _open_log(folder: str) -> TextIO:
    """Opens a file that gets a line of JSON for each pass. Raises NotUsable if it cannot be written."""
    try:
        os.makedirs(folder, exist_ok=True)
        return open(os.path.join(folder, "passes.jsonl"), "w", encoding="utf-8", buffering=1)
    except OSError as error:
        raise NotUsable(f"--log-dir {folder}: {error.strerror}") from error


def _mean(shares: list[float]) -> float | None:
    return statistics.fmean(shares) if shares else None


def _memory(options: Namespace) -> torch.Tensor:
    """Allocates a tensor, page-locked if possible, or on the current GPU. Raises NotUsable if it does not fit."""
    import torch

    try:
        if options.way != "cpu":
            return torch.empty(options.io_size, dtype=torch.uint8, device="cuda").random_()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # memory that may not be locked is as fast here
            return filled(
                nvme_ops.aio_handle().new_cpu_locked_tensor(options.io_size, torch.empty(0, dtype=torch.uint8))
            )
    except (MemoryError, OSError, RuntimeError) as error:
        raise NotUsable(f"no memory for --io-size: {error}".splitlines()[0]) from error


_HASTY = 0.25  # of the earlier run's seconds; a shorter run does not replace its result
_FLAT = 0.03  # loss of rate up to which settings count as equally good
_ORDER = ("single_submit", "overlap_events", "intra_op_parallelism", "queue_depth", "block_size")  # ds_nvme_tune's


def text(result: TuneResult) -> str:
    """Returns the result device by device, then the section of the configuration."""
    parts = []
    for tuned in result.devices:
        parts += [_device(tuned)]
        parts += [_why(tuned.outcome)] if result.options.explain else []
    return "\n\n".join([*parts, json.dumps({"aio": _section(result.best)}, indent=2)])


def as_document(result: TuneResult) -> dict[str, Any]:
    """Returns the result as JSON; its ``aio`` is what ``aio_handle(**aio)`` and DeepSpeed's configuration accept."""
    return {
        "aio": _section(result.best),
        "interrupted": result.interrupted,
        "devices": list(map(details, result.devices)),
    }


def details(tuned: Tuned) -> dict[str, Any]:
    """Returns everything about one device."""
    outcome = tuned.outcome
    return {
        "nvme_dir": tuned.folders,
        "identity": asdict(tuned.identity),
        "aio": _section(outcome.best),
        "bytes_per_second": {
            name: dict(outcome.rates.get(settings, {}))
            for name, settings in (("best", outcome.best), ("default", outcome.baseline))
        },
        "challenger": _section(outcome.challenger),
        "ratio": outcome.final.ratio if outcome.final else None,
        "noise": outcome.final.noise if outcome.final else None,
        "rounds": list(outcome.final.ratios) if outcome.final else [],
        "passes": sum(outcome.passes.values()),
        "pass_bytes": tuned.pass_size,
        "from_page_cache": tuned.from_page_cache,
        "seconds": tuned.seconds,
        "complete": outcome.complete,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def _section(settings: Settings) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in _ORDER}


def _device(tuned: Tuned) -> str:
    outcome = tuned.outcome
    name = "default" if outcome.baseline == search.DEFAULT else "nearest to the default"
    shown = {outcome.best: "best", outcome.baseline: name}
    if outcome.best == outcome.baseline:
        shown = {outcome.best: f"best ({name})"}
    shown.setdefault(outcome.challenger, "challenger")
    rows = [
        [label, settings.words(), *(f"{direction} {rate / 1e9:.2f} GB/s" for direction, rate in rates.items())]
        for settings, label in shown.items()
        if (rates := outcome.rates.get(settings))
    ]
    lines = [
        f"{' '.join(tuned.folders)}: {tuned.identity.words()}",
        textwrap.indent(columns_text(rows), "  "),
        f"  {_verdict(outcome)}",
        f"  {sum(outcome.passes.values())} passes in {tuned.seconds:.0f} s"
        + ("" if outcome.complete else ", after which the final was cut short"),
    ]
    if tuned.from_page_cache:
        share = share_words(tuned.from_page_cache)
        lines.append(f"  {share} of what was read lay in the page cache: so far memory was measured, not the device")
    return "\n".join(lines)


def _verdict(outcome: search.Outcome) -> str:
    if outcome.challenger == outcome.baseline:
        return "nothing is faster than the default by more than 1 %, as far as the passes tell"
    if outcome.final is None:
        return "not confirmed: no time was left for passes of full size in turn with the default"
    if outcome.best == outcome.challenger:
        return _duel(outcome.final)
    reason = "inside the noise" if outcome.final.ratio > 1 else "not faster"
    return f"{_duel(outcome.final)}: {reason}, so the default stays"


def _duel(duel: search.Duel) -> str:
    words = f"{duel.challenger.words()}: {duel.ratio:.3f} of the default's rate, +- {duel.noise:.3f}"
    return f"{words}, in {len(duel.ratios)} rounds"


def _why(outcome: search.Outcome) -> str:
    """Compares the values of each setting, the others being the best, over the rounds that measured the best."""
    if not outcome.races:
        return "why: too little was measured"
    noise = next(iter(outcome.races.values())).noise_of_a_pass
    lines = [
        "why: every value of each setting, the other settings being the best's",
        f"  {'setting':22}{'value':>8}  {'rate, best = 1':15}  passes with it",
    ]
    for axis in outcome.axes:
        label = axis.name
        for value in axis.values:
            settings = replace(outcome.best, **{axis.name: value})
            duel = outcome.races.get(settings)
            figures = f"{duel.ratio:.3f} +- {duel.noise:.3f}" if duel else "not compared"
            figures = "the best" if settings == outcome.best else figures
            count = sum(passes for tried, passes in outcome.passes.items() if getattr(tried, axis.name) == value)
            words = size_words(value) if axis.name == "block_size" else str(value).lower()
            lines.append(f"  {label:22}{words:>8}  {figures:15}  {count}")
            label = ""
    lines.append(f"+- is one standard deviation; that of a single pass is {noise:.2f}")
    if any(duel.ratio > 1 for duel in outcome.races.values()):
        lines.append("a rate above 1 does not differ from the best's by more than the noise, or lost the final")
    flat = 1 + sum(duel.ratio >= 1 - _FLAT for duel in outcome.races.values())
    lines.append(
        f"{flat} of {1 + len(outcome.races)} combinations that raced reach {1 - _FLAT:.2f} of it or more: "
        + ("a flat optimum, little is lost with another" if flat > len(outcome.races) / 2 else "a narrow optimum")
    )
    if outcome.final is not None:
        lines.append(f"the final, round by round: {' '.join(f'{ratio:.3f}' for ratio in outcome.final.ratios)}")
    return "\n".join(lines)


def why_keep(known: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """Returns why ``known`` is more reliable than ``found`` (both from ``details``); empty if it may be replaced."""
    if (known.get("from_page_cache") or 0) < 0.5 <= (found.get("from_page_cache") or 0):
        return "this run read from the page cache, that one from the device"
    if missing := sorted(_directions(known) - _directions(found)):
        return f"this run left out {' and '.join(missing)}s"
    if known.get("complete") and not found.get("complete"):
        return "the final of this run was cut short"
    if found["seconds"] < _HASTY * known.get("seconds", 0):
        return f"this run took {found['seconds']:.0f} s, that one {known['seconds']:.0f} s"
    return ""


def _directions(document: Mapping[str, Any]) -> set[str]:
    return set(document.get("bytes_per_second", {}).get("best", {}))


if __name__ == "__main__":
    sys.exit(main())
