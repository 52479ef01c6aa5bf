"""``nvme-bench explain FILE|DIR``: compares what was reached with the ceiling; says what limits, and what to change.

``explain_place`` inspects the file, ``explain_rows`` measures, ``explain_judge`` draws conclusions from the rates
alone, ``explain_page`` formats them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch

from nvme_ops.arguments import check_output, command_line, size
from nvme_ops.bench import explain_page, explain_place, explain_rows, machine
from nvme_ops.bench.engines.task import Task
from nvme_ops.bench.explain_judge import FIO, LOCKED, Measured, judge
from nvme_ops.bench.explain_page import Direction, Page
from nvme_ops.bench.measure import Row, Spread, interleave, metered, spread
from nvme_ops.limits import free_memory
from nvme_ops.measuring import files, page_cache
from nvme_ops.measuring.energy import Meter
from nvme_ops.measuring.scratch import scratch_folder
from nvme_ops.progress import Step, progress_bar
from nvme_ops.text import GIB, MIB, size_words

_DESCRIPTION = """\
Measures for about half a minute how fast a default aio_handle moves an ordinary
tensor, and how fast the device is, and says on one page which part limits and
what to change. A FILE is only read; its pages are dropped from the page cache.
In a DIR a file of --io_size is made, and removed at the end.
"""
_EPILOG = """\
exit status: 0; 1 when a transfer failed; 2 for wrong arguments and places that
cannot be used
"""
_PASS_SECONDS = 0.4  # of a pass, unless the user chooses its size
_TENSORS = 4  # tensors of --io_size allocated at once, including fio's memory


def main(words: Sequence[str], progress: Step | None = None) -> tuple[int, str]:
    """Returns the exit status and what to print. ``progress`` is called before each pass; by default it shows a bar.

    Raises:
        SystemExit: status 2 after a message on wrong arguments, 0 after --help.
    """
    given = _parse(words)
    try:
        page = _explain(given, progress)
    except files.NotUsable as reason:
        return 2, f"nvme-bench explain: {reason}"
    except (OSError, EOFError, RuntimeError) as reason:
        return 1, f"nvme-bench explain: {reason}"
    document = json.dumps(explain_page.as_document(page, list(words)), indent=2) if given.json else ""
    if given.json == "-":
        return 0, document
    if given.json:
        Path(given.json).write_text(document + "\n", encoding="utf-8")
    return 0, explain_page.as_text(page)


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the flags."""
    made = command_line("nvme-bench explain", _DESCRIPTION, _EPILOG)
    add = made.add_argument
    add("path", metavar="FILE|DIR", help="a file to read, or a folder on the device")
    words_of_size = "bytes of a pass (default: what the device moves in 0.4 s, 1 GiB at most; of a smaller FILE all)"
    add("--io_size", type=size, metavar="SIZE", help=words_of_size)
    add("--rounds", type=int, default=3, metavar="N", help="timed passes of each row (default 3)")
    add("--write", action="store_true", help="explain writing too; for a folder")
    add("--gpu", type=int, nargs="?", const=0, metavar="N", help="GPU memory instead of an ordinary tensor (default 0)")
    add("--json", metavar="FILE", help="everything as JSON; - for standard output, then no text")
    return made


def _parse(words: Sequence[str]) -> argparse.Namespace:
    made = parser()
    given = made.parse_args(words)
    if given.rounds < 2:
        made.error(f"--rounds {given.rounds}: at least 2, or nothing is known of the noise")
    if given.json and given.json != "-":
        try:
            check_output("--json", given.json)
        except ValueError as error:
            made.error(str(error))
    if given.gpu is not None and not 0 <= given.gpu < torch.cuda.device_count():
        made.error(f"--gpu {given.gpu}: torch sees {torch.cuda.device_count()} GPUs")
    if given.write and os.path.isfile(given.path):
        made.error("--write: a file that exists is only read; name a folder")
    return given


def _explain(given: argparse.Namespace, progress: Step | None) -> Page:
    with _file(given) as (path, scratch):
        place = explain_place.inspect(path)
        size = _size(given, place)
        meter = Meter([] if given.gpu is None else [given.gpu])
        as_found = None if scratch or place.cached == 0 else _as_found(Task(path, size, False, given.gpu), given.rounds)
        files.make_cold(path)
        page = Page(
            place, scratch, size, given.rounds, machine.machine(), meter.unavailable(), as_found,
            page_cache.cached_bytes(path),
        )  # fmt: skip
        for write in [False, True] if given.write else [False]:
            task = Task(path, size, write, given.gpu)
            page.hindrances = explain_rows.hindrances(task.handle.backend, explain_rows.lock(task))
            page.directions.append(_direction(task, meter, page, progress))
        return page


@contextmanager
def _file(given: argparse.Namespace) -> Iterator[tuple[str, bool]]:
    """Returns the file to work on, and whether it is one of ours."""
    if not explain_place.is_folder(given.path):
        yield given.path, False
        return
    explain_place.mount_of_device(given.path)
    size = given.io_size or _default_size()
    with scratch_folder(given.path, size + 64 * MIB, "--io_size or folder") as folder:
        _check_memory(size)
        path = os.path.join(folder, "data")
        try:
            files.make_file(path, size)
        except OSError as error:
            raise files.NotUsable(f"{given.path}: {error.strerror}") from error
        yield path, True


def _default_size() -> int:
    return min(GIB, max(MIB, free_memory() // _TENSORS))


def _size(given: argparse.Namespace, place: explain_place.FilePlace) -> int:
    """Returns the bytes of a pass. Raises NotUsable if there is not enough memory for the tensors."""
    size = min(place.size, given.io_size or _default_size())
    if given.io_size:
        _check_memory(size)
        return size
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
    """Returns GB/s with the page cache as it is; reads that bypass it do not change it."""
    row = explain_rows.as_found_row(task)
    interleave([row], rounds)
    return spread([sample.rate / 1e9 for sample in row.samples if sample is not None])


def _direction(task: Task, meter: Meter, page: Page, progress: Step | None) -> Direction:
    rows = explain_rows.make_rows(task)
    for row in rows:
        metered(row, meter)
    rates = (explain_rows.copy_rate(task), explain_rows.new_page_rate(task), explain_rows.device_copy_rate(task))
    with nullcontext(progress) if progress else progress_bar(len(rows) * (1 + page.rounds)) as step:
        interleave(rows, page.rounds, step)
    by_name = {row.name: row for row in rows}
    for name in (reached := explain_rows.reached(task), LOCKED):
        if not any(by_name[name].samples):
            raise RuntimeError(f"{name}: {by_name[name].note}")
    measured = Measured(
        task.write,
        reached,
        {row.name: [None if sample is None else sample.rate for sample in row.samples] for row in rows},
        {row.name: busy for row in rows if (busy := _busy(row)) is not None},
        explain_rows.variations(task),
        *rates,
        missing="" if any(by_name[FIO].samples) else by_name[FIO].note,
        hindrances=page.hindrances,
    )
    return Direction(rows, measured, judge(measured))


def _busy(row: Row) -> float | None:
    """Returns CPU seconds for each second of a pass."""
    known = [each for each in row.samples if each is not None and each.cpu_seconds is not None]
    return statistics.median((each.cpu_seconds or 0) / each.seconds for each in known) if known else None
