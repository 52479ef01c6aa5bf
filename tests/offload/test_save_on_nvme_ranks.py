"""save_on_nvme under DDP and FSDP2: the gradients have the same bits, and no parameter is saved."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.launch import run_ranks


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_two_ranks(folder: Path, way: str) -> None:
    found = re.findall(r"rank (\d): (\w+), (\d+) bytes", run_ranks(2, "tests.offload.activations_ranks", way, folder))
    assert sorted((rank, equal) for rank, equal, _ in found) == [("0", "equal"), ("1", "equal")]
    one = 32 * 96 * 4  # bytes of what goes from one layer to the next
    assert {int(saved) for *_, saved in found} == {9 * one}, "inputs of linear layers and of GELU, and of the loss"
    assert not list(folder.iterdir())
