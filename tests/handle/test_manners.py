"""What a user of Python expects of handles and of the package beside their work."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import pickle
from pathlib import Path

import pytest
import torch

import nvme_ops
from nvme_ops import aio_handle
from tests.conftest import pattern


def read_in_another_process(handle: aio_handle, path: Path) -> list[int]:
    found = torch.zeros(1000, dtype=torch.uint8)
    handle.sync_pread(found, path)
    return found.tolist()


def test_a_handle_is_closed_at_the_end_of_a_with_statement(tmp_path: Path) -> None:
    data = pattern(100_001)
    with aio_handle(intra_op_parallelism=2) as handle:
        handle.async_pwrite(data, tmp_path / "file")
    assert (tmp_path / "file").stat().st_size == 100_001  # what was pending is done
    assert handle.closed
    for use in (handle.wait, lambda: handle.read(data, tmp_path / "file"), lambda: handle.backend, handle.statistics):
        with pytest.raises(ValueError, match="the handle is closed"):
            use()


def test_closing_raises_what_was_pending(tmp_path: Path) -> None:
    handle = aio_handle()
    handle.async_pread(torch.zeros(10), tmp_path / "nosuch")
    with pytest.raises(FileNotFoundError):
        handle.close()
    assert handle.closed


def test_a_handle_says_what_it_is_and_is_pickled_by_that() -> None:
    handle = aio_handle(4096, 8, True, False, backend="threads", cache="direct")
    words = (
        "aio_handle(block_size=4096, queue_depth=8, single_submit=True, overlap_events=False, "
        "intra_op_parallelism=None, backend='threads', cache='direct')"
    )
    found = pickle.loads(pickle.dumps(handle))
    assert found is not handle
    assert repr(found) == repr(handle) == words
    handle.close()
    assert repr(handle) == words + " closed"


def test_a_handle_goes_to_another_process(tmp_path: Path) -> None:
    data, handle = pattern(1000), aio_handle(4096)
    handle.sync_pwrite(data, tmp_path / "file")
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        assert pool.submit(read_in_another_process, handle, tmp_path / "file").result() == data.tolist()


# Names of files


@pytest.mark.parametrize(("size", "shards"), [(4000, 3), ("4KB", 3), ("8KiB", 2), ("1GB", 1), (None, 1)])
def test_a_new_folder_has_shards_of_the_size_asked_for(tmp_path: Path, size: int | str | None, shards: int) -> None:
    state = {str(number): torch.ones(1000) for number in range(3)}
    nvme_ops.save(state, f"{tmp_path}/a/b/", max_shard_size=size)
    assert len(list((tmp_path / "a" / "b").glob("*.safetensors"))) == shards
    assert nvme_ops.load(tmp_path / "a" / "b").keys() == state.keys()


def test_other_names_of_torchs_format(tmp_path: Path) -> None:
    nvme_ops.save({"a": 1}, tmp_path / "model.ckpt")
    nvme_ops.save({"a": 1}, tmp_path / "model.state", format="pt")
    assert torch.load(tmp_path / "model.ckpt") == torch.load(tmp_path / "model.state") == {"a": 1}
    assert nvme_ops.load(tmp_path / "model.state", format="pt") == {"a": 1}
