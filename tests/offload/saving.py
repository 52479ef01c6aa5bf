"""What the tests of save_on_nvme share: gradients, and what becomes of saved tensors."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from nvme_ops.offload import ActivationStats, save_on_nvme
from nvme_ops.offload.activations import activations
from tests.offload.training import KIB


def take_few_in_flight(set_attribute: Callable[[Any, str, Any], None]) -> None:
    """Has small models wait for writes, as large ones do."""
    set_attribute(activations, "IN_FLIGHT", 128 * KIB)


@pytest.fixture(autouse=True)
def few_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for the tests of modules that import it."""
    take_few_in_flight(monkeypatch.setattr)


def gradients(model: torch.nn.Module, x: torch.Tensor, saving: Any = None) -> list[torch.Tensor]:
    """Of one step, those of the input first."""
    torch.manual_seed(5)  # of dropout
    x = x.clone().requires_grad_()
    for param in model.parameters():
        param.grad = None
    if saving is None:
        loss = model(x).square().sum()
    else:
        with saving:
            loss = model(x).square().sum()
    loss.backward()
    return [tensor.grad.clone() for tensor in (x, *model.parameters()) if tensor.grad is not None]


def settled(saving: save_on_nvme) -> ActivationStats:
    """Once nothing is on its way to storage or back."""
    inside = saving._activations
    while inside._writing or inside._stored.leaving or any(entry.is_arriving() for entry in inside.present):
        saving.stats()
        time.sleep(0.001)
    return saving.stats()
