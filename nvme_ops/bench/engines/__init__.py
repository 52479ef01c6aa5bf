"""Everything that moves a tensor between a file and memory, in one table.

A new engine is one module beside this file, with a function ``row(task, name, settings)`` that gives its
``nvme_ops.bench.measure.Row`` or raises ``Unavailable`` with what to install, and one line of the table.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import cast

from nvme_ops.bench.engines.task import Task, over_files
from nvme_ops.bench.measure import Row, Sample, Unavailable
from nvme_ops.bench.settings import Settings


@dataclass(frozen=True)
class Engine:
    """A contender. ``takes``: the settings that make a difference to it."""

    words: str
    module: str
    takes: tuple[str, ...] = ()
    function: str = "row"
    gpu_only: bool = False
    own_file: bool = False  # in a format of its own, beside the one of the others
    own_process: bool = False  # what it loads may exit, hang, or disturb the others


_ALL = ("block_size", "queue_depth", "single_submit", "overlap_events", "intra_op_parallelism")

#: The reference of all others, beside the engines that a user chooses.
FIO_BEST = "fio best"

ENGINES = {
    "aio_handle": Engine("this package, from and to host memory; a GPU's by its own bounce path", "aio_handle", _ALL),
    "gds_handle": Engine("this package, from and to GPU memory", "gds_handle", _ALL, gpu_only=True),
    "torch": Engine("torch.save with fsync, torch.load", "torch", own_file=True),
    "python": Engine("ndarray.tofile with fsync, readinto", "python"),
    "safetensors": Engine("save_file with fsync, load_file", "safetensors", own_file=True),
    "deepspeed": Engine("DeepSpeed's aio_handle; gds_handle with --use_gds", "deepspeed", _ALL, own_process=True),
    "fio": Engine("fio with the same settings", "fio", ("block_size", "queue_depth", "intra_op_parallelism")),
    "gdsio": Engine("NVIDIA's gdsio", "gdsio", ("block_size", "intra_op_parallelism"), gpu_only=True, own_file=True),
}
_REFERENCE = Engine("fio at its best", "fio", function="best_row")


@dataclass(frozen=True)
class Contender:
    """An engine with settings: one row."""

    engine: str
    settings: Settings
    name: str

    @property
    def own_process(self) -> bool:
        """Whether it must not share a process with others."""
        return self.engine != FIO_BEST and ENGINES[self.engine].own_process


def make_row(contender: Contender, task: Task) -> Row:
    """Its row; where it is not available, one that says why."""
    engine = _REFERENCE if contender.engine == FIO_BEST else ENGINES[contender.engine]
    module = importlib.import_module(f"{__name__}.{engine.module}")
    try:
        made = cast(Row, getattr(module, engine.function)(task, contender.name, contender.settings))
    except Unavailable as reason:
        return unavailable(contender.name, reason)
    except (ValueError, RuntimeError, OSError) as error:  # settings that it refuses, for example
        return unavailable(contender.name, Unavailable(f"{error}".splitlines()[0]))
    return over_files(task, made)


def unavailable(name: str, reason: Unavailable) -> Row:
    """A row that says why it stays empty."""

    def give_up() -> None:
        raise reason

    return Row(name, lambda: Sample(1, 1), give_up)
