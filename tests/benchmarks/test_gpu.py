"""The benchmark of GPU memory where there is no GPU: CPU memory, a fake libcufile or a fake gdsio in its place.

These look at the benchmark's own arithmetic, rows and processes. None of their figures says anything about a GPU.
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib.util
import json
import os
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from benchmarks import command, gpu_io
from benchmarks.gpu_io import GpuWork
from nvme_ops.measure import engines, files
from nvme_ops.measure.remote import Remote, environment
from nvme_ops.measure.rows import Row, Sample, Unavailable, WrongData, interleave
from nvme_ops.measure.tables import Table
from nvme_ops.text import GIB, MIB
from tests.conftest import refusal, run_python
from tests.fake_cufile import FakeCuFile, Function
from tests.private_device import PrivateDevice

pytest_plugins = ("tests.fake_cufile.fixtures",)

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
GDSIO_OUTPUT = (
    "IoType: READ XferType: GPUD Threads: 4 DataSetSize: 1048576/1048576(KiB) IOSize: 1024(KiB) "
    "Throughput: 2.000000 GiB/sec, Avg_Latency: 589.4 usecs ops: 1024 total_time 0.500000 secs\n"
)


@pytest.fixture
def work(tmp_path: Path) -> GpuWork:
    """A read of 4 MiB into CPU memory, which stands in for a GPU's."""
    path = tmp_path / "data"
    files.make_file(str(path), 4 * MIB)
    return GpuWork(str(path), 4 * MIB, False, device=CPU, block_size=MIB, threads=2)


def written(work: GpuWork) -> GpuWork:
    return dataclasses.replace(work, write=True)


# Rows in a process of their own


def good_row(amount: int) -> Row:
    print("words for nobody")
    return Row("there", lambda: Sample(1, amount, 0.5), note=f"in {os.getpid()}")


def unavailable_row() -> Row:
    raise Unavailable("not here: install it")


def wrong_row() -> Row:
    def check() -> None:
        raise WrongData("tensor and file differ")

    return Row("", lambda: Sample(1, 1), check=check)


def failing_row() -> Row:
    def run() -> Sample:
        raise KeyError("what a library raises")

    return Row("", run)


def exiting_row() -> Row:
    def run() -> Sample:
        print("cuFileDriverOpen failed", flush=True)
        os._exit(3)

    return Row("", run)


def hanging_row() -> Row:
    def run() -> Sample:
        time.sleep(600)
        return Sample(1, 1)

    return Row("", run)


def variable_row() -> Row:
    return Row("", lambda: Sample(1, 1), note=os.environ["NVME_OPS_TEST_OF_REMOTE"])


def test_a_row_works_in_another_process(capfd: pytest.CaptureFixture[str]) -> None:
    remote = Remote(good_row, 7)
    row = remote.row("here")
    interleave([row], 2)
    remote.close()
    assert row.name == "here"
    assert row.samples == [Sample(1, 7, 0.5)] * 2
    assert row.note.startswith("in ")
    assert row.note != f"in {os.getpid()}"
    assert capfd.readouterr().out == ""


@pytest.mark.slow
def test_what_goes_wrong_in_another_process_is_kept_as_a_note() -> None:
    remotes = [Remote(make) for make in (unavailable_row, wrong_row, failing_row, exiting_row)]
    remotes.append(Remote(hanging_row, limit=0.5))
    rows = [remote.row(str(number)) for number, remote in enumerate(remotes)]
    after = Row("after", lambda: Sample(1, 1))
    interleave([*rows, after], 1)
    for remote in remotes:
        remote.close()
    assert [row.note for row in rows] == [
        "not here: install it",
        "WRONG DATA: tensor and file differ",
        "failed: RuntimeError: KeyError: 'what a library raises'",
        "its process ended with status 3 (cuFileDriverOpen failed)",
        "no answer for 0.5 s: its process was stopped",
    ]
    assert [row.wrong for row in rows] == [False, True, False, False, False]
    assert len(after.samples) == 1


def test_variables_reach_the_other_process_alone() -> None:
    remote = Remote(variable_row, variables={"NVME_OPS_TEST_OF_REMOTE": "told"})
    row = remote.row("")
    interleave([row], 1)
    remote.close()
    assert row.note == "told"
    assert "NVME_OPS_TEST_OF_REMOTE" not in os.environ


def test_variables_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVME_OPS_GDS", "require")
    with environment(NVME_OPS_GDS="off", NVME_OPS_TEST_OF_REMOTE="x"):
        assert os.environ["NVME_OPS_GDS"] == "off"
    assert os.environ["NVME_OPS_GDS"] == "require"
    assert "NVME_OPS_TEST_OF_REMOTE" not in os.environ


