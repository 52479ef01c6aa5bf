"""Trains with DeepSpeed, ZeRO stage 3, and prints the losses. Arguments: what is on NVMe, its folder."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch

os.environ.update(MASTER_ADDR="127.0.0.1", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", DS_ACCELERATOR="cpu")
import deepspeed  # type: ignore[import-not-found,import-untyped,unused-ignore]
import torch.distributed as dist

import nvme_ops  # noqa: F401  (NVME_OPS_DEEPSPEED=1 installs it)

what, place = sys.argv[1:]
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
deepspeed.init_distributed("gloo")
torch.manual_seed(0)
layers = [layer for _ in range(3) for layer in (torch.nn.Linear(96, 300), torch.nn.GELU(), torch.nn.Linear(300, 96))]
model = torch.nn.Sequential(*layers)
zero: dict[str, Any] = {"stage": 3, "sub_group_size": 40_000}
if "optimizer" in what:
    pipelined = {"buffer_count": 20, "pipeline_read": True, "pipeline_write": True}
    zero["offload_optimizer"] = {"device": "nvme", "nvme_path": place, **pipelined}
if "parameters" in what:
    zero["stage3_param_persistence_threshold"] = 0
    zero["offload_param"] = {"device": "nvme", "nvme_path": place, "buffer_count": 16, "buffer_size": 40_000}
config = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": zero,
    "zero_force_ds_cpu_optimizer": False,
    "aio": {"block_size": 1 << 20, "queue_depth": 16},
}
engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
losses = []
for step in range(6):
    x = torch.randn(4, 96, generator=torch.Generator().manual_seed(step))
    loss = (engine(x) - x.roll(1, 1)).square().mean()
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
print("losses", json.dumps(losses), flush=True)
