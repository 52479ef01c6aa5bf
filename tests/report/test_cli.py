"""``nvme-report`` as its users run it: a process of its own, its text, its JSON and its exit status."""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from nvme_ops.op_builder import machine, prebuilt
from tests import prepared

ROOT = Path(__file__).parents[2]
# Mounts of a process of its own; one who is not root becomes it in a user namespace, where the kernel allows that.
UNSHARE = ["unshare", "-m" if os.geteuid() == 0 else "-rm"]
NEEDS_FIX = ("WARNING", "NO", "FAIL")
Document: TypeAlias = "dict[str, Any]"


def report(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    words, environment = ["-m", "nvme_ops.report", *arguments], {"TERM": "xterm", **environment}
    if not any(name.startswith("PYTHON") for name in environment):
        return prepared.run(*words, environment=environment)
    return subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def parsed(done: subprocess.CompletedProcess[str]) -> Document:
    document: Document = json.loads(done.stdout)
    return document


def broken_torch(folder: Path, body: str) -> dict[str, str]:
    """The environment of a process whose ``import torch`` runs ``body``."""
    (folder / "torch.py").write_text(body)
    return {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}


@pytest.fixture(scope="module")
def text() -> str:
    done = report("-v", "--folder", "/dev/shm", "--folder", "/no/such/folder")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def document() -> Document:
    done = report("--json", "--folder", "/dev/shm", "/no/such/folder")
    assert done.returncode == 0, done.stderr
    return parsed(done)


def test_the_text_has_the_lines_that_users_of_ds_report_know(text: str) -> None:
    lines = text.splitlines()
    assert any(line.startswith("NOTE: Ops not installed will be just-in-time (JIT) compiled") for line in lines)
    assert any(line.startswith("ninja .................. [") for line in lines)
    assert "op name ................ installed .. compatible" in lines
    rows = {line.split()[0]: line.split() for line in lines if line.startswith(("async_io ....", "gds ....."))}
    for row in rows.values():
        assert row[2] in ("[YES]", "[JIT]", "[NO]")
        assert row[4] in ("[OKAY]", "[WARNING]", "[NO]")
    assert set(rows) == {"async_io", "gds"}
    for name in ("torch install path ...", "torch version ...", "torch cuda version ...", "nvcc version ..."):
        assert any(line.startswith(name) for line in lines), name
    assert any(line.startswith("shared memory (/dev/shm) size ....") for line in lines)


def test_the_last_line_is_the_verdict(text: str) -> None:
    verdict = text.splitlines()[-2]
    assert verdict.startswith("NOT ready: async_io on ")
    assert "gds" in verdict
    assert verdict.endswith("; /no/such/folder does not exist")


def test_strict_fails_for_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    assert report("--strict", "async_io", "--folder", str(tmp_path)).returncode == 0
    done = report("--strict", "async_io", "--folder", str(tmp_path / "nosuch"))
    assert done.returncode == 1
    assert "nosuch cannot be used: " in done.stderr


def test_each_folder_given_with_path_has_a_section(text: str) -> None:
    assert "Storage at /dev/shm:" in text
    assert "Storage at /no/such/folder:" in text
    assert "fix: mkdir -p /no/such/folder" in text


def test_there_is_no_colour_in_a_pipe(text: str) -> None:
    assert "\033" not in text


@pytest.mark.parametrize(("no_color", "coloured"), [("", True), ("1", False)])
def test_colours_appear_on_a_terminal_unless_no_color_is_set(no_color: str, coloured: bool, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, **broken_torch(tmp_path, "raise ImportError"), "TERM": "xterm", "NO_COLOR": no_color}
    command = [sys.executable, "-m", "nvme_ops.report"]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=theirs, stderr=subprocess.DEVNULL)
    os.close(theirs)
    seen = b""
    while True:
        try:
            seen += os.read(ours, 4096)
        except OSError:  # how the end of a terminal looks
            break
    os.close(ours)
    assert process.wait(60) == 0
    assert (b"\033[91m[NO]\033[0m" in seen) == coloured


