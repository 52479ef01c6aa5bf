"""What a program changes between the steps of an NvmeOptimizer: parameters, layouts, groups, states."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import nvme_ops
from nvme_ops.offload import NvmeOptimizer, swap_params
from nvme_ops.offload.optimizer.states import MASTER
from tests.offload.elsewhere import same as differ
from tests.offload.elsewhere import values as values_of
from tests.offload.training import backward, network, values

LOW = torch.bfloat16


# Parameters


def _load(model: torch.nn.Module, folder: Path) -> None:
    nvme_ops.save({name: each * 2 for name, each in model.state_dict().items()}, folder / "twice.safetensors")
    nvme_ops.load(folder / "twice.safetensors", into=model)


def _replace(model: torch.nn.Module, _: Path) -> None:
    for each in model.parameters():
        each.data = (each.detach() * 0.3).clone()


@torch.no_grad()
def _prune(model: torch.nn.Module, _: Path) -> None:
    for each in model.parameters():
        each.mul_(values_of(each).abs() > 0.05)


EDITS: dict[str, Callable[[torch.nn.Module, Path], Any]] = {
    "clamp_": lambda model, _: [each.detach().clamp_(-0.1, 0.1) for each in model.parameters()],
    "load_state_dict": lambda model, _: model.load_state_dict({k: v * 3 for k, v in model.state_dict().items()}),
    "mask": _prune,
    "data = t": _replace,
    "data.mul_": lambda model, _: [each.data.mul_(-0.5) for each in model.parameters()],
    "nan": lambda model, _: [each.detach()[..., 0].fill_(torch.nan) for each in model.parameters()],
    "load(into=)": _load,
}


@pytest.mark.parametrize(
    ("edit", "dtype", "swapped"),
    [
        *((edit, LOW, False) for edit in EDITS),
        ("mask", torch.float16, False),
        ("mask", LOW, True),
        ("load(into=)", LOW, True),
    ],
)
def test_float32_masters_follow_what_the_program_does_to_parameters(
    folder: Path, edit: str, dtype: torch.dtype, swapped: bool
) -> None:
    """Elements that it has not changed keep the precision of their float32 copy."""
    mine, other = network(dtype), network(dtype)
    masters = [each.detach().float().requires_grad_() for each in other.parameters()]
    plain = torch.optim.AdamW(masters, lr=0.001)
    if swapped:
        swap_params(mine, folder, memory_budget="2M", min_bytes=1)
    with NvmeOptimizer(mine.parameters(), torch.optim.AdamW, folder, memory_budget="1M", lr=0.001) as optimizer:
        for step in range(4):
            for model in (mine, other):
                if step == 2:
                    EDITS[edit](model, folder)
                backward(model, step)
            optimizer.step()
            with torch.no_grad():
                for master, parameter in zip(masters, other.parameters(), strict=True):
                    changed = parameter != master.to(dtype)
                    master[changed] = parameter[changed].float()
                    master.grad = None if parameter.grad is None else parameter.grad.float()
                plain.step()
                for master, parameter in zip(masters, other.parameters(), strict=True):
                    if master.grad is not None:
                        parameter.copy_(master)
        assert differ([values_of(each) for each in mine.parameters()], values(other)) == ""
        found = optimizer.state_dict()["state"]
        assert (
            differ([states[MASTER] for states in found.values()], [masters[number].detach() for number in found]) == ""
        )
