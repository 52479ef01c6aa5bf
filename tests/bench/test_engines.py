"""Each engine of nvme-bench: what bytes it moves, and what it says where it cannot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import nvme_ops
from nvme_ops.base.settings import Settings
from nvme_ops.base.text import KIB, MIB
from nvme_ops.measure import bench, files
from nvme_ops.measure.engines import ENGINES, Contender, Task, make_row
from nvme_ops.measure.rows import Row, interleave
from nvme_ops.measure.run import run
from tests.conftest import watched


def row_of(engine: str, task: Task, settings: Settings | None = None) -> Row:
    return make_row(Contender(engine, settings or Settings(256 * KIB, 8), engine), task)


@pytest.fixture
def make_task(folder: Path) -> Callable[..., Task]:
    """A file of random bytes, and what shall be done with it."""

    def make(**more: bool) -> Task:
        path = str(folder / "data")
        files.make_file(path, MIB)
        return Task(path, MIB, False, **more)  # type: ignore[arg-type]

    return make


@pytest.mark.parametrize("flags", [["--pageable"], ["--read", "--cached"]], ids=["write", "read"])
def test_a_small_run_of_all_engines(folder: Path, flags: list[str]) -> None:
    """Each pass's bytes are compared; see ``test_wrong_bytes_end_with_status_1`` for a row that moves none."""
    words = ["--folder", str(folder), "--loops", "1", "--io_size", "4M", *flags, "--engine"]
    result = run(bench.parse([*words, *ENGINES]))
    assert list(folder.iterdir()) == []
    for row in result.table.rows:
        if ENGINES[row.name].gpu_only:
            assert (row.note, row.samples) == ("moves GPU memory only: --device cuda", [])
        elif "is not installed" not in row.note:
            assert [sample and sample.amount for sample in row.samples] == [4 * MIB], (row.name, row.note)
        assert not row.wrong


def test_a_handle_is_made_and_asked_as_the_flags_say(
    make_task: Callable[..., Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(64 * KIB, 3, single_submit=True, overlap_events=True, intra_op_parallelism=2)
    asked = watched(monkeypatch, nvme_ops.aio_handle, "pread", lambda _handle, _tensor, _path, *flags: flags)
    made = watched(monkeypatch, nvme_ops, "aio_handle", lambda **given: given)
    for validate in (False, True):
        row_of("aio_handle", make_task(validate=validate), settings).run()
    assert [options for options in made if options] == [settings.as_json()] * 2  # without the task's own handles
    assert asked == [(False, True), (True, True)]
    refused = row_of("aio_handle", make_task(), Settings(intra_op_parallelism=100_000))
    interleave([refused], 1)
    assert "intra_op_parallelism must be at most 1024" in refused.note


def test_a_pass_starts_with_the_file_in_the_page_cache_or_out_of_it(make_task: Callable[..., Task]) -> None:
    task = make_task()
    if files.cached_share(task.path) is None:
        pytest.skip("this kernel does not say what is in the page cache")
    for name in ("aio_handle", "python"):
        row = row_of(name, task)
        for task.cached in (True, False):
            row.before()
            assert files.cached_share(task.path) == int(task.cached), name
