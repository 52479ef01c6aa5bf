"""What each rank runs: a model divided among the ranks by transformers' own plan, its weights streamed."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
import transformers
from transformers.distributed import DistributedConfig

from nvme_ops.offload import from_pretrained

dist.init_process_group("gloo")
path = sys.argv[1]
ids = torch.tensor([[1, 2, 3, 4]])
plain = transformers.LlamaForCausalLM.from_pretrained(path)
size = sum(each.nbytes for each in plain.parameters())
divided = DistributedConfig(tp_plan="auto")
with torch.no_grad(), from_pretrained(path, memory_budget="3M", distributed_config=divided) as model:
    for _ in range(3):
        logits = model(ids).logits
    found = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
    close = torch.allclose(found, plain(ids).logits, atol=1e-5)
    read = model.stats().bytes_read
print(f"rank {dist.get_rank()}: close {close}, less than {read / 3 / size:.2f} of the bytes", flush=True)
dist.barrier()
dist.destroy_process_group()
