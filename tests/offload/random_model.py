"""What random programs are made of: a model, the names that statements know, and expressions of tensors."""

from __future__ import annotations

import copy
import functools
import io
import pickle
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

Namespace = dict[str, Any]


@dataclass
class Statement:
    """A part of a program.

    ``kind`` says what an exception leaves behind: ``read`` and ``write``: nothing. ``lists``: nothing, unless
    memory is lacking. ``backward``: parts of gradients. ``many``: what nobody knows; the program ends.
    """

    code: str
    kind: str = "read"


# What programs are made of: names that their statements use


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def values(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The same values for the same seed."""
    if dtype.is_floating_point or dtype.is_complex:
        made = torch.randn(shape, generator=_generator(seed), dtype=torch.cfloat if dtype.is_complex else torch.float)
        return made.to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 100, shape, generator=_generator(seed)).to(dtype)


def indices(seed: int, bound: int, *shape: int) -> torch.Tensor:
    """Numbers below a bound."""
    return torch.randint(0, bound, shape, generator=_generator(seed))


def scalar(*tensors: torch.Tensor | None) -> torch.Tensor:
    """Returns what can be called a loss."""
    given = [tensor for tensor in tensors if tensor is not None]
    sums = [(part.abs() if part.is_complex() else part).float().square().mean() for part in given if part.numel()]
    return torch.stack(sums).sum() if sums else torch.zeros(())


def in_threads(work: Callable[[int], Any], count: int) -> list[Any]:
    """Calls in several threads at once; results in the order of numbers."""
    with ThreadPoolExecutor(count) as pool:
        return [future.result() for future in [pool.submit(work, number) for number in range(count)]]


class HookError(Exception):
    """What hooks of programs raise."""


def failing(*_: Any) -> Any:
    """A hook that fails."""
    raise HookError("a hook")


def through_file(value: Any) -> Any:
    """Saves and loads."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    return loaded.contiguous() if isinstance(loaded, torch.Tensor) else loaded  # what has gaps may come without them


class Model(nn.Module):
    """A dozen of parameters of all kinds, some tied, some frozen."""

    def __init__(self, seed: int, without: Sequence[str] = ()) -> None:
        super().__init__()
        rng = random.Random(seed)
        torch.default_generator.manual_seed(seed)
        self.rows = rng.choice([33, 64, 120])
        self.emb = nn.Embedding(self.rows, 32)
        self.up, self.down = nn.Linear(32, 48), nn.Linear(48, 32, bias=rng.random() < 0.5)
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, self.rows, bias=False)
        if rng.random() < 0.6:
            self.head.weight = self.emb.weight
        if rng.random() < 0.3:
            self.to(rng.choice([torch.bfloat16, torch.float64]))
        others: dict[str, Callable[[], torch.Tensor]] = {
            "half": lambda: values(seed, 24, 40).bfloat16(),
            "double": lambda: values(seed, 20, 24).double(),
            "complex": lambda: values(seed, 12, 20, dtype=torch.complex64),
            "cube": lambda: values(seed, 4, 12, 16),
            "turned": lambda: values(seed, 24, 50).t(),
            "vector": lambda: values(seed, 1500),
            "one": lambda: values(seed),
            "kernel": lambda: values(seed, 8, 4, 3, 3),
        }
        for name in rng.sample(sorted(others.keys() - set(without)), 3):
            self.register_parameter("w_" + name, nn.Parameter(others[name](), rng.random() < 0.85))
        self.register_buffer("buffer", values(seed, 16, 32))
        for param in self.parameters():
            if rng.random() < 0.08:
                param.requires_grad_(False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.emb(words)
        x = x + self.down(functional.gelu(self.up(x)))
        return torch.as_tensor(self.head(self.norm(x)))


def namespace(model: nn.Module, see: Callable[..., None], saving: Any) -> Namespace:
    """Returns the names that statements know."""
    return {
        "torch": torch, "F": functional, "nn": nn, "copy": copy, "pickle": pickle, "checkpoint": checkpoint, "m": model,
        "T": values, "I": indices, "S": scalar, "G": _generator, "see": see, "saving": saving,
        "in_threads": in_threads, "failing": failing, "through_file": through_file,
        "amp": functools.partial(torch.autocast, "cpu", torch.bfloat16),
    }  # fmt: skip
