"""The benchmark of GPU memory where there is no GPU: CPU memory or a fake libcufile in its place; rows elsewhere.

None of their figures says anything about a GPU.
"""

from __future__ import annotations

import importlib.util
import json
import os
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_io
from benchmarks.gpu_io import GpuWork
from nvme_ops.measure import files
from nvme_ops.measure.engines import path_words
from nvme_ops.measure.remote import Remote
from nvme_ops.measure.rows import Row, Sample, Unavailable, WrongData, interleave
from nvme_ops.measure.tables import Table
from nvme_ops.text import MIB
from tests.conftest import run_python
from tests.fake_cufile import FakeCuFile
from tests.private_device import PrivateDevice

pytest_plugins = ("tests.fake_cufile.fixtures",)


@pytest.fixture
def work(tmp_path: Path) -> GpuWork:
    """A read of 4 MiB into CPU memory, which stands in for a GPU's."""
    path = tmp_path / "data"
    files.make_file(str(path), 4 * MIB)
    return GpuWork(str(path), 4 * MIB, False, device=torch.device("cpu"), block_size=MIB, threads=2)


# Rows in a process of their own


def good_row(amount: int) -> Row:
    print("words for nobody")
    return Row("there", lambda: Sample(1, amount, 0.5), note=f"in {os.getpid()}, {os.environ['NVME_OPS_TEST']}")


def bad_row(kind: str) -> Row:
    if kind == "missing":
        raise Unavailable("not here: install it")

    def run() -> Sample:
        if kind == "failing":
            raise KeyError("what a library raises")
        if kind == "exiting":
            print("cuFileDriverOpen failed", flush=True)
            os._exit(3)
        time.sleep(600 if kind == "hanging" else 0)
        return Sample(1, 1)

    def check() -> None:
        raise WrongData("tensor and file differ")

    return Row("", run, check=check)


def test_a_row_works_in_another_process_with_variables_of_its_own(capfd: pytest.CaptureFixture[str]) -> None:
    with Remote(good_row, 7, variables={"NVME_OPS_TEST": "told"}) as remote, Remote(good_row, 1):
        row = remote.row("here")
        interleave([row], 2)
    assert [sample and (sample.amount, sample.cpu_seconds) for sample in row.samples] == [(7, 0.5)] * 2
    assert row.note.endswith(", told")
    assert row.note != f"in {os.getpid()}, told"
    assert "NVME_OPS_TEST" not in os.environ
    assert capfd.readouterr().out == ""


@pytest.mark.slow
def test_what_goes_wrong_in_another_process_is_kept_as_a_note() -> None:
    notes = {
        "missing": "not here: install it",
        "wrong": "WRONG DATA: tensor and file differ",
        "failing": "failed: RuntimeError: KeyError: 'what a library raises'",
        "exiting": "its process ended with status 3 (cuFileDriverOpen failed)",
        "hanging": "no answer for 0.5 s: its process was stopped",
    }
    remotes = [Remote(bad_row, kind, limit=0.5 if kind == "hanging" else 300) for kind in notes]
    rows = [remote.row(str(number)) for number, remote in enumerate(remotes)]
    after = Row("after", lambda: Sample(1, 1))
    interleave([*rows, after], 1)
    for remote in remotes:
        remote.close()
    assert [row.note for row in rows] == list(notes.values())
    assert [row.wrong for row in rows] == [kind == "wrong" for kind in notes]
    assert len(after.samples) == 1


# Rows over stand-ins


def test_this_packages_rows_and_torch_s_write_cpu_memory(cufile: FakeCuFile, work: GpuWork) -> None:
    """See the small run for reads."""
    work.write = True
    with gpu_io.nvme_ops_rows(work) as rows:
        rows = [*rows, gpu_io.other_rows(work)[-1]]
        interleave(rows, 1)
    _, _, gds, pinned, off, *_ = rows
    for row in rows:
        assert row is pinned or (row.wrong, len(row.samples)) == (False, 1), row.note
    assert gds.note == off.note == "no tensor on an accelerator was moved"
    assert "example_tensor must be on an accelerator" in pinned.note


