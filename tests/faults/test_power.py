"""What is promised to be durable outlives the power: a handful of the moments that ``power`` tries by the hundred."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import killed_in
from tests.faults.power import promises
from tests.faults.power_disk import LoggedDisk, private_folder, why_not

ROOT = Path(__file__).parents[2]
KEPT = [name for name, promise in promises().items() if promise.held]
(CONTROL,) = [name for name, promise in promises().items() if not promise.held]
SEED = 20  # of the moments; the programs' own timing varies


def cut(filesystem: str, cuts: int, *names: str) -> tuple[int, str]:
    if missing := why_not(filesystem):
        pytest.skip(missing)
    options = ["--filesystem", filesystem, "--cuts", str(cuts), "--seed", str(SEED)]
    command = [sys.executable, "-m", "tests.faults.power", *options, *names]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("number", range(3))
def test_a_power_failure_costs_nothing_that_was_promised(number: int) -> None:
    """Each promise on one of the file systems, or on ext4 where that one cannot be made."""
    filesystem = ("ext4", "xfs", "btrfs")[number]
    status, words = cut("ext4" if why_not(filesystem) else filesystem, 4, *(mine := KEPT[number::3]))
    assert status == 0, words
    assert words.count("4 power failures, 0 lost, 0 mixed") == len(mine)


@pytest.mark.slow
def test_what_is_not_flushed_is_found() -> None:
    status, words = cut("ext4", 16, CONTROL)
    assert status == 0, words
    found = re.search(r"16 power failures, (\d+) lost, (\d+) mixed", words)
    assert found is not None
    assert int(found[1]) + int(found[2]) > 0


def test_a_disk_whose_process_is_killed_goes_whatever_waits_for_it(tmp_path: Path) -> None:
    """The last process of the mounts writes back as it ends, with nobody left who would wait for it."""
    if missing := why_not("ext4"):
        pytest.skip(missing)

    def write() -> None:
        disk = LoggedDisk(private_folder(str(tmp_path)), "ext4")
        Path(disk.mounted, "dirty").write_bytes(os.urandom(8 << 20))

    killed_in(write)
    while any(str(tmp_path) in each.read_text() for each in Path("/sys/block").glob("loop*/loop/backing_file")):
        time.sleep(0.01)
