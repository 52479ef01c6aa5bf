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


def table(*words: str) -> tuple[int, list[str]]:
    """Runs the table, or a part; returns its status, and what is wrong."""
    if needed := missing():
        pytest.skip(f"a disk that fails on command needs {needed}")
    command = [sys.executable, "-m", "tests.faults.faulty_disk", *words]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    return done.returncode, [line for line in done.stdout.splitlines() if line.startswith("wrong: ")]


@pytest.mark.timeout(900)
def test_each_cell_is_an_error_with_its_file_or_the_right_result() -> None:
    assert table() == (0, [])


CONTROLS = {  # what is wrong, in order
    "write error": ["Plain.*no errno, or no file", "Unchecked.*neither the old nor the new"],
    "flush error": ["Leaking.*threads left", "Leaking.*descriptors left", "Broken.*again: .*it has failed before"],
    "flush stall, Ctrl-C": ["Plain.*Ctrl-C waited for the device"],
}


@pytest.mark.parametrize("fault", CONTROLS)
def test_what_does_not_check_is_found(fault: str) -> None:
    status, wrong = table("--only", "Plain,Unchecked,Leaking,Broken", "--fault", fault)
    assert status == 1
    assert [words for words in CONTROLS[fault] if not any(re.search(words, each) for each in wrong)] == [], wrong


def test_a_disk_whose_process_is_killed_goes_though_it_stalls() -> None:
    if needed := missing():
        pytest.skip(f"a disk that fails on command needs {needed}")

    def stall() -> None:
        disk = FaultyDisk().__enter__()
        (disk.folder / "dirty").write_bytes(os.urandom(8 << 20))
        for what in ("read", "write", "flush"):
            disk.rule(what, "stall")

    killed_in(stall)
