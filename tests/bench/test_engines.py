"""Each engine of nvme-bench: one small transfer whose bytes are looked at, and what it says where it
cannot work."""

from __future__ import annotations

import shutil
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import nvme_ops
from nvme_ops.measure import bench, engines, files, stop
from nvme_ops.measure.engines import ENGINES, BenchEngine, Contender, Task, _over_files, handle_row, make_row
from nvme_ops.measure.files import cached_share
from nvme_ops.measure.rows import Row, Sample, interleave
from nvme_ops.measure.run import BenchResult, run
from nvme_ops.settings import Settings
from nvme_ops.text import KIB, MIB
from tests.conftest import contents

SETTINGS = Settings(block_size=256 * KIB, queue_depth=8, overlap_events=True)


def measure(folder: Path, *words: str) -> BenchResult:
    """A run of the flags, in this process where it can be."""
    given = bench.parse(["--folder", str(folder), "--loops", "1", "--no_reference", *words])
    try:
        return run(given)
    finally:
        assert list(folder.iterdir()) == []


def row_of(engine: str, task: Task, settings: Settings = SETTINGS) -> Row:
    return make_row(Contender(engine, settings, engine), task)


@pytest.fixture
def make_task(folder: Path) -> Callable[..., Task]:
    """A file of random bytes, and what shall be done with it."""

    def make(size: int = MIB, write: bool = False, **more: Any) -> Task:
        path = str(folder / "data")
        files.make_file(path, size)
        return Task(path, size, write, **more)

    return make


def fio_is_installed() -> None:
    if shutil.which("fio") is None:
        pytest.skip("fio is not installed")


@pytest.mark.parametrize("direction", ["read", "write"])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_small_run_of_each_engine(folder: Path, engine: str, direction: str) -> None:
    flags = ["--read"] if direction == "read" else []
    result = measure(folder, "--engine", engine, "--io_size", "16M", *flags)
    (row,) = result.table.rows
    if ENGINES[engine].gpu_only:
        assert (row.note, row.samples) == ("moves GPU memory only: --device cuda", [])
        return
    if "is not installed" in row.note or "does not load" in row.note:
        pytest.skip(row.note)
    assert not row.wrong
    assert [sample and sample.amount for sample in row.samples] == [16 * MIB], row.note


@pytest.mark.parametrize("pageable", [False, True], ids=["locked", "pageable"])
@pytest.mark.parametrize("engine", ["aio_handle", "python"])
def test_what_is_read_is_what_the_file_holds(make_task: Callable[..., Task], engine: str, pageable: bool) -> None:
    task = make_task(size=MIB + 5, pageable_memory=pageable)
    row = row_of(engine, task)
    row.before()
    task.buffer.zero_()
    assert row.run().amount == MIB + 5
    assert torch.equal(task.buffer, contents(Path(task.path)))


@pytest.mark.parametrize("engine", ["aio_handle", "python", "torch", "safetensors"])
def test_what_is_written_is_what_the_tensor_holds(make_task: Callable[..., Task], engine: str) -> None:
    if engine == "safetensors":
        pytest.importorskip("safetensors", reason="safetensors is not installed: pip install safetensors")
    task = make_task(size=MIB + 5, write=True)
    row = row_of(engine, task)
    if "is not installed" in row.note:
        pytest.skip(row.note)
    row.before()
    task.buffer.copy_(torch.arange(MIB + 5) % 251)
    row.run()
    if engine == "torch":
        written = torch.load(f"{task.path}.pt")
    elif engine == "safetensors":
        written = pytest.importorskip("safetensors.torch").load_file(f"{task.path}.safetensors")["tensor"]
    else:
        written = contents(Path(task.path))
    assert torch.equal(written, task.buffer)