def test_a_process_that_was_never_needed_is_closed() -> None:
    Remote(good_row, 1).close()


# gdsio


def test_gdsio_output_is_read() -> None:
    sample = engines.read_gdsio(0, GDSIO_OUTPUT)
    assert (sample.seconds, sample.amount, sample.cpu_seconds) == (0.5, GIB, None)


@pytest.mark.parametrize(
    ("status", "output", "words"),
    [
        (1, "\nfile register error: 5027\n", "gdsio: file register error: 5027"),
        (0, "nothing useful", "gdsio: nothing useful"),
        (5, "", "gdsio: exit status 5"),
        (1, GDSIO_OUTPUT, "gdsio: IoType"),
    ],
)
def test_gdsio_failures_keep_its_words(status: int, output: str, words: str) -> None:
    with pytest.raises(RuntimeError, match=words):
        engines.read_gdsio(status, output)


@pytest.mark.parametrize("write", [False, True], ids=["read", "write"])
def test_a_fake_gdsio_is_told_size_block_size_and_threads(
    work: GpuWork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: bool
) -> None:
    program, told = tmp_path / "gdsio", tmp_path / "told"
    program.write_text(f"#!/bin/sh\necho \"$@\" >> '{told}'\necho '{GDSIO_OUTPUT.strip()}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    work = written(work) if write else work
    rows = gpu_io.other_rows(work)[:2]
    interleave(rows, 1)
    assert [row.samples for row in rows] == [[Sample(0.5, GIB)]] * 2
    path = f"{work.path}.gdsio" if write else work.path
    common = f"-f {path} -d 0 -w 2 -s 4096K -i 1024K"
    assert told.read_text().splitlines()[:2] == [f"{common} -x 0 -I {int(write)}", f"{common} -x 2 -I {int(write)}"]
    assert os.path.getsize(path) == work.size


def test_gdsio_that_is_not_installed_is_said(work: GpuWork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setattr(engines, "_GDSIO_PLACES", ())
    rows = gpu_io.other_rows(work)[:2]
    interleave(rows, 1)
    assert [row.note for row in rows] == ["gdsio is not installed: apt-get install nvidia-gds"] * 2


# Rows over stand-ins


@pytest.mark.parametrize("write", [False, True], ids=["read", "write"])
def test_this_packages_rows_with_cpu_memory_in_place_of_a_gpus(cufile: FakeCuFile, work: GpuWork, write: bool) -> None:
    with gpu_io.nvme_ops_rows(written(work) if write else work) as rows:
        interleave(rows, 1)
    host, bounce, gds, pinned, off, adaptive = rows
    for row in (host, bounce, gds, off, adaptive):
        assert (row.wrong, len(row.samples)) == (False, 1), row.note
    assert gds.note == off.note == "no tensor on an accelerator was moved"
    assert "example_tensor must be on an accelerator" in pinned.note


@pytest.mark.parametrize("write", [False, True], ids=["read", "write"])
def test_torchs_row_with_cpu_memory_in_place_of_a_gpus(work: GpuWork, write: bool) -> None:
    row = gpu_io.other_rows(written(work) if write else work)[2]
    interleave([row], 1)
    assert (row.wrong, len(row.samples), row.note) == (False, 1, "")


@pytest.mark.parametrize("write", [False, True], ids=["read", "write"])
@pytest.mark.parametrize(("threads", "piece"), [(1, 4 * MIB), (3, MIB), (8, 64 * 1024)])
def test_the_row_of_cufile_alone_over_a_fake_libcufile(
    cufile: FakeCuFile, work: GpuWork, write: bool, threads: int, piece: int
) -> None:
    row = gpu_io.cufile_row(written(work) if write else work, threads, piece)
    interleave([row], 1)
    assert (row.wrong, len(row.samples), row.note) == (False, 1, "")
    now = cufile.statistics()
    moved = 3 * work.size  # the first pass, the check, a round
    assert (now.bytes_read, now.bytes_written) == ((0, moved) if write else (moved, 0))
    assert now.calls[Function.WRITE if write else Function.READ] == moved // min(piece, work.size)
    ctypes.CDLL(str(cufile.path)).cuFileDriverClose_v2()


def test_cufile_that_cannot_be_loaded_is_said(work: GpuWork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVME_OPS_CUFILE_LIBRARY", str(tmp_path / "none"))
    with pytest.raises(Unavailable, match="pip install nvidia-cufile"):
        gpu_io.cufile_row(work, 1, MIB)


@pytest.mark.parametrize("direct", [True, False])
def test_a_row_says_which_way_gds_handle_took_over_a_fake_libcufile(
    cufile: FakeCuFile, device: PrivateDevice, work: GpuWork, direct: bool
) -> None:
    cufile.offer(nvidia_fs=2 if direct else 0)
    tensor = device.tensor(torch.zeros(work.size, dtype=torch.uint8))
    handle = gpu_io.gds_handle(work, "auto")
    row = gpu_io.gds_row(work, "", lambda: handle, lambda: tensor)
    row.run()
    assert row.note == f"{'gds' if direct else 'bounce'} ({handle.path_statistics()['why']})"
    off = gpu_io.gds_handle(work, "off")
    row = gpu_io.gds_row(work, "", lambda: off, lambda: tensor)
    row.run()
    assert row.note == "bounce (NVME_OPS_GDS=off)"


def test_several_ways_are_counted() -> None:
    uses = {"compat": {"transfers": 8, "bytes": 1}, "bounce": {"transfers": 2, "bytes": 1}}
    statistics = {"last": "compat", "why": "no nvidia-fs", "uses": uses}
    assert gpu_io.path_words(statistics) == "compat (no nvidia-fs); transfers: bounce 2, compat 8"


def test_packages_that_are_not_installed_are_said(work: GpuWork, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with ExitStack() as stack:
        rows = gpu_io.remote_rows(stack, work, with_deepspeed=True)
        missing = [row for row in rows if row.name.startswith(("kvikio", "DeepSpeed"))]
        interleave(missing, 1)
    toolkit = (torch.version.cuda or "12").partition(".")[0]
    kvikio, deepspeed = f"kvikio is not installed: pip install kvikio-cu{toolkit}", "pip install deepspeed"
    assert [row.note for row in missing] == [kvikio] * 3 + [f"DeepSpeed is not installed: {deepspeed}"] * 2


def test_deepspeed_can_be_left_out(work: GpuWork) -> None:
    with ExitStack() as stack:
        rows = gpu_io.remote_rows(stack, work, with_deepspeed=False)
    assert len(rows) == 6
    assert not [row.name for row in rows if "DeepSpeed" in row.name]


# What is made of the figures


def measured(**seconds: list[float | None]) -> list[Row]:
    """Rows by name, with the seconds of each round for the same amount."""
    return [
        Row(name, lambda: Sample(1, 1), samples=[None if one is None else Sample(one, 12) for one in each])
        for name, each in seconds.items()
    ]


def test_the_best_of_the_others_counts_in_each_round() -> None:
    mine, fast, slow, none = measured(mine=[1, 1, 1, None], fast=[2, None, None, 1], slow=[4, 3, None, 1], none=[])
    assert gpu_io.against_best(mine, [fast, slow, none]) == [2, 3]
    assert gpu_io.against_best(mine, [none]) == []


def test_aims_are_told_as_reached_missed_or_not_measured() -> None:
    host, bounce, gds = measured(host=[1, 1], bounce=[2, 2], gds=[1, 1])
    kvikio = measured(kvikio=[2, 4])[0]
    host.name, bounce.name, gds.name, kvikio.name = gpu_io.HOST, gpu_io.BOUNCE, gpu_io.GDS, f"{gpu_io.KVIKIO}threads"
    rows = [host, bounce, gds, kvikio, Row(gpu_io.GDS_PINNED, samples=[Sample(1, 12)])]
    lines = list(gpu_io.aims(Table("read", "", "GB/s", rows, gpu_io.HOST)))
    assert lines[0].endswith(": 0.50 (0.50 - 0.50), aim 0.95: missed")
    assert lines[1].endswith(": 3.00 (2.00 - 4.00), aim 1: reached")
    assert lines[2].endswith(": not measured, see the rows' notes")


# The program


def test_without_a_gpu_it_ends_with_one_line(folder: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    status, said = refusal(command.main, ["gpu_io", "--folder", str(folder)])
    assert status == 2
    assert "a CUDA GPU" in said.splitlines()[-1]


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
    out, errors = done.stdout, done.stderr
    assert os.listdir(folder) == []
    found = json.loads(out)
    assert (found["block_size"], found["threads"], found["about"]["device"]) == (MIB, 2, "cpu")
    (there,) = found["folders"].values()
    rows = {row["name"]: row for row in there["tables"][0]["rows"]}
    for name in (gpu_io.HOST, gpu_io.BOUNCE, f"{gpu_io.GDS}, NVME_OPS_GDS=off", "torch.load(map_location)"):
        assert (rows[name]["wrong"], len(rows[name]["values"])) == (False, 1), rows[name]["note"]
        assert name in errors
    assert [name for name, row in rows.items() if not row["values"] and not row["note"]] == []
    assert len(there["notes"]) == len(gpu_io.AIMS)
