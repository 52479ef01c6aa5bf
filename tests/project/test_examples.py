"""Every program in examples/ runs, and says that what it read is what it wrote."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import prepared

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))
QUIET = {"PYTHONWARNINGS": "ignore::RuntimeWarning"}  # memory that may not be locked
NEEDS = {
    "offload_inference": "transformers",
    "finetune_larger_than_memory": "peft",
    "trainer": "accelerate",
    "trainer_trl": "trl",
}
ON_A_GPU = [name for name in EXAMPLES if name.startswith("gds_")]


def start(name: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(ROOT / "examples" / f"{name}.py"), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", **QUIET},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(name: str, *arguments: str, **variables: str) -> tuple[int, str, str]:
    done = prepared.run(str(ROOT / "examples" / f"{name}.py"), *arguments, environment={**QUIET, **variables})
    return done.returncode, done.stdout, done.stderr


def says_that_all_is_right(status: int, output: str, errors: str) -> None:
    assert (status, errors) == (0, "")
    assert re.search(r"equal|right", output)
    assert not re.search(r"DIFFERENT|WRONG", output)


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name != "demo" and name not in ON_A_GPU])
def test_example_runs_and_leaves_nothing(name: str, tmp_path: Path) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    says_that_all_is_right(*run(name, str(tmp_path)))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["auto", "off"])
@pytest.mark.parametrize("name", ON_A_GPU)
def test_example_of_a_gpu_runs_and_leaves_nothing(name: str, mode: str, tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch.cuda is not available: no GPU, or torch without CUDA")
    status, output, errors = run(name, str(tmp_path), NVME_OPS_GDS=mode)
    if mode == "auto" and status == 1 and errors.startswith(f"{name}.py: cuFile "):
        pytest.skip(errors.strip())
    says_that_all_is_right(status, output, errors)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ON_A_GPU[:1])
def test_example_of_a_gpu_ends_with_one_line_where_there_is_none(name: str, tmp_path: Path) -> None:
    status, output, errors = run(name, str(tmp_path), CUDA_VISIBLE_DEVICES="")
    assert (status, output) == (1, "")
    assert re.fullmatch(rf"{name}\.py: no CUDA GPU here, .+\n", errors)
    assert list(tmp_path.iterdir()) == []


def test_demo_compares_every_byte_and_prints_a_table(tmp_path: Path) -> None:
    status, output, errors = run("demo", "--size", "20000004", "--rounds", "2", "--path", str(tmp_path))
    assert (status, errors) == (0, "")
    assert "compared 20000008 bytes: every one is the same" in output  # made a multiple of 8
    assert re.search(r"write, on the disk +[\d.]+ GB/s +[\d.]+ GB/s +[\d.]+", output)
    assert re.search(r"read, not cached +[\d.]+ GB/s +[\d.]+ GB/s +[\d.]+", output)
    assert list(tmp_path.iterdir()) == []


def test_demo_removes_its_files_when_it_is_stopped(tmp_path: Path) -> None:
    process = start("demo", "--size", "8M", "--rounds", "100000", "--path", str(tmp_path))
    assert process.stdout is not None
    for line in process.stdout:
        if "round" in line:
            break
    process.terminate()
    _, errors = process.communicate()
    assert process.returncode == 128 + signal.SIGTERM
    assert "Traceback" not in errors
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "expected", "said"),
    [
        (["--size", "4000000G"], 1, r"GiB of free space are needed in .* and there are [\d.]+; choose"),
        (["--path", "/no/such"], 1, "/no/such: no such folder"),
        (["--size", "big"], 2, "--size"),
        (["--rounds", "0"], 2, "--rounds"),
    ],
)
def test_demo_refuses_what_cannot_be_done(words: list[str], expected: int, said: str, tmp_path: Path) -> None:
    status, _, errors = run("demo", "--path", str(tmp_path), *words)
    assert status == expected
    assert re.search(said, errors)
