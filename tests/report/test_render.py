"""What holds for every check: a complaint names its fix, a crash is a line, and rendering only writes down."""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nvme_ops.op_builder.machine import Host
from nvme_ops.report import render
from nvme_ops.report.cli import collect
from nvme_ops.report.render import WIDTH, Style, as_screen
from nvme_ops.report.result import Json, Result, Status, run_checks
from tests.report.test_cli import broken_torch, report

REPORT = Path(__file__).parents[2] / "report"


def raising(error: BaseException) -> dict[str, Callable[[], Result]]:
    def run() -> Result:
        raise error

    return {"the check": run}


@pytest.mark.parametrize("status", Status)
def test_a_complaint_without_a_fix_cannot_be_made(status: Status) -> None:
    if status in (Status.OKAY, Status.INFO):
        Result("ninja", status)
    else:
        with pytest.raises(ValueError, match="names no fix"):
            Result("ninja", status, "not found")


@pytest.mark.parametrize("error", [ZeroDivisionError("by zero"), SystemExit(3), MemoryError(), OSError(5, "I/O error")])
def test_a_crashing_check_is_a_line_and_the_next_one_runs(error: BaseException) -> None:
    results = run_checks({**raising(error), "next": lambda: Result("next", Status.OKAY)})
    assert [result.name for result in results] == ["the check", "next"]
    assert results[0].status is Status.FAIL
    assert results[0].detail.startswith(f"{type(error).__name__}: ")
    assert "nvme-report --json" in results[0].fix


def test_ctrl_c_is_not_a_crashing_check() -> None:
    with pytest.raises(KeyboardInterrupt):
        run_checks(raising(KeyboardInterrupt()))


@pytest.mark.parametrize(
    ("error", "fix"),
    [
        (FileNotFoundError(2, "No such file", "/proc/meminfo"), "mount -t proc"),
        (FileNotFoundError(2, "No such file", "/sys/kernel/x"), "mount -t sysfs"),
        (PermissionError(13, "Permission denied", "/proc/self/maps"), "sudo cat /proc/self/maps"),
    ],
)
def test_an_unreadable_kernel_file_is_a_warning_that_names_it(error: OSError, fix: str) -> None:
    (result,) = run_checks(raising(error))
    assert result.status is Status.WARNING
    assert str(error.filename) in result.detail
    assert fix in result.fix


def test_an_empty_proc_and_sys_crash_no_check(tmp_path: Path) -> None:
    for name, results in collect(Host(tmp_path)).items():
        names = [result.name for result in results]
        assert len(set(names)) == len(names), name
        for result in results:
            assert "the check itself failed" not in result.fix, result
            assert result.fix or not result.status.needs_fix


def test_a_warning_line_ends_with_its_fix() -> None:
    results = {"environment": [Result("memlock limit", Status.WARNING, "64 KiB", "ulimit -l unlimited")]}
    lines = render.as_text(results, {}, render.Style()).splitlines()
    assert "memlock limit .................... [WARNING] 64 KiB" in lines
    assert (
        lines[lines.index("memlock limit .................... [WARNING] 64 KiB") + 1].strip()
        == "fix: ulimit -l unlimited"
    )


def test_every_warning_of_an_op_stands_under_its_row() -> None:
    data: dict[str, Json] = {"installed": True, "warnings": ["first", "second"]}
    row = Result("async_io", Status.WARNING, "first", "apt-get install -y libaio-dev", data)
    lines = render.as_text({"ops": [row]}, {}, render.Style()).splitlines()
    place = lines.index("async_io ............... [YES] ...... [WARNING]")
    assert lines[place + 1 : place + 4] == [
        " [WARNING] first",
        " [WARNING] second",
        "           fix: apt-get install -y libaio-dev",
    ]


def test_an_op_whose_check_crashed_is_a_line_of_the_table() -> None:
    results = run_checks(raising(ZeroDivisionError("by zero")))
    assert "the check .............. [FAIL] ZeroDivisionError: by zero" in render.as_text(
        {"ops": results}, {}, render.Style()
    )


def test_json_keeps_every_field() -> None:
    result = Result("io_uring", Status.NO, "forbidden", "sysctl -w kernel.io_uring_disabled=0", {"errno": "EPERM"})
    found = json.loads(render.as_json("1.0", ["async_io"], {"backends": [result]}, {"/mnt": [result]}))
    assert found["unusable_ops"] == ["async_io"]
    assert found["sections"]["backends"]["io_uring"] == found["storage"]["/mnt"]["io_uring"]
    assert found["storage"]["/mnt"]["io_uring"] == {
        "status": "NO",
        "detail": "forbidden",
        "fix": "sysctl -w kernel.io_uring_disabled=0",
        "data": {"errno": "EPERM"},
    }


def test_only_the_command_prints() -> None:
    for file in REPORT.glob("*.py"):
        calls = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
        printing = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print"]
        assert not printing or file.name == "cli.py", file


