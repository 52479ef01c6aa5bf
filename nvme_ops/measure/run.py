"""One run of ``nvme-bench``: makes files and processes, measures all rows in interleaved rounds, removes everything.

And what is shown of it: text, JSON, CSV, pictures.
"""

from __future__ import annotations

import contextlib
import csv
import io
import os
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from nvme_ops.measure import files, fio, machine
from nvme_ops.measure.energy import Meter, total
from nvme_ops.measure.engines import ENGINES, Contender, Task, make_rows
from nvme_ops.measure.remote import Remote, joint_row
from nvme_ops.measure.rows import PERCENTILES, BlockTimes, Row, Spread, Unavailable, interleave, metered, spread
from nvme_ops.measure.scratch import scratch_folder, sweep
from nvme_ops.measure.tables import FROM_PAGE_CACHE, Lines, Table, as_json, as_text, plain, plot_lines, with_range
from nvme_ops.measure.tables import plot as plot_tables
from nvme_ops.progress import Step, progress_bar
from nvme_ops.settings import Settings
from nvme_ops.text import GIB, MIB, columns_text, rounded, share_words, size_words

_SMALLER = "--io_size or --folder"
COLUMNS = ("end to end GB/s", "CPU s/GiB", "peak memory", FROM_PAGE_CACHE, "submit us", "J/GiB")


@dataclass(frozen=True)
class Scaling:
    """An engine on the first ``devices`` folders at once, over the sum of its rates on each of them alone."""

    engine: str
    devices: int
    rate: Spread | None  # GB/s, of all at once
    alone: Spread | None  # GB/s, the sum
    ratio: Spread | None

    def as_json(self) -> dict[str, Any]:
        """Returns it as plain values."""
        spreads = {name: plain(getattr(self, name)) for name in ("rate", "alone", "ratio")}
        return {"engine": self.engine, "devices": self.devices, **spreads}


@dataclass
class BenchResult:
    """What was measured, until the end or Ctrl-C."""

    options: Namespace  # of ``bench.parse``
    machine: dict[str, str]
    places: dict[str, dict[str, str]]
    table: Table
    blocks: dict[str, BlockTimes] = field(default_factory=dict)
    scaling: list[Scaling] = field(default_factory=list)
    energy: str = ""  # why there is none
    interrupted: bool = False

    @property
    def wrong(self) -> list[str]:
        """Names of the rows that moved wrong bytes."""
        return [row.name for row in self.table.rows if row.wrong]


def run(options: Namespace, say: Callable[[str], None] = lambda _: None) -> BenchResult:
    """Runs the benchmark. Raises ``files.NotUsable`` if a folder cannot be used.

    ``say`` is called with a line about each preparation.
    """
    with contextlib.ExitStack() as stack:
        tasks = _make_files(options, stack, say)
        crew = _Crew(options, tasks, stack)
        rows = crew.rows()
        meter = Meter(gpus=[place.device for place in options.places] if options.gpu else [])
        for row in rows:
            metered(row, meter)
        places = {place.folder: machine.place(place.folder) for place in options.places}
        group, reference = "write" if options.write else "read", fio.NAME if options.reference else ""
        table = Table(group, f"{group}, {_work_words(options)}", "GB/s", rows, reference, COLUMNS)
        result = BenchResult(options, machine.machine(), places, table, energy=meter.unavailable())
        step: Step
        try:
            with progress_bar(len(rows) * (1 + options.loops) + sum(row.blocks is not None for row in rows)) as step:
                interleave(rows, options.loops, step, options.warmup_loops)
                for row in rows if len(options.settings) == 1 else ():
                    if row.blocks is not None and any(row.samples):
                        step(f"single blocks: {row.name}")
                        if times := _blocks(row):
                            result.blocks[row.name] = times
        except KeyboardInterrupt:
            result.interrupted = True
            crew.stop()
        for row in rows:
            row.blocks = None
        result.scaling = [scaling_of(*each) for each in crew.scaling]
        return result


def contenders(options: Namespace) -> list[Contender]:
    """Returns the rows in order: fio at its best, then each engine with each of the settings that affect it."""
    made = [Contender(fio.NAME, options.settings[0], fio.NAME)] if options.reference else []
    for engine in options.engines:
        takes = ENGINES[engine].takes
        swept = [name for name in options.swept if name in takes]
        # settings without effect have their defaults
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


