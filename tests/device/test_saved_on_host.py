"""What autograd saves on an accelerator, and states of its optimizer, in host memory.

Autograd knows the devices that are there when it begins: each test has a process of its own.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch

from nvme_ops.offload import save_on_nvme
from tests.conftest import run_python
from tests.device.kinds import on_a_gpu
from tests.device.saved_on_host import gradient_of, network, step_on, train_in_one_memory
from tests.offload.training import make_small_chunks

SAVING = "import sys; from tests.device import saved_on_host; getattr(saved_on_host, sys.argv[1])(*sys.argv[2:])"


@pytest.mark.parametrize("host_budget", ["0", "1200K", "64M"])
@pytest.mark.parametrize("seeds", [3, pytest.param(100, marks=pytest.mark.nightly)])
def test_gradients_are_right_in_any_order_of_work(folder: Path, host_budget: str, seeds: int) -> None:
    run_python(SAVING, "gradients", folder, host_budget, seeds)


@pytest.mark.parametrize(
    "what",
    [
        ["dropped"],
        ["evicted"],
        ["without_memory", "1200K"],
        ["step_without_memory", "0"],
        ["step_without_memory", "0", "backward"],
        ["backward_without_memory"],
    ],
    ids=" ".join,
)
def test_what_goes_while_copies_are_queued_or_finds_no_memory(folder: Path, what: list[str]) -> None:
    run_python(SAVING, what[0], folder, *what[1:])


@pytest.mark.parametrize("seeds", [3, pytest.param(100, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("what", ["stepped", "shared"])
def test_states_are_right_in_any_order_of_work(folder: Path, what: str, seeds: int) -> None:
    run_python(SAVING, what, folder, seeds)


def test_optimizers_in_one_memory_step_as_alone(folder: Path) -> None:
    run_python(SAVING, "beside", folder)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_a_gpu)])
def test_states_on_a_gpu(folder: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make_small_chunks(monkeypatch.setattr)
    step_on(torch.device(device), str(folder))
    train_in_one_memory(torch.device(device), str(folder))


@pytest.mark.parametrize("host_budget", [pytest.param(budget, marks=on_a_gpu) for budget in ("0", "1200K", "64M")])
def test_gradients_on_a_gpu(folder: Path, host_budget: str) -> None:
    model, given = network().to("cuda"), torch.randn(256, 256, device="cuda")
    model(given).sum().backward()
    wanted = [gradient_of(param) for param in model.parameters()]
    with contextlib.closing(
        save_on_nvme(folder, device_budget="1M", host_budget=host_budget, min_bytes="64K")
    ) as saving:
        for _ in range(20):
            model.zero_grad()
            with saving:
                loss = model(given).sum()
            loss.backward()
            assert all(map(torch.equal, map(gradient_of, model.parameters()), wanted))
        stats = saving.stats()
    assert (stats.bytes_written == 0) == (host_budget == "64M")
    assert (stats.bytes_from_host > 0) == (host_budget != "0")
