"""``benchmarks/tuning.py``: its arithmetic on made-up rates, and one run of the smallest size."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

sys.path.insert(0, str(REPOSITORY))

from benchmarks import tuning
from nvme_ops.text import MIB
from nvme_ops.tune.duel import Rounds
from nvme_ops.tune.search import DEFAULT, Axis

SECOND, THIRD = replace(DEFAULT, queue_depth=32), replace(DEFAULT, block_size=8 * MIB)


def test_the_sweep_compares_within_rounds() -> None:
    order = []

    def measure(settings: object) -> float:
        order.append(settings)
        slow = 0.1 if len(order) > 3 else 1.0  # the machine in the second round
        return slow * {DEFAULT: 1.0, SECOND: 2.0, THIRD: 4.0}[settings]  # type: ignore[index]

    found = tuning.sweep(measure, [DEFAULT, SECOND, THIRD], 2, lambda _: None)
    assert [settings for settings, _ in found] == [THIRD, SECOND, DEFAULT]
    assert [ratio for _, ratio in found] == pytest.approx([2.0, 1.0, 0.5])
    assert order == [DEFAULT, SECOND, THIRD, THIRD, SECOND, DEFAULT]


def test_winners_are_divided_by_the_best_of_the_sweep_round_by_round() -> None:
    rounds = Rounds()
    for second, third in ((1.2, 1.5), (1.3, 1.3), (1.2, 1.6)):
        rates = {DEFAULT: 1.0, SECOND: second, THIRD: third}
        rounds.measure(list(rates), lambda settings, rates=rates: {"read": rates[settings]})  # type: ignore[misc]
    found = tuning.compare(rounds, [DEFAULT, SECOND], [(SECOND, 3.0), (THIRD, 4.0), (DEFAULT, 5.0)])
    assert found["best"] == SECOND.as_json()  # the third was not swept
    assert [each["seconds"] for each in found["repetitions"]] == [3.0, 4.0, 5.0]
    itself, third, default = [each["against_best"] for each in found["repetitions"]]
    assert itself == {"median": 1.0, "min": 1.0, "max": 1.0}
    assert third == pytest.approx({"median": 1.25, "min": 1.0, "max": 1.6 / 1.2})
    assert default["median"] == pytest.approx(1 / 1.2)
    assert [duel["ratio"] for duel in found["against_default"]] == pytest.approx([1.2, 1.5])


def test_the_small_grid_is_part_of_the_full_one() -> None:
    assert set(tuning.combinations(tuning.grid("small"))) < set(tuning.combinations(tuning.grid("full")))
    assert DEFAULT in tuning.combinations(tuning.grid("small"))


def test_a_small_run_prints_and_writes_its_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "grid", lambda _: [Axis("queue_depth", [32, 128])])
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
    monkeypatch.setattr(tuning.stop, "leave_on_signals", lambda: None)
    assert tuning.main(["--path", str(tmp_path), "--io_size", "4000000G"]) == 1
    assert "of free space are needed and there are" in capsys.readouterr().err
    assert os.listdir(tmp_path) == []
