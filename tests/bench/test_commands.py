"""What nvme-bench makes of its flags, and prints of a run; tests/project/test_mistakes.py has what it refuses."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import struct
import sys
import tempfile
from argparse import Namespace
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

import nvme_ops.measure.run as run_module
from nvme_ops.base.settings import Settings
from nvme_ops.base.text import GIB, KIB, MIB
from nvme_ops.measure import bench, engines, files, picture, stop
from nvme_ops.measure.bench import Workplace
from nvme_ops.measure.engines import BenchEngine, Task, tensor_row
from nvme_ops.measure.rows import Row, Sample
from nvme_ops.measure.run import BenchResult, contenders
from nvme_ops.measure.tables import ALONE, Table
from tests import prepared
from tests.conftest import refusal

HERE = tempfile.gettempdir()
B = ["--folder", HERE]


@pytest.fixture(autouse=True)
def _signals_and_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop, "leave_on_signals", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


def refused(words: list[str], said: str) -> None:
    status, told = refusal(bench.main, words)
    assert (status, bool(re.search(said, " ".join(told.split())))) == (2, True), told


def test_gpus_and_matplotlib_that_are_not_there_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", None)
    refused([*B, "--output", "a.png"], "a picture needs matplotlib: pip install matplotlib")
    refused([*B, "--gpu"], "--device cuda: torch.cuda is not available")
    two_gpus(monkeypatch)
    refused(["--folder_to_device_mapping", f"{HERE}:2", "--gpu"], "GPU 2 of .*: there are 2, from 0 on")
    refused([*B, "--gpu", "--pageable"], "--pageable is about CPU memory")


def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


def parse(*words: str) -> Namespace:
    return bench.parse([*B, *words])


def test_flags_change_the_defaults_which_are_ds_io_s() -> None:
    flags = (
        "--engine all --io-size 400M --multi_process 2 --loops 4 --warmup_loops 2 --different_file_each_iteration "
        "--read --block_size 64K --queue-depth 4 --single_submit --sequential_requests --io_parallel 8 "
        "--cached --validate"
    )
    expected = {
        "places": [Workplace(HERE, 0)], "size": GIB, "write": True, "engines": ["aio_handle"], "loops": 3,
        "settings": [Settings(MIB, 128, False, True, 1)], "warmup_loops": 1, "validate": False, "cached": False,
        "files": 1,
    }  # fmt: skip
    changed = {
        "places": [Workplace(HERE, 0), Workplace(HERE, 1)], "size": 400 * MIB, "write": False, "loops": 4,
        "engines": ["aio_handle", "torch", "python"], "settings": [Settings(64 * KIB, 4, True, False, 8)],
        "warmup_loops": 2, "validate": True, "cached": True, "files": 6,
    }  # fmt: skip
    for words, values in (("", expected), (flags, changed)):
        parsed = vars(parse(*words.split()))
        assert {name: parsed[name] for name in values} == values


def test_processes_take_the_gpus_in_turn_and_folders_those_they_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_gpus(monkeypatch)
    parsed = parse("--multi_process", "3", "--gpu", "--use_gds", "--engine", "aio_handle", "torch")
    assert [place.device for place in parsed.places] == [0, 1, 0]
    assert (parsed.gpu, parsed.engines) == (True, ["gds_handle", "torch"])
    folder = tmp_path / "b:c"  # only the last colon separates
    folder.mkdir()
    words = ["--folder_to_device_mapping", f"{tmp_path}:0", "--folder_to_device_mapping", f"{folder}:15"]
    assert bench.parse(words).places == [Workplace(str(tmp_path), 0), Workplace(str(folder), 15)]


def test_rows_of_a_sweep_are_those_that_differ_for_their_engine() -> None:
    axes = "queue_depth=32,1,32 io_parallel=2 single_submit=0,1 sequential_requests=TRUE,False"
    parsed = parse("--block_size", "8K", "--engine", "aio_handle", "python", "--sweep", *axes.split())
    every = itertools.product([8 * KIB], [32, 1], [False, True], [False, True], [2])
    assert parsed.settings == [Settings(*values) for values in every]
    names = [contender.name for contender in contenders(parsed)]
    assert names[0] == "aio_handle, queue_depth 32, intra_op_parallelism 2, single_submit False, overlap_events False"
    assert (len(set(names)), names[-1]) == (9, "python")


SNAPSHOT = """\
cpu 2 x Fast; kernel 6.1
FOLDER: file system ext4

read, 1 GiB
  GB/s (min - max)  end to end GB/s  CPU s/GiB  peak memory  from page cache  submit us  J/GiB  / torch
torch  3.000 (2.000 - 4.000)  -  0.107  -  -  -  -  -
aio_handle  2.000 (2.000 - 2.000)  1.000  0.537  3 MiB  100 %  20.0  3.22  0.75 (0.50 - 1.00)  io_uring
python  0.500 (0.500 - 0.500)  -  -  -  -  -  -  0.25 (0.25 - 0.25)  failed

read from the page cache: aio_handle 100 %. So far memory was measured, not the device.

energy: not available: no counters

fastest: torch: 3.000 GB/s; as fast in some round: aio_handle

