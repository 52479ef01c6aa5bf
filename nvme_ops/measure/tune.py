"""The command ``nvme-tune``: sweeps block size, queue depth and lanes, and keeps the best for ``aio_handle.tuned``.

It takes ds_nvme_tune's flags, with the same meaning. Its passes are those of ``nvme-bench``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import nvme_ops
from nvme_ops.base.command_line import command_line, positive, say, size
from nvme_ops.base.progress import Step, progress_bar
from nvme_ops.base.settings import Settings
from nvme_ops.base.text import MIB, parse_json, size_words
from nvme_ops.filesystem.device import Identity, identify
from nvme_ops.io.tuning import store
from nvme_ops.measure.engines import Contender, Task, make_rows
from nvme_ops.measure.files import NotUsable, make_file
from nvme_ops.measure.rows import interleave
from nvme_ops.measure.scratch import scratch_folder
from nvme_ops.measure.stop import measuring
from nvme_ops.measure.sweep import combinations
from nvme_ops.measure.tables import FROM_PAGE_CACHE, Table, add_outputs, as_json, as_text, check_outputs, deliver

DEFAULT = Settings()
_ROUNDS, _FINAL_ROUNDS = 3, 9  # of the sweep; of its fastest settings against the default
_MIN_PASS = 32 * MIB  # shorter passes mostly measure how they begin and end
_PASS_SECONDS = 0.1
_MIN_GAIN = 1.02  # over the default's rate; less is not worth leaving it


@measuring("nvme-tune")
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0; 2 for wrong arguments and unusable folders; 130 after Ctrl-C."""
    args = parse(argv)
    with contextlib.ExitStack() as stack:
        places = [  # all of them, before anything is measured
            stack.enter_context(scratch_folder(folder, args.io_size + 64 * MIB, "--io-size or --folder"))
            for folder in dict.fromkeys(args.folder)
        ]
        results = [tune(args, place) for place in places]
    best = {result.best for result in results}
    aio = {"aio": (best.pop() if len(best) == 1 else DEFAULT).as_json()}
    document = {**aio, "devices": [result.as_document() for result in results]}
    deliver(args, document, "\n\n".join([*map(str, results), json.dumps(aio, indent=2)]))
    for result in [] if args.no_store else results:
        try:
            say(f"kept for aio_handle.tuned in {store.keep(result.identity, result.best, {'rounds': result.ratios})}")
        except (OSError, RuntimeError) as error:
            say(f"nvme-tune: warning: not kept for aio_handle.tuned: {error}")
    return 0


def parser() -> argparse.ArgumentParser:
    """Finds the settings with which aio_handle is fastest on a device.

    Measures block sizes, queue depths and numbers of lanes in all combinations,
    mostly in less than half a minute for each device. Prints the best as the
    section "aio" that DeepSpeed's configuration and aio_handle(**section) take,
    and keeps them for aio_handle.tuned. A gain that could be chance keeps the
    default.

    Examples:
      nvme-tune --folder /mnt/nvme                       read and write, CPU memory
      nvme-tune --folder /mnt/nvme --output aio.json     and a file
      nvme-tune --folder /mnt/nvme0 /mnt/nvme1           each by itself
      nvme-tune --folder /mnt/nvme --device cuda --no-write
                                                         reads into GPU memory

    A sweep configuration is a JSON file with the values to try beside the default:
      {"block_size": ["1M", "8M"], "queue_depth": [32, 128],
       "sequential_requests": [true, false], "single_submit": [false, true],
       "io_parallel": [1, 2, 4, 8]}

    exit status: 0; 2 for wrong arguments and for folders that cannot be used or
    lack the space; 130 after Ctrl-C, which keeps nothing
    """
    made = command_line("nvme-tune", parser.__doc__ or "")
    add = made.add_argument
    words = "folders on the devices to tune, each with --io-size of free space"
    add("--folder", "--nvme-dir", metavar="DIR", nargs="+", action="extend", required=True, help=words)
    add("--sweep-config", metavar="FILE.json", help="the values to try, see below")
    add("--no-read", action="store_true", help="do not measure reads")
    add("--no-write", action="store_true", help="do not measure writes")
    words = "the most bytes of a pass, of which most take 0.1 s (default 400M)"
    add("--io-size", type=size, default="400M", metavar="SIZE", help=words)
    add("--device", choices=["cpu", "cuda"], default="cpu", help="where tensors are (default cpu)")
    add("--gpu", dest="device", action="store_const", const="cuda", help="the same as --device cuda")
    add("--gds", action="store_true", help="tensors in GPU memory, with gds_handle")
    add("--log-dir", metavar="DIR", help="the same as --output DIR/tune.json; makes the folder")
    add("--loops", type=positive, default=1, metavar="N", help="N times as many rounds (default 1)")
    add("--verbose", action="store_true", help="show a line for each pass")
    add_outputs(add, ".json")
    add("--no-store", action="store_true", help="do not keep the result for aio_handle.tuned")
    made.add_argument("--version", action="version", version=f"nvme-tune {nvme_ops.__version__}")
    return made


def parse(argv: Sequence[str] | None) -> Namespace:
    """Returns the flags, checked, and what follows: ``candidates``, ``directions``, ``way`` and ``backend``.

    Exits with status 2 and a message on wrong arguments.
    """
    made = parser()
    args = made.parse_args(argv)
    args.directions = [name for name in ("write", "read") if not getattr(args, f"no_{name}")]
    args.way = "gds" if args.gds else "gpu" if args.device == "cuda" else "cpu"
    try:
        args.candidates = _candidates(args.sweep_config)
        _check(args)
        args.backend = (nvme_ops.gds_handle if args.gds else nvme_ops.aio_handle)().backend
    except (OSError, ValueError, RuntimeError) as error:
        made.error(str(error))
    return args


