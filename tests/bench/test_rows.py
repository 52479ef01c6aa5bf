"""Rows in rounds, their statistics and tables, on made-up timings; and the file that they work on."""

from __future__ import annotations

import itertools
import os
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

import nvme_ops
from nvme_ops import gds_handle
from nvme_ops.base.settings import Settings
from nvme_ops.base.text import KIB, MIB
from nvme_ops.measure import bench, engines, files, rows
from nvme_ops.measure.engines import ENGINES, Contender, Task, make_row
from nvme_ops.measure.remote import Remote, combined, joint_row
from nvme_ops.measure.rows import Row, Sample, Unavailable, WrongData, cached_share_of, interleave
from nvme_ops.measure.run import run
from tests.conftest import watched
from tests.doubles import FakeCuFile, PrivateDevice


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


# The engines


def row_of(engine: str, task: Task, settings: Settings | None = None) -> Row:
    return make_row(Contender(engine, settings or Settings(256 * KIB, 8), engine), task)


@pytest.fixture
def make_task(folder: Path) -> Callable[..., Task]:
    """A file of random bytes, and what shall be done with it."""

    def make(**more: bool) -> Task:
        path = str(folder / "data")
        files.make_file(path, MIB)
        return Task(path, MIB, False, **more)  # type: ignore[arg-type]

    return make


@pytest.mark.parametrize("flags", [["--pageable"], ["--read", "--cached"]], ids=["write", "read"])
def test_a_small_run_of_all_engines(folder: Path, flags: list[str]) -> None:
    """Each pass's bytes are compared; see ``test_wrong_bytes_end_with_status_1`` for a row that moves none."""
    words = ["--folder", str(folder), "--loops", "1", "--io_size", "4M", *flags, "--engine"]
    result = run(bench.parse([*words, *ENGINES]))
    assert list(folder.iterdir()) == []
    for row in result.table.rows:
        if ENGINES[row.name].gpu_only:
            assert (row.note, row.samples) == ("moves GPU memory only: --device cuda", [])
        elif "is not installed" not in row.note:
            assert [sample and sample.amount for sample in row.samples] == [4 * MIB], (row.name, row.note)
        assert not row.wrong


def test_a_handle_is_made_and_asked_as_the_flags_say(
    make_task: Callable[..., Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(64 * KIB, 3, single_submit=True, overlap_events=True, intra_op_parallelism=2)
    asked = watched(monkeypatch, nvme_ops.aio_handle, "pread", lambda _handle, _tensor, _path, *flags: flags)
    made = watched(monkeypatch, nvme_ops, "aio_handle", lambda **given: given)
    for validate in (False, True):
        row_of("aio_handle", make_task(validate=validate), settings).run()
    assert [options for options in made if options] == [settings.as_json()] * 2  # without the task's own handles
    assert asked == [(False, True), (True, True)]
    refused = row_of("aio_handle", make_task(), Settings(intra_op_parallelism=100_000))
    interleave([refused], 1)
    assert "intra_op_parallelism must be at most 1024" in refused.note


def test_a_pass_starts_with_the_file_in_the_page_cache_or_out_of_it(make_task: Callable[..., Task]) -> None:
    task = make_task()
    if files.cached_share(task.path) is None:
        pytest.skip("this kernel does not say what is in the page cache")
    for name in ("aio_handle", "python"):
        row = row_of(name, task)
        for task.cached in (True, False):
            row.before()
            assert files.cached_share(task.path) == int(task.cached), name


# Rows that work in processes of their own


def rows_elsewhere(word: str) -> list[Row]:
    def failing() -> Sample:
        raise KeyError("what a library raises")

    def missing() -> Sample:
        raise Unavailable("not here: install it")

    def exiting() -> Sample:
        print("cuFileDriverOpen failed", flush=True)
        os._exit(3)

    def hanging() -> Sample:
        time.sleep(600)
        raise AssertionError

    def wrong() -> None:
        raise WrongData("tensor and file differ")

    print("words for nobody")
    good = Row("", lambda: Sample(1, 7, 0.5), note=f"in {os.getpid()}, {word}")
    return [good, Row("", good.run, check=wrong), *(Row("", run) for run in (missing, failing, exiting, hanging))]


def test_rows_work_in_another_process_and_what_goes_wrong_is_their_note(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    with ExitStack() as stack:
        remote, slow = (stack.enter_context(Remote(rows_elsewhere, "told", limit=limit)) for limit in (300, 60))
        interleave([joint_row("", [slow], 0)], 1)
        slow._limit = 0.5
        good, *bad = [*(joint_row("", [remote], number) for number in range(5)), joint_row("", [slow], 5)]
        interleave([good], 2)
        assert [sample and (sample.amount, sample.cpu_seconds) for sample in good.samples] == [(7, 0.5)] * 2
        assert good.note.endswith(", told")
        assert good.note != f"in {os.getpid()}, told"
        interleave(bad, 1)
    assert [row.note for row in bad] == [
        "WRONG DATA: tensor and file differ", "not here: install it",
        "failed: RuntimeError: KeyError: 'what a library raises'",
        "its process ended with status 3 (cuFileDriverOpen failed)",
        "no answer for 0.5 s: its process was stopped (words for nobody)",
    ]  # fmt: skip
    assert [row.wrong for row in bad] == [True, False, False, False, False]
    assert capfd.readouterr().out == ""


def test_a_process_that_is_gone_leaves_no_answer_for_the_next_question() -> None:
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
    second.gone = True
    with pytest.raises(Unavailable, match="gone"):
        joint_row("both", [first, second], 0).run()
    assert joint_row("alone", [first], 0).run().amount == 2


@pytest.mark.parametrize("direct", [True, False])
def test_a_row_says_which_way_gds_handle_took(
    cufile: FakeCuFile, the_device: PrivateDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    files.make_file(str(tmp_path / "data"), MIB)
    task = Task(str(tmp_path / "data"), MIB, False)
    cufile.offer(nvidia_fs=2 if direct else 0)
    tensor = the_device.tensor(torch.zeros(task.size, dtype=torch.uint8))
    for mode, way in (("auto", "gds" if direct else "bounce"), ("off", "bounce")):
        monkeypatch.setenv("NVME_OPS_GDS", mode)
        handle = gds_handle()
        row = engines.noting_paths(engines.handle_row(task, "", handle), lambda handle=handle: handle)  # type: ignore[misc]
        task.buffer = tensor
        row.run()
        assert row.note == f"{way} ({handle.path_statistics()['why']})"
