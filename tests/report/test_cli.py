"""``nvme-report`` as its users run it, and what holds for every line: a complaint names its fix, a crash is a line."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from nvme_ops.report.cli import WIDTH, Style, as_screen, as_text, main
from nvme_ops.report.result import Result, Status, run_checks
from tests import prepared
from tests.conftest import refusal, with_mounts

ROOT = Path(__file__).parents[2]
Document: TypeAlias = "dict[str, Any]"


def report(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    words, environment = ["-m", "nvme_ops.report", *arguments], {"TERM": "xterm", **environment}
    if not any(name.startswith("PYTHON") for name in environment):
        return prepared.run(*words, environment=environment)
    variables = {**os.environ, **environment}
    return subprocess.run([sys.executable, *words], cwd=ROOT, env=variables, capture_output=True, text=True)


def broken_torch(folder: Path, body: str = "raise ImportError('none')") -> dict[str, str]:
    """The environment of a process whose ``import torch`` runs ``body``."""
    (folder / "torch.py").write_text(body)
    return {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}


@pytest.fixture(scope="module")
def document() -> Document:
    done = report("--json", "--folder", "/dev/shm", "/no/such/folder")
    assert done.returncode == 0, done.stderr
    found: Document = json.loads(done.stdout)
    return found


def test_the_text_has_the_lines_that_users_of_ds_report_know() -> None:
    done = report("-v", "--folder", "/dev/shm", "--folder", "/no/such/folder")
    assert done.returncode == 0, done.stderr
    for line in (
        r"NOTE: Ops not installed will be just-in-time \(JIT\) compiled",
        r"ninja \.{18} \[",
        r"op name \.{16} installed \.\. compatible$",
        r"async_io \.+ \[(YES|JIT|NO)\] \.+ \[(OKAY|WARNING|NO)\]$",
        r"gds \.+ \[(YES|JIT|NO)\] \.+ \[(OKAY|WARNING|NO)\]$",
        *(rf"{name} \.\.\." for name in ("torch install path", "torch version", "torch cuda version", "nvcc version")),
        r"shared memory \(/dev/shm\) size \.\.\.",
        r"Storage at /dev/shm:$",
        r"Storage at /no/such/folder:$",
        r" +fix: mkdir -p /no/such/folder$",
        r"NOT ready: async_io on .*gds.*; /no/such/folder does not exist$",
    ):
        assert re.search(f"^{line}", done.stdout, re.MULTILINE), line
    assert "\033" not in done.stdout


def test_without_flags_it_is_one_screen(tmp_path: Path) -> None:
    lines = report("--folder", str(tmp_path)).stdout.splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert re.match(r"nvme_ops \S+, torch \S+, Python 3\.\S+, Linux \S+", lines[0])
    assert lines[-2].startswith(("ready: async_io on ", "NOT ready: "))
    if "no GPU here" in lines[-2]:
        assert len(lines) <= 30


def test_the_json_has_every_check_with_a_fix_for_every_complaint(document: Document) -> None:
    assert document["schema"] == 1
    assert set(document["sections"]) == {"build", "ops", "backends", "cufile", "environment"}
    assert set(document["sections"]["backends"]) == {"io_uring", "libaio", "threads", "chosen"}
    assert set(document["storage"]) == {"/dev/shm", "/no/such/folder"}
    for section in [*document["sections"].values(), *document["storage"].values()]:
        for name, result in section.items():
            assert set(result) == {"status", "detail", "fix", "data"}
            assert result["fix"] or result["status"] in ("OKAY", "INFO"), name
            assert result["status"] != "FAIL", f"{name}: {result['detail']}"
    # and every line is explained in the docs
    page = (ROOT / "docs" / "report.md").read_text()
    names = {name for section in document["sections"].values() for name in section} - set(document["sections"]["ops"])
    names |= {name for section in document["storage"].values() for name in section}
    assert [name for name in sorted(names) if f"`{name}`" not in page] == []


def test_strict_judges_what_is_named_or_can_be_expected(document: Document, tmp_path: Path) -> None:
    missing = report("--strict", "async_io", "--folder", str(tmp_path / "nosuch"))
    assert missing.returncode == 1
    assert "nosuch cannot be used: " in missing.stderr
    if document["unusable_ops"] or document["sections"]["ops"]["gds"]["status"] != "NO":
        pytest.skip("async_io is not usable here, or gds is")
    assert report("--strict", "--folder", str(tmp_path)).returncode == 0
    named = report("--strict", "gds")
    assert named.returncode == 1
    assert re.fullmatch(r"nvme-report: gds cannot be used: .*\n  fix: .*\n", named.stderr)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')", "not installed"),
        ("print('words on stdout'); raise RuntimeError('half installed')", "RuntimeError: half installed"),
    ],
)
def test_a_torch_that_cannot_be_imported_is_a_line_with_its_fix(body: str, words: str, tmp_path: Path) -> None:
    done = report("--json", "--strict", **broken_torch(tmp_path, body))
    found = json.loads(done.stdout)
    torch = found["sections"]["environment"]["torch"]
    assert (done.returncode, torch["status"], found["unusable_ops"]) == (1, "NO", ["async_io"])
    assert words in torch["detail"]
    assert "pip install torch" in torch["fix"]
    assert "Traceback" not in done.stderr


def test_flags_hide_what_they_name_and_a_folder_of_any_name_is_written_to_an_ascii_terminal(tmp_path: Path) -> None:
    environment = {"PYTHONIOENCODING": "ascii", **broken_torch(tmp_path)}
    operators = report("--hide-operator-status", "--folder", str(tmp_path / "ünïcode"), **environment).stdout
    assert not re.search(r"op name|ninja \.\.\.\.", operators)
    assert "fix: mkdir -p" in operators
    warnings = report("-v", "--hide_errors_and_warnings", **environment).stdout
    assert "async_io ............... [NO] ....... [NO]" in warnings
    assert not re.search("fix: |optional: ", warnings)


@pytest.mark.parametrize("words", [["--no-such-flag"], ["--js"], ["--strict", "no_such_op"]])
def test_wrong_arguments_end_with_status_2(words: list[str]) -> None:
    status, said = refusal(main, words)
    assert status == 2
    assert words[0] in said


def test_it_works_without_proc_and_sys(tmp_path: Path) -> None:
    hide = "mount -t tmpfs none /sys && mount -t tmpfs none /proc"
    command = [sys.executable, "-m", "nvme_ops.report", "-v", "--folder", tmp_path]
    said = with_mounts(hide, *command, **broken_torch(tmp_path))
    assert "aio-max-nr ....................... [WARNING] cannot read /proc/sys/fs/aio-max-nr" in said
    assert "[FAIL]" not in said.partition("Backends")[2]


# Results


def raising(error: BaseException) -> dict[str, Callable[[], Result]]:
    def run() -> Result:
        raise error

    return {"the check": run}


def test_a_complaint_without_a_reason_or_a_fix_cannot_be_made() -> None:
    Result("ninja", Status.INFO)
    for detail, fix in (("not found", ""), ("", "pip install ninja"), ("\n", "pip install ninja")):
        with pytest.raises(ValueError, match="names no reason or no fix"):
            Result("ninja", Status.WARNING, detail, fix)


def test_a_crashing_check_is_a_line_and_the_next_one_runs() -> None:
    for error in (ZeroDivisionError("by zero"), SystemExit(3)):
        crashed, after = run_checks({**raising(error), "next": lambda: Result("next", Status.OKAY)})
        assert (crashed.name, crashed.status, after.name) == ("the check", Status.FAIL, "next")
        assert crashed.detail.startswith(f"{type(error).__name__}: ")
        assert "nvme-report --json" in crashed.fix
        assert f"the check .............. [FAIL] {crashed.detail}" in as_text({"ops": [crashed]}, {}, Style())
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


# Made-up results on one screen

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
READ_ONLY = {"/mnt": [Result("directory", Status.NO, "is read-only", "mount -o remount,rw /mnt")]}


def screen(sections: dict[str, list[Result]], storage: Any = (), **style: bool) -> list[str]:
    return as_screen("nvme_ops 0.1.0", sections, dict(storage), Style(**style)).splitlines()


def test_what_limits_comes_with_commands_that_can_be_pasted() -> None:
    lines = screen({"ops": [ASYNC_IO], "backends": [FORBIDDEN, LIBAIO, THREADS]})
    assert max(map(len, lines)) <= WIDTH
    assert "what limits, and what to do:" in lines
    assert "optional:" not in lines, "libaio would be faster than threads"
    begin = next(number for number, line in enumerate(lines) if line.startswith("  fix: docker run --flag"))
    end = begin
    while lines[end].endswith("\\"):
        end += 1
    assert lines[end + 1].strip() == "# or", "what helps as well comes after the fix"
    pasted = "\n".join(lines[begin : end + 1]).removeprefix("  fix: ")
    assert shlex.split(pasted.replace("\\\n", "")) == ["docker", "run", *["--flag"] * 30]


def test_a_narrow_terminal_breaks_no_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    path = "/mnt/" + "a-folder-of-a-long-name/" * 3
    broken = Result(
        "async_io", Status.NO, f"said\nin lines: {path} is full", f"df -h {path}  # or another", ASYNC_IO.data
    )
    lines = screen({"ops": [broken], "backends": [FORBIDDEN, THREADS]})
    assert [line for line in lines if len(line) > 60 and path not in line] == []
    assert sum(path in line.split() for line in lines) == 3, "in what is wrong, in its fix, in the verdict"


def test_what_is_optional_is_no_complaint_and_one_fix_is_told_once() -> None:
    lines = screen({"ops": [ASYNC_IO, NO_GPU], "backends": [LIBAIO, CHOSEN], "cufile": [CUFILE]})
    assert lines[-2] == "ready: async_io on io_uring; gds: no GPU here"
    assert "what limits, and what to do:" not in lines
    assert lines[lines.index("optional:") + 2] == "  fix: apt-get install libaio-dev"
    assert "cuFile" not in "\n".join(lines)
    lines = screen({"ops": [ASYNC_IO, GDS], "backends": [CHOSEN], "cufile": [CUFILE]})
    assert "[NO] cuFile library: libcufile.so.0 is not found" in lines
    assert lines.count("  fix: pip install nvidia-cufile") == 1
    assert lines[-2] == "NOT ready: async_io on io_uring; gds: no cuFile"
    sections = {"ops": [ASYNC_IO], "backends": [CHOSEN]}
    for lines in (screen(sections, READ_ONLY), as_text(sections, READ_ONLY, Style()).splitlines()):
        assert lines[-2] == "NOT ready: async_io on io_uring; /mnt: is read-only"
    assert "/mnt: [NO] is read-only" in screen(sections, READ_ONLY)
    plain, coloured = screen(sections), screen(sections, colour=True)
    assert [re.sub(r"\033\[\d+m", "", line) for line in coloured] == plain != coloured


def test_the_verdict_says_what_was_not_tried() -> None:
    def verdict(op: Result, compiled: str | None, *cufile: Result) -> str:
        made = replace(op, status=Status.OKAY, data={**op.data, "compiled": compiled})
        return screen({"ops": [made], "backends": [CHOSEN], "cufile": list(cufile)})[-2]

    assert verdict(ASYNC_IO, "cached") == "ready: async_io on io_uring"
    assert verdict(ASYNC_IO, None) == "ready: async_io on io_uring (to be compiled at its first use)"
    assert verdict(GDS, "prebuilt") == "ready: gds (a forecast: --open-driver tries it)"
    assert verdict(GDS, None) == "ready: gds (to be compiled at its first use, a forecast: --open-driver tries it)"
    assert verdict(GDS, "cached", Result("cuFile driver", Status.OKAY, data={"opened": True})) == "ready: gds"


def test_every_warning_of_an_op_stands_under_its_row() -> None:
    row = Result("async_io", Status.WARNING, "first", "apt-get", {"installed": True, "warnings": ["first", "second"]})
    said = as_text({"ops": [row]}, {}, Style())
    assert "[YES] ...... [WARNING]\n [WARNING] first\n [WARNING] second\n           fix: apt-get\n" in said
