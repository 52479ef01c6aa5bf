"""``--open-driver`` with small libraries that pretend to be cuFile; they say nothing about a GPU or the real one."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from nvme_ops.op_builder import GDSBuilder
from nvme_ops.report import gds, ops
from nvme_ops.report.result import Result, Status
from tests import made_up, prepared

LIBRARY = r"""
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <signal.h>
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
    monkeypatch.setattr(gds, "LIMIT", 240.0)

    def make(**behaviour: str) -> Path:
        defines = [f"-D{name}={value}" for name, value in {**DEFAULTS, **behaviour}.items()]
        target = made_up.library(tmp_path / "libcufile_fake.so", LIBRARY, *defines)
        monkeypatch.setenv("NVME_OPS_CUFILE_LIBRARY", str(target))
        return target

    return make


def check(status: Status, *words: str) -> Result:
    result = gds.open_driver()
    assert result.status is status, result
    assert [each for each in words if each not in result.detail] == []
    assert "libcufile_fake" not in Path("/proc/self/maps").read_text(), "it belongs into the other process"
    return result


BEHAVIOURS: dict[str, tuple[dict[str, str], Status, str]] = {
    "without nvidia-fs": ({"MODULE": "0"}, Status.WARNING, "no GPUDirect Storage: nvidia-fs is not loaded"),
    "refuses": ({"OPENS": "5001"}, Status.NO, "5001"),
    "exits with words": (
        {"ON_OPEN": 'std::puts("out of luck"),std::fflush(nullptr),_exit(3)'},
        Status.NO,
        "ended with status 3: out of luck",
    ),
}


@pytest.mark.parametrize(("behaviour", "status", "words"), BEHAVIOURS.values(), ids=BEHAVIOURS)
def test_what_the_driver_does_is_said(behaviour: dict[str, str], status: Status, words: str, library: Library) -> None:
    library(**behaviour)
    assert check(status, words).data["opened"] == (status is not Status.NO)


@pytest.mark.parametrize(("where", "status"), [("ON_LOAD", Status.NO), ("ON_CLOSE", Status.OKAY)])
def test_a_library_that_never_returns_is_given_up_and_what_it_said_before_counts(
    where: str, status: Status, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That it has come so far, it says by a signal, at which the patience of the report ends."""

    def lose_patience(*_: object) -> None:
        raise subprocess.TimeoutExpired("python", gds.LIMIT)

    library(**{where: "kill(getppid(),SIGUSR1);for(;;)sleep(600)"})
    before = signal.signal(signal.SIGUSR1, lose_patience)
    try:
        check(status, "opens: 1.15, " if status is Status.OKAY else "not open after 240 s")
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_what_is_lacking_before_is_said_and_nothing_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gds, "_run", lambda: pytest.fail("a process was started"))
    with monkeypatch.context() as changed:
        changed.setattr(GDSBuilder, "_find_built", lambda _: None)
        assert "GDSBuilder().load(" in check(Status.WARNING, "not compiled yet").fix
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
