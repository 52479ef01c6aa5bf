"""DeepSpeed's handles, from PyPI: ``aio_handle``, and ``gds_handle`` with ``--use_gds``."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import torch

from nvme_ops.bench.engines.handles import handle_row
from nvme_ops.bench.engines.task import Task
from nvme_ops.bench.measure import Row, Unavailable
from nvme_ops.measuring.files import filled
from nvme_ops.settings import Settings


def row(task: Task, name: str, settings: Settings) -> Row:
    """Returns a row with the same calls as for this package's handles."""
    found = load("gds" if task.use_gds else "async_io")
    if isinstance(found, Unavailable):
        raise found
    kind = found.gds_handle if task.use_gds else found.aio_handle
    handle = kind(**settings.as_json())
    if task.gpu is None and not task.pageable_memory and "buffer" not in vars(task):
        # recognises only what it locked itself; this process loads no other package
        task.buffer = filled(handle.new_cpu_locked_tensor(task.size, torch.empty(0, dtype=torch.uint8)))
    return handle_row(task, name, handle, past_cache=True)


@functools.cache
def load(op: str = "async_io") -> Any:
    """Loads DeepSpeed's op ``async_io`` or ``gds``, first compiling it (minutes). Raises Unavailable with the reason.

    Load it before this package's op: torch counts the builds of one name in a process, and DeepSpeed compiles its op
    again, under another name, if another ``async_io`` was built before.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        try:
            with _silenced(said.fileno()):
                from deepspeed.ops import op_builder  # type: ignore[import-not-found,import-untyped,unused-ignore]

                logging.getLogger("DeepSpeed").setLevel(logging.ERROR)  # it warns of wear at the first write
                builder = op_builder.GDSBuilder if op == "gds" else op_builder.AsyncIOBuilder
                return builder().load(verbose=False)
        except Exception as error:  # a builder can raise anything
            if isinstance(error, ImportError) and error.name == "deepspeed":
                return Unavailable("DeepSpeed is not installed: pip install deepspeed")
            said.seek(0)
            reason = [line.strip() for line in said if "WARNING" in line] or [f"{type(error).__name__}: {error}"]
            return Unavailable(f"DeepSpeed's {op} does not load: {reason[-1].splitlines()[0]}")


@contextlib.contextmanager
def _silenced(target: int) -> Iterator[None]:
    """Redirects stdout and stderr to ``target``, by descriptor: DeepSpeed's probes fail if sys.stderr has none."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = {descriptor: os.dup(descriptor) for descriptor in (1, 2)}
    try:
        for descriptor in kept:
            os.dup2(target, descriptor)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for descriptor, copy in kept.items():
            os.dup2(copy, descriptor)
            os.close(copy)
