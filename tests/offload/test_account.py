"""``explain()``: what a program that offloads waits for, and what limits it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nvme_ops.offload import NvmeCache, NvmeOptimizer, save_on_nvme, stream_weights, swap_gradients, swap_params
from nvme_ops.offload.residency import account
from nvme_ops.offload.residency.account import Account
from nvme_ops.offload.residency.policy import Stats
from tests.offload.models import layers


@pytest.mark.parametrize(
    ("moved", "limit"),
    [
        ({"bytes_read": 6 * 10**9, "bytes_written": 6 * 10**9, "bytes_from_host": 4 * 10**10}, "storage limits"),
        ({"bytes_read": 10**9, "bytes_from_host": 2 * 10**11}, "the bus limits"),
        ({"bytes_written": 10**9, "bytes_to_host": 2 * 10**11}, "the bus limits"),
        ({"bytes_read": 1}, "computing limits"),
    ],
)
def test_what_takes_longest_limits(monkeypatch: pytest.MonkeyPatch, moved: dict[str, int], limit: str) -> None:
    monkeypatch.setattr(account, "copy_rate", lambda device: 1e10)
    assert limit in Account(lambda: 1e9).explain(Stats(**moved), torch.device("cuda"))


def test_each_explanation_begins_where_the_last_one_ended() -> None:
    asked = Account(lambda: 1e9)
    stats, cpu = Stats(bytes_read=5 * 10**9, bytes_stored=2**20, seconds_waited=3.0), torch.device("cpu")
    first = asked.explain(stats, cpu)
    assert "4.657 GiB take 5.00 s at 1 GB/s" in first
    assert "waited 3.00 s" in first
    assert "the bus" not in first
    stats.bytes_read += 2**30
    again = asked.explain(stats, cpu)
    assert "1 GiB take" in again
    assert "waited 0.00 ms" in again
    assert "1 MiB" in again


def _streamed(folder: Path) -> Any:
    model = stream_weights(layers(8), folder, memory_budget="1M")
    model(torch.ones(2, 256))
    return model


def _optimizer(folder: Path) -> Any:
    model = layers(2)
    optimizer = NvmeOptimizer(model.parameters(), torch.optim.AdamW, folder)
    model(torch.ones(2, 256)).sum().backward()
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    "made",
    [
        _streamed,
        _optimizer,
        lambda folder: NvmeCache(folder, memory_budget="1M"),
        lambda folder: save_on_nvme(folder),
        lambda folder: swap_params(layers(2), folder, memory_budget="2M", min_bytes=1),
        lambda folder: swap_gradients(layers(2).parameters(), folder, min_bytes=1),
    ],
    ids=["stream_weights", "NvmeOptimizer", "NvmeCache", "save_on_nvme", "swap_params", "swap_gradients"],
)
def test_every_capability_explains_itself(folder: Path, made: Callable[[Path], Any]) -> None:
    with made(folder) as used:
        text = used.explain()
    assert " limits, and reaches " in text