def _make_files(options: Namespace, stack: contextlib.ExitStack, say: Callable[[str], None]) -> list[Task]:
    copies = 1 + sum(ENGINES[engine].own_file for engine in options.engines)
    processes = Counter(place.folder for place in options.places)
    needed = {folder: count * options.size * copies * options.files for folder, count in processes.items()}
    for folder in needed:
        sweep(folder)  # what it removes counts as free space
    together: Counter[int] = Counter()  # folders of one file system share what is free there
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
            say(f"writing {size_words(options.size)} to {place.folder}")
            try:
                files.make_file(path, options.size)
            except OSError as error:
                raise files.NotUsable(f"{place.folder}: {error.strerror}") from error
        gpu = place.device if options.gpu else None
        task = Task(
            paths[0], options.size, options.write, gpu, options.cached, options.validate, options.pageable,
            options.use_gds, options.slow_bounce_buffer, tuple(paths[1:]),
        )  # fmt: skip
        tasks.append(task)
    return tasks


class _Crew:
    """The processes of a run and the rows that they make."""

    def __init__(self, options: Namespace, tasks: list[Task], stack: contextlib.ExitStack) -> None:
        self._options, self._tasks, self._stack = options, tasks, stack
        self.scaling: list[tuple[str, Row, list[Row]]] = []  # engine, the first devices at once, each of them alone
        self._remotes: list[Remote] = []

    def rows(self) -> list[Row]:
        everyone = contenders(self._options)
        groups: dict[str, list[Contender]] = {}
        for contender in everyone:
            own = contender.engine in ENGINES and ENGINES[contender.engine].own_process
            groups.setdefault(contender.engine if own else "", []).append(contender)
        made: dict[str, list[Row]] = {}
        for group, members in groups.items():
            if len(self._tasks) == 1 and not group:
                rows = [[row] for row in make_rows(self._tasks[0], members)]
            else:
                remotes = [self._remote(task, members) for task in self._tasks]
                rows = [self._over(member.name, remotes, number) for number, member in enumerate(members)]
            made.update(zip((member.name for member in members), rows, strict=True))
        return [row for contender in everyone for row in made[contender.name]]

    def stop(self) -> None:
        """Ends all processes at once, whatever they are doing."""
        for remote in self._remotes:
            remote.close(0)

    def _remote(self, task: Task, members: list[Contender]) -> Remote:
        remote = self._stack.enter_context(Remote(make_rows, replace(task), members))
        self._remotes.append(remote)
        return remote

    def _over(self, name: str, remotes: list[Remote], number: int) -> list[Row]:
        """Returns one row of all processes; with --scaling also of each alone, and of the first 2, 3, ..."""
        if len(remotes) == 1:
            return [remotes[0].row(name, number)]
        if not self._options.scaling:
            return [joint_row(name, remotes, number)]
        each = zip(self._options.places, remotes, strict=True)
        alone = [joint_row(f"{name}, {place.folder} alone", [remote], number) for place, remote in each]
        together = []
        for count in range(2, len(remotes) + 1):
            label = name if count == len(remotes) else f"{name}, the first {count}"
            together.append(joint_row(label, remotes[:count], number))
            self.scaling.append((name, together[-1], alone[:count]))
        return alone + together


def scaling_of(name: str, together: Row, alone: Sequence[Row]) -> Scaling:
    """Computes scaling over the rounds in which all rows succeeded."""
    rounds = [each for each in zip(*(row.samples for row in (together, *alone)), strict=False) if None not in each]
    rates = [[sample.rate / 1e9 for sample in each if sample is not None] for each in rounds]
    return Scaling(
        name, len(alone), spread([joint for joint, *_ in rates]), spread([sum(single) for _, *single in rates]),
        spread([joint / sum(single) for joint, *single in rates]),
    )  # fmt: skip


def _blocks(row: Row) -> BlockTimes | None:
    """Measures a row's single blocks; None, and a note, if that fails."""
    try:
        return row.blocks() if row.blocks is not None else None
    except (Unavailable, OSError, RuntimeError, ValueError, EOFError) as error:
        row.note = row.note or f"single blocks: {error}".splitlines()[0]
        return None


