"""What the page of results consists of: for each section the commands that measure, and what makes Markdown of it.

A new section is one line of the table here, and one ``<!-- section NAME -->`` in page_template.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks import page_tables
from benchmarks.page_tables import Json

PLOT = "{plot}"  # in a command: its picture
_SWEEP = ("block_size=64K,256K,1M,4M", "queue_depth=1,8,32,128")


@dataclass(frozen=True)
class Plan:
    """What commands are made for."""

    places: Sequence[str]  # names
    size: str
    rounds: int


@dataclass(frozen=True)
class Command:
    """One run. ``words`` stand on the page; a place's name among them is its folder when it is run."""

    name: str
    words: Sequence[str]
    json: bool = True  # it takes --json FILE; else what it prints is its result


@dataclass(frozen=True)
class Section:
    """Some commands and how their results are shown."""

    commands: Callable[[Plan], list[Command]]
    render: Callable[[Json], list[str]] = page_tables.bench
    why_not: Callable[[], str] = str  # the reason why it cannot be run here, or nothing


def _raw_io(plan: Plan) -> list[Command]:
    return [Command("raw_io", ["python", "benchmarks/raw_io.py", *_each_path(plan), *_effort(plan), "--plot", PLOT])]


def _engines(plan: Plan) -> list[Command]:
    return [
        Command(
            f"engines_{direction}_{place.lower()}",
            [
                "nvme-bench", "--folder", place, *(["--read"] if direction == "read" else []), "--engine", "all",
                "--io_size", plan.size, "--loops", str(plan.rounds), "--plot", PLOT,
            ],
        )
        for place in plan.places
        for direction in ("read", "write")
    ]  # fmt: skip


def _overhead(plan: Plan) -> list[Command]:
    return [Command("overhead", ["python", "benchmarks/bench_overhead.py", *_each_path(plan), *_effort(plan)])]


def _checkpoint(plan: Plan) -> list[Command]:
    return [
        Command("checkpoint", ["python", "benchmarks/checkpoint.py", *_each_path(plan), *_effort(plan), "--plot", PLOT])
    ]


def _fresh(plan: Plan) -> list[Command]:
    return [
        Command("fresh", ["python", "benchmarks/fresh_process.py", *_each_path(plan), *_effort(plan), "--plot", PLOT])
    ]


def _sweep(plan: Plan) -> list[Command]:
    return [
        Command(
            f"sweep_{direction}_{place.lower()}",
            [
                "nvme-bench", "--folder", place, *(["--read"] if direction == "read" else []), "--sweep", *_SWEEP,
                "--io_size", plan.size, "--loops", str(plan.rounds), "--plot", PLOT,
            ],
        )
        for place in plan.places
        for direction in ("read", "write")
    ]  # fmt: skip


def _scaling(plan: Plan) -> list[Command]:
    return [Command("scaling", ["python", "benchmarks/scaling.py", *_effort(plan), "--plot", PLOT])]


def _tuning(plan: Plan) -> list[Command]:
    return [Command("tuning", ["python", "benchmarks/tuning.py", *_each_path(plan)])]


def _explain(plan: Plan) -> list[Command]:
    return [Command(f"explain_{place.lower()}", ["nvme-bench", "explain", place], json=False) for place in plan.places]


def _gpu(plan: Plan) -> list[Command]:
    return [Command("gpu", ["python", "benchmarks/gpu_io.py", *_each_path(plan), *_effort(plan), "--plot", PLOT])]


def _each_path(plan: Plan) -> list[str]:
    return [word for place in plan.places for word in ("--path", place)]


def _effort(plan: Plan) -> list[str]:
    return ["--size", plan.size, "--rounds", str(plan.rounds)]


def _why_no_gpu() -> str:
    import torch

    return "" if torch.cuda.is_available() else "there was no CUDA GPU where this page was made"


SECTIONS: dict[str, Section] = {
    "raw_io": Section(_raw_io, page_tables.raw_io),
    "engines": Section(_engines),
    "overhead": Section(_overhead, page_tables.raw_io),
    "checkpoint": Section(_checkpoint, page_tables.raw_io),
    "fresh": Section(_fresh, page_tables.raw_io),
    "sweep": Section(_sweep),
    "scaling": Section(_scaling, page_tables.scaling),
    "tuning": Section(_tuning, page_tables.tuning),
    "explain": Section(_explain),
    "gpu": Section(_gpu, page_tables.gpu_io, _why_no_gpu),
}
