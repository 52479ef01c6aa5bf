"""Starts a module of the tests as ranks under torchrun."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.conftest import REPOSITORY


def run_ranks(ranks: int, module: str, *words: object) -> str:
    """Returns what the ranks print; fails with all of it unless every one of them succeeds."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    result = subprocess.run(
        [*command, "-m", module, *map(str, words)],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout
