"""Every program of benchmarks/ runs at a tiny size and gives sane rows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import (
    accelerators,
    activations,
    adaptive,
    checkpoint,
    command,
    gpu_io,
    inference,
    raw_io,
    training,
)
from nvme_ops.base.text import MIB
from nvme_ops.measure.rows import Unavailable
from nvme_ops.op_builder.trust import default_root
from tests import prepared
from tests.conftest import REPOSITORY, refusal, run_python
from tests.device.kinds import on_a_gpu

# Small runs: the arguments, what is made smaller, and the groups that must come with a figure in each row


_in_new_process = command.in_new_process


def _in_prepared_process(program: str, *words: str, folder: str = ".", end: float = 0, **variables: str) -> Any:
    """Does as ``command.in_new_process``, but torch need not be imported first, nor the op compiled.

    A process with a limit on its memory is a new one all the same: to copy what it shares with another takes memory.
    """
    if '"group": "/' in "".join(words):
        return _in_new_process(program, *words, folder=folder, end=end, **variables)
    variables.pop("TORCH_EXTENSIONS_DIR", None)
    imported = ("transformers.models.llama.modeling_llama", "accelerate") if "inference" in program else ()
    place = Path(folder).absolute()
    done = prepared.run("-c", program, *words, environment=variables, folder=place, imported=imported)
    if done.returncode:
        raise Unavailable((done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1])
    return json.loads(done.stdout.strip().splitlines()[-1])


FILES = [group for group in checkpoint.GROUPS if group != "fresh"]
FEEDS = {"chosen by Zipf(1.0)": (4, 6), "prompts": (16, 0)}
SMALL: dict[str, tuple[str, list[str]]] = {  # words, groups of the tables
    "raw_io": ("--size 16M", list(raw_io.GROUPS)),
    "checkpoint": (f"--size 32M --state-dict large --only {' '.join(FILES)}", FILES),
    "checkpoint fresh": ("--size 32M --only fresh", ["fresh"]),
    # the net saves more than the budget and what may be on its way, so that something has to be written
    "activations": ("--size 1G --steps 1 --budget 4M --batch 16 --only convolutional", ["convolutional"]),
    "adaptive": ("--size 16M --sizes 1M", list(adaptive.GROUPS)),
    "data": ("--size 4M --sizes 4K --workers 1", ["random"]),
    "inference": ("--size 8M --budget 4M --batch 2 --steps 2 --only nvme_ops accelerate mapped", ["batch 2"]),
    "inference experts": ("--size 8M --only experts", [f"experts, {feed}, 3 of 5" for feed in FEEDS]),
    "training": ("--size 4M --steps 1 --budget 256M --batch 8", list(training.GROUPS)),
    "inference on an accelerator": (
        "--size 8M --device-budget 4M --host-budget 0 2M auto --batch 2 --steps 2 --only nvme_ops accelerate diffusers",
        ["batch 2"],
    ),
    "inference with a cache on an accelerator": (
        "--size 16M --device-budget 8M --host-budget 0 4M --batch 2 --only cache", ["cache, batch 2"]
    ),
    "inference with experts on an accelerator": (
        "--size 8M --device-budget 2M --host-budget 0 1M --only experts", ["experts, chosen by Zipf(1.0)"]
    ),
    "training on an accelerator": (
        "--size 4M --device-budget 64M --host-budget 0 64M --steps 1 --batch 8", list(training.GROUPS)
    ),
    "activations on an accelerator": (
        "--device-budget 4M --host-budget 0 16M --steps 1 --batch-of-transformer 1 --only transformer", ["transformer"]
    ),
}  # fmt: skip
_QUICK = ("raw_io", "checkpoint")
_ABSENT = ("not installed", "left out", "No module named", "pip install", "no cgroup", "no host memory")  # in a note


_THERE = "on an accelerator"
_DEVICES = [pytest.param("simulated", marks=pytest.mark.nightly), pytest.param("cuda:0", marks=on_a_gpu)]


@pytest.mark.parametrize(
    ("name", "device"),
    [pytest.param(name, "", marks=[] if name in _QUICK else pytest.mark.nightly)
     for name in SMALL if not name.endswith(_THERE)] +
    [pytest.param(name, *device.values, marks=device.marks)
     for name in SMALL if name.endswith(_THERE) for device in _DEVICES],
)  # fmt: skip
def test_a_small_run(
    name: str, device: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """All budgets, of an accelerator and the host, give the tokens, losses and gradients of its memory alone."""
    program = name.split()[0]
    if program == "inference":
        pytest.importorskip("transformers")
    ways = {name: way for name, way in activations._WAYS.items() if way in ("memory", "nvme", "numpy", "host")}
    for module, attribute, smaller in (
        (command, "in_new_process", _in_prepared_process), (adaptive, "_PASS", 2 * MIB), (adaptive, "LEARNING", 5),
        (checkpoint, "_REST", 0.0), (accelerators, "GIB", 64 * MIB), (activations, "_WAYS", ways),
        (activations, "_LAYERS", {"convolutional": 6, "transformer": 2}),
        (inference, "_FIFTHS", (3,)), (inference, "_FEEDS", FEEDS), (inference, "_MIXED", inference._MIXED[:3:2]),
    ):  # fmt: skip
        monkeypatch.setattr(module, attribute, smaller)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(default_root().parent))  # or the op would be compiled anew
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    words, groups = SMALL[name]
    file = folder / "found.json"
    flags = ["--rounds", "1", "--folder", str(folder), "--no-deepspeed", *words.split(), "--output", str(file)]
    flags += ["--device", device] if device else []
    assert command.main([program, *flags]) == 0
    out = capfd.readouterr().out
    document = json.loads(file.read_text())
    assert {"machine", "size", "rounds", "folders", "about"} <= set(document)
    (there,) = document["folders"].values()
    assert [table["group"] for table in there["tables"]] == groups
    for table in there["tables"]:
        assert table["title"] in out
        for row in table["rows"]:
            assert not row["wrong"]
            lacks = any(words in row["note"] for words in _ABSENT) or row["name"].startswith("fio")
            assert row["values"] or lacks, (row["name"], row["note"])
    assert {left.name for left in folder.iterdir()} <= {"found.json", "cache"}


@pytest.mark.parametrize("device", _DEVICES)
def test_a_small_run_of_transfers_there(device: str, folder: Path) -> None:
    """In a process of its own: cuFile cannot be used in forked children of one that has used it."""
    done = run_python(
        "import sys; from benchmarks import command; sys.exit(command.main(['gpu_io', *sys.argv[1:]]))",
        *("--folder", folder, "--size", "8M", "--rounds", "1", "--threads", "2"),
        *("--no-deepspeed", "--device", device, "--json"),
        PYTHONWARNINGS="ignore::RuntimeWarning",  # memory that may not be locked
    )
    assert os.listdir(folder) == []
    (there,) = json.loads(done.stdout)["folders"].values()
    whole = (gpu_io.HOST, gpu_io.BOUNCE, f"{gpu_io.GDS}, NVME_OPS_GDS=off")
    requests = [f"{gpu_io.BOUNCE}, {nbytes}, {count} in flight" for nbytes in ("64 KiB", "16 MiB") for count in (1, 64)]
    names = [*whole, "torch.load(map_location)"], [*whole, "torch.save + fsync"], requests, requests
    for table, wanted in zip(there["tables"], names, strict=True):
        rows = {row["name"]: row for row in table["rows"]}
        for name in wanted:
            assert (rows[name]["wrong"], len(rows[name]["values"])) == (False, 1), rows[name]["note"]
        assert [name for name, row in rows.items() if not row["values"] and not row["note"]] == []


def test_all_programs_are_listed_and_have_a_small_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--help"]) == 0
    listed = capsys.readouterr().err
    assert set(command.names()) == {*(name.split()[0] for name in SMALL), "gpu_io", "page"}
    assert all(f"\n  {name} " in listed for name in command.names())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "usage: python benchmarks NAME"),
        (["raw_io", "--size", "5M"], "not a multiple of 4 MiB"),
        (["raw_io", "--folder", "none/such"], "no such folder"),
        (["gpu_io", "--device", "cpu"], "--device cpu: not cuda:N"),
        (["page"], "--place NAME=DIR is needed, or --render"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_refused(words: list[str], said: str) -> None:
    if words[:1] == ["page"]:
        pytest.importorskip("tabulate")
    status, told = refusal(command.main, words)
    assert status == 2
    assert said in " ".join(told.split())


def test_deepspeed_cannot_take_this_checkouts_op_builder_for_its_own() -> None:
    done = subprocess.run([sys.executable, "-c", "import op_builder"], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == "ImportError: this is nvme_ops.op_builder"
