"""Weights of an accelerator that stay in host memory: what is read, copied and kept, and what happens on the way."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from nvme_ops import FormatError
from nvme_ops.memory import tier
from nvme_ops.offload import from_pretrained, stream_weights
from tests.conftest import KIB, MIB, in_child, in_threads
from tests.device.kinds import Simulated, on_a_gpu, on_simulated
from tests.offload.llama import saved_llama
from tests.offload.models import Tied, layers, nbytes

DEVICE_BUDGET = MIB + 200 * KIB  # of 8 MiB: four layers, of which some pass through
HOST_BUDGETS = [0, 2 * MIB + 300 * KIB, 64 * MIB]


def opened(device: Simulated, folder: Path, host_budget: int | str, model: Any = None, **options: Any) -> Any:
    """A streamed model; no gradient is computed."""
    model = (layers(32) if model is None else model).requires_grad_(False)
    options = {"device_budget": DEVICE_BUDGET, "host_budget": host_budget, "handle": device.handle()} | options
    return stream_weights(model, folder, device=device.device(), **options)


def inputs(device: Simulated) -> torch.Tensor:
    return device.tensor(torch.linspace(-1, 1, 256).repeat(2, 1))


@on_simulated
@pytest.mark.parametrize("host_budget", HOST_BUDGETS)
@pytest.mark.parametrize("seeds", [4, pytest.param(100, marks=pytest.mark.nightly)])
def test_results_are_right_in_any_order_of_work(device: Simulated, folder: Path, host_budget: int, seeds: int) -> None:
    model = layers(32).requires_grad_(False)
    wanted = copy.deepcopy(model)(inputs(device).cpu())
    with device.computing(), opened(device, folder, host_budget, model) as streamed:
        for seed in range(seeds):
            with device.in_random_order(seed), device.on() as stream:
                outputs = [streamed(inputs(device)) for _ in range(3)]
                device.synchronize(stream)
            assert all(torch.equal(output.cpu(), wanted) for output in outputs), seed
        del outputs


@on_simulated
def test_each_weight_is_in_one_memory_within_its_budget(device: Simulated, folder: Path) -> None:
    for host_budget in HOST_BUDGETS:
        with device.computing(), opened(device, folder, host_budget) as streamed:
            for _ in range(4):
                streamed(inputs(device))
            before = streamed.stats()
            streamed(inputs(device))
            stats = streamed.stats()
        read, copied = stats.bytes_read - before.bytes_read, stats.bytes_from_host - before.bytes_from_host
        assert stats.peak_bytes <= DEVICE_BUDGET
        assert stats.bytes_in_host <= host_budget
        assert host_budget - stats.bytes_in_host < 256 * KIB or read == 0, "and it is used"
        weights = 32 * 256 * KIB
        assert stats.bytes_kept + copied + read == pytest.approx(weights, rel=0.05)
        assert copied == pytest.approx(stats.bytes_in_host, abs=8 * KIB)


@on_simulated
def test_a_model_closed_while_copies_are_queued(device: Simulated, folder: Path) -> None:
    """What the accelerator has not done yet uses memory of both; ``device`` sees whether it is freed too early."""
    with device.computing(), opened(device, folder, 64 * MIB) as streamed:
        for _ in range(2):
            streamed(inputs(device))


@on_simulated
@pytest.mark.parametrize("what", ["queue", "record"])
def test_a_copy_that_fails_is_an_error_of_its_step_alone(device: Simulated, folder: Path, what: str) -> None:
    model = layers(32).requires_grad_(False)
    wanted = copy.deepcopy(model)(inputs(device).cpu())
    with device.computing(), opened(device, folder, 64 * MIB, model) as streamed:
        streamed(inputs(device))
        given = inputs(device)
        with device.failing(what), pytest.raises(RuntimeError, match="refused by the private device"):
            streamed(given)
        device.now.events -= what == "record"  # which torch never frees
        assert torch.equal(streamed(given).cpu(), wanted)


@on_simulated
def test_a_file_cut_before_its_bytes_are_in_host_memory(device: Simulated, folder: Path) -> None:
    path = saved_llama(folder)
    tokens = device.tensor(torch.arange(3, 9)[None])
    with (
        device.computing(),
        from_pretrained(path, device=device.device(), device_budget="2200K", host_budget="64M") as model,
    ):
        os.truncate(path / "model.safetensors", 4096)
        with pytest.raises(FormatError, match=r"model\.safetensors"):
            model(tokens)


@on_simulated
def test_threads_share_the_copies(device: Simulated, folder: Path) -> None:
    model = layers(32).requires_grad_(False)
    wanted = copy.deepcopy(model)(inputs(device).cpu())
    with device.computing(), opened(device, folder, 2 * MIB, model) as streamed:

        def run(_: int) -> None:
            for _ in range(3):
                assert torch.equal(streamed(inputs(device)).cpu(), wanted)

        in_threads(run, 3)


@on_simulated
def test_a_machine_whose_memory_others_fill(device: Simulated, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is there stays and is used; the rest is read as if there were no more, ahead of its use."""
    model, free = layers(32).requires_grad_(False), iter(range(8 * MIB, 0, -512 * KIB))
    wanted = copy.deepcopy(model)(inputs(device).cpu())
    monkeypatch.setattr(tier, "free_memory", lambda: next(free, 0))
    with device.computing(), opened(device, folder, 64 * MIB, model) as streamed:
        with pytest.warns(RuntimeWarning, match="others use the host's memory"):
            streamed(inputs(device))
        for _ in range(3):
            before = streamed.stats()
            assert torch.equal(streamed(inputs(device)).cpu(), wanted)
        stats = streamed.stats()
        assert stats.bytes_read > before.bytes_read
        assert stats.bytes_from_host > before.bytes_from_host
        assert stats.bytes_on_demand - before.bytes_on_demand < MIB


