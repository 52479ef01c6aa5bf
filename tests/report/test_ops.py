"""The rows of the table of ops, from builders whose op fits, does not fit, cannot be built or cannot be used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from nvme_ops.op_builder import ALL_OPS, OpBuilder, finished, recipe
from nvme_ops.op_builder.finished import BuiltOp
from nvme_ops.report import ops
from nvme_ops.report.result import Result, Status, run_checks
from tests.made_up import WITH_GPU, ForAGpu, clear_environment, put, without

OKAY, WARNING, NO = Status.OKAY, Status.WARNING, Status.NO
NO_COMPILER = "no C++ compiler was found"


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


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of prebuilt ops and an empty cache."""
    folder = tmp_path / "ops"
    folder.mkdir()
    monkeypatch.setattr(finished, "OPS", folder)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    return folder


def prebuild(folder: Path, builder: OpBuilder, **changes: object) -> None:
    library = folder / "made_up.abi3.so"
    library.write_bytes(b"not a library")
    finished.record_path(library).write_text(json.dumps({**builder.recipe().facts(), **changes}))


def row(builder: OpBuilder) -> Result:
    (result,) = run_checks({builder.name: lambda: ops.row(builder)})
    return result


def test_an_op_is_compatible_where_it_can_be_built_and_usable_without_libaio(tmp_path: Path) -> None:
    builder = MadeUp(tmp_path)
    result = row(builder)
    assert (result.status, result.data["installed"], result.data["compatible"]) == (OKAY, False, True)
    builder.warnings = ["made_up requires the dev libaio .so object and headers but these were not found."]
    result = row(builder)
    assert (result.status, result.data["warnings"], result.fix) == (
        OKAY, builder.warnings, ops.install_command("libaio")
    )  # fmt: skip


def test_one_that_cannot_be_built_has_the_fix_for_what_a_build_lacks_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CPPFLAGS", "CFLAGS", "CXXFLAGS", "LDFLAGS"):
        monkeypatch.delenv(name, raising=False)
    result = row(MadeUp(tmp_path, NO_COMPILER))
    assert (result.status, result.detail, result.fix) == (NO, NO_COMPILER, ops.install_command("compiler"))
    assert ops.unusable([result]) == [result]
    monkeypatch.setenv("CFLAGS", "-no-such-flag")
    assert row(MadeUp(tmp_path, "unrecognized option")).fix.startswith("unset CPPFLAGS CFLAGS")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    result = row(MadeUp(tmp_path))
    assert (result.status, result.fix.partition("  #")[0]) == (NO, "unset TORCH_EXTENSIONS_DIR")
    assert result.detail.endswith(f"cache can be written by everybody (fix: chmod go-w '{tmp_path / 'cache'}')")


@pytest.mark.parametrize("changes", [{}, {"torch": "1.0.0"}], ids=["no library", "another torch"])
def test_a_prebuilt_op_that_does_not_fit_is_a_warning_or_unusable_where_none_can_be_built(
    changes: dict[str, str], tmp_path: Path, installed: Path
) -> None:
    reason = "torch: built for 1.0.0" if changes else "made_up.abi3.so"  # the linker's words
    builder = MadeUp(tmp_path)
    prebuild(installed, builder, **changes)
    result = row(builder)
    assert (result.status, result.data["installed"]) == (WARNING, True)
    assert reason in result.detail
    assert result.fix.startswith("NVME_BUILD_MADE_UP=1 ")
    builder.problem = NO_COMPILER
    result = row(builder)
    assert result.status is NO
    assert all(words in result.detail for words in ("is not used", reason, NO_COMPILER))


LACKS = "libcufile.so.0 is not found; no /proc/modules"
GPUS: dict[str, tuple[dict[str, str], Status, str, str, bool]] = {
    "no GPU": ({}, NO, "no NVIDIA GPU is visible", "docker run --gpus all", False),
    "a GPU only": (WITH_GPU, NO, LACKS, "pip install nvidia-cufile", True),
    "all but udev": (without("udev"), WARNING, "no /run/udev/data", "docker run -v /run/udev", True),
}  # fmt: skip


@pytest.mark.parametrize("name", GPUS)
def test_gds_is_expected_where_there_is_a_gpu(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, status, words, fix, expected = GPUS[name]
    clear_environment(monkeypatch, tmp_path / "root")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    put(tmp_path / "root", files)
    result = row(ForAGpu(tmp_path / "root"))
    assert (result.status, result.data["compatible"]) == (status, status is not NO)
    assert all(part in result.detail for part in words.split("; "))
    assert fix in result.fix
    assert result.data["expected"] == expected
    assert ops.unusable([result]) == ([result] if status is NO and expected else [])
    assert ops.unusable([result], ["gds"]) == ([result] if status is NO else [])


def test_what_a_prebuilt_op_was_compiled_with_is_read_from_its_record(
    tmp_path: Path, installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builder = MadeUp(tmp_path)
    monkeypatch.setattr(ops, "ALL_OPS", {"async_io": builder, "gds": ForAGpu(tmp_path)})
    prebuild(installed, builder)
    row(builder)
    built = ops.all_built()
    (result,) = ops.compiled_with(built)
    assert result.name == "async_io compiled with"
    assert result.detail.endswith("prebuilt")
    assert result.data["torch"] == builder.recipe().facts()["torch"]


def test_a_missing_compiler_is_no_complaint_where_all_ops_are_built() -> None:
    missing = Result("C++ compiler", NO, "not found (c++): ops cannot be compiled here", "apt-get install g++")
    built = {name: BuiltOp("prebuilt", Path("op.so"), {}) for name in ALL_OPS}
    assert ops.if_needed(lambda: missing, {"gds": built["gds"]}) == missing
    found = ops.if_needed(lambda: missing, built)
    assert (found.status, found.fix) == (Status.INFO, "")


def test_a_fix_names_where_the_package_came_from(monkeypatch: pytest.MonkeyPatch) -> None:
    class Made:
        url = "file:///home/a%20user/nvme_ops"

        def read_text(self, _: str) -> str:
            return json.dumps({"url": self.url})

    monkeypatch.setattr("importlib.metadata.distribution", lambda _: Made())
    assert recipe.requirement() == "'/home/a user/nvme_ops'"
    Made.url = ""
    assert recipe.requirement() == "nvme-ops"
