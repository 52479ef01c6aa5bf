"""A device that fails, tears, stalls: each capability under each fault, on a disk made for that (``faulty_disk``)."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.conftest import REPOSITORY, killed_in
from tests.faults.faulty_disk import FaultyDisk, missing

pytestmark = pytest.mark.slow


@pytest.mark.timeout(900)
def test_each_cell_is_an_error_with_its_file_or_the_right_result() -> None:
    if needed := missing():
        pytest.skip(f"a disk that fails on command needs {needed}")
    command = [sys.executable, "-m", "tests.faults.faulty_disk"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for what in ("read", "write", "flush"):  # the disk does what it is told to
        assert re.search(rf"^\w+ +{what} error +raised +OSError: \[Errno 5\]", done.stdout, re.M), done.stdout
        assert re.search(rf"^\w+ +{what} stall, Ctrl-C +interrupted", done.stdout, re.M), done.stdout


def test_a_disk_whose_process_is_killed_goes_though_it_stalls() -> None:
    if needed := missing():
        pytest.skip(f"a disk that fails on command needs {needed}")

    def stall() -> None:
        disk = FaultyDisk().__enter__()
        (disk.folder / "dirty").write_bytes(os.urandom(8 << 20))
        for what in ("read", "write", "flush"):
            disk.rule(what, "stall")

    killed_in(stall)
