"""The result in words and as JSON, of made-up devices; and what is best for several at once."""

from __future__ import annotations

import json
import re
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nvme_ops.measure import tune as report
from nvme_ops.measure.search import DEFAULT, Axis, Duel, Outcome
from nvme_ops.measure.tune import Tuned, TuneResult
from nvme_ops.settings import Settings
from nvme_ops.storage.device import Identity
from nvme_ops.text import MIB
from tests.tune.test_search import BUDGET, MadeUpDevice

DEVICE = Identity(("nvme made up 1 TiB",), "ext4", "1234", "6.1", 8, "cpu", "io_uring")
FAST = replace(DEFAULT, block_size=8 * MIB, queue_depth=16)
FEW = [Axis("block_size", [MIB, 8 * MIB]), Axis("queue_depth", [16, 128])]
RATES = {DEFAULT: {"write": 1e9, "read": 2e9}, FAST: {"write": 1.2e9, "read": 2.4e9}}


@pytest.fixture
def given(tmp_path: Path) -> Namespace:
    return report.parse(["--nvme_dir", str(tmp_path), "--explain"])


def outcome(best: Settings, *ratios: float, challenger: Settings = FAST, baseline: Settings = DEFAULT) -> Outcome:
    final = Duel(challenger, ratios, 0.02) if ratios else None
    return Outcome(best, baseline, challenger, final, FEW, RATES, {DEFAULT: 5, FAST: 7}, {}, True)


def result(given: Namespace, *outcomes: Outcome) -> TuneResult:
    names = ["/mnt/a", "/mnt/b", "/mnt/c"]
    return TuneResult(
        given, [Tuned([name], DEVICE, each, 41.2, 400 * MIB) for name, each in zip(names, outcomes, strict=False)]
    )


NEAREST = replace(DEFAULT, queue_depth=16)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (
            outcome(FAST, 1.2, 1.21, 1.19),
            ["/mnt/a: ext4 on nvme made up 1 TiB\n", " best 8 MiB x 16, 1 lane write 1.20 GB/s read 2.40 GB/s\n",
             " default 1 MiB x 128, 1 lane write 1.00 GB/s read 2.00 GB/s\n",
             " 8 MiB x 16, 1 lane: 1.200 of the default's rate, +- 0.020, in 3 rounds\n", " 12 passes in 41 s\n"],
        ),
        (
            outcome(DEFAULT, 1.1, 0.9, 1.05),
            [" best (default) 1 MiB x 128, 1 lane ", " challenger 8 MiB x 16, 1 lane ",
             " 1.050 of the default's rate, +- 0.020, in 3 rounds: inside the noise, so the default stays\n"],
        ),
        (outcome(DEFAULT, 0.9, 0.9, 0.9), [": not faster, so the default stays\n"]),
        (outcome(DEFAULT, challenger=DEFAULT), [" nothing is faster than the default by more than 1 %"]),
        (outcome(FAST), [" not confirmed: no time was left", "why: too little was measured"]),
        (
            replace(outcome(FAST, 1.2, 1.2, 1.2, baseline=NEAREST), rates={FAST: RATES[FAST], NEAREST: RATES[DEFAULT]}),
            [" nearest to the default 1 MiB x 16, 1 lane "],
        ),
    ],
)  # fmt: skip
def test_the_result_says_what_is_best_and_why(given: Namespace, found: Outcome, words: list[str]) -> None:
    text = report.text(result(given, found))
    for each in words:
        assert each in re.sub(" +", " ", text)
    assert ("challenger" in text) == (found.best == found.baseline != found.challenger)


def test_explain_shows_how_flat_the_optimum_is(given: Namespace) -> None:
    for kind, words in (("flat", "a flat optimum"), ("cliffs", "a narrow optimum")):
        device = MadeUpDevice(kind, 1, noise=0.01)
        found = device.search().find()
        text = report.text(result(given, found))
        assert words in text
        assert device.now < 1.1 * BUDGET
        for axis in found.axes:
            assert axis.name in text
        assert text.count("the best ") >= len(found.axes)
        assert "+- 0.0" in text
        if found.final:
            assert f"the final, round by round: {found.final.ratios[0]:.3f}" in text


def test_the_text_ends_with_the_section_in_the_order_of_ds_nvme_tune(given: Namespace) -> None:
    section = report.text(result(given, outcome(FAST, 1.2, 1.2, 1.2))).rpartition("\n\n")[2]
    assert json.loads(section) == {"aio": FAST.as_json()}
    assert list(json.loads(section)["aio"]) == [
        "single_submit", "overlap_events", "intra_op_parallelism", "queue_depth", "block_size"
    ]  # fmt: skip


def test_the_document_can_be_written(given: Namespace) -> None:
    document = json.loads(json.dumps(report.as_document(result(given, outcome(FAST, 1.2, 1.21, 1.19)))))
    assert document["aio"] == FAST.as_json()
    device = document["devices"][0]
    assert device["rounds"] == [1.2, 1.21, 1.19]
    assert device["ratio"] == 1.2
    assert device["bytes_per_second"] == {"best": RATES[FAST], "default": RATES[DEFAULT]}
    assert device["challenger"] == FAST.as_json()


def test_for_all_devices_it_is_what_each_has_or_the_default(given: Namespace) -> None:
    other = replace(DEFAULT, queue_depth=16)
    assert result(given, outcome(FAST), outcome(FAST)).best == FAST
    assert result(given, outcome(FAST), outcome(other)).best == DEFAULT


THOROUGH: dict[str, Any] = {
    "bytes_per_second": {"best": {"read": 2e9, "write": 1e9}},
    "from_page_cache": 0.0,
    "complete": True,
    "seconds": 45.0,
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seconds": 1.0}, "this run took 1 s, that one 45 s"),
        ({"complete": False}, "the final of this run was cut short"),
        ({"from_page_cache": 1.0}, "this run read from the page cache"),
        ({"bytes_per_second": {"best": {"read": 3e9}}}, "this run left out writes"),
    ],
)
def test_a_worse_founded_result_is_no_reason_to_give_up_a_better_one(change: dict[str, Any], words: str) -> None:
    worse = {**THOROUGH, **change}
    assert words in report.why_keep(THOROUGH, worse)
    assert report.why_keep(worse, THOROUGH) == ""
    assert report.why_keep(worse, worse) == ""


def test_a_run_of_today_replaces_one_of_the_time_when_all_took_45_seconds() -> None:
    assert report.why_keep(THOROUGH, {**THOROUGH, "seconds": 16.0}) == ""
