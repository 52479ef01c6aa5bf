"""One table of what the commands that measure refuse, and what nvme-bench makes of its flags and prints of a run."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

import nvme_ops
import nvme_ops.measure.run as run_module
from benchmarks import command as benchmarks
from nvme_ops.measure import bench, engines, explain, files, stop, tune
from nvme_ops.measure.bench import Workplace
from nvme_ops.measure.engines import ENGINES, BenchEngine, Task, tensor_row
from nvme_ops.measure.remote import Remote, joint_row
from nvme_ops.measure.rows import BlockTimes, Row, Sample, Unavailable
from nvme_ops.measure.run import BenchResult, contenders
from nvme_ops.measure.tables import ALONE, Table
from nvme_ops.measure.workload import cli
from nvme_ops.settings import Settings
from nvme_ops.text import GIB, KIB, MIB
from tests import prepared
from tests.conftest import refusal

HERE = tempfile.gettempdir()
SMALL = ["--io_size", "4M", "--no_reference"]
DEFAULT = Settings(MIB, 128, single_submit=False, overlap_events=True, intra_op_parallelism=1)
WORKPLACE = Workplace(HERE, 0)
B, T, W = ["--folder", HERE], ["--nvme_dir", HERE], ["workload", "cosmoflow", "--folder", HERE]


@pytest.fixture(autouse=True)
def _signals_and_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop, "leave_on_signals", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


# What is refused, with status 2 and before anything is written
BENCH: list[tuple[list[str], str]] = [
    ([], "one of the arguments --folder --folder-to-device-mapping is required"),
    (["--folder", __file__], "no such folder"),
    (["--folder_to_device_mapping", f"{HERE}:0", "/none:1"], "/none: no such folder"),
    (["--folder_to_device_mapping", HERE], "not FOLDER:NUMBER"),
    (["--folder_to_device_mapping", f"{HERE}:0", "--multi_process", "2"], "has one process for each folder"),
    (["--folder_to_device_mapping", f"{HERE}:0", "/:1", "--scaling", "--sweep", "queue_depth=1,2"], "are two runs"),
    ([*B, "--engine", "posix"], "--engine posix: there are aio_handle, gds_handle, torch, .*fio, gdsio, and all"),
    ([*B, "--cached"], "--cached goes with --read"),
    ([*B, "--use_gds"], "--use-gds goes with --device cuda"),
    ([*B, "--gpu"], "--device cuda: torch.cuda is not available"),
    ([*B, "--scaling"], "--scaling needs several folders"),
    ([*B, "--sweep", "block_size"], "--sweep block_size: not NAME=VALUE,...; names are block_size, queue_depth"),
    ([*B, "--sweep", "blocks=1M"], "--sweep blocks=1M: not NAME=VALUE"),
    ([*B, "--sweep", "block_size=1M,0"], "--sweep block_size: '0' is not a size"),
    ([*B, "--sweep", "single_submit=maybe"], "--sweep single_submit: 'maybe' is neither true nor false"),
    ([*B, "--sweep", "block_size=1M", "block_size=2M"], "--sweep block_size: twice"),
    ([*B, "--output", "none/such.json"], "--output none/such.json: its folder does not exist"),
    ([*B, "--output", "a.foo"], "--output a.foo: "),
    ([*B, "--bloc", "1M"], "unrecognized arguments: --bloc 1M"),  # abbreviations break when a flag is added
    ([*B, "--io_size", "4000000G"], "of free space are needed and there are .* --io-size or --folder"),
    (["explain", HERE, "--rounds", "1"], "--rounds 1: at least 2"),
    (["explain", HERE, "--device", "cuda:77"], "--device cuda:77: torch sees"),
    (["explain", HERE, "--device", "tpu"], "--device tpu: neither cpu nor cuda:N"),
    (["explain", __file__, "--write"], "a file that exists is only read"),
    (["workload", "cosmoflow", "--folder", "nothing"], "--folder nothing: no such folder"),
    ([*W, "--seconds", "nan"], "must be numbers greater than 0"),
    ([*W, "--output", "x.png"], "ends with .json"),
    (["workload", "llm-checkpoint", *B, "--reader", "nvme_ops"], "--reader is for jobs that read"),
    ([*W, "--size", "4000000G"], "of free space are needed .* --size or --folder"),
]
TUNE = [
    ([], "--folder"),
    (["--nvme_dir", HERE, "/no/such"], "/no/such: no such folder"),
    ([*T, "--io_size", "31M"], "a pass of less than 32 MiB"),
    ([*T, "--io_size", "4000000G"], "of free space are needed and there are .* --io-size or --folder"),
    ([*T, "--no_store", "--replace"], "--replace with --no-store"),
    ([*T, "--seconds", "0"], "--seconds: 0 is not a number of seconds above 0"),
    ([*T, "--no_read", "--no_write"], "leave nothing to measure"),
    ([*T, "--log_dir", "/proc/nothing"], "--log-dir /proc/nothing: "),
    ([*T, "--sweep_config", "/no/such/file"], "--sweep-config /no/such/file: No such file"),
    ([*T, "--gpu"], "--device cuda: torch.cuda is not available"),
    ([*T, "--gpu", "--gds"], "--gds: torch.cuda is not available"),
]
BENCHMARKS = [
    (["raw_io", "--size", "5M"], "not a multiple of 4 MiB"),
    ([], "usage: python benchmarks NAME"),
    (["raw_io", "--folder", "none/such"], "no such folder"),
    (["raw_io", "--output", "a.none"], "--output a.none: "),
    (["raw_io", "--folder", HERE, "--size", "4000000G"], "of free space are needed and there are"),
    (["gpu_io", "--block-size", "5000"], "not a multiple of 4K"),
    (["gpu_io", "--device", "cpu"], "--device cpu: not cuda:N"),
    (["gpu_io"], "a CUDA GPU|torch.cuda is not available"),
    (["page"], "--place NAME=DIR is needed, or --render"),
    (["page", "--place", "/mnt"], "not NAME=DIR"),
    (["page", "--place", "disk=/no/such"], "no such folder"),
    (["page", "--render", "--readme", "/no/such"], "/no/such: No such file"),
    (["page", "--render", "--readme", __file__], "it has no lines <!-- benchmarks --> and <!-- /benchmarks -->"),
]
SWEEPS: dict[str, str] = {  # what nvme-tune's --sweep_config has; its values are those of --sweep
    "{": "not JSON",
    "[]": "not an object with lists of values",
    '{"blocksize": [1]}': "'blocksize' is none of block_size, queue_depth",
    '{"queue_depth": 32}': "queue_depth must be a list of values",
    '{"queue_depth": [true]}': "queue_depth: 'True' is not a number",
}


@pytest.mark.parametrize(
    ("main", "words", "said"),
    [(each.main, *row) for each, rows in ((bench, BENCH), (tune, TUNE), (benchmarks, BENCHMARKS)) for row in rows],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_refused(main: Callable[[list[str]], int], words: list[str], said: str) -> None:
    if words[:1] == ["page"]:
        pytest.importorskip("tabulate")
    refused(main, words, said)


def test_a_wrong_sweep_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "sweep.json"
    for text, said in SWEEPS.items():
        path.write_text(text)
        refused(tune.main, [*T, "--sweep_config", str(path)], f"--sweep-config {path}: .*{re.escape(said)}")


def refused(main: Callable[[list[str]], int], words: list[str], said: str) -> None:
    status, told = refusal(main, words)
    assert status == 2
    assert re.search(said, " ".join(told.split())), told
    assert not [name for name in os.listdir(HERE) if name.startswith("nvme_ops-bench-")]


def test_gpus_and_matplotlib_that_are_not_there_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", None)
    refused(bench.main, [*B, "--output", "a.png"], "a picture needs matplotlib: pip install matplotlib")
    two_gpus(monkeypatch)
    refused(bench.main, ["--folder_to_device_mapping", f"{HERE}:2", "--gpu"], "GPU 2 of .*: there are 2, from 0 on")
    refused(bench.main, [*B, "--gpu", "--pageable"], "--pageable is about CPU memory")

    def no_cufile() -> None:
        raise RuntimeError("cuFile cannot work here")

    monkeypatch.setattr(nvme_ops, "gds_handle", no_cufile)
    refused(tune.main, [*T, "--gds"], "--gds: cuFile cannot work here")


def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.mark.parametrize("parser", [bench.parser, tune.parser, explain.parser])
def test_every_flag_is_on_a_page(parser: Callable[[], Any]) -> None:
    pages = "".join((Path(__file__).parents[2] / "docs" / f"{name}.md").read_text() for name in ("bench", "tune"))
    flags = {flag for action in parser()._actions for flag in action.option_strings if flag.startswith("--")}
    assert {flag for flag in flags - {"--help", "--version"} if f"`{flag}" not in pages} == set()


def test_hyphens_and_underscores_are_one() -> None:
    words = "--engine aio_handle --io_size=2M --sweep queue_depth=1,2"
    for each in (words, words.replace("_", "-")):
        found = parse(*each.split())
        assert (found.engines, found.size, found.swept) == (["aio_handle"], 2 * MIB, ["queue_depth"])
    assert tune.parse(["--nvme-dir", HERE, "--io-size", "64M"]) == tune.parse(["--nvme_dir", HERE, "--io_size", "64M"])
    workload = cli._parse(["unet3d", "llm_checkpoint", "--folder", HERE, "--reader", "nvme-ops"])
    assert (workload.jobs, workload.reader) == (["unet3d", "llm-checkpoint"], ["nvme_ops"])


def parse(*words: str) -> Namespace:
    return bench.parse([*B, *words])


@pytest.mark.parametrize(
    ("words", "changes"),
    [
        ("", {}),
        ("--engine torch fio torch --io_size 400M", {"engines": ["torch", "fio"], "size": 400 * MIB}),
        ("--engine all", {"engines": [name for name, engine in ENGINES.items() if not engine.gpu_only]}),
        ("--multi-process 2", {"places": [WORKPLACE, Workplace(HERE, 1)]}),
        ("--loops 4 --warmup_loops 2 --different_file_each_iteration", {"loops": 4, "warmup_loops": 2, "files": 6}),
        ("--warmup_loops 0 --different_file_each_iteration", {"warmup_loops": 0, "files": 4}),  # of a check
        (
            "--block_size 64K --queue_depth 4 --single_submit --sequential_requests --io_parallel 8",
            {"settings": [Settings(64 * KIB, 4, True, False, 8)]},
        ),
        ("--read --cached --validate", {"write": False, "cached": True, "validate": True}),
        ("--pageable --no_reference --json", {"pageable": True, "reference": False, "json": True}),
    ],
)
def test_flags_change_the_defaults_which_are_ds_io_s(words: str, changes: dict[str, Any]) -> None:
    expected = {
        "places": [WORKPLACE], "size": GIB, "write": True, "engines": ["aio_handle"], "settings": [DEFAULT],
        "swept": [], "loops": 3, "warmup_loops": 1, "validate": False, "gpu": False, "use_gds": False, "cached": False,
        "pageable": False, "reference": True, "scaling": False, "json": False, "output": [], "files": 1,
    }  # fmt: skip
    found = vars(parse(*words.split()))
    assert {name: found[name] for name in expected} == expected | changes


def test_processes_take_the_gpus_in_turn_and_folders_those_they_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_gpus(monkeypatch)
    found = parse("--multi_process", "3", "--gpu", "--use_gds", "--engine", "all")
    assert [place.device for place in found.places] == [0, 1, 0]
    assert (found.gpu, found.use_gds, found.engines) == (True, True, list(ENGINES))
    folder = tmp_path / "b:c"  # only the last colon separates
    folder.mkdir()
    words = ["--folder_to_device_mapping", f"{tmp_path}:0", "--folder_to_device_mapping", f"{folder}:15"]
    places = bench.parse([*words, "--multi_process", "2"]).places
    assert places == [Workplace(str(tmp_path), 0), Workplace(str(folder), 15)]


def test_a_sweep_is_all_combinations_and_the_same_to_nvme_tune(tmp_path: Path) -> None:
    axes = {"queue_depth": "32,1,32", "io_parallel": "2", "single_submit": "0,1", "sequential_requests": "TRUE,False"}
    found = parse("--block_size", "8K", "--sweep", *(f"{name}={texts}" for name, texts in axes.items()))
    every = itertools.product([8 * KIB], [32, 1], [False, True], [False, True], [2])
    assert found.settings == [Settings(*each) for each in every]
    assert found.swept == ["queue_depth", "intra_op_parallelism", "single_submit", "overlap_events"]
    config = tmp_path / "sweep.json"
    config.write_text(json.dumps({name: texts.split(",") for name, texts in axes.items()}))
    tried = tune.parse([*T, "--sweep_config", str(config)]).axes
    assert [axis.name for axis in tried] == found.swept
    assert [axis.values for axis in tried] == [[1, 32], [2], [False, True], [False, True]]


def test_rows_of_a_sweep_are_those_that_differ_for_their_engine() -> None:
    words = ("--engine", "aio_handle", "fio", "python", "--sweep", "block_size=64K,1M", "single_submit=0,1")
    assert [each.name for each in contenders(parse(*words))] == [
        "fio best",
        *(f"aio_handle, block_size {size}, single_submit {switch}"
          for size in ("64 KiB", "1 MiB") for switch in (False, True)),
        "fio, block_size 64 KiB", "fio, block_size 1 MiB", "python",
    ]  # fmt: skip


def made_up() -> BenchResult:
    """Rows of every kind."""
    best = Row("fio best", samples=[Sample(0.5, 10**9, 0.1), Sample(0.25, 10**9, 0.1)])
    mine = Sample(0.5, 10**9, 0.5, 20e-6, 1.0, 3 * MIB, {"package": 2.0, "dram": 1.0}, 1.0)
    rows = [best, Row("aio_handle", samples=[mine, mine], note="io_uring")]
    rows += [Row("torch", samples=[Sample(2.0, 10**9), None], note="failed"), Row("deepspeed", note="none")]
    table = Table("read", "read, 1 GiB", "GB/s", rows, "fio best", run_module.COLUMNS, ALONE)
    blocks = {"aio_handle": BlockTimes.of([1e-4] * 99 + [2e-3], [4e-6] * 100), "fio": BlockTimes.of([1e-4])}
    given = parse("--read", "--io_size", "16M", "--sweep", "queue_depth=1,2")
    return BenchResult(given, {"cpu": "2 x Fast", "kernel": "6.1"}, {HERE: {"file system": "ext4"}}, table, blocks)


SNAPSHOT = """\
cpu 2 x Fast; kernel 6.1
FOLDER: file system ext4

