"""A result for a device is not replaced by a worse founded one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nvme_ops.bench.settings import Settings
from nvme_ops.tune import cli, report, store
from nvme_ops.tune.founding import why_worse
from nvme_ops.tune.identity import Identity
from nvme_ops.tune.options import parse
from nvme_ops.tune.run import Result, Tuned
from nvme_ops.tune.search import DEFAULT, Outcome

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
def test_what_makes_a_result_worse(change: dict[str, Any], words: str) -> None:
    worse = {**THOROUGH, **change}
    assert words in why_worse(worse, THOROUGH)
    assert why_worse(THOROUGH, worse) == ""
    assert why_worse(worse, worse) == ""


def test_anything_is_better_than_what_says_nothing_of_itself() -> None:
    assert why_worse({**THOROUGH, "seconds": 1.0}, {"in_background": True}) == ""


def result(folder: str, seconds: float, best: Settings, *words: str) -> Result:
    rates = {best: {"read": 2e9, "write": 1e9}}
    outcome = Outcome(best, best, best, None, [], rates, {best: 3}, None, True)
    tuned = Tuned([folder], Identity(("made up",), "ext4", "1", "6", 2, "cpu", "threads"), outcome, seconds, 1 << 25)
    return Result(parse(["--nvme_dir", folder, *words]), [tuned])


def test_the_command_keeps_the_better_founded_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = str(tmp_path)
    other = Settings(queue_depth=7)
    first = result(folder, 45, DEFAULT)
    identity = first.devices[0].identity
    cli._keep(first)
    cli._keep(result(folder, 1, other))
    assert store.load(identity) == DEFAULT
    assert "this run took 1 s, that one 45 s; --replace keeps this one" in capsys.readouterr().err
    cli._keep(result(folder, 1, other, "--replace"))
    assert store.load(identity) == other
    assert report.details(first.devices[0])["seconds"] == 45