def text(result: BenchResult) -> str:
    """Returns the run as text."""
    about = {"": result.machine, **{f"{folder}: ": place for folder, place in result.places.items()}}
    parts = [
        "\n".join(label + "; ".join(map(" ".join, words.items())) for label, words in about.items()),
        as_text(result.table),
        _page_cache_text(result),
        _blocks_text(result) if result.blocks else "",
        scaling_text("scaling over devices", result.scaling) if result.scaling else "",
        ds_io_lines(result),
        f"energy: {result.energy}" if result.energy else "",
        verdict(result),
        "interrupted: this is what was measured until then; the files are removed" if result.interrupted else "",
    ]
    return "\n\n".join(filter(None, parts))


def verdict(result: BenchResult) -> str:
    """Returns in one line which row is the fastest, and which others were no slower in some round."""
    table = result.table
    rates = {row.name: found for row in table.rows if (found := spread(table.values(row)))}
    measured = [row for row in table.rows if row.name in rates and row.name != table.reference]
    if not measured:
        return ""
    best = max(measured, key=lambda row: rates[row.name].median)
    words = f"{best.name}: {rounded(rates[best.name].median, 4)} GB/s"
    if against := spread(table.against(best, table.reference)):
        words += f", {rounded(against.median, 3)} of {table.reference}"
    others = [row.name for row in measured if row is not best and max(table.against(row, best.name), default=0) >= 1]
    words = f"fastest: {words}" if len(measured) > 1 else words
    return f"{words}; as fast in some round: {'; '.join(others)}" if others else words


def from_page_cache(row: Row) -> float | None:
    """Returns the share of a row's bytes that came from the page cache; None for writes and reads that bypass it."""
    known = [each for each in row.samples if each is not None and each.from_page_cache is not None]
    cached = sum((each.from_page_cache or 0) * each.amount for each in known)
    return cached / sum(each.amount for each in known) if known else None


def _page_cache_text(result: BenchResult) -> str:
    shares = {row.name: from_page_cache(row) for row in result.table.rows}
    found = ", ".join(f"{name} {share_words(share)}" for name, share in shares.items() if share)
    return f"read from the page cache: {found}. So far memory was measured, not the device." if found else ""


def ds_io_lines(result: BenchResult) -> str:
    """Returns latency and speed of the task and end to end, as ds_io reports them, of all passes; its GB are GiB."""
    direction = "Write" if result.options.write else "Read"
    measured = [row for row in result.table.rows if any(row.samples) and row.name != result.table.reference]
    if not measured:
        return ""
    figures = {row.name: ds_io_figures(row) for row in measured}
    if len(measured) > 1:
        head = ["as ds_io counts (GB = GiB)", *next(iter(figures.values()))]
        lines = [[name, *(f"{value:.4g}" for value in row.values())] for name, row in figures.items()]
        return columns_text([head, *lines])
    split = ((*name.split(), value) for name, value in figures[measured[0].name].items())
    return "\n".join(f"{kind} {direction} {what} = {value} {unit}" for kind, what, unit, value in split)


def ds_io_figures(row: Row) -> dict[str, float]:
    """Sums up the passes that succeeded."""
    samples = [sample for sample in row.samples if sample is not None]
    amount = sum(sample.amount for sample in samples) / GIB
    task = sum(sample.seconds for sample in samples)
    end_to_end = sum(sample.seconds if sample.end_to_end is None else sample.end_to_end for sample in samples)
    return {
        "Task Latency sec": task,
        "Task Speed GB/sec": amount / task,
        "E2E Latency sec": end_to_end,
        "E2E Speed GB/sec": amount / end_to_end,
    }


def _blocks_text(result: BenchResult) -> str:
    head = ["us", *(f"p{100 * share:g}" for share in PERCENTILES), "submit p50", "submit p99", ""]
    lines = [head]
    for name, times in result.blocks.items():
        submit = [f"{1e6 * times.submit[share]:.1f}" if times.submit else "-" for share in (0.5, 0.99)]
        complete = [f"{1e6 * times.complete[share]:.0f}" for share in PERCENTILES]
        lines.append([name, *complete, *submit, f"{times.count} blocks"])
    what, cached = "write" if result.options.write else "read", ", from the page cache" if result.options.cached else ""
    title = f"latency of single blocks, {what} at random places, one after the other{cached}"
    return f"{title}\n{columns_text(lines)}"


