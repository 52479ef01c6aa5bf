"""What is trained in the tests: models, their inputs and gradients, and comparisons of what became of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from nvme_ops.offload import ActivationStats, NvmeOptimizer, save_on_nvme
from nvme_ops.offload.optimizer import states as optimizer_states
from nvme_ops.offload.residency import placement
from tests.offload.elsewhere import same
from tests.offload.elsewhere import values as elsewhere

KIB = 1024


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


def sentences(dtype: torch.dtype = torch.float32) -> torch.nn.Sequential:
    """Some 300 KiB, the largest parameter of 64."""
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Embedding(50, 64, padding_idx=0),
        *(torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)) for _ in range(2)),
        torch.nn.LayerNorm(64), torch.nn.Linear(64, 8),
    ).to(dtype)  # fmt: skip


class Odd(torch.nn.Module):
    """Uses parameters in unusual ways: of a child that is never called, tied, as views, twice, and not at all."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.words = torch.nn.Embedding(50, 64)
        self.attention = torch.nn.MultiheadAttention(64, 4, batch_first=True)
        self.memory = torch.nn.LSTM(64, 64, batch_first=True)
        self.image = torch.nn.Conv1d(64, 64, 3, padding=1)
        self.block = torch.nn.Parameter(torch.randn(64, 8, 8) / 8)
        self.frozen = torch.nn.Parameter(torch.randn(64, 64) / 8, requires_grad=False)
        self.unused = torch.nn.Parameter(torch.ones(64, 64))
        self.out = torch.nn.Linear(64, 50, bias=False)
        self.out.weight = self.words.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.words(x)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = x + self.memory(x)[0]
        x = x + self.image(x.transpose(1, 2)).transpose(1, 2)
        x = x + x @ self.block.reshape(64, 64) + x @ self.block.flatten(1)
        x = x.tanh() @ self.frozen.T + torch.einsum("bij,jk->bik", x, self.frozen[:, :64])
        return self.out(x.tanh())


def perceptron() -> torch.nn.Sequential:
    torch.manual_seed(1)
    layers = [[torch.nn.Linear(128, 128), torch.nn.GELU(), torch.nn.LayerNorm(128)] for _ in range(4)]
    return torch.nn.Sequential(*(module for layer in layers for module in layer))


class Attention(torch.nn.Module):
    """Saves parts of one storage, and views of others."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.qkv, self.out = torch.nn.Linear(64, 192), torch.nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            q, k, v = (part.unflatten(-1, (4, 16)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
            scores = (q @ k.transpose(-1, -2)).softmax(-1)
            x = x + self.out((scores @ v).transpose(1, 2).reshape(x.shape))
            x = x * x.mean(0, keepdim=True).expand_as(x)
        return x


class Trained(NamedTuple):
    """A model that tests train, and the shape of its inputs: numbers, or words below 50."""

    make: Callable[[], torch.nn.Module]
    shape: tuple[int, ...]
    of_words: bool = False

    def batch(self, number: int) -> torch.Tensor:
        """Returns an input."""
        made = torch.Generator().manual_seed(number)
        return (
            torch.randint(0, 50, self.shape, generator=made)
            if self.of_words
            else torch.randn(self.shape, generator=made)
        )


MODELS = {
    "network": Trained(network, (4, 1, 30)),
    "sentences": Trained(sentences, (4, 6), True),
    "odd": Trained(Odd, (4, 6), True),
    "perceptron": Trained(perceptron, (128, 128)),
    "attention": Trained(Attention, (8, 64, 64)),
}


def backward(model: torch.nn.Module, number: int) -> None:
    first = next(model.parameters())
    x = torch.randn(4, 1, 30, generator=torch.Generator().manual_seed(number)).to(first.dtype)
    model.zero_grad()
    model(x).float().square().mean().backward()


def words(number: int) -> torch.Tensor:
    """An input of ``sentences`` and ``Odd``."""
    return MODELS["sentences"].batch(number)


def adamw(model: torch.nn.Module, folder: Path, **options: Any) -> NvmeOptimizer:
    """AdamW with its states on storage."""
    return NvmeOptimizer(model.parameters(), torch.optim.AdamW, folder, **{"memory_budget": "1M", **options})


class Twins:
    """A model with ``NvmeOptimizer``, and the same one with torch's own optimizer."""

    mine: Any
    other: Any

    def __init__(
        self, folder: Path, kind: Any = torch.optim.AdamW, *, ours: dict[str, Any] | None = None,
        models: Any = None, plain: Any = None, **options: Any,
    ) -> None:  # fmt: skip
        self.mine, self.other = models or (network(), network())
        given = {"memory_budget": "1M", **(ours or {})}
        self.ours = NvmeOptimizer(self.mine.parameters(), kind, folder, **given, **options)
        self.plain = (plain or kind)(self.other.parameters(), **options)

    def __enter__(self) -> Twins:
        return self

    def __exit__(self, *_: object) -> None:
        self.ours.close()

    def both(self) -> list[tuple[Any, Any]]:
        """Returns each model with its optimizer."""
        return [(self.mine, self.ours), (self.other, self.plain)]

    def backward(self, number: int) -> None:
        for model, _ in self.both():
            backward(model, number)

    def step(self, number: int) -> None:
        self.backward(number)
        for _, optimizer in self.both():
            optimizer.step()

    def apart(self) -> str:
        """Says what differs of parameters and states, if anything does."""
        return same(*([[elsewhere(param) for param in model.parameters()], states(its)] for model, its in self.both()))


def settled(saving: save_on_nvme) -> ActivationStats:
    """Once nothing is on its way to storage or back."""
    inside = saving._activations
    for device in inside._stored.homes._streams:  # a simulated one copies nothing that is not waited for
        torch.accelerator.synchronize(device)
    while inside._writing or inside._stored.leaving or any(entry.is_arriving() for entry in inside.present):
        saving.stats()
        time.sleep(0.001)
    return saving.stats()


def take_few_in_flight(set_attribute: Callable[[Any, str, Any], None] = setattr) -> None:
    """Has small models wait for writes of activations, as large ones do."""
    set_attribute(placement, "IN_FLIGHT", 128 * KIB)


def make_small_chunks(set_attribute: Callable[[Any, str, Any], None] = setattr) -> None:
    """Has optimizers hold states in what a budget has beyond 1 MiB."""
    set_attribute(optimizer_states, "_BUFFER", 128 * KIB)


def layers(count: int = 6) -> torch.nn.Sequential:
    """Weights of 16 KiB."""
    torch.manual_seed(1)
    return torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(count)))


def values(model: torch.nn.Module) -> list[torch.Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def states(optimizer: torch.optim.Optimizer) -> list[Any]:
    """All states, with their names, but for those that Adagrad makes before it has a gradient; then the options."""
    saved = optimizer.state_dict()
    saved["state"] = {number: entry for number, entry in saved["state"].items() if entry.get("step", 1) != 0}
    states = [part for number, entry in sorted(saved["state"].items()) for name, value in sorted(entry.items())
              for part in (f"{number} {name}", value)]  # fmt: skip
    groups = [{name: value for name, value in group.items() if name != "params"} for group in saved["param_groups"]]
    return [*states, repr(groups)]
