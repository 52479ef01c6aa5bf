"""Rows that work in processes of their own, and what goes wrong there."""

from __future__ import annotations

import itertools
import os
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from nvme_ops import gds_handle
from nvme_ops.base.text import MIB
from nvme_ops.measure import engines, files
from nvme_ops.measure.engines import Task
from nvme_ops.measure.remote import Remote, joint_row
from nvme_ops.measure.rows import Row, Sample, Unavailable, WrongData, interleave
from tests.doubles import FakeCuFile, PrivateDevice


def rows_elsewhere(word: str) -> list[Row]:
    def failing() -> Sample:
        raise KeyError("what a library raises")

    def missing() -> Sample:
        raise Unavailable("not here: install it")

    def exiting() -> Sample:
        print("cuFileDriverOpen failed", flush=True)
        os._exit(3)

    def hanging() -> Sample:
        time.sleep(600)
        raise AssertionError

    def wrong() -> None:
        raise WrongData("tensor and file differ")

    print("words for nobody")
    good = Row("", lambda: Sample(1, 7, 0.5), note=f"in {os.getpid()}, {word}")
    return [good, Row("", good.run, check=wrong), *(Row("", run) for run in (missing, failing, exiting, hanging))]


def test_rows_work_in_another_process_and_what_goes_wrong_is_their_note(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    with ExitStack() as stack:
        remote, slow = (stack.enter_context(Remote(rows_elsewhere, "told", limit=limit)) for limit in (300, 60))
        interleave([joint_row("", [slow], 0)], 1)
        slow._limit = 0.5
        good, *bad = [*(joint_row("", [remote], number) for number in range(5)), joint_row("", [slow], 5)]
        interleave([good], 2)
        assert [sample and (sample.amount, sample.cpu_seconds) for sample in good.samples] == [(7, 0.5)] * 2
        assert good.note.endswith(", told")
        assert good.note != f"in {os.getpid()}, told"
        interleave(bad, 1)
    assert [row.note for row in bad] == [
        "WRONG DATA: tensor and file differ", "not here: install it",
        "failed: RuntimeError: KeyError: 'what a library raises'",
        "its process ended with status 3 (cuFileDriverOpen failed)",
        "no answer for 0.5 s: its process was stopped (words for nobody)",
    ]  # fmt: skip
    assert [row.wrong for row in bad] == [True, False, False, False, False]
    assert capfd.readouterr().out == ""


def test_a_process_that_is_gone_leaves_no_answer_for_the_next_question() -> None:
    class MadeUp(Remote):
        """Answers each question with a sample of its own; once it is gone, it takes none."""

        def __init__(self) -> None:
            self.asked, self.numbers, self.gone = list[int](), itertools.count(1), False

        def send(self, number: int, command: str) -> None:
            if self.gone:
                raise Unavailable("gone")
            self.asked.append(next(self.numbers))

        def receive(self) -> tuple[Any, str]:
            return Sample(1.0, self.asked.pop(0)), ""

    first, second = MadeUp(), MadeUp()
    second.gone = True
    with pytest.raises(Unavailable, match="gone"):
        joint_row("both", [first, second], 0).run()
    assert joint_row("alone", [first], 0).run().amount == 2


@pytest.mark.parametrize("direct", [True, False])
def test_a_row_says_which_way_gds_handle_took(
    cufile: FakeCuFile, the_device: PrivateDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    files.make_file(str(tmp_path / "data"), MIB)
    task = Task(str(tmp_path / "data"), MIB, False)
    cufile.offer(nvidia_fs=2 if direct else 0)
    tensor = the_device.tensor(torch.zeros(task.size, dtype=torch.uint8))
    for mode, way in (("auto", "gds" if direct else "bounce"), ("off", "bounce")):
        monkeypatch.setenv("NVME_OPS_GDS", mode)
        handle = gds_handle()
        row = engines.noting_paths(engines.handle_row(task, "", handle), lambda handle=handle: handle)  # type: ignore[misc]
        task.buffer = tensor
        row.run()
        assert row.note == f"{way} ({handle.path_statistics()['why']})"
