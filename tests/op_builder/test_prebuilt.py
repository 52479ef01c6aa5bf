"""Ahead-of-time built ops, for this Python or for every one: used when they fit, replaced with a warning if not."""

from __future__ import annotations

import importlib.machinery
import json
import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import make_wheel
import pytest
import torch

from nvme_ops.op_builder import finished, jit, machine, recipe
from tests.op_builder.tiny_op import Sandbox, TinyBuilder, here, once, sandbox, workshop

MINOR = finished.minor(str(torch.__version__))
needs_abi3 = pytest.mark.skipif(
    ".abi3.so" not in importlib.machinery.EXTENSION_SUFFIXES, reason="this Python has no abi3"
)


@pytest.fixture
def installed(here: Sandbox, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tiny op, prebuilt into a folder that stands in for the package's own; returns the library."""
    library = here.csrc.parent / "ops" / f"tiny{importlib.machinery.EXTENSION_SUFFIXES[0]}"
    monkeypatch.setattr(finished, "OPS", library.parent)
    once(here, lambda: jit.prebuild(TinyBuilder().recipe(), library))
    return library


def portable(folder: Path, version: str = torch.__version__) -> Path:
    """The tiny op as a wheel has it, for one version of torch."""
    compiler, include = machine.find_compiler(), Path(torch.__file__).parent / "include"
    assert compiler is not None
    return make_wheel.compile_op(TinyBuilder(), compiler, version, include, Path(sysconfig.get_path("include")), folder)


def load(sandbox: Sandbox, folder: Path, **environment: str) -> tuple[str, str]:
    """The file that a new process loads the op from, and what it says while doing so."""
    program = f"""
from pathlib import Path
from types import SimpleNamespace
from nvme_ops.op_builder import finished
finished.OPS = Path({str(folder)!r})
builder = TinyBuilder()
module = builder.load()
assert module.answer() in (42, 43)
assert builder.jit_mode == (not module.__file__.startswith(str(finished.OPS)))
print(module.__file__)
"""
    done = sandbox.end(program, environment)
    return done.stdout.strip(), done.stderr


def change_record(library: Path, **changes: str) -> None:
    record = finished.record_path(library)
    record.write_text(json.dumps({**json.loads(record.read_text()), **changes}))


def test_a_fitting_op_is_used_in_silence_and_has_the_flags_of_the_cache(sandbox: Sandbox, installed: Path) -> None:
    builder = TinyBuilder()
    assert builder.is_compatible()
    assert builder.built == finished.find_prebuilt("tiny")
    assert load(sandbox, installed.parent) == (str(installed), "")
    assert sandbox.compilations() == 1
    assert not (sandbox.cache / "nvme_ops").exists()
    sandbox.run("TinyBuilder().jit_load(verbose=False)")
    ahead, just_in_time = [call for call in sandbox.compiler_calls() if "tiny.cpp" in call]
    assert ahead == just_in_time


MISMATCHES: dict[str, tuple[Callable[[Path, Sandbox], object], str]] = {
    "another torch": (lambda op, _: change_record(op, torch="1.0.0"), r"torch: built for 1\.0\.0, here 2\."),
    "another machine": (lambda op, _: change_record(op, machine="pdp11"), "machine: built for pdp11"),
    "changed sources": (lambda _, sandbox: sandbox.header.write_text("#define ANSWER 43\n"), "its sources changed"),
    "bad record": (lambda op, _: finished.record_path(op).write_text("[]"), r"tiny\.build\.json is missing"),
    "bad library": (lambda op, _: op.write_bytes(b"\x7fELF but not really"), "file too short|invalid ELF header"),
}


@pytest.mark.parametrize(("spoil", "reason"), MISMATCHES.values(), ids=MISMATCHES)
def test_a_mismatch_is_not_used_and_named(
    sandbox: Sandbox, installed: Path, spoil: Callable[[Path, Sandbox], object], reason: str
) -> None:
    spoil(installed, sandbox)
    with pytest.warns(UserWarning, match=rf"the prebuilt tiny op is not used \(.*({reason})"):
        assert TinyBuilder().load_prebuilt() is None


def test_an_op_for_another_python_is_built_just_in_time_with_a_warning(sandbox: Sandbox, installed: Path) -> None:
    other = ".cpython-37m-x86_64-linux-gnu.so"
    change_record(installed.rename(installed.with_name(f"tiny{other}")), python=other)
    assert TinyBuilder().find_built() is None
    file, said = load(sandbox, installed.parent)
    assert Path(file).is_relative_to(sandbox.cache)
    assert "UserWarning: the prebuilt tiny op is not used (python: built for .cpython-37m" in said
    assert sandbox.compilations() == 2
    shutil.rmtree(sandbox.cache)
    _, errors = load(sandbox, installed.parent, PATH="/no/such", CXX="")
    assert "python: built for .cpython-37m" in errors
    assert "RuntimeError: Unable to JIT load the tiny op" in errors
    assert "no C++ compiler was found" in errors


# Of a wheel for every Python


@needs_abi3
def test_of_several_the_one_for_this_torch_is_used_in_silence(here: Sandbox, tmp_path: Path) -> None:
    folder = tmp_path / "ops"
    made = portable(folder)
    assert made.name == f"tiny.torch{MINOR}.abi3.so"
    for other in ("2.3.0", "9.9.1"):  # that another library is taken would be seen in its name
        for path, kept in ((made, made.name), (finished.record_path(made), finished.record_path(made).name)):
            (folder / kept.replace(MINOR, finished.minor(other))).write_bytes(path.read_bytes())
    assert load(here, folder) == (str(made), "")
    change_record(made, torch="2.3")
    file, said = load(here, folder)
    assert Path(file).name == "tiny.so"
    assert f"UserWarning: the prebuilt tiny op is not used (torch: built for 2.3, here {MINOR}" in said
    here.source.write_text("this is not C++\n")
    with pytest.raises(RuntimeError, match="this is not C"):
        portable(tmp_path / "others")


def test_another_build_of_the_same_torch_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = {"torch": "2.13.0+cpu", "torch_commit": "1", "sources": "2", "cxx11_abi": "True", "cuda": "None",
             "hip": "None", "python": ".cpython-311-x86_64-linux-gnu.so", "machine": "x86_64"}  # fmt: skip
    another = {**exact, "torch": "2.13.1+cu130", "torch_commit": "2", "cuda": "13.0", "python": ".cpython-314-....so"}
    fitting = finished.portable_requirements(exact)
    assert fitting == finished.portable_requirements(another)
    for change in ({"torch": "2.14.0"}, {"sources": "3"}, {"cxx11_abi": "False"}, {"machine": "pdp11"}):
        assert fitting != finished.portable_requirements({**exact, **change})
    monkeypatch.setattr("importlib.machinery.EXTENSION_SUFFIXES", [".cpython-314t-x86_64-linux-gnu.so", ".so"])
    without_abi3 = finished.portable_requirements(exact)["python"]
    assert without_abi3 != finished.PORTABLE_PYTHON


def test_the_variables_and_their_aliases(monkeypatch: pytest.MonkeyPatch) -> None:
    for own, alias, expected in (("", "", None), ("1", "", True), ("", "1", True), ("0", "1", False)):
        monkeypatch.setenv("NVME_BUILD_AIO", own)
        monkeypatch.setenv("DS_BUILD_AIO", alias)
        assert jit.variable("NVME_BUILD_AIO") is expected
    monkeypatch.setenv("NVME_BUILD_AIO", "yes")
    with pytest.raises(ValueError, match="NVME_BUILD_AIO must be 1 or 0, not 'yes'"):
        jit.variable("NVME_BUILD_AIO")


def test_a_fix_names_where_the_package_came_from(monkeypatch: pytest.MonkeyPatch) -> None:
    for url, requirement in (("file:///home/a%20user/nvme_ops", "'/home/a user/nvme_ops'"), ("", "nvme-ops")):
        made = SimpleNamespace(read_text=lambda _, url=url: json.dumps({"url": url}))
        monkeypatch.setattr("importlib.metadata.distribution", lambda _, made=made: made)
        assert recipe.requirement() == requirement
