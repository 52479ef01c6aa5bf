"""Trains a model in a process of its own, and prints how long each phase of each step took; see training.py."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

WIDTH, INNER = 2048, 8192
_OPTIONS: dict[str, Any] = {"lr": 1e-4, "fused": True}
_BUFFERS = 12  # of DeepSpeed: three times the tensors of Adam


@dataclass
class Job:
    """What ``training.py`` asks of a process."""

    engine: str  # of ENGINES
    folder: str
    blocks: int
    batch: int
    steps: int
    parameters: bool  # whether these are on storage, not the states of the optimizer alone
    memory_budget: int  # for parameters, and for states


class Block(torch.nn.Module):
    """Two matrices of 16.8 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(WIDTH, INNER, bias=False)
        self.down = torch.nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From (batch, WIDTH) to the same."""
        out: torch.Tensor = x + self.down(torch.nn.functional.gelu(self.up(x)))
        return out


def model(job: Job) -> torch.nn.Module:
    """Returns the same one for each engine."""
    torch.manual_seed(1)
    return torch.nn.Sequential(*(Block() for _ in range(job.blocks)))


def batches(job: Job) -> Iterator[torch.Tensor]:
    """Yields one for each step."""
    for step in range(job.steps):
        yield torch.randn(job.batch, WIDTH, generator=torch.Generator().manual_seed(step))


Phases = tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor], Any], Callable[[], Any]]


def _stepping(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return step


@contextlib.contextmanager
def in_memory(job: Job) -> Iterator[Phases]:
    """Yields forward, backward and step of the model in memory."""
    module = model(job)
    optimizer = torch.optim.AdamW(module.parameters(), **_OPTIONS)

    yield lambda x: module(x).square().mean(), torch.Tensor.backward, _stepping(optimizer)


@contextlib.contextmanager
def cpu_offload(job: Job) -> Iterator[Phases]:
    """Yields those of FSDP2 with all in host memory, which is what offloading to storage is compared with on a GPU."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    there = "cpu" if device is None else device.type
    options: dict[str, Any] = {
        "mesh": init_device_mesh(there, (1,)),
        "offload_policy": CPUOffloadPolicy(pin_memory=there != "cpu"),
    }
    module = model(job)
    for block in module.children():
        fully_shard(block, **options)
    fully_shard(module, **options)
    optimizer = torch.optim.AdamW(module.parameters(), **_OPTIONS)

    yield lambda x: module(x.to(there)).square().mean(), torch.Tensor.backward, _stepping(optimizer)


@contextlib.contextmanager
def nvme_ops(job: Job) -> Iterator[Phases]:
    """Yields those with states, or states and parameters, on storage."""
    from nvme_ops.offload import NvmeOptimizer, swap_params

    with contextlib.ExitStack() as stack:
        if job.parameters:
            with torch.device("meta"):
                module = model(job)
            torch.manual_seed(1)
            stack.enter_context(swap_params(module, job.folder, memory_budget=job.memory_budget))
        else:
            module = model(job)
        options: dict[str, Any] = {"overlap": "backward", "free_gradients": True} if job.parameters else {}
        optimizer = stack.enter_context(
            NvmeOptimizer(module.parameters(), torch.optim.AdamW, job.folder,
                          memory_budget=job.memory_budget, **options, **_OPTIONS)
        )  # fmt: skip

        yield lambda x: module(x).square().mean(), torch.Tensor.backward, _stepping(optimizer)


@contextlib.contextmanager
def deepspeed(job: Job) -> Iterator[Phases]:
    """Yields those of DeepSpeed's ZeRO stage 3, on its own op."""
    here = str(Path(__file__).parent.parent)
    sys.path = [each for each in sys.path if each not in ("", here)]  # whose op_builder it would take for its own
    os.environ.update(MASTER_ADDR="127.0.0.1", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", DS_ACCELERATOR="cpu")
    import deepspeed as engine_module  # type: ignore[import-not-found,import-untyped,unused-ignore]
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    engine_module.init_distributed("gloo")
    pipelined = {"buffer_count": _BUFFERS, "pipeline_read": True, "pipeline_write": True}
    zero: dict[str, Any] = {
        "stage": 3,
        "sub_group_size": WIDTH * INNER,
        "offload_optimizer": {"device": "nvme", "nvme_path": job.folder, **pipelined},
    }
    if job.parameters:
        count = max(2, job.memory_budget // (4 * WIDTH * INNER))
        place = {"device": "nvme", "nvme_path": job.folder, "buffer_count": count, "buffer_size": WIDTH * INNER}
        zero |= {"offload_param": place, "stage3_max_live_parameters": count * WIDTH * INNER}
    config = {
        "train_micro_batch_size_per_gpu": job.batch,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True, "fused": True}},
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "aio": {"block_size": 8 << 20, "queue_depth": 32, "intra_op_parallelism": 1, "single_submit": False},
    }
    module = model(job)
    engine = engine_module.initialize(model=module, model_parameters=module.parameters(), config=config)[0]
    yield lambda x: engine(x).square().mean(), engine.backward, engine.step


@contextlib.contextmanager
def deepspeed_on_nvme_ops(job: Job) -> Iterator[Phases]:
    """Yields those of DeepSpeed on this package's op."""
    from nvme_ops.integrations import deepspeed as integration

    integration.install()
    with deepspeed(job) as phases:
        yield phases


ENGINES: dict[str, Callable[[Job], contextlib.AbstractContextManager[Phases]]] = {
    "memory": in_memory,
    "cpu_offload": cpu_offload,
    "nvme_ops": nvme_ops,
    "deepspeed": deepspeed,
    "deepspeed on nvme_ops": deepspeed_on_nvme_ops,
}


def forget(folder: str) -> None:
    """Writes back what is in a folder, and drops it from the page cache."""
    os.sync()
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                descriptor = os.open(os.path.join(place, name), os.O_RDONLY)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)


def moved() -> tuple[int, int]:
    """Returns bytes read from and written to devices by this process."""
    words = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(words["read_bytes"]), int(words["write_bytes"])


def status(name: str) -> int:
    """Returns bytes of an entry of ``/proc/self/status``."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) * 1024


def train(job: Job) -> dict[str, Any]:
    """Returns what each step took, and what became of it."""
    found: dict[str, Any] = {"losses": [], "forward": [], "backward": [], "step": [], "read": [], "written": []}
    with ENGINES[job.engine](job) as (forward, backward, step):
        for x in batches(job):
            forget(job.folder)
            before = moved()
            begin = time.perf_counter()
            loss = forward(x)
            forward_end = time.perf_counter()
            backward(loss)
            backward_end = time.perf_counter()
            step()
            end = time.perf_counter()
            after = moved()
            found["losses"].append(loss.item())
            found["forward"].append(forward_end - begin)
            found["backward"].append(backward_end - forward_end)
            found["step"].append(end - backward_end)
            found["read"].append(after[0] - before[0])
            found["written"].append(after[1] - before[1])
        found["peak_bytes"] = status("VmHWM")
    return found


if __name__ == "__main__":
    print(json.dumps(train(Job(**json.loads(sys.argv[-1])))), flush=True)