# On one screen

ASYNC_IO = Result("async_io", Status.OKAY, data={"installed": False, "compatible": True, "expected": True})
NO_GPU = Result("gds", Status.NO, "no NVIDIA GPU", "nvidia-smi", {"installed": False, "expected": False})
GDS = Result("gds", Status.NO, "no cuFile", "pip install nvidia-cufile", {"installed": False, "expected": True})
CUFILE = Result("cuFile library", Status.NO, "libcufile.so.0 is not found", "pip install nvidia-cufile")
LIBAIO = Result("libaio", Status.NO, "libaio is not installed", "apt-get install libaio-dev")
CHOSEN = Result("chosen", Status.OKAY, "io_uring", data={"backend": "io_uring"})
FORBIDDEN = Result(
    "io_uring", Status.NO, "forbidden: " + "by the container " * 9, "docker run " + "--flag " * 30 + " # or"
)
THREADS = Result("chosen", Status.WARNING, "threads", "docker run", data={"backend": "threads"})


def screen(sections: dict[str, list[Result]], storage: Any = (), **style: bool) -> list[str]:
    return as_screen("nvme_ops 0.1.0", sections, dict(storage), Style(**style)).splitlines()


def test_on_this_machine_it_is_one_screen(tmp_path: Path) -> None:
    done = report("--folder", str(tmp_path))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert re.match(r"nvme_ops \S+, torch \S+, Python 3\.\S+, Linux \S+", lines[0])
    assert any(line.startswith("async_io ............... [") for line in lines)
    assert lines[-2].startswith(("ready: async_io on ", "NOT ready: "))
    if "no GPU here" in lines[-2]:
        assert len(lines) <= 30
        assert "cuFile" not in done.stdout


def test_help_fits() -> None:
    assert max(map(len, report("--help").stdout.splitlines())) <= WIDTH


def test_what_limits_comes_with_commands_that_can_be_pasted() -> None:
    lines = screen({"ops": [ASYNC_IO], "backends": [FORBIDDEN, LIBAIO, THREADS]})
    assert max(map(len, lines)) <= WIDTH
    assert "what limits, and what to do:" in lines
    assert "optional:" not in lines, "libaio would be faster than threads"
    begin = next(number for number, line in enumerate(lines) if line.startswith("  fix: docker run --flag"))
    assert lines[begin - 1].strip() == "# or"
    end = begin
    while lines[end].endswith("\\"):
        end += 1
    pasted = "\n".join(lines[begin : end + 1]).removeprefix("  fix: ")
    assert shlex.split(pasted.replace("\\\n", "")) == ["docker", "run", *["--flag"] * 30]


def test_what_is_optional_is_no_complaint() -> None:
    lines = screen({"ops": [ASYNC_IO, NO_GPU], "backends": [LIBAIO, CHOSEN], "cufile": [CUFILE]})
    assert lines[-2] == "ready: async_io on io_uring; gds: no GPU here"
    assert "what limits, and what to do:" not in lines
    assert lines[lines.index("optional:") + 2] == "  fix: apt-get install libaio-dev"
    assert "cuFile" not in "\n".join(lines)


def test_with_a_gpu_cufile_is_told_and_one_fix_once() -> None:
    lines = screen({"ops": [ASYNC_IO, GDS], "backends": [CHOSEN], "cufile": [CUFILE]})
    assert "[NO] cuFile library: libcufile.so.0 is not found" in lines
    assert lines.count("  fix: pip install nvidia-cufile") == 1
    assert lines[-2] == "NOT ready: async_io on io_uring; gds: no cuFile"


@pytest.mark.parametrize("text", ["as_screen", "as_text"])
def test_ready_is_not_said_of_a_folder_that_cannot_be_used(text: str) -> None:
    storage = {"/mnt": [Result("directory", Status.NO, "is read-only", "mount -o remount,rw /mnt")]}
    sections = {"ops": [ASYNC_IO], "backends": [CHOSEN]}
    plain = render.as_text(sections, storage, Style()).splitlines()
    lines = screen(sections, storage) if text == "as_screen" else plain
    assert lines[-2] == "NOT ready: async_io on io_uring; /mnt: is read-only"


def test_colours_take_no_room_and_warnings_can_be_left_out() -> None:
    sections = {"ops": [ASYNC_IO], "backends": [FORBIDDEN, THREADS]}
    plain, coloured = screen(sections), screen(sections, colour=True)
    assert [render.uncoloured(line) for line in coloured] == plain
    assert coloured != plain
    assert "fix: " not in "\n".join(screen(sections, fixes=False))


def test_a_torch_that_is_broken_fits_too(tmp_path: Path) -> None:
    done = report("--strict", **broken_torch(tmp_path, "raise OSError('x' * 300)"))
    assert done.returncode == 1
    assert len(done.stdout.splitlines()) <= 40
    assert "NOT ready: async_io: torch: " in done.stdout
