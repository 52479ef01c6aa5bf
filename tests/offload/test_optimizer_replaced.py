"""An optimizer whose parameters were replaced says so, rather than training those that are left."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nvme_ops.offload import NvmeOptimizer, swap_params
from tests.offload.training import backward, network, values

Make = Callable[[torch.nn.Module, Path], torch.optim.Optimizer]
MAKERS: dict[str, Make] = {
    "SGD": lambda model, _: torch.optim.SGD(model.parameters(), lr=0.1),
    "Adafactor": lambda model, _: torch.optim.Adafactor(model.parameters()),
    "NvmeOptimizer": lambda model, folder: NvmeOptimizer(model.parameters(), torch.optim.SGD, folder),
}


def swapped(model: torch.nn.Module, folder: Path, **options: Any) -> Any:
    return swap_params(model, folder, memory_budget="4M", min_bytes="4K", **options)


@pytest.mark.parametrize("name", MAKERS)
def test_made_before_swap_params(folder: Path, name: str) -> None:
    model = network()
    optimizer = MAKERS[name](model, folder)
    with swapped(model, folder):
        before = values(model)
        backward(model, 0)
        with pytest.raises(RuntimeError, match="Make the optimizer after swap_params"):
            optimizer.step()
        assert all(map(torch.equal, before, values(model)))
        MAKERS[name](model, folder).step()


@pytest.mark.parametrize("name", MAKERS)
def test_made_before_restore(folder: Path, name: str) -> None:
    model = network()
    swap = swapped(model, folder)
    optimizer = MAKERS[name](model, folder)
    backward(model, 0)
    optimizer.step()
    swap.restore()
    backward(model, 1)
    with pytest.raises(RuntimeError, match=r"anew after restore\(\)"):
        optimizer.step()
    MAKERS[name](model, folder).step()


def test_made_of_parameters_on_the_meta_device(folder: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(100, 100), torch.nn.Linear(100, 2)).to("meta")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with swapped(model, folder):
        model(torch.ones(1, 100)).sum().backward()
        with pytest.raises(RuntimeError, match="Make the optimizer after swap_params"):
            optimizer.step()


def test_a_scheduler_and_a_scaler_see_it_too(folder: Path) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # which wraps step
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    with swapped(model, folder):
        scaler.scale(torch.zeros(1))
        backward(model, 0)
        with pytest.raises(RuntimeError, match="Make the optimizer after swap_params"):
            scaler.step(optimizer)


def test_other_optimizers_go_on(folder: Path) -> None:
    """Of another model, of a copy that was made before, and of parameters that are not trained."""
    model, other = network(), network()
    duplicate = copy.deepcopy(model)
    frozen = torch.nn.Linear(100, 100).requires_grad_(False)
    both = torch.optim.SGD([*frozen.parameters(), *other.parameters()], lr=0.1)
    beside = torch.optim.SGD(duplicate.parameters(), lr=0.1)
    with swapped(model, folder), swapped(frozen, folder):
        for each, optimizer in ((other, both), (duplicate, beside)):
            before = values(each)
            backward(each, 0)
            optimizer.step()
            assert not torch.equal(before[2], values(each)[2])
