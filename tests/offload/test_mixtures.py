"""Mixtures of experts whose modules are the user's own: each is called as in memory, and computes what it says."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from nvme_ops.offload import stream_weights
from tests.offload.models import COUNT, WIDTH, Packed, best, mixed, nbytes

pytestmark = pytest.mark.usefixtures("one_thread")  # on whose number the bits of a product depend
X = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(3))


class CountingRouter(nn.Module):
    """Counts its calls and the load of each expert; may change its input."""

    load: torch.Tensor

    def __init__(self, in_place: bool = False) -> None:
        super().__init__()
        self.weight, self.in_place, self.calls = nn.Parameter(torch.randn(COUNT, WIDTH)), in_place, 0
        self.register_buffer("load", torch.zeros(COUNT))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls += 1
        weights, chosen = best(x @ self.weight.T)
        self.load += torch.bincount(chosen.flatten(), minlength=COUNT)
        if self.in_place:
            x.mul_(1.25)
        return weights, chosen


class Layer(nn.Module):
    """A router of one's own, and experts."""

    def __init__(self, experts: nn.Module | None = None, in_place: bool = False) -> None:
        super().__init__()
        self.router, self.experts = CountingRouter(in_place), experts or Packed(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x)
        if isinstance(self.experts, nn.ModuleList):
            experts = self.experts
            return x + mixed(x, chosen, weights, lambda number, part: experts[number](part))
        return x + torch.as_tensor(self.experts(x, chosen, weights))


def layers(make: Callable[[], nn.Module], count: int = 3) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(make() for _ in range(count))).eval().requires_grad_(False)


def experts_list(count: int = COUNT) -> nn.ModuleList:
    return nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 128), nn.ReLU(), nn.Linear(128, WIDTH)) for _ in range(count))


# Models that are put together in other ways


class Sizes(nn.Module):
    """Matrices in two parameters of different numbers of experts."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(first, 64, 64) / 8), nn.Parameter(torch.randn(second, 64, 64) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.up[-1] @ self.down[2]


class TwoLists(nn.Module):
    """One router that chooses in two lists."""

    def __init__(self) -> None:
        super().__init__()
        self.router = CountingRouter()
        self.up, self.down = (nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(COUNT)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x)
        return x + mixed(x, chosen, weights, lambda number, part: self.down[number](self.up[number](part).relu()))


class Halves(Packed):
    """Computes with parts of the weights of an expert, or of all."""

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        def one(at: int, part: torch.Tensor) -> torch.Tensor:
            gate, up = self.up[at][:WIDTH], self.up[at].chunk(2)[1]
            return ((part @ gate.T).sigmoid() * (part @ up.T)) @ self.down[at][:, :WIDTH].T

        return mixed(x, chosen, weights, one) + x @ self.down[:3].sum(0)[:, WIDTH:]


class WithNothing(Packed):
    """Has a parameter without elements."""

    def __init__(self) -> None:
        super().__init__(False)
        self.empty = nn.Parameter(torch.zeros(COUNT, 0, WIDTH))

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return super().forward(x, chosen, weights) + self.empty.sum() + self.empty[1].sum()


def one_router_for_all() -> nn.Sequential:
    made = layers(lambda: Layer(experts_list()))
    for each in made:
        each.router = made[0].router
    return made


def lists_with_nothing() -> nn.Sequential:
    made: Any = layers(lambda: Layer(experts_list()))
    for layer in made:
        for each in layer.experts:
            each.empty = nn.Parameter(torch.zeros(0, 3), False)
    return nn.Sequential(*made)


MADE: dict[str, Callable[[], nn.Sequential]] = {
    "two sizes": lambda: layers(lambda: Sizes(6, 4)),
    "one and more": lambda: layers(lambda: Sizes(1, 4)),
    "two lists": lambda: layers(TwoLists),
    "one router": one_router_for_all,
    "parts": lambda: layers(lambda: Layer(Halves(False))),
    "empty": lambda: layers(lambda: Layer(WithNothing())),
    "empty in lists": lists_with_nothing,
}


@torch.no_grad()
@pytest.mark.parametrize("share", [0.5, 0.75, 2.0])
@pytest.mark.parametrize("kind", MADE)
def test_models_of_other_makes_have_the_bits_in_memory(kind: str, share: float, folder: Path) -> None:
    plain = MADE[kind]()
    budget = int(nbytes(plain) * share)
    with stream_weights(MADE[kind](), folder, memory_budget=budget) as model:
        for number in range(12):
            rows = X[number : number + 1 + 3 * (number % 4 == 3)]
            assert torch.equal(model(rows), plain(rows))
        assert model.stats().peak_bytes <= budget


@pytest.mark.parametrize("make", [lambda: None, experts_list])
def test_layers_are_computed_again_for_backward_as_in_memory(make: Callable[[], Any], folder: Path) -> None:
    plain = layers(lambda: Layer(make()))
    with stream_weights(copy.deepcopy(plain), folder, memory_budget=nbytes(plain) // 2) as model:
        for number in range(4):
            gradients: list[Any] = []
            for each in (plain, model):
                x = X[number][None].clone().requires_grad_()
                found = x
                for layer in each:
                    found = checkpoint(layer, found, use_reentrant=False)
                found.square().sum().backward()
                gradients.append(x.grad)
            assert torch.equal(*gradients)
