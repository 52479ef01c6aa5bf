"""swap_params beside other processes at the same folder, and on a device that answers late."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from nvme_ops.offload import NvmeOptimizer, swap_params
from tests.conftest import REPOSITORY
from tests.offload.test_optimizer_kept import Slow
from tests.offload.test_swap_params import KIB, network, train
from tests.offload.training import equal, values

PROGRAM = """
import sys
import torch
from nvme_ops.offload import swap_params
from tests.offload.test_swap_params import KIB, network, train
from tests.offload.training import equal, values

rate = float(sys.argv[2])
mine, other = network(), network()
losses = train(other, torch.optim.SGD(other.parameters(), lr=rate, foreach=False), 6)
with swap_params(mine, sys.argv[1], memory_budget=80 * KIB, min_bytes=4 * KIB):
    assert train(mine, torch.optim.SGD(mine.parameters(), lr=rate, foreach=False), 6) == losses
    assert equal(values(mine), values(other))
"""


def test_two_processes_at_one_folder(folder: Path) -> None:
    """Each has a session of its own: neither sees the other's values, nor removes its files."""
    running = [
        subprocess.Popen([sys.executable, "-c", PROGRAM, folder, rate], cwd=REPOSITORY) for rate in ("0.01", "0.05")
    ]
    assert [each.wait(120) for each in running] == [0, 0]
    assert not list(folder.iterdir())


@pytest.mark.parametrize("overlap", [None, "backward"])
def test_a_slow_device(folder: Path, overlap: Any) -> None:
    mine, other = network(), network()
    plain = torch.optim.AdamW(other.parameters(), lr=0.01)
    swapped = swap_params(mine, folder, memory_budget=80 * KIB, min_bytes=4 * KIB, handle=Slow())
    optimizer = NvmeOptimizer(mine.parameters(), torch.optim.AdamW, folder, memory_budget="1M", lr=0.01,
                              overlap=overlap, handle=Slow())  # fmt: skip
    with swapped, optimizer:
        assert train(mine, optimizer, 2) == train(other, plain, 2)
        assert equal(values(mine), values(other))
