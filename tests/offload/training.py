"""What is trained in the tests: models, their gradients, and comparisons of what became of them."""

from __future__ import annotations

from typing import Any

import torch


def network(dtype: torch.dtype = torch.float32) -> torch.nn.Sequential:
    """Parameters that are larger than a chunk of the least budget, smaller, and of no elements; one in other order."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(30, 401), torch.nn.Conv1d(1, 3, 5), torch.nn.Flatten(), torch.nn.Linear(1191, 301),
        torch.nn.LayerNorm(301),
    )  # fmt: skip
    turned: Any = model[3]
    turned.weight.data = turned.weight.data.t().contiguous().t()
    model.register_parameter("none", torch.nn.Parameter(torch.zeros(0, 3)))
    model.register_parameter("unused", torch.nn.Parameter(torch.ones(7)))
    return model.to(dtype)


def backward(model: torch.nn.Module, number: int) -> None:
    first = next(model.parameters())
    x = torch.randn(4, 1, 30, generator=torch.Generator().manual_seed(number)).to(first.dtype)
    model.zero_grad()
    model(x).float().square().mean().backward()


def values(model: torch.nn.Module) -> list[torch.Tensor]:
    return [each.detach().clone() for each in model.parameters()]


def equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
