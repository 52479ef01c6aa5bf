"""AdamW with its states on storage: this package against memory, the device and DeepSpeed.

The table ``step`` times ``optimizer.step()`` alone, with random gradients, the files dropped from the page cache before
each; its bound is what fio takes for the same bytes, read and written at once. The table ``engines`` times whole
training steps of this package and of DeepSpeed, on its own op and on ours, each in a process of its own.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from benchmarks import command, fio
from nvme_ops.base.command_line import size
from nvme_ops.base.text import size_words
from nvme_ops.measure.rows import Row, Sample, Unavailable, WrongData, peak, timed
from nvme_ops.measure.tables import Table
from nvme_ops.offload import NvmeOptimizer, swap_params

GROUPS = {
    "step": "optimizer.step(): in memory, NvmeOptimizer, fio",
    "engines": "whole steps with states, or states and parameters, on storage: nvme_ops, and DeepSpeed on both ops",
}
MEMORY = "in memory"
WIDTH, INNER = 2048, 8192
_STATES = 8  # bytes for each parameter: exp_avg, exp_avg_sq
_OPTIONS: dict[str, Any] = {"lr": 1e-4, "fused": True}
_COLUMNS = ("forward", "backward", "optimizer", "read per step", "written per step", "peak memory")
_FIRST = 1  # steps that are not counted, since there are no states yet


def step_table(scratch: str, args: Namespace, stack: contextlib.ExitStack) -> Table:
    """Returns rows that update equal parameters with equal gradients, so that they can be compared."""

    def parameters() -> list[torch.nn.Parameter]:
        torch.manual_seed(1)
        made = [torch.nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(max(1, args.size // (4 * WIDTH * WIDTH)))]
        for parameter in made:
            parameter.grad = torch.randn(WIDTH, WIDTH)
        return made

    in_memory, on_nvme = parameters(), parameters()
    states = sum(parameter.numel() for parameter in in_memory) * _STATES
    ours = stack.enter_context(
        NvmeOptimizer(on_nvme, torch.optim.AdamW, scratch, memory_budget=args.budget, **_OPTIONS)
    )
    memory = torch.optim.AdamW(in_memory, **_OPTIONS)
    before = partial(command.forget, scratch)

    def check() -> None:  # when each has made one step
        if not all(map(torch.equal, in_memory, on_nvme)):
            raise WrongData("a parameter differs from that of the optimizer in memory")

    path = command.data_file(scratch, states)
    rows = [
        Row(MEMORY, lambda: timed(memory.step, 2 * states), before),
        Row(f"NvmeOptimizer, {size_words(args.budget)}", lambda: timed(ours.step, 2 * states), before, check),
        fio.row(f"{fio.NAME}, half read, half written", "rw", lambda: path, states, before, fio.best(states)),
    ]
    return Table("step", f"AdamW, {size_words(states)} of states: read and written", "GB/s", rows, MEMORY)


def engine_table(scratch: str, args: Namespace, _: contextlib.ExitStack) -> Table:
    """Returns rows that train the same model, and must find the losses of the one in memory."""
    blocks = max(1, args.size // (2 * 4 * WIDTH * INNER))
    batch, same = args.batch, command.Alike("losses")

    def train(engine: str, parameters: bool) -> Sample:
        if engine.startswith("deepspeed") and (args.no_deepspeed or importlib.util.find_spec("deepspeed") is None):
            raise Unavailable("left out" if args.no_deepspeed else "not installed: pip install deepspeed")
        job = {"engine": engine, "blocks": blocks, "batch": batch, "steps": _FIRST + args.steps}
        result = command.work("training", scratch, args, **job, parameters=parameters)
        try:
            same.require(result["losses"], engine == "memory")
        except WrongData:
            if engine == "deepspeed":
                raise Unavailable("other losses than in memory: see docs/deepspeed.md") from None
            raise
        figures = {name: statistics.median(values[_FIRST:]) for name, values in result["figures"].items()}
        seconds = figures["forward"] + figures["backward"] + figures["optimizer"]
        return Sample(seconds, batch, peak_bytes=result["peak_bytes"], figures=figures)

    rows = [Row(label, partial(train, engine, parameters), before=os.sync)
            for label, (engine, parameters) in _ENGINES.items()]  # fmt: skip
    title = f"AdamW, {blocks * 2 * WIDTH * INNER / 1e6:.0f} million parameters, batch {batch}"
    return Table("engines", title, "samples/s", rows, MEMORY, _COLUMNS)


# What follows runs in the row's own process.

_ENGINES = {
    MEMORY: ("memory", False),
    "fully_shard, CPUOffloadPolicy": ("cpu_offload", False),
    "nvme_ops, states": ("nvme_ops", False),
    "nvme_ops, states and parameters": ("nvme_ops", True),
    "DeepSpeed, states": ("deepspeed", False),
    "DeepSpeed, states and parameters": ("deepspeed", True),
    "DeepSpeed on our op, states": ("deepspeed on nvme_ops", False),
    "DeepSpeed on our op, both": ("deepspeed on nvme_ops", True),
}
Phases = tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor], Any], Callable[[], Any]]


class Block(torch.nn.Sequential):
    """Two matrices of 16.8 million parameters, from (batch, WIDTH) to the same."""

    def __init__(self) -> None:
        up, down = torch.nn.Linear(WIDTH, INNER, bias=False), torch.nn.Linear(INNER, WIDTH, bias=False)
        super().__init__(up, torch.nn.GELU(), down)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns ``x`` plus what the block computes."""
        return x + super().forward(x)


