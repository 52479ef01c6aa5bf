"""The rows of the table of ops, from builders whose op fits, does not fit, cannot be built or cannot be used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from nvme_ops.op_builder import GDSBuilder, OpBuilder, prebuilt, recipe
from nvme_ops.op_builder.machine import Host
from nvme_ops.report import ops
from nvme_ops.report.result import Result, Status, run_checks
from tests.made_up_gpu import EVERYTHING, WITH_GPU, clear_environment, put


class MadeUp(OpBuilder):
    """An op of one empty source file that nothing ever compiles."""

    NAME: ClassVar[str] = "made_up"
    BUILD_VAR: ClassVar[str] = "NVME_BUILD_MADE_UP"

    def __init__(self, folder: Path, problem: str | None = None) -> None:
        super().__init__(self.NAME)
        self.folder = folder
        self.problem = problem
        (folder / "source.cpp").touch()

    def source_root(self) -> Path:
        return self.folder

    def sources(self) -> list[str]:
        return [str(self.folder / "source.cpp")]

    def toolchain_problem(self) -> str | None:
        return self.problem


class ForAGpu(GDSBuilder):
    """The gds op of a machine that lies at ``root``; nothing ever compiles it."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.host = Host(root)

    def toolchain_problem(self) -> str | None:
        return None

    def _libaio_flags(self) -> list[str]:
        return []


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of prebuilt ops and an empty cache."""
    folder = tmp_path / "ops"
    folder.mkdir()
    monkeypatch.setattr(prebuilt, "OPS", folder)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    return folder


def prebuild(folder: Path, builder: OpBuilder, **changes: str) -> None:
    library = folder / "made_up.abi3.so"
    library.write_bytes(b"not a library")
    record = {**builder.recipe().facts(), **changes}
    prebuilt.record_path(library).write_text(json.dumps(record))


def row(builder: OpBuilder) -> Result:
    (result,) = run_checks({builder.name: lambda: ops.row(builder, ops.built)})
    assert result.fix or not result.status.needs_fix
    return result


@pytest.mark.usefixtures("installed")
def test_an_op_that_can_be_built_is_compatible_and_not_installed(tmp_path: Path) -> None:
    result = row(MadeUp(tmp_path))
    assert result.status is Status.OKAY
    assert (result.data["installed"], result.data["compatible"]) == (False, True)
    assert ops.unusable([result]) == []


@pytest.mark.usefixtures("installed")
def test_an_op_that_cannot_be_built_gives_the_builders_reason(tmp_path: Path) -> None:
    result = row(MadeUp(tmp_path, "no C++ compiler was found"))
    assert (result.status, result.detail) == (Status.NO, "no C++ compiler was found")
    assert ops.unusable([result]) == [result]


@pytest.mark.usefixtures("installed")
def test_the_fix_is_for_what_a_build_lacks_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CPPFLAGS", "CFLAGS", "CXXFLAGS", "LDFLAGS"):
        monkeypatch.delenv(name, raising=False)
    assert row(MadeUp(tmp_path, "the C++ compiler does not work")).fix == ops.install_command("compiler")
    monkeypatch.setenv("CFLAGS", "-no-such-flag")
    assert row(MadeUp(tmp_path, "unrecognized option")).fix.startswith("unset CPPFLAGS CFLAGS")
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert row(MadeUp(tmp_path, "no C++ compiler was found")).fix.startswith("unset CXX")


@pytest.mark.usefixtures("installed")
def test_what_the_builder_could_also_use_is_no_warning_and_has_its_fix(tmp_path: Path) -> None:
    builder = MadeUp(tmp_path)
    builder.warnings = ["made_up requires the dev libaio .so object and headers but these were not found."]
    result = row(builder)
    assert result.status is Status.OKAY, "it works without"
    assert result.data["warnings"] == builder.warnings
    assert result.fix == ops.install_command("libaio")


def test_a_prebuilt_op_for_another_torch_is_a_warning(tmp_path: Path, installed: Path) -> None:
    builder = MadeUp(tmp_path)
    prebuild(installed, builder, torch="1.0.0")
    result = row(builder)
    assert (result.status, result.data["installed"]) == (Status.WARNING, True)
    assert "torch: built for 1.0.0" in result.detail
    assert result.fix.startswith("NVME_BUILD_MADE_UP=1 ")


def test_a_prebuilt_op_that_cannot_be_loaded_is_a_warning_in_the_linkers_words(tmp_path: Path, installed: Path) -> None:
    builder = MadeUp(tmp_path)
    prebuild(installed, builder)
    result = row(builder)
    assert result.status is Status.WARNING
    assert "made_up.abi3.so" in result.detail


@pytest.mark.parametrize("changes", [{}, {"torch": "1.0.0"}])
def test_a_prebuilt_op_that_does_not_fit_and_cannot_be_rebuilt_is_unusable(
    changes: dict[str, str], tmp_path: Path, installed: Path
) -> None:
    builder = MadeUp(tmp_path, "no C++ compiler was found")
    prebuild(installed, builder, **changes)
    result = row(builder)
    assert result.status is Status.NO
    assert "does not fit" in result.detail
    assert "no C++ compiler was found" in result.detail
    assert ops.unusable([result]) == [result]


@pytest.fixture
def root(installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root of a machine to make up, for a torch with CUDA."""
    clear_environment(monkeypatch, tmp_path / "root")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    return tmp_path / "root"


