"""benchmarks/training.py: a run with small models, and what it says of other losses."""

from __future__ import annotations

import argparse
import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import command, training, training_engines
from nvme_ops.bench.measure import Unavailable, WrongData

SMALL = ["--size", "4M", "--rounds", "1", "--steps", "1", "--budget", "256M", "--no-deepspeed"]


@pytest.mark.slow
def test_a_small_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = training.main(["--path", str(folder), *SMALL, "--json", str(folder / "found.json"), "--batch", "8"])
    out = capsys.readouterr().out
    assert status == 0, out
    tables = json.loads((folder / "found.json").read_text())["folders"][str(folder)]["tables"]
    rows = {table["group"]: {row["name"]: row for row in table["rows"]} for table in tables}
    assert set(rows) == set(training.GROUPS)
    ours = rows["engines"]["nvme_ops, states and parameters"]
    assert ours["values"], ours
    assert ours["columns"]["written per step"]["median"] > 0
    assert rows["engines"]["DeepSpeed, states"]["note"] == "left out"
    assert [each.name for each in folder.iterdir()] == ["found.json"]


@pytest.mark.parametrize(("engine", "error"), [("nvme_ops", WrongData), ("deepspeed", Unavailable)])
def test_other_losses_are_told(folder: Path, monkeypatch: pytest.MonkeyPatch, engine: str, error: Any) -> None:
    phases = {name: [1.0, 1.0] for name in ("forward", "backward", "step", "read", "written")}
    said = iter([{"losses": [1.0, 2.0], "peak_bytes": 1, **phases}, {"losses": [1.0, 3.0], "peak_bytes": 1, **phases}])
    monkeypatch.setattr(command, "in_new_process", lambda *_, **__: json.dumps(next(said)))
    monkeypatch.setattr(training_engines, "_ENGINES", (("in memory", "memory", False), ("other", engine, True)))
    monkeypatch.setattr(training_engines.importlib.util, "find_spec", lambda _: True)
    given = argparse.Namespace(size=1, batch_of_engines=2, steps=1, budget=1, no_deepspeed=False)
    with contextlib.ExitStack() as stack:
        (table,) = training_engines.engine_rows(str(folder), given, stack)
    memory, other = table.rows
    assert memory.run().seconds == 3
    with pytest.raises(error, match="losses"):
        other.run()
