"""Random programs with an NvmeOptimizer and with the class of torch that it is given: the same bits all the time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nvme_ops.offload import NvmeOptimizer
from tests.conftest import run_python
from tests.offload.random_optimizers import OPTIMIZERS, made, run, same


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("seed", range(len(OPTIMIZERS)))
def test_whatever_a_program_does_it_has_the_bits_of_torch(folder: Path, seed: int) -> None:
    assert run(seed, folder, small=False) == ""


PROGRAM = """
    import sys, warnings
    from tests.offload.random_optimizers import run_many
    warnings.simplefilter("ignore")
    failures = run_many(range(1000, 1000 + int(sys.argv[1])))
    assert not failures, "\\n".join(failures[:3])
"""


@pytest.mark.parametrize("count", [40, pytest.param(300, marks=pytest.mark.nightly)])
def test_many_small_ones_do_too(count: int) -> None:
    run_python(PROGRAM, count)


def test_a_gradient_that_comes_later_than_others_in_the_backward_pass(folder: Path) -> None:
    """While one has no momentum buffer, torch's foreach rounds the others' otherwise."""
    mine, other = made(torch.bfloat16), made(torch.bfloat16)
    options: dict[str, Any] = {"lr": 0.01, "momentum": 0.9, "foreach": True}
    plain = torch.optim.SGD(other, **options)
    ours: dict[str, Any] = {"memory_budget": "1M", "master_weights": False, "overlap": "backward"}
    with NvmeOptimizer(mine, torch.optim.SGD, folder, **ours, **options) as optimizer:
        for step in range(4):
            for params, its_optimizer in ((mine, optimizer), (other, plain)):
                generator = torch.Generator().manual_seed(step)
                for parameter in params:
                    parameter.grad = None
                used = params if step > 1 else params[:2]
                weights = [torch.randn(one.shape, generator=generator).to(one.dtype) for one in used]
                torch.autograd.backward(used, weights)
                its_optimizer.step()
            assert same(optimizer, plain) == "", step
