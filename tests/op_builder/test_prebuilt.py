"""Ahead-of-time built ops: used when they fit this torch and Python, replaced with a warning when they do not."""

from __future__ import annotations

import importlib.machinery
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from nvme_ops.op_builder import prebuilt
from tests.op_builder.tiny_op import Sandbox, TinyBuilder, here, sandbox


@pytest.fixture
def installed(here: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tiny op, prebuilt into a folder that stands in for the package's own; returns the library."""
    monkeypatch.setattr(prebuilt, "OPS", tmp_path / "ops")
    library = tmp_path / "ops" / f"tiny{importlib.machinery.EXTENSION_SUFFIXES[0]}"
    prebuilt.build(TinyBuilder().recipe(), library)
    return library


def load(sandbox: Sandbox, installed: Path) -> tuple[str, str]:
    """The file that a new process loads the op from, and what it says while doing so."""
    program = f"""
from pathlib import Path
from nvme_ops.op_builder import prebuilt
prebuilt.OPS = Path({str(installed.parent)!r})
builder = TinyBuilder()
module = builder.load()
assert module.answer() in (42, 43)
assert builder.jit_mode == (not module.__file__.startswith(str(prebuilt.OPS)))
print(module.__file__)
"""
    done = sandbox.end(program)
    output, errors = done.stdout, done.stderr
    assert done.returncode == 0, errors
    return output.strip(), errors


def test_a_fitting_op_is_used_in_silence(sandbox: Sandbox, installed: Path) -> None:
    assert TinyBuilder().is_installed()
    assert TinyBuilder().is_compatible()
    assert load(sandbox, installed) == (str(installed), "")
    assert sandbox.compilations() == 1
    assert not (sandbox.cache / "nvme_ops").exists()


def change_record(**changes: str) -> Callable[[Path, Sandbox], None]:
    def change(library: Path, _: Sandbox) -> None:
        record = prebuilt.record_path(library)
        record.write_text(json.dumps({**json.loads(record.read_text()), **changes}))

    return change


def lose_record(library: Path, _: Sandbox) -> None:
    prebuilt.record_path(library).unlink()


def spoil_record(library: Path, _: Sandbox) -> None:
    prebuilt.record_path(library).write_text("[]")


def spoil_library(library: Path, _: Sandbox) -> None:
    library.write_bytes(b"\x7fELF but not really")


def change_source(_: Path, sandbox: Sandbox) -> None:
    sandbox.header.write_text("#define ANSWER 43\n")


MISMATCHES = {
    "another torch": (change_record(torch="1.0.0"), r"torch: built for 1\.0\.0, here 2\."),
    "another ABI": (change_record(cxx11_abi="neither"), "cxx11_abi: built for neither"),
    "another Python": (change_record(python=".cpython-37m.so"), r"python: built for \.cpython-37m\.so"),
    "another machine": (change_record(machine="pdp11"), "machine: built for pdp11"),
    "changed sources": (change_source, "its sources changed"),
    "no record": (lose_record, r"tiny\.build\.json is missing"),
    "bad record": (spoil_record, r"tiny\.build\.json is missing"),
    "bad library": (spoil_library, "file too short|invalid ELF header"),
}


@pytest.mark.parametrize(("spoil", "reason"), MISMATCHES.values(), ids=MISMATCHES.keys())
def test_a_mismatch_is_not_used_and_named(
    sandbox: Sandbox, installed: Path, spoil: Callable[[Path, Sandbox], None], reason: str
) -> None:
    spoil(installed, sandbox)
    with pytest.warns(UserWarning, match=rf"the prebuilt tiny op is not used \(.*({reason})"):
        assert TinyBuilder().load_prebuilt() is None


def test_a_mismatch_is_built_just_in_time_with_a_warning(sandbox: Sandbox, installed: Path) -> None:
    change_source(installed, sandbox)
    file, said = load(sandbox, installed)
    assert Path(file).is_relative_to(sandbox.cache)
    assert "UserWarning: the prebuilt tiny op is not used (its sources changed)" in said
    assert sandbox.compilations() == 2


def test_an_op_for_another_python_only_is_a_mismatch(sandbox: Sandbox, installed: Path) -> None:
    installed.rename(installed.with_name("tiny.cpython-37m-x86_64-linux-gnu.so"))
    change_record(python=".cpython-37m-x86_64-linux-gnu.so")(installed, sandbox)
    assert not TinyBuilder().is_installed()
    assert "python: built for .cpython-37m" in load(sandbox, installed)[1]


def test_a_mismatch_without_a_compiler_says_both(sandbox: Sandbox, installed: Path, tmp_path: Path) -> None:
    change_record(torch="1.0.0")(installed, sandbox)
    program = f"""
from pathlib import Path
from nvme_ops.op_builder import prebuilt
prebuilt.OPS = Path({str(installed.parent)!r})
TinyBuilder().load()
"""
    errors = sandbox.end(program, {"PATH": str(tmp_path), "CXX": ""}).stderr
    assert "torch: built for 1.0.0" in errors
    assert "RuntimeError: Unable to JIT load the tiny op" in errors
    assert "no C++ compiler was found" in errors


def test_the_same_flags_as_just_in_time(sandbox: Sandbox, installed: Path) -> None:
    ahead = next(call for call in sandbox.compiler_calls() if "tiny.cpp" in call)
    sandbox.run("TinyBuilder().jit_load(verbose=False)")
    just_in_time = [call for call in sandbox.compiler_calls() if "tiny.cpp" in call][1]
    assert ahead == just_in_time


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"NVME_BUILD_AIO": "1"}, True),
        ({"NVME_BUILD_AIO": "0"}, False),
        ({"DS_BUILD_AIO": "1"}, True),
        ({"NVME_BUILD_AIO": "0", "DS_BUILD_AIO": "1"}, False),
        ({"NVME_BUILD_AIO": "", "DS_BUILD_AIO": "1"}, True),
    ],
)
def test_the_variables_and_their_aliases(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: bool | None
) -> None:
    for name in ("NVME_BUILD_AIO", "DS_BUILD_AIO"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert prebuilt.variable("NVME_BUILD_AIO") is expected


def test_a_variable_that_is_neither_1_nor_0_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_BUILD_AIO", "yes")
    monkeypatch.delenv("NVME_BUILD_AIO", raising=False)
    with pytest.raises(ValueError, match="DS_BUILD_AIO must be 1 or 0, not 'yes'"):
        prebuilt.variable("NVME_BUILD_AIO")
