"""Swapped parameters of an accelerator in host memory; trainings are in tests/offload/test_parity.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nvme_ops.offload import Memory, stream_weights, swap_params
from tests.conftest import KIB, MIB, in_child, in_threads
from tests.device.kinds import Simulated, on_simulated
from tests.offload.models import layers, nbytes

COUNT = 12  # layers of 256 KiB, of which four fit on the device


def swapped(device: Simulated, folder: Path, host_budget: int | str | None, **options: Any) -> tuple[Any, Any]:
    model = layers(COUNT).requires_grad_(False).to(device.device())
    usual: Any = {"device_budget": MIB + 64 * KIB, "handle": device.handle(), "min_bytes": "64K"}
    return model, swap_params(model, folder, host_budget=host_budget, **usual | options)


def doubled(model: Any) -> None:
    """Changes each layer, as an optimizer does."""
    for layer in model:
        layer.weight.mul_(2)


@on_simulated
@torch.no_grad()
@pytest.mark.parametrize("host_budget", [0, MIB, 64 * MIB])
def test_values_are_right_in_any_order_of_work(device: Simulated, folder: Path, host_budget: int) -> None:
    given = torch.linspace(-1, 1, 256).repeat(2, 1)
    for seed in range(6):
        with device.computing(), device.in_random_order(seed), device.on() as stream:
            torch.manual_seed(seed)
            usual = layers(COUNT).requires_grad_(False)
            torch.manual_seed(seed)
            model, params = swapped(device, folder, host_budget)
            for _ in range(3):
                output = model(device.tensor(given))
                device.synchronize(stream)
                assert torch.equal(output.cpu(), usual(given)), seed
                doubled(model)
                doubled(usual)
            stats = params.stats()
            params.close()
            del model, params, output
        if host_budget == 64 * MIB:  # the one that stays on the device was moved once, and has no room in host memory
            assert stats.bytes_written == stats.bytes_read == 256 * KIB
            assert stats.bytes_in_host == (COUNT - 1) * 256 * KIB
        assert (stats.bytes_from_host > 0) == (host_budget > 0)
        assert stats.bytes_in_host <= host_budget
        assert stats.peak_bytes <= MIB + 64 * KIB


@on_simulated
@torch.no_grad()
@pytest.mark.parametrize("what", ["queue", "record"])
def test_a_copy_that_fails_loses_nothing(device: Simulated, folder: Path, what: str) -> None:
    events = device.now.events
    with device.computing():
        model, params = swapped(device, folder, "64M")
        wanted = [layer.weight.cpu() for layer in model]
        failed = 0
        for number in range(12):
            try:
                with device.failing(what, skipped=number):
                    doubled(model)
                    torch.accelerator.synchronize(device.device())
            except RuntimeError:
                failed += 1
            device.synchronize()
        assert failed
        for layer, before in zip(model, wanted, strict=True):  # each was doubled as often as it was not refused
            factor = (layer.weight.cpu().norm() / before.norm()).log2().round().exp2()
            assert torch.equal(layer.weight.cpu(), before * factor)
            assert 1 <= factor <= 2**12
        params.close()
    if what == "record":
        device.now.events = events


@on_simulated
@torch.no_grad()
def test_what_is_dropped_while_its_copies_are_queued(device: Simulated, folder: Path) -> None:
    """``device`` sees whether memory is freed too early."""
    with device.computing():
        model, params = swapped(device, folder, "64M")
        model(device.tensor(torch.ones(2, 256)))
        doubled(model)
        before = params.stats().bytes_in_host
        for number in range(COUNT):
            model[number].weight = torch.nn.Parameter(torch.ones(256, 256, device=device.device()), False)
        model(device.tensor(torch.ones(2, 256)))
        params._residents._free_gone()
        assert params.stats().bytes_in_host == 0 < before
        params.close()


@on_simulated
@torch.no_grad()
def test_what_fits_on_the_device_is_not_in_host_memory(device: Simulated, folder: Path) -> None:
    with device.computing():
        model, params = swapped(device, folder, "64M", device_budget="8M")
        model(device.tensor(torch.ones(2, 256)))
        assert params.stats().bytes_in_host == 0
        params.restore()
        assert nbytes(model) > 0


@on_simulated
@torch.no_grad()
def test_threads_and_a_forked_child(device: Simulated, folder: Path) -> None:
    with device.computing():
        model, params = swapped(device, folder, MIB)
        given = device.tensor(torch.ones(2, 256))
        wanted = model(given).cpu()

        def run(_: int) -> None:
            for _ in range(3):
                assert torch.equal(model(given).cpu(), wanted)

        in_threads(run, 3)

        def use() -> None:
            with pytest.raises(RuntimeError, match="parent process"):
                model(given)

        in_child(use)
        assert torch.equal(model(given).cpu(), wanted)
        params.close()


@on_simulated
@pytest.mark.filterwarnings("ignore:others use the host")
@torch.no_grad()
def test_one_memory_has_both_tiers_of_several_users(device: Simulated, folder: Path) -> None:
    given = torch.ones(2, 256)
    memory = Memory(device="3M", host="4500K")
    with device.computing():
        model, params = swapped(device, folder, None, device_budget=None, memory=memory)
        weights = layers(COUNT).requires_grad_(False)
        wanted = weights(given)
        with stream_weights(weights, folder, memory=memory, device=device.device()) as streamed:
            before = model(device.tensor(given)).cpu()
            for _ in range(4):
                assert torch.equal(streamed(device.tensor(given)).cpu(), wanted)
                assert torch.equal(model(device.tensor(given)).cpu(), before)
            in_host = [params.stats().bytes_in_host, streamed.stats().bytes_in_host]
            assert min(in_host) > 0
            assert sum(in_host) <= 4500 * KIB
        params.close()
