"""Collecting the tests compiles nothing: ``pytest --collect-only`` works, and is quick, where nothing is built yet."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

NAMES = ("c++", "g++", "gcc", "cc", "clang++", "clang", "ninja")


@pytest.fixture
def compilers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment where nothing is built and every compiler fails; the file in which they note that they ran."""
    started = tmp_path / "started"
    for name in NAMES:
        program = tmp_path / name
        program.write_text(f'#!/bin/sh\necho "$0 $*" >> "{started}"\nexit 1\n')
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("CXX", str(tmp_path / "c++"))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "ops"))
    return started


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), environment.get("PYTHONPATH", "")])
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)


def test_a_compiler_that_is_started_is_noticed(compilers: Path) -> None:
    done = python("-c", "from nvme_ops.op_builder import AsyncIOBuilder as B; B().jit_load()")
    assert done.returncode != 0
    assert str(compilers.parent / "c++") in compilers.read_text()


@pytest.mark.slow  # imports every test
def test_collecting_compiles_nothing(compilers: Path) -> None:
    done = python("-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "tests")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    assert f"{Path(__file__).relative_to(REPOSITORY)}::test_collecting_compiles_nothing" in done.stdout
    assert not compilers.exists(), compilers.read_text()
    assert not (compilers.parent / "ops").exists()
