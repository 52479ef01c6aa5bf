"""``python -m nvme_ops.integrations.deepspeed PROGRAM``: whatever PROGRAM is, DeepSpeed in it has our ops.

DeepSpeed is a package made up here: what is tested is how programs are started.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

BUILDERS = """
class AsyncIOBuilder:
    def is_compatible(self, verbose=False):
        print("please install libaio-dev")
    def load(self, verbose=True):
        return "its own"
"""
PROGRAM = """
import sys
from deepspeed.ops.op_builder import AsyncIOBuilder
print(AsyncIOBuilder().load().__name__, *sys.argv[1:])
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a DeepSpeed, and programs that use it."""
    package = tmp_path / "site" / "deepspeed" / "ops" / "op_builder"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(BUILDERS)
    (package.parent / "__init__.py").touch()
    (package.parents[1] / "__init__.py").write_text("__version__ = '0.19.8'\n")
    runtime = package.parents[1] / "runtime" / "zero"
    runtime.mkdir(parents=True)
    for file in (runtime.parent / "__init__.py", runtime / "__init__.py", runtime / "partition_parameters.py"):
        file.touch()
    (tmp_path / "work").mkdir()
    for name, text in {
        "program.py": PROGRAM,
        "entry": f"#!/no/such/python3\n{PROGRAM}",
        "script.sh": '#!/bin/sh\npython program.py "$@"\n',
        "script": 'python program.py "$@"\n',
        "data": "no program",
    }.items():
        (tmp_path / "work" / name).write_text(text)
    for name in ("entry", "script.sh", "script"):
        (tmp_path / "work" / name).chmod(0o755)
    return tmp_path


def start(place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    # PYTHONPATH has the checkout, whose op_builder DeepSpeed must not take for its own
    path = os.pathsep.join([str(place / "site"), str(REPOSITORY)])
    return subprocess.run(
        [sys.executable, "-m", "nvme_ops.integrations.deepspeed", *words],
        cwd=place / "work",
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    "words",
    [("program.py",), ("python", "program.py"), ("./entry",), ("./script.sh",), ("sh", "script"), ("entry",)],
    ids=" ".join,
)
def test_programs_of_all_kinds_have_our_ops(place: Path, words: tuple[str, ...]) -> None:
    done = start(place, *words, "a", "b c")
    assert (done.stdout, done.stderr, done.returncode) == ("nvme_ops.ops.async_io a b c\n", "", 0)


@pytest.mark.parametrize(
    ("words", "said"),
    [(("missing",), "missing: no such program"), (("data",), "data: Permission denied: "), ((), "usage: ")],
)
def test_what_cannot_be_started_is_one_line(place: Path, words: tuple[str, ...], said: str) -> None:
    done = start(place, *words)
    assert done.returncode == 1
    assert done.stderr.startswith(said)
    assert len(done.stderr.splitlines()) == 1


def test_its_exit_status_and_signals_are_those_of_the_program(place: Path) -> None:
    assert start(place, "sh", "-c", "exit 7").returncode == 7
    assert start(place, "sh", "-c", "kill -9 $$").returncode == -signal.SIGKILL


def test_ctrl_c_is_the_programs_alone(place: Path) -> None:
    words = [sys.executable, "-m", "nvme_ops.integrations.deepspeed", "sh", "-c", "trap 'exit 5' INT; echo; sleep 60"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.1)
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (5, b"")


def test_the_environments_own_sitecustomize_still_runs(place: Path) -> None:
    (place / "site" / "sitecustomize.py").write_text("import sys; sys.its_own = True\n")
    (place / "work" / "program.py").write_text(f"import sys; assert sys.its_own\n{PROGRAM}")
    done = start(place, "program.py")
    assert (done.stdout, done.stderr) == ("nvme_ops.ops.async_io \n".replace(" ", ""), "")


def test_a_report_does_not_ask_for_what_is_optional(place: Path) -> None:
    (place / "work" / "program.py").write_text(
        "from deepspeed.ops.op_builder import AsyncIOBuilder; print(AsyncIOBuilder().is_compatible(verbose=True))"
    )
    done = start(place, "program.py")
    assert (done.stdout, done.stderr) == ("True\n", "")
