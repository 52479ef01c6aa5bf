"""A device that fails, tears, stalls: each capability under each fault, on a disk made for that (``faulty_disk``)."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.conftest import REPOSITORY, killed_in
from tests.faults.faulty_disk import FaultyDisk, missing

pytestmark = [pytest.mark.slow, pytest.mark.alone]


def table(*words: str) -> tuple[int, list[str]]:
    """Runs the table, or a part; returns its status, and what is wrong."""
    if needed := missing():
        pytest.skip(f"a disk that fails on command needs {needed}")
    command = [sys.executable, "-m", "tests.faults.faulty_disk", "--quiet", *words]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("run 1: "), done.stdout + done.stderr
    return done.returncode, done.stdout.splitlines()[1:]


@pytest.mark.timeout(900)
def test_each_cell_is_an_error_with_its_file_or_the_right_result() -> None:
    assert table() == (0, [])


@pytest.mark.parametrize(
    ("control", "fault", "words"),
    [
        ("Plain", "write error", "no errno, or no file"),
        ("Unchecked", "write error", "neither the old nor the new"),
        ("Leaking", "flush error", "threads left"),
        ("Leaking", "flush error", "descriptors left"),
        ("Broken", "flush error", "again: WrongResultError: it has failed before"),
        ("Plain", "flush stall, Ctrl-C", "Ctrl-C waited for the device"),
    ],
)
def test_what_does_not_check_is_found(control: str, fault: str, words: str) -> None:
    status, wrong = table("--only", control, "--fault", fault)
    assert status == 1
    assert any(words in each for each in wrong), wrong


def test_a_disk_whose_process_is_killed_goes_though_it_stalls() -> None:
    if needed := missing():
        pytest.skip(f"a disk that fails on command needs {needed}")

    def stall() -> None:
        disk = FaultyDisk().__enter__()
        (disk.folder / "dirty").write_bytes(os.urandom(8 << 20))
        for what in ("read", "write", "flush"):
            disk.rule(what, "stall")

    killed_in(stall)
