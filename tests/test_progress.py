"""Progress where there is no terminal: a line now and then, none for what is short."""

from __future__ import annotations

import pytest

from nvme_ops import progress


def work() -> None:
    with progress.progress_bar(3) as step:
        for number in range(3):
            step(f"part {number}")
    with progress.byte_bar(200, "verify") as advance:
        advance(100)


def test_what_is_short_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    work()
    assert capsys.readouterr().err == ""


def test_what_is_long_shows_a_line_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_LINE_INTERVAL", 0.0)
    work()
    assert capsys.readouterr().err == "1 of 3: part 0\n2 of 3: part 1\n3 of 3: part 2\nverify: 50 %\n"
