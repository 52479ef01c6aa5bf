"""Each engine of nvme-bench, fio and gdsio among them: what bytes it moves, and what it says where it cannot."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import nvme_ops
from nvme_ops.base.settings import Settings
from nvme_ops.base.text import GIB, KIB, MIB
from nvme_ops.measure import bench, engines, files, fio
from nvme_ops.measure.engines import ENGINES, Contender, Task, _over_files, make_row
from nvme_ops.measure.rows import PERCENTILES, Row, Sample, interleave
from nvme_ops.measure.run import run
from tests.conftest import contents, watched
from tests.made_up import executable

needs_fio = pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")
ABSENT = ("is not installed", "does not load", "this torch has")


def row_of(engine: str, task: Task, settings: Settings | None = None) -> Row:
    return make_row(Contender(engine, settings or Settings(256 * KIB, 8), engine), task)


@pytest.fixture
def make_task(folder: Path) -> Callable[..., Task]:
    """A file of random bytes, and what shall be done with it. A colon separates files for fio."""

    def make(size: int = MIB, write: bool = False, **more: Any) -> Task:
        path = str(folder / "a:b")
        files.make_file(path, size)
        return Task(path, size, write, **more)

    return make


@pytest.mark.parametrize("flags", [["--pageable"], ["--read", "--cached"]], ids=["write", "read"])
def test_a_small_run_of_all_engines(folder: Path, flags: list[str]) -> None:
    """Each pass's bytes are compared; see ``test_wrong_bytes_end_with_status_1`` for a row that moves none."""
    words = ["--folder", str(folder), "--loops", "1", "--no_reference", "--io_size", "4M", *flags, "--engine"]
    result = run(bench.parse([*words, *ENGINES]))
    assert list(folder.iterdir()) == []
    for row in result.table.rows:
        if ENGINES[row.name].gpu_only:
            assert (row.note, row.samples) == ("moves GPU memory only: --device cuda", [])
        elif not any(words in row.note for words in ABSENT):
            assert [sample and sample.amount for sample in row.samples] == [4 * MIB], (row.name, row.note)
        assert not row.wrong
    assert ("fio" in result.blocks) == (shutil.which("fio") is not None and "--cached" not in flags)
    for times in result.blocks.values():
        assert list(times.complete) == list(PERCENTILES)
        assert list(times.complete.values()) == sorted(times.complete.values())


@pytest.mark.parametrize(
    ("engine", "module", "said"),
    [
        ("safetensors", "safetensors", "pip install safetensors"),
        ("deepspeed", "deepspeed", "pip install deepspeed"),
        ("gdsio", "", "apt-get install nvidia-gds"),
        ("fio", "", "apt-get install fio"),
    ],
)
def test_what_is_not_installed_is_said(
    make_task: Callable[..., Task], monkeypatch: pytest.MonkeyPatch, engine: str, module: str, said: str
) -> None:
    task = make_task(write=True, gpu=0 if engine == "gdsio" else None)
    for name in [name for name in sys.modules if name.partition(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if not entry.endswith("-packages")])
    monkeypatch.setattr(engines, "_loaded_deepspeed", engines._loaded_deepspeed.__wrapped__)
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    row = row_of(engine, task)
    interleave([row], 1)
    assert row.note.endswith(f" is not installed: {said}")
    assert row.samples == []


