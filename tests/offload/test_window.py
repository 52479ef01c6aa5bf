"""The window of streamed weights: whole pages, and what is read ahead in vain."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from nvme_ops.engine import Priority
from nvme_ops.offload import stream_weights
from nvme_ops.offload.weights import window


@pytest.mark.parametrize("budget", ["64K", "1G"])
def test_weights_that_are_smaller_than_a_page_are_used_together(
    folder: Path, budget: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes a page, and there was memory for as many bytes as they have: after a minute that was a MemoryError."""
    monkeypatch.setattr(window, "_PATIENCE", 1.0)

    class TwoTensors(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (torch.nn.Parameter(torch.randn(3, 8, 8)) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ torch.add(self.first[0], self.first[1]) @ (self.first + self.second)[2]

    model, x = TwoTensors(), torch.randn(4, 8)
    wanted = model(x)
    stream_weights(model, folder, memory_budget=budget)
    assert torch.equal(model(x), wanted)


def test_reads_ahead_that_fail_and_are_not_needed_any_more_are_not_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", told.append)
    model: Any = torch.nn.Sequential(*(torch.nn.Linear(256, 256, bias=False) for _ in range(12)))
    with stream_weights(model, folder, memory_budget="600K"), torch.no_grad():
        for _ in range(2):
            model(torch.ones(1, 256))
        for file in next(folder.iterdir()).iterdir():
            if file.name != "owner":
                os.truncate(file, 0)
        for layer in (model, model, model[7], model[1]):
            with pytest.raises(EOFError):
                layer(torch.ones(1, 256))
    assert not told


def test_rows_of_a_weight_whose_read_ahead_failed_are_read_again(folder: Path) -> None:
    """As when another thread needs its memory, which ends the read that this one waits for."""
    embedding: Any = torch.nn.Embedding(4096, 64)
    model, wanted = torch.nn.ModuleList([embedding, torch.nn.Linear(512, 512)]), embedding.weight[3].clone()
    with stream_weights(model, folder, memory_budget="1200K"), torch.no_grad():
        weights, source = embedding.weight._weights._open(), embedding.weight.source
        files = {file: file.read_bytes() for file in next(folder.iterdir()).iterdir() if file.name != "owner"}
        for file in files:
            os.truncate(file, 0)
        for transfer in weights._begin(source, Priority.PREFETCH).transfers:
            assert isinstance(transfer.exception(), EOFError)
        for file, values in files.items():
            file.write_bytes(values)
        assert torch.equal(embedding(torch.tensor([3]))[0], wanted)
