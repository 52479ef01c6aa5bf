"""nvme-bench says when what it read lay in the page cache: in tables, JSON and CSV."""

from __future__ import annotations

import csv
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest

import nvme_ops.measure.run as run_module
from nvme_ops.measure import bench as options
from nvme_ops.measure import files
from nvme_ops.measure import run as report
from nvme_ops.measure.engines import Contender, Task, make_row
from nvme_ops.measure.files import cached_share
from nvme_ops.measure.remote import combined
from nvme_ops.measure.rows import Row, Sample, interleave
from nvme_ops.measure.run import BenchResult
from nvme_ops.measure.tables import FROM_PAGE_CACHE, Table, as_text
from nvme_ops.settings import Settings
from nvme_ops.text import MIB

SIZE = 4 * MIB


@pytest.fixture(autouse=True)
def _no_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NVME_OPS_CACHE", raising=False)


@pytest.fixture
def file(folder: Path) -> str:
    """Out of the page cache."""
    path = str(folder / "data")
    files.make_file(path, SIZE)
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


def run(folder: Path, *words: str) -> BenchResult:
    wanted = ["--folder", str(folder), "--io_size", "4M", "--no_reference", "--loops", "2", *words]
    return run_module.run(options.parse(wanted))


def shares(result: BenchResult) -> dict[str, float | None]:
    return {row.name: report.from_page_cache(row) for row in result.table.rows}


def test_the_share_of_a_file_or_of_its_begin_is_known(file: str) -> None:
    assert cached_share(file) == 0
    warm(file, MIB)
    assert cached_share(file) == 0.25
    assert cached_share(file, 2 * MIB) == 0.5
    assert cached_share(file, MIB - 5) == 1
    files.make_warm(file)
    assert cached_share(file) == 1


def test_an_empty_file_has_none(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert cached_share(str(tmp_path / "empty")) is None


@pytest.mark.parametrize("processes", ["1", "2"])
def test_reads_from_the_page_cache_are_told(file: str, folder: Path, processes: str) -> None:
    result = run(
        folder, "--read", "--cached", "--engine", "aio_handle", "python", "torch", "--multi_process", processes
    )
    assert shares(result) == {"aio_handle": 1, "python": 1, "torch": 1}
    text = report.text(result)
    assert " from page cache " in text
    wanted = "read from the page cache: aio_handle 100 %, python 100 %, torch 100 %. So far memory was measured"
    assert wanted in text
    document: dict[str, Any] = json.loads(json.dumps(report.as_document(result)))
    assert document["from_page_cache"] == shares(result)
    assert {each["from_page_cache"] for each in document["passes"]} == {1}
    assert document["tables"][0]["rows"][0]["columns"][FROM_PAGE_CACHE]["median"] == 1
    lines = list(csv.DictReader(io.StringIO(report.as_csv(result))))
    assert {line["from_page_cache"] for line in lines} == {"1.0"}


def test_reads_of_the_device_say_so_too(file: str, folder: Path) -> None:
    result = run(folder, "--read", "--engine", "aio_handle", "python")
    assert shares(result) == {"aio_handle": 0, "python": 0}
    assert "page cache:" not in report.text(result)
    assert FROM_PAGE_CACHE not in report.text(result)


def test_writes_have_nothing_to_say(folder: Path) -> None:
    result = run(folder, "--engine", "aio_handle", "torch")
    assert shares(result) == {"aio_handle": None, "torch": None}


def row_of(file: str, engine: str = "aio_handle") -> Row:
    return make_row(Contender(engine, Settings(), engine), Task(file, SIZE, write=False))


def test_a_part_is_told_as_such(file: str) -> None:
    row = row_of(file)
    row.before = lambda: warm(file, MIB)
    interleave([row], 3)
    assert report.from_page_cache(row) == 0.25
    assert "  25 %" in as_text(Table("read", "read", "GB/s", [row]))


@pytest.mark.parametrize(("mode", "share"), [("direct", None), ("auto", 1.0), ("buffered", 1.0), ("", 1.0)])
def test_a_handle_that_reads_past_it_is_not_said_to_read_from_it(
    file: str, monkeypatch: pytest.MonkeyPatch, mode: str, share: float | None
) -> None:
    monkeypatch.setenv("NVME_OPS_CACHE", mode)
    rows = [row_of(file), row_of(file, "python")]
    for row in rows:
        row.before = lambda: files.make_warm(file)
    interleave(rows, 1)
    assert [report.from_page_cache(row) for row in rows] == [share, 1.0]


def test_of_several_processes_it_is_the_share_of_all_bytes() -> None:
    samples = [Sample(1, 3, from_page_cache=1.0), Sample(1, 1, from_page_cache=0.0)]
    assert combined(samples, 1).from_page_cache == 0.75
    assert combined([Sample(1, 3), Sample(1, 1)], 1).from_page_cache is None