@pytest.mark.parametrize("direct", [True, False])
def test_a_row_says_which_way_gds_handle_took(
    cufile: FakeCuFile, device: PrivateDevice, work: GpuWork, direct: bool
) -> None:
    cufile.offer(nvidia_fs=2 if direct else 0)
    tensor = device.tensor(torch.zeros(work.size, dtype=torch.uint8))
    for mode, way in (("auto", "gds" if direct else "bounce"), ("off", "bounce")):
        handle = gpu_io.gds_handle(work, mode)
        row = gpu_io.gds_row(work, "", lambda handle=handle: handle, lambda: tensor)  # type: ignore[misc]
        row.run()
        assert row.note == f"{way} ({handle.path_statistics()['why']})"
    uses = {"compat": {"transfers": 8, "bytes": 1}, "bounce": {"transfers": 2, "bytes": 1}}
    several = path_words({"last": "compat", "why": "no nvidia-fs", "uses": uses})
    assert several == "compat (no nvidia-fs); transfers: bounce 2, compat 8"


def test_what_is_not_installed_or_left_out_is_said(work: GpuWork, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with ExitStack() as stack:
        rows = gpu_io.remote_rows(stack, work, with_deepspeed=True)
        missing = [row for row in rows if row.name.startswith(("kvikio", "DeepSpeed"))]
        interleave(missing, 1)
        assert len(rows) == 5
        assert len(gpu_io.remote_rows(stack, work, with_deepspeed=False)) == 3
    assert ["kvikio-cu" in row.note or "pip install deepspeed" in row.note for row in missing] == [True] * 4
    monkeypatch.delattr(torch.cuda, "gds", raising=False)
    with pytest.raises(Unavailable, match="pip install 'torch"):
        gpu_io.cufile_row(work)


# What is made of the figures


def measured(name: str, *seconds: float | None) -> Row:
    """A row with the seconds of each round for the same amount."""
    return Row(name, samples=[None if one is None else Sample(one, 12) for one in seconds])


def test_aims_are_ratios_to_the_best_of_the_others_in_each_round() -> None:
    rows = [measured(gpu_io.HOST, 1, 1), measured(gpu_io.BOUNCE, 2, 2), measured(gpu_io.GDS, 1, 1)]
    rows += [
        measured(f"{gpu_io.KVIKIO}threads", 2, None),
        measured(gpu_io.CUFILE, 4, 4),
        measured(gpu_io.GDS_PINNED, 1),
    ]
    lines = list(gpu_io.aims(Table("read", "", "GB/s", rows, gpu_io.HOST)))
    assert lines[0].endswith(": 0.50 (0.50 - 0.50), aim 0.95: missed")
    assert lines[1].endswith(": 3.00 (2.00 - 4.00), aim 1: reached")
    assert lines[2].endswith(": not measured, see the rows' notes")


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
        *("--only", "read", "--no-deepspeed", "--device", "cpu", "--json"),
        PYTHONWARNINGS="ignore::RuntimeWarning",  # memory that may not be locked
    )
    assert os.listdir(folder) == []
    found = json.loads(done.stdout)
    assert (found["block_size"], found["threads"], found["about"]["device"]) == (MIB, 2, "cpu")
    (there,) = found["folders"].values()
    rows = {row["name"]: row for row in there["tables"][0]["rows"]}
    for name in (gpu_io.HOST, gpu_io.BOUNCE, f"{gpu_io.GDS}, NVME_OPS_GDS=off", "torch.load(map_location)"):
        assert (rows[name]["wrong"], len(rows[name]["values"])) == (False, 1), rows[name]["note"]
        assert name in done.stderr
    assert [name for name, row in rows.items() if not row["values"] and not row["note"]] == []
    assert len(there["notes"]) == len(gpu_io.AIMS)
