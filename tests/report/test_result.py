"""What holds for every check: a complaint names its fix, a crash is a line, and rendering only writes down."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from nvme_ops.op_builder.machine import Host
from nvme_ops.report import render
from nvme_ops.report.cli import collect
from nvme_ops.report.result import Json, Result, Status, run_checks

REPORT = Path(__file__).parents[2] / "report"


def raising(error: BaseException) -> dict[str, Callable[[], Result]]:
    def run() -> Result:
        raise error

    return {"the check": run}


@pytest.mark.parametrize("status", [Status.WARNING, Status.NO, Status.FAIL])
def test_a_complaint_without_a_fix_cannot_be_made(status: Status) -> None:
    with pytest.raises(ValueError, match="names no fix"):
        Result("ninja", status, "not found")


@pytest.mark.parametrize("status", [Status.OKAY, Status.INFO])
def test_what_is_in_order_needs_no_fix(status: Status) -> None:
    assert not Result("ninja", status).fix


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
    document = json.loads(render.as_json("1.0", ["async_io"], {"backends": [result]}, {"/mnt": [result]}))
    assert document["unusable_ops"] == ["async_io"]
    assert document["sections"]["backends"]["io_uring"] == document["storage"]["/mnt"]["io_uring"]
    assert document["storage"]["/mnt"]["io_uring"] == {
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
