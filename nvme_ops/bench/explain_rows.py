"""The rows that ``nvme-bench explain`` measures in interleaved rounds, and the processor's rates for comparison."""

from __future__ import annotations

import ctypes
import os
import timeit
import warnings
from collections.abc import Callable

import torch

import nvme_ops
from nvme_ops.bench import fio
from nvme_ops.bench.engines import unavailable
from nvme_ops.bench.engines.task import Task
from nvme_ops.bench.explain_judge import EMPTY, FIO, GDS, GPU, KEPT, LANES, LOCKED, NEW, Variation
from nvme_ops.bench.measure import Row, Sample, Unavailable, timed
from nvme_ops.measuring.files import filled
from nvme_ops.op_builder.machine import Host
from nvme_ops.report import kernel
from nvme_ops.report.result import Status
from nvme_ops.text import KIB, MIB

_LEAST_PASS = 64 * MIB  # a pass moves a smaller file several times
_MOST_CALLS = 1024
_COPIED = 256 * MIB
_SETTINGS = (
    ("block_size", 256 * KIB),
    ("block_size", 4 * MIB),
    ("queue_depth", 32),
    ("queue_depth", 512),
    (LANES, 2),
)


def reached(task: Task) -> str:
    """Returns the row to be explained: a default handle and an ordinary tensor."""
    return GPU if task.gpu is not None else KEPT if task.write else NEW


def variations(task: Task) -> list[Variation]:
    """Returns the rows with other settings than the default."""
    return [*(Variation(LOCKED, argument, value) for argument, value in _SETTINGS), Variation(reached(task), LANES, 2)]


def make_rows(task: Task) -> list[Row]:
    """Returns rows over the first ``task.size`` bytes of its file, which is written only if ``task.write``."""
    ordinary = [GPU] if task.gpu is not None else [KEPT] if task.write else [EMPTY, KEPT, NEW]
    rows = [_fio_row(task), *(_row(task, name, task.handle, name) for name in (LOCKED, *ordinary))]
    if task.gpu is not None:
        rows.append(_gds_row(task))
    for each in variations(task):
        handle = nvme_ops.aio_handle(**{each.argument: each.value})  # type: ignore[arg-type]
        rows.append(_row(task, each.name, handle, each.of))
    return rows


def as_found_row(task: Task) -> Row:
    """Returns a row of the default handle and an ordinary tensor, with the page cache as it is."""
    row = _row(task, "as found", task.handle, NEW if task.gpu is None else GPU)
    row.before = lambda: None
    return row


def probe(path: str, size: int) -> float:
    """Returns bytes per second of one short read, to estimate how much can be read in the time available."""
    handle = nvme_ops.aio_handle()
    tensor = filled(nvme_ops.empty(min(size, _LEAST_PASS), dtype=torch.uint8))
    task = Task(path, tensor.numel(), write=False)
    task.set_out()
    return timed(lambda: handle.sync_pread(tensor, path, 0), tensor.numel()).rate


def lock(task: Task) -> bool:
    """Allocates the page-locked tensor; returns False if the system refuses to lock it, which works all the same."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        task.locked  # noqa: B018  (made when first asked for)
    return not any("lock" in str(warning.message) for warning in said)


def hindrances(backend: str, locked: bool) -> list[tuple[str, str]]:
    """Returns what the system denies a handle that would make it faster, each with the fix."""
    host = Host()
    found = []
    if wanted := os.environ.get("NVME_OPS_BACKEND"):
        if backend != "io_uring":
            found.append((f"NVME_OPS_BACKEND={wanted}", "unset NVME_OPS_BACKEND"))
    elif backend != "io_uring" and (result := kernel.io_uring(host)).status is not Status.OKAY:
        found.append((f"io_uring: {result.detail}", result.fix))
    if not locked:
        fix = kernel.memlock(host).fix or "ulimit -l unlimited"
        found.append(("memory cannot be locked (RLIMIT_MEMLOCK)", fix))
    huge = kernel.transparent(host)
    if huge.status is Status.WARNING:
        found.append((f"huge pages: {huge.detail}", huge.fix))
    return found


def copy_rate(task: Task) -> float:
    """Returns bytes per second that one core copies to a tensor that has its pages: the best of three.

    Copies in blocks from a few MiB that are in its cache, as data are just after the device has written them.
    """
    count = min(task.size, _COPIED)
    source, target, block = task.locked.data_ptr(), task.pageable.data_ptr(), min(count, MIB)

    def copy() -> None:
        for offset in range(0, count - block + 1, block):
            ctypes.memmove(target + offset, source + offset % (16 * MIB), block)

    return count // block * block / _best_of_three(copy)


def new_page_rate(task: Task) -> float:
    """Returns bytes per second of new memory that one core touches for the first time: the best of three."""
    count = max(min(task.size, _COPIED), _LEAST_PASS)  # smaller allocations might reuse freed memory
    tensor = torch.empty(0)

    def make() -> None:
        nonlocal tensor
        tensor = torch.empty(count, dtype=torch.uint8)

    def touch() -> None:
        tensor[::4096] = 1

    return count / _best_of_three(touch, make)


def device_copy_rate(task: Task) -> float:
    """Returns bytes per second from pinned memory to the GPU or back: the best of three; 0 without a GPU."""
    if task.gpu is None:
        return 0.0
    count = min(task.size, _COPIED)
    pinned, device = torch.empty(count, dtype=torch.uint8, pin_memory=True), task.buffer[:count]
    target, source = (pinned, device) if task.write else (device, pinned)

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        task.finish()

    return count / _best_of_three(copy)


def _best_of_three(work: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
    return min(timeit.repeat(work, before, number=1, repeat=3))


def calls(size: int) -> int:
    """Returns how often a file of this size is moved in a pass."""
    return max(1, min(_MOST_CALLS, _LEAST_PASS // size))


def _row(task: Task, name: str, handle: nvme_ops.aio_handle, kind: str) -> Row:
    """Returns a row that gets its tensor in each call, so that allocating it is part of the pass."""
    start = handle.sync_pwrite if task.write else handle.sync_pread
    memory: Callable[[], torch.Tensor] = {
        LOCKED: lambda: task.locked,
        EMPTY: lambda: nvme_ops.empty(task.size, dtype=torch.uint8),
        KEPT: lambda: task.pageable,
        NEW: lambda: torch.empty(task.size, dtype=torch.uint8),
        GPU: lambda: task.buffer,
    }[kind]

    def move() -> None:
        for _ in range(calls(task.size)):
            start(memory(), task.path, 0)
        task.finish()

    def before() -> None:
        memory()
        task.set_out()

    return Row(name, lambda: timed(move, task.size * calls(task.size)), before)


def _gds_row(task: Task) -> Row:
    try:
        return _row(task, GDS, nvme_ops.gds_handle(), GPU)
    except RuntimeError as error:
        return unavailable(GDS, Unavailable(str(error).splitlines()[0]))


def _fio_row(task: Task) -> Row:
    """Returns fio's row: 4 MiB x 32 in huge pages, smaller blocks for a smaller file."""
    block = 4 * MIB
    while block > max(task.size, 4096):
        block //= 2
    made = Row(FIO, lambda: Sample(1, 1), task.set_out)
    shape = [f"--bs={block}", "--iodepth=32"]
    if not task.write:
        shape.append("--readonly")  # fio refuses to run when a job would write
    pattern = "write" if task.write else "read"
    made.run = fio.first_that_runs(made, fio.variants(shape), pattern, lambda: task.path, task.size * calls(task.size))
    return made
