"""What the tests of save_on_nvme share: nets that save tensors of all kinds, and their gradients."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import torch

from nvme_ops.offload import ActivationStats, save_on_nvme

KIB = 1024


def perceptron() -> torch.nn.Sequential:
    torch.manual_seed(1)
    layers = [[torch.nn.Linear(128, 128), torch.nn.GELU(), torch.nn.LayerNorm(128)] for _ in range(4)]
    return torch.nn.Sequential(*(each for layer in layers for each in layer))


def convolutional() -> torch.nn.Sequential:
    torch.manual_seed(1)
    layers = [
        [torch.nn.Conv2d(4, 4, 3, padding=1), torch.nn.BatchNorm2d(4), torch.nn.ReLU(inplace=number % 2 == 0)]
        for number in range(4)
    ]
    return torch.nn.Sequential(
        *(each for layer in layers for each in layer),
        torch.nn.MaxPool2d(2), torch.nn.Dropout(0.2), torch.nn.Flatten(), torch.nn.LazyLinear(3),
    )  # fmt: skip


class Attention(torch.nn.Module):
    """Saves parts of one storage, and views of others."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.qkv, self.out = torch.nn.Linear(64, 192), torch.nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            q, k, v = (each.unflatten(-1, (4, 16)).transpose(1, 2) for each in self.qkv(x).chunk(3, dim=-1))
            scores = (q @ k.transpose(-1, -2)).softmax(-1)
            x = x + self.out((scores @ v).transpose(1, 2).reshape(x.shape))
            x = x * x.mean(0, keepdim=True).expand_as(x)
        return x


MODELS: dict[str, tuple[Callable[[], torch.nn.Module], tuple[int, ...]]] = {
    "perceptron": (perceptron, (128, 128)),
    "convolutional": (convolutional, (16, 4, 32, 32)),
    "attention": (Attention, (8, 64, 64)),
}


def gradients(model: torch.nn.Module, x: torch.Tensor, saving: Any = None) -> list[torch.Tensor]:
    """Of one step, those of the input first."""
    torch.manual_seed(5)  # of dropout
    x = x.clone().requires_grad_()
    for each in model.parameters():
        each.grad = None
    if saving is None:
        loss = model(x).square().sum()
    else:
        with saving:
            loss = model(x).square().sum()
    loss.backward()
    return [each.grad.clone() for each in (x, *model.parameters()) if each.grad is not None]


def settled(saving: save_on_nvme) -> ActivationStats:
    """Once nothing is on its way to storage or back."""
    inside = saving._activations
    while len(inside._writing) or inside._leaving:
        saving.stats()
        time.sleep(0.001)
    with contextlib.suppress(OSError, KeyboardInterrupt):  # of a write that somebody was told of
        inside._store.wait()  # for reads whose graphs are gone, too
    return saving.stats()


def same(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))
