"""What nvme-bench says of a run, made of made-up timings: text, JSON, CSV, and the sums over processes and devices."""

from __future__ import annotations

import csv
import io
import json
import re
import tempfile
from dataclasses import fields

import pytest

from nvme_ops.measure import bench as options
from nvme_ops.measure import run as report
from nvme_ops.measure import tables
from nvme_ops.measure.remote import combined
from nvme_ops.measure.rows import BlockTimes, Row, Sample, Spread
from nvme_ops.measure.run import COLUMNS, BenchResult, Scaling, contenders, scaling_of
from nvme_ops.text import GIB, KIB, MIB

ANYWHERE = tempfile.gettempdir()
GB = 10**9


def row(name: str, *samples: Sample | None, note: str = "") -> Row:
    return Row(name, lambda: Sample(1, 1), note=note, samples=list(samples))


def result(*rows: Row, words: tuple[str, ...] = ("--read",), reference: str = "fio best") -> BenchResult:
    table = tables.Table("read", "read, 1 GiB", "GB/s", list(rows), reference, COLUMNS)
    given = options.parse(["--folder", ANYWHERE, *words])
    return BenchResult(given, {"cpu": "2 x Fast", "kernel": "6.1"}, {ANYWHERE: {"file system": "ext4"}}, table)


def full(seconds: float) -> Sample:
    """A pass that knows everything of itself."""
    return Sample(
        seconds, GB, cpu_seconds=0.5, submit_seconds=20e-6, end_to_end=2 * seconds, peak_bytes=3 * MIB,
        joules={"package": 2.0, "dram": 1.0},
    )  # fmt: skip


BEST = row("fio best", Sample(0.5, GB, 0.1), Sample(0.25, GB, 0.1))
MINE = row("aio_handle", full(0.5), full(0.5), note="io_uring")
FLAKY = row("torch", Sample(2.0, GB), None, note="failed: OSError: gone")
ABSENT = row("deepspeed", note="DeepSpeed is not installed: pip install deepspeed")


def cells(text: str, start: str) -> list[str]:
    """Of the first line that begins so."""
    line = next(line for line in text.splitlines() if line.startswith(start))
    return re.split(r"  +", line)


def test_processes_take_as_long_as_the_slowest_and_move_their_sum() -> None:
    first = Sample(2.0, 100, cpu_seconds=0.5, submit_seconds=1e-3, end_to_end=9.0, peak_bytes=10)
    second = Sample(3.0, 200, cpu_seconds=0.25, submit_seconds=2e-3, end_to_end=8.0, peak_bytes=20)
    joint = combined([first, second], 5.0)
    assert joint == Sample(3.0, 300, cpu_seconds=0.75, submit_seconds=2e-3, end_to_end=5.0, peak_bytes=30)
    assert joint.rate == 100


def test_what_one_process_does_not_know_the_sum_does_not_know() -> None:
    known = Sample(1.0, 1, cpu_seconds=0.5, peak_bytes=10, submit_seconds=1.0)
    joint = combined([known, Sample(1.0, 1)], 1.0)
    assert (joint.cpu_seconds, joint.peak_bytes, joint.submit_seconds) == (None, None, 1.0)


def test_scaling_is_paired_with_the_sum_of_each_device_alone() -> None:
    together = row("aio_handle", Sample(0.5, GB), Sample(1.0, GB), None, Sample(1.0, 9 * GB))
    alone = [
        row("x alone", Sample(1.0, GB), Sample(2.0, GB), Sample(1.0, GB), Sample(1.0, GB)),
        row("y alone", Sample(1.0, 3 * GB), Sample(2.0, GB), Sample(1.0, GB), None),
    ]
    # the first two rounds are whole: 2 of 1 + 3, then 1 of 0.5 + 0.5
    expected = Scaling("aio_handle", 2, Spread(1.5, 1.0, 2.0), Spread(2.5, 1.0, 4.0), Spread(0.75, 0.5, 1.0))
    assert scaling_of("aio_handle", together, alone) == expected


def test_scaling_without_a_whole_round_is_unknown() -> None:
    assert scaling_of("a", row("a", None), [row("x", full(1))]) == Scaling("a", 1, None, None, None)


def test_figures_of_ds_io_are_of_all_passes_together_in_gib() -> None:
    measured = row("a", Sample(1.0, GIB, end_to_end=2.0), None, Sample(3.0, GIB, end_to_end=3.0))
    assert report.ds_io_figures(measured) == {
        "Task Latency sec": 4.0,
        "Task Speed GB/sec": 0.5,
        "E2E Latency sec": 5.0,
        "E2E Speed GB/sec": 0.4,
    }


