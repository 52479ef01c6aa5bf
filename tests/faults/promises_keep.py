"""What ``NvmeOptimizer(reuse=True)`` promises for a power failure: a program that trains, and a check of what is left.

``write`` tells when a promise is made, once that is flushed:

    ("step", N)      N steps are done: a power failure may cost the newest, and no more
    ("closed", N)    the optimizer was closed after N steps: none may be lost
    ("saved", N)     ``save_states`` has returned: the file has the states of step N

``check`` takes the machine to have been started since, though no rig does that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from nvme_ops.offload import NvmeOptimizer
from tests.contract.adapters import require

STEPS = 24
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "checksum": {"checksums": True},
    "backward": {"overlap": "backward", "free_gradients": True},
}
_SIZES = ((700, 300), (300,), (3, 50_000), (7,))
_SAVED = "saved.safetensors"


def parameters() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.nn.Parameter(torch.randn(size, generator=generator)) for size in _SIZES]


def trained(given: Iterable[torch.Tensor], optimizer: Any, *steps: int) -> None:
    """Takes steps, with gradients that differ from step to step, and do not depend on the parameters."""
    for step in steps:
        optimizer.zero_grad()
        for tensor in given:
            (tensor.sum() * (0.1 * (step % 7) - 0.25)).backward()
        optimizer.step()


def made(given: Iterable[torch.Tensor], folder: Path, **options: Any) -> NvmeOptimizer:
    """Returns the optimizer, whose chunks are several for each large parameter."""
    return NvmeOptimizer(given, torch.optim.AdamW, folder / "states", memory_budget="1M", reuse=True, lr=0.1, **options)


def write(folder: Path, tell: Callable[[tuple[str, int]], object], option: str = "plain") -> None:
    """Trains, and tells each promise."""
    (folder / "states").mkdir(parents=True, exist_ok=True)
    given = parameters()
    for begin in range(0, STEPS, 9):
        end = min(begin + 9, STEPS)
        with made(given, folder, **OPTIONS[option]) as optimizer:
            for step in range(begin, end):
                trained(given, optimizer, step)
                tell(("step", step + 1))
                if step % 7 == 5:
                    optimizer.save_states(folder / _SAVED)
                    tell(("saved", step + 1))
        tell(("closed", end))


@mock.patch("nvme_ops.offload.optimizer.records.boot_id", functools.partial(str, "started since"))
def check(folder: Path, told: Sequence[tuple[str, int]], option: str = "plain") -> None:
    saved = max((number for what, number in told if what == "saved"), default=0)
    least = max((number - (what == "step") for what, number in told if what != "saved"), default=0)
    if not least and not (folder / "states").is_dir():
        return
    given = parameters()
    with made(given, folder, **OPTIONS[option]) as optimizer:
        _judge(optimizer, least)
        if saved or (folder / _SAVED).exists():
            optimizer.load_states(folder / _SAVED)
            _judge(optimizer, saved)
        trained(given, optimizer, optimizer.steps, optimizer.steps + 1)  # it goes on from there
        _judge(optimizer, 0)


def _judge(optimizer: NvmeOptimizer, least: int) -> None:
    """Compares all states with those of as many steps of torch's own optimizer."""
    require(optimizer.steps >= least, f"{optimizer.steps} steps of {least}")
    expected = parameters()
    plain = torch.optim.AdamW(expected, lr=0.1)
    trained(expected, plain, *range(optimizer.steps))
    mine, others = optimizer.state_dict()["state"], plain.state_dict()["state"]
    same = mine.keys() == others.keys() and all(
        torch.equal(mine[number][name], value) for number, states in others.items() for name, value in states.items()
    )
    require(same, f"other states than those of step {optimizer.steps}")
