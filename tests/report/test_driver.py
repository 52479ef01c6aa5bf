"""``--open-driver`` with small libraries that pretend to be cuFile; they say nothing about a GPU or the real one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from nvme_ops.op_builder import GDSBuilder, machine
from nvme_ops.report import gds, ops
from nvme_ops.report.result import Result, Status
from tests import prepared

LIBRARY = r"""
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <sys/types.h>
#include <unistd.h>
struct Status { int code, cuda; };
struct Properties { unsigned module; };
__attribute__((constructor)) static void load() { ON_LOAD; }
extern "C" {
__attribute__((visibility("default"))) int nvme_ops_fake_cufile = 1;
Status cuFileDriverOpen() { std::puts("the library prints"); ON_OPEN; return {OPENS, 0}; }
Status cuFileDriverClose_v2() { ON_CLOSE; return {0, 0}; }
Status cuFileDriverGetProperties(void* data) { static_cast<Properties*>(data)->module = MODULE; return {0, 0}; }
Status cuFileGetVersion(int* version) { *version = 1150; return {0, 0}; }
Status cuFileHandleRegister(void**, void*) { return {5030, 0}; }
void cuFileHandleDeregister(void*) {}
Status cuFileBufRegister(const void*, std::size_t, int) { return {0, 0}; }
Status cuFileBufDeregister(const void*) { return {0, 0}; }
ssize_t cuFileRead(void*, void*, std::size_t, off_t, off_t) { return -1; }
ssize_t cuFileWrite(void*, const void*, std::size_t, off_t, off_t) { return -1; }
}
"""
DEFAULTS = {"MODULE": "2", "OPENS": "0", "ON_LOAD": "", "ON_OPEN": "", "ON_CLOSE": ""}

Library = Callable[..., Path]


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Library:
    """Compiles a library that behaves as told, and has the op load it."""
    GDSBuilder().load()

    def make(**behaviour: str) -> Path:
        found = machine.find_compiler()
        assert found is not None
        source, target = tmp_path / "fake.cpp", tmp_path / "libcufile_fake.so"
        source.write_text(LIBRARY)
        defines = [f"-D{name}={value}" for name, value in {**DEFAULTS, **behaviour}.items()]
        result = found.run("-std=c++17", "-shared", "-fPIC", *defines, str(source), "-o", str(target))
        assert result.returncode == 0, result.stdout
        monkeypatch.setenv("NVME_OPS_CUFILE_LIBRARY", str(target))
        return target

    return make


def check(status: Status) -> Result:
    result = gds.open_driver()
    assert result.status is status, result
    assert result.fix or not result.status.needs_fix
    assert "libcufile_fake" not in Path("/proc/self/maps").read_text(), "it belongs into the other process"
    return result


def test_a_driver_that_opens_is_described_and_a_double_is_called_one(library: Library) -> None:
    path = library()
    result = check(Status.OKAY)
    assert result.detail == (
        f"opens: 1.15, {path}, a test double that says nothing about this machine; GPUDirect Storage is available"
    )
    assert (result.data["opened"], result.data["version"], result.data["fake"]) == (True, "1.15", True)


def test_a_driver_without_nvidia_fs_says_why_there_is_no_direct_way(library: Library) -> None:
    library(MODULE="0")
    result = check(Status.WARNING)
    assert "no GPUDirect Storage: nvidia-fs is not loaded" in result.detail
    assert result.data["why_not_direct"]


def test_a_driver_that_refuses_gives_its_reason(library: Library) -> None:
    library(OPENS="5001")
    result = check(Status.NO)
    assert "cuFileDriverOpen" in result.detail
    assert "5001" in result.detail
    assert "NVME_OPS_GDS=off" in result.fix


def test_a_driver_that_kills_the_process_is_reported(library: Library) -> None:
    library(ON_OPEN="std::abort()")
    assert "ended with status -6" in check(Status.NO).detail


def test_a_driver_that_exits_with_words_is_quoted(library: Library) -> None:
    library(ON_OPEN='std::puts("out of luck"),std::fflush(nullptr),_exit(3)')
    assert check(Status.NO).detail == "the process that opened it ended with status 3: out of luck"


def test_a_library_that_never_returns_is_given_up(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    library(ON_LOAD="sleep(600)")
    monkeypatch.setattr(gds, "LIMIT", 5.0)
    assert "not open after 5 s" in check(Status.NO).detail


def test_a_driver_that_opens_and_never_closes_is_reported_as_open(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    library(ON_CLOSE="for(;;)sleep(600)")
    assert check(Status.OKAY).data["opened"] is True


def test_no_library_is_said_with_the_fix(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVME_OPS_CUFILE_LIBRARY", "/no/such/libcufile.so")
    assert "/no/such/libcufile.so" in check(Status.NO).detail


def test_an_op_that_is_not_compiled_is_not_compiled_for_this(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "built", lambda builder: None)
    result = check(Status.WARNING)
    assert "not compiled yet" in result.detail
    assert "GDSBuilder().load(" in result.fix


def test_without_torch_nothing_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Result("torch", Status.NO, "not installed", "pip install torch")
    monkeypatch.setattr(ops, "torch_problem", lambda: broken)
    assert check(Status.WARNING).fix == "pip install torch"


def test_the_command_opens_it_only_when_asked(library: Library, tmp_path: Path) -> None:
    touched = tmp_path / "opened"
    library(ON_OPEN=f'std::fclose(std::fopen("{touched}","w"))')

    def report(*arguments: str) -> dict[str, dict[str, str]]:
        done = prepared.run("-m", "nvme_ops.report", "--json", *arguments)
        assert done.returncode == 0, done.stderr
        found: dict[str, dict[str, str]] = json.loads(done.stdout)["sections"]["cufile"]
        return found

    assert "cuFile driver" not in report()
    assert not touched.exists()
    assert report("--open-driver")["cuFile driver"]["status"] == "OKAY"
    assert touched.exists()
