"""``benchmarks/tuning.py``: its arithmetic on made-up rates, and one run of the smallest size."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import REPOSITORY

sys.path.insert(0, str(REPOSITORY))

from benchmarks import tuning
from nvme_ops.text import MIB
from nvme_ops.tune.duel import Duel
from nvme_ops.tune.search import DEFAULT, Axis, combinations

SECOND, THIRD = replace(DEFAULT, queue_depth=32), replace(DEFAULT, block_size=8 * MIB)


def test_the_sweep_compares_within_rounds() -> None:
    order = []

    def measure(settings: object) -> float:
        order.append(settings)
        slow = 0.1 if len(order) > 3 else 1.0  # the machine in the second round
        return slow * {DEFAULT: 1.0, SECOND: 2.0, THIRD: 4.0}[settings]  # type: ignore[index]

    found = tuning.sweep(measure, [DEFAULT, SECOND, THIRD], 2, lambda _: None)
    assert found == [(THIRD, pytest.approx(2.0)), (SECOND, pytest.approx(1.0)), (DEFAULT, pytest.approx(0.5))]
    assert order == [DEFAULT, SECOND, THIRD, THIRD, SECOND, DEFAULT]


def test_winners_are_divided_by_the_best_of_the_sweep_round_by_round() -> None:
    duels = [Duel(SECOND, [1.2, 1.3, 1.2]), Duel(THIRD, [1.5, 1.3, 1.6])]
    best, over_best = tuning.compare(duels, [DEFAULT, SECOND])
    assert best == SECOND  # the third was not swept
    assert over_best[SECOND].median == 1.0
    assert over_best[THIRD].median == pytest.approx(1.25)
    assert over_best[THIRD].low == pytest.approx(1.0)
    assert over_best[THIRD].high == pytest.approx(1.6 / 1.2)
    assert over_best[DEFAULT].median == pytest.approx(1 / 1.2)


def test_the_small_grid_is_part_of_the_full_one() -> None:
    assert set(combinations(tuning.grid("small"))) < set(combinations(tuning.grid("full")))
    assert DEFAULT in combinations(tuning.grid("small"))


def test_a_small_run_prints_and_writes_its_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "grid", lambda _: [Axis("queue_depth", [32, 128])])
    monkeypatch.setattr("torch.set_num_threads", lambda _: None)
    monkeypatch.setattr(tuning.stop, "leave_on_signals", lambda: None)
    (tmp_path / "place").mkdir()
    file = tmp_path / "found.json"
    status = tuning.main([
        "--path", str(tmp_path / "place"), "--io_size", "32M", "--rounds", "1", "--repetitions", "2",
        "--seconds", "0.5", "--final-rounds", "3", "--json", str(file),
    ])  # fmt: skip
    assert status == 0
    output = capsys.readouterr().out
    assert "best of 2 combinations: " in output
    assert "of 2 reach 0.97; the longest took " in output
    found = json.loads(file.read_text())
    assert len(found["repetitions"]) == 2
    assert len(found["sweep"]) == 2
    assert os.listdir(tmp_path / "place") == []


@pytest.mark.parametrize(
    ("words", "message"),
    [(["--path", "/no/such"], "no such folder"), (["--grid", "huge"], "--grid"), (["--io_size", "0"], "--io_size")],
)
def test_wrong_arguments_end_with_status_2(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        tuning.main(words)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_too_little_space_ends_with_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.set_num_threads", lambda _: None)
    monkeypatch.setattr(tuning.stop, "leave_on_signals", lambda: None)
    assert tuning.main(["--path", str(tmp_path), "--io_size", "4000000G"]) == 1
    assert "of free space are needed and there are" in capsys.readouterr().err
    assert os.listdir(tmp_path) == []
