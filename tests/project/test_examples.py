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
    assert re.search(r"write, on the disk +[\d.]+ GB/s +[\d.]+ GB/s +[\d.]+", output)
    assert re.search(r"read, not cached +[\d.]+ GB/s +[\d.]+ GB/s +[\d.]+", output)
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


@pytest.mark.parametrize(
    ("words", "expected", "said"),
    [
        (["--size", "4000000G"], 1, r"GiB of free space are needed in .* and there are [\d.]+; choose"),
        (["--path", "/no/such"], 1, "/no/such: no such folder"),
        (["--rounds", "0"], 2, "--rounds"),
    ],
)
def test_demo_refuses_what_cannot_be_done(words: list[str], expected: int, said: str, tmp_path: Path) -> None:
    status, _, errors = run("demo", "--path", str(tmp_path), *words)
    assert status == expected
    assert re.search(said, errors)


# Blocks of Python on pages

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)

MODEL = """
import torch, nvme_ops
class Model(torch.nn.Sequential):  # as those of transformers, it returns the loss in training
    def __init__(self):
        super().__init__(torch.nn.Linear(512, 512), torch.nn.Linear(512, 4))
    def forward(self, x):
        return super().forward(x).square().mean()
model = Model()
"""
LLAMA = """
import torch, transformers, nvme_ops
from transformers import Trainer, TrainingArguments
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
small = transformers.LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_attention_heads=2, num_hidden_layers=2
)
model = transformers.LlamaForCausalLM(small)
model.save_pretrained("Llama-70B")
inputs = {"input_ids": torch.tensor([[1, 2, 3]])}
arguments = TrainingArguments("out", max_steps=1, report_to=[], use_cpu=True, disable_tqdm=True)
texts = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 8
"""
MIXTURE = """
import torch, transformers
transformers.logging.disable_progress_bar()
small = transformers.Qwen3MoeConfig(
    vocab_size=99, hidden_size=32, moe_intermediate_size=32, num_hidden_layers=2, num_experts=8, num_experts_per_tok=2
)
transformers.Qwen3MoeForCausalLM(small).save_pretrained("Qwen3-30B-A3B")
inputs = {"input_ids": torch.tensor([[1, 2, 3]])}
"""
ACCELERATOR = """
from tests.doubles import private_device
private_device()
"""
HEAD = """
class Head(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.bias, self.lm_head = torch.nn.Parameter(torch.zeros(3)), torch.nn.Linear(4, 3000, bias=False)
model = Head()
state, rank, train_on = model.state_dict(), 1, lambda: None
"""
SAMPLES = """
import torch
source = [(b"..." * 100, torch.tensor(1))] * 600
def decode(sample):
    return torch.zeros(3, 8, 8), sample["label"]
"""
FILE = """
nvme_ops.aio_handle().sync_pwrite(torch.ones(1000), "/mnt/nvme/weights")
nvme_ops.aio_handle().sync_pwrite(torch.ones(1000), "weights")
tensor = torch.zeros(1000)
"""
BATCHES = """
loader = [(torch.ones(3, 512), torch.zeros(()))] * 2
batches = [torch.ones(3, 512)] * 3
criterion, optimizer = torch.nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1)
"""
ONE_RANK = """
import os
os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
"""

#: What is there before a block, by its page and number: what its reader has, or the text before it says.
BEFORE = {
    ("README.md", 0): MODEL,
    ("activations.md", 0): MODEL + BATCHES,
    ("checkpoint.md", 0): MODEL + ACCELERATOR + HEAD,
    ("checkpoint.md", 3): "nvme_ops.save(model, 'model.safetensors')",
    ("data.md", 0): SAMPLES + ACCELERATOR,
    ("dcp.md", 0): MODEL + "state_dict = model.state_dict()",
    ("experts.md", 0): MIXTURE,
    ("gds.md", 0): MODEL + FILE + ACCELERATOR + "tensor_on_gpu = tensor.to('cuda')".replace("'", '"'),
    ("offload.md", 0): LLAMA,
    ("offload.md", 1): MODEL + "x = torch.ones(2, 512)",
    ("offload.md", 2): ONE_RANK,
    ("offload.md", 3): LLAMA,
    ("offload.md", 4): LLAMA,
    ("training.md", 0): MODEL + BATCHES,
    ("training.md", 3): MODEL,
    ("training.md", 5): MODEL + BATCHES,
    ("training.md", 6): LLAMA,
    ("tune.md", 0): MODEL + FILE + """open("aio.json", "w").write('{"aio": {"queue_depth": 32}}')""",
}
#: Packages without which the blocks of a page cannot run.
PAGE_NEEDS = {
    "deepspeed.md": "deepspeed",
    "experts.md": "transformers",
    "offload.md": "peft",
    "training.md": "transformers",
}

PROGRAM = """
import json, sys, warnings
warnings.simplefilter("ignore")
names = {"__name__": "__main__"}
for number, (before, block) in enumerate(json.loads(sys.argv[1])):
    exec(before, names)
    exec(compile(block, f"block {number}", "exec"), names)
"""


def blocks(page: Path) -> list[str]:
    return BLOCK.findall(page.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.name)
def test_every_block_runs(page: Path, folder: Path) -> None:
    if page.name in PAGE_NEEDS:
        pytest.importorskip(PAGE_NEEDS[page.name])
    (folder / "nvme").mkdir()

    def placed(code: str) -> str:
        return code.replace("/mnt/nvme", str(folder / "nvme")).replace('"cuda"', '"privateuseone"')

    assert {number for name, number in BEFORE if name == page.name} <= set(range(len(blocks(page))))
    code = [(placed(BEFORE.get((page.name, number), "")), placed(each)) for number, each in enumerate(blocks(page))]
    heavy = HEAVY if "transformers" in str(code) else ()
    off = {"NVME_OPS_GDS": "off"}
    found = prepared.run("-c", PROGRAM, json.dumps(code), folder=folder, environment=off, imported=heavy)
    assert found.returncode == 0, found.stdout + found.stderr
