"""Rows in rounds, their statistics and tables, on made-up timings; and the file that they work on."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from pathlib import Path

import pytest

from nvme_ops.base.settings import Settings
from nvme_ops.base.text import MIB
from nvme_ops.measure import files, rows
from nvme_ops.measure.engines import Contender, Task, make_row
from nvme_ops.measure.remote import combined
from nvme_ops.measure.rows import Row, Sample, Unavailable, WrongData, cached_share_of, interleave


def test_medians_ratios_and_sums_are_those_of_the_rounds() -> None:
    assert rows.spread([3.0, 1.0, 2.0]) == {"median": 2.0, "min": 1.0, "max": 3.0}
    assert [rows.percentile([3.0, 1.0, 4.0, 2.0], share) for share in (0.0, 0.5, 0.51, 1.0)] == [1.0, 2.0, 3.0, 4.0]
    first, second = ([Sample(value, 1000) for value in values] for values in ((1, 10, 1), (2, 20, 3)))
    assert rows.paired_ratios(first, second) == [2, 2, 3], "not the ratio of medians: the second round was slow"
    assert rows.paired_ratios([Sample(1, 4), None, Sample(1, 9)], [Sample(1, 2), Sample(1, 1), None]) == [2]
    parts = [Row("", samples=[Sample(1, 4), Sample(2, 4), Sample(1, 5)]), Row("", samples=[Sample(1, 6), Sample(1, 1)])]
    assert rows.summed(parts) == [Sample(1, 10), Sample(1, 3), None]


def test_processes_take_as_long_as_the_slowest_and_move_their_sum() -> None:
    first = Sample(2.0, 100, 0.5, submit_seconds=1e-3, end_to_end=9.0, peak_bytes=10, from_page_cache=1.0)
    second = Sample(3.0, 300, 0.25, submit_seconds=2e-3, end_to_end=8.0, peak_bytes=20, from_page_cache=0.0)
    expected = Sample(3.0, 400, 0.75, submit_seconds=2e-3, end_to_end=5.0, peak_bytes=30, from_page_cache=0.25)
    assert combined([first, second], 5.0) == expected
    assert combined([first, Sample(1.0, 1)], 1.0).cpu_seconds is None


@pytest.mark.parametrize("warmups", [0, 1, 2])
def test_rounds_are_interleaved_after_untimed_passes_and_a_check(warmups: int) -> None:
    calls: list[str] = []

    def made(name: str) -> Row:
        def run() -> Sample:
            calls.append(name)
            return Sample(1, 1)

        return Row(name, run, lambda: calls.append("before"), lambda: calls.append(f"check {name}"))

    interleave([made("a"), made("b")], 3, warmups=warmups)
    first = [[*(["before", name] * warmups or ["before"]), f"check {name}"] for name in "ab"]
    order = [part for name in "abbaab" for part in ("before", name)]
    assert calls == [*first[0], *first[1], *order]


@pytest.mark.parametrize(("count", "rounds"), [(6, 6), (5, 10), (1, 2)])
def test_each_row_has_every_place_and_follows_every_other_equally_often(count: int, rounds: int) -> None:
    orders = [rows.in_turn("abcdef"[:count], number) for number in range(rounds)]
    places = Counter((place, name) for order in orders for place, name in enumerate(order))
    pairs = Counter(pair for order in orders for pair in itertools.pairwise(order))
    assert (len(places), set(places.values())) == (count**2, {rounds // count})
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


def amounts(row: Row) -> list[int | None]:
    return [None if sample is None else sample.amount for sample in row.samples]


def test_a_row_that_cannot_go_on_says_why_and_the_others_do() -> None:
    def wrong() -> None:
        raise WrongData("tensor and file differ")

    rows = [failing(Unavailable("pip install it")), failing(OSError(5, "Input/output error")), failing(OSError(), 2)]
    rows += [Row("wrong", lambda: Sample(1, 1), check=wrong), Row("good", lambda: Sample(1, 1))]
    interleave(rows, 3)
    notes = ["pip install it", "failed: OSError: [Errno 5] Input/output error", "failed: OSError: ",
             "WRONG DATA: tensor and file differ", ""]  # fmt: skip
    assert [row.note for row in rows] == notes
    assert [row.wrong for row in rows] == [False, False, False, True, False]
    assert [amounts(row) for row in rows] == [[], [], [1, None, 3], [], [1, 1, 1]]


@pytest.mark.parametrize("end", [KeyboardInterrupt, SystemExit])
def test_the_end_of_the_program_ends_the_rounds_and_keeps_results(end: type[BaseException]) -> None:
    rows = [failing(end(), 2), Row("later", lambda: Sample(1, 1))]
    with pytest.raises(end):
        interleave(rows, 3)
    assert [amounts(row) for row in rows] == [[1, None], [1, 1]]

    def run() -> Sample:  # as torch's error for each worker that the same signal has ended
        try:
            raise end
        finally:
            raise RuntimeError("a worker is gone")

    with pytest.raises(end):
        interleave([Row("row", run)], 1)


def warm(path: str, size: int) -> None:
    """Reads the first bytes of a cold file, without those that the kernel would read ahead."""
    files.make_cold(path)
    with open(path, "rb", 0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        file.read(size)


@pytest.mark.parametrize("old", [False, True], ids=["cachestat", "mincore"])
def test_reads_say_how_much_came_from_the_page_cache(folder: Path, monkeypatch: pytest.MonkeyPatch, old: bool) -> None:
    file = str(folder / "data")
    files.make_file(file, 4 * MIB)
    if old:
        monkeypatch.setattr(files, "native", lambda: type("Old", (), {"cached_pages": lambda *_: None}))
    warm(file, MIB)
    if files.cached_bytes(file) is None:
        pytest.skip("the kernel does not say what lies in the page cache")
    assert [files.cached_share(file, size) for size in (0, 2 * MIB, MIB - 5)] == [0.25, 0.5, 1]
    for mode, share in (("direct", None), ("auto", 0.25)):
        monkeypatch.setenv("NVME_OPS_CACHE", mode)
        task = Task(file, 4 * MIB, False)
        rows = [make_row(Contender(name, Settings(), name), task) for name in ("aio_handle", "python")]
        for row in rows:
            row.before = lambda: warm(file, MIB)
        interleave(rows, 2)
        assert [cached_share_of(row.samples) for row in rows] == [share, 0.25]
