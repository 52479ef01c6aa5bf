"""benchmarks/data.py: a small run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import data
from nvme_ops.bench.workload.readers import OURS


@pytest.mark.slow
def test_a_small_run(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = folder / "found.json"
    words = ["--size", "4M", "--rounds", "1", "--sizes", "4K", "128K", "--workers", "1", "--json", str(file)]
    status = data.main(["--path", str(folder), *words])
    out = capfd.readouterr().out
    assert status == 0, out
    found = json.loads(file.read_text())["folders"][str(folder)]
    assert len(found["tables"]) == 2
    for table in found["tables"]:
        measured = {row["name"] for row in table["rows"] if row["values"]}
        assert {OURS, "dataset", "plain"} <= measured
    assert set(found["ratios"]) == {"4096", "131072"}
    assert [path.name for path in folder.iterdir()] == ["found.json"]
