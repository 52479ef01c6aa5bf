"""The scaling benchmark: its arithmetic, its arguments, and a small run over throttled devices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import scaling
from nvme_ops.bench.engines.task import Task
from nvme_ops.bench.measure import Row, Sample, Spread, WrongData
from nvme_ops.bench.run import Scaling
from nvme_ops.text import MIB
from tests.benchmarks.test_throttled import left_over, why_not

ROOT = Path(__file__).parents[2]


def _measured(name: str, *seconds: float) -> Row:
    return Row(name, lambda: Sample(1, 1), samples=[Sample(value, 10**9) for value in seconds])


def test_the_rate_is_divided_by_the_sum_of_each_alone_round_by_round() -> None:
    alone = [_measured("a", 1, 2), _measured("b", 1, 2)]
    together = Row("", lambda: Sample(1, 1), samples=[Sample(1, 2 * 10**9), Sample(4, 2 * 10**9)])
    (found,) = scaling.Rows(alone, {("x", 2): together}).scaling()
    assert (found.devices, found.ratio, found.alone) == (2, Spread(0.75, 0.5, 1.0), Spread(1.5, 1.0, 2.0))


def test_what_misses_the_aim_is_said() -> None:
    def found(ratio: float) -> Scaling:
        return Scaling("nvme_ops, one handle", 2, Spread(1, 1, 1), Spread(1, 1, 1), Spread(ratio, ratio, ratio))

    text = scaling.scaling_text("title", [found(0.96), found(0.94)], [Row("x", lambda: Sample(1, 1), note="why")])
    assert [line.partition("aim ")[2] for line in text.splitlines()[2:4]] == ["0.95: reached", "0.95: missed"]
    assert text.endswith("\nx: why")


def test_a_row_that_moves_nothing_is_found_out(tmp_path: Path) -> None:
    tasks = []
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(os.urandom(4 * MIB))
        tasks.append(Task(str(tmp_path / name), 4 * MIB, write=False, pageable_memory=True))

    class Lazy:
        def async_pread(self, buffer: Any, path: str) -> None:
            pass

        def wait(self) -> None:
            pass

    row = scaling._shared_row("lazy", tasks, [Lazy(), Lazy()])  # type: ignore[list-item]
    row.before()
    with pytest.raises(WrongData, match="tensor and file differ"):
        row.check()


@pytest.mark.alone
@pytest.mark.slow
def test_a_small_run(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    before = left_over()
    result = tmp_path / "result.json"
    done = subprocess.run(
        [
            sys.executable, str(ROOT / "benchmarks" / "scaling.py"), "--devices", "1", "2", "--size", "16M",
            "--rate", "64M", "--rounds", "1", "--only", "write", "--json", str(result),
        ],
        env={**os.environ, "PYTHONWARNINGS": "ignore::RuntimeWarning"},  # memory that may not be locked
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(result.read_text())
    assert [table["group"] for table in document["tables"]] == ["write"]
    ours = [each for each in document["scaling"] if "nvme_ops" in each["engine"]]
    assert len(ours) == 4
    for table in document["tables"]:
        for row in table["rows"]:
            assert not row["wrong"]
            if "fio" not in row["name"]:  # may not be installed
                assert len(row["values"]) == 1, (row["name"], row["note"])
    assert left_over() == before
