"""benchmarks/activations.py: a run with small nets, and what it says of other gradients."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks import activations, memory_limit
from nvme_ops.bench.measure import WrongData

SMALL = [  # each net saves more than the budget and what may be on its way, so that something has to be written
    "--size",
    "1G",
    "--rounds",
    "1",
    "--steps",
    "1",
    "--budget",
    "4M",
    "--batch",
    "16",
    "--batch-of-transformer",
    "2",
    "--most",
    "2",
]


@pytest.mark.slow
def test_a_small_run(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "_LAYERS", {"convolutional": 6, "transformer": 2, "largest": 8})
    ways = {name: way for name, way in activations._WAYS.items() if way in ("memory", "nvme", "torch")}
    monkeypatch.setattr(activations, "_WAYS", ways)
    file = folder / "found.json"
    status = activations.main(["--path", str(folder), *SMALL, "--json", str(file)])
    out = capsys.readouterr().out
    assert status == 0, out
    tables = json.loads(file.read_text())["folders"][str(folder)]["tables"]
    rows = {table["group"]: {row["name"]: row for row in table["rows"]} for table in tables}
    assert set(rows) == set(activations.GROUPS)
    for net in ("convolutional", "transformer"):
        assert all(row["values"] for name, row in rows[net].items() if not name.startswith("fio")), rows[net]
        assert rows[net]["save_on_nvme"]["columns"]["read and written"]["median"] > 0
    if not memory_limit.limited_here():
        assert rows["largest"]["save_on_nvme"]["note"] == "no memory cgroup can be made: run it as root"
    assert [each.name for each in folder.iterdir()] == ["found.json"]


def test_other_gradients_are_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = iter([[1, 2], [1, 3]])

    def trained(_: Any) -> dict[str, Any]:
        phases = {name: [1.0, 1.0] for name in ("forward", "backward", "moved")}
        return {"gradients": next(said), "peak_bytes": 1, **phases}

    monkeypatch.setattr(activations, "trained", trained)
    monkeypatch.setattr(activations, "GIB", 1 << 20)
    given = argparse.Namespace(batch=2, batch_of_transformer=2, steps=1, budget=1)
    memory, ours, *_ = activations.net_rows("convolutional", os.fspath(folder), given).rows
    assert memory.run().seconds == 2
    with pytest.raises(WrongData, match="gradients differ"):
        ours.run()
