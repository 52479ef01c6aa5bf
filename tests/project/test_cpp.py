"""The engine's C++ tests: the programs of tests/cpp, plain and under the sanitizers that the compiler here has."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[1] / "cpp"
PROGRAMS = sorted(path.stem for path in SOURCES.glob("test_*.cpp"))
COMPILER = shlex.split(os.environ.get("CXX", "c++"))

#: As in tests/cpp/Makefile: what each configuration is compiled with.
CONFIGURATIONS = {"address": ["-fsanitize=address,undefined"], "thread": ["-fsanitize=thread"], "plain": []}

#: What a program links against and does under every sanitizer: a thread that allocates.
PROBE = "#include <thread>\nint main() { int* p = nullptr; std::thread([&] { p = new int; }).join(); delete p; }\n"


def missing(configuration: str, folder: Path) -> str:
    """Why programs of ``configuration`` cannot be built or run here; empty when they can."""
    source, program = folder / f"{configuration}.cpp", folder / configuration
    source.write_text(PROBE)
    command = [*COMPILER, *CONFIGURATIONS[configuration], str(source), "-o", str(program), "-pthread"]
    fixed = subprocess.run("setarch -R true", shell=True, capture_output=True, check=False).returncode == 0
    runner = ["setarch", "-R"] if fixed and configuration == "thread" else []  # as in the Makefile
    for step in (["make", "--version"], command, [*runner, str(program)]):
        try:
            result = subprocess.run(step, capture_output=True, text=True, errors="replace", check=False)
        except OSError as error:
            return f"{step[0]}: {error.strerror}"
        if result.returncode != 0:
            said = (result.stderr or result.stdout).strip().splitlines() or [f"exit status {result.returncode}"]
            return f"{' '.join(CONFIGURATIONS[configuration])}: {said[0]}"
    return ""


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_programs(configuration: str, tmp_path: Path) -> None:
    if reason := missing(configuration, tmp_path):
        pytest.skip(reason)
    if configuration == "plain" and not missing("address", tmp_path):
        pytest.skip("the same programs run under AddressSanitizer")
    # A make that runs these tests must not hand its own flags and job slots on.
    environment = {name: os.environ[name] for name in os.environ.keys() - {"MAKEFLAGS", "MFLAGS", "MAKELEVEL"}}
    environment.setdefault("NVME_OPS_TEST_ITERATIONS", "100")  # random cases; by hand there are more
    command = ["make", "--no-print-directory", "-C", str(SOURCES), "--keep-going", f"run-{configuration}"]
    result = subprocess.run(command, capture_output=True, text=True, errors="replace", env=environment, check=False)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-10000:]
    assert len(PROGRAMS) > 8
    assert {f"{configuration} {name}" for name in PROGRAMS} <= set(result.stdout.splitlines())
