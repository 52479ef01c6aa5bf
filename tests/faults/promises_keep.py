"""What ``NvmeOptimizer(reuse=True)`` promises for a power failure: a program that trains, and a check of what is left.

``write`` tells a line when a promise is made, once that is flushed:

    step N      N steps are done: a power failure may cost the newest, and no more
    closed N    the optimizer was closed after N steps: none may be lost
    saved N     ``save_states`` has returned: the file has the states of step N

``check`` returns ``fine``, or ``lost`` or ``mixed`` and what was found. It takes the machine to have been started
since, though no rig does that.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import torch

from nvme_ops.offload import NvmeOptimizer

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


def backward(given: Iterable[torch.Tensor], step: int) -> None:
    """Gives gradients that differ from step to step, and do not depend on the parameters."""
    for each in given:
        (each.sum() * (0.1 * (step % 7) - 0.25)).backward()


def made(given: Iterable[torch.Tensor], folder: str, **options: Any) -> NvmeOptimizer:
    """Returns the optimizer, whose chunks are several for each large parameter."""
    return NvmeOptimizer(
        given, torch.optim.AdamW, os.path.join(folder, "states"), memory_budget="1M", reuse=True, lr=0.1, **options
    )


def write(folder: str, promise: Callable[[str], object], option: str = "plain") -> None:
    """Trains, and calls ``promise`` with each line."""
    os.makedirs(os.path.join(folder, "states"), exist_ok=True)
    given = parameters()
    optimizer = made(given, folder, **OPTIONS[option])
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(given, step)
        optimizer.step()
        promise(f"step {step + 1}")
        if step % 7 == 5:
            optimizer.save_states(os.path.join(folder, _SAVED))
            promise(f"saved {step + 1}")
        if step % 9 == 8:
            optimizer.close()
            promise(f"closed {step + 1}")
            optimizer = made(given, folder, **OPTIONS[option])
    optimizer.close()
    promise(f"closed {STEPS}")


def check(folder: str, promised: Iterable[str], option: str = "plain") -> str:
    with mock.patch("nvme_ops.offload.optimizer.records.boot_id", return_value="started since"):
        return _checked(folder, promised, option)


def _checked(folder: str, promised: Iterable[str], option: str) -> str:
    least, saved = 0, 0
    for kind, number in (line.split() for line in promised):
        if kind == "saved":
            saved = int(number)
        else:
            least = max(least, int(number) - (kind == "step"))
    if not os.path.isdir(os.path.join(folder, "states")):
        return "fine" if not least else f"lost: no folder, {least} steps promised"
    given = parameters()
    with made(given, folder, **OPTIONS[option]) as optimizer:
        if optimizer.steps < least:
            return f"lost: {optimizer.steps} steps of {least}"
        found = _judged(optimizer)
        path = os.path.join(folder, _SAVED)
        if found == "fine" and (saved or os.path.exists(path)):
            if not os.path.exists(path):
                return f"lost: the file of step {saved}"
            optimizer.load_states(path)
            found = f"lost: {optimizer.steps}, saved {saved}" if optimizer.steps < saved else _judged(optimizer)
        if found == "fine":  # it goes on from there
            for step in range(optimizer.steps, optimizer.steps + 2):
                optimizer.zero_grad()
                backward(given, step)
                optimizer.step()
            found = _judged(optimizer)
    return found


def _judged(optimizer: NvmeOptimizer) -> str:
    """Compares all states with those of as many steps of torch's own optimizer."""
    expected = parameters()
    plain = torch.optim.AdamW(expected, lr=0.1)
    for step in range(optimizer.steps):
        plain.zero_grad()
        backward(expected, step)
        plain.step()
    mine, others = optimizer.state_dict()["state"], plain.state_dict()["state"]
    same = mine.keys() == others.keys() and all(
        torch.equal(mine[number][name], value) for number, states in others.items() for name, value in states.items()
    )
    return "fine" if same else f"mixed: states under the number of step {optimizer.steps}"
