"""NvmeOptimizer with parameters on a real GPU: the bits of torch's own optimizer there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nvme_ops.offload import NvmeOptimizer
from tests.gpu.support import on_a_gpu
from tests.offload.training import equal, values

pytestmark = on_a_gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": True}, {"overlap": "backward"}])
def test_the_bits_are_the_same(folder: Path, dtype: torch.dtype, options: dict[str, Any]) -> None:
    def model() -> torch.nn.Module:
        torch.manual_seed(1)
        made = torch.nn.Sequential(torch.nn.Linear(300, 700), torch.nn.GELU(), torch.nn.Linear(700, 300))
        return made.to("cuda", dtype)

    mine, other = model(), model()
    plain = torch.optim.AdamW(other.parameters(), **{key: each for key, each in options.items() if key != "overlap"})
    with NvmeOptimizer(
        mine.parameters(), torch.optim.AdamW, folder, memory_budget="1M", master_weights=False, **options
    ) as optimizer:
        for step in range(5):
            x = torch.randn(8, 300, generator=torch.Generator().manual_seed(step)).to("cuda", dtype)
            for module, each in ((mine, optimizer), (other, plain)):
                each.zero_grad()
                module(x).square().mean().backward()
                each.step()
        assert equal(values(mine), values(other))
