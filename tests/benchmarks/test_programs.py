"""The programs of benchmarks/: a table of small runs, and what each makes of its figures."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import nvme_ops
from benchmarks import activations, adaptive, cgroups, checkpoint, command, inference, raw_io, training
from nvme_ops.base.text import MIB
from nvme_ops.measure import files
from nvme_ops.measure.rows import Row, Sample, Unavailable, WrongData, interleave
from nvme_ops.measure.tables import Table
from nvme_ops.op_builder.trust import default_root
from tests import prepared

ROOT = Path(__file__).parents[2]


# Small runs: the arguments, what is made smaller, and the groups that must come with a figure in each row


_in_new_process = command.in_new_process


def _in_prepared_process(program: str, *words: str, folder: str = ".", **variables: str) -> Any:
    """Does as ``command.in_new_process``, but torch need not be imported first, nor the op compiled.

    A process with a limit on its memory is a new one all the same: to copy what it shares with another takes memory.
    """
    if '"group": "/' in "".join(words):
        return _in_new_process(program, *words, folder=folder, **variables)
    variables.pop("TORCH_EXTENSIONS_DIR", None)
    imported = ("transformers.models.llama.modeling_llama", "accelerate") if "inference" in program else ()
    place = Path(folder).absolute()
    done = prepared.run("-c", program, *words, environment=variables, folder=place, imported=imported)
    if done.returncode:
        raise Unavailable((done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1])
    return json.loads(done.stdout.strip().splitlines()[-1])


FILES = [each for each in checkpoint.GROUPS if each != "fresh"]
FEEDS = {"chosen by Zipf(1.0)": (4, 6), "prompts": (16, 0)}
SMALL: dict[str, tuple[str, list[str]]] = {  # words, groups of the tables
    "raw_io": ("--size 16M", list(raw_io.GROUPS)),
    "checkpoint": (f"--size 32M --state-dict large --only {' '.join(FILES)}", FILES),
    "checkpoint fresh": ("--size 32M --only fresh", ["fresh"]),
    # the net saves more than the budget and what may be on its way, so that something has to be written
    "activations": (
        "--size 1G --steps 1 --budget 4M --batch 16 --most 2 --only convolutional largest", ["convolutional", "largest"]
    ),
    "adaptive": ("--size 16M --sizes 1M", list(adaptive.GROUPS)),
    "data": ("--size 4M --sizes 4K --workers 1 --records 5000 --log-records 1000", ["random", "index", "log"]),
    "inference": ("--size 8M --budget 4M --batch 2 --steps 2 --only nvme_ops accelerate mapped", ["batch 2"]),
    "inference experts": ("--size 8M --only experts", [f"experts, {feed}, 3 of 5" for feed in FEEDS]),
    "training": ("--size 4M --steps 1 --budget 256M --batch 8", list(training.GROUPS)),
}  # fmt: skip
_QUICK = ("raw_io", "checkpoint")
_ABSENT = ("not installed", "left out", "No module named", "pip install", "no cgroup")  # in a note


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in _QUICK else pytest.mark.slow) for name in SMALL]
)
def test_a_small_run(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    program = name.split()[0]
    if program == "inference":
        pytest.importorskip("transformers")
    ways = {name: way for name, way in activations._WAYS.items() if way in ("memory", "nvme", "numpy")}
    for module, attribute, smaller in (
        (command, "in_new_process", _in_prepared_process), (adaptive, "_PASS", 2 * MIB), (adaptive, "LEARNING", 5),
        (checkpoint, "_REST", 0.0), (activations, "GIB", 64 * MIB), (activations, "_WAYS", ways),
        (activations, "_LAYERS", {"convolutional": 6, "transformer": 2, "largest": 8}),
        (inference, "_FIFTHS", (3,)), (inference, "_FEEDS", FEEDS), (inference, "_MIXED", inference._MIXED[:3:2]),
    ):  # fmt: skip
        monkeypatch.setattr(module, attribute, smaller)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(default_root().parent))  # or the op would be compiled anew
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    words, groups = SMALL[name]
    file = folder / "found.json"
    flags = ["--rounds", "1", "--folder", str(folder), "--no-deepspeed", *words.split(), "--output", str(file)]
    assert command.main([program, *flags]) == 0
    out = capfd.readouterr().out
    found = json.loads(file.read_text())
    assert {"machine", "size", "rounds", "folders", "about"} <= set(found)
    (there,) = found["folders"].values()
    assert {"place", "tables", "notes"} <= set(there)
    assert [table["group"] for table in there["tables"]] == groups
    for table in there["tables"]:
        assert set(table) == {"group", "title", "unit", "reference", "peers", "rows"}
        assert table["title"] in out
        for each in table["rows"]:
            assert not each["wrong"]
            lacks = any(words in each["note"] for words in _ABSENT) or each["name"].startswith("fio")
            assert each["values"] or lacks, (each["name"], each["note"])
    assert {left.name for left in folder.iterdir()} <= {"found.json", "cache"}


def test_all_programs_are_listed_and_have_a_small_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--help"]) == 0
    listed = capsys.readouterr().err
    assert set(command.names()) == {*(name.split()[0] for name in SMALL), "gpu_io", "page"}
    assert all(f"\n  {name} " in listed for name in command.names())


# Rows, and processes of their own


def test_deepspeed_cannot_take_this_checkouts_op_builder_for_its_own() -> None:
    done = subprocess.run([sys.executable, "-c", "import op_builder"], cwd=ROOT, capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == "ImportError: this is nvme_ops.op_builder"


def test_what_a_new_process_says_is_its_last_line_and_its_failure_a_reason() -> None:
    program = "import os, sys; print('x'); print('[\"' + os.environ['A'], sys.argv[1] + '\"]')"
    assert command.in_new_process(program, "word", A="told") == ["told word"]
    with pytest.raises(Unavailable, match=r"^no reason$"):
        command.in_new_process("import sys; sys.exit('words\\nno reason')")


def test_a_load_of_other_bytes_is_told(folder: Path) -> None:
    work = checkpoint.Work(str(folder / "x"), {"a": torch.ones(1000)}, deepspeed=False)
    nvme_ops.save({"a": torch.zeros(1000)}, work.path + ".safetensors")
    rows = {
        each.name: each for each in checkpoint.load_rows(work, files.make_warm) if each.name.startswith("nvme_ops .")
    }
    interleave(list(rows.values()), 1)
    assert {name: each.wrong for name, each in rows.items()} == {"nvme_ops .safetensors": True, "nvme_ops .pt": False}


def made(name: str, *words: str) -> command.Run:
    run = command.Run.__new__(command.Run)
    run.args = command.parse(name, words)[1]
    return run


def _training(folder: Path) -> list[Row]:
    rows = training.engine_table(str(folder), made("training", "--steps", "1").args, None).rows  # type: ignore[arg-type]
    return [rows[0], next(each for each in rows if each.name.startswith("nvme_ops"))]


def _inference(folder: Path) -> list[Row]:
    (folder / "model.safetensors").write_bytes(bytes(4096))
    return inference.batch_table(made("inference"), str(folder), str(folder), 1).rows


@pytest.mark.parametrize(("make", "answers"), [(_training, "losses"), (_inference, "tokens")])
def test_other_results_than_in_memory_are_told(
    make: Callable[[Path], list[Row]], answers: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    phases = {name: [1.0, 1.0, 1.0] for name in ("forward", "backward", "moved", "optimizer", "seconds", "read")}
    plain = dict.fromkeys(("peak_bytes", "loading", "load", "while decoding"), 1.0)
    said = iter([[[1], [2]], [[1], [2]], [[1], [3]]])
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: True)
    monkeypatch.setattr(command, "bounded", lambda _, table, *__: table)
    monkeypatch.setattr(command, "work", lambda *_, **__: {**plain, **phases, "figures": phases, answers: next(said)})
    memory, other, *_ = make(folder)
    assert memory.run().seconds > 0
    assert other.run().amount > 0
    with pytest.raises(WrongData, match=f"{answers} differ"):
        other.run()


def test_the_bound_is_the_longer_of_computing_and_moving() -> None:
    def measured(seconds: float, read: float) -> Row:
        return Row("", samples=[Sample(seconds, 1, figures={"read per step": read}), None])

    run = command.Run.__new__(command.Run)
    run.measure = lambda *_, **__: bound.samples.append(bound.run())  # type: ignore[method-assign]
    memory, reads, computes = measured(1.0, 0), measured(4.0, 300.0), measured(4.0, 30.0)
    bound = Row("fio", lambda: Sample(1.0, 100))
    table = Table("", "", "tokens/s", [memory, reads, computes])
    assert command.bounded(run, table, bound, 1, "read per step").rows[-1] is bound
    found = [each.samples[0].figures["of the bound"] for each in (reads, computes) if each.samples[0]]
    assert found == [0.75, 0.25]


def test_the_choice_is_divided_by_the_fixed_tool_of_the_highest_median() -> None:
    rates = {"nvme_ops a": (9, 1, 1), "nvme_ops b": (2, 4, 5), adaptive.ADAPTIVE: (1, 2, 10), "torch": (99, 99, 99)}
    rows = [Row(name, samples=[Sample(1, rate) for rate in each]) for name, each in rates.items()]
    said = adaptive.summary(Table("read", "", "GB/s", rows))
    assert said == "of the best fixed tool (nvme_ops b): 0.50 (after 20)"


def test_version_2_of_cgroups_limits_memory_where_it_has_the_controller(tmp_path: Path) -> None:
    two, one = f"cgroup2 {tmp_path} cgroup2 rw 0 0\n", f"cgroup {tmp_path} cgroup rw,memory 0 0\n"
    for controllers, limit in (("cpu memory", "memory.max"), ("cpu", "memory.limit_in_bytes")):
        (tmp_path / "cgroup.controllers").write_text(f"{controllers}\n")
        assert cgroups.hierarchy(one + two) == (tmp_path, limit)
    with pytest.raises(Unavailable, match="no cgroup can limit"):
        cgroups.hierarchy(two)
