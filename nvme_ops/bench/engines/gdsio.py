"""NVIDIA's gdsio, with the same block size, and as many threads as lanes."""

from __future__ import annotations

from nvme_ops.bench import gdsio
from nvme_ops.bench.engines.task import Task
from nvme_ops.bench.measure import Row, Sample, Unavailable
from nvme_ops.measuring.files import make_file
from nvme_ops.settings import Settings


def row(task: Task, name: str, settings: Settings) -> Row:
    """Returns a row of gdsio, which writes to a file of its own. Raises Unavailable if it is not installed."""
    gpu = task.gpu
    if gpu is None:
        raise Unavailable("moves GPU memory only: --gpu")
    gdsio.program()
    path = f"{task.path}.gdsio" if task.write else task.path
    if task.write:
        make_file(path, task.size)
    way = gdsio.DIRECT if task.use_gds else gdsio.THROUGH_HOST

    def run() -> Sample:
        return gdsio.run(path, task.size, task.write, way, gpu, settings.block_size, settings.intra_op_parallelism)

    return Row(name, run, task.set_out)
