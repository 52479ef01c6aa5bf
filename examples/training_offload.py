"""AdamW with its states on storage, to the same bits. Run python examples/training_offload.py [FOLDER]."""

import sys
import tempfile
from typing import Any

import torch

from nvme_ops.offload import NvmeOptimizer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def model() -> torch.nn.Module:
    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 512)).to(DEVICE)


def train(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
    for step in range(5):
        x = torch.randn(16, 512, generator=torch.Generator().manual_seed(step)).to(DEVICE)
        optimizer.zero_grad()
        loss = (module(x) - x.roll(1, 1)).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
    return loss.item()


def main(folder: str) -> None:
    options: Any = {"lr": 1e-3, "fused": True, "weight_decay": 0.1}
    plain = model()
    expected = train(plain, torch.optim.AdamW(plain.parameters(), **options))
    module = model()
    states = 8 * sum(parameter.numel() for parameter in module.parameters())
    with NvmeOptimizer(module.parameters(), torch.optim.AdamW, folder, memory_budget="4M", **options) as optimizer:
        loss, stats = train(module, optimizer), optimizer.stats()
    print(f"loss {loss:.6f}: {'equal' if loss == expected else 'DIFFERENT'}")
    written = int(stats.bytes_written_per_step) >> 20
    print(f"{states >> 20} MiB of states in {stats.peak_bytes >> 20} of memory, {written} written for each step")

    module = model()
    options |= {"memory_budget": "4M", "overlap": "backward"}  # the step begins during the backward pass
    with NvmeOptimizer(module.parameters(), torch.optim.AdamW, folder, **options) as optimizer:
        loss = train(module, optimizer)
    print(f"during the backward pass: {'equal' if loss == expected else 'DIFFERENT'}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as place:
        main(place)
