"""What nvme-tune finds, beside the best of an exhaustive sweep on the same device. docs/tune.md explains it.

1. The sweep: every combination of a grid once in each of some rounds, one after the other, so that slow changes of the
   machine meet all of them. A combination counts by the median, over the rounds, of its rate over the round's median.
2. nvme-tune some times, each from the beginning, timed.
3. The winners, the best few of the sweep and the default in interleaved rounds. A winner is divided by the best of the
   sweep round by round. That best is chosen by these same rounds, which favours it a little.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))  # so that it runs from anywhere, uninstalled too

import nvme_ops
from benchmarks import command
from nvme_ops.arguments import positive, size
from nvme_ops.bench import files, machine, stop
from nvme_ops.bench.measure import Spread, spread
from nvme_ops.bench.scratch import scratch_folder
from nvme_ops.bench.settings import Settings
from nvme_ops.bench.work import filled
from nvme_ops.text import KIB, MIB, size_words
from nvme_ops.tune import options, run
from nvme_ops.tune.duel import Contest, Duel, geometric_mean
from nvme_ops.tune.passes import Passes
from nvme_ops.tune.search import DEFAULT, Axis, axes, combinations

Say = Callable[[str], None]


@dataclass(frozen=True)
class Repetition:
    """One run of nvme-tune."""

    winner: Settings
    seconds: float  # of the whole run, the file included
    against_best: Spread  # of the sweep: the winner's rate over it


@dataclass(frozen=True)
class Findings:
    """Everything."""

    sweep: list[tuple[Settings, float]]  # fastest first; over the median of all
    best: Settings  # of the sweep, measured again
    against_default: list[Duel]
    repetitions: list[Repetition]


def grid(name: str) -> list[Axis]:
    """``full``: what nvme-tune searches; ``small``: the values that differ most."""
    processors = len(os.sched_getaffinity(0))
    full = axes(processors)
    if name == "full":
        return full
    lanes = next(axis.values for axis in full if axis.name == "intra_op_parallelism")
    return [
        Axis("block_size", [256 * KIB, MIB, 4 * MIB, 8 * MIB]),
        Axis("queue_depth", [8, 32, 128]),
        Axis("intra_op_parallelism", sorted({lanes[0], lanes[len(lanes) // 2], lanes[-1]})),
        Axis("overlap_events", [False, True]),
    ]


def sweep(measure: Callable[[Settings], float], tried: Sequence[Settings], rounds: int, say: Say) -> list[Any]:
    """All settings with their rate over that of the median of all, fastest first."""
    ratios: dict[Settings, list[float]] = {settings: [] for settings in tried}
    for number in range(rounds):
        rates = {}
        for place, settings in enumerate(tried if number % 2 == 0 else reversed(tried)):
            say(f"sweep, round {number + 1} of {rounds}: {place + 1} of {len(tried)}")
            rates[settings] = measure(settings)
        middle = statistics.median(rates.values())
        for settings, rate in rates.items():
            ratios[settings].append(rate / middle)
    found = [(settings, statistics.median(taken)) for settings, taken in ratios.items()]
    return sorted(found, key=lambda each: -each[1])


def compare(duels: Sequence[Duel], swept: Sequence[Settings]) -> tuple[Settings, dict[Settings, Spread]]:
    """The best of those that were swept, and every contestant over it, round by round."""
    ratios: dict[Settings, Sequence[float]] = {duel.challenger: duel.ratios for duel in duels}
    ratios[DEFAULT] = [1.0] * len(duels[0].ratios)
    best = max(swept, key=lambda settings: statistics.median(ratios[settings]))
    over_best = {}
    for settings, taken in ratios.items():
        found = spread([one / other for one, other in zip(taken, ratios[best], strict=True)])
        if found is None:
            raise ValueError("without rounds nothing can be compared")
        over_best[settings] = found
    return best, over_best


def tune(given: argparse.Namespace) -> tuple[Settings, float]:
    """nvme-tune's winner, and how long it took."""
    words = ["--nvme_dir", given.path, "--io_size", str(given.io_size), "--seconds", str(given.seconds)]
    start = time.perf_counter()
    result = run.run(options.parse(words), lambda _: None)
    return result.best, time.perf_counter() - start


