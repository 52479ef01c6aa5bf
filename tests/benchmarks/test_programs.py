"""The programs of benchmarks/: a table of small runs, and what each makes of its figures."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import nvme_ops
from benchmarks import activations, adaptive, cgroups, checkpoint, command, data, inference, raw_io, training
from nvme_ops.data import SampleStore
from nvme_ops.measure import files
from nvme_ops.measure.rows import Row, Sample, Unavailable, WrongData, interleave
from nvme_ops.measure.tables import Table
from nvme_ops.op_builder.finished import default_root
from nvme_ops.text import MIB
from tests import prepared
from tests.conftest import run_python

ROOT = Path(__file__).parents[2]


def row(name: str, *seconds: float, amount: int = 100) -> Row:
    return Row(name, samples=[Sample(each, amount) for each in seconds])


# Small runs: the arguments, what is made smaller, and the groups that must come with a figure in each row


def _in_prepared_process(program: str, *words: str, folder: str = ".", **variables: str) -> Any:
    """Does as ``command.in_new_process``, but torch need not be imported first, nor the op compiled."""
    variables.pop("TORCH_EXTENSIONS_DIR", None)
    done = prepared.run("-c", program, *words, environment=variables, folder=Path(folder).absolute())
    if done.returncode:
        raise Unavailable((done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1])
    return json.loads(done.stdout.strip().splitlines()[-1])


def _smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "in_new_process", _in_prepared_process)
    monkeypatch.setattr(adaptive, "_PASS", 2 * MIB)
    monkeypatch.setattr(adaptive, "LEARNING", 5)
    monkeypatch.setattr(checkpoint, "_REST", 0.0)
    monkeypatch.setattr(activations, "GIB", 64 * MIB)
    monkeypatch.setattr(activations, "_LAYERS", {"convolutional": 6, "transformer": 2, "largest": 8})
    ways = {name: way for name, way in activations._WAYS.items() if way in ("memory", "nvme", "numpy")}
    monkeypatch.setattr(activations, "_WAYS", ways)


FILES = [each for each in checkpoint.GROUPS if each != "fresh"]
SMALL: dict[str, tuple[str, list[str]]] = {  # words, groups of the tables
    "raw_io": ("--size 16M", list(raw_io.GROUPS)),
    "checkpoint": (f"--size 32M --state_dict large --only {' '.join(FILES)}", FILES),
    "checkpoint fresh": ("--size 32M --only fresh", ["fresh"]),
    # the net saves more than the budget and what may be on its way, so that something has to be written
    "activations": (
        "--size 1G --steps 1 --budget 4M --batch 16 --most 2 --only convolutional largest", ["convolutional", "largest"]
    ),
    "adaptive": ("--size 16M --sizes 4K 1M", [group for group in adaptive.GROUPS for _ in range(2)]),
    "data": ("--size 4M --sizes 4K --workers 1 --records 5000 --log-records 1000", ["random", "index", "log"]),
    "inference": ("--size 8M --budget 4M --batch 2 --steps 2 --only memory nvme_ops", ["batch 2"]),
    "training": ("--size 4M --steps 1 --budget 256M --batch 8", list(training.GROUPS)),
}  # fmt: skip
_QUICK = ("raw_io", "checkpoint")
_ABSENT = ("not installed", "is not installed", "left out", "No module named", "pip install")  # begin or end of a note


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in _QUICK else pytest.mark.slow) for name in SMALL],
)
def test_a_small_run(name: str, folder: Path) -> None:
    """In a process of its own: torch's DCP does not work beside the simulated device that other tests register."""
    if name == "inference":
        pytest.importorskip("transformers")
    words, groups = SMALL[name]
    name, *_ = name.split()
    file = folder / "found.json"
    done = run_python(
        """
        import sys
        import pytest
        from benchmarks import command
        from tests.benchmarks.test_programs import _smaller

        _smaller(pytest.MonkeyPatch())
        sys.exit(command.main(sys.argv[1:]))
        """,
        *(name, "--rounds", "1", "--folder", folder, "--no-deepspeed", *words.split(), "--output", file),
        XDG_CACHE_HOME=str(folder / "cache"),
        TORCH_EXTENSIONS_DIR=str(default_root().parent),  # or the op would be compiled anew
    )
    out = done.stdout
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


