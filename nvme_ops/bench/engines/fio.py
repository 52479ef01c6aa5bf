"""fio with the requested settings, and fio at its best, which is the reference of the others."""

from __future__ import annotations

from nvme_ops.bench import fio
from nvme_ops.bench.engines.handles import BLOCKS, SECONDS
from nvme_ops.bench.engines.task import Task
from nvme_ops.bench.measure import BlockTimes, Row, Sample
from nvme_ops.settings import Settings

_CACHED = ["--ioengine=psync", "--bs=1M", "--direct=0", "--invalidate=0"]  # a read of what lies in memory already


def row(task: Task, name: str, settings: Settings) -> Row:
    """Returns a row with the same block size, queue depth and number of lanes, in fio's own memory."""
    fio.require()
    shape = [f"--bs={settings.block_size}", f"--iodepth={settings.queue_depth}"]
    made = Row(name, lambda: Sample(1, 1), task.set_out)
    if task.cached:
        variants = [([*_CACHED, *(option for option in shape if "iodepth" not in option)], "psync")]
        made.reads = lambda: task.path
    else:
        variants = fio.variants(shape)
    lanes = settings.intra_op_parallelism
    made.run = fio.first_that_runs(made, variants, _pattern(task), lambda: task.path, task.size, lanes)
    if not task.cached:
        made.blocks = lambda: blocks(task, settings)
    return made


def best_row(task: Task, name: str, _: Settings) -> Row:
    """Returns fio's best: 4 MiB x 32 in huge pages, or cached files through the page cache, whatever the settings."""
    fio.require()
    made = Row(name, lambda: Sample(1, 1), task.set_out)
    variants = [(_CACHED, "")] if task.cached else fio.best(task.size)
    made.reads = (lambda: task.path) if task.cached else None
    made.run = fio.first_that_runs(made, variants, _pattern(task), lambda: task.path, task.size)
    return made


def blocks(task: Task, settings: Settings) -> BlockTimes:
    """Measures single random blocks, one after the other, as many and as large as for the handles."""
    limits = ["--iodepth=1", f"--runtime={SECONDS:g}", f"--number_ios={BLOCKS}"]
    for options, _ in fio.variants([f"--bs={settings.block_size}", *limits]):
        task.set_out()
        try:
            return fio.latencies(f"rand{_pattern(task)}", task.path, task.size, options)
        except RuntimeError as error:
            failure = error
    raise failure


def _pattern(task: Task) -> str:
    return "write" if task.write else "read"
