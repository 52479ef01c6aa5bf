"""Each rank has states of its own; shards of FSDP2 are resumed on another number of ranks through DCP."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.launch import run_ranks


def run(folder: Path, ranks: int, way: str, first: int, last: int) -> None:
    said = run_ranks(ranks, "tests.offload.optimizer_ranks", way, folder, first, last)
    assert sorted(re.findall(r"rank (\d): (\w+)", said)) == [(str(rank), "equal") for rank in range(ranks)]
    assert [each.name for each in folder.iterdir() if each.name != "checkpoint"] == []


def test_two_ranks_of_ddp(folder: Path) -> None:
    run(folder, 2, "ddp", 0, 4)


@pytest.mark.parametrize("ranks", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_two_ranks_of_fsdp_are_resumed_on_another_number(folder: Path, ranks: int) -> None:
    run(folder, 2, "fsdp", 0, 3)
    run(folder, ranks, "fsdp", 3, 6)
