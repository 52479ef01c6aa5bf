"""The builders as DeepNVMe's users know them, and that importing them does nothing."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

from nvme_ops.op_builder import ALL_OPS, AsyncIOBuilder, GDSBuilder, OpBuilder, jit, machine, recipe
from tests.conftest import run_python
from tests.op_builder.tiny_op import REPOSITORY


@pytest.mark.parametrize(
    ("builder", "variable"), [(AsyncIOBuilder(), "NVME_BUILD_AIO"), (GDSBuilder(), "NVME_BUILD_GDS")]
)
def test_a_builder_describes_its_op(builder: OpBuilder, variable: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert type(ALL_OPS[builder.name]) is type(builder)
    assert (builder.BUILD_VAR, builder.NAME, builder.build_for_cpu) == (variable, builder.name, True)
    assert not any("march" in flag for flag in builder.cxx_args()), "a prebuilt op runs on other machines"
    extension = builder.builder()
    assert extension.name == builder.absolute_name() == f"nvme_ops.ops.{builder.name}"
    assert [Path(source).resolve() for source in extension.sources] == [Path(p).resolve() for p in builder.sources()]
    assert extension.extra_compile_args == {"cxx": builder.cxx_args()}
    assert str(builder.source_root()) in extension.include_dirs
    builder.is_compatible()
    assert capfd.readouterr() == ("", "")


def test_validate_torch_version() -> None:
    builder = AsyncIOBuilder()
    builder.validate_torch_version({"version": torch.__version__})
    builder.validate_torch_version({"version": ".".join(torch.__version__.split(".")[:2])})
    with pytest.raises(RuntimeError, match=r"PyTorch version mismatch!.*Install torch version=1\.9, Runtime torch"):
        builder.validate_torch_version({"version": "1.9"})


def test_a_new_source_is_compiled_without_being_listed(tmp_path: Path) -> None:
    for name in ("engine/b.cpp", "base/z.cpp", "base/a.cpp", "base/gds_x.cpp", "elsewhere/no.cpp"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert [path.name for path in recipe.compiled("async_io", tmp_path)] == ["a.cpp", "z.cpp", "b.cpp"]
    assert [path.name for path in recipe.compiled("gds", tmp_path, ("base",))] == ["a.cpp", "gds_x.cpp", "z.cpp"]
    for op in ALL_OPS:
        names = [path.stem for path in recipe.compiled(op)]
        assert len(set(names)) == len(names), "torch compiles all into one folder"


def test_importing_has_no_side_effect(tmp_path: Path) -> None:
    program = f"""
import subprocess, sys, os
def refuse(*args, **kwargs): raise AssertionError(args)
subprocess.Popen.__init__ = refuse
sys.path.insert(0, {str(REPOSITORY)!r})
before = dict(os.environ)
from nvme_ops.ops import aio, gds, pin_memory
assert "torch" not in sys.modules
from nvme_ops.op_builder import AsyncIOBuilder, GDSBuilder, ALL_OPS
AsyncIOBuilder(), GDSBuilder()
assert "torch.utils.cpp_extension" not in sys.modules
assert dict(os.environ) == before
import torch
assert not torch.cuda.is_initialized()
"""
    environment = {"HOME": str(tmp_path), "TORCH_EXTENSIONS_DIR": str(tmp_path / "cache"), "PATH": ""}
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, cwd=tmp_path
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("op", ALL_OPS)
def test_the_binding_compiles_as_one_file(tmp_path: Path, op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So do the layers below, of which tests/cpp makes one file, too."""
    import torch.utils.cpp_extension as extension

    monkeypatch.setattr(machine, "TIMEOUT_SECONDS", 240)  # beside other compilations
    recipe = ALL_OPS[op].recipe()
    united = jit.unite(tmp_path, recipe)[1]
    assert recipe.compiler is not None
    system = [*extension.include_paths(), sysconfig.get_path("include")]
    includes = [*(f"-I{path}" for path in recipe.include_paths), *(f"-isystem{path}" for path in system)]
    flags = [*recipe.cxx_args, *includes, f"-DTORCH_EXTENSION_NAME={op}", "-std=c++20", "-fsyntax-only", "-Werror"]
    result = recipe.compiler.run(*flags, str(united))
    assert result.returncode == 0, "it takes a third of the time, so keep names distinct:\n" + result.stdout


@pytest.mark.parametrize("first", ["import", "load"])
def test_deepspeeds_import_places(first: str) -> None:
    """The native gds op has the name of one of these packages, and takes its place when it is loaded."""
    program = """
        import importlib, sys
        from nvme_ops import op_builder
        places = {"aio": "AsyncIOBuilder", "gds": "GDSBuilder", "pin_memory": "PinMemoryBuilder"}
        if sys.argv[1] == "import":
            for place in places:
                importlib.import_module(f"nvme_ops.ops.{place}")
        for place, name in places.items():
            builder = getattr(op_builder, name)
            native = builder().load()
            exec(f"from nvme_ops.ops.{place} import {name} as found")
            assert found is getattr(importlib.import_module(f"nvme_ops.ops.{place}"), name) is builder
            assert builder().load() is native
            assert hasattr(native, f"{place.removesuffix('_memory')}_handle")
    """
    run_python(program, first)
