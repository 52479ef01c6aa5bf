"""The benchmarks' arithmetic, their arguments, and one small run of each group for real."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks import contenders, deepspeed_rows, files, fio, memory_use, tables
from benchmarks.measure import (
    GIB,
    MIB,
    Row,
    Sample,
    Spread,
    Unavailable,
    interleave,
    paired_ratios,
    parse_size,
    size_words,
    spread,
    timed,
)

ROOT = Path(__file__).parent.parent


def seconds(*values: float) -> list[Sample | None]:
    return [Sample(value, 1000) for value in values]


def test_spread_is_median_least_and_most() -> None:
    assert spread([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)
    assert spread([4.0, 1.0]) == Spread(2.5, 1.0, 4.0)
    assert spread([]) is None


def test_ratios_pair_the_rounds() -> None:
    # the median of ratios, not the ratio of medians: both slow down together in the second round
    assert paired_ratios(seconds(1, 10, 1), seconds(2, 20, 3)) == [2, 2, 3]


def test_ratios_leave_out_rounds_that_lack_either() -> None:
    assert paired_ratios([Sample(1, 4), None, Sample(1, 9)], [Sample(1, 2), Sample(1, 1), None]) == [2]


def test_cpu_is_counted_per_gib() -> None:
    assert Sample(1, GIB // 2, 0.25).cpu_per_gib == 0.5
    assert Sample(1, GIB).cpu_per_gib is None


def test_timed_counts_the_cpu_of_this_process() -> None:
    sample = timed(lambda: sum(range(2_000_000)), 1)
    assert sample.cpu_seconds is not None
    assert sample.cpu_seconds > 0


@pytest.mark.parametrize(
    ("text", "size"), [("4096", 4096), ("64M", 64 * MIB), ("1g", GIB), ("1.5GiB", 3 * GIB // 2), ("2 KB", 2048)]
)
def test_sizes_are_understood(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "-1", "M", "1X", "1 G 2"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)


def test_sizes_read_well() -> None:
    assert [size_words(size) for size in (0, 512, 3 * MIB // 2, 64 * GIB)] == ["0 B", "512 B", "1.5 MiB", "64 GiB"]


def test_rounds_are_interleaved_after_an_untimed_pass() -> None:
    calls: list[str] = []

    def row(name: str) -> Row:
        def run() -> Sample:
            calls.append(name)
            return Sample(1, 1)

        return Row(name, run, check=lambda: calls.append(f"check {name}"))

    rows = [row("a"), row("b")]
    interleave(rows, 3)
    assert calls == ["a", "check a", "b", "check b", "a", "b", "b", "a", "a", "b"]
    assert [len(each.samples) for each in rows] == [3, 3]


def test_a_row_that_cannot_go_on_says_why_and_the_others_do() -> None:
    def missing() -> None:
        raise Unavailable("not installed: pip install it")

    def failing() -> Sample:
        raise OSError(5, "Input/output error")

    def wrong() -> None:
        raise AssertionError("tensor and file differ")

    good = Row("good", lambda: Sample(1, 1))
    rows = [Row("missing", good.run, missing), Row("failing", failing), Row("wrong", good.run, check=wrong), good]
    interleave(rows, 2)
    assert [row.note for row in rows] == [
        "not installed: pip install it",
        "failed: OSError: [Errno 5] Input/output error",
        "WRONG DATA: tensor and file differ",
        "",
    ]
    assert [row.wrong for row in rows] == [False, False, True, False]
    assert [len(row.samples) for row in rows] == [0, 0, 0, 2]


def test_a_round_that_fails_later_keeps_its_place() -> None:
    calls = itertools.count()

    def run() -> Sample:
        number = next(calls)
        if number == 2:
            raise OSError("gone")
        return Sample(1, number)

    row = Row("flaky", run)
    interleave([row], 3)
    assert [sample and sample.amount for sample in row.samples] == [1, None, 3]
    assert "gone" in row.note


def example_table(unit: str) -> tables.Table:
    fast = Row(
        "nvme_ops", lambda: Sample(1, 1), peer="peer", samples=[Sample(0.5, 10**9, 0.1), Sample(0.25, 10**9, 0.1)]
    )
    slow = Row("peer", lambda: Sample(1, 1), note="a note", samples=[Sample(1.0, 10**9, 0.3), Sample(1.0, 10**9, 0.3)])
    return tables.Table("read", "a title", unit, [fast, slow, Row("empty", lambda: Sample(1, 1))], "peer")


def test_throughput_table() -> None:
    lines = tables.as_text(example_table("GB/s")).splitlines()
    assert lines[0] == "a title"
    assert re.split(r"  +", lines[2]) == [
        "nvme_ops", "3.000 (2.000 - 4.000)", "0.107", "3.00 (2.00 - 4.00)", "3.00 (2.00 - 4.00)",
    ]  # fmt: skip
    assert re.split(r"  +", lines[3]) == ["peer", "1.000 (1.000 - 1.000)", "0.322", "-", "-", "a note"]
    assert re.split(r"  +", lines[4]) == ["empty", "-", "-", "-", "-"]


def test_table_of_times_has_ratios_of_times() -> None:
    found = tables.as_json(example_table("s"))
    assert found["rows"][0]["spread"] == {"median": 0.375, "min": 0.25, "max": 0.5}
    assert found["rows"][0]["against_reference"] == {"median": 0.375, "min": 0.25, "max": 0.5}
    assert found["rows"][2]["spread"] is None
    json.dumps(found)


def test_fio_output_is_read() -> None:
    side = {"total_ios": 256, "runtime": 500, "io_bytes": GIB}
    other = {"total_ios": 0, "runtime": 0, "io_bytes": 0}
    job = {"error": 0, "read": side, "write": other, "usr_cpu": 2.0, "sys_cpu": 8.0, "job_runtime": 500}
    text = "fio: a note\n" + json.dumps({"jobs": [job]})
    sample = fio.read_output(0, text, "")
    assert sample.rate == 2 * GIB
    assert sample.cpu_per_gib == pytest.approx(0.05)
    assert fio.read_output(0, text, "", operations=True).rate == 512


@pytest.mark.parametrize(
    ("status", "output", "errors", "words"),
    [
        (1, "", "fio: engine io_uring not loadable\n", "engine io_uring not loadable"),
        (0, 'fio: pid=1, err=12\n{"jobs": [{"error": 12}]}', "", "err=12"),
        (3, "", "", "exit status 3"),
        (0, "{}", "", "exit status 0"),
    ],
)
def test_fio_failures_keep_its_words(status: int, output: str, errors: str, words: str) -> None:
    with pytest.raises(RuntimeError, match=words):
        fio.read_output(status, output, errors)


def test_fio_that_is_not_installed_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    file = tmp_path / "data"
    files.make_file(str(file), 4 * MIB)
    rows = contenders.fio_rows(contenders.Work(str(file), 4 * MIB, write=False))
    interleave(rows, 1)
    assert [row.note for row in rows] == ["fio is not installed: apt-get install fio"] * 2


def test_deepspeed_that_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    for name in [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]:
        monkeypatch.delitem(sys.modules, name)
    stdlib = [entry for entry in sys.path if "site-packages" not in entry and "dist-packages" not in entry]
    monkeypatch.setattr(sys, "path", stdlib)
    monkeypatch.setattr(deepspeed_rows, "module", deepspeed_rows.module.__wrapped__)
    rows = deepspeed_rows.rows(contenders.Work("none", 4 * MIB, write=False))
    interleave(rows, 1)
    assert [row.note for row in rows] == ["DeepSpeed is not installed: pip install deepspeed"] * 2


def test_a_write_that_does_nothing_is_found_out(tmp_path: Path) -> None:
    file = tmp_path / "data"
    files.make_file(str(file), 4 * MIB)
    work = contenders.Work(str(file), 4 * MIB, write=True)
    honest = contenders.tensor_row(
        work, "honest", lambda: work.pageable, lambda t: work.handle.sync_pwrite(t, work.path)
    )
    lazy = contenders.tensor_row(work, "lazy", lambda: work.pageable, lambda _: None)
    interleave([honest, lazy], 1)
    assert [row.wrong for row in (honest, lazy)] == [False, True]


def test_a_read_that_does_nothing_is_found_out(tmp_path: Path) -> None:
    file = tmp_path / "data"
    files.make_file(str(file), 4 * MIB)
    work = contenders.Work(str(file), 4 * MIB, write=False)
    honest = contenders.tensor_row(
        work, "honest", lambda: work.pageable, lambda t: work.handle.sync_pread(t, work.path)
    )
    lazy = contenders.tensor_row(work, "lazy", lambda: work.pageable, lambda _: None)
    interleave([honest, lazy], 1)
    assert [row.wrong for row in (honest, lazy)] == [False, True]


def test_files_are_made_of_the_size_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "data"
    files.make_file(str(file), 20 * MIB)
    assert file.stat().st_size == 20 * MIB
    content = torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8)
    assert files.checksum(str(file)) == files.tensor_checksum(content)


def test_scratch_is_removed_and_lack_of_space_is_said(tmp_path: Path) -> None:
    with files.scratch(str(tmp_path), 1) as place:
        Path(place, "data").write_bytes(b"x")
    with pytest.raises(files.NotUsable, match="of free space are needed"), files.scratch(str(tmp_path), 1 << 60):
        pass
    assert list(tmp_path.iterdir()) == []


def test_staging_memory_is_measured(tmp_path: Path) -> None:
    file = tmp_path / "data"
    files.make_file(str(file), 4 * MIB)
    found = memory_use.staging(str(file), 4 * MIB)
    assert all(value is None or value >= 0 for name, value in found.items() if name != "peak_resident_growth")


def raw_io(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "raw_io.py"), *arguments],
        env={**os.environ, "PYTHONWARNINGS": "ignore::RuntimeWarning"},  # memory that may not be locked
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--size", "big"], "'big' is not a size"),
        (["--size", "5M"], "not a multiple of 4 MiB"),
        (["--rounds", "0"], "not a number of at least 1"),
        (["--only", "everything"], "invalid choice"),
        (["--path", "none/such"], "no such folder"),
        (["--json", "none/such/file"], "its folder does not exist"),
    ],
)
def test_wrong_arguments_are_refused(arguments: list[str], words: str) -> None:
    done = raw_io(*arguments)
    assert done.returncode == 2
    assert words in done.stderr


def test_files_are_removed_when_it_is_stopped(tmp_path: Path) -> None:
    arguments = ["--path", str(tmp_path), "--size", "16M", "--rounds", "100000", "--only", "latency"]
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "benchmarks" / "raw_io.py"), *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not list(tmp_path.glob("*/data")):
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate()
    assert (process.returncode, errors.strip()) == (130, "interrupted; the files are removed")
    assert list(tmp_path.iterdir()) == []


def test_a_small_run(tmp_path: Path) -> None:
    folder, result = tmp_path / "work", tmp_path / "result.json"
    folder.mkdir()
    groups = ["read", "write", "cached", "random", "latency", "submit", "memory"]
    done = raw_io(
        "--path", str(folder), "--size", "16M", "--rounds", "1", "--no-deepspeed", "--json", str(result),
        "--only", *groups,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert os.listdir(folder) == []
    found = json.loads(result.read_text())["folders"][str(folder)]
    assert [table["group"] for table in found["tables"]] == groups[:-1]
    assert found["memory"]["busy"] >= 0
    for table in found["tables"]:
        for row in table["rows"]:
            assert not row["wrong"]
            if not row["name"].startswith("fio"):  # may not be installed
                assert len(row["values"]) == 1, (row["name"], row["note"])
                assert row["values"][0] > 0


@pytest.mark.slow
def test_a_small_start_up_run() -> None:
    done = raw_io("--only", "start", "--rounds", "1")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"nvme_ops, empty cache, whole process +[\d.]+", done.stdout)
    assert re.search(r"nvme_ops, warm, beyond importing torch +[\d.]+", done.stdout)