def test_the_json_names_every_check_once_and_has_a_fix_for_every_complaint(document: Document) -> None:
    assert document["schema"] == 1
    assert set(document["sections"]) == {"build", "ops", "backends", "cufile", "environment"}
    assert set(document["sections"]["backends"]) == {"io_uring", "libaio", "threads", "chosen"}
    assert set(document["storage"]) == {"/dev/shm", "/no/such/folder"}
    for section in [*document["sections"].values(), *document["storage"].values()]:
        for name, result in section.items():
            assert set(result) == {"status", "detail", "fix", "data"}
            assert result["fix"] or result["status"] not in NEEDS_FIX, name
            assert result["status"] != "FAIL", f"{name}: {result['detail']}"


def test_every_line_is_explained_in_the_docs(document: Document) -> None:
    page = (ROOT / "docs" / "report.md").read_text()
    names = {name for section in document["sections"].values() for name in section} - set(document["sections"]["ops"])
    names |= {name for section in document["storage"].values() for name in section}
    assert [name for name in sorted(names) if f"`{name}`" not in page] == []


def test_the_unusable_ops_are_those_that_can_be_expected_to_work(document: Document) -> None:
    rows = document["sections"]["ops"]
    expected = [name for name, row in rows.items() if row["status"] in ("NO", "FAIL") and row["data"]["expected"]]
    assert document["unusable_ops"] == expected


def test_strict_succeeds_where_the_ops_are_usable(document: Document) -> None:
    if document["unusable_ops"]:
        pytest.skip(f"not usable here: {document['unusable_ops']}")
    assert report("--strict").returncode == 0


def test_strict_asks_for_gds_only_where_there_is_a_gpu_or_by_name(document: Document) -> None:
    gds = document["sections"]["ops"]["gds"]
    if gds["status"] != "NO" or gds["data"]["expected"]:
        pytest.skip("gds is usable here, or there is a GPU that it could use")
    named = report("--strict", "gds")
    assert named.returncode == 1
    assert "nvme-report: gds cannot be used: " in named.stderr
    assert "async_io" not in named.stderr


def test_strict_by_name_leaves_out_the_others(tmp_path: Path) -> None:
    done = report("--json", "--strict", "gds", **broken_torch(tmp_path, "raise ImportError('none')"))
    assert done.returncode == 1
    assert parsed(done)["unusable_ops"] == ["gds"]


def test_strict_without_a_compiler_fails_and_says_which_op_and_why(tmp_path: Path) -> None:
    if prebuilt.find("async_io"):
        pytest.skip("the op is prebuilt, so no compiler is needed")
    done = report("-v", "--strict", PATH=str(tmp_path), CXX="", TORCH_EXTENSIONS_DIR=str(tmp_path / "cache"))
    assert done.returncode == 1
    assert "nvme-report: async_io cannot be used: no C++ compiler was found" in done.stderr
    assert "fix: " in done.stderr
    assert "C++ compiler ..................... [NO]" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_a_compiler_that_does_not_find_libaio_gives_the_warnings_of_ds_report(tmp_path: Path) -> None:
    found = machine.find_compiler()
    if found is None or prebuilt.find("async_io") or machine.conda_prefix():
        pytest.skip("the header is not looked for, or not only where the compiler looks")
    cxx = f"{' '.join(found.command)} -nostdinc"
    done = report("-v", "--strict", CXX=cxx, TORCH_EXTENSIONS_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr  # usable without
    lines = done.stdout.splitlines()
    place = lines.index("async_io ............... [NO] ....... [OKAY]")
    words = " optional: async_io requires the dev libaio .so object and headers but these were not found."
    assert lines[place + 1] == words
    assert lines[place + 2].startswith(
        (" optional: async_io: please install the ", " optional: If libaio is already installed")
    )
    assert any(line.startswith("libaio ................. [NO] libaio") for line in lines)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')", "not installed"),
        ("raise OSError('libcudart.so.12: cannot open shared object file')", "OSError: libcudart.so.12"),
        ("import nothing_of_this_name", "ModuleNotFoundError: No module named 'nothing_of_this_name'"),
        ("print('words on stdout'); raise RuntimeError('half installed')", "RuntimeError: half installed"),
    ],
)
def test_a_torch_that_cannot_be_imported_is_a_line_with_its_fix(body: str, words: str, tmp_path: Path) -> None:
    done = report("--json", "--strict", **broken_torch(tmp_path, body))
    assert done.returncode == 1
    document = parsed(done)
    torch = document["sections"]["environment"]["torch"]
    assert torch["status"] == "NO"
    assert words in torch["detail"]
    assert "pip install torch" in torch["fix"]
    assert "async_io" in document["unusable_ops"]
    assert "Traceback" not in done.stderr


