"""The benchmarks in benchmarks/: their arguments, what they lack, and one small run of each group for real."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import bench_overhead, checkpoint, command, file_rows, fresh_process, gpu_io, raw_io, scaling, throttled
from nvme_ops.bench.engines import deepspeed
from nvme_ops.bench.measure import Unavailable, interleave
from nvme_ops.bench.work import Work
from nvme_ops.measuring import files
from nvme_ops.text import MIB
from tests import prepared
from tests.conftest import refusal

ROOT = Path(__file__).parents[2]


def test_fio_that_is_not_installed_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    file = tmp_path / "data"
    files.make_file(str(file), 4 * MIB)
    rows = file_rows.fio_rows(Work(str(file), 4 * MIB, write=False))
    interleave(rows, 1)
    assert [row.note for row in rows] == ["fio is not installed: apt-get install fio"] * 2


def test_deepspeed_that_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    for name in [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]:
        monkeypatch.delitem(sys.modules, name)
    stdlib = [entry for entry in sys.path if "site-packages" not in entry and "dist-packages" not in entry]
    monkeypatch.setattr(sys, "path", stdlib)
    monkeypatch.setattr(deepspeed, "load", deepspeed.load.__wrapped__)
    rows = file_rows.deepspeed_rows(Work("none", 4 * MIB, write=False))
    interleave(rows, 1)
    assert [row.note for row in rows] == ["DeepSpeed is not installed: pip install deepspeed"] * 2


def test_deepspeed_cannot_take_this_checkouts_op_builder_for_its_own() -> None:
    program = """
import nvme_ops
import op_builder
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == "ImportError: this is nvme_ops.op_builder"


def test_staging_memory_is_measured(tmp_path: Path) -> None:
    file = tmp_path / "data"
    files.make_file(str(file), 4 * MIB)
    found = raw_io.staging(str(file), 4 * MIB)
    assert (found["idle_before"], found["idle_after"]) == (0, 0)
    assert found["peak_resident_growth"] is None or found["peak_resident_growth"] < 64 * MIB


def test_what_a_new_process_says_is_its_last_line_and_its_failure_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    program = "import os, sys; print('x'); print(os.environ['A'], sys.argv[1], os.environ.get('PYTHONPATH'))"
    assert command.in_new_process(program, "word", A="told") == "told word None"
    assert command.in_new_process(f"{program}  # nvme_ops", "word", A="told").startswith(f"told word {ROOT}")
    with pytest.raises(Unavailable, match=r"^no reason$"):
        command.in_new_process("import sys; sys.exit('words\\nno reason')")


def run_raw_io(*arguments: str) -> subprocess.CompletedProcess[str]:
    quiet = {"PYTHONWARNINGS": "ignore::RuntimeWarning"}  # memory that may not be locked
    return prepared.run(str(ROOT / "benchmarks" / "raw_io.py"), *arguments, environment=quiet)


@pytest.mark.parametrize(
    ("program", "arguments", "words"),
    [
        *(
            (program, ["--size", "5M"], "not a multiple of 4 MiB")
            for program in (raw_io, checkpoint, fresh_process, bench_overhead, scaling, gpu_io)
        ),
        (raw_io, ["--size", "big"], "'big' is not a size"),
        (raw_io, ["--rounds", "0"], "not a number of at least 1"),
        (raw_io, ["--only", "everything"], "invalid choice"),
        (raw_io, ["--path", "none/such"], "no such folder"),
        (raw_io, ["--json", "none/such/file"], "its folder does not exist"),
        (checkpoint, ["--state_dict", "huge"], "invalid choice"),
        (scaling, ["--devices", "0"], "not a number of at least 1"),
        (scaling, ["--rate", "x"], "is not a size"),
        (gpu_io, ["--block-size", "5000"], "not a multiple of 4K"),
        (gpu_io, ["--block-size", "much"], "'much' is not a size"),
        (gpu_io, ["--threads", "0"], "not a number of at least 1"),
        (gpu_io, ["--gpu", "first"], "invalid int value"),
        (throttled, ["--devices", "65", "--", "true"], "at most 64"),
        (throttled, ["--rate", "fast", "--", "true"], "is not a size"),
        (throttled, ["--size", "1M", "--", "true"], "at least 16 MiB"),
        (throttled, [], "the following arguments are required: COMMAND"),
    ],
)
def test_wrong_arguments_are_refused(program: Any, arguments: list[str], words: str) -> None:
    status, errors = refusal(program.main, arguments)
    assert status == 2
    assert words in errors


def test_files_are_removed_when_it_is_stopped(tmp_path: Path) -> None:
    arguments = ["--path", str(tmp_path), "--size", "16M", "--rounds", "100000", "--only", "latency"]
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "benchmarks" / "raw_io.py"), *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        # a job in the background of a shell ignores it, and so do its children
        preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    while not list(tmp_path.glob("*/data")):
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate()
    assert (process.returncode, errors.strip()) == (130, "interrupted; the files are removed")
    assert list(tmp_path.iterdir()) == []


def test_a_small_run(tmp_path: Path) -> None:
    folder, result = tmp_path / "work", tmp_path / "result.json"
    folder.mkdir()
    groups = ["read", "write", "cached", "random", "latency", "submit", "memory"]
    done = run_raw_io(
        "--path", str(folder), "--size", "16M", "--rounds", "1", "--no-deepspeed", "--json", str(result),
        "--only", *groups,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert os.listdir(folder) == []
    found = json.loads(result.read_text())["folders"][str(folder)]
    assert [table["group"] for table in found["tables"]] == groups[:-1]
    assert {"idle_before", "busy", "idle_after", "pool_kept", "peak_resident_growth"} == set(found["memory"])
    for table in found["tables"]:
        for row in table["rows"]:
            assert not row["wrong"]
            if not row["name"].startswith("fio"):  # may not be installed
                assert len(row["values"]) == 1, (row["name"], row["note"])
                assert row["values"][0] > 0


@pytest.mark.slow
def test_a_small_start_up_run() -> None:
    done = run_raw_io("--only", "start", "--rounds", "1")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"nvme_ops, empty cache, whole process +[\d.]+", done.stdout)
    assert re.search(r"nvme_ops, warm, beyond importing torch +[\d.]+", done.stdout)
