"""How long it takes from a fresh process to the first handle, with and without a compiled op in the cache."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from nvme_ops.bench import stop
from nvme_ops.bench.measure import Row, Sample, Unavailable

# prints the seconds from torch's import to the first handle
_PROGRAM = """
import time
import torch
start = time.perf_counter()
from {builder} import AsyncIOBuilder
AsyncIOBuilder().load().aio_handle()
print("\\n", time.perf_counter() - start)
"""
BUILDERS = {"nvme_ops": "nvme_ops.op_builder", "DeepSpeed": "deepspeed.ops.op_builder"}


def rows(scratch: str, packages: tuple[str, ...], rounds: int, progress: Callable[[str], None]) -> list[Row]:
    """For each package: the whole process from an empty cache, once, then what a warm start takes beyond torch."""
    return [row for package in packages for row in _measured(scratch, package, rounds, progress)]


def _measured(scratch: str, package: str, rounds: int, progress: Callable[[str], None]) -> list[Row]:
    extensions = os.path.join(scratch, f"extensions-{package}")
    run = partial(first_handle, BUILDERS[package], extensions)
    cold = Row(f"{package}, empty cache, whole process", lambda: run()[0])
    warm = Row(f"{package}, warm, beyond importing torch", lambda: run()[1])
    try:
        progress(f"building {package} from an empty cache")
        cold.samples.append(cold.run())
        for number in range(rounds):
            progress(f"round {number + 1} of {rounds}: {warm.name}")
            warm.samples.append(warm.run())
    except Unavailable as reason:
        cold.note = warm.note = str(reason)
    finally:
        shutil.rmtree(extensions, ignore_errors=True)
    return [cold, warm]


def first_handle(builder: str, extensions: str) -> tuple[Sample, Sample]:
    """The time of a new process that makes one handle: all of it, and what came after importing torch.

    Raises:
        Unavailable: it did not come to a handle; with the last line that it said.
    """
    environment = {
        "DS_ACCELERATOR": "cpu",
        **os.environ,
        "TORCH_EXTENSIONS_DIR": extensions,
        "CCACHE_DISABLE": "1",
        "PYTHONPATH": os.pathsep.join(
            filter(None, [str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
        ),
        # ninja may stand beside an interpreter whose environment is not activated
        "PATH": os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)]),
    }
    start = time.perf_counter()
    done = subprocess.run(
        stop.tied([sys.executable, "-c", _PROGRAM.format(builder=builder)]),
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    seconds = time.perf_counter() - start
    if done.returncode:
        words = done.stderr.strip().splitlines()
        raise Unavailable(f"no handle: {words[-1] if words else f'exit status {done.returncode}'}")
    return Sample(seconds, 1), Sample(float(done.stdout.strip().splitlines()[-1]), 1)