@on_simulated
def test_a_forked_child_is_refused_and_its_parent_goes_on(device: Simulated, folder: Path) -> None:
    model = layers(32).requires_grad_(False)
    wanted = copy.deepcopy(model)(inputs(device).cpu())
    with device.computing(), opened(device, folder, 64 * MIB, model) as streamed:
        given = inputs(device)
        streamed(given)

        def use() -> None:
            with pytest.raises(RuntimeError, match="parent process"):
                streamed(given)

        in_child(use)
        assert torch.equal(streamed(given).cpu(), wanted)


@on_simulated
def test_tied_and_small_weights_have_no_copies(device: Simulated, folder: Path) -> None:
    model, tokens = Tied().eval().requires_grad_(False), torch.tensor([[1, 2, 2], [5, 1, 3]])
    wanted, wanted_rows = copy.deepcopy(model)(tokens), model.embedding(tokens)
    with device.computing(), opened(device, folder, "64M", model, device_budget="1200K") as streamed:
        for _ in range(3):
            assert torch.equal(streamed(device.tensor(tokens)).cpu(), wanted)
        assert streamed.stats().bytes_in_host < nbytes(model)
        for _ in range(2):  # the second time the weight of the head is on its way from host memory
            rows = streamed.embedding(device.tensor(tokens))
            assert torch.equal(rows.cpu(), wanted_rows)
            streamed.body(rows)


@pytest.mark.parametrize("host_budget", [pytest.param(budget, marks=on_a_gpu) for budget in HOST_BUDGETS])
def test_on_a_gpu(folder: Path, host_budget: int) -> None:
    model, given = layers(32).requires_grad_(False).to("cuda"), torch.randn(2, 256, device="cuda")
    wanted = copy.deepcopy(model)(given)
    with stream_weights(model, folder, device_budget=DEVICE_BUDGET, host_budget=host_budget) as streamed:
        outputs = [streamed(given) for _ in range(20)]
        before = streamed.stats()
        outputs += [streamed(given) for _ in range(20)]
        stats = streamed.stats()
    assert all(torch.equal(output, wanted) for output in outputs)
    assert stats.peak_bytes <= DEVICE_BUDGET
    assert stats.bytes_in_host <= host_budget
    assert (stats.bytes_read == before.bytes_read) == (host_budget == HOST_BUDGETS[-1])


@on_simulated
def test_an_accelerator_that_waits_for_copies_says_how_long(device: Simulated, folder: Path) -> None:
    def body() -> None:
        with device.computing(), opened(device, folder, 64 * MIB) as streamed:
            outputs = [streamed(inputs(device)) for _ in range(2)]
            before = streamed.stats()
            with device.in_time(to_device=10 * MIB):
                outputs.append(streamed(inputs(device)))
            after = streamed.stats()
            assert torch.equal(outputs[2].cpu(), outputs[0].cpu())
        assert after.seconds_waited_for_host > before.seconds_waited_for_host

    in_child(body)
