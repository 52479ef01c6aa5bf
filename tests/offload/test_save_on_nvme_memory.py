"""How much memory a process has while activations are on storage, for tensors of sizes that allocators find awkward."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import command
from benchmarks.activations import Job
from tests.conftest import MIB

_LAYERS, _BUDGET = 96, 16 * MIB


@pytest.mark.parametrize("batch", [6, 8, 10])
def test_what_is_freed_serves_the_next_tensors(batch: int, folder: Path) -> None:
    """Each layer saves two tensors of a quarter MiB a sample: 288 to 480 MiB in all."""
    job = Job("nvme", "convolutional", _LAYERS, batch, 1, str(folder), _BUDGET)
    found = command.work("activations", job)
    assert found["moved"][0] > 2 * 96 * 2 * batch * MIB // 4 * 0.8
    assert found["peak_bytes"] < _BUDGET + 144 * MIB
