"""Every program of benchmarks/ runs at a tiny size and gives sane rows; what they share of fio and other packages."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import nvme_ops
from benchmarks import (
    activations,
    adaptive,
    cgroups,
    checkpoint,
    command,
    data,
    fio,
    inference,
    peers,
    raw_io,
    training,
)
from nvme_ops.base.settings import Settings
from nvme_ops.base.text import GIB, MIB
from nvme_ops.measure import files, tables
from nvme_ops.measure.engines import Task
from nvme_ops.measure.rows import Row, Sample, Unavailable, WrongData, interleave
from nvme_ops.measure.tables import Table
from nvme_ops.measure.workload import readers
from nvme_ops.op_builder.trust import default_root
from tests import prepared
from tests.conftest import refusal
from tests.made_up import executable

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


FILES = [group for group in checkpoint.GROUPS if group != "fresh"]
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
    "name", [pytest.param(name, marks=[] if name in _QUICK else pytest.mark.nightly) for name in SMALL]
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
    document = json.loads(file.read_text())
    assert {"machine", "size", "rounds", "folders", "about"} <= set(document)
    (there,) = document["folders"].values()
    assert {"place", "tables", "notes"} <= set(there)
    assert [table["group"] for table in there["tables"]] == groups
    for table in there["tables"]:
        assert set(table) == {"group", "title", "unit", "reference", "peers", "rows"}
        assert table["title"] in out
        for row in table["rows"]:
            assert not row["wrong"]
            lacks = any(words in row["note"] for words in _ABSENT) or row["name"].startswith("fio")
            assert row["values"] or lacks, (row["name"], row["note"])
    assert {left.name for left in folder.iterdir()} <= {"found.json", "cache"}


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
        (["raw_io", "--output", "a.none"], "--output a.none: "),
        (["raw_io", "--size", "4000000G"], "of free space are needed and there are"),
        (["gpu_io", "--block-size", "5000"], "not a multiple of 4K"),
        (["gpu_io", "--device", "cpu"], "--device cpu: not cuda:N"),
        (["page"], "--place NAME=DIR is needed, or --render"),
        (["page", "--place", "/mnt"], "not NAME=DIR"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_refused(words: list[str], said: str) -> None:
    if words[:1] == ["page"]:
        pytest.importorskip("tabulate")
    status, told = refusal(command.main, words)
    assert status == 2
    assert said in " ".join(told.split())


# fio and other packages


def job(seconds: float = 0.5) -> dict[str, Any]:
    """What fio says of a job that read."""
    read = {"total_ios": 256, "runtime": int(1000 * seconds), "io_bytes": GIB}
    other = {"total_ios": 0, "runtime": 0, "io_bytes": 0}
    return {"error": 0, "read": read, "write": other, "usr_cpu": 2.0, "sys_cpu": 8.0, "job_runtime": 500}


def test_fio_output_is_read_and_its_failures_keep_its_words() -> None:
    text = "fio: a note\n" + json.dumps({"jobs": [job()]})
    sample = fio.read_output(0, text, "")
    assert sample.rate == 2 * GIB
    assert tables.COLUMNS["CPU s/GiB"][0](sample) == pytest.approx(0.05)
    assert fio.read_output(0, text, "", operations=True).rate == 512
    for status, output, errors, words in (
        (0, json.dumps({"jobs": [job(seconds=0)]}), "", "too short to time"),
        (1, "", "fio: engine io_uring not loadable\n", "engine io_uring not loadable"),
        (0, 'fio: pid=1, err=12\n{"jobs": [{"error": 12}]}', "", "err=12"),
        (3, "{}", "", "exit status 3"),
    ):
        with pytest.raises(RuntimeError, match=words):
            fio.read_output(status, output, errors)


def test_the_first_variant_of_fio_that_runs_is_kept_with_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = f'echo "$@" >> {tmp_path}/told\ncase "$*" in *mmaphuge*) echo no huge pages >&2; exit 1;; esac'
    executable(tmp_path / "fio", f"{script}\necho '{json.dumps({'jobs': [job()]})}'")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(fio, "COUNTER", str(tmp_path / "nr_hugepages"))
    (tmp_path / "nr_hugepages").write_text("7\n")
    files.make_file(str(tmp_path / "a:b"), MIB)
    row = fio.row("fio", "read", lambda: str(tmp_path / "a:b"), MIB, lambda: None)
    interleave([row], 1)
    assert (row.note, len(row.samples)) == ("without huge pages (vm.nr_hugepages)", 1)
    told = (tmp_path / "told").read_text().splitlines()
    assert f"--filename={tmp_path}/a\\:b" in told[0]  # a colon separates files
    assert {"--rw=read", f"--bs={4 * MIB}", "--direct=1", "--readonly"} <= set(told[0].split())
    assert told[-2] == told[-1], "what has worked is taken at once"
    assert (tmp_path / "nr_hugepages").read_text().split() == ["7"], "given back"


def test_huge_pages_become_as_many_as_before_and_others_keep_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter, wanted = tmp_path / "nr_hugepages", fio.SIZE // fio.page_size()
    monkeypatch.setattr(fio, "COUNTER", str(counter))
    counter.write_text("7\n")
    with contextlib.suppress(RuntimeError), fio.huge_pages():
        assert int(counter.read_text().split()[0]) == 7 + wanted
        counter.write_text(f"{7 + wanted + 3}\n")
        raise RuntimeError
    assert int(counter.read_text().split()[0]) == 10


GDSIO = (
    "IoType: READ XferType: GPUD Threads: 4 DataSetSize: 1048576/1048576(KiB) IOSize: 1024(KiB) "
    "Throughput: 2.000000 GiB/sec, Avg_Latency: 589.4 usecs ops: 1024 total_time 0.500000 secs\n"
)


def test_gdsio_gets_its_settings_and_its_failures_keep_its_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executable(tmp_path / "gdsio", f"echo \"$@\" >> '{tmp_path}/told'\necho '{GDSIO.strip()}'")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    files.make_file(str(tmp_path / "data"), MIB)
    row = peers.gdsio_row(Task(str(tmp_path / "data"), MIB, True, 0), "", Settings(MIB, intra_op_parallelism=2))
    interleave([row], 1)
    assert row.samples == [Sample(0.5, GIB)]
    path = tmp_path / "data.gdsio"
    assert (tmp_path / "told").read_text().splitlines()[0] == f"-f {path} -d 0 -w 2 -s 1024K -i 1024K -x 0 -I 1"
    assert path.stat().st_size == MIB
    for status, output, words in ((1, "\nfile register error: 5027\n", "file register error: 5027"),
                                  (0, "nothing useful", "nothing useful"), (5, "", "exit status 5")):  # fmt: skip
        with pytest.raises(RuntimeError, match=f"gdsio: {words}"):
            peers.read_gdsio(status, output)


def test_what_is_not_installed_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] in ("safetensors", "deepspeed")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if not entry.endswith("-packages")])
    monkeypatch.setattr(peers, "_loaded_deepspeed", peers._loaded_deepspeed.__wrapped__)
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    task = Task(str(tmp_path / "data"), MIB, True, 0)
    files.make_file(task.path, MIB)
    rows = [peers.safetensors_row(task, ""), peers.gdsio_row(task, "", Settings())]
    rows.append(fio.row("", "read", lambda: task.path, MIB, lambda: None))
    interleave(rows, 1)
    assert [row.note.rpartition(": ")[2] for row in rows] == [
        "pip install safetensors", "apt-get install nvidia-gds", "apt-get install fio"
    ]  # fmt: skip
    with pytest.raises(Unavailable, match="pip install deepspeed"):
        peers.load_deepspeed()


# Rows, and processes of their own


def test_deepspeed_cannot_take_this_checkouts_op_builder_for_its_own() -> None:
    done = subprocess.run([sys.executable, "-c", "import op_builder"], cwd=ROOT, capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == "ImportError: this is nvme_ops.op_builder"


@pytest.mark.parametrize("name", data.READERS)
def test_each_reader_reads_what_it_wrote(name: str, folder: Path) -> None:
    try:
        reader = readers.made(
            data.READERS[name], readers.DataSet(folder, [100 + 37 * number for number in range(45)], 10, 1)
        )
    except Unavailable as reason:
        pytest.skip(str(reason))
    seen = [int.from_bytes(bytes(entry[:8].tolist()), "little") for batch in readers.checked(reader) for entry in batch]
    assert sorted(seen) == list(range(45))
    assert all(path.exists() for path in reader.files)


def test_what_a_new_process_says_is_its_last_line_and_its_failure_a_reason() -> None:
    program = "import os, sys; print('x'); print('[\"' + os.environ['A'], sys.argv[1] + '\"]')"
    assert command.in_new_process(program, "word", A="told") == ["told word"]
    with pytest.raises(Unavailable, match=r"^no reason$"):
        command.in_new_process("import sys; sys.exit('words\\nno reason')")


def test_a_load_of_other_bytes_is_told(folder: Path) -> None:
    work = checkpoint.Work(str(folder / "x"), {"a": torch.ones(1000)}, deepspeed=False)
    nvme_ops.save({"a": torch.zeros(1000)}, work.path + ".safetensors")
    rows = {row.name: row for row in checkpoint.load_rows(work, files.make_warm) if row.name.startswith("nvme_ops .")}
    interleave(list(rows.values()), 1)
    assert {name: row.wrong for name, row in rows.items()} == {"nvme_ops .safetensors": True, "nvme_ops .pt": False}


def made(name: str, *words: str) -> command.Run:
    run = command.Run.__new__(command.Run)
    run.args = command.parse(name, words)[1]
    return run


def _training(folder: Path) -> list[Row]:
    rows = training.engine_table(str(folder), made("training", "--steps", "1").args, None).rows  # type: ignore[arg-type]
    return [rows[0], next(row for row in rows if row.name.startswith("nvme_ops"))]


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
    assert [row.samples[0].figures["of the bound"] for row in (reads, computes) if row.samples[0]] == [0.75, 0.25]


def test_the_choice_is_divided_by_the_fixed_tool_of_the_highest_median() -> None:
    rates = {"nvme_ops a": (9, 1, 1), "nvme_ops b": (2, 4, 5), adaptive.ADAPTIVE: (1, 2, 10), "torch": (99, 99, 99)}
    rows = [Row(name, samples=[Sample(1, rate) for rate in values]) for name, values in rates.items()]
    said = adaptive.summary(Table("read", "", "GB/s", rows))
    assert said == "of the best fixed tool (nvme_ops b): 0.50 (after 20)"


def test_version_2_of_cgroups_limits_memory_where_it_has_the_controller(tmp_path: Path) -> None:
    two, one = f"cgroup2 {tmp_path} cgroup2 rw 0 0\n", f"cgroup {tmp_path} cgroup rw,memory 0 0\n"
    for controllers, limit in (("cpu memory", "memory.max"), ("cpu", "memory.limit_in_bytes")):
        (tmp_path / "cgroup.controllers").write_text(f"{controllers}\n")
        assert cgroups.hierarchy(one + two) == (tmp_path, limit)
    with pytest.raises(Unavailable, match="no cgroup can limit"):
        cgroups.hierarchy(two)
