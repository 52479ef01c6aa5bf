"""The tests of offload on the simulated accelerator, in a process of their own: autograd begins after it is there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nvme_ops.op_builder import machine
from tests.conftest import REPOSITORY
from tests.offload.where import ORDER

SOME = ["streamed", "swap", "save_on_nvme"]
OTHERS = [
    "stream_weights", "experts", "mixtures", "guesses", "pretrained", "stored_formats", "rearranged", "offloaded",
    "optimizer", "optimizer_edits", "saved_states", "nvme_cache", "memory",
]  # fmt: skip


@pytest.mark.skipif(ORDER is not None, reason="they run there already")
@pytest.mark.parametrize(
    ("names", "order"),
    [
        pytest.param(SOME, "1", marks=pytest.mark.slow),
        *(pytest.param(names, order, marks=[pytest.mark.nightly, pytest.mark.timeout(3600)])
          for names, order in ((SOME, "0"), (OTHERS, "0"), (OTHERS, "1"))),
    ],
    ids=["some-random", "some-lazy", "others-lazy", "others-random"],
)  # fmt: skip
def test_on_the_simulated_accelerator(names: list[str], order: str, tmp_path: Path) -> None:
    if torch.cuda.is_available() or machine.find_compiler() is None:
        pytest.skip("it takes a compiler, and no GPU beside it")
    files = [f"tests/offload/test_{name}.py" for name in names]
    own = [f"--basetemp={tmp_path / 'nested'}"]  # pytest closes the folder that all runs share to other users
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "not slow and not nightly", *own, *files],
        cwd=REPOSITORY,
        env={"NVME_OPS_TESTS_ORDER": order, **os.environ},
        capture_output=True,
        text=True,
        check=False,
    )
    # not the status: torch's thread of the device may end the interpreter that ends while it frees its last graph
    last = done.stdout.splitlines()[-1]
    assert re.fullmatch(r"\d+ passed(, \d+ (skipped|deselected|warnings?))* in .*", last), done.stdout + done.stderr
