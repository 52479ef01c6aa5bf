"""Saved tensors on an accelerator: they go to storage and come back with the same bytes, parts of them alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nvme_ops.offload import save_on_nvme
from tests.conftest import MIB
from tests.device.kinds import Simulated, sample
from tests.offload.saving import settled
from tests.private_device import PrivateDevice

pytest_plugins = ("tests.fake_cufile.fixtures",)

COUNT = 8


@pytest.fixture
def device(the_device: PrivateDevice) -> Iterator[Simulated]:
    """Not cuFile's double, whose tests run in a forked child: autograd's threads are the parent's."""
    with the_device.left_as_found():
        yield Simulated(the_device)


class Saving(torch.autograd.Function):
    """Saves a tensor in forward, and looks at it in backward."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, tensor: torch.Tensor, found: list[torch.Tensor], peek: Any) -> Any:
        ctx.save_for_backward(tensor)
        ctx.found, ctx.peek = found, peek
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.found.append(ctx.peek(ctx.saved_tensors[0]))
        return gradients[0], None, None, None


@pytest.mark.parametrize("part", [False, True])
def test_the_same_bytes_come_back(device: Simulated, folder: Path, part: bool) -> None:
    nbytes = MIB // 2
    saving = save_on_nvme(folder, min_bytes=1, memory_budget=0, handle=device.handle())
    weight = torch.ones(1, requires_grad=True)
    contents = [sample(COUNT * nbytes)[number * nbytes :][:nbytes].clone() for number in range(COUNT)]
    for _ in range(2):
        found: list[torch.Tensor] = []
        value, wholes = weight, [device.tensor(content) for content in contents]
        with saving:
            for whole in wholes:
                value = Saving.apply(value, whole[nbytes // 2 :][: nbytes // 8] if part else whole, found, device.peek)
        device.synchronize(device.simulated.stream(0))  # which frees memory at once, whatever is queued on it
        del whole, wholes
        settled(saving)
        value.backward()
        wanted = [each[nbytes // 2 :][: nbytes // 8] if part else each for each in reversed(contents)]
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    assert saving.stats().bytes_saved == 2 * COUNT * (nbytes // 8 if part else nbytes)
    assert saving.stats().bytes_written > 0
    del value
    saving.close()
