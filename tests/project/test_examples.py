"""What readers copy: every program in examples/ runs and says that what it read is what it wrote, and every block of
Python on a page runs as it stands, after those before it, where its names and files are there.

For blocks, ``/mnt/nvme`` is a folder of the test, and ``cuda`` the simulated accelerator.
"""

from __future__ import annotations

import json
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
    "offload_experts": "transformers",
    "offload_inference": "transformers",
    "offload_quality": "transformers",
    "finetune_larger_than_memory": "peft",
    "trainer": "accelerate",
    "trainer_trl": "trl",
}
#: Imported once for all that need any of them, which takes as long as all else that they do.
HEAVY = ("transformers.models.llama.modeling_llama", "transformers.trainer", "peft", "trl.trainer.sft_trainer")
ON_A_GPU = [name for name in EXAMPLES if name.startswith("gds_")]


def run(name: str, *arguments: str, **variables: str) -> tuple[int, str, str]:
    script, heavy = str(ROOT / "examples" / f"{name}.py"), HEAVY if name in NEEDS else ()
    done = prepared.run(script, *arguments, environment={**QUIET, **variables}, imported=heavy)
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


def test_example_of_a_gpu_ends_with_one_line_where_there_is_none(tmp_path: Path) -> None:
    status, output, errors = run(ON_A_GPU[0], str(tmp_path), CUDA_VISIBLE_DEVICES="")
    assert (status, output) == (1, "")
    assert re.fullmatch(rf"{ON_A_GPU[0]}\.py: no CUDA GPU here, .+\n", errors)


def test_demo_compares_every_byte_and_prints_a_table(tmp_path: Path) -> None:
    status, output, errors = run("demo", "--size", "20000004", "--rounds", "2", "--path", str(tmp_path))
    assert (status, errors) == (0, "")
    assert "compared 20000008 bytes: every one is the same" in output  # made a multiple of 8
    for row in ("write, on the disk", "read, not cached"):
        assert re.search(rf"{row} +[\d.]+ GB/s +[\d.]+ GB/s +[\d.]+", output)
    assert list(tmp_path.iterdir()) == []


def test_demo_removes_its_files_when_it_is_stopped(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "examples/demo.py"), "--size", "8M", "--rounds", "100000", "--path", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", **QUIET},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "round" in line:
            break
    process.terminate()
    _, errors = process.communicate()
    assert process.returncode == 128 + signal.SIGTERM
    assert "Traceback" not in errors
    assert list(tmp_path.iterdir()) == []


# Blocks of Python on pages

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
#: The line before a block, and the block. A line that ends in "needs ...:" says what its reader has to have.
BLOCK = re.compile(r"^([^\n]*)\n+```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
NEED = re.compile(r"\bneeds (.+):$")
#: What stands here for what a reader needs.
STAND_INS = {
    "a GPU": "from tests.doubles import private_device\n(computing := private_device().computing()).__enter__()\n",
    "DeepSpeed": "import deepspeed\n",
}
OPTIONAL = re.compile(r"^(?:from|import) (transformers|peft|deepspeed)\b", re.MULTILINE)
PROGRAM = """
import json, sys, warnings
warnings.simplefilter("ignore")
names = {"__name__": "__main__"}
for number, block in enumerate(json.loads(sys.argv[1])):
    exec(compile(block, f"block {number}", "exec"), names)
"""


def blocks(page: Path) -> list[tuple[str, str]]:
    """What each block of a page needs, or nothing, and its text."""
    matches = BLOCK.findall(page.read_text(encoding="utf-8"))
    return [(need[1] if (need := NEED.search(before)) else "", code) for before, code in matches]


def run_blocks(code: list[str], folder: Path) -> None:
    for package in OPTIONAL.findall("\n".join(code)):
        pytest.importorskip(package)
    heavy = HEAVY if "transformers" in str(code) else ()
    alone = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "NVME_OPS_GDS": "off"}
    done = prepared.run("-c", PROGRAM, json.dumps(code), folder=folder, environment=alone, imported=heavy)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.name)
def test_blocks_of_a_page_run_as_they_stand(page: Path, folder: Path) -> None:
    """In order, in an empty folder, without a GPU or a network: all but those that say what they need."""
    run_blocks([code for need, code in blocks(page) if not need], folder)


NEEDY = [page for page in PAGES if any(need for need, _ in blocks(page))]


@pytest.mark.parametrize("page", NEEDY, ids=lambda page: page.name)
def test_blocks_that_need_something_run_with_it(page: Path, folder: Path) -> None:
    code = [STAND_INS[need] + block if need else block for need, block in blocks(page)]
    run_blocks([block.replace('"cuda"', '"privateuseone"') for block in code], folder)
