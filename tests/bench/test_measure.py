"""The arithmetic of the benchmarks on made-up timings, and the file that they work on."""

from __future__ import annotations

import itertools
import json
import re
import resource
import zlib
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nvme_ops.measure import files, tables
from nvme_ops.measure.engines import Task, tensor_row
from nvme_ops.measure.rows import (
    PERCENTILES,
    BlockTimes,
    Row,
    Sample,
    Spread,
    Unavailable,
    WrongData,
    interleave,
    paired_ratios,
    percentile,
    spread,
    timed,
)
from nvme_ops.text import GIB, MIB
from tests.conftest import in_child


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


@pytest.mark.parametrize(("share", "value"), [(0.0, 1), (0.2, 1), (0.21, 2), (0.5, 3), (0.9, 5), (0.999, 5), (1.0, 5)])
def test_percentiles_are_values_that_were_measured(share: float, value: float) -> None:
    assert percentile([5, 3, 1, 4, 2], share) == value  # the least that this share of all do not exceed


@given(st.lists(st.floats(0, 1e3), min_size=1), st.sampled_from(PERCENTILES))
def test_a_percentile_is_not_exceeded_by_its_share(values: list[float], share: float) -> None:
    found = percentile(values, share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values)
    assert sum(value < found for value in values) < share * len(values)


def test_times_of_blocks() -> None:
    times = BlockTimes.of([number / 1000 for number in range(1, 1001)], [2.0])
    assert times.count == 1000
    assert times.complete == {0.5: 0.5, 0.9: 0.9, 0.99: 0.99, 0.999: 0.999}
    assert times.submit == dict.fromkeys(PERCENTILES, 2.0)
    assert BlockTimes.of([1.0]).submit == {}


def touched(size: int) -> bytearray:
    return bytearray(b"x") * size


def test_peak_memory_is_beyond_what_was_held_before() -> None:
    held = touched(64 * MIB)
    nothing, more = timed(lambda: None, 1).peak_bytes, timed(lambda: touched(128 * MIB), 1).peak_bytes
    if nothing is None or more is None:
        pytest.skip("the kernel cannot forget a peak (/proc/self/clear_refs)")
    assert len(held) == 64 * MIB
    assert nothing < 16 * MIB
    assert 112 * MIB < more < 160 * MIB


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


@pytest.mark.parametrize(("count", "rounds"), [(2, 2), (6, 6), (5, 10), (3, 6), (1, 2)])
def test_each_row_has_every_place_and_follows_every_other_equally_often(count: int, rounds: int) -> None:
    calls: list[int] = []

    def row(name: int) -> Row:
        def run() -> Sample:
            calls.append(name)
            return Sample(1, 1)

        return Row(str(name), run)

    interleave([row(name) for name in range(count)], rounds, warmups=0)
    orders = [calls[start : start + count] for start in range(0, len(calls), count)]
    places = Counter((place, name) for order in orders for place, name in enumerate(order))
    pairs = Counter(pair for order in orders for pair in itertools.pairwise(order))
    assert set(places.values()) == {rounds // count}
    assert len(places) == count**2
    assert len(pairs) == count * (count - 1)
    assert set(pairs.values()) <= {rounds // count}


@pytest.mark.parametrize("warmups", [0, 1, 3])
def test_warm_up_passes_are_untimed(warmups: int) -> None:
    calls: list[str] = []

    def run() -> Sample:
        calls.append("run")
        return Sample(1, 1)

    row = Row("a", run, lambda: calls.append("before"), lambda: calls.append("check"))
    interleave([row], 1, warmups=warmups)
    assert calls == [*(["before", "run"] * warmups or ["before"]), "check", "before", "run"]
    assert len(row.samples) == 1


def test_progress_is_told_of_every_pass() -> None:
    told: list[str] = []
    interleave([Row(name, lambda: Sample(1, 1)) for name in "ab"], 2, told.append)
    assert told == [
        "first pass: a", "first pass: b", "round 1 of 2: a", "round 1 of 2: b", "round 2 of 2: b", "round 2 of 2: a",
    ]  # fmt: skip


def test_what_was_measured_stays_after_ctrl_c() -> None:
    calls = itertools.count()

    def run() -> Sample:
        if next(calls) == 2:
            raise KeyboardInterrupt
        return Sample(1, 5)

    rows = [Row("stopped", run), Row("later", lambda: Sample(1, 1))]
    with pytest.raises(KeyboardInterrupt):
        interleave(rows, 3)
    assert [[sample and sample.amount for sample in row.samples] for row in rows] == [[5, None], [1, 1]]


def test_a_row_that_cannot_go_on_says_why_and_the_others_do() -> None:
    def missing() -> None:
        raise Unavailable("not installed: pip install it")

    def failing() -> Sample:
        raise OSError(5, "Input/output error")

    def wrong() -> None:
        raise WrongData("tensor and file differ")

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


@pytest.mark.parametrize("end", [KeyboardInterrupt, SystemExit])
def test_a_failure_while_the_program_ends_does_not_keep_it_going(end: type[BaseException]) -> None:
    """As torch's for each worker that the same signal has ended."""

    def run() -> Sample:
        try:
            raise end
        finally:
            raise RuntimeError("a worker is gone")

    row = Row("row", run)
    with pytest.raises(end):
        interleave([row], 1)
    assert row.note == ""


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


@pytest.mark.parametrize("write", [True, False], ids=["write", "read"])
def test_a_row_that_does_nothing_is_found_out(tmp_path: Path, write: bool) -> None:
    file = tmp_path / "data"
    files.make_file(str(file), 4 * MIB)
    work = Task(str(file), 4 * MIB, write)
    move = work.handle.sync_pwrite if write else work.handle.sync_pread
    honest = tensor_row(work, "honest", lambda: work.pageable, lambda t: move(t, work.path))
    lazy = tensor_row(work, "lazy", lambda: work.pageable, lambda _: None)
    interleave([honest, lazy], 1)
    assert [row.wrong for row in (honest, lazy)] == [False, True]


def test_files_are_made_of_the_size_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "data"
    files.make_file(str(file), 20 * MIB)
    assert file.stat().st_size == 20 * MIB
    content = torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8)
    assert files.checksum(str(file)) == files.tensor_checksum(content)


def test_the_checksum_of_a_tensor_elsewhere_is_that_of_its_copy() -> None:
    """Which must live until it is counted: memory of this size is unmapped with its tensor."""

    class Elsewhere:
        def cpu(self) -> torch.Tensor:
            return torch.ones(64 * MIB, dtype=torch.uint8)

    assert files.tensor_checksum(Elsewhere()) == zlib.crc32(b"\1" * (64 * MIB))  # type: ignore[arg-type]


def test_a_file_that_cannot_be_made_whole_is_an_error(tmp_path: Path) -> None:
    def body() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, resource.RLIM_INFINITY))
        with pytest.raises(OSError, match="File too large"):
            files.make_file(str(tmp_path / "data"), 3 * MIB)

    in_child(body)