def test_a_handle_is_made_and_asked_as_the_flags_say(
    make_task: Callable[..., Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(64 * KIB, 3, single_submit=True, overlap_events=True, intra_op_parallelism=2)
    asked = watched(monkeypatch, nvme_ops.aio_handle, "pread", lambda _handle, _tensor, _path, *flags: flags)
    made = watched(monkeypatch, nvme_ops, "aio_handle", lambda **given: given)
    for validate in (False, True):
        row_of("aio_handle", make_task(validate=validate), settings).run()
    assert [each for each in made if each] == [settings.as_json()] * 2  # without the task's own handles
    assert asked == [(False, True), (True, True)]
    refused = row_of("aio_handle", make_task(), Settings(intra_op_parallelism=100_000))
    interleave([refused], 1)
    assert "intra_op_parallelism must be at most 1024" in refused.note


def test_deepspeed_is_given_memory_that_it_locked_itself(
    make_task: Callable[..., Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    locked: list[torch.Tensor] = []
    moved: list[torch.Tensor] = []

    class Handle:  # it copies whatever it has not locked itself
        def __init__(self, **_: object) -> None:
            self.wait = lambda: None

        def new_cpu_locked_tensor(self, count: int, like: torch.Tensor) -> torch.Tensor:
            locked.append(torch.empty(count, dtype=like.dtype))
            return locked[-1]

        def pread(self, tensor: torch.Tensor, *_: object) -> None:
            moved.append(tensor)

    monkeypatch.setattr(engines, "_loaded_deepspeed", lambda _: types.SimpleNamespace(aio_handle=Handle))
    for pageable in (False, True):
        row_of("deepspeed", make_task(pageable_memory=pageable)).run()
    assert [len(locked), *(tensor is locked[0] for tensor in moved)] == [1, True, False]


def test_a_pass_starts_with_the_file_in_the_page_cache_or_out_of_it(make_task: Callable[..., Task]) -> None:
    task = make_task()
    if files.cached_share(task.path) is None:
        pytest.skip("this kernel does not say what is in the page cache")
    for name in ("aio_handle", "python", *(["fio"] if shutil.which("fio") else [])):
        row = row_of(name, task)
        for task.cached in (True, False):
            row.before()
            assert files.cached_share(task.path) == int(task.cached), name


def test_all_engines_take_the_same_new_file_in_the_same_pass() -> None:
    task = Task("0", 1, write=False, more_paths=("1", "2"))
    taken: dict[str, list[str]] = {"a": [], "b": []}

    def row(files: list[str]) -> Row:
        def take() -> Sample:
            files.append(task.path)
            return Sample(1, 1)

        return _over_files(task, Row("", take, check=lambda: files.append(task.path)))

    interleave([row(files) for files in taken.values()], 2, warmups=1)
    assert list(taken.values()) == [["0", "0", "1", "2"]] * 2


def job(seconds: float = 0.5, **side: Any) -> dict[str, Any]:
    """What fio says of a job that read."""
    read = {"total_ios": 256, "runtime": int(1000 * seconds), "io_bytes": GIB, **side}
    other = {"total_ios": 0, "runtime": 0, "io_bytes": 0}
    return {"error": 0, "read": read, "write": other, "usr_cpu": 2.0, "sys_cpu": 8.0, "job_runtime": 500}


class MadeUpFio:
    """Instead of starting fio: keeps the command lines, and answers."""

    def __init__(self) -> None:
        self.commands: list[list[str]] = []
        self.job = job()
        self.refuses: list[str] = []  # options that it fails with

    def __call__(self, command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        if any(option in self.refuses for option in command):
            return subprocess.CompletedProcess(command, 1, "", "fio: no such thing here")
        return subprocess.CompletedProcess([], 0, json.dumps({"jobs": [self.job]}), "")


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


def test_fio_failures_keep_its_words() -> None:
    for status, output, errors, words in (
        (0, json.dumps({"jobs": [job(seconds=0)]}), "", "too short to time"),
        (1, "", "fio: engine io_uring not loadable\n", "engine io_uring not loadable"),
        (0, 'fio: pid=1, err=12\n{"jobs": [{"error": 12}]}', "", "err=12"),
        (3, "{}", "", "exit status 3"),
    ):
        with pytest.raises(RuntimeError, match=words):
            fio.read_output(status, output, errors)


def test_fio_is_given_the_settings_and_at_its_best_its_own(
    made_up_fio: MadeUpFio, make_task: Callable[..., Task]
) -> None:
    task = make_task(size=8 * MIB, write=True)
    settings = Settings(64 * KIB, 7)
    for name in ("fio", fio.NAME):
        row_of(name, task, settings).run()
    ours, best = made_up_fio.commands
    name = task.path.replace(":", "\\:")
    assert {f"--filename={name}", "--rw=write", "--bs=65536", "--iodepth=7", "--direct=1"} <= set(ours)
    assert {"--ioengine=io_uring", f"--bs={4 * MIB}", "--iodepth=32", "--iomem=mmaphuge", "--fixedbufs=1"} <= set(best)
    assert [fio.best(size)[0][0][1] for size in (MIB, 3 * MIB + 5, GIB)] == [f"--bs={size * MIB}" for size in (1, 2, 4)]


def test_the_first_variant_that_runs_is_kept_and_what_it_lacks_is_said(
    made_up_fio: MadeUpFio, make_task: Callable[..., Task]
) -> None:
    made_up_fio.refuses = ["--iomem=mmaphuge"]
    row = row_of(fio.NAME, make_task())
    row.run()
    assert row.note == "without huge pages (vm.nr_hugepages)"
    made_up_fio.refuses = []
    row.run()
    assert made_up_fio.commands[3:] == made_up_fio.commands[2:3]
    made_up_fio.refuses = ["--direct=1"]
    row = row_of(fio.NAME, make_task())
    interleave([row], 1)
    assert (row.note, row.samples) == ("failed: RuntimeError: fio: fio: no such thing here", [])
    assert "--ioengine=libaio" in made_up_fio.commands[-1]


@needs_fio
def test_fio_moves_whole_files_once(make_task: Callable[..., Task], folder: Path) -> None:
    size = 4 * MIB  # no multiple of three lanes of blocks
    task = make_task(size, write=True)
    other = str(folder / "other")
    for path in (task.path, other):
        Path(path).write_bytes(bytes(size))
    assert row_of("fio", task, Settings(64 * KIB, 4, intra_op_parallelism=3)).run().amount == size
    options = ["--ioengine=psync", "--bs=64k", "--refill_buffers"]
    assert fio.run("write", [task.path, other], size, options).amount == 2 * size
    for path in (task.path, other):
        pages = contents(Path(path)).view(-1, 4096)
        assert int((pages == 0).all(dim=1).sum()) == 0, "pages that nothing was written to"


GDSIO = (
    "IoType: READ XferType: GPUD Threads: 4 DataSetSize: 1048576/1048576(KiB) IOSize: 1024(KiB) "
    "Throughput: 2.000000 GiB/sec, Avg_Latency: 589.4 usecs ops: 1024 total_time 0.500000 secs\n"
)


def test_gdsio_failures_keep_its_words() -> None:
    assert engines.read_gdsio(0, GDSIO) == Sample(0.5, GIB)
    for status, output, words in ((1, "\nfile register error: 5027\n", "file register error: 5027"),
                                  (0, "nothing useful", "nothing useful"), (5, "", "exit status 5")):  # fmt: skip
        with pytest.raises(RuntimeError, match=f"gdsio: {words}"):
            engines.read_gdsio(status, output)


def test_gdsio_is_told_size_block_size_and_threads(
    make_task: Callable[..., Task], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = tmp_path / "told"
    gdsio = executable(tmp_path / "gdsio", f"echo \"$@\" >> '{told}'\necho '{GDSIO.strip()}'")
    monkeypatch.setattr(shutil, "which", lambda name, **_: str(gdsio) if name == "gdsio" else None)
    task = make_task(size=4 * MIB, write=True, gpu=0)
    row = row_of("gdsio", task, Settings(MIB, intra_op_parallelism=2))
    interleave([row], 1)
    assert row.samples == [Sample(0.5, GIB)]
    path = f"{task.path}.gdsio"
    assert told.read_text().splitlines()[0] == f"-f {path} -d 0 -w 2 -s 4096K -i 1024K -x 2 -I 1"
    assert Path(path).stat().st_size == task.size
