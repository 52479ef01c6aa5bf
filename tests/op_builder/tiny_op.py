"""A one-file op, and a sandbox to build it in, for the tests of the builders.

The builder is made from the environment, so that a program in a subprocess gets the same one as the test.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from nvme_ops.op_builder import OpBuilder
from tests import prepared
from tests.made_up import executable

REPOSITORY = Path(__file__).parents[2]

SOURCE = """
#include <Python.h>
#include "answer.h"
static PyObject* answer(PyObject*, PyObject*) { return PyLong_FromLong(ANSWER); }
static PyMethodDef methods[] = {{"answer", answer, METH_NOARGS, ""}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "tiny", "", -1, methods, nullptr, nullptr, nullptr, nullptr};
extern "C" __attribute__((visibility("default"))) PyObject* PyInit_tiny() { return PyModule_Create(&definition); }
"""

# Notes each call before it becomes the compiler; TINY_SLOW stretches compilations so that a test can interfere.
COMPILER = """echo "$*" >> "$TINY_CALLS"
case "$*" in *tiny.cpp*) sleep "${TINY_SLOW:-0}" ;; esac
exec c++ "$@"
"""


IMPORT = "from tests.op_builder.tiny_op import TinyBuilder\n"
ANSWER = "print(TinyBuilder().load().answer())"
QUIET = {"PYTHONWARNINGS": ""}


class TinyBuilder(OpBuilder):
    """Builds the sources that lie in ``$TINY_CSRC``."""

    BUILD_VAR = "NVME_BUILD_TINY"
    NAME = "tiny"

    def __init__(self) -> None:
        super().__init__(self.NAME)

    def source_root(self) -> Path:
        return Path(os.environ["TINY_CSRC"])

    def sources(self) -> list[str]:
        return sorted(map(str, self.source_root().rglob("*.cpp")))

    def cxx_args(self) -> list[str]:
        return ["-O0", *os.environ.get("TINY_CXX_ARGS", "").split()]


class Sandbox:
    """A folder with the tiny op's sources, an empty cache and a compiler that counts its calls."""

    def __init__(self, folder: Path) -> None:
        self.csrc = folder / "tiny sources"  # the space must survive every layer
        self.cache = folder / "cache folder"
        self.calls = folder / "calls"
        self.compiler = executable(folder / "counting-c++", COMPILER)
        self.csrc.mkdir()
        self.source = self.csrc / "tiny.cpp"
        self.header = self.csrc / "answer.h"
        self.source.write_text(SOURCE)
        self.header.write_text("#define ANSWER 42\n")
        self.environment = {
            "TINY_CSRC": str(self.csrc),
            "TINY_CALLS": str(self.calls),
            "TORCH_EXTENSIONS_DIR": str(self.cache),
            "CXX": str(self.compiler),
        }

    def compilations(self) -> int:
        """How often the compiler was called to compile the op's source."""
        return sum("tiny.cpp" in call for call in self.compiler_calls())

    def compiler_calls(self) -> list[str]:
        """Every call of the compiler, whatever for."""
        return self.calls.read_text().splitlines() if self.calls.exists() else []

    def start(self, program: str, environment: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Start ``program`` in a new Python, with the builder at hand as ``TinyBuilder``."""
        return subprocess.Popen(
            [sys.executable, "-c", f"{IMPORT}{program}"],
            env={**os.environ, **self.environment, **QUIET, "PYTHONPATH": str(REPOSITORY), **(environment or {})},
            cwd=self.cache.parent,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def end(self, program: str, environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Run ``program`` to its end in a process of its own, as ``start`` does."""
        words = ["-c", f"{IMPORT}{program}"]
        return prepared.run(
            *words, environment={**self.environment, **QUIET, **(environment or {})}, folder=self.cache.parent
        )

    def run(self, program: str, environment: Mapping[str, str] | None = None) -> str:
        """What ``program`` prints; its failure is the test's."""
        done = self.end(program, environment)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the sandboxes of a module's tests are, one after the other in the same place."""
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture
def sandbox(workshop: Path) -> Sandbox:
    """A sandbox for programs in subprocesses."""
    folder = workshop / "sandbox"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return Sandbox(folder)


def once(sandbox: Sandbox, build: Callable[[], object]) -> None:
    """Builds in the sandbox, or copies there what was built for an earlier test of the module."""
    folder = sandbox.cache.parent
    built = folder.with_name("built")
    if built.exists():
        shutil.copytree(built, folder, dirs_exist_ok=True)
    else:
        build()
        shutil.copytree(folder, built)


@pytest.fixture
def here(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> Sandbox:
    """The sandbox's environment in this very process, for tests that build without importing the op."""
    for name, value in sandbox.environment.items():
        monkeypatch.setenv(name, value)
    return sandbox