def test_json_is_alone_on_standard_output(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["--folder", str(folder), "--size", "16M", "--rounds", "1", "--only", "latency", "--json"]
    assert command.main(["raw_io", *words]) == 0
    out, errors = capfd.readouterr()
    (table,) = json.loads(out)["folders"][str(folder)]["tables"]
    assert table["title"] in errors


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


def test_the_large_store_is_a_store(folder: Path) -> None:
    data.make_store(folder, 1000)
    store = SampleStore(folder)
    assert len(store) == 1000
    sizes = [each.numel() for each in store.read(range(1000))]
    assert min(sizes) >= 1
    assert max(sizes) < 2 * data.RECORD_BYTES


# Those that must find what the one in memory finds


def args_of(name: str, *words: str) -> Namespace:
    return command.parse(name, words)[1]


def _activations(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Row]:
    monkeypatch.setattr(activations, "GIB", 1 << 20)
    run = command.Run.__new__(command.Run)
    run.args, kept = args_of("activations", "--steps", "1"), list[Row]()
    monkeypatch.setattr(command.Run, "measure", lambda _, rows, **__: kept.extend(rows))
    activations.net_table(run, "convolutional", str(folder))
    return kept


def _training(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Row]:
    monkeypatch.setattr(training.importlib.util, "find_spec", lambda _: True)
    rows = training.engine_table(str(folder), args_of("training", "--steps", "1"), None).rows  # type: ignore[arg-type]
    return [rows[0], *(each for each in rows if each.name.startswith("nvme_ops"))]


def _deepspeed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Row]:
    _training(folder, monkeypatch)
    rows = training.engine_table(str(folder), args_of("training", "--steps", "1"), None).rows  # type: ignore[arg-type]
    return [rows[0], next(each for each in rows if each.name == "DeepSpeed, states")]


def _inference(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Row]:
    monkeypatch.setattr(inference.importlib.util, "find_spec", lambda _: True)
    monkeypatch.setattr(command, "bounded", lambda _, table, *__: table)
    (folder / "model.safetensors").write_bytes(bytes(4096))
    run = command.Run.__new__(command.Run)
    run.args = args_of("inference")
    return inference.batch_table(run, str(folder), str(folder), 1).rows


@pytest.mark.parametrize(
    ("make", "answers", "error"),
    [
        (_activations, "gradients", WrongData),
        (_training, "losses", WrongData),
        (_deepspeed, "losses", Unavailable),
        (_inference, "tokens", WrongData),
    ],
)
def test_other_results_than_in_memory_are_told(
    make: Callable[..., list[Row]], answers: str, error: type[Exception], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    phases = {name: [1.0, 1.0] for name in ("forward", "backward", "moved", "optimizer", "steps")}
    plain = dict.fromkeys(("peak_bytes", "first token", "load", "read per step", "while decoding"), 1.0)
    said = iter([[[1], [2]], [[1], [2]], [[1], [3]]])
    monkeypatch.setattr(command, "work", lambda *_, **__: {**plain, **phases, "figures": phases, answers: next(said)})
    memory, other, *_ = make(folder, monkeypatch)
    assert memory.run().seconds > 0
    assert other.run().amount > 0
    with pytest.raises(error, match=r"differ|losses"):
        other.run()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("group", "package"), [("mapped", "transformers"), ("accelerate", "accelerate"), ("deepspeed", "deepspeed")]
)
def test_peers_find_the_same_tokens(group: str, package: str, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    words = ["--size", "8M", "--budget", "4M", "--batch", "2", "--steps", "2", "--rounds", "1", "--json", "--only"]
    assert command.main(["inference", "--folder", str(folder), *words, group]) == 0
    (table,) = json.loads(capfd.readouterr().out)["folders"][str(folder)]["tables"]
    rows = [each for each in table["rows"] if not each["name"].startswith("fio ")]
    assert [(each["wrong"], each["note"]) for each in rows] == [(False, "")] * len(rows)


# What is made of the figures


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
    rows = {"nvme_ops a": (9, 1, 1), "nvme_ops b": (2, 4, 5), adaptive.ADAPTIVE: (1, 2, 10), "torch": (99, 99, 99)}
    made = [Row(name, samples=[Sample(1, rate) for rate in rates]) for name, rates in rows.items()]
    said = adaptive.summary(Table("read", "", "GB/s", made))
    assert said == "of the best fixed tool (nvme_ops b): 0.50 (after 20)"


@pytest.mark.parametrize(
    ("controllers", "limit"), [("cpu memory", "memory.max"), ("cpu", "memory.limit_in_bytes")], ids=["2", "1"]
)
def test_version_2_of_cgroups_limits_memory_where_it_has_the_controller(
    tmp_path: Path, controllers: str, limit: str
) -> None:
    (tmp_path / "cgroup.controllers").write_text(f"{controllers}\n")
    two, one = f"cgroup2 {tmp_path} cgroup2 rw 0 0\n", f"cgroup {tmp_path} cgroup rw,memory 0 0\n"
    assert cgroups.hierarchy(one + two) == (tmp_path, limit)
    if controllers == "cpu":
        with pytest.raises(Unavailable, match="no cgroup can limit"):
            cgroups.hierarchy(two)
