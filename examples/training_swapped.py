"""Parameters, gradients and states on storage, to the same bits. Run python examples/training_swapped.py [FOLDER]."""

import sys
import tempfile
from typing import Any

import torch

from nvme_ops.offload import NvmeOptimizer, swap_gradients, swap_params

OPTIONS: Any = {"lr": 1e-3, "fused": True}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def model() -> torch.nn.Module:
    torch.manual_seed(7)
    return torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8))).to(DEVICE)


def loss_of(module: torch.nn.Module, step: int) -> torch.Tensor:
    x = torch.randn(16, 1024, generator=torch.Generator().manual_seed(step)).to(DEVICE)
    return (module(x) - x.roll(1, 1)).square().mean()


def main(folder: str) -> None:
    plain, module = model(), model()
    reference = torch.optim.AdamW(plain.parameters(), **OPTIONS)
    with (
        swap_params(module, folder, memory_budget="12M") as swapped,  # the parameters are other objects from here on
        swap_gradients(module.parameters(), folder, memory_budget="12M") as gradients,
        NvmeOptimizer(module.parameters(), torch.optim.AdamW, folder, memory_budget="4M", **OPTIONS) as optimizer,
    ):
        for step in range(3):
            for batch in (2 * step, 2 * step + 1):  # gradients of two batches add up
                expected, loss = loss_of(plain, batch), loss_of(module, batch)
                expected.backward()
                loss.backward()
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
            gradients.clip_grad_norm_(1.0)
            for each_optimizer in (reference, optimizer):
                each_optimizer.step()
                each_optimizer.zero_grad()
            print(f"step {step}: loss {loss.item():.6f}: {'equal' if loss == expected else 'DIFFERENT'}")
        stats = swapped.stats()
        print(f"{stats.bytes_stored >> 20} MiB of parameters in {stats.peak_bytes >> 20} of memory")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as place:
        main(place)
