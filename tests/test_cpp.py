"""The engine's C++ tests: every program of tests/cpp, plain and under the sanitizers that the compiler here has."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

SOURCES = Path(__file__).parent / "cpp"
PROGRAMS = sorted(path.stem for path in SOURCES.glob("test_*.cpp"))
COMPILER = shlex.split(os.environ.get("CXX", "c++"))

#: As in tests/cpp/Makefile: what each configuration is compiled with.
CONFIGURATIONS = {"plain": [], "address": ["-fsanitize=address,undefined"], "thread": ["-fsanitize=thread"]}

#: What a program links against and does under every sanitizer: a thread that allocates.
PROBE = "#include <thread>\nint main() { int* p = nullptr; std::thread([&] { p = new int; }).join(); delete p; }\n"

pytestmark = pytest.mark.slow


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    # A make that runs these tests must not hand its own flags and job slots on.
    environment = {
        name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")
    }
    command = ["make", "--no-print-directory", "-C", str(SOURCES), *arguments]
    return subprocess.run(command, capture_output=True, text=True, errors="replace", env=environment, check=False)


@cache
def missing(configuration: str, folder: Path) -> str:
    """Why programs of ``configuration`` cannot be built or run here; empty when they can."""
    if not shutil.which("make"):
        return "make is not installed"
    source, program = folder / f"{configuration}.cpp", folder / configuration
    source.write_text(PROBE)
    command = [*COMPILER, *CONFIGURATIONS[configuration], str(source), "-o", str(program), "-pthread"]
    runner = ["setarch", "-R"] if configuration == "thread" and randomisation_can_be_turned_off() else []
    for step in (command, [*runner, str(program)]):
        try:
            result = subprocess.run(step, capture_output=True, text=True, errors="replace", check=False)
        except OSError as error:
            return f"{step[0]}: {error.strerror}"
        if result.returncode != 0:
            said = (result.stderr or result.stdout).strip().splitlines() or [f"exit status {result.returncode}"]
            return f"{' '.join(CONFIGURATIONS[configuration])}: {said[0]}"
    return ""


def randomisation_can_be_turned_off() -> bool:
    try:
        return subprocess.run(["setarch", "-R", "true"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


@cache
def build(configuration: str) -> subprocess.CompletedProcess[str]:
    return make("--keep-going", f"build-{configuration}")


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_program(configuration: str, program: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    if reason := missing(configuration, tmp_path_factory.getbasetemp()):
        pytest.skip(reason)
    built = build(configuration)
    assert built.returncode == 0, built.stdout[-2000:] + built.stderr[-4000:]
    result = make(f"run-{configuration}-{program}")
    print(result.stdout)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-10000:]


def test_there_are_programs() -> None:
    assert "test_engine" in PROGRAMS
