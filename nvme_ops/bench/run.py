"""One run of ``nvme-bench``: makes files and processes, measures all rows in interleaved rounds, removes everything."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from nvme_ops.bench import machine
from nvme_ops.bench.engines import ENGINES, FIO_BEST, Contender
from nvme_ops.bench.engines.task import Task
from nvme_ops.bench.measure import BlockTimes, Row, Spread, Unavailable, interleave, metered, spread
from nvme_ops.bench.options import Options
from nvme_ops.bench.ranks import joint_row, make_rows
from nvme_ops.bench.remote import Remote
from nvme_ops.bench.tables import FROM_PAGE_CACHE, Table
from nvme_ops.measuring import files
from nvme_ops.measuring.energy import Meter
from nvme_ops.measuring.scratch import scratch_folder, sweep
from nvme_ops.progress import Step, progress_bar
from nvme_ops.settings import Settings
from nvme_ops.text import MIB, size_words

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


@dataclass
class BenchResult:
    """What was measured, until the end or Ctrl-C."""

    options: Options
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


def run(options: Options, say: Callable[[str], None] = lambda _: None) -> BenchResult:
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
        group, reference = "write" if options.write else "read", FIO_BEST if options.reference else ""
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


def contenders(options: Options) -> list[Contender]:
    """Returns the rows in order: fio at its best, then each engine with each of the settings that affect it."""
    made = [Contender(FIO_BEST, options.settings[0], FIO_BEST)] if options.reference else []
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


def _work_words(options: Options) -> str:
    words = size_words(options.size)
    if (count := len(options.places)) > 1:
        folders = len({place.folder for place in options.places})
        words += f" by each of {count} processes at once"
        words += f", in {folders} folders" if folders > 1 else ""
    memory = "GPU memory" if options.gpu else "an ordinary CPU tensor" if options.pageable else "page-locked CPU memory"
    return f"{words}, {memory}, {'from the page cache' if options.cached else 'files out of the page cache'}"


def _make_files(options: Options, stack: contextlib.ExitStack, say: Callable[[str], None]) -> list[Task]:
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

    def __init__(self, options: Options, tasks: list[Task], stack: contextlib.ExitStack) -> None:
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
