"""What each rank runs: a model divided by FSDP2, or a copy of it under DDP, with its activations on storage."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from nvme_ops.offload import save_on_nvme

way, folder = sys.argv[1:]
dist.init_process_group("gloo")
rank = dist.get_rank()


def model() -> Any:
    torch.manual_seed(3)
    made = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(96, 96), torch.nn.GELU()) for _ in range(4)))
    if way == "ddp":
        return DistributedDataParallel(made)
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in made:
        fully_shard(layer, mesh=mesh)
    return fully_shard(made, mesh=mesh)


def gradients(module: Any, x: torch.Tensor, saving: Any) -> list[torch.Tensor]:
    module.zero_grad()
    if saving is None:
        loss = module(x).square().mean()
    else:
        with saving:
            loss = module(x).square().mean()
    loss.backward()
    return [each.grad.to_local() if hasattr(each.grad, "to_local") else each.grad for each in module.parameters()]


mine, other = model(), model()
saving = save_on_nvme(folder, min_bytes=1, memory_budget=0)
equal = True
for step in range(3):
    x = torch.randn(32, 96, generator=torch.Generator().manual_seed(10 * step + rank))
    pairs = zip(gradients(mine, x, saving), gradients(other, x, None), strict=True)
    equal = equal and all(torch.equal(one, two) for one, two in pairs)
saved = saving.stats().bytes_saved // 3
sys.stdout.write(f"rank {rank}: {'equal' if equal else 'DIFFERENT'}, {saved} bytes\n")
sys.stdout.flush()
dist.barrier()
dist.destroy_process_group()