def test_without_an_end_to_end_time_it_is_the_task_s() -> None:
    assert report.ds_io_figures(row("a", Sample(4.0, GIB)))["E2E Speed GB/sec"] == 0.25


@pytest.mark.parametrize(("words", "direction"), [(("--read",), "Read"), ((), "Write")])
def test_one_engine_is_told_in_the_words_of_ds_io(words: tuple[str, ...], direction: str) -> None:
    found = result(BEST, row("aio_handle", Sample(2.0, GIB, end_to_end=4.0)), words=words)
    assert report.ds_io_lines(found).splitlines() == [
        f"Task {direction} Latency = 2.0 sec",
        f"Task {direction} Speed = 0.5 GB/sec",
        f"E2E {direction} Latency = 4.0 sec",
        f"E2E {direction} Speed = 0.25 GB/sec",
    ]
    assert report.ds_io_lines(found) in report.text(found)


def test_several_engines_are_told_in_a_table_without_the_reference_and_what_failed() -> None:
    lines = report.ds_io_lines(result(BEST, MINE, FLAKY, ABSENT)).splitlines()
    assert [re.split(r"  +", line)[0] for line in lines] == ["as ds_io counts (GB = GiB)", "aio_handle", "torch"]
    assert re.split(r"  +", lines[2]) == ["torch", "2", "0.4657", "2", "0.4657"]
    assert report.ds_io_lines(result(BEST, ABSENT)) == ""


def test_columns_of_the_table() -> None:
    text = report.text(result(BEST, MINE, FLAKY, ABSENT))
    head = ["GB/s (min - max)", "end to end GB/s", "CPU s/GiB", "peak memory", "submit us", "J/GiB", "/ fio best"]
    assert cells(text, "  ")[1:] == head
    assert cells(text, "fio best") == ["fio best", "3.000 (2.000 - 4.000)", "-", "0.107", "-", "-", "-", "-"]
    # 2 / 2 and 2 / 4 of fio's: the median of the ratios, not 2 / 3
    assert cells(text, "aio_handle") == [
        "aio_handle", "2.000 (2.000 - 2.000)", "1.000", "0.537", "3 MiB", "20.0", "3.22", "0.75 (0.50 - 1.00)",
        "io_uring",
    ]  # fmt: skip
    assert cells(text, "torch")[-2:] == ["0.25 (0.25 - 0.25)", "failed: OSError: gone"]
    assert cells(text, "deepspeed") == ["deepspeed", *"-------", ABSENT.note]


def test_a_column_of_which_no_row_knows_anything_is_left_out() -> None:
    assert cells(report.text(result(BEST)), "  ")[1:] == ["GB/s (min - max)", "CPU s/GiB", "/ fio best"]


def test_peak_memory_of_nothing_is_known() -> None:
    text = report.text(result(row("a", Sample(1.0, GB, peak_bytes=0))))
    assert "peak memory" in text
    assert cells(text, "a")[2] == "0 B"


def test_there_is_no_ratio_without_a_reference() -> None:
    assert "fio best" not in report.text(result(MINE, words=("--read", "--no_reference"), reference=""))


def test_the_text_says_where_it_was_measured() -> None:
    assert report.text(result(MINE)).splitlines()[:2] == ["cpu 2 x Fast; kernel 6.1", f"{ANYWHERE}: file system ext4"]


def test_latencies_of_blocks_are_told() -> None:
    found = result(MINE)
    found.blocks = {"aio_handle": BlockTimes.of([1e-4] * 99 + [2e-3], [4e-6] * 100), "fio": BlockTimes.of([1e-4])}
    text = report.text(found)
    assert "latency of single blocks, read at random places, one after the other" in text
    assert cells(text, "us") == ["us", "p50", "p90", "p99", "p99.9", "submit p50", "submit p99"]
    times = [line for line in text.splitlines() if line.endswith("blocks")]
    assert re.split(r"  +", times[0]) == ["aio_handle", "100", "100", "100", "2000", "4.0", "4.0", "100 blocks"]
    assert re.split(r"  +", times[1]) == ["fio", "100", "100", "100", "100", "-", "-", "1 blocks"]


