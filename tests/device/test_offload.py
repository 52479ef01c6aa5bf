"""Weights that come to an accelerator while it computes: right, within the budget, after what still uses the memory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from nvme_ops.offload import stream_weights
from nvme_ops.offload.weights.source import FileExtent, Source, WeightFile
from nvme_ops.offload.weights.window import Window
from tests.conftest import MIB, store
from tests.device.kinds import Device, on_gpus, sample

pytest_plugins = ("tests.fake_cufile.fixtures",)

SIZE, COUNT = MIB, 6


@contextlib.contextmanager
def window_of(device: Device, folder: Path, budget: int) -> Iterator[tuple[Window, list[Source]]]:
    """Weights that follow each other in a file, one byte off its pages."""
    path = store(folder / "weights", sample(COUNT * SIZE + 1))
    file = WeightFile(os.open(path, os.O_RDONLY), str(path), device.handle())
    weights = [Source([FileExtent(file, 1 + number * SIZE, SIZE)], torch.uint8, (SIZE,)) for number in range(COUNT)]
    window = Window(budget, device.empty(0).device, weights)
    try:
        yield window, weights
    finally:
        window.close()
        file.close()


def expected(number: int) -> torch.Tensor:
    return sample(COUNT * SIZE + 1)[1 + number * SIZE :][:SIZE]


def test_each_comes_within_the_budget(device: Device, folder: Path) -> None:
    with window_of(device, folder, 4 * SIZE + MIB // 2) as (window, weights):
        for _ in range(3):
            for number, weight in enumerate(weights):
                assert torch.equal(device.peek(window.fetch(weight)), expected(number))
        stats = window.stats()
        assert 2 * SIZE < stats.peak_bytes <= 4 * SIZE + MIB // 2
        assert stats.bytes_on_demand <= SIZE, "the others were read ahead"
        assert stats.bytes_kept > 0


@on_gpus  # whose allocator goes by the order of the stream, where the simulated device frees memory at once
def test_memory_is_used_again_after_what_is_queued_on_it(device: Device, folder: Path) -> None:
    copies = [device.empty(SIZE) for _ in range(2 * COUNT)]
    device.settle()
    with window_of(device, folder, 3 * SIZE) as (window, weights), device.on() as stream:
        for number, copy in enumerate(copies):
            there = window.fetch(weights[number % COUNT])
            device.keep_busy()
            copy.copy_(there, non_blocking=True)
            del there
        device.synchronize(stream)
        for number, copy in enumerate(copies):
            assert torch.equal(device.peek(copy), expected(number % COUNT))


def test_rows_come_to_the_device(device: Device, folder: Path) -> None:
    with window_of(device, folder, 3 * SIZE) as (window, weights):
        rows = window.rows(weights[0].view((SIZE // 4096, 4096)), [3, 200, 7])
        assert rows is not None
        assert rows.shape == (3, 4096)
        assert torch.equal(device.peek(rows).flatten(), expected(0).view(-1, 4096)[[3, 200, 7]].flatten())


def test_what_is_trained_moves_to_where_the_model_computes(device: Device, folder: Path) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256).requires_grad_(number == 1) for number in range(4)))
    before, values = list(model[1].parameters()), [each.detach().clone() for each in model[1].parameters()]
    there = device.empty(0).device
    with pytest.raises(ValueError, match="too small"):
        stream_weights(model, folder, memory_budget=1, device=there)
    assert {each.device.type for each in model.parameters()} == {"cpu"}
    streamed = stream_weights(model, folder, memory_budget="2M", device=there)
    assert all(one is other for one, other in zip(before, streamed[1].parameters(), strict=True))
    assert {each.device for each in streamed.parameters()} == {there}
    assert streamed.to(there) is streamed
    assert all(torch.equal(each.detach().cpu(), value) for each, value in zip(before, values, strict=True))
    streamed.close()
