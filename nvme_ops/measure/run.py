"""One run of ``nvme-bench``: makes files and processes, measures all rows in interleaved rounds, removes everything.

It also shows the result, as text and JSON.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
from argparse import Namespace
from collections import Counter
from dataclasses import asdict, dataclass, replace
from typing import Any

from nvme_ops.base.energy import Meter
from nvme_ops.base.progress import progress_bar
from nvme_ops.base.settings import Settings
from nvme_ops.base.text import GIB, MIB, rounded, share_words, size_words
from nvme_ops.measure import files, machine
from nvme_ops.measure.engines import ENGINES, Contender, Task, make_rows
from nvme_ops.measure.remote import Remote, joint_row
from nvme_ops.measure.rows import Row, cached_share_of, interleave, metered, summed
from nvme_ops.measure.scratch import scratch_folder, sweep
from nvme_ops.measure.tables import ALONE, FROM_PAGE_CACHE, Table, as_json, as_text

_SMALLER = "--io-size or --folder"
COLUMNS = ("end to end GB/s", "CPU s/GiB", "peak memory", FROM_PAGE_CACHE, "submit us", "J/GiB")


@dataclass
class BenchResult:
    """What was measured, until the end or Ctrl-C."""

    options: Namespace  # of ``bench.parse``
    machine: dict[str, str]
    places: dict[str, dict[str, str]]
    table: Table
    energy: str = ""  # why there is none
    interrupted: bool = False

    @property
    def wrong(self) -> list[str]:
        """Names of the rows that moved wrong bytes."""
        return [row.name for row in self.table.rows if row.wrong]


def run(options: Namespace) -> BenchResult:
    """Runs the benchmark. Raises ``files.NotUsable`` if a folder cannot be used."""
    with contextlib.ExitStack() as stack:
        tasks = _make_files(options, stack)
        processes = stack.enter_context(contextlib.ExitStack())
        rows, sums = _make_rows(options, tasks, processes)
        meter = Meter(gpus=[place.device for place in options.places] if options.gpu else [])
        for row in rows:
            metered(row, meter)
        places = {place.folder: machine.place(place.folder) for place in options.places}
        group = "write" if options.write else "read"
        # rows of several devices are divided by the sum of each alone
        reference = "" if options.scaling or len(rows) == 1 else rows[0].name
        table = Table(group, f"{group}, {_work_words(options)}", "GB/s", rows, reference, COLUMNS, ALONE)
        result = BenchResult(options, machine.machine(), places, table, energy=meter.unavailable())
        try:
            with processes, progress_bar(len(rows) * (1 + options.loops)) as step:
                interleave(rows, options.loops, step, options.warmup_loops)
        except KeyboardInterrupt:
            result.interrupted = True
        for total, parts in sums:
            total.samples = summed(parts)
            table.rows.append(total)
        return result


def contenders(options: Namespace) -> list[Contender]:
    """Returns the contenders in order: each engine with all settings that differ for it."""
    made = []
    for engine in options.engines:
        takes = ENGINES[engine].takes
        swept = [name for name in options.swept if name in takes]
        # settings that do not affect it have their defaults
        same = [Settings(**{name: getattr(settings, name) for name in takes}) for settings in options.settings]
        for settings in dict.fromkeys(same):
            words = [f"{name} {_value(getattr(settings, name))}" for name in swept]
            made.append(Contender(engine, settings, ", ".join([engine, *words])))
    return made


def _value(value: int) -> str:
    return size_words(value) if value >= 1024 else str(value)


def _work_words(options: Namespace) -> str:
    words = size_words(options.size)
    if (count := len(options.places)) > 1:
        folders = len({place.folder for place in options.places})
        words += f" by each of {count} processes at once"
        words += f", in {folders} folders" if folders > 1 else ""
    memory = "GPU memory" if options.gpu else "an ordinary CPU tensor" if options.pageable else "page-locked CPU memory"
    return f"{words}, {memory}, {'from the page cache' if options.cached else 'files out of the page cache'}"


def _make_files(options: Namespace, stack: contextlib.ExitStack) -> list[Task]:
    copies = 1 + sum(ENGINES[engine].own_file for engine in options.engines)
    processes = Counter(place.folder for place in options.places)
    needed = {folder: count * options.size * copies * options.files for folder, count in processes.items()}
    for folder in needed:
        sweep(folder)  # what it removes counts as free space
    together: Counter[int] = Counter()  # folders of one file system share its free space
    for folder, size in needed.items():
        together[device := os.stat(folder).st_dev] += size
        files.require_space(folder, together[device] + 64 * MIB, _SMALLER)
    scratch = {
        folder: stack.enter_context(scratch_folder(folder, size + 64 * MIB, _SMALLER))
        for folder, size in needed.items()
    }
    tasks = []
    for number, place in enumerate(options.places):
        paths = [os.path.join(scratch[place.folder], f"data.{number}.{count}") for count in range(options.files)]
        for path in paths:
            files.make_file(path, options.size)
        gpu = place.device if options.gpu else None
        task = Task(
            paths[0], options.size, options.write, gpu, options.cached, options.validate, options.pageable,
            tuple(paths[1:]),
        )  # fmt: skip
        tasks.append(task)
    return tasks


_Sums = list[tuple[Row, list[Row]]]  # for --scaling: a row, and those that are added up for it


def _make_rows(options: Namespace, tasks: list[Task], processes: contextlib.ExitStack) -> tuple[list[Row], _Sums]:
    """Returns the rows of all contenders, in order. The processes that they need end with ``processes``."""
    everyone = contenders(options)
    if len(tasks) == 1:
        return make_rows(tasks[0], everyone), []
    sums: _Sums = []
    remotes = [processes.enter_context(Remote(make_rows, replace(task), everyone)) for task in tasks]
    rows = [_joint_rows(options, contender.name, remotes, number, sums) for number, contender in enumerate(everyone)]
    return list(itertools.chain.from_iterable(rows)), sums


def _joint_rows(options: Namespace, name: str, remotes: list[Remote], number: int, sums: _Sums) -> list[Row]:
    """Returns a row of all processes; with --scaling also rows of each alone, and of the first 2, 3, ..."""
    if not options.scaling:
        return [joint_row(name, remotes, number)]
    pairs = zip(options.places, remotes, strict=True)
    alone = [joint_row(f"{name}, {place.folder} alone", [remote], number) for place, remote in pairs]
    together = []
    for count in range(2, len(remotes) + 1):
        label = name if count == len(remotes) else f"{name}, the first {count}"
        together.append(joint_row(label, remotes[:count], number))
        together[-1].peer = f"{name}, the sum of {count} alone"
        sums.append((Row(together[-1].peer), alone[:count]))
    return alone + together


def text(result: BenchResult) -> str:
    """Returns the run as text."""
    about = {"": result.machine, **{f"{folder}: ": place for folder, place in result.places.items()}}
    parts = [
        "\n".join(label + machine.facts(words) for label, words in about.items()),
        as_text(result.table),
        _page_cache_text(result),
        ds_io_lines(result),
        f"energy: {result.energy}" if result.energy else "",
        verdict(result),
        "interrupted: this is what was measured until then; the files are removed" if result.interrupted else "",
    ]
    return "\n\n".join(filter(None, parts))


def _measured(result: BenchResult) -> list[Row]:
    """Returns the rows of engines that have a sample."""
    besides = {row.peer for row in result.table.rows}
    return [row for row in result.table.rows if any(row.samples) and row.name not in besides]


def verdict(result: BenchResult) -> str:
    """Returns one line: which row is the fastest, and which others were no slower in some round."""
    table, rows = result.table, _measured(result)
    if not rows:
        return ""
    rates = {row.name: statistics.median(table.values(row)) for row in rows}
    best = max(rows, key=lambda row: rates[row.name])
    words = f"{best.name}: {rounded(rates[best.name], 4)} GB/s"
    if best.name != table.reference and (against := table.against(best, table.reference)):
        words += f", {rounded(statistics.median(against), 3)} of {table.reference}"
    others = [row.name for row in rows if row is not best and max(table.against(row, best.name), default=0) >= 1]
    words = f"fastest: {words}" if len(rows) > 1 else words
    return f"{words}; as fast in some round: {'; '.join(others)}" if others else words


def _page_cache_text(result: BenchResult) -> str:
    shares = {row.name: cached_share_of(row.samples) for row in result.table.rows}
    words = ", ".join(f"{name} {share_words(share)}" for name, share in shares.items() if share)
    return f"read from the page cache: {words}. So far memory was measured, not the device." if words else ""


def ds_io_lines(result: BenchResult) -> str:
    """Returns latency and speed of one engine, of the task and end to end, as ds_io reports them; its GB are GiB."""
    direction = "Write" if result.options.write else "Read"
    measured = _measured(result)
    if len(measured) != 1:
        return ""
    samples = [sample for sample in measured[0].samples if sample is not None]
    amount = sum(sample.amount for sample in samples) / GIB
    end_to_end = sum(sample.seconds if sample.end_to_end is None else sample.end_to_end for sample in samples)
    return "\n".join(
        f"{kind} {direction} Latency = {seconds} sec\n{kind} {direction} Speed = {amount / seconds} GB/sec"
        for kind, seconds in (("Task", sum(sample.seconds for sample in samples)), ("E2E", end_to_end))
    )


def as_document(result: BenchResult) -> dict[str, Any]:
    """Returns the run as JSON."""
    options = {**vars(result.options)}
    words = options.pop("words")
    options |= {name: [asdict(entry) for entry in options[name]] for name in ("places", "settings")}
    return {
        "command": ["nvme-bench", *words],
        "machine": result.machine,
        "folders": result.places,
        "options": options,
        "tables": [as_json(result.table)],
        "passes": [
            {"row": row.name, **({"failed": True} if sample is None else asdict(sample))}
            for row in result.table.rows
            for sample in row.samples
        ],
        "from_page_cache": {row.name: cached_share_of(row.samples) for row in result.table.rows},
        "energy": result.energy or "available",
        "interrupted": result.interrupted,
    }