def test_scaling_is_told() -> None:
    found = result(MINE)
    found.scaling = [Scaling("a", 2, Spread(2.0, 1.0, 3.0), Spread(4.0, 4.0, 4.0), Spread(0.5, 0.25, 0.75)),
                     Scaling("b", 2, None, None, None)]  # fmt: skip
    text = report.text(found)
    assert cells(text, "a  ") == ["a", "2", "2.000 (1.000 - 3.000)", "0.50 (0.25 - 0.75)"]
    assert cells(text, "b  ") == ["b", "2", "-", "-"]


def test_why_there_is_no_energy_and_that_it_was_interrupted_are_said() -> None:
    found = result(MINE)
    assert "energy" not in report.text(found)
    found.energy, found.interrupted = "not available: no counters", True
    assert "energy: not available: no counters" in report.text(found)
    assert "interrupted: this is what was measured until then; the files are removed" in report.text(found)


def test_the_document_is_json_and_complete() -> None:
    found = result(BEST, MINE, FLAKY, ABSENT, words=("--read", "--io_size", "16M", "--sweep", "queue_depth=1,2"))
    found.blocks = {"aio_handle": BlockTimes.of([1.0, 3.0], [2.0])}
    found.scaling = [Scaling("a", 2, None, None, None)]
    text = json.dumps(report.as_document(found), allow_nan=False)
    document = json.loads(text)
    assert list(document) == [
        "command", "machine", "folders", "options", "tables", "passes", "ds_io", "blocks", "from_page_cache",
        "scaling", "energy", "interrupted",
    ]  # fmt: skip
    assert document["command"] == ["nvme-bench", *found.options.words]
    assert (document["machine"], document["folders"]) == (found.machine, found.places)
    assert document["options"]["size"] == 16 * MIB
    assert [each["queue_depth"] for each in document["options"]["settings"]] == [1, 2]
    assert set(vars(found.options)) - {"words"} == set(document["options"])
    assert [each["name"] for each in document["tables"][0]["rows"]] == ["fio best", "aio_handle", "torch", "deepspeed"]
    assert document["tables"][0]["rows"][1]["columns"]["J/GiB"]["median"] == pytest.approx(3 * GIB / GB)
    assert [each["row"] for each in document["passes"]] == ["fio best"] * 2 + ["aio_handle"] * 2 + ["torch"] * 2
    assert {field.name for field in fields(Sample)} | {"row"} == set(document["passes"][2])
    assert document["passes"][5] == {"row": "torch", "failed": True}
    assert list(document["ds_io"]) == ["fio best", "aio_handle", "torch"]
    assert document["blocks"]["aio_handle"] == {
        "count": 2,
        "complete": {"0.5": 1.0, "0.9": 3.0, "0.99": 3.0, "0.999": 3.0},
        "submit": {"0.5": 2.0, "0.9": 2.0, "0.99": 2.0, "0.999": 2.0},
    }
    assert document["scaling"] == [{"engine": "a", "devices": 2, "rate": None, "alone": None, "ratio": None}]
    assert (document["energy"], document["interrupted"]) == ("available", False)


def test_csv_has_a_line_for_each_pass() -> None:
    lines = list(csv.DictReader(io.StringIO(report.as_csv(result(BEST, MINE, FLAKY, ABSENT)))))
    assert [(line["engine"], line["pass"]) for line in lines] == [
        (name, number) for name in ("fio best", "aio_handle", "torch") for number in "12"
    ]
    assert lines[2] == {
        "engine": "aio_handle", "pass": "1", "seconds": "0.5", "amount": str(GB), "cpu_seconds": "0.5",
        "submit_seconds": "2e-05", "end_to_end": "1.0", "peak_bytes": str(3 * MIB), "from_page_cache": "",
        "joules": "3.0", "note": "io_uring",
    }  # fmt: skip
    failed = lines[5]
    assert (failed["seconds"], failed["joules"], failed["note"]) == ("", "", "failed: OSError: gone")


def test_wrong_rows_are_named() -> None:
    liar = row("liar")
    liar.wrong = True
    assert result(MINE, liar).wrong == ["liar"]


def test_rows_of_a_sweep_are_those_that_differ_for_their_engine() -> None:
    words = ("--engine", "aio_handle", "fio", "python", "--sweep", "block_size=64K,1M", "single_submit=0,1")
    found = contenders(result(words=words).options)
    assert [each.name for each in found] == [
        "fio best",
        *(f"aio_handle, block_size {size}, single_submit {switch}"
          for size in ("64 KiB", "1 MiB") for switch in (False, True)),
        "fio, block_size 64 KiB",
        "fio, block_size 1 MiB",
        "python",
    ]  # fmt: skip
    assert [each.settings.block_size for each in found if each.engine == "fio"] == [64 * KIB, MIB]
