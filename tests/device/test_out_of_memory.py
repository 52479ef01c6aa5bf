"""An accelerator that has no more memory: what is unused leaves it, or torch's own error ends one step alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nvme_ops.offload import NvmeCache, from_pretrained, stream_weights, swap_params
from tests.conftest import KIB
from tests.device.kinds import Simulated, on_simulated
from tests.offload.models import layers, mixture, nbytes, saved

Step = Callable[[], torch.Tensor]


def weights(device: Simulated, folder: Path, model: Any, given: torch.Tensor, **options: Any) -> tuple[Step, Any]:
    """A pass of a streamed model."""
    model, there = model.requires_grad_(False), device.tensor(given)
    streamed = stream_weights(model, folder, device=device.device(), handle=device.handle(), **options)
    return lambda: torch.as_tensor(streamed(there)).cpu(), streamed


def dense(device: Simulated, folder: Path, **options: Any) -> tuple[Step, Any]:
    return weights(device, folder, layers(10), torch.ones(2, 256), device_budget="1200K", **options)


def experts(device: Simulated, folder: Path) -> tuple[Step, Any]:
    model = mixture("packed")
    budgets = {"device_budget": nbytes(model) // 2, "host_budget": "1M"}
    return weights(device, folder, model, torch.randn(2, 64), **budgets)


def experts_on_host(device: Simulated, folder: Path) -> tuple[Step, Any]:
    path, kind = saved(folder, "Qwen3Moe")
    size, tokens = nbytes(kind.from_pretrained(path)), device.tensor(torch.arange(4)[None])
    budgets: Any = {"device_budget": size // 2, "host_budget": "1M", "compute_on_host": True}
    model = from_pretrained(path, device=device.device(), handle=device.handle(), **budgets)
    return lambda: model(tokens).logits.cpu(), model


def parameters(device: Simulated, folder: Path, host_budget: str) -> tuple[Step, Any]:
    """A change of swapped parameters, which changes nothing, and a pass."""
    model: Any = layers(10).requires_grad_(False).to(device.device())
    there = device.tensor(torch.ones(2, 256))
    swapped = swap_params(model, folder, device_budget="1200K", host_budget=host_budget, min_bytes="64K")

    def step() -> torch.Tensor:
        for layer in model:
            layer.weight.mul_(1)
        return torch.as_tensor(model(there)).cpu()

    return step, swapped


def keys(device: Simulated, folder: Path, tokens: int, budget: str, **options: Any) -> tuple[Step, Any]:
    """One more token for each of some layers, which is forgotten again."""
    cache: Any = NvmeCache(folder, device_budget=budget, host_budget="1M", **options)
    states, more = torch.rand(2, 2, 2, tokens, 64)
    for layer in range(8):
        cache.update(device.tensor(states), device.tensor(states), layer)

    def step() -> torch.Tensor:
        there = device.tensor(more[:, :, :1])
        for layer in range(8):
            cache.layers[layer].crop(tokens - cache.layers[layer].get_seq_length())
            last = cache.update(there, there + 1, layer)[1].cpu()
        return last

    return step, cache


KINDS: dict[str, Callable[..., tuple[Step, Any]]] = {
    "weights": lambda device, folder: dense(device, folder, host_budget=0),
    "weights in host memory": lambda device, folder: dense(device, folder, host_budget="64M"),
    "quantized": lambda device, folder: dense(device, folder, host_budget="1M", quantize="int8"),
    "experts": experts,
    "experts that the CPU computes with": experts_on_host,
    "parameters": lambda device, folder: parameters(device, folder, "0"),
    "parameters in host memory": lambda device, folder: parameters(device, folder, "64M"),
    "keys and values": lambda device, folder: keys(device, folder, 100, "1200K"),
    "keys and values in 8 bits": lambda device, folder: keys(device, folder, 300, "4M", dtype="int8"),
}


@on_simulated
@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_no_allocation_fails_while_something_may_leave(device: Simulated, folder: Path, kind: str) -> None:
    with device.computing():
        step, closed = KINDS[kind](device, folder)
        wanted, before = [step() for _ in range(3)][-1], device.now.allocations.made
        step()
        count, done, kept = device.now.allocations.made - before, 0, []
        for place in range(0, count, 1 + count // 60):
            for failing in (1, -1):
                try:
                    with device.failing("allocation", place, failing):
                        assert torch.equal(step(), wanted)
                        done += 1
                except torch.cuda.OutOfMemoryError as error:  # the model's own, or everything is in use
                    kept.append(error)  # as a notebook does
                assert torch.equal(step(), wanted), (place, failing)
        assert done, "what was unused has left"
        closed.close()
        del step, closed, kept


@on_simulated
@torch.no_grad()
def test_a_device_with_less_memory_than_the_budget(device: Simulated, folder: Path) -> None:
    with device.computing():
        torch.manual_seed(0)
        step, streamed = dense(device, folder, host_budget="4M")
        wanted = step()
        streamed.close()
        with device.room(700 * KIB):
            torch.manual_seed(0)
            step, streamed = dense(device, folder, host_budget="4M")
            for _ in range(3):
                assert torch.equal(step(), wanted)
            assert 2 * 256 * KIB <= streamed.stats().peak_bytes < 700 * KIB, "it is used"
        with device.room(0), pytest.raises(torch.cuda.OutOfMemoryError):
            step()
        for _ in range(2):
            assert torch.equal(step(), wanted)
        streamed.close()
        del step
