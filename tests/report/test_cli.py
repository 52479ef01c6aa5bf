"""``nvme-report`` as its users run it, and what holds for every line: a complaint names its fix, a crash is a line."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nvme_ops.report.cli import WIDTH, Style, as_text
from nvme_ops.report.result import Result, Status, run_checks
from tests import prepared
from tests.conftest import REPOSITORY


def report(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    words = ["-m", "nvme_ops.report", *arguments]
    if not environment:
        return prepared.run(*words, environment={"TERM": "xterm"})
    variables = {**os.environ, **environment}
    return subprocess.run([sys.executable, *words], cwd=REPOSITORY, env=variables, capture_output=True, text=True)


def test_the_text_has_the_lines_that_users_of_ds_report_know() -> None:
    done = report("-v", "--folder", "/dev/shm", "--folder", "/no/such/folder")
    for line in (
        r"NOTE: Ops not installed will be just-in-time \(JIT\) compiled",
        r"op name \.{16} installed \.\. compatible$",
        r"async_io \.+ \[(YES|JIT|NO)\] \.+ \[(OKAY|WARNING|NO)\]$",
        *(rf"{name} \.\.\." for name in ("torch install path", "torch version", "torch cuda version", "CUDA_HOME")),
        r" +fix: mkdir -p /no/such/folder$",
        r"NOT ready: async_io on .*gds.*; /no/such/folder does not exist$",
    ):
        assert re.search(f"^{line}", done.stdout, re.MULTILINE), line


def test_without_flags_it_is_one_screen_and_strict_judges_what_is_named(tmp_path: Path) -> None:
    done, named = report("--strict", "--folder", str(tmp_path)), report("--strict", "gds")
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert re.match(r"nvme_ops \S+, torch \S+, Python 3\.\S+, Linux \S+", lines[0])
    assert lines[-2].startswith("ready: async_io on " if done.returncode == 0 else "NOT ready: ")
    if "no GPU here" in lines[-2]:
        assert (len(lines) <= 30, named.returncode) == (True, 1)
        assert re.fullmatch(r"nvme-report: gds cannot be used: .*\n  fix: .*\n", named.stderr)


def test_the_json_has_every_check_with_a_fix_for_every_complaint() -> None:
    document = json.loads(report("--json", "--open-driver", "--folder", "/dev/shm", "/no/such/folder").stdout)
    assert document["schema"] == 1
    assert set(document["sections"]) == {"build", "ops", "backends", "cufile", "environment"}
    assert set(document["storage"]) == {"/dev/shm", "/no/such/folder"}
    page = (REPOSITORY / "docs" / "report.md").read_text()
    for section in [*document["sections"].values(), *document["storage"].values()]:
        for name, result in section.items():
            assert set(result) == {"status", "detail", "fix", "data"}
            assert result["fix"] or result["status"] in ("OKAY", "INFO"), name
            assert result["status"] != "FAIL", f"{name}: {result['detail']}"
            assert f"`{name}`" in page or name in document["sections"]["ops"], f"docs/report.md does not explain {name}"
    assert "cuFile driver" not in json.loads(report("--json").stdout)["sections"]["cufile"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')", "not installed"),
        ("print('words on stdout'); raise RuntimeError('half installed')", "RuntimeError: half installed"),
    ],
)
def test_a_torch_that_cannot_be_imported_is_a_line_with_its_fix(body: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(body)
    environment = {"PYTHONIOENCODING": "ascii", "PYTHONPATH": f"{tmp_path}{os.pathsep}{REPOSITORY}"}
    done = report("--json", "--strict", **environment)
    document = json.loads(done.stdout)
    torch = document["sections"]["environment"]["torch"]
    assert (done.returncode, torch["status"], document["unusable_ops"]) == (1, "NO", ["async_io"])
    assert words in torch["detail"]
    assert "pip install torch" in torch["fix"]
    assert "Traceback" not in done.stderr
    operators = report("--hide-operator-status", "--folder", str(tmp_path / "ünïcode"), **environment).stdout
    assert "fix: mkdir -p" in operators
    assert not re.search(r"op name|ninja \.\.\.\.", operators)
    warnings = report("-v", "--hide_errors_and_warnings", **environment).stdout
    assert "async_io ............... [NO] ....... [NO]" in warnings
    assert not re.search("fix: |optional: ", warnings)


def checked(error: BaseException) -> tuple[Result, ...]:
    def run() -> Result:
        raise error

    return run_checks({"the check": run, "next": lambda: Result("next", Status.OKAY)})


def test_a_crashing_check_is_a_line_and_the_next_one_runs() -> None:
    for error in (ZeroDivisionError("by zero"), SystemExit(3)):
        crashed, after = checked(error)
        assert (crashed.name, crashed.status, after.name) == ("the check", Status.FAIL, "next")
        text = as_text("", {"ops": [crashed]}, {}, Style())
        assert f"the check .............. [FAIL] {type(error).__name__}: " in text
    with pytest.raises(KeyboardInterrupt):
        checked(KeyboardInterrupt())
    for failure, fix in (
        (FileNotFoundError(2, "No such file", "/proc/meminfo"), "mount -t proc"),
        (FileNotFoundError(2, "No such file", "/sys/kernel/x"), "mount -t sysfs"),
        (PermissionError(13, "Permission denied", "/proc/self/maps"), "sudo cat /proc/self/maps"),
    ):
        crashed = checked(failure)[0]
        assert (crashed.status, str(failure.filename) in crashed.detail) == (Status.WARNING, True)
        assert fix in crashed.fix
    for detail, fix in (("not found", ""), ("\n", "pip install ninja")):
        with pytest.raises(ValueError, match="names no reason or no fix"):
            Result("ninja", Status.WARNING, detail, fix)


LONG = "/mnt/a-folder-with-a-name-that-is-longer-than-a-narrow-terminal-has-columns"
ASYNC_IO = Result("async_io", Status.OKAY, data={"installed": False, "compatible": True, "expected": True})
NO_GPU = Result("gds", Status.NO, "no NVIDIA GPU", "nvidia-smi", {"installed": False, "expected": False})
GDS = Result("gds", Status.NO, "no\ncuFile", "pip install nvidia-cufile", {"installed": False, "expected": True})
CUFILE = Result("cuFile library", Status.NO, "libcufile.so.0 is not found", "pip install nvidia-cufile")
LIBAIO = Result("libaio", Status.NO, "libaio is not installed", "apt-get install libaio-dev")
CHOSEN = Result("chosen", Status.OKAY, "io_uring", data={"backend": "io_uring"})
FORBIDDEN = Result("io_uring", Status.NO, "forbidden by the container " * 3, "docker run " + "--flag " * 15)
READ_ONLY = {"/mnt": [Result("directory", Status.NO, "is read-only", f"mount -o remount,rw {LONG}")]}
LIMITED = f"""\
nvme_ops 1
--------------------------------------------------
op name ................ installed .. compatible
async_io ............... [NO] ....... [OKAY]
gds .................... [NO] ....... [NO]
 [WARNING] no cuFile
  fix: pip install nvidia-cufile
