"""What each rank runs: collectives over parameters that are on storage."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nvme_ops.offload import swap_params

dist.init_process_group("gloo")
rank = dist.get_rank()


def model(seed: int) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))


first, second = model(0), model(1)
ours = model(rank)
with swap_params(ours, sys.argv[1], memory_budget="40K", min_bytes=1), torch.no_grad():
    dist.broadcast(ours[0].weight.data, 0)
    work = dist.all_reduce(ours[1].weight.data, async_op=True)
    ours(torch.ones(1, 64))  # the values leave memory
    work.wait()
    gathered = [torch.empty(64, 64) for _ in range(2)]
    dist.all_gather(gathered, ours[2].weight.data)
    right = [
        torch.equal(ours[0].weight + 0, first[0].weight),
        torch.equal(ours[1].weight + 0, first[1].weight + second[1].weight),
        torch.equal(torch.stack(gathered), torch.stack([first[2].weight, second[2].weight])),
    ]
print(f"rank {rank}: {right}", flush=True)
dist.barrier()
dist.destroy_process_group()
