"""What autograd saves on an accelerator, in host memory.

Autograd knows the devices that are there when it begins: each test has a process of its own.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import run_python

SAVING = "import sys; from tests.device import saved_on_host; getattr(saved_on_host, sys.argv[1])(*sys.argv[2:])"


@pytest.mark.parametrize("host_budget", ["0", "1200K", "64M"])
@pytest.mark.parametrize("seeds", [3, pytest.param(100, marks=pytest.mark.nightly)])
def test_gradients_are_right_in_any_order_of_work(folder: Path, host_budget: str, seeds: int) -> None:
    run_python(SAVING, "gradients", folder, host_budget, seeds)


def test_a_graph_dropped_while_its_copies_are_queued(folder: Path) -> None:
    run_python(SAVING, "dropped", folder)
