"""What the disk of ``rig`` and the table promise; of the power failures a handful of the hundreds that it tries."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.conftest import REPOSITORY
from tests.faults.disk import missing
from tests.faults.promises import PROMISES

KEPT = [name for name, promise in PROMISES.items() if promise.held]
(CONTROL,) = PROMISES.keys() - set(KEPT)
FAULTY = "ext4 without a journal"
SEED = "20"  # of the moments; the programs' own timing varies


def rig(filesystem: str, *words: str) -> str:
    if reason := missing(filesystem):
        pytest.skip(reason)
    command = [sys.executable, "-m", "tests.faults.rig", *words]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_each_fault_is_an_error_with_its_file_or_the_right_result() -> None:
    said = rig(FAULTY)
    for what in ("read", "write", "flush"):  # the disk does what it is told to
        assert re.search(rf"^\w+ +{what} error +raised +OSError: \[Errno 5\]", said, re.M), said
        assert re.search(rf"^\w+ +{what} stall, Ctrl-C +interrupted", said, re.M), said


@pytest.mark.slow
@pytest.mark.parametrize("number", range(3))
def test_a_power_failure_costs_nothing_that_was_promised(number: int) -> None:
    """Each promise on one of the file systems, or on ext4 where that one cannot be made."""
    filesystem = ("ext4", "xfs", "btrfs")[number]
    filesystem = "ext4" if missing(filesystem) else filesystem
    said = rig(filesystem, "--power", filesystem, "--cuts", "4", "--seed", SEED, *(mine := KEPT[number::3]))
    assert said.count("4 power failures, 0 lost") == len(mine)


@pytest.mark.slow
def test_what_is_not_flushed_is_found() -> None:
    said = rig("ext4", "--power", "ext4", "--cuts", "16", "--seed", SEED, CONTROL)
    assert re.search(r"16 power failures, [1-9]\d* lost", said), said
