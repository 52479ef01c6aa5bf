"""The table of everything that moves a tensor between a file and memory.

A new engine is a function ``row(task, name, settings)`` in a module beside this file, which gives its
``nvme_ops.bench.measure.Row`` or raises ``Unavailable`` with what to install, and one line of the table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nvme_ops.bench.engines import deepspeed, fio, gdsio, handles, python, saved
from nvme_ops.bench.engines.task import Task, over_files
from nvme_ops.bench.measure import Row, Sample, Unavailable
from nvme_ops.settings import Settings


@dataclass(frozen=True)
class BenchEngine:
    """A contender. ``takes``: the settings that affect it."""

    words: str
    row: Callable[[Task, str, Settings], Row]
    takes: tuple[str, ...] = ()
    gpu_only: bool = False
    own_file: bool = False  # has a file in another format
    own_process: bool = False  # what it loads may exit, hang, or disturb the others


_ALL = ("block_size", "queue_depth", "single_submit", "overlap_events", "intra_op_parallelism")

#: The reference of all others, beside the engines that a user chooses.
FIO_BEST = "fio best"

ENGINES = {
    "aio_handle": BenchEngine(
        "this package, from and to host memory; a GPU's by its own bounce path", handles.aio, _ALL
    ),
    "gds_handle": BenchEngine("this package, from and to GPU memory", handles.gds, _ALL, gpu_only=True),
    "torch": BenchEngine("torch.save with fsync, torch.load", saved.torch_row, own_file=True),
    "python": BenchEngine("ndarray.tofile with fsync, readinto", python.row),
    "safetensors": BenchEngine("save_file with fsync, load_file", saved.safetensors_row, own_file=True),
    "deepspeed": BenchEngine(
        "DeepSpeed's aio_handle; gds_handle with --use_gds", deepspeed.row, _ALL, own_process=True
    ),
    "fio": BenchEngine("fio with the same settings", fio.row, ("block_size", "queue_depth", "intra_op_parallelism")),
    "gdsio": BenchEngine(
        "NVIDIA's gdsio", gdsio.row, ("block_size", "intra_op_parallelism"), gpu_only=True, own_file=True
    ),
}
_REFERENCE = BenchEngine("fio at its best", fio.best_row)


@dataclass(frozen=True)
class Contender:
    """An engine with settings: one row."""

    engine: str
    settings: Settings
    name: str


def make_row(contender: Contender, task: Task) -> Row:
    """Returns the contender's row; if it is not available, one that says why."""
    engine = ENGINES.get(contender.engine, _REFERENCE)
    try:
        return over_files(task, engine.row(task, contender.name, contender.settings))
    except Unavailable as reason:
        return unavailable(contender.name, reason)
    except (ValueError, RuntimeError, OSError) as error:  # for example settings that it refuses
        return unavailable(contender.name, Unavailable(f"{error}".splitlines()[0]))


def unavailable(name: str, reason: Unavailable) -> Row:
    """Returns an empty row that says why."""

    def give_up() -> None:
        raise reason

    return Row(name, lambda: Sample(1, 1), give_up)