--------------------------------------------------
Backends, in the order in which they are tried:
io_uring ............... [NO] forbidden by the container forbidden by the
  container forbidden by the container
  fix: docker run --flag --flag --flag --flag --flag --flag --flag --flag \\
       --flag --flag --flag --flag --flag --flag --flag
chosen ................. [OKAY] io_uring
--------------------------------------------------
cuFile (for the gds op):
cuFile library ......... [NO] libcufile.so.0 is not found
  fix: pip install nvidia-cufile
       # or another way
--------------------------------------------------
Storage at /mnt:
directory .............. [NO] is read-only
  fix: mount -o remount,rw \\
       {LONG}
--------------------------------------------------
NOT ready: async_io on io_uring; gds: no cuFile; /mnt: is read-only
"""


def test_the_screen_has_what_limits_with_commands_to_paste(monkeypatch: pytest.MonkeyPatch) -> None:
    def screen(*results: list[Result], folders: Any = (), **style: bool) -> str:
        sections = dict(zip(("ops", "backends", "cufile"), results, strict=True))
        return as_text("nvme_ops 1", sections, dict(folders), Style(**style))

    monkeypatch.setenv("COLUMNS", "78")
    library = replace(CUFILE, fix=f"{CUFILE.fix}  # or another way")
    fact = Result("udev data", Status.INFO, "not there")
    shown = screen([ASYNC_IO, GDS], [FORBIDDEN, CHOSEN], [library, fact], folders=READ_ONLY)
    assert shown.startswith(LIMITED)
    given = [ASYNC_IO, NO_GPU], [LIBAIO, CHOSEN], [replace(CUFILE, data={"expected": False})]
    shown = screen(*given)
    assert "\nready: async_io on io_uring; gds: no GPU here\n" in shown
    assert not re.search("^(gds|cuFile)", shown, re.MULTILINE), "nothing here needs it"
    assert "installed\n  fix: apt-get install libaio-dev\nchosen" in shown
    coloured = screen(*given, colour=True)
    assert re.sub(r"\033\[\d+m", "", coloured) == shown != coloured
    verbose = screen([ASYNC_IO, NO_GPU], [FORBIDDEN, CHOSEN], [CUFILE, fact], verbose=True)
    for line in (f"io_uring ............... [NO] {FORBIDDEN.detail.strip()}", "udev data .............. not there"):
        assert f"\n{line}\n" in verbose
    row = Result("async_io", Status.WARNING, "first", "apt-get", {"installed": True, "warnings": ["first", "second"]})
    said = as_text("", {"ops": [row]}, READ_ONLY, Style())
    assert "[YES] ...... [WARNING]\n [WARNING] first\n [WARNING] second\n  fix: apt-get\n" in said
    assert "NOT ready: async_io; /mnt: is read-only\n" in said


def test_the_verdict_says_what_was_not_tried() -> None:
    def verdict(op: Result, compiled: str | None, *cufile: Result) -> str:
        made = replace(op, status=Status.OKAY, data={**op.data, "compiled": compiled})
        sections = {"ops": [made], "backends": [CHOSEN], "cufile": list(cufile)}
        return as_text("nvme_ops 1", sections, {}, Style(verbose=True)).splitlines()[-1]

    assert verdict(ASYNC_IO, "cached") == "ready: async_io on io_uring"
    assert verdict(ASYNC_IO, None) == "ready: async_io on io_uring (to be compiled at its first use)"
    assert verdict(GDS, "prebuilt") == "ready: gds (a forecast: --open-driver tries it)"
    assert verdict(GDS, None) == "ready: gds (to be compiled at its first use, a forecast: --open-driver tries it)"
    assert verdict(GDS, "cached", Result("cuFile driver", Status.OKAY, data={"opened": True})) == "ready: gds"
