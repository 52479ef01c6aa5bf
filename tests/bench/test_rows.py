"""Rows in rounds, their statistics and tables, on made-up timings; and the file that they work on."""

from __future__ import annotations

import itertools
import json
import os
from collections import Counter
from pathlib import Path

import pytest

from nvme_ops.base.energy import Meter
from nvme_ops.base.settings import Settings
from nvme_ops.base.text import GIB, MIB
from nvme_ops.measure import files, rows, tables
from nvme_ops.measure.engines import Contender, Task, make_row
from nvme_ops.measure.remote import combined
from nvme_ops.measure.rows import Row, Sample, Spread, Unavailable, WrongData, cached_share_of, interleave, timed

GB = 10**9


def row(name: str, *samples: Sample | None, **more: str) -> Row:
    return Row(name, lambda: Sample(1, 1), samples=list(samples), **more)  # type: ignore[arg-type]


def test_medians_ratios_and_sums_are_those_of_the_rounds() -> None:
    assert rows.spread([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)
    assert rows.spread([]) is None
    assert [rows.percentile([3.0, 1.0, 4.0, 2.0], share) for share in (0.0, 0.5, 0.51, 1.0)] == [1.0, 2.0, 3.0, 4.0]
    first, second = ([Sample(value, 1000) for value in values] for values in ((1, 10, 1), (2, 20, 3)))
    assert rows.paired_ratios(first, second) == [2, 2, 3], "not the ratio of medians: the second round was slow"
    assert rows.paired_ratios([Sample(1, 4), None, Sample(1, 9)], [Sample(1, 2), Sample(1, 1), None]) == [2]
    assert rows.summed([row("", Sample(1, 4), Sample(2, 4), Sample(1, 5)), row("", Sample(1, 6), Sample(1, 1))]) == [
        Sample(1, 10), Sample(1, 3), None,
    ]  # fmt: skip
    assert Sample(1, GIB // 2, 0.25).cpu_per_gib == 0.5
    assert Sample(1, GIB).cpu_per_gib is None


def test_processes_take_as_long_as_the_slowest_and_move_their_sum() -> None:
    first = Sample(2.0, 100, 0.5, submit_seconds=1e-3, end_to_end=9.0, peak_bytes=10, from_page_cache=1.0)
    second = Sample(3.0, 300, 0.25, submit_seconds=2e-3, end_to_end=8.0, peak_bytes=20, from_page_cache=0.0)
    expected = Sample(3.0, 400, 0.75, submit_seconds=2e-3, end_to_end=5.0, peak_bytes=30, from_page_cache=0.25)
    assert combined([first, second], 5.0) == expected
    unknown = combined([first, Sample(1.0, 1)], 1.0)
    assert (unknown.cpu_seconds, unknown.peak_bytes, unknown.submit_seconds) == (None, None, 1e-3)
    assert cached_share_of([Sample(1, 3), None]) is None


def test_time_counts_the_cpu_and_the_memory_beyond_what_was_held_before() -> None:
    assert (timed(lambda: sum(range(2_000_000)), 1).cpu_seconds or 0) > 0
    held = bytearray(b"x") * (64 * MIB)
    nothing, more = timed(lambda: None, 1).peak_bytes, timed(lambda: bytearray(b"x") * (128 * MIB), 1).peak_bytes
    if nothing is None or more is None:
        pytest.skip("the kernel cannot forget a peak (/proc/self/clear_refs)")
    del held
    assert nothing < 16 * MIB
    assert 112 * MIB < more < 160 * MIB


def test_a_metered_pass_has_its_energy_and_the_time_that_its_caller_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    joules, each = itertools.count(0.0, 5.0), Row("", lambda: Sample(1e-9, 1))
    monkeypatch.setattr(Meter, "read", lambda _: {"package": next(joules)})
    rows.metered(each, Meter())
    sample = each.run()
    assert sample.joules == {"package": 5.0}
    assert (sample.end_to_end or 0) > sample.seconds


def calls_of(names: str, rounds: int, warmups: int = 1) -> list[str]:
    calls: list[str] = []

    def made(name: str) -> Row:
        def run() -> Sample:
            calls.append(name)
            return Sample(1, 1)

        return Row(name, run, lambda: calls.append(f"before {name}"), lambda: calls.append(f"check {name}"))

    rows = [made(name) for name in names]
    interleave(rows, rounds, warmups=warmups)
    assert [len(each.samples) for each in rows] == [rounds] * len(rows)
    return calls


def test_rounds_are_interleaved_after_untimed_passes_and_a_check() -> None:
    assert [each for each in calls_of("ab", 3) if "before" not in each] == [
        "a", "check a", "b", "check b", "a", "b", "b", "a", "a", "b"
    ]  # fmt: skip
    for warmups in (0, 2):
        first = ["before a", "a"] * warmups or ["before a"]
        assert calls_of("a", 1, warmups) == [*first, "check a", "before a", "a"]


@pytest.mark.parametrize(("count", "rounds"), [(6, 6), (5, 10), (1, 2)])
def test_each_row_has_every_place_and_follows_every_other_equally_often(count: int, rounds: int) -> None:
    orders = [rows.in_turn("abcdef"[:count], number) for number in range(rounds)]
    places = Counter((place, name) for order in orders for place, name in enumerate(order))
    pairs = Counter(pair for order in orders for pair in itertools.pairwise(order))
    assert len(places) == count**2
    assert set(places.values()) == {rounds // count}
    assert len(pairs) == count * (count - 1)
    assert set(pairs.values()) <= {rounds // count}


def failing(error: BaseException, number: int = 0) -> Row:
    """A row whose pass of this number raises; those before it move 1, 2, 3 bytes."""
    count = itertools.count()

    def run() -> Sample:
        if (now := next(count)) == number:
            raise error
        return Sample(1, now)

    return Row(str(error), run)


def amounts(each: Row) -> list[int | None]:
    return [None if sample is None else sample.amount for sample in each.samples]


def test_a_row_that_cannot_go_on_says_why_and_the_others_do() -> None:
    def wrong() -> None:
        raise WrongData("tensor and file differ")

    rows = [failing(Unavailable("pip install it")), failing(OSError(5, "Input/output error")), failing(OSError(), 2)]
    rows += [Row("wrong", lambda: Sample(1, 1), check=wrong), Row("good", lambda: Sample(1, 1))]
    told: list[str] = []
    interleave(rows, 3, told.append)
    notes = ["pip install it", "failed: OSError: [Errno 5] Input/output error", "failed: OSError: ",
             "WRONG DATA: tensor and file differ", ""]  # fmt: skip
    assert [each.note for each in rows] == notes
    assert [each.wrong for each in rows] == [False, False, False, True, False]
    assert [amounts(each) for each in rows] == [[], [], [1, None, 3], [], [1, 1, 1]]
    assert len(told) == len(rows) + 2 * 3, "of each pass"


@pytest.mark.parametrize("end", [KeyboardInterrupt, SystemExit])
def test_the_end_of_the_program_ends_the_rounds_and_what_was_measured_stays(end: type[BaseException]) -> None:
    rows = [failing(end(), 2), Row("later", lambda: Sample(1, 1))]
    with pytest.raises(end):
        interleave(rows, 3)
    assert [amounts(each) for each in rows] == [[1, None], [1, 1]]

    def run() -> Sample:  # as torch's error for each worker that the same signal has ended
        try:
            raise end
        finally:
            raise RuntimeError("a worker is gone")

    with pytest.raises(end):
        interleave([Row("row", run)], 1)


def example_table(unit: str) -> tables.Table:
    peer = row("peer", Sample(1.0, GB), Sample(1.0, GB), note="a note")
    mine = row("nvme_ops", Sample(0.5, GB), Sample(0.25, GB), peer="peer")
    return tables.Table("read", "a title", unit, [mine, peer, row("empty")], "peer")


def test_the_document_of_a_table_of_times_has_ratios_of_times() -> None:
    found = json.loads(json.dumps(tables.as_json(example_table("s"))))
    ours, _, empty = found["rows"]
    assert ours["spread"] == ours["against_reference"] == {"median": 0.375, "min": 0.25, "max": 0.5}
    assert (ours["values"], ours["columns"], empty["spread"]) == ([0.5, 0.25], {}, None)


@pytest.fixture
def file(folder: Path) -> str:
    """Out of the page cache."""
    path = str(folder / "data")
    files.make_file(path, 4 * MIB)
    files.make_cold(path)
    if files.cached_bytes(path) is None:
        pytest.skip("the kernel does not say what lies in the page cache")
    return path


def warm(path: str, size: int) -> None:
    """The first bytes, without those that the kernel would read ahead."""
    files.make_cold(path)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        os.pread(descriptor, size, 0)
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("old", [False, True], ids=["cachestat", "mincore"])
def test_the_share_of_a_file_or_of_its_begin_is_known(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: bool
) -> None:
    if old:
        monkeypatch.setattr(files, "native", lambda: type("Old", (), {"cached_pages": lambda *_: None}))
    assert files.cached_share(file) == 0
    warm(file, MIB)
    assert [files.cached_share(file, size) for size in (0, 2 * MIB, MIB - 5)] == [0.25, 0.5, 1]
    files.make_warm(file)
    assert (files.cached_share(file) or 0) > 0.9  # a busy machine may have dropped pages since
    (tmp_path / "empty").touch()
    assert files.cached_share(str(tmp_path / "empty")) is None


@pytest.mark.parametrize(("mode", "share"), [("direct", None), ("auto", 0.25)])
def test_reads_say_how_much_came_from_the_page_cache(
    file: str, monkeypatch: pytest.MonkeyPatch, mode: str, share: float | None
) -> None:
    monkeypatch.setenv("NVME_OPS_CACHE", mode)
    rows = [
        make_row(Contender(name, Settings(), name), Task(file, 4 * MIB, False)) for name in ("aio_handle", "python")
    ]
    for each in rows:
        each.before = lambda: warm(file, MIB)
    interleave(rows, 2)
    assert [cached_share_of(each.samples) for each in rows] == [share, 0.25]
    assert "  25 %" in tables.as_text(tables.Table("read", "read", "GB/s", rows))