interrupted: this is what was measured until then; the files are removed"""


def test_the_text_and_the_document_of_a_run() -> None:
    best = Row("torch", samples=[Sample(0.5, 10**9, 0.1), Sample(0.25, 10**9, 0.1)])
    mine = Sample(0.5, 10**9, 0.5, 20e-6, 1.0, 3 * MIB, {"package": 2.0, "dram": 1.0}, 1.0)
    rows = [best, Row("aio_handle", samples=[mine, mine], note="io_uring")]
    rows += [Row("python", samples=[Sample(2.0, 10**9), None], note="failed")]
    table = Table("read", "read, 1 GiB", "GB/s", rows, "torch", run_module.COLUMNS, ALONE)
    result = BenchResult(parse("--read"), {"cpu": "2 x Fast", "kernel": "6.1"}, {HERE: {"file system": "ext4"}}, table)
    result.energy, result.interrupted = "not available: no counters", True
    text = "\n".join(re.sub("  +", "  ", line.rstrip()) for line in run_module.text(result).splitlines())
    assert text == SNAPSHOT.replace("FOLDER", HERE)
    document = json.loads(json.dumps(run_module.as_document(result), allow_nan=False))
    assert {field.name for field in fields(Sample)} | {"row"} == set(document["passes"][2])
    assert document["passes"][5] == {"row": "python", "failed": True}
    assert document["from_page_cache"] == {"torch": None, "aio_handle": 1.0, "python": None}
    table.rows = [Row("a", samples=[Sample(1.0, GIB, end_to_end=2.0), None, Sample(3.0, GIB)])]
    assert run_module.ds_io_lines(result).splitlines() == [
        "Task Read Latency = 4.0 sec", "Task Read Speed = 0.5 GB/sec", "E2E Read Latency = 5.0 sec",
        "E2E Read Speed = 0.4 GB/sec",
    ]  # fmt: skip


def test_scaling_is_divided_by_the_sum_of_each_alone(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    mapping = [f"{folder}:{number}" for number, folder in enumerate(folders)]
    words = ["--folder_to_device_mapping", *mapping, "--io_size", "4M", "--read", "--scaling", "--json"]
    done = prepared.run("-m", "nvme_ops.bench", *words, "--output", str(tmp_path / "out.json"))
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    assert document == json.loads((tmp_path / "out.json").read_text())
    rows = {row["name"]: row for row in document["tables"][0]["rows"]}
    alone, added = [f"aio_handle, {folder} alone" for folder in folders], "aio_handle, the sum of 2 alone"
    assert list(rows) == [*alone, "aio_handle", added]
    for one, other, both in zip(*(rows[name]["values"] for name in (*alone, added)), strict=True):
        assert both == pytest.approx(one + other)
    assert rows["aio_handle"]["against_peer"]["median"] > 0
    assert [list(folder.iterdir()) for folder in folders] == [[], []]


def test_wrong_bytes_end_with_status_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lie(task: Task, name: str, _: Settings) -> Row:
        return tensor_row(task, name, lambda: task.buffer, lambda tensor: tensor.fill_(7))

    monkeypatch.setitem(engines.ENGINES, "liar", BenchEngine("made up", lie))
    for flags in (["--read"], []):
        assert bench.main(["--folder", str(tmp_path), "--io_size", "4M", "--engine", "liar", "python", *flags]) == 1
        out, errors = capsys.readouterr()
        assert out.count("WRONG DATA: tensor and file differ") == 1
        assert errors == "nvme-bench: wrong data: liar\n"
    assert list(tmp_path.iterdir()) == []


def test_space_is_for_all_files_of_all_processes_and_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "make_file", lambda *_: pytest.fail("something is written"))
    # of 2 processes, one file for all and one of torch's, for 5 passes; 4 MiB each
    passes = ["--engine", "aio_handle", "torch", "--different_file_each_iteration", "--loops", "4", "--io_size", "4M"]
    free = 64 * MIB + 4 * MIB * 2 * 2 * 5
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(GIB, 0, free - 1))
    (tmp_path / "a").mkdir()
    mapping = ["--folder_to_device_mapping", f"{tmp_path}:0", f"{tmp_path}/a:1"]
    for place in (["--folder", str(tmp_path), "--multi_process", "2"], mapping):  # on one file system
        with pytest.raises(files.NotUsable, match="144 MiB of free space are needed"):
            run_module.run(bench.parse([*place, *passes]))


# Pictures of documents


def document(unit: str, *names: str, tables: int = 1) -> dict[str, Any]:
    spread = {"median": 2.5, "min": 2, "max": 3}
    rows = [{"name": name, "spread": spread if name else None} for name in names]
    return {"tables": [{"title": "a title", "unit": unit, "rows": rows}] * tables}


def test_rows_with_a_throughput_are_bars_and_tables_are_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    path = tmp_path / "a.png"
    for nothing in (document("us", "late"), document("GB/s", "")):
        assert not picture.plot(nothing, str(path))
    assert not path.exists()
    many = document("GB/s", *["a name of thirty-six characters, or so"] * 16, tables=10)
    assert picture.plot(many, str(path))
    width, height = struct.unpack(">II", path.read_bytes()[16:24])
    assert (width <= 1000, height <= 2000) == (True, True)
    drawn: list[Any] = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, *_, **__: drawn.append(figure))
    assert picture.plot(document("GB/s", "torch", "nvme_ops, locked", "aio_handle", ""), str(tmp_path / "a.svg"))
    theirs, ours, the_same = (bar.get_facecolor() for bar in drawn[0].axes[0].patches)
    assert ours == the_same != theirs
