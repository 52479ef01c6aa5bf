"""AdamW with its states, or states and parameters, on storage: this package against memory, the host's, and others.

Each way trains the same model in a process of its own, the files dropped from the page cache before each step, and must
find the losses of the one in memory. The bound is what fio takes for the same bytes, half read and half written, what
the bus of an accelerator takes, or the step in memory.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from benchmarks import accelerators, command
from benchmarks.accelerators import BUS
from nvme_ops.base.command_line import size
from nvme_ops.measure.rows import Row, Sample, Unavailable, WrongData, peak
from nvme_ops.measure.tables import Table
from nvme_ops.offload import NvmeOptimizer, swap_params

GROUPS = {"engines": "whole steps: nvme_ops, those with everything in host memory, and DeepSpeed on both ops"}
MEMORY = "in memory"
WIDTH, INNER = 2048, 8192
_COLUMNS = ("forward", "backward", "optimizer", "read per step", "written per step", BUS, "device memory",
            "peak memory", "of the bound")  # fmt: skip
_FIRST = 1  # steps that are not counted, since there are no states yet


def tables(run: command.Run, scratch: str, _: dict[str, Any]) -> Iterator[Table]:
    """Yields the table of one folder, whose rows train the same model."""
    args, same = run.args, command.Alike("losses")
    is_cpu, blocks = args.device == accelerators.CPU, max(1, args.size // (2 * 4 * WIDTH * INNER))

    def train(engine: str, parameters: bool, setup: accelerators.Setup) -> Sample:
        package = engine.partition(" ")[0]
        if package == "deepspeed" and args.no_deepspeed:
            raise Unavailable("left out")
        if package not in ("memory", "nvme_ops"):
            accelerators.require_peer(args, package)
        job: dict[str, Any] = {"engine": engine, "blocks": blocks, "steps": _FIRST + args.steps}
        job |= {"parameters": parameters, "budget": setup[0], "host": setup[1]}
        result = command.work("training", scratch, args, **job)
        try:
            if is_cpu or package in ("memory", "nvme_ops"):  # others update on the CPU, with other last bits
                same.require(result["losses"], engine == "memory")
        except WrongData:
            if engine == "deepspeed":
                raise Unavailable("other losses than in memory: see docs/deepspeed.md") from None
            raise
        figures = {name: statistics.median(values[_FIRST:]) for name, values in result["figures"].items()}
        seconds = figures["forward"] + figures["backward"] + figures["optimizer"]
        return Sample(seconds, args.batch, peak_bytes=result["peak_bytes"], figures=figures | result["peak"])

    rows, setups = list[Row](), accelerators.setups(args) or [(args.budget, None)]
    for label, (engine, parameters) in _ENGINES.items():
        for setup in setups if engine == "nvme_ops" else setups[: engine != "torchao" or not is_cpu]:
            name = f"{label}, {accelerators.words_of(*setup)}" if engine == "nvme_ops" else label
            rows.append(Row(name, partial(train, engine, parameters, setup), before=os.sync))
    title = f"AdamW, {blocks * 2 * WIDTH * INNER / 1e6:.0f} million parameters, batch {args.batch}"
    table = Table("engines", title, "samples/s", rows, MEMORY, _COLUMNS)
    accelerators.bounded_both_ways(run, scratch, table, args.batch)
    yield table


# What follows runs in the row's own process.

_ENGINES = {
    MEMORY: ("memory", False),
    "fully_shard, CPUOffloadPolicy": ("torch", False),
    "torchao CPUOffloadOptimizer": ("torchao", False),
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


def _options(job: Namespace) -> dict[str, Any]:
    return {"lr": 1e-4} | ({"foreach": False} if job.device.type == "privateuseone" else {"fused": True})


def _plain(module: torch.nn.Module, optimizer: torch.optim.Optimizer, job: Namespace) -> Phases:
    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return lambda x: module(x.to(job.device)).square().mean(), torch.Tensor.backward, step


def _memory(module: torch.nn.Module, job: Namespace, _: contextlib.ExitStack) -> Phases:
    return _plain(module.to(job.device), torch.optim.AdamW(module.parameters(), **_options(job)), job)


def _cpu_offload(module: torch.nn.Module, job: Namespace, _: contextlib.ExitStack) -> Phases:
    """Sets up FSDP2 with everything in host memory, with which offloading to storage is compared on a GPU."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    policy = CPUOffloadPolicy(pin_memory=job.device.type != "cpu")
    options: dict[str, Any] = {"mesh": init_device_mesh(job.device.type, (1,)), "offload_policy": policy}
    for block in (*module.children(), module):
        fully_shard(block, **options)
    return _plain(module, torch.optim.AdamW(module.parameters(), **_options(job)), job)


