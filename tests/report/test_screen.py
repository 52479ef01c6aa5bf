"""The report on one screen: narrow, short, and with what to do."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from nvme_ops.report import render
from nvme_ops.report.render import WIDTH, Style, as_screen
from nvme_ops.report.result import Result, Status
from tests.report.test_cli import Document, broken_torch, document, report  # noqa: F401  (a fixture)

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


def test_help_fits(document: Document) -> None:  # noqa: F811
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
