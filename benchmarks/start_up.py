"""How long it takes from a fresh process to the first handle, with and without a compiled op in the cache."""

from __future__ import annotations

import os
import shutil
import time

from benchmarks.command import in_new_process, show_progress
from nvme_ops.bench.measure import Row, Sample, Unavailable

BUILDERS = {"nvme_ops": "nvme_ops.op_builder", "DeepSpeed": "deepspeed.ops.op_builder"}

# prints the seconds from torch's import to the first handle
_PROGRAM = """
import time
import torch
start = time.perf_counter()
from {builder} import AsyncIOBuilder
AsyncIOBuilder().load().aio_handle()
print("\\n", time.perf_counter() - start)
"""


def rows(scratch: str, packages: list[str], rounds: int) -> list[Row]:
    """For each package: the whole process from an empty cache, once, then what a warm start takes beyond torch."""
    return [row for package in packages for row in _measured(scratch, package, rounds)]


def _measured(scratch: str, package: str, rounds: int) -> list[Row]:
    extensions = os.path.join(scratch, f"extensions-{package}")
    cold = Row(f"{package}, empty cache, whole process", lambda: first_handle(package, extensions)[0])
    warm = Row(f"{package}, warm, beyond importing torch", lambda: first_handle(package, extensions)[1])
    try:
        for number, row in enumerate([cold] + rounds * [warm]):
            show_progress(f"round {number} of {rounds}: {row.name}")
            row.samples.append(row.run())
    except Unavailable as reason:
        cold.note = warm.note = str(reason)
    finally:
        shutil.rmtree(extensions, ignore_errors=True)
    return [cold, warm]


def first_handle(package: str, extensions: str) -> tuple[Sample, Sample]:
    """The time of a new process that makes one handle: all of it, and what came after importing torch.

    Raises Unavailable with the last line that it said when it did not come to a handle.
    """
    start = time.perf_counter()
    program = _PROGRAM.format(builder=BUILDERS[package])
    beyond_torch = in_new_process(program, TORCH_EXTENSIONS_DIR=extensions, CCACHE_DISABLE="1")
    return Sample(time.perf_counter() - start, 1), Sample(float(beyond_torch), 1)