def _plain(module: torch.nn.Module, optimizer: torch.optim.Optimizer, device: str = "cpu") -> Phases:
    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return lambda x: module(x.to(device)).square().mean(), torch.Tensor.backward, step


def _cpu_offload(module: torch.nn.Module, _: Namespace, __: contextlib.ExitStack) -> Phases:
    """Sets up FSDP2 with everything in host memory, with which offloading to storage is compared on a GPU."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    there = "cpu" if device is None else device.type
    policy = CPUOffloadPolicy(pin_memory=there != "cpu")
    options: dict[str, Any] = {"mesh": init_device_mesh(there, (1,)), "offload_policy": policy}
    for block in module.children():
        fully_shard(block, **options)
    fully_shard(module, **options)
    return _plain(module, torch.optim.AdamW(module.parameters(), **_OPTIONS), there)


def _nvme_ops(module: torch.nn.Module, job: Namespace, stack: contextlib.ExitStack) -> Phases:
    options: dict[str, Any] = {"memory_budget": job.budget, **_OPTIONS}
    if job.parameters:
        torch.manual_seed(1)
        stack.enter_context(swap_params(module, job.folder, memory_budget=job.budget))
        options |= {"overlap": "backward", "free_gradients": True}
    optimizer = NvmeOptimizer(module.parameters(), torch.optim.AdamW, job.folder, **options)
    return _plain(module, stack.enter_context(optimizer))


def _deepspeed(module: torch.nn.Module, job: Namespace, _: contextlib.ExitStack) -> Phases:
    """Sets up ZeRO stage 3, on its own op or on ours."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    if job.engine.endswith("nvme_ops"):
        from nvme_ops.integrations import deepspeed

        deepspeed.install()
    initialize = command.deepspeed_alone().initialize
    place = {"device": "nvme", "nvme_path": job.folder}
    # buffers: three times the tensors of Adam
    pipelined = {"buffer_count": 12, "pipeline_read": True, "pipeline_write": True}
    zero: dict[str, Any] = {"stage": 3, "sub_group_size": WIDTH * INNER, "offload_optimizer": {**place, **pipelined}}
    if job.parameters:
        count = max(2, job.budget // (4 * WIDTH * INNER))
        zero["offload_param"] = {**place, "buffer_count": count, "buffer_size": WIDTH * INNER}
        zero["stage3_max_live_parameters"] = count * WIDTH * INNER
    config = {
        "train_micro_batch_size_per_gpu": job.batch,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True, "fused": True}},
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "aio": {"block_size": 8 << 20, "queue_depth": 32, "intra_op_parallelism": 1, "single_submit": False},
    }
    engine = initialize(model=module, model_parameters=module.parameters(), config=config)[0]
    return lambda x: engine(x).square().mean(), engine.backward, engine.step


_PHASES = {"memory": lambda module, *_: _plain(module, torch.optim.AdamW(module.parameters(), **_OPTIONS)),
           "cpu_offload": _cpu_offload, "nvme_ops": _nvme_ops, "deepspeed": _deepspeed}  # fmt: skip


def work(job: Namespace) -> dict[str, Any]:
    """Trains the same model for each engine; returns the figures and losses of each step, and the peak of memory."""
    names = ("forward", "backward", "optimizer", "read per step", "written per step")
    figures: dict[str, list[float]] = {name: [] for name in names}
    losses = []
    torch.manual_seed(1)
    with torch.device("meta" if job.engine == "nvme_ops" and job.parameters else "cpu"):
        module = torch.nn.Sequential(*(Block() for _ in range(job.blocks)))
    with contextlib.ExitStack() as stack:
        forward, backward, step = _PHASES[job.engine.partition(" ")[0]](module, job, stack)
        for number in range(job.steps):
            x = torch.randn(job.batch, WIDTH, generator=torch.Generator().manual_seed(number))
            command.forget(job.folder)
            before, times = command.moved(), [time.perf_counter()]
            loss = forward(x)
            for phase in (partial(backward, loss), step):
                times.append(time.perf_counter())
                phase()
            times.append(time.perf_counter())
            losses.append(loss.item())
            taken = [end - begin for begin, end in itertools.pairwise(times)]
            taken += [after - earlier for after, earlier in zip(command.moved(), before, strict=True)]
            for name, value in zip(names, taken, strict=True):
                figures[name].append(value)
        return {"losses": losses, "figures": figures, "peak_bytes": peak()}


def tables(run: command.Run, scratch: str, _: dict[str, Any]) -> Iterator[Table]:
    """Yields the tables of one folder."""
    for group, make in {"step": step_table, "engines": engine_table}.items():
        if group in run.args.groups:
            with contextlib.ExitStack() as stack:
                table = make(scratch, run.args, stack)
                if group == "engines":
                    run.measure(table.rows, warmups=0)  # each pass is a new process, whose first step is not counted
                yield table


_FLAGS = {
    "--budget": ("memory for states", "256M", size),
    "--batch": ("samples of a step of the group engines", 64),
    "--steps": ("of each process of the group engines, after the first one", 4),
}
PROGRAM = command.Program(GROUPS, tables, 8, _FLAGS, size="848M", rounds=5)  # 222 million parameters
