"""benchmarks/adaptive.py: a small run, and what it says of the choice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import adaptive
from nvme_ops.bench.measure import Row, Sample
from nvme_ops.bench.tables import Table
from nvme_ops.text import MIB


@pytest.mark.slow
def test_a_small_run(folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adaptive, "_PASS", 2 * MIB)
    monkeypatch.setattr(adaptive, "LEARNING", 5)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    file = folder / "found.json"
    words = ["--size", "16M", "--rounds", "1", "--sizes", "4K", "1M", "--no-deepspeed", "--json", str(file)]
    status = adaptive.main(["--path", str(folder), *words])
    out = capfd.readouterr().out
    assert status == 0, out
    found = json.loads(file.read_text())["folders"][str(folder)]
    assert [table["group"] for table in found["tables"]] == [group for group in adaptive.GROUPS for _ in range(2)]
    for table in found["tables"]:
        assert all(row["values"] for row in table["rows"] if not row["name"].startswith("fio")), (
            table
        )  # fio may be missing
    assert len(found["lost"]) == 8
    assert {each.name for each in folder.iterdir()} <= {"found.json", "cache"}


def test_what_is_lost_is_told() -> None:
    def row(name: str, *seconds: float) -> Row:
        return Row(name, lambda: Sample(1, 1), samples=[Sample(each, 100) for each in seconds])

    rows = [row(adaptive.ADAPTIVE, 2, 2), row(adaptive.NEW, 4, 4), row("nvme_ops one", 1, 1), row("nvme_ops two", 3, 3)]
    peers = [row("torch.load", 8, 8), row(adaptive.FIO, 1, 1), row(adaptive.DEEP, 1, 1), row(adaptive.TOGETHER, 1, 1)]
    assert adaptive.summary(Table("read", "", "GB/s", [*rows, *peers])) == (
        "of the best fixed tool (nvme_ops one): 0.50 (after 20), 0.25 (the first 20); after 20 4.00 x torch.load; "
        f"after 20 0.50 x {adaptive.FIO}; all at once 8.00 x torch.load; all at once 1.00 x {adaptive.DEEP}"
    )
    assert adaptive.summary(Table("read", "", "GB/s", rows[:1])) == ""


def test_the_best_tool_of_a_round_is_that_of_the_others() -> None:
    def row(name: str, *rates: int) -> Row:
        return Row(name, lambda: Sample(1, 1), samples=[Sample(1, rate) for rate in rates])

    lucky = [row("a", 10, 1, 1), row("b", 2, 9, 2), row("c", 3, 3, 7)]
    mine = row("mine", 3, 3, 3)
    table = Table("read", "", "GB/s", [mine, *lucky])
    assert adaptive.against_best(table, mine, lucky) == [3 / 2, 3 / 1, 3 / 1]