@pytest.fixture
def liar(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine ``liar`` that moves other bytes than it should."""

    def row(task: Task, name: str, settings: Settings) -> Row:
        def pwrite(tensor: torch.Tensor, path: str, *_: object) -> None:
            Path(path).write_bytes(b"l" * task.size)

        handle = types.SimpleNamespace(pread=lambda tensor, *_: tensor.fill_(7), pwrite=pwrite, wait=lambda: None)
        return handle_row(task, name, handle)

    monkeypatch.setitem(ENGINES, "liar", BenchEngine("made up", row))


@pytest.mark.parametrize("flags", [["--read"], []], ids=["read", "write"])
@pytest.mark.usefixtures("liar")
def test_wrong_bytes_are_found_out(
    folder: Path, flags: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stop, "leave_on_signals", lambda: None)
    words = ["--folder", str(folder), "--io_size", "1M", "--engine", "liar", "python", "--no_reference", *flags]
    assert bench.main(words) == 1
    out, errors = capsys.readouterr()
    assert "WRONG DATA: tensor and file differ" in out
    assert errors == "nvme-bench: wrong data: liar\n"
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("engine", "module", "said"),
    [
        ("safetensors", "safetensors", "safetensors is not installed: pip install safetensors"),
        ("python", "numpy", "NumPy is not installed: pip install numpy"),
        ("deepspeed", "deepspeed", "DeepSpeed is not installed: pip install deepspeed"),
    ],
)
def test_what_is_not_installed_is_said(
    make_task: Callable[..., Task], monkeypatch: pytest.MonkeyPatch, engine: str, module: str, said: str
) -> None:
    task = make_task(write=True)
    for name in [name for name in sys.modules if name.partition(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if not entry.endswith("-packages")])
    monkeypatch.setattr(engines, "_loaded_deepspeed", engines._loaded_deepspeed.__wrapped__)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    row = row_of(engine, task)
    interleave([row], 1)
    assert (row.note, row.samples) == (said, [])


def test_gdsio_that_is_not_installed_is_said(make_task: Callable[..., Task], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    row = row_of("gdsio", make_task(gpu=0))
    interleave([row], 1)
    assert row.note == "gdsio is not installed: apt-get install nvidia-gds"


@pytest.mark.parametrize("validate", [False, True])
def test_validate_is_passed_on(make_task: Callable[..., Task], monkeypatch: pytest.MonkeyPatch, validate: bool) -> None:
    asked: list[object] = []
    pread = nvme_ops.aio_handle.pread

    def spy(handle: Any, tensor: torch.Tensor, path: str, asks: bool, asynchronous: bool) -> int:
        asked.append((asks, asynchronous))
        return pread(handle, tensor, path, asks, asynchronous)

    monkeypatch.setattr(nvme_ops.aio_handle, "pread", spy)
    row_of("aio_handle", make_task(validate=validate)).run()
    assert asked == [(validate, True)]


def test_the_handle_has_the_settings_asked_for(make_task: Callable[..., Task], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []
    kind = nvme_ops.aio_handle

    def make(**settings: Any) -> nvme_ops.aio_handle:
        made.append(settings)
        return kind(**settings)

    monkeypatch.setattr(nvme_ops, "aio_handle", make)
    settings = Settings(64 * KIB, 3, single_submit=True, overlap_events=True, intra_op_parallelism=2)
    row_of("aio_handle", make_task(), settings)
    assert made == [settings.as_json()]


@pytest.mark.parametrize("pageable", [False, True], ids=["locked", "pageable"])
def test_deepspeed_is_given_memory_that_it_locked_itself(
    make_task: Callable[..., Task], monkeypatch: pytest.MonkeyPatch, pageable: bool
) -> None:
    locked: list[torch.Tensor] = []
    moved: list[torch.Tensor] = []

    class Handle:  # it copies whatever it has not locked itself
        def __init__(self, **_: object) -> None:
            pass

        def new_cpu_locked_tensor(self, count: int, like: torch.Tensor) -> torch.Tensor:
            locked.append(torch.empty(count, dtype=like.dtype))
            return locked[-1]

        def pread(self, tensor: torch.Tensor, *_: object) -> None:
            moved.append(tensor)

        def wait(self) -> None:
            pass

    monkeypatch.setattr(engines, "_loaded_deepspeed", lambda _: types.SimpleNamespace(aio_handle=Handle))
    row_of("deepspeed", make_task(pageable_memory=pageable)).run()
    assert [tensor.data_ptr() for tensor in moved] == [moved[0].data_ptr()]
    assert (moved[0].data_ptr() in [tensor.data_ptr() for tensor in locked]) is not pageable


def test_a_setting_that_a_handle_refuses_is_said(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stop, "leave_on_signals", lambda: None)
    try:
        bench.main(["--folder", str(folder), "--io_size", "1M", "--no_reference", "--io_parallel", "100000"])
    except SystemExit as stopped:
        assert stopped.code == 2  # noqa: PT017
    assert "intra_op_parallelism must be at most 1024" in "".join(capsys.readouterr())


def in_page_cache(path: str) -> bool:
    """Whether all of it lies there. Not by a read with RWF_NOWAIT: that begins to read, and may have it in time."""
    share = cached_share(path)
    if share is None:
        pytest.skip("this kernel does not say what is in the page cache")
    assert share in (0, 1)
    return bool(share)


@pytest.mark.parametrize("engine", ["aio_handle", "python", "fio"])
def test_a_pass_starts_with_the_file_in_the_page_cache_or_out_of_it(
    make_task: Callable[..., Task], engine: str
) -> None:
    if engine == "fio":
        fio_is_installed()
    task = make_task()
    row = row_of(engine, task)
    for cached in (True, False, True):
        task.cached = cached
        row.before()
        assert in_page_cache(task.path) is cached


@pytest.mark.parametrize("engine", ["aio_handle", "python", "fio", "torch", "safetensors"])
def test_cached_reads_are_right(folder: Path, engine: str) -> None:
    (row,) = measure(folder, "--engine", engine, "--io_size", "8M", "--read", "--cached").table.rows
    if "is not installed" in row.note:
        pytest.skip(row.note)
    assert not row.wrong
    assert [sample and sample.amount for sample in row.samples] == [8 * MIB], row.note


def test_all_engines_take_the_same_file_in_the_same_round() -> None:
    task = Task("0", 1, write=False, more_paths=("1", "2", "3"))
    taken: dict[str, list[str]] = {name: [] for name in "abc"}

    def row(name: str) -> Row:
        def run() -> Sample:
            taken[name].append(task.path)
            return Sample(1, 1)

        return _over_files(task, Row(name, run))

    interleave([row(name) for name in taken], 3)
    assert taken == {name: ["0", "1", "2", "3"] for name in "abc"}


def test_without_a_warm_up_each_pass_has_a_file_of_its_own_too(folder: Path) -> None:
    given = bench.parse(["--folder", str(folder), "--loops", "2", "--warmup_loops", "0",
                           "--different_file_each_iteration"])  # fmt: skip
    paths = [str(number) for number in range(given.files)]
    task = Task(paths[0], 1, write=False, more_paths=tuple(paths[1:]))
    taken: list[str] = []

    def run() -> Sample:
        taken.append(task.path)
        return Sample(1, 1)

    row = _over_files(task, Row("a", run, check=lambda: taken.append(task.path)))
    interleave([row], given.loops, warmups=given.warmup_loops)
    assert len(taken) == len(set(taken)) == 3  # the check moves bytes too
