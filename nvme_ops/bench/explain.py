"""``nvme-bench explain FILE|DIR``: what was reached against the device's ceiling, what limits, and what to change.

``explain_place`` looks at the file, ``explain_rows`` is what is measured, ``explain_judge`` draws the conclusions from
the rates alone, ``explain_page`` writes them down.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from nvme_ops.arguments import check_output, size
from nvme_ops.bench import explain_page, explain_place, explain_rows, files, huge_pages, machine, page_cache
from nvme_ops.bench.energy import Meter
from nvme_ops.bench.engines.task import Task
from nvme_ops.bench.explain_judge import FIO, LOCKED, Judgement, Measured, judge
from nvme_ops.bench.measure import Row, Spread, interleave, spread
from nvme_ops.bench.scratch import scratch_folder
from nvme_ops.free_memory import free_memory
from nvme_ops.progress import Step, progress_bar
from nvme_ops.text import GIB, MIB, size_words

_DESCRIPTION = """\
Measures for about half a minute how fast a default aio_handle moves an ordinary tensor, and how fast the device is, and
says on one page which part limits and what to change. A FILE is only read; its pages are dropped from the page cache.
In a DIR a file of --io_size is made, and removed at the end.
"""
_EPILOG = "exit status: 0; 1 when a transfer failed; 2 for wrong arguments and places that cannot be used"
_DEFAULT_SIZE = GIB
_PASS_SECONDS = 0.4  # of a pass, where the user does not choose its size
_TENSORS = 4  # of --io_size that are held at once, fio's memory included


@dataclass(frozen=True)
class Direction:
    """What was measured and judged in one direction."""

    rows: list[Row]
    measured: Measured
    judgement: Judgement


@dataclass(frozen=True)
class Page:
    """All that the page tells."""

    place: explain_place.Place
    scratch: bool  # the file is one of ours
    size: int  # bytes of a pass
    rounds: int
    directions: list[Direction]
    machine: dict[str, str]
    energy: str  # why there is none
    as_found: Spread | None = None  # GB/s, before the page cache was emptied
    still_cached: int | None = None  # bytes that stayed in the page cache all the same
    hindrances: list[tuple[str, str]] = field(default_factory=list)


def main(words: Sequence[str], progress: Step | None = None) -> tuple[int, str]:
    """The exit status and what to print. ``progress`` is told of each pass; a bar on a terminal without it.

    Raises:
        SystemExit: status 2 after a message on wrong arguments, 0 after --help.
    """
    given = _parse(words)
    try:
        page = _explain(given, progress)
    except files.NotUsable as reason:
        return 2, f"nvme-bench explain: {reason}"
    except (_Failed, OSError, EOFError, RuntimeError) as reason:
        return 1, f"nvme-bench explain: {reason}"
    document = json.dumps(explain_page.as_document(page, list(words)), indent=2) if given.json else ""
    if given.json == "-":
        return 0, document
    if given.json:
        Path(given.json).write_text(document + "\n", encoding="utf-8")
    return 0, explain_page.as_text(page)


class _Failed(Exception):  # noqa: N818  (the message is all there is to it)
    """A transfer that everything else rests on did not succeed, and why."""


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="nvme-bench explain",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("path", metavar="FILE|DIR", help="a file to read, or a folder on the device")
    parser.add_argument(
        "--io_size", type=size, metavar="SIZE",
        help="bytes of a pass (default: what the device moves in 0.4 s, 1 GiB at most; of a smaller FILE all)",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="timed passes of each row (default 3)")
    parser.add_argument("--write", action="store_true", help="explain writing too; for a folder")
    parser.add_argument(
        "--gpu", type=int, nargs="?", const=0, metavar="N", help="GPU memory instead of an ordinary tensor (default 0)"
    )
    parser.add_argument("--json", metavar="FILE", help="everything as JSON; - for standard output, then no text")
    given = parser.parse_args(words)
    if given.rounds < 2:
        parser.error(f"--rounds {given.rounds}: at least 2, or nothing is known of the noise")
    if given.json and given.json != "-":
        try:
            check_output("--json", given.json)
        except ValueError as error:
            parser.error(str(error))
    if given.gpu is not None and not 0 <= given.gpu < torch.cuda.device_count():
        parser.error(f"--gpu {given.gpu}: torch sees {torch.cuda.device_count()} GPUs")
    if given.write and os.path.isfile(given.path):
        parser.error("--write: a file that exists is only read; name a folder")
    return given


def _explain(given: argparse.Namespace, progress: Step | None) -> Page:
    with _file(given) as (path, scratch):
        place = explain_place.inspect(path)
        size = _size(given, place)
        gpus = [] if given.gpu is None else [given.gpu]
        meter = Meter(gpus)
        as_found = None if scratch or place.cached == 0 else _as_found(Task(path, size, False, given.gpu), given.rounds)
        files.make_cold(path)
        still_cached = page_cache.cached_bytes(path)
        directions, hindrances = [], []
        for write in [False, True] if given.write else [False]:
            task = Task(path, size, write, given.gpu)
            locked = explain_rows.lock(task)
            hindrances = explain_rows.hindrances(task.handle.backend, locked)
            directions.append(_direction(task, meter, given.rounds, hindrances, progress))
        return Page(
            place, scratch, size, given.rounds, directions, machine.machine(), meter.unavailable(), as_found,
            still_cached, hindrances,
        )  # fmt: skip


@contextmanager
def _file(given: argparse.Namespace) -> Iterator[tuple[str, bool]]:
    """The file to work on, and whether it is one of ours."""
    if not explain_place.is_folder(given.path):
        huge_pages.settle()
        yield given.path, False
        return
    explain_place.refuse_memory(given.path)
    size = given.io_size or min(_DEFAULT_SIZE, max(MIB, free_memory() // _TENSORS))
    with scratch_folder(given.path, size + 64 * MIB, "--io_size or folder") as folder:
        _check_memory(size)
        path = os.path.join(folder, "data")
        try:
            files.make_file(path, size)
        except OSError as error:
            raise files.NotUsable(f"{given.path}: {error.strerror}") from error
        yield path, True


def _size(given: argparse.Namespace, place: explain_place.Place) -> int:
    """Bytes of a pass. Raises NotUsable when there is not enough memory for the tensors."""
    size = min(place.size, given.io_size or _DEFAULT_SIZE)
    if given.io_size:
        _check_memory(size)
        return size
    size = min(size, max(MIB, free_memory() // _TENSORS))
    in_time = int(explain_rows.probe(place.path, size) * _PASS_SECONDS)
    return min(size, max(64 * MIB, in_time // (16 * MIB) * 16 * MIB))


def _check_memory(size: int) -> None:
    needed, free = size * _TENSORS, free_memory()
    if needed > free:
        raise files.NotUsable(
            f"--io_size {size_words(size)} takes {size_words(needed)} of memory and {size_words(free)} are free; "
            "choose a smaller one"
        )


def _as_found(task: Task, rounds: int) -> Spread | None:
    """GB/s with the page cache as it is; reading past it changes nothing there."""
    row = explain_rows.as_found_row(task)
    interleave([row], rounds)
    return spread([sample.rate / 1e9 for sample in row.samples if sample is not None])


def _direction(
    task: Task, meter: Meter, rounds: int, hindrances: list[tuple[str, str]], progress: Step | None
) -> Direction:
    made = explain_rows.make_rows(task, meter)
    rates = (explain_rows.copy_rate(task), explain_rows.new_page_rate(task), explain_rows.device_copy_rate(task))
    if progress is None:
        with progress_bar(len(made.rows) * (1 + rounds)) as step:
            interleave(made.rows, rounds, step)
    else:
        interleave(made.rows, rounds, progress)
    by_name = {row.name: row for row in made.rows}
    for name in (made.reached, LOCKED):
        if not any(by_name[name].samples):
            raise _Failed(f"{name}: {by_name[name].note}")
    measured = Measured(
        task.write,
        made.reached,
        {row.name: [None if sample is None else sample.rate for sample in row.samples] for row in made.rows},
        {row.name: busy for row in made.rows if (busy := _busy(row)) is not None},
        made.variations,
        *rates,
        missing=by_name[FIO].note if not any(by_name[FIO].samples) else "",
        hindrances=hindrances,
    )
    return Direction(made.rows, measured, judge(measured))


def _busy(row: Row) -> float | None:
    """CPU seconds for each second of a pass."""
    passes = [sample for sample in row.samples if sample is not None]
    shares = [each.cpu_seconds / each.seconds for each in passes if each.cpu_seconds is not None]
    return statistics.median(shares) if shares else None
