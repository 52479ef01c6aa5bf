"""Activations on storage: the same gradients in less memory. Run python examples/activations.py [FOLDER]."""

import sys
import tempfile

import torch

from nvme_ops.offload import save_on_nvme


def model() -> torch.nn.Module:
    torch.manual_seed(7)
    blocks = [[torch.nn.Conv2d(16, 16, 3, padding=1), torch.nn.BatchNorm2d(16), torch.nn.ReLU()] for _ in range(8)]
    return torch.nn.Sequential(*(layer for block in blocks for layer in block))


def main(folder: str) -> None:
    net = model()
    batches = [torch.randn(32, 16, 64, 64, generator=torch.Generator().manual_seed(step)) for step in range(3)]

    def gradients() -> list[torch.Tensor]:
        grads = [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]
        net.zero_grad()
        return grads

    saving = save_on_nvme(folder, memory_budget="32M")  # once, for all steps
    for batch in batches:
        net(batch).square().mean().backward()
        expected = gradients()
        with saving:
            loss = net(batch).square().mean()
        loss.backward()
        equal = all(map(torch.equal, gradients(), expected))
        print(f"loss {loss.item():.6f}, gradients {'equal' if equal else 'DIFFERENT'}")
    stats = saving.stats()
    saved, peak = stats.bytes_saved // len(batches) >> 20, stats.peak_bytes >> 20
    print(f"{saved} MiB saved for each step in {peak} of memory, {stats.bytes_written >> 20} written in all")
    saving.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as place:
        main(place)