def measure(given: argparse.Namespace, say: Say) -> Findings:
    """All three steps in the folder."""
    with scratch_folder(given.path, 2 * given.io_size + 128 * MIB, "--io_size or --path") as place:
        path = os.path.join(place, "data")
        Path(path).touch()
        tensor = filled(nvme_ops.empty(given.io_size, dtype=torch.uint8))
        passes = Passes(path, tensor, lambda settings: nvme_ops.aio_handle(**settings.as_json()))
        passes.calibrate(1e9)  # all the time in the world: passes of --io_size

        def rate(settings: Settings) -> float:
            return geometric_mean(passes.measure(settings, True).values())

        swept = sweep(rate, combinations(grid(given.grid)), given.rounds, say)
        winners = []
        for number in range(given.repetitions):
            say(f"nvme-tune, {number + 1} of {given.repetitions}")
            winners.append(tune(given))
        best_few = [settings for settings, _ in swept[: given.best]]
        others = dict.fromkeys([*best_few, *(winner for winner, _ in winners)])
        contest = Contest(DEFAULT, [settings for settings in others if settings != DEFAULT])
        for number in range(given.final_rounds):
            say(f"winners beside the best of the sweep: round {number + 1} of {given.final_rounds}")
            contest.round(lambda settings: passes.measure(settings, True))
    duels = contest.duels()
    best, over_best = compare(duels, best_few)
    return Findings(swept, best, duels, [Repetition(winner, taken, over_best[winner]) for winner, taken in winners])


def as_text(found: Findings) -> str:
    """Settings, ratios and times."""
    lines = [f"best of {len(found.sweep)} combinations: {found.best.words()}"]
    for duel in found.against_default:
        lines.append(f"  {duel.challenger.words():55}{duel.ratio:.3f} of the default, +- {duel.noise:.3f}")
    lines.append("nvme-tune's winner over the best of the sweep: median (least - most)")
    for each in found.repetitions:
        ratio = f"{each.against_best.median:.3f} ({each.against_best.low:.3f} - {each.against_best.high:.3f})"
        lines.append(f"  {each.winner.words():55}{ratio}  {each.seconds:.1f} s")
    reached = sum(each.against_best.median >= 0.97 for each in found.repetitions)
    lines.append(
        f"{reached} of {len(found.repetitions)} reach 0.97; "
        f"the longest took {max(each.seconds for each in found.repetitions):.1f} s"
    )
    return "\n".join(lines)


def as_json(given: argparse.Namespace, found: Findings) -> dict[str, Any]:
    """Everything that was measured."""
    return {
        "machine": machine.machine(),
        "place": machine.place(given.path),
        "grid": given.grid,
        "io_size": given.io_size,
        "best": found.best.as_json(),
        "sweep": [{"aio": settings.as_json(), "ratio": ratio} for settings, ratio in found.sweep],
        "against_default": [
            {"aio": duel.challenger.as_json(), "ratio": duel.ratio, "noise": duel.noise, "rounds": list(duel.ratios)}
            for duel in found.against_default
        ],
        "repetitions": [
            {
                "aio": each.winner.as_json(),
                "seconds": each.seconds,
                "against_best": {"median": each.against_best.median, "min": each.against_best.low,
                                 "max": each.against_best.high},
            }
            for each in found.repetitions
        ],
    }  # fmt: skip


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """Exits with status 2 on wrong ones."""
    made = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    made.add_argument("--path", default=".", metavar="DIR", help="folder on the device (default: this one)")
    made.add_argument("--grid", choices=["small", "full"], default="full", help="of the sweep (default full)")
    made.add_argument("--io_size", type=size, default="400M", help="bytes of a pass (default 400M)")
    made.add_argument("--rounds", type=positive, default=2, help="of the sweep (default 2)")
    made.add_argument("--repetitions", type=positive, default=5, help="of nvme-tune (default 5)")
    made.add_argument("--seconds", type=float, default=45.0, help="of each of them (default 45)")
    made.add_argument("--best", type=positive, default=6, help="of the sweep that are measured again (default 6)")
    made.add_argument("--final-rounds", type=positive, default=9, help="in which they are (default 9)")
    made.add_argument("--json", metavar="FILE", help="write the figures to FILE")
    given = made.parse_args(words)
    if not os.path.isdir(given.path):
        made.error(f"--path {given.path}: no such folder")
    return given


def main(words: Sequence[str] | None = None) -> int:
    """Status 0; 1 when the folder cannot be used; 2 for wrong arguments; 130 after Ctrl-C."""
    given = arguments(words)
    stop.leave_on_signals()
    torch.set_num_threads(1)  # as nvme-tune does
    print("; ".join(f"{name} {text}" for name, text in {**machine.machine(), **machine.place(given.path)}.items()))
    print(f"grid {given.grid}, passes of {size_words(given.io_size)}", flush=True)
    try:
        found = measure(given, command.show_progress)
    except (files.NotUsable, OSError) as reason:
        print(f"tuning.py: {reason}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted; the files are removed", file=sys.stderr)
        return 130
    command.show_progress("")
    print(as_text(found))
    if given.json:
        Path(given.json).write_text(json.dumps(as_json(given, found), indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
