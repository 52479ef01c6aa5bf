"""What each rank runs: a model divided by FSDP2, or a copy of it under DDP, with its states on storage."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from nvme_ops import dcp
from nvme_ops.offload import NvmeOptimizer

way, folder, first, last = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
dist.init_process_group("gloo")
rank = dist.get_rank()


def model() -> Any:
    torch.manual_seed(3)
    made = torch.nn.Sequential(torch.nn.Linear(60, 90), torch.nn.Tanh(), torch.nn.Linear(90, 60))
    if way == "ddp":
        return DistributedDataParallel(made)
    for layer in (made[0], made[2]):
        fully_shard(layer, mesh=dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),)))
    return fully_shard(made, mesh=dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),)))


def train(module: Any, optimizer: torch.optim.Optimizer, begin: int, end: int) -> None:
    for step in range(begin, end):
        optimizer.zero_grad()
        x = torch.randn(8, 60, generator=torch.Generator().manual_seed(step))  # the same on all ranks
        module(x).square().mean().backward()
        optimizer.step()


def local(tensor: Any) -> torch.Tensor:
    return tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor.detach()


mine, other = model(), model()
plain = torch.optim.AdamW(other.parameters(), lr=0.01)
with NvmeOptimizer(mine.parameters(), torch.optim.AdamW, folder, memory_budget="1M", lr=0.01) as optimizer:
    if first:
        states = {"model": mine.state_dict(), "optimizer": get_optimizer_state_dict(mine, plain_like := optimizer)}
        dcp.load(states, checkpoint_id=str(folder / "checkpoint"))
        mine.load_state_dict(states["model"])
        set_optimizer_state_dict(mine, plain_like, states["optimizer"])
    train(mine, optimizer, first, last)
    train(other, plain, 0, last)
    equal = all(
        torch.allclose(local(one), local(two), rtol=1e-5, atol=1e-7)
        for one, two in zip(mine.parameters(), other.parameters(), strict=True)
    )
    sys.stdout.write(f"rank {rank}: {'equal' if equal else 'DIFFERENT'}\n")
    sys.stdout.flush()
    if not first and way == "fsdp":
        states = {"model": mine.state_dict(), "optimizer": get_optimizer_state_dict(mine, optimizer)}
        dcp.save(states, checkpoint_id=str(folder / "checkpoint"))
    dist.barrier()
dist.destroy_process_group()
