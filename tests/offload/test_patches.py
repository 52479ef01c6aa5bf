"""What the package replaces in torch and other packages: what docs/patches.md lists, and not after its last use."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import optimizer as torch_optimizer

from nvme_ops.offload import NvmeOptimizer, stream_weights, swap_params
from nvme_ops.offload.weights.patches import Patch
from tests.offload import models
from tests.offload.training import layers


class Victim:
    """Has a method that is replaced."""

    def method(self) -> list[str]:
        return ["own"]


def wrapped(name: str) -> Any:
    def replacement(original: Any) -> Any:
        return lambda self: [name, *original(self)]

    return replacement


def test_a_method_is_replaced_from_the_first_user_to_the_last() -> None:
    before, patch = Victim.__dict__["method"], Patch(Victim, "method", wrapped("ours"))
    first, second = patch.take(), patch.take()
    assert Victim().method() == ["ours", "own"]
    for _ in range(2):
        first()
    assert Victim().method() == ["ours", "own"]
    second()
    assert Victim.__dict__["method"] is before


def test_what_somebody_else_has_replaced_since_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    patch = Patch(Victim, "method", wrapped("ours"))
    leave = patch.take()
    theirs = wrapped("theirs")(Victim.__dict__["method"])
    monkeypatch.setattr(Victim, "method", theirs)
    for _ in range(3):
        leave()
        assert Victim.__dict__["method"] is theirs
        assert Victim().method() == ["theirs", "ours", "own"]
        leave = patch.take()
        assert Victim().method()[0] == "ours"
    leave()


def test_module_apply_is_torchs_after_the_last_streamed_model(folder: Path) -> None:
    """It stayed ours for ever."""
    before = torch.nn.Module._apply
    first, second = (stream_weights(models.layers(), folder, memory_budget="1M") for _ in range(2))
    assert torch.nn.Module._apply is not before
    first.close()
    first.close()
    with pytest.raises(RuntimeError, match="cannot be moved"):
        torch.nn.Sequential(second).double()
    second.close()
    assert torch.nn.Module._apply is before
    stream_weights(models.layers(), folder, memory_budget="1M")  # closed with its last reference
    gc.collect()
    assert torch.nn.Module._apply is before


def test_the_hook_of_all_optimizers_stays_only_while_a_replaced_parameter_does(folder: Path) -> None:
    """It stayed for ever."""
    hooks = torch_optimizer._global_optimizer_pre_hooks
    gc.collect()
    assert not hooks
    model: Any = layers(2)
    swapped = swap_params(model, folder, memory_budget="1M", min_bytes=1)
    assert not hooks, "nobody has the parameters that were replaced"
    with NvmeOptimizer(model.parameters(), torch.optim.SGD, folder, lr=1.0) as optimizer:
        swapped.restore()
        model[0].weight.sum().backward()
        with pytest.raises(RuntimeError, match="no longer its module's"):
            optimizer.step()
        assert len(hooks) == 1
    del optimizer
    gc.collect()
    assert not hooks
