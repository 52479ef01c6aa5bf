"""What nvme-tune finds, beside the best of an exhaustive sweep on the same device. docs/tune.md explains it.

1. The sweep: every combination of a grid once in each of some rounds, one after the other, so that slow changes of the
   machine meet all of them. A combination counts by the median, over the rounds, of its rate over the round's median.
2. nvme-tune some times, each from the beginning, timed.
3. The winners, the best few of the sweep and the default in interleaved rounds. A winner is divided by the best of the
   sweep round by round. That best is chosen by these same rounds, which favours it a little.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))  # so that it runs from anywhere, uninstalled too

import nvme_ops
from benchmarks import command
from nvme_ops.arguments import positive, size
from nvme_ops.bench import machine
from nvme_ops.measuring import files, stop
from nvme_ops.measuring.scratch import scratch_folder
from nvme_ops.settings import Settings
from nvme_ops.text import KIB, MIB, size_words
from nvme_ops.tune import devices, options
from nvme_ops.tune.duel import Rounds, geometric_mean
from nvme_ops.tune.passes import Passes
from nvme_ops.tune.search import DEFAULT, Axis, axes

Say = Callable[[str], None]


def grid(name: str) -> list[Axis]:
    """``full``: what nvme-tune searches; ``small``: the values that differ most."""
    full = axes(len(os.sched_getaffinity(0)))
    if name == "full":
        return full
    lanes = next(axis.values for axis in full if axis.name == "intra_op_parallelism")
    return [
        Axis("block_size", [256 * KIB, MIB, 4 * MIB, 8 * MIB]),
        Axis("queue_depth", [8, 32, 128]),
        Axis("intra_op_parallelism", sorted({lanes[0], lanes[len(lanes) // 2], lanes[-1]})),
        Axis("overlap_events", [False, True]),
    ]


def combinations(axes: Sequence[Axis]) -> list[Settings]:
    """All settings that the axes span; what is no axis has its default."""
    names = [axis.name for axis in axes]
    every = itertools.product(*(axis.values for axis in axes))
    return [replace(DEFAULT, **dict(zip(names, values, strict=True))) for values in every]


def sweep(
    measure: Callable[[Settings], float], tried: Sequence[Settings], rounds: int, say: Say
) -> list[tuple[Settings, float]]:
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


def compare(rounds: Rounds, swept: Sequence[Settings], winners: Sequence[tuple[Settings, float]]) -> dict[str, Any]:
    """The best of what was swept, all against the default, and each winner, with its seconds, against that best."""
    duels = rounds.duels(DEFAULT)
    best = max(swept, key=lambda settings: duels[settings].ratio if settings in duels else 1.0)
    over_best = {settings: duel.ratios for settings, duel in rounds.duels(best).items()}
    repetitions = []
    for settings, seconds in winners:
        ratios = over_best.get(settings, [1.0])
        spread = {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}
        repetitions.append({"aio": settings.as_json(), "seconds": seconds, "against_best": spread})
    against_default = [
        {"aio": duel.challenger.as_json(), "ratio": duel.ratio, "noise": duel.noise, "rounds": list(duel.ratios)}
        for duel in duels.values()
    ]
    return {"best": best.as_json(), "against_default": against_default, "repetitions": repetitions}


def tune(given: argparse.Namespace) -> tuple[Settings, float]:
    """nvme-tune's winner, and how long it took, the file included."""
    words = ["--nvme_dir", given.path, "--io_size", str(given.io_size), "--seconds", str(given.seconds)]
    start = time.perf_counter()
    result = devices.tune(options.parse(words), lambda _: None)
    return result.best, time.perf_counter() - start


def measure(given: argparse.Namespace, say: Say) -> dict[str, Any]:
    """All three steps in the folder; returns what the JSON file shall hold of them."""
    with scratch_folder(given.path, 2 * given.io_size + 128 * MIB, "--io_size or --path") as place:
        path = os.path.join(place, "data")
        Path(path).touch()
        tensor = files.filled(nvme_ops.empty(given.io_size, dtype=torch.uint8))
        passes = Passes(path, tensor, nvme_ops.aio_handle)
        passes.calibrate(1e9)  # all the time in the world: passes of --io_size

        def rate(settings: Settings) -> float:
            return geometric_mean(passes.measure(settings, True).values())

        swept = sweep(rate, combinations(grid(given.grid)), given.rounds, say)
        winners = []
        for number in range(given.repetitions):
            say(f"nvme-tune, {number + 1} of {given.repetitions}")
            winners.append(tune(given))
        best_few = [settings for settings, _ in swept[: given.best]]
        contestants = list(dict.fromkeys([DEFAULT, *best_few, *(settings for settings, _ in winners)]))
        rounds = Rounds()
        for number in range(given.final_rounds):
            say(f"winners beside the best of the sweep: round {number + 1} of {given.final_rounds}")
            rounds.measure(contestants, lambda settings: passes.measure(settings, True))
    listed = [{"aio": settings.as_json(), "ratio": ratio} for settings, ratio in swept]
    return {"grid": given.grid, "io_size": given.io_size, "sweep": listed, **compare(rounds, best_few, winners)}


def as_text(found: dict[str, Any]) -> str:
    """Settings, ratios and times."""
    lines = [f"best of {len(found['sweep'])} combinations: {Settings(**found['best']).words()}"]
    for duel in found["against_default"]:
        lines.append(
            f"  {Settings(**duel['aio']).words():55}{duel['ratio']:.3f} of the default, +- {duel['noise']:.3f}"
        )
    lines.append("nvme-tune's winner over the best of the sweep: median (least - most)")
    tuned = found["repetitions"]
    for each in tuned:
        ratio = "{median:.3f} ({min:.3f} - {max:.3f})".format(**each["against_best"])
        lines.append(f"  {Settings(**each['aio']).words():55}{ratio}  {each['seconds']:.1f} s")
    reached = sum(each["against_best"]["median"] >= 0.97 for each in tuned)
    longest = max(each["seconds"] for each in tuned)
    return "\n".join([*lines, f"{reached} of {len(tuned)} reach 0.97; the longest took {longest:.1f} s"])


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """Exits with status 2 on wrong ones."""
    made = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    made.add_argument("--path", default=".", metavar="DIR", help="folder on the device (default: this one)")
    made.add_argument("--grid", choices=["small", "full"], default="full", help="of the sweep (default full)")
    made.add_argument("--io_size", type=size, default="400M", help="bytes of a pass (default 400M)")
    made.add_argument("--rounds", type=positive, default=2, help="of the sweep (default 2)")
    made.add_argument("--repetitions", type=positive, default=5, help="of nvme-tune (default 5)")
    made.add_argument("--seconds", type=float, default=16.0, help="of each of them (default 16)")
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
    about = {"machine": machine.machine(), "place": machine.place(given.path)}
    print("; ".join(f"{name} {text}" for part in about.values() for name, text in part.items()))
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
        Path(given.json).write_text(json.dumps({**about, **found}, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
