"""A plan of training on an accelerator beside runs with its budgets; autograd needs a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import run_python

PROGRAM = "import sys; from tests.device import planned; getattr(planned, sys.argv[1])(*sys.argv[2:])"


def test_what_moves_between_three_tiers_is_what_the_plan_says(folder: Path) -> None:
    """With no host memory, and some."""
    run_python(PROGRAM, "on_device", folder, "0", "8M")


def test_the_command_has_a_row_for_each_way(folder: Path) -> None:
    pytest.importorskip("transformers")
    run_python(PROGRAM, "command", folder)
