"""Prebuilt ops for every Python and for several versions of torch: the one for the torch at hand is used."""

from __future__ import annotations

import json
import sysconfig
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest
import torch

from nvme_ops.op_builder import machine, prebuilt
from tests.op_builder.tiny_op import Sandbox, TinyBuilder, here, sandbox

MINOR = prebuilt.minor(str(torch.__version__))

pytestmark = pytest.mark.skipif(".abi3.so" not in EXTENSION_SUFFIXES, reason="this Python has no abi3")


def installed(here: Sandbox, folder: Path, version: str = torch.__version__) -> Path:
    found = machine.find_compiler()
    assert found is not None
    include = Path(torch.__file__).parent / "include"
    return prebuilt.compile_portable(
        TinyBuilder(), found, version, include, Path(sysconfig.get_path("include")), folder
    )


def load(sandbox: Sandbox, folder: Path) -> tuple[str, str]:
    """The name of the file that a new process loads, and what it says meanwhile."""
    program = f"""
from pathlib import Path
from nvme_ops.op_builder import prebuilt
prebuilt.OPS = Path({str(folder)!r})
module = TinyBuilder().load()
assert module.answer() == 42
print(Path(module.__file__).name)
"""
    done = sandbox.end(program)
    output, errors = done.stdout, done.stderr
    assert done.returncode == 0, errors
    return output.strip(), errors


def test_of_several_the_one_for_this_torch_is_used_in_silence(here: Sandbox, tmp_path: Path) -> None:
    folder = tmp_path / "ops"
    made = installed(here, folder)
    assert made.name == f"tiny.torch{MINOR}.abi3.so"
    for other in ("2.3.0", "9.9.1"):
        installed(here, folder, other)
    assert load(here, folder) == (made.name, "")
    assert not (here.cache / "nvme_ops").exists()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"torch": "2.3"}, f"torch: built for 2.3, here {MINOR}"),
        pytest.param({"sources": "0"}, "its sources changed", marks=pytest.mark.slow),
        pytest.param({"cxx11_abi": "False"}, "cxx11_abi: built for False", marks=pytest.mark.slow),
        pytest.param({"python": "abi3 of 9.9"}, "python: built for abi3 of 9.9", marks=pytest.mark.slow),
        pytest.param({"machine": "pdp11"}, "machine: built for pdp11", marks=pytest.mark.slow),
    ],
)
def test_a_mismatch_is_not_used_and_named(here: Sandbox, tmp_path: Path, change: dict[str, str], reason: str) -> None:
    made = installed(here, tmp_path / "ops")
    record = prebuilt.record_path(made)
    assert record.name == f"tiny.torch{MINOR}.build.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), **change}))
    name, said = load(here, tmp_path / "ops")
    assert name == "tiny.so"
    assert f"UserWarning: the prebuilt tiny op is not used ({reason}" in said


def test_another_build_of_the_same_torch_fits() -> None:
    exact = {"torch": "2.13.0+cpu", "torch_commit": "1", "sources": "2", "cxx11_abi": "True", "cuda": "None",
             "hip": "None", "python": ".cpython-311-x86_64-linux-gnu.so", "machine": "x86_64"}  # fmt: skip
    another = {**exact, "torch": "2.13.1+cu130", "torch_commit": "2", "cuda": "13.0", "python": ".cpython-314-....so"}
    assert prebuilt.portable_requirements(exact) == prebuilt.portable_requirements(another)
    assert prebuilt.portable_requirements(exact) != prebuilt.portable_requirements({**exact, "torch": "2.14.0"})


def test_a_python_without_abi3_takes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = {"torch": "2.13.0", "sources": "2", "cxx11_abi": "True", "machine": "x86_64"}
    fitting = prebuilt.portable_requirements(exact)["python"]
    monkeypatch.setattr("importlib.machinery.EXTENSION_SUFFIXES", [".cpython-314t-x86_64-linux-gnu.so", ".so"])
    assert prebuilt.portable_requirements(exact)["python"] != fitting


def test_what_the_compiler_says_is_the_error(here: Sandbox, tmp_path: Path) -> None:
    here.source.write_text("this is not C++\n")
    with pytest.raises(RuntimeError, match="this is not C"):
        installed(here, tmp_path / "ops")
