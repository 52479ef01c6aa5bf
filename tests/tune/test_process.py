"""``tuned_handle`` and the life of processes: forks, ends and kills while a device is tuned in the background."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest

from nvme_ops.settings import Settings
from nvme_ops.tune.handle import tuned_handle
from tests.conftest import REPOSITORY, in_child, round_trip
from tests.tune.test_handle import (  # noqa: F401  (fixtures)
    FOUND,
    MadeUpSearch,
    made_up,
    no_thread_is_left,
    quick,
    settings_of,
    until,
    use,
    watched,
)


@pytest.mark.usefixtures("made_up")
def test_a_forked_child_works_and_leaves_tuning_to_its_parent(tmp_path: Path) -> None:
    handle = tuned_handle(tmp_path)
    tuner: Any = handle._engine._tuner  # type: ignore[attr-defined]
    for started in (False, True):
        tuner._busy.add("a transfer")
        if started:
            use(handle, tmp_path)

        def child() -> None:
            use(handle, tmp_path)
            round_trip(handle, tmp_path / "child")
            assert not any(thread.name == "nvme_ops-tune" for thread in threading.enumerate())
            assert settings_of(handle) == Settings()

        in_child(child)
        tuner._busy.clear()
    until(lambda: not watched(handle))
    assert settings_of(handle) == FOUND
    assert len(MadeUpSearch.runs) == 1


@pytest.mark.usefixtures("made_up")
def test_a_handle_made_in_a_forked_child_is_the_childs_own(tmp_path: Path) -> None:
    before = tuned_handle(tmp_path)  # never used: its tuner stays in the list

    def child() -> None:
        handle = tuned_handle(tmp_path)
        use(handle, tmp_path)
        until(lambda: not watched(handle))
        assert settings_of(handle) == FOUND

    in_child(child)
    assert watched(before)
    assert settings_of(tuned_handle(tmp_path)) == FOUND


PROGRAM = """
    import os, sys, time, torch
    from nvme_ops.tune import background
    from nvme_ops.tune.handle import tuned_handle
    folder = sys.argv[1]
    background.FILE, background.QUIET = 4 << 20, 0.01
    inner = background.Passes.measure
    def measure(self, settings, full):
        print("measuring", flush=True)
        time.sleep(1)  # so that the end of the program comes first, however fast the device is
        return inner(self, settings, full)
    background.Passes.measure = measure
    handle = tuned_handle(folder)
    handle.sync_pwrite(torch.zeros(16 << 20, dtype=torch.uint8), os.path.join(folder, "used"))
"""


def start(folder: Path, program: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PROGRAM) + textwrap.dedent(program), str(folder)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder that holds nothing but what the program leaves there."""
    (tmp_path / "place").mkdir()
    return tmp_path / "place"


@pytest.mark.parametrize("program", ["", "time.sleep(0.5)", "time.sleep(0.5); sys.exit(0)"])
def test_the_end_of_the_program_ends_the_tuning(place: Path, program: str) -> None:
    process = start(place, program)
    _, errors = process.communicate(timeout=120)
    assert (process.returncode, errors) == (0, "")
    assert os.listdir(place) == ["used"]
    assert list((place.parent / "cache").rglob("*.json")) == []


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT, signal.SIGHUP])
def test_a_program_that_is_killed_leaves_nothing(place: Path, kind: signal.Signals) -> None:
    process = start(place, "time.sleep(100)")
    assert process.stdout is not None
    assert process.stdout.readline() == "measuring\n"
    process.send_signal(kind)
    process.communicate(timeout=120)
    assert process.returncode == -kind
    assert os.listdir(place) == ["used"]


def test_an_exception_of_the_program_is_all_that_is_seen(place: Path) -> None:
    process = start(place, "time.sleep(0.3); raise ValueError('made up')")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    assert errors.splitlines()[-1] == "ValueError: made up"
    assert errors.count("Traceback") == 1