def test_without_a_gpu_gds_is_not_usable_and_nobody_expects_it(root: Path) -> None:
    result = row(ForAGpu(root))
    assert result.status is Status.NO
    assert result.detail == "no NVIDIA GPU is visible, and only the gds op needs one"
    assert "docker run --gpus all" in result.fix
    assert (result.data["compatible"], result.data["expected"]) == (False, False)
    assert ops.unusable([result]) == []
    assert ops.unusable([result], ["gds"]) == [result]


def test_with_a_gpu_gds_is_expected_and_all_that_it_lacks_is_named(root: Path) -> None:
    put(root, WITH_GPU)
    result = row(ForAGpu(root))
    assert result.status is Status.NO
    assert [words.partition(":")[0] for words in result.detail.split("; ")] == [
        "libcufile.so.0 is not found",
        "no /proc/modules",
    ]
    assert result.fix.startswith("pip install nvidia-cufile")
    assert ops.unusable([result]) == [result]
    assert ops.unusable([result], ["async_io"]) == []


def test_with_everything_gds_is_usable(root: Path) -> None:
    put(root, EVERYTHING)
    result = row(ForAGpu(root))
    assert (result.status, result.data["compatible"], result.data["expected"]) == (Status.OKAY, True, True)


def test_what_gds_can_do_without_is_a_warning_with_its_fix(root: Path) -> None:
    put(root, {name: text for name, text in EVERYTHING.items() if "udev" not in name})
    result = row(ForAGpu(root))
    assert result.status is Status.WARNING
    assert result.data["compatible"] is True
    assert "no /run/udev/data" in result.detail
    assert result.fix.startswith("docker run -v /run/udev")


def test_a_gds_op_that_cannot_be_built_gives_the_builders_reason(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ForAGpu, "toolchain_problem", lambda self: "no C++ compiler was found")
    result = row(ForAGpu(root))
    assert (result.status, result.detail) == (Status.NO, "no C++ compiler was found")


@pytest.mark.usefixtures("installed")
def test_a_crashing_builder_is_a_row_and_counts_as_unusable(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    builder = MadeUp(tmp_path / "gone")
    (tmp_path / "gone" / "source.cpp").unlink()
    result = row(builder)
    assert result.status is Status.FAIL
    assert "source.cpp" in result.detail
    assert ops.unusable([result]) == [result]


def test_what_a_prebuilt_op_was_compiled_with_is_shown(
    tmp_path: Path, installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builder = MadeUp(tmp_path)
    prebuild(installed, builder)
    monkeypatch.setattr(ops, "ALL_OPS", {"made_up": builder, "gds": ForAGpu(tmp_path)})
    (result,) = ops.compiled_with(ops.built)
    assert result.name == "made_up compiled with"
    assert result.detail.endswith("prebuilt")
    assert result.data["torch"] == builder.recipe().facts()["torch"]


def test_whether_libaio_is_compiled_in_is_read_from_the_op_that_would_be_loaded(
    tmp_path: Path, installed: Path
) -> None:
    builder = MadeUp(tmp_path)
    assert not ops.has_libaio(builder, ops.built)
    record = {**builder.recipe().facts(), "cxx_args": ["-O2", "-DNVME_OPS_HAVE_LIBAIO=1"]}
    library = installed / "made_up.abi3.so"
    library.touch()
    prebuilt.record_path(library).write_text(json.dumps(record))
    assert ops.has_libaio(builder, ops.built)


def test_a_cache_that_others_can_write_to_is_a_reason(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    result = ops.row(MadeUp(tmp_path), ops.built)
    assert (result.status, result.fix.partition("  #")[0]) == (Status.NO, "unset TORCH_EXTENSIONS_DIR")
    assert result.detail.endswith(f"cache can be written by everybody (fix: chmod go-w '{tmp_path / 'cache'}')")


def test_a_missing_compiler_is_no_complaint_where_all_ops_are_built() -> None:
    missing = Result("C++ compiler", Status.NO, "not found (c++): ops cannot be compiled here", "apt-get install g++")
    assert ops.if_needed(lambda: missing, lambda _: None) == missing
    found = ops.if_needed(lambda: missing, lambda _: ops.Built("prebuilt", Path("op.so"), {}))
    assert (found.status, found.detail, found.fix) == (
        Status.INFO,
        "not found (c++), nor needed: the ops are built",
        "",
    )


def test_a_fix_names_where_the_package_came_from(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Made:
        url = "file:///home/a%20user/nvme_ops"

        def read_text(self, _: str) -> str:
            return json.dumps({"url": self.url, "dir_info": {}})

    monkeypatch.setattr("importlib.metadata.distribution", lambda _: Made())
    assert recipe.requirement() == "'/home/a user/nvme_ops'"
    Made.url = ""
    assert recipe.requirement() == "nvme-ops"