def scaling_text(title: str, found: Sequence[Scaling], least: float = 0.0) -> str:
    """Returns a line for each number of devices; ``least``: the aim for this package's, over the sum of each alone."""
    lines = [["", "devices", "GB/s (min - max)", "/ sum of each alone", ""]]
    for each in found:
        judged = each.ratio if least and "nvme_ops" in each.engine else None
        words = f"aim {least:g}: {'reached' if judged.median >= least else 'missed'}" if judged else ""
        lines.append([each.engine, str(each.devices), with_range(each.rate, 4), with_range(each.ratio, 3), words])
    return f"{title}\n{columns_text(lines)}"


def scaling_lines(title: str, found: Sequence[Scaling]) -> Lines:
    """Returns the rates of each engine by number of devices, and the sum of each alone."""
    lines: dict[str, list[tuple[float, Spread]]] = {}
    for each in found:
        if each.rate:
            lines.setdefault(each.engine, []).append((each.devices, each.rate))
    alone = {float(each.devices): each.alone.median for each in found if each.alone}
    bounds = {"sum of each device alone": sorted(alone.items())} if alone else {}
    return Lines(title, "devices at once", lines, bounds, {count: str(int(count)) for count in sorted(alone)})


def as_document(result: BenchResult) -> dict[str, Any]:
    """Returns the run as JSON."""
    options = {**vars(result.options)}
    words = options.pop("words")
    options |= {name: [asdict(each) for each in options[name]] for name in ("places", "settings")}
    measured = [row for row in result.table.rows if any(row.samples)]
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
        "ds_io": {row.name: ds_io_figures(row) for row in measured},
        "blocks": {name: asdict(times) for name, times in result.blocks.items()},
        "from_page_cache": {row.name: from_page_cache(row) for row in measured},
        "scaling": [each.as_json() for each in result.scaling],
        "energy": result.energy or "available",
        "interrupted": result.interrupted,
    }


def as_csv(result: BenchResult) -> str:
    """Returns one line for each pass."""
    out = io.StringIO()
    lines = csv.writer(out, lineterminator="\n")
    names = ["seconds", "amount", "cpu_seconds", "submit_seconds", "end_to_end", "peak_bytes", "from_page_cache"]
    lines.writerow(["engine", "pass", *names, "joules", "note"])
    for row in result.table.rows:
        for number, sample in enumerate(row.samples, 1):
            values = [None if sample is None else getattr(sample, name) for name in names]
            joules = total(sample.joules) if sample and sample.joules else None
            lines.writerow([row.name, number, *values, joules, row.note])
    return out.getvalue()


def plot(result: BenchResult, path: str) -> bool:
    """Draws by number of devices, by swept settings, or by engine; returns False if nothing was measured."""
    if not any(any(row.samples) for row in result.table.rows):
        return False
    numbers = [name for name in result.options.swept if name in ("block_size", "queue_depth", "intra_op_parallelism")]
    if any(each.rate for each in result.scaling):
        plot_lines([scaling_lines(result.table.title, result.scaling)], path)
    elif numbers:
        plot_lines([_by_setting(result, numbers)], path)
    else:
        plot_tables({", ".join(result.places): [result.table]}, path)
    return True


def _by_setting(result: BenchResult, numbers: Sequence[str]) -> Lines:
    """Returns the setting with the most values along the axis, a line for each combination of the others."""
    found = {row.name: spread(result.table.values(row)) for row in result.table.rows}
    along = max(numbers, key=lambda name: len({getattr(settings, name) for settings in result.options.settings}))
    ticks = sorted({getattr(settings, along) for settings in result.options.settings})
    lines: dict[str, list[tuple[float, Spread]]] = {}
    for each in contenders(result.options):
        if each.engine != fio.NAME and (rates := found[each.name]):
            swept = [name for name in result.options.swept if name in ENGINES[each.engine].takes]
            # an engine without the setting is as fast with any value of it
            places = [getattr(each.settings, along)] if along in swept else ticks
            others = [f"{name} {getattr(each.settings, name)}" for name in swept if name != along]
            lines.setdefault(", ".join([each.engine, *others]), []).extend((place, rates) for place in places)
    best = found.get(fio.NAME)
    bounds: dict[str, list[tuple[float, float]]] = (
        {fio.NAME: [(float(tick), best.median) for tick in (ticks[0], ticks[-1])]} if best else {}
    )
    words = {tick: size_words(tick) if along == "block_size" else str(tick) for tick in ticks}
    return Lines(result.table.title, along, lines, bounds, words, doubling=True)
