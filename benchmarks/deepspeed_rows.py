"""DeepSpeed's aio_handle, from PyPI, on the same file. Not installed: its rows say so."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.contenders import LOCKED, PAGEABLE, Work, filled, tensor_row
from benchmarks.measure import Row, Sample, Unavailable


@functools.cache
def module() -> Any:
    """DeepSpeed's ``async_io``, compiled at first (minutes), or an Unavailable with the reason.

    To be loaded before this package's op: torch counts the builds of one name in a process, and DeepSpeed compiles its
    op anew, under another name, when an ``async_io`` of someone else was built before.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        try:
            with _silenced(said.fileno()):
                from deepspeed.ops.op_builder import AsyncIOBuilder  # type: ignore[import-not-found,unused-ignore]

                logging.getLogger("DeepSpeed").setLevel(logging.ERROR)  # it warns of wear at the first write
                return AsyncIOBuilder().load(verbose=False)
        except Exception as error:  # a builder raises what it likes
            if isinstance(error, ImportError) and error.name == "deepspeed":
                return Unavailable("DeepSpeed is not installed: pip install deepspeed")
            said.seek(0)
            reason = [line.strip() for line in said if "WARNING" in line] or [f"{type(error).__name__}: {error}"]
            return Unavailable(f"DeepSpeed's async_io does not load: {reason[-1].splitlines()[0]}")


@contextlib.contextmanager
def _silenced(target: int) -> Iterator[None]:
    """What is printed goes to ``target``. By descriptor: DeepSpeed's probes fail where sys.stderr has none."""
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


def rows(work: Work) -> list[Row]:
    """A default handle, with its own locked memory and with an ordinary tensor."""
    found = module()
    if isinstance(found, Unavailable):
        return [Row(name, lambda: Sample(1, 1), _raising(found)) for name in (LOCKED, PAGEABLE)]
    handle = found.aio_handle()
    move = handle.sync_pwrite if work.write else handle.sync_pread

    @functools.cache
    def locked() -> torch.Tensor:
        return filled(handle.new_cpu_locked_tensor(work.size, torch.empty(0, dtype=torch.uint8)))

    return [
        tensor_row(work, LOCKED, locked, lambda tensor: move(tensor, work.path)),
        tensor_row(work, PAGEABLE, lambda: work.pageable, lambda tensor: move(tensor, work.path)),
    ]


def _raising(reason: Unavailable) -> Callable[[], None]:
    def give_up() -> None:
        raise reason

    return give_up