def _candidates(config: str | None) -> list[Settings]:
    """Returns the settings to try, the default first. Raises ValueError for a wrong sweep configuration."""
    lanes = [count for count in (1, 2, 4, 8) if count <= len(os.sched_getaffinity(0))]
    values: Any = {"block_size": ["256K", "1M", "4M"], "queue_depth": [8, 32, 128], "io_parallel": lanes}
    try:
        if config is not None:
            values = parse_json(Path(config).read_bytes())
        if not isinstance(values, dict) or not all(isinstance(tried, list) and tried for tried in values.values()):
            raise ValueError("not an object with lists of values")
        return list(dict.fromkeys([DEFAULT, *combinations(values.items(), DEFAULT)]))
    except (OSError, ValueError) as error:
        raise ValueError(f"--sweep-config {config}: {error}") from None


def _check(args: Namespace) -> None:
    if not args.directions:
        raise ValueError("--no-read and --no-write together leave nothing to measure")
    if missing := [folder for folder in args.folder if not os.path.isdir(folder)]:
        raise ValueError(f"{missing[0]}: no such folder")
    if args.way != "cpu":
        import torch

        if not torch.cuda.is_available():
            flag = "--gds" if args.gds else "--device cuda"
            raise ValueError(f"{flag}: torch.cuda is not available: no GPU, or torch without CUDA")
    if args.log_dir:
        os.makedirs(args.log_dir, exist_ok=True)
        args.output.append(os.path.join(args.log_dir, "tune.json"))
    check_outputs(args.output)


@dataclass(frozen=True)
class TuneResult:
    """What was measured on one device."""

    folder: str
    identity: Identity
    tables: list[Table]  # of the sweep, and of its fastest settings beside the default; one for each direction
    ratios: list[float]  # the rates of these settings over the default's, in the rounds of the two; [] for the default
    best: Settings

    def __str__(self) -> str:
        """Returns the tables and the verdict."""
        kept = self.best == DEFAULT
        why = ", the default" if kept else f": {statistics.median(self.ratios):.3f} of the default's rate"
        words = f"{self.folder}: {self.identity.words()}", *map(as_text, self.tables), f"best: {self.best.words()}{why}"
        return "\n\n".join(words)

    def as_document(self) -> dict[str, Any]:
        """Returns the result as JSON."""
        about = {"nvme_dir": self.folder, "identity": asdict(self.identity), "aio": self.best.as_json()}
        return {**about, "rounds": self.ratios, "tables": [as_json(table) for table in self.tables]}


def tune(args: Namespace, scratch: str) -> TuneResult:
    """Makes a file in the folder ``scratch`` and sweeps with it. Raises NotUsable if the default settings fail."""
    path = os.path.join(scratch, "data")
    make_file(path, args.io_size)
    rounds, final_rounds = _ROUNDS * args.loops, _FINAL_ROUNDS * args.loops
    passes = 2 + len(args.candidates) * (1 + rounds) + 2 * (1 + final_rounds)  # as many as ``interleave`` names
    with progress_bar(passes * len(args.directions)) as step:

        def measure(size: int, candidates: Sequence[Settings], rounds: int) -> list[Table]:
            device, engine = None if args.way == "cpu" else 0, "gds_handle" if args.gds else "aio_handle"
            contenders = [Contender(engine, tried, tried.words()) for tried in candidates]
            tasks = (Task(path, size, direction == "write", device) for direction in args.directions)
            return [_table(task, contenders, rounds, say if args.verbose else step) for task in tasks]

        size = min(args.io_size, _MIN_PASS)
        rate = min(1e9 * table.values(table.rows[0])[0] for table in measure(size, [DEFAULT], 1))
        size = min(args.io_size, max(_MIN_PASS, int(rate * _PASS_SECONDS) // MIB * MIB))
        tables = measure(size, args.candidates, rounds)
        medians = [statistics.median(_ratios(tables, row) or [0.0]) for row in range(len(args.candidates))]
        best = args.candidates[medians.index(max(medians))]
        final = [] if best == DEFAULT else measure(size, [DEFAULT, best], final_rounds)
    ratios = _ratios(final, 1)
    won = sum(ratio > 1 for ratio in ratios)  # of settings that are alike one wins 8 rounds of 9 in 2 % of the runs
    if statistics.median(ratios or [1.0]) <= _MIN_GAIN or won < final_rounds - args.loops:
        best = DEFAULT
    identity = identify(scratch, args.way, args.backend)
    return TuneResult(os.path.dirname(scratch), identity, [*tables, *final], ratios, best)


def _table(task: Task, contenders: Sequence[Contender], rounds: int, step: Step) -> Table:
    """Measures the contenders in interleaved rounds; the first of them is the default."""
    direction = "write" if task.write else "read"
    rows = make_rows(task, contenders)
    for row in rows:
        row.check = lambda: None  # comparing bytes would take longer than moving them
    interleave(rows, rounds, lambda words: step(f"{direction}, {words}"))
    if None in rows[0].samples or not rows[0].samples:
        raise NotUsable(f"{direction}: {rows[0].note}")
    title = f"{direction} of {size_words(task.size)}, medians of {rounds} rounds"
    return Table(direction, title, "GB/s", rows, DEFAULT.words(), [FROM_PAGE_CACHE])


def _ratios(tables: Sequence[Table], row: int) -> list[float]:
    """Returns a row's rates over the default's, round by round: the geometric mean of the directions."""
    ratios = [table.against(table.rows[row], table.reference) for table in tables]
    return [statistics.geometric_mean(pair) for pair in zip(*ratios, strict=False)]


if __name__ == "__main__":
    sys.exit(main())
