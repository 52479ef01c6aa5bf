"""The hooks of running.py, in runs of pytest of their own: a small test file in an empty folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY


def run(folder: Path, program: str, *arguments: str) -> tuple[int, str]:
    """The exit status and output of pytest over a test file."""
    (folder / "test_small.py").write_text(textwrap.dedent(program))
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = alone\n")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    plugins = ("-p", "tests.running", "-p", "no:cacheprovider", "-p", "no:hypothesispytest")
    own = f"--basetemp={folder.with_suffix('.nested')}"  # pytest closes the folder that all runs share to other users
    done = subprocess.run(
        [sys.executable, "-m", "pytest", own, *plugins, *arguments],
        cwd=folder,
        env={**environment, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout


def test_what_is_left_in_the_checkout_fails_the_run(tmp_path: Path) -> None:
    if not shutil.which("git"):
        pytest.skip("git is not installed")
    program = """
    from pathlib import Path

    def test_untidy():
        for name in ("cufile.log", "file", "mine.log", "__pycache__/file.pyc"):
            Path(name).parent.mkdir(exist_ok=True)
            Path(name).touch()
    """
    (tmp_path / "mine.log").touch()
    (tmp_path / ".gitignore").write_text("*.log\n*.pyc\n__pycache__/\n")
    (tmp_path / "outside").mkdir()
    assert run(tmp_path / "outside", program)[0] == 0
    shutil.rmtree(tmp_path / "outside")
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    status, output = run(tmp_path, program)
    assert status == 1, output
    left = [line for line in output.splitlines() if line.startswith("left in the checkout")]
    assert left == ["left in the checkout: cufile.log", "left in the checkout: file"]  # mine.log was there before


def test_a_test_that_hangs_fails_and_says_where_and_the_others_go_on(tmp_path: Path) -> None:
    program = """
    import ctypes

    def test_that_hangs():
        stuck_here()

    def stuck_here():
        ctypes.PyDLL(None).pause()  # with the interpreter's lock held

    def test_other():
        pass
    """
    status, output = run(tmp_path, program, "-n", "2", "--timeout", "1")
    assert status != 0
    assert "in stuck_here" in output
    assert "1 failed, 1 passed" in output
    assert "test_small.py::test_that_hangs" in output
