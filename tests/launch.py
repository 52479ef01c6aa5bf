"""Starts a module in a process of its own, or as ranks under torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.conftest import REPOSITORY


def run_module(module: str, *words: object, folder: Path = REPOSITORY, **environment: str) -> str:
    """Returns what the module prints when it runs in ``folder``; fails with all of it unless it succeeds."""
    result = subprocess.run(
        [sys.executable, "-m", module, *map(str, words)],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-5000:]
    return result.stdout


def run_ranks(ranks: int, module: str, *words: object, **environment: str) -> str:
    """Returns what the ranks print, one rank after the other; fails with all of it unless every one succeeds.

    Each has files of its own to print to: in a pipe that they share, the lines of two can mix.
    """
    with tempfile.TemporaryDirectory() as logs:
        try:
            run_module(
                "torch.distributed.run",
                *("--standalone", "--nproc-per-node", ranks, "--redirects", 3, "--log-dir", logs),
                *("-m", module, *words),
                folder=REPOSITORY,
                **{"OMP_NUM_THREADS": "1", **environment},
            )
        except AssertionError as error:
            said = [f"{path.parent.name}: {path.read_text()}" for path in sorted(Path(logs).rglob("*.log"))]
            raise AssertionError("\n".join([*said, str(error)])) from None
        printed = Path(logs).rglob("stdout.log")
        return "".join(path.read_text() for path in sorted(printed, key=lambda path: int(path.parent.name)))