read, 1 GiB
  GB/s (min - max)  end to end GB/s  CPU s/GiB  peak memory  from page cache  submit us  J/GiB  / fio best
fio best  3.000 (2.000 - 4.000)  -  0.107  -  -  -  -  -
aio_handle  2.000 (2.000 - 2.000)  1.000  0.537  3 MiB  100 %  20.0  3.22  0.75 (0.50 - 1.00)  io_uring
torch  0.500 (0.500 - 0.500)  -  -  -  -  -  -  0.25 (0.25 - 0.25)  failed
deepspeed  -  -  -  -  -  -  -  -  none

read from the page cache: aio_handle 100 %. So far memory was measured, not the device.

latency of single blocks, read at random places, one after the other
us  p50  p90  p99  p99.9  submit p50  submit p99  blocks
aio_handle  100  100  100  2000  4.0  4.0  100
fio  100  100  100  100  -  -  1

energy: not available: no counters

fastest: aio_handle: 2.000 GB/s, 0.75 of fio best

interrupted: this is what was measured until then; the files are removed"""


def test_the_text_of_a_run() -> None:
    found = made_up()
    found.energy, found.interrupted = "not available: no counters", True
    text = "\n".join(re.sub("  +", "  ", line.rstrip()) for line in run_module.text(found).splitlines())
    assert text == SNAPSHOT.replace("FOLDER", HERE)


def test_one_engine_is_told_in_the_words_of_ds_io_too() -> None:
    found = made_up()
    found.table.rows = [Row("a", samples=[Sample(1.0, GIB, end_to_end=2.0), None, Sample(3.0, GIB)])]
    assert run_module.ds_io_lines(found).splitlines() == [
        "Task Read Latency = 4.0 sec", "Task Read Speed = 0.5 GB/sec", "E2E Read Latency = 5.0 sec",
        "E2E Read Speed = 0.4 GB/sec",
    ]  # fmt: skip


def test_the_document_is_json_and_complete() -> None:
    found = made_up()
    document = json.loads(json.dumps(run_module.as_document(found), allow_nan=False))
    assert " ".join(document) == (
        "command machine folders options tables passes blocks from_page_cache energy interrupted"
    )
    assert document["command"] == ["nvme-bench", *found.options.words]
    assert set(vars(found.options)) - {"words"} == set(document["options"])
    assert {field.name for field in fields(Sample)} | {"row"} == set(document["passes"][2])
    assert document["passes"][5] == {"row": "torch", "failed": True}
    assert document["from_page_cache"] == {"fio best": None, "aio_handle": 1.0, "torch": None, "deepspeed": None}


def test_scaling_is_divided_by_the_sum_of_each_alone(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    mapping = [f"{folder}:{number}" for number, folder in enumerate(folders)]
    words = ["--folder_to_device_mapping", *mapping, *SMALL, "--read", "--scaling", "--json"]
    done = prepared.run("-m", "nvme_ops.bench", *words, "--output", str(tmp_path / "out.json"))
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert found == json.loads((tmp_path / "out.json").read_text())
    rows = {row["name"]: row for row in found["tables"][0]["rows"]}
    alone, added = [f"aio_handle, {folder} alone" for folder in folders], "aio_handle, the sum of 2 alone"
    assert list(rows) == [*alone, "aio_handle", added]
    sums = [sum(pair) for pair in zip(*(rows[name]["values"] for name in alone), strict=True)]
    assert rows[added]["values"] == pytest.approx(sums)
    ratios = sorted(mine / both for mine, both in zip(rows["aio_handle"]["values"], sums, strict=True))
    assert list(rows["aio_handle"]["against_peer"].values()) == pytest.approx([ratios[1], ratios[0], ratios[2]])
    passes = [each for each in found["passes"] if each["row"] != added]
    assert all(each["end_to_end"] >= each["seconds"] for each in passes)
    assert [list(folder.iterdir()) for folder in folders] == [[], []]


def test_a_process_that_is_gone_leaves_no_answer_of_the_others_for_the_next_question() -> None:
    class MadeUp(Remote):
        """Answers each question with a sample of its own; once it is gone, it takes none."""

        def __init__(self) -> None:
            self.asked, self.numbers, self.gone = list[int](), itertools.count(1), False

        def send(self, number: int, command: str) -> None:
            if self.gone:
                raise Unavailable("gone")
            self.asked.append(next(self.numbers))

        def receive(self) -> tuple[Any, str]:
            return Sample(1.0, self.asked.pop(0)), ""

    first, second = MadeUp(), MadeUp()
    both, alone = joint_row("both", [first, second], 0), joint_row("alone", [first], 0)
    both.run()
    second.gone = True
    with pytest.raises(Unavailable, match="gone"):
        both.run()
    assert alone.run().amount == 3


def test_wrong_bytes_end_with_status_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lie(task: Task, name: str, _: Settings) -> Row:
        return tensor_row(task, name, lambda: task.buffer, lambda tensor: tensor.fill_(7))

    monkeypatch.setitem(engines.ENGINES, "liar", BenchEngine("made up", lie))
    for flags in (["--read"], []):
        assert bench.main(["--folder", str(tmp_path), *SMALL, "--engine", "liar", "python", *flags]) == 1
        out, errors = capsys.readouterr()
        assert out.count("WRONG DATA: tensor and file differ") == 1
        assert errors == "nvme-bench: wrong data: liar\n"
    assert list(tmp_path.iterdir()) == []


def test_space_is_for_all_files_of_all_processes_and_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "make_file", lambda *_: pytest.fail("something is written"))
    for name in "ab":
        (tmp_path / name).mkdir()
    # of 2 processes, one file for all and one of torch's, for 5 passes; 4 MiB each
    passes = ["--engine", "aio_handle", "torch", "--different_file_each_iteration", "--loops", "4", "--io_size", "4M"]
    free = 64 * MIB + 4 * MIB * 2 * 2 * 5
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(GIB, 0, free - 1))
    mapping = ["--folder_to_device_mapping", f"{tmp_path}/a:0", f"{tmp_path}/b:1"]
    for place in (["--folder", str(tmp_path), "--multi_process", "2"], mapping):  # on one file system
        with pytest.raises(files.NotUsable, match="144 MiB of free space are needed"):
            run_module.run(bench.parse([*place, *passes]))
