"""save_on_nvme(policy="auto"): what is computed again is what was saved, whoever wrote to it before."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from nvme_ops.offload import save_on_nvme

_LIBRARY = torch.library.Library("nvme_ops_test", "DEF")
_LIBRARY.define("negate_(Tensor x) -> ()")  # writes to what it is given, and its schema does not say so


def _negate(x: torch.Tensor) -> None:
    x.numpy()[:] *= -1


_LIBRARY.impl("negate_", _negate, "CPU")


def _data(x: torch.Tensor) -> None:
    x.data.mul_(-1)


@pytest.mark.parametrize("change", [torch.ops.nvme_ops_test.negate_, _data], ids=["collective", "data"])
def test_results_that_were_written_to_without_a_version(folder: Path, change: Any) -> None:
    x = torch.randn(1 << 14, requires_grad=True)

    def loss() -> torch.Tensor:
        a = x.square() * 1
        y, z = a.detach() * 0.5, a.detach() * 0.25
        change(y)
        return a.sin().sum() + (y * x + z * x).sum()

    expected = torch.autograd.grad(loss(), x)[0]
    saving = save_on_nvme(folder, min_bytes=1, memory_budget=0, policy="auto")
    choice: Any = saving._choice
    for _ in range(3):
        with saving:
            made = loss()
        assert torch.equal(torch.autograd.grad(made, x)[0], expected)
        choice._again = frozenset(choice._seconds)  # everything that can be
    assert saving.stats().bytes_recomputed > 0


def test_threads_that_share_it(folder: Path) -> None:
    saving = save_on_nvme(folder, min_bytes=1, memory_budget="64M", policy="auto")
    failures: list[BaseException] = []
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def work() -> None:
        weight = torch.randn(16, 16, requires_grad=True)
        try:
            for _ in range(10):
                with saving:
                    loss = torch.stack([(weight * 2).sin().sum() for _ in range(100)]).sum()
                torch.autograd.grad(loss, weight)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    try:
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    finally:
        sys.setswitchinterval(interval)
    assert not failures