def test_flags_hide_what_they_name(tmp_path: Path) -> None:
    environment = broken_torch(tmp_path, "raise ImportError('none')")
    operators = report("--hide_operator_status", **environment).stdout
    assert "op name" not in operators
    assert "ninja ...." not in operators
    assert "fix: " in operators
    warnings = report("--hide_errors_and_warnings", **environment).stdout
    assert "async_io ............... [NO] ....... [NO]" in warnings
    assert "fix: " not in warnings
    assert "[WARNING] " not in warnings


def test_wrong_arguments_end_with_status_2() -> None:
    done = report("--no-such-flag")
    assert done.returncode == 2
    assert "--no-such-flag" in done.stderr
    assert report("--folder").returncode == 2
    assert report("--js").returncode == 2  # no abbreviations: they break when a flag is added
    assert report("--strict", "no_such_op").returncode == 2


def test_help_and_version_answer() -> None:
    done = report("--help")
    assert done.returncode == 0
    flags = (
        "--folder DIR",
        "--json",
        "--verbose",
        "--strict",
        "--open-driver",
        "--hide_operator_status",
        "--hide_errors_and_warnings",
    )
    assert [flag for flag in flags if flag not in done.stdout] == []
    assert report("--version").stdout.startswith("nvme-report ")


def test_a_reader_that_stops_early_is_no_error(tmp_path: Path) -> None:
    environment = {**os.environ, **broken_torch(tmp_path, "raise ImportError")}
    command = f"{sys.executable} -m nvme_ops.report | head -n 1"
    done = subprocess.run(command, shell=True, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""


def test_a_folder_of_any_name_can_be_written_to_an_ascii_terminal(tmp_path: Path) -> None:
    folder = tmp_path / "ünïcode folder"
    environment = broken_torch(tmp_path, "raise ImportError")
    done = report("--folder", str(folder), PYTHONIOENCODING="ascii", **environment)
    assert done.returncode == 0, done.stderr
    assert "mkdir -p" in done.stdout


def test_it_works_without_proc_and_sys(tmp_path: Path) -> None:
    if shutil.which("unshare") is None:
        pytest.skip("unshare is not installed")
    hide = "mount -t tmpfs none /sys && mount -t tmpfs none /proc"
    probe = subprocess.run([*UNSHARE, "sh", "-c", hide], capture_output=True, text=True)
    if probe.returncode:
        pytest.skip(f"needs a mount namespace: {probe.stderr.strip()}")
    environment = {**os.environ, **broken_torch(tmp_path, "raise ImportError")}
    command = [*UNSHARE, "sh", "-c", f"{hide} && {sys.executable} -m nvme_ops.report -v --folder {tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "aio-max-nr ....................... [WARNING] cannot read /proc/sys/fs/aio-max-nr" in done.stdout
    assert "[FAIL]" not in done.stdout.partition("Backends")[2]
    assert "Traceback" not in done.stdout + done.stderr
