"""The benchmark of GPU memory where there is none: CPU memory or a fake libcufile in its place; rows elsewhere."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu_io
from benchmarks.gpu_io import GpuWork
from nvme_ops.base.text import MIB
from nvme_ops.measure import files
from nvme_ops.measure.remote import Remote, joint_row
from nvme_ops.measure.rows import Row, Sample, Unavailable, WrongData, interleave
from nvme_ops.measure.tables import Table
from tests.conftest import run_python
from tests.doubles import FakeCuFile, PrivateDevice


@pytest.fixture
def work(tmp_path: Path) -> GpuWork:
    """A read of 4 MiB into CPU memory, which stands in for a GPU's."""
    path = tmp_path / "data"
    files.make_file(str(path), 4 * MIB)
    return GpuWork(str(path), 4 * MIB, False, device=torch.device("cpu"), block_size=MIB, threads=2)


def rows_elsewhere(variable: str) -> list[Row]:
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
    good = Row("", lambda: Sample(1, 7, 0.5), note=f"in {os.getpid()}, {os.environ[variable]}")
    return [good, Row("", good.run, check=wrong), *(Row("", run) for run in (missing, failing, exiting, hanging))]


def test_rows_work_in_another_process_and_what_goes_wrong_is_their_note(capfd: pytest.CaptureFixture[str]) -> None:
    variables = {"NVME_OPS_TEST": "told"}
    with ExitStack() as stack:
        remote, slow, _ = (
            stack.enter_context(Remote(rows_elsewhere, *variables, variables=variables, limit=limit))
            for limit in (300, 0.5, 300)
        )
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
    assert "NVME_OPS_TEST" not in os.environ
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
    cufile: FakeCuFile, the_device: PrivateDevice, work: GpuWork, direct: bool
) -> None:
    cufile.offer(nvidia_fs=2 if direct else 0)
    tensor = the_device.tensor(torch.zeros(work.size, dtype=torch.uint8))
    for mode, way in (("auto", "gds" if direct else "bounce"), ("off", "bounce")):
        handle = gpu_io.gds_handle(work, mode)
        row = gpu_io.gds_row(work, "", lambda handle=handle: handle, lambda: tensor)  # type: ignore[misc]
        row.run()
        assert row.note == f"{way} ({handle.path_statistics()['why']})"


def test_what_is_not_installed_or_left_out_is_said(work: GpuWork, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with ExitStack() as stack:
        rows = gpu_io.remote_rows(stack, work, with_deepspeed=True)
        assert len(gpu_io.remote_rows(stack, work, with_deepspeed=False)) == 3
        interleave(rows[1:], 1)
    assert ["kvikio-cu" in row.note or "pip install deepspeed" in row.note for row in rows[1:]] == [True] * 4
    monkeypatch.delattr(torch.cuda, "gds", raising=False)
    with pytest.raises(Unavailable, match="pip install 'torch"):
        gpu_io.cufile_row(work)


def test_aims_are_ratios_to_the_best_of_the_others_in_each_round() -> None:
    seconds: dict[str, tuple[float | None, ...]] = {
        gpu_io.HOST: (1, 1), gpu_io.BOUNCE: (2, 2), gpu_io.GDS: (1, 1), f"{gpu_io.KVIKIO}threads": (2, None),
        gpu_io.CUFILE: (4, 4), gpu_io.GDS_PINNED: (1,),
    }  # fmt: skip
    rows = [
        Row(name, samples=[None if elapsed is None else Sample(elapsed, 12) for elapsed in taken])
        for name, taken in seconds.items()
    ]
    bounce, gds, pinned = gpu_io.aims(Table("read", "", "GB/s", rows, gpu_io.HOST))
    assert bounce.endswith(": 0.50 (0.50 - 0.50), aim 0.95: missed")
    assert gds.endswith(": 3.00 (2.00 - 4.00), aim 1: reached")
    assert pinned.endswith(": not measured, see the rows' notes")


def test_a_small_run_with_cpu_memory_in_place_of_a_gpus(folder: Path) -> None:
    """In a process of its own: cuFile cannot be used in forked children of one that has used it."""
    done = run_python(
        """
        import dataclasses
        import sys
        from benchmarks import command, gpu_io

        gpu_io.PROGRAM = dataclasses.replace(gpu_io.PROGRAM, check=lambda _: None)
        sys.exit(command.main(["gpu_io", *sys.argv[1:]]))
        """,
        *("--folder", folder, "--size", "8M", "--rounds", "1", "--threads", "2"),
        *("--no-deepspeed", "--device", "cpu", "--json"),
        PYTHONWARNINGS="ignore::RuntimeWarning",  # memory that may not be locked
    )
    assert os.listdir(folder) == []
    document = json.loads(done.stdout)
    assert (document["block_size"], document["threads"], document["about"]["device"]) == (MIB, 2, "cpu")
    (there,) = document["folders"].values()
    for table, torch_s in zip(there["tables"], ("torch.load(map_location)", "torch.save + fsync"), strict=True):
        rows = {row["name"]: row for row in table["rows"]}
        for name in (gpu_io.HOST, gpu_io.BOUNCE, f"{gpu_io.GDS}, NVME_OPS_GDS=off", torch_s):
            assert (rows[name]["wrong"], len(rows[name]["values"])) == (False, 1), rows[name]["note"]
            assert name in done.stderr
        assert [name for name, row in rows.items() if not row["values"] and not row["note"]] == []
    assert len(there["notes"]) == 2 * len(gpu_io.AIMS)
