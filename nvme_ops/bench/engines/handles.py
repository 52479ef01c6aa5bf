"""Rows of an ``aio_handle`` or ``gds_handle``, this package's or DeepSpeed's: the calls are the same."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

import nvme_ops
from nvme_ops.bench.engines.task import Task
from nvme_ops.bench.measure import BlockTimes, Row, Sample, Unavailable
from nvme_ops.bench.work import tensor_row
from nvme_ops.measuring.page_cache import handles_read_it
from nvme_ops.settings import Settings

BLOCKS, SECONDS = 512, 1.0  # limits for single blocks: count and seconds


def aio(task: Task, name: str, settings: Settings) -> Row:
    """Returns a row of this package's ``aio_handle``, with its bounce path for GPU memory."""
    handle = nvme_ops.aio_handle(**settings.as_json())
    made = handle_row(task, name, handle, not handles_read_it())
    made.note = handle.backend
    return made


def gds(task: Task, name: str, settings: Settings) -> Row:
    """Returns a row of this package's ``gds_handle``; its note is the last path. Raises Unavailable without cuFile."""
    if task.gpu is None:
        raise Unavailable("moves GPU memory only: --gpu")
    handle = nvme_ops.gds_handle(**settings.as_json())
    made = handle_row(task, name, handle, not handles_read_it())
    run = made.run

    def run_and_note() -> Sample:
        sample = run()
        statistics = handle.path_statistics()
        made.note = f"{statistics['last']} ({statistics['why']})"
        if statistics["last"] != "bounce":  # cuFile reads from the device
            made.found = None
        return sample

    made.run = run_and_note
    return made


def handle_row(task: Task, name: str, handle: Any, past_cache: bool = False) -> Row:
    """Returns a row that times an asynchronous call and ``wait``, as in ds_io. ``past_cache``: see ``tensor_row``."""
    start = handle.pwrite if task.write else handle.pread
    submitted = 0.0

    def move(tensor: torch.Tensor) -> None:
        nonlocal submitted
        begin = time.perf_counter()
        start(tensor, task.path, task.validate, True)
        submitted = time.perf_counter() - begin
        handle.wait()
        task.finish()

    def move_through_new_memory(tensor: torch.Tensor) -> None:
        bounce = handle.new_cpu_locked_tensor(tensor.numel(), torch.empty(0, dtype=tensor.dtype))
        if task.write:
            bounce.copy_(tensor)
        move(bounce)
        if not task.write:
            tensor.copy_(bounce)
        task.finish()
        handle.free_cpu_locked_tensor(bounce)

    through = move_through_new_memory if task.slow_bounce_buffer else move
    row = tensor_row(task, name, lambda: task.buffer, through, past_cache=past_cache)
    run = row.run

    row.run = lambda: replace(run(), submit_seconds=submitted)
    row.blocks = lambda: block_times(task, handle)
    return row


def block_times(task: Task, handle: Any) -> BlockTimes:
    """Times single blocks of the handle's block size at random places of the file, one after the other."""
    block = task.buffer[: handle.get_block_size()]
    start = handle.async_pwrite if task.write else handle.async_pread
    task.set_out()
    complete, submit = [], []
    for offset in random_offsets(task.size, block.numel()):
        begin = time.perf_counter()
        start(block, task.path, offset)
        submitted = time.perf_counter()
        handle.wait()
        task.finish()
        complete.append(time.perf_counter() - begin)
        submit.append(submitted - begin)
    return BlockTimes.of(complete, submit)


def random_offsets(size: int, block: int) -> Iterator[int]:
    """Yields different multiples of ``block`` within ``size``, always the same ones, up to a count or time limit."""
    blocks = max(1, size // block)
    end = time.perf_counter() + SECONDS
    for place in random.Random(0).sample(range(blocks), min(BLOCKS, blocks)):
        yield place * block
        if time.perf_counter() > end:
            return
