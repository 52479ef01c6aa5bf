"""fio as a contender: its output, its command line, and what runs where it lacks something."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nvme_ops.measure import files, fio
from nvme_ops.measure.engines import Contender, Task, make_row
from nvme_ops.measure.rows import PERCENTILES, Row, interleave
from nvme_ops.settings import Settings
from nvme_ops.text import GIB, KIB, MIB
from tests.conftest import contents

needs_fio = pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")


@pytest.fixture
def make_task(folder: Path) -> Callable[..., Task]:
    """A file, and what shall be done with it."""

    def make(size: int = MIB, write: bool = False) -> Task:
        files.make_file(str(folder / "a:b"), size)  # a colon separates files for fio
        return Task(str(folder / "a:b"), size, write)

    return make


def row_of(engine: str, task: Task, settings: Settings | None = None) -> Row:
    return make_row(Contender(engine, settings or Settings(), engine), task)


def job(seconds: float = 0.5, **side: Any) -> dict[str, Any]:
    """What fio says of a job that read."""
    read = {"total_ios": 256, "runtime": int(1000 * seconds), "io_bytes": GIB, **side}
    other = {"total_ios": 0, "runtime": 0, "io_bytes": 0}
    return {"error": 0, "read": read, "write": other, "usr_cpu": 2.0, "sys_cpu": 8.0, "job_runtime": 500}


class MadeUpFio:
    """Instead of starting fio: keeps the command lines, and answers."""

    def __init__(self) -> None:
        self.commands: list[list[str]] = []
        self.answer = subprocess.CompletedProcess([], 0, json.dumps({"jobs": [job()]}), "")
        self.refuses: list[str] = []  # options that it fails with

    def __call__(self, command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        if any(option in self.refuses for option in command):
            return subprocess.CompletedProcess(command, 1, "", "fio: no such thing here")
        return self.answer


@pytest.fixture
def made_up_fio(monkeypatch: pytest.MonkeyPatch) -> MadeUpFio:
    made = MadeUpFio()
    monkeypatch.setattr(fio, "require", lambda: "fio")
    monkeypatch.setattr(fio, "COUNTER", "/none/such")  # nothing is reserved for it
    monkeypatch.setattr(subprocess, "run", made)
    return made


def test_fio_output_is_read() -> None:
    text = "fio: a note\n" + json.dumps({"jobs": [job()]})
    sample = fio.read_output(0, text, "")
    assert sample.rate == 2 * GIB
    assert sample.cpu_per_gib == pytest.approx(0.05)
    assert fio.read_output(0, text, "", operations=True).rate == 512
    both = {**job(), "write": {"total_ios": 256, "runtime": 250, "io_bytes": GIB}}  # of which reading took longer
    assert fio.read_output(0, json.dumps({"jobs": [both]}), "").rate == 4 * GIB


def test_a_job_that_is_too_short_to_time_is_said() -> None:
    with pytest.raises(RuntimeError, match="too short to time"):
        fio.read_output(0, json.dumps({"jobs": [job(seconds=0)]}), "")


@pytest.mark.parametrize(
    ("status", "output", "errors", "words"),
    [
        (1, "", "fio: engine io_uring not loadable\n", "engine io_uring not loadable"),
        (0, 'fio: pid=1, err=12\n{"jobs": [{"error": 12}]}', "", "err=12"),
        (3, "", "", "exit status 3"),
        (0, "{}", "", "exit status 0"),
    ],
)
def test_fio_failures_keep_its_words(status: int, output: str, errors: str, words: str) -> None:
    with pytest.raises(RuntimeError, match=words):
        fio.read_output(status, output, errors)


def test_latencies_are_those_of_the_shares_asked_for(made_up_fio: MadeUpFio, make_task: Callable[..., Task]) -> None:
    times = {"50.000000": 100_000, "90.000000": 200_000, "99.000000": 300_000, "99.900000": 4_000_000}
    document = {"jobs": [job(lat_ns={"percentile": times})]}
    made_up_fio.answer = subprocess.CompletedProcess([], 0, json.dumps(document), "")
    found = fio.latencies("randread", make_task().path, MIB, [])
    assert "--percentile_list=50:90:99:99.9" in made_up_fio.commands[0]
    assert found.count == 256
    assert found.complete == pytest.approx(dict(zip(PERCENTILES, (1e-4, 2e-4, 3e-4, 4e-3), strict=True)))


@pytest.mark.parametrize("direction", ["read", "write"])
def test_fio_is_given_the_settings(made_up_fio: MadeUpFio, make_task: Callable[..., Task], direction: str) -> None:
    task = make_task(write=direction == "write")
    row_of("fio", task, Settings(64 * KIB, 7)).run()
    (command,) = made_up_fio.commands
    name = task.path.replace(":", "\\:")
    assert {f"--filename={name}", f"--rw={direction}", "--bs=65536", "--iodepth=7", "--direct=1"} <= set(command)


def test_the_first_variant_that_runs_is_kept_and_what_it_lacks_is_said(
    made_up_fio: MadeUpFio, make_task: Callable[..., Task]
) -> None:
    made_up_fio.refuses = ["--iomem=mmaphuge"]
    row = row_of(fio.NAME, make_task())
    row.run()
    assert len(made_up_fio.commands) == 3
    assert row.note == "without huge pages (vm.nr_hugepages)"
    made_up_fio.refuses = []
    row.run()
    assert made_up_fio.commands[3:] == made_up_fio.commands[2:3]


def test_where_no_variant_runs_fio_s_words_are_kept(made_up_fio: MadeUpFio, make_task: Callable[..., Task]) -> None:
    made_up_fio.refuses = ["--direct=1"]
    row = row_of(fio.NAME, make_task())
    interleave([row], 1)
    assert (row.note, row.samples) == ("failed: RuntimeError: fio: fio: no such thing here", [])
    assert "--ioengine=libaio" in made_up_fio.commands[-1]


def test_fio_that_is_not_installed_is_said(
    make_task: Callable[..., Task], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    task = make_task()
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    rows = [row_of("fio", task), row_of(fio.NAME, task)]
    interleave(rows, 1)
    assert [row.note for row in rows] == ["fio is not installed: apt-get install fio"] * 2


@needs_fio
@pytest.mark.parametrize("lanes", [1, 2, 3])
def test_fio_moves_the_whole_file_once(make_task: Callable[..., Task], lanes: int) -> None:
    size = 4 * MIB  # no multiple of three lanes of blocks
    task = make_task(size, write=True)
    Path(task.path).write_bytes(bytes(size))
    row = row_of("fio", task, Settings(64 * KIB, 4, intra_op_parallelism=lanes))
    sample = row.run()
    pages = contents(Path(task.path)).view(-1, 4096)
    assert int((pages == 0).all(dim=1).sum()) == 0, "pages that nothing was written to"
    assert sample.amount == size


@needs_fio
def test_a_file_smaller_than_fio_s_best_block_has_a_reference_too(make_task: Callable[..., Task]) -> None:
    task = make_task(MIB)
    rows = [row_of(name, task, Settings(4 * MIB)) for name in (fio.NAME, "fio")]
    interleave(rows, 1)
    assert ["larger than" in row.note for row in rows] == [False, False]


@needs_fio
def test_several_files_are_written_at_once_each_whole(folder: Path) -> None:
    paths = [str(folder / name) for name in ("a", "b:b", "c")]
    for path in paths:
        Path(path).write_bytes(bytes(8 * MIB))
    found = fio.run("write", paths, 8 * MIB, ["--ioengine=psync", "--bs=64k", "--refill_buffers"])
    assert found.amount == 3 * 8 * MIB
    for path in paths:
        content = Path(path).read_bytes()
        assert len(content) == 8 * MIB
        assert all(any(content[start : start + 64 * KIB]) for start in range(0, 8 * MIB, 64 * KIB))


@needs_fio
@pytest.mark.alone
def test_two_at_once_give_their_huge_pages_back(folder: Path) -> None:
    def reserved() -> int:
        return int(Path(fio.COUNTER).read_text(encoding="ascii"))

    if not os.access(fio.COUNTER, os.W_OK):
        pytest.skip("reserving huge pages needs root")
    before, options = reserved(), fio.BEST[1][0]
    failures: list[object] = []

    def work(path: str) -> None:
        files.make_file(path, 8 * MIB)
        for _ in range(2):
            try:
                fio.run("read", path, 8 * MIB, options)
            except RuntimeError as error:
                failures.append(error)

    threads = [threading.Thread(target=work, args=[str(folder / name)]) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    end = time.monotonic() + 10
    while reserved() != before and time.monotonic() < end:  # another run of fio on this machine
        time.sleep(0.1)
    assert reserved() == before
