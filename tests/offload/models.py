"""Models of all shapes for the tests of streamed weights, and what is the same about their outputs."""

from __future__ import annotations

import torch
from torch import nn


class Tied(nn.Module):
    """An embedding whose weight is the last layer's, as in many language models."""

    def __init__(self, rows: int = 512) -> None:
        super().__init__()
        self.embedding = nn.Embedding(rows, 256)
        self.body = nn.Sequential(*(nn.Linear(256, 256) for _ in range(3)))
        self.head = nn.Linear(256, rows, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.head(self.body(self.embedding(tokens))))


class Experts(nn.Module):
    """Weights of experts in one parameter, of which those that are asked for are used."""

    def __init__(self, count: int = 8) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(count, 256, 256) / 16)

    def forward(self, x: torch.Tensor, chosen: list[int]) -> torch.Tensor:
        for expert in chosen:
            x = nn.functional.linear(x, self.up[expert])
        return x


def layers(count: int = 8, width: int = 256) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(count)))


def nbytes(model: nn.Module) -> int:
    return sum(each.nbytes for each in model.parameters())
