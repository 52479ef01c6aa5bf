"""benchmarks/data.py: small runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import data, data_rows
from nvme_ops.bench.workload.readers import OURS
from nvme_ops.data import SampleStore


def run(folder: Path, capfd: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """Returns what the JSON file holds of the folder."""
    file = folder / "found.json"
    status = data.main(["--path", str(folder), "--size", "4M", "--json", str(file), *words])
    assert status == 0, capfd.readouterr()
    assert [path.name for path in folder.iterdir()] == ["found.json"]
    found: dict[str, Any] = json.loads(file.read_text())["folders"][str(folder)]
    return found


@pytest.mark.slow
def test_reading_in_random_order(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = run(folder, capfd, "--only", "random", "--rounds", "1", "--sizes", "4K", "128K", "--workers", "1")
    assert len(found["tables"]) == 2
    for table in found["tables"]:
        measured = {row["name"] for row in table["rows"] if row["values"]}
        assert {OURS, "dataset", "plain"} <= measured
    assert set(found["ratios"]) == {"4096", "131072"}


@pytest.mark.slow
def test_an_index_and_a_log(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = run(folder, capfd, "--only", "index", "log", "--rounds", "2", "--records", "5000", "--log-records", "1000")
    index, log = found["tables"]
    assert [len(row["values"]) for row in index["rows"]] == [2, 2]
    assert all(row["values"] for row in log["rows"])
    assert found["index"]["records"] == 5000
    assert set(found["log"]) == {row["name"] for row in log["rows"]}


def test_the_large_store_is_a_store(folder: Path) -> None:
    data_rows.make_store(folder, 1000)
    store = SampleStore(folder)
    assert len(store) == 1000
    sizes = [each.numel() for each in store.read(range(1000))]
    assert min(sizes) >= 1
    assert max(sizes) < 2 * data_rows.RECORD_BYTES
