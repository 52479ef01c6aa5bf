"""save_on_nvme with activations on a real GPU: the bits of gradients without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nvme_ops.offload import save_on_nvme
from tests.gpu.support import on_a_gpu
from tests.offload.saving import MODELS, gradients, same

pytestmark = on_a_gpu


@pytest.mark.parametrize("policy", ["nvme", "auto"])
@pytest.mark.parametrize("budget", [0, "64M"])
@pytest.mark.parametrize("name", ["perceptron", "attention"])
def test_gradients_have_the_same_bits(folder: Path, name: str, budget: Any, policy: Any) -> None:
    make, shape = MODELS[name]
    model, x = make().to("cuda"), torch.randn(shape, device="cuda")
    expected = gradients(model, x)
    saving = save_on_nvme(folder, min_bytes=1, memory_budget=budget, policy=policy)
    for _ in range(4):
        assert same(gradients(model, x, saving), expected)
    assert saving.stats().bytes_saved > 0
