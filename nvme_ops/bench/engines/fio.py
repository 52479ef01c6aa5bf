"""fio with the settings asked for, and fio at its best, which the others are divided by."""

from __future__ import annotations

from nvme_ops.bench import fio
from nvme_ops.bench.engines.handles import BLOCKS, SECONDS
from nvme_ops.bench.engines.task import Task
from nvme_ops.bench.measure import BlockTimes, Row, Sample
from nvme_ops.settings import Settings

_CACHED = ["--ioengine=psync", "--bs=1M", "--direct=0", "--invalidate=0"]  # a read of what lies in memory already


def row(task: Task, name: str, settings: Settings) -> Row:
    """The same block size, queue depth and number of lanes, in memory of fio's own."""
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
    """Whatever block size and depth: 4 MiB x 32 in huge pages, or through the page cache what lies there."""
    fio.require()
    made = Row(name, lambda: Sample(1, 1), task.set_out)
    variants = [(_CACHED, "")] if task.cached else fio.best(task.size)
    made.reads = (lambda: task.path) if task.cached else None
    made.run = fio.first_that_runs(made, variants, _pattern(task), lambda: task.path, task.size)
    return made


def blocks(task: Task, settings: Settings) -> BlockTimes:
    """Random blocks, one after the other, as many and as long as those of the handles."""
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
