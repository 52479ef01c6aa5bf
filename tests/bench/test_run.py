"""nvme-bench for real, with tiny sizes: several processes and folders, sweeps, and what goes wrong on the way.

Whatever happens, nothing may be left in the folder.
"""

from __future__ import annotations

import contextlib
import csv
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import nvme_ops.measure.run as run_module
from nvme_ops.measure import bench as options
from nvme_ops.measure import files, stop
from nvme_ops.measure import run as report
from nvme_ops.measure.remote import Remote, joint_row
from nvme_ops.measure.rows import Row, Sample, Unavailable
from nvme_ops.measure.run import BenchResult
from nvme_ops.progress import Step
from nvme_ops.text import GIB, MIB
from tests import prepared
from tests.conftest import give_up_root, in_child, open_to_all

SMALL = ["--io_size", "4M", "--no_reference"]


def nvme_bench(*words: str) -> subprocess.CompletedProcess[str]:
    return prepared.run("-m", "nvme_ops.bench", *words)


def run(folder: Path, *words: str) -> BenchResult:
    """In this process, as far as it goes."""
    return run_module.run(options.parse(["--folder", str(folder), *SMALL, *words]))


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The command in this process; its handlers of signals stay away."""
    monkeypatch.setattr(stop, "leave_on_signals", lambda: None)
    return lambda folder, *words: options.main(["--folder", str(folder), *SMALL, *words])


def amounts(row: Row) -> list[int | None]:
    return [None if sample is None else sample.amount for sample in row.samples]


def test_several_processes_at_once(tmp_path: Path) -> None:
    result = run(tmp_path, "--multi_process", "2", "--engine", "aio_handle", "python", "--loops", "2")
    assert result.table.title.startswith("write, 4 MiB by each of 2 processes at once, page-locked CPU memory")
    assert [row.name for row in result.table.rows] == ["aio_handle", "python"]
    assert [amounts(row) for row in result.table.rows] == [[8 * MIB] * 2] * 2
    assert (result.wrong, result.blocks) == ([], {})
    assert list(tmp_path.iterdir()) == []


def test_several_folders_and_their_scaling(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    mapping = [f"{folder}:{number}" for number, folder in enumerate(folders)]
    done = nvme_bench("--folder_to_device_mapping", *mapping, *SMALL, "--read", "--scaling", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert list(found["folders"]) == [str(folder) for folder in folders]
    rows = {row["name"]: row for row in found["tables"][0]["rows"]}
    assert list(rows) == [*(f"aio_handle, {folder} alone" for folder in folders), "aio_handle"]
    assert [len(row["values"]) for row in rows.values()] == [3, 3, 3]
    (scaling,) = found["scaling"]
    assert (scaling["engine"], scaling["devices"]) == ("aio_handle", 2)
    assert scaling["rate"] == pytest.approx(rows["aio_handle"]["spread"])
    assert scaling["ratio"]["min"] <= scaling["ratio"]["median"] <= scaling["ratio"]["max"]
    assert [list(folder.iterdir()) for folder in folders] == [[], []]


def test_a_sweep_with_its_files(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    folder = tmp_path / "work"
    folder.mkdir()
    outputs = [tmp_path / f"out.{suffix}" for suffix in ("json", "csv", "png")]
    done = nvme_bench(
        "--folder", str(folder), *SMALL, "--sweep", "block_size=64K,1M", "queue_depth=1,8", "--loops", "2",
        *(word for file in outputs for word in ("--output", str(file))),
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    names = [f"aio_handle, block_size {size}, queue_depth {n}" for size in ("64 KiB", "1 MiB") for n in (1, 8)]
    assert [name for name in names if name not in done.stdout] == []
    document = json.loads(outputs[0].read_text())
    assert [row["name"] for row in document["tables"][0]["rows"]] == names
    assert document["command"][:3] == ["nvme-bench", "--folder", str(folder)]
    assert document["machine"].keys() == {"cpu", "memory", "kernel", "python", "torch", "backends"}
    for words in (
        document["machine"]["cpu"],
        document["machine"]["kernel"],
        *document["folders"][str(folder)].values(),
    ):
        assert words in "".join(done.stdout.splitlines()[:2])
    lines = list(csv.DictReader(outputs[1].open()))
    assert [line["engine"] for line in lines] == [name for name in names for _ in range(2)]
    assert all(float(line["end_to_end"]) >= float(line["seconds"]) > 0 for line in lines)
    assert outputs[2].read_bytes().startswith(b"\x89PNG")
    assert list(folder.iterdir()) == []


def test_too_little_space_is_said_before_anything_is_written(
    tmp_path: Path, main: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(files, "make_file", lambda *_: pytest.fail("something is written"))
    size = shutil.disk_usage(tmp_path).total
    assert main(tmp_path, "--io_size", str(size)) == 2
    assert f"nvme-bench: {tmp_path}: " in (said := capsys.readouterr().err)
    assert "of free space are needed and there are" in said
    assert "--io_size or --folder" in said
    assert list(tmp_path.iterdir()) == []


def test_space_is_for_all_files_of_all_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = 64 * MIB + 4 * MIB * 2 * 2 * 5  # of 2 processes, one file for all and one of torch's, for 5 passes
    words = [
        "--multi_process",
        "2",
        "--engine",
        "aio_handle",
        "torch",
        "--different_file_each_iteration",
        "--loops",
        "4",
    ]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(GIB, 0, free - 1))
    with pytest.raises(files.NotUsable, match="144 MiB of free space are needed"):
        run(tmp_path, *words)


def test_folders_of_one_file_system_share_its_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    free = 100 * MIB
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(GIB, 0, free))
    monkeypatch.setattr(files, "make_file", lambda *_: pytest.fail("something is written"))
    mapping = [f"{folder}:{number}" for number, folder in enumerate(folders)]
    with pytest.raises(files.NotUsable, match="of free space are needed"):
        run_module.run(options.parse(["--folder_to_device_mapping", *mapping, "--io_size", "32M"]))


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir(mode=0o755)
    open_to_all(tmp_path)
    (tmp_path / "work").chmod(0o555)

    def body() -> None:
        give_up_root()
        with pytest.raises(files.NotUsable, match="work: Permission denied"):
            run(tmp_path / "work")

    in_child(body)


def test_a_file_that_cannot_be_made_is_said(
    tmp_path: Path, main: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(path: str, _: int) -> None:
        raise OSError(28, "No space left on device", path)

    monkeypatch.setattr(files, "make_file", fail)  # someone else takes the space
    assert main(tmp_path) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def told(monkeypatch: pytest.MonkeyPatch, hear: Callable[[str], None]) -> None:
    """Lets ``hear`` know of each pass that begins."""

    @contextlib.contextmanager
    def bar(_: int) -> Iterator[Step]:
        yield hear

    monkeypatch.setattr(run_module, "progress_bar", bar)


def test_a_process_that_dies_becomes_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hear(words: str) -> None:
        if words.startswith("round 2"):
            for child in multiprocessing.active_children():  # one of an earlier test may still be among them
                os.kill(child.pid or 0, signal.SIGKILL)

    told(monkeypatch, hear)
    result = run(tmp_path, "--multi_process", "2", "--loops", "3")
    (row,) = result.table.rows
    assert amounts(row) == [8 * MIB, None, None]
    assert row.note == "its process ended with status -9"
    assert "its process ended with status -9" in report.text(result)
    assert list(tmp_path.iterdir()) == []


class MadeUpProcess(Remote):
    """Answers each question with a sample of its own; once it is gone, it takes none."""

    def __init__(self) -> None:
        self.asked: deque[int] = deque()
        self.questions, self.gone = 0, False

    def send(self, number: int, command: str) -> None:
        if self.gone:
            raise Unavailable("gone")
        self.questions += 1
        self.asked.append(self.questions)

    def receive(self) -> tuple[Any, str]:
        return Sample(1.0, self.asked.popleft()), ""


def test_a_process_that_is_gone_leaves_no_answer_of_the_others_for_the_next_question() -> None:
    first, second = MadeUpProcess(), MadeUpProcess()
    both, alone = joint_row("both", [first, second], 0), joint_row("alone", [first], 0)
    both.run()
    second.gone = True
    with pytest.raises(Unavailable, match="gone"):
        both.run()
    assert alone.run().amount == first.questions


def test_energy_and_end_to_end_time_belong_to_every_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Meter:
        total = 0.0

        def __init__(self, **_: object) -> None:
            pass

        def read(self) -> dict[str, float]:
            Meter.total += 5.0
            return {"package": Meter.total}

        def unavailable(self) -> str:
            return ""

    monkeypatch.setattr(run_module, "Meter", Meter)
    result = run(tmp_path, "--loops", "2")
    samples = [sample for sample in result.table.rows[0].samples if sample is not None]
    assert [sample.joules for sample in samples] == [{"package": 5.0}] * 2
    assert all(sample.end_to_end is not None and sample.end_to_end >= sample.seconds for sample in samples)
    assert "J/GiB" in (text := report.text(result))
    assert "energy:" not in text


def test_without_the_reference_nothing_is_said_of_it(tmp_path: Path) -> None:
    assert "fio best" not in report.text(run(tmp_path, "--loops", "1"))
