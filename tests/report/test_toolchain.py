"""The lines about ninja, compiler, headers, CUDA, torch and packages, each with what goes wrong provoked."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import pytest

from nvme_ops.op_builder import machine
from nvme_ops.op_builder.machine import Host
from nvme_ops.report import ops
from nvme_ops.report.result import Result, Status


def program(folder: Path, name: str, body: str) -> Path:
    folder.mkdir(exist_ok=True)
    file = folder / name
    file.write_text(f"#!/bin/sh\n{body}\n")
    file.chmod(0o755)
    return file


def complaint(result: Result, status: Status) -> str:
    assert result.status is status, result
    assert result.fix
    return result.detail


def test_a_ninja_that_runs_is_okay() -> None:
    if machine.ninja_directory() is None:
        pytest.skip("ninja is not installed")
    assert ops.ninja().status is Status.OKAY


def test_a_missing_ninja_is_a_failure_with_its_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "ninja_directory", lambda: None)
    result = ops.ninja()
    assert complaint(result, Status.FAIL) == "not found"
    assert "pip install" in result.fix


def test_a_ninja_that_fails_is_a_failure_in_its_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path / "bin", "ninja", "echo GLIBC_2.99 not found; exit 3")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    assert "exit status 3: GLIBC_2.99 not found" in complaint(ops.ninja(), Status.FAIL)


def test_a_ninja_that_hangs_does_not_hang_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path / "bin", "ninja", "exec sleep 600")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setattr(ops, "COMMAND_TIMEOUT", 0.1)
    assert "no answer" in complaint(ops.ninja(), Status.FAIL)


def test_no_compiler_on_the_path_says_how_to_install_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    result = ops.compiler()
    assert "c++, g++, clang++" in complaint(result, Status.NO)
    assert "g++" in result.fix


def test_a_cxx_that_is_not_there_is_to_be_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    result = ops.compiler()
    assert "no-such-compiler" in complaint(result, Status.NO)
    assert result.fix.startswith("unset CXX")


def test_a_compiler_that_fails_is_refused_in_its_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(program(tmp_path, "cxx", "echo licence expired; exit 1")))
    assert "licence expired" in complaint(ops.compiler(), Status.NO)


def test_a_compiler_that_cannot_be_executed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "cxx"
    file.write_text("#!/no/such/interpreter\n")
    file.chmod(0o755)
    monkeypatch.setenv("CXX", str(file))
    assert complaint(ops.compiler(), Status.NO)


@pytest.mark.parametrize(
    ("banner", "status"),
    [
        ("c++ (Debian 12.2.0-14+deb12u1) 12.2.0", Status.OKAY),
        ("g++ (GCC) 8.5.0 20210514 (Red Hat 8.5.0-22)", Status.WARNING),
        ("Ubuntu clang version 14.0.0-1ubuntu1.1", Status.OKAY),
        ("clang version 7.0.1-8 (tags/RELEASE_701/final)", Status.WARNING),
        ("some other compiler", Status.OKAY),
    ],
)
def test_the_version_of_the_compiler_is_judged(
    banner: str, status: Status, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(program(tmp_path, "cxx", f"echo '{banner}'")))
    result = ops.compiler()
    assert result.status is status
    assert result.data["version"] == banner


def test_missing_python_headers_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert str(tmp_path) in complaint(ops.python_headers(), Status.NO)


def test_a_cuda_home_that_is_no_folder_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "gone"))
    home, nvcc = ops.cuda(Host())
    assert "gone" in complaint(home, Status.WARNING)
    assert nvcc.status is Status.INFO


def test_the_nvcc_inside_cuda_home_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    program(tmp_path / "bin", "nvcc", "echo 'Cuda compilation tools, release 12.8, V12.8.93'")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    home, nvcc = ops.cuda(Host())
    assert (home.status, home.detail) == (Status.INFO, str(tmp_path))
    assert nvcc.data["version"] == "12.8"
    program(tmp_path / "bin", "nvcc", "exit 1")
    assert ops.cuda(Host())[1].status is Status.INFO


def test_no_cuda_at_all_is_only_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert [result.status for result in ops.cuda(Host(tmp_path))] == [Status.INFO, Status.INFO]


def test_the_environment_of_torch_is_shown() -> None:
    results = {result.name: result for result in ops.torch()}
    assert set(results) == {"torch install path", "torch version", "torch cuda version", "torch C++ ABI"}
    assert Path(results["torch install path"].detail).is_dir()


@pytest.mark.parametrize(
    ("version", "status"), [("2.13.0+cpu", Status.INFO), ("2.4.0a0+git", Status.INFO), ("2.3.1", Status.WARNING)]
)
def test_a_torch_that_is_too_old_is_a_warning(version: str, status: Status) -> None:
    result = ops.torch_version(version)
    assert result.status is status
    assert bool(result.fix) == (status is Status.WARNING)


def test_the_package_itself_is_shown() -> None:
    results = {result.name: result.detail for result in ops.package()}
    assert Path(results["nvme_ops install path"], "report").is_dir()
    assert results["nvme_ops version"][0].isdigit()


@pytest.mark.parametrize(
    ("manager", "command"),
    [
        ("apt-get", "apt-get install -y libaio-dev"),
        ("dnf", "dnf install -y libaio-devel"),
        ("yum", "yum install -y libaio-devel"),
        ("pacman", "pacman -S --noconfirm libaio"),
        ("apk", "apk add libaio-dev"),
    ],
)
def test_the_command_is_that_of_the_package_manager_at_hand(
    manager: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "conda_prefix", lambda: None)
    program(tmp_path / "bin", manager, "")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert ops.install_command("libaio") == command


def test_in_a_conda_environment_the_command_is_condas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "conda_prefix", lambda: tmp_path)
    assert ops.install_command("compiler") == "conda install -y -c conda-forge gxx"


def test_without_a_known_package_manager_the_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "conda_prefix", lambda: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    for piece in ("compiler", "python headers", "libaio", "nvidia-gds"):
        assert ops.install_command(piece).startswith("install ")