def _torchao(module: torch.nn.Module, job: Namespace, _: contextlib.ExitStack) -> Phases:
    from torchao.optim import CPUOffloadOptimizer  # type: ignore[import-not-found,unused-ignore]

    return _plain(module, CPUOffloadOptimizer(module.to(job.device).parameters(), torch.optim.AdamW, lr=1e-4), job)


def _nvme_ops(module: torch.nn.Module, job: Namespace, stack: contextlib.ExitStack) -> Phases:
    options: dict[str, Any] = {**accelerators.budgets(NvmeOptimizer, job), **_options(job)}
    if job.parameters:
        torch.manual_seed(1)
        budgets = accelerators.budgets(swap_params, job)
        job.counting.append(stack.enter_context(swap_params(module, job.folder, device=job.device, **budgets)))
        options |= {"overlap": "backward", "free_gradients": True}
    else:
        module.to(job.device)
    job.counting.append(NvmeOptimizer(module.parameters(), torch.optim.AdamW, job.folder, **options))
    return _plain(module, stack.enter_context(job.counting[-1]), job)


def _deepspeed(module: torch.nn.Module, job: Namespace, _: contextlib.ExitStack) -> Phases:
    """Sets up ZeRO stage 3, on its own op or on ours."""
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


_PHASES = {"memory": _memory, "torch": _cpu_offload, "torchao": _torchao, "nvme_ops": _nvme_ops,
           "deepspeed": _deepspeed}  # fmt: skip


def work(job: Namespace) -> dict[str, Any]:
    """Trains the same model for each engine; returns the figures and losses of each step, and the peak of memory."""
    names = ("forward", "backward", "optimizer", "read per step", "written per step", "read and written", BUS)
    figures: dict[str, list[float]] = {name: [] for name in names}
    losses, job.counting = [], []
    torch.manual_seed(1)
    with torch.device("meta" if job.engine == "nvme_ops" and job.parameters else "cpu"):
        module = torch.nn.Sequential(*(Block() for _ in range(job.blocks)))
    with contextlib.ExitStack() as stack:
        forward, backward, step = _PHASES[job.engine.partition(" ")[0]](module, job, stack)

        def moved() -> tuple[int, ...]:
            read, written = command.moved()
            return read, written, read + written, accelerators.moved(job)[1]

        for number in range(job.steps):
            x = torch.randn(job.batch, WIDTH, generator=torch.Generator().manual_seed(number))
            command.forget(job.folder)
            before, times = moved(), [accelerators.clock(job.device)]
            loss = forward(x)
            for phase in (partial(backward, loss), step):
                times.append(accelerators.clock(job.device))
                phase()
            times.append(accelerators.clock(job.device))
            losses.append(loss.item())
            taken = [end - begin for begin, end in itertools.pairwise(times)]
            taken += [after - earlier for after, earlier in zip(moved(), before, strict=True)]
            for name, value in zip(names, taken, strict=True):
                figures[name].append(value)
        return {"losses": losses, "figures": figures, "peak_bytes": peak()}


_FLAGS = {
    **accelerators.FLAGS,
    "--budget": ("memory for states, on the CPU", "256M", size),
    "--batch": ("samples of a step", 64),
    "--steps": ("of each process, after the first one", 4),
}
PROGRAM = command.Program(GROUPS, tables, 8, _FLAGS, accelerators.check, size="848M",  # 222 million parameters
                          rounds=5, prepare=accelerators.prepare)  # fmt: skip
