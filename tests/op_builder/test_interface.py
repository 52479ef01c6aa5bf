"""The builders as DeepNVMe's users know them, and that importing them does nothing."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

from nvme_ops.handle import aio_handle
from nvme_ops.op_builder import ALL_OPS, AsyncIOBuilder, GDSBuilder, OpBuilder, PinMemoryBuilder, jit, modules, recipe
from nvme_ops.pin_memory import pin_handle
from tests.op_builder.tiny_op import REPOSITORY


def test_the_ops_and_their_variables() -> None:
    assert {name: (type(op), op.NAME, op.name, op.BUILD_VAR) for name, op in ALL_OPS.items()} == {
        "async_io": (AsyncIOBuilder, "async_io", "async_io", "NVME_BUILD_AIO"),
        "gds": (GDSBuilder, "gds", "gds", "NVME_BUILD_GDS"),
    }


@pytest.mark.parametrize("builder", ALL_OPS.values(), ids=ALL_OPS.keys())
def test_small_helpers(builder: OpBuilder) -> None:
    assert builder.absolute_name() == f"nvme_ops.ops.{builder.name}"
    assert (builder.build_for_cpu, OpBuilder("any").jit_mode, OpBuilder("any").error_log) == (True, False, None)
    assert builder.strip_empty_entries(["-a", "", "-b"]) == ["-a", "-b"]
    assert builder.cpu_arch() in ("-march=native", "-mcpu=native")
    assert builder.is_rocm_pytorch() is (torch.version.hip is not None)
    assert all(Path(source).is_file() for source in builder.sources())
    assert not any("march" in flag for flag in builder.cxx_args())


def test_validate_torch_version() -> None:
    builder = AsyncIOBuilder()
    builder.validate_torch_version({"version": torch.__version__})
    builder.validate_torch_version({"version": ".".join(torch.__version__.split(".")[:2])})
    with pytest.raises(RuntimeError, match=r"PyTorch version mismatch!.*Install torch version=1\.9, Runtime torch"):
        builder.validate_torch_version({"version": "1.9"})


@pytest.mark.parametrize("builder", ALL_OPS.values(), ids=ALL_OPS.keys())
def test_builder_describes_an_extension_module(builder: OpBuilder) -> None:
    extension = builder.builder()
    assert extension.name == builder.absolute_name()
    assert [Path(source).resolve() for source in extension.sources] == [Path(p).resolve() for p in builder.sources()]
    assert extension.extra_compile_args == {"cxx": builder.cxx_args()}
    assert str(builder.source_root()) in extension.include_dirs


@pytest.mark.parametrize("op", ALL_OPS)
def test_the_native_sources_have_distinct_names(op: str) -> None:
    stems = [path.stem for path in recipe.compiled(op)]
    assert len(set(stems)) == len(stems), "torch compiles all into one folder"


@pytest.mark.parametrize("op", ALL_OPS)
def test_a_new_source_is_compiled_without_being_listed(tmp_path: Path, op: str) -> None:
    for layer, name in (("engine", "b.cpp"), ("base", "z.cpp"), ("base", "a.cpp"), ("elsewhere", "no.cpp")):
        (tmp_path / layer).mkdir(exist_ok=True)
        (tmp_path / layer / name).touch()
    assert [path.name for path in recipe.compiled(op, tmp_path)] == ["a.cpp", "z.cpp", "b.cpp"]
    assert [path.name for path in recipe.compiled(op, tmp_path, ("engine",))] == ["b.cpp"]


def test_each_op_has_a_module_of_its_own_and_async_io_has_nothing_of_cufile(tmp_path: Path) -> None:
    (tmp_path / "binding").mkdir()
    for name in ("async_io.cpp", "gds_path.cpp", "gds.cpp", "cufile.cpp", "cuda_context.cpp", "shared.cpp"):
        (tmp_path / "binding" / name).touch()
    names = {op: [path.name for path in recipe.compiled(op, tmp_path)] for op in ALL_OPS}
    assert names["async_io"] == ["async_io.cpp", "shared.cpp"]
    assert names["gds"] == ["cuda_context.cpp", "cufile.cpp", "gds.cpp", "gds_path.cpp", "shared.cpp"]


def test_both_ops_share_the_engine() -> None:
    shared = set(recipe.compiled("async_io")) & set(recipe.compiled("gds"))
    assert {path.name for path in shared} >= {"engine.cpp", "io_uring.cpp", "engine_type.cpp"}


@pytest.mark.parametrize(
    "statement",
    [
        "import nvme_ops, nvme_ops.op_builder",
        "from nvme_ops.op_builder import AsyncIOBuilder, GDSBuilder, ALL_OPS; AsyncIOBuilder(); GDSBuilder()",
    ],
)
def test_importing_has_no_side_effect(tmp_path: Path, statement: str) -> None:
    program = f"""
import subprocess, sys, os
def refuse(*args, **kwargs): raise AssertionError(args)
subprocess.Popen.__init__ = refuse
sys.path.insert(0, {str(REPOSITORY)!r})
before = dict(os.environ)
{statement}
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


def test_importing_the_builders_needs_no_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('blocked')\n")
    place = str(REPOSITORY / "op_builder")
    program = f"""
import importlib.util, sys
sys.path.insert(0, {str(tmp_path)!r})
found = importlib.util.spec_from_file_location(
    "alone", {place!r} + "/__init__.py", submodule_search_locations=[{place!r}]
)
sys.modules["alone"] = package = importlib.util.module_from_spec(found)
found.loader.exec_module(package)
assert package.AsyncIOBuilder
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("number", range(len(recipe.UNITED)))
@pytest.mark.parametrize("op", [pytest.param(op, marks=[] if op == "async_io" else pytest.mark.slow) for op in ALL_OPS])
def test_layers_that_are_united_compile_as_one_file(tmp_path: Path, op: str, number: int) -> None:
    import torch.utils.cpp_extension as extension

    recipe = ALL_OPS[op].recipe()
    united = jit.unite(tmp_path, recipe)[number]
    assert recipe.compiler is not None
    system = [*extension.include_paths(), sysconfig.get_path("include")]
    includes = [*(f"-I{path}" for path in recipe.include_paths), *(f"-isystem{path}" for path in system)]
    flags = [*recipe.cxx_args, *includes, f"-DTORCH_EXTENSION_NAME={op}", "-std=c++20", "-fsyntax-only", "-Werror"]
    result = recipe.compiler.run(*flags, str(united))
    assert result.returncode == 0, "it takes a third of the time, so keep names distinct:\n" + result.stdout


@pytest.mark.parametrize(("op", "start"), [(op, start) for op, starts in recipe.OWN.items() for start in starts])
def test_every_name_that_makes_a_file_an_ops_own_is_in_use(op: str, start: str) -> None:
    assert any(path.name.startswith(start) for path in recipe.compiled(op))


def test_type_checkers_know_what_load_returns() -> None:
    """mypy checks this file; what it sees must be there at run time too."""
    handle: type[aio_handle] = AsyncIOBuilder().load().aio_handle
    pinned: type[pin_handle] = PinMemoryBuilder().load().pin_handle
    assert (handle, pinned) == (aio_handle, pin_handle)
    for module, builder in ((modules.AsyncIOModule, AsyncIOBuilder()), (modules.PinMemoryModule, PinMemoryBuilder())):
        assert all(hasattr(builder.load(), name) for name in module.__annotations__)
