"""What a user of Python expects of handles, futures and the package beside their work."""

from __future__ import annotations

import asyncio
import concurrent.futures
import multiprocessing
import pickle
import pydoc
from pathlib import Path

import pytest
import torch

import nvme_ops
from nvme_ops import aio_handle
from nvme_ops.checkpoint import FORMATS
from tests.conftest import pattern, run_python


def read_in_another_process(handle: aio_handle, path: Path) -> list[int]:
    found = torch.zeros(1000, dtype=torch.uint8)
    handle.sync_pread(found, path)
    return found.tolist()


# Handles


def test_a_handle_is_closed_at_the_end_of_a_with_statement(tmp_path: Path) -> None:
    data = pattern(100_001)
    with aio_handle(intra_op_parallelism=2) as handle:
        handle.async_pwrite(data, tmp_path / "file")
    assert (tmp_path / "file").stat().st_size == 100_001  # what was pending is done
    assert handle.closed
    handle.close()
    for use in (handle.wait, lambda: handle.read(data, tmp_path / "file"), lambda: handle.backend):
        with pytest.raises(ValueError, match="the handle is closed"):
            use()


def test_closing_raises_what_was_pending(tmp_path: Path) -> None:
    handle = aio_handle()
    handle.async_pread(torch.zeros(10), tmp_path / "nosuch")
    with pytest.raises(FileNotFoundError):
        handle.close()
    assert handle.closed


def test_a_handle_says_what_it_is() -> None:
    handle = aio_handle(4096, 8, backend="threads", cache="direct")
    words = (
        "aio_handle(block_size=4096, queue_depth=8, single_submit=False, overlap_events=False, "
        "intra_op_parallelism=None, backend='threads', cache='direct')"
    )
    assert repr(handle) == words
    handle.close()
    assert repr(handle) == words + " closed"
    assert repr(aio_handle()).startswith("aio_handle(block_size=1048576, queue_depth=128, ")


def test_a_handle_is_pickled_by_its_settings() -> None:
    handle = aio_handle(4096, 8, True, True, 3, backend="threads", cache="direct")
    found = pickle.loads(pickle.dumps(handle))
    assert repr(found) == repr(handle)
    assert found is not handle


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_handle_goes_to_another_process(tmp_path: Path, method: str) -> None:
    data = pattern(1000)
    handle = aio_handle(4096)
    handle.sync_pwrite(data, tmp_path / "file")
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context(method)) as pool:
        assert pool.submit(read_in_another_process, handle, tmp_path / "file").result() == data.tolist()


# Futures


def test_futures_of_transfers_work_with_concurrent_futures(tmp_path: Path) -> None:
    handle, data = aio_handle(), pattern(1 << 20)
    writes = [handle.submit_pwrite(data, tmp_path / str(number)) for number in range(10)]
    done, left = concurrent.futures.wait(writes, timeout=60)
    assert (done, left) == (set(writes), set())
    reads = [handle.submit_pread(torch.zeros_like(data), tmp_path / str(number)) for number in range(10)]
    assert {future.result() for future in concurrent.futures.as_completed(reads, timeout=60)} == {1 << 20}
    failing = handle.submit_pread(torch.zeros(10), tmp_path / "nosuch")
    done, _ = concurrent.futures.wait([failing], timeout=60, return_when=concurrent.futures.FIRST_EXCEPTION)
    assert isinstance(done.pop().exception(), FileNotFoundError)


def test_among_others(tmp_path: Path) -> None:
    handle = aio_handle()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        mixed = [handle.submit_pwrite(pattern(1000), tmp_path / "file"), pool.submit(int, "7")]
        assert {each.result() for each in concurrent.futures.as_completed(mixed, timeout=60)} == {1000, 7}


def test_a_transfer_cannot_be_cancelled(tmp_path: Path) -> None:
    future = aio_handle().submit_pwrite(pattern(1000), tmp_path / "file")
    assert future.cancel() is False
    assert future.cancelled() is False
    assert future.result() == 1000
    assert future.running() is False


def test_a_save_can_be_awaited(tmp_path: Path) -> None:
    async def work() -> None:
        await nvme_ops.save_async({"a": torch.ones(3)}, tmp_path / "model.safetensors")
        with pytest.raises(IsADirectoryError):
            await nvme_ops.save_async({"a": torch.ones(3)}, tmp_path, format="safetensors")

    asyncio.run(work())
    assert nvme_ops.load(tmp_path / "model.safetensors")["a"].sum() == 3


# The package


def test_the_package_shows_what_there_is_and_nothing_else() -> None:
    program = """
import nvme_ops
print(*dir(nvme_ops))
print(*[name for name in dir(nvme_ops) if not hasattr(nvme_ops, name)])
"""
    shown, missing = run_python(program).stdout.split("\n")[:2]
    assert shown.split() == sorted(nvme_ops.__all__)
    assert missing == ""
    assert {"load", "save", "ChecksumError", "FormatError"} <= set(nvme_ops.__all__)
    help_text = pydoc.plain(pydoc.render_doc(nvme_ops))
    assert "save(obj" in help_text
    assert "importlib" not in help_text


def test_errors_are_at_the_top(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    nvme_ops.save({"a": torch.ones(1000)}, path)
    with path.open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"x")
    with pytest.raises(nvme_ops.ChecksumError):
        nvme_ops.load(path, verify=True)
    path.write_bytes(b"nonsense")
    with pytest.raises(nvme_ops.FormatError):
        nvme_ops.load(path)


# Names of files


def test_a_new_folder_is_made(tmp_path: Path) -> None:
    for name in ("step-1000", "a/b/c/"):
        nvme_ops.save({"a": torch.ones(3)}, f"{tmp_path}/{name}")
        assert (tmp_path / name / "model.safetensors.index.json").exists()
        assert nvme_ops.load(tmp_path / name)["a"].sum() == 3


@pytest.mark.parametrize(("size", "shards"), [(4000, 3), ("4KB", 3), ("8KiB", 2), ("1GB", 1)])
def test_shards_have_the_size_asked_for(tmp_path: Path, size: int | str, shards: int) -> None:
    state = {str(number): torch.ones(1000) for number in range(3)}
    nvme_ops.save(state, tmp_path / "model", max_shard_size=size)
    assert len(list((tmp_path / "model").glob("*.safetensors"))) == shards


def test_a_size_that_is_none_and_one_of_a_single_file_are_errors(tmp_path: Path) -> None:
    for size in ("much", 0, "0", "-1GB"):
        with pytest.raises(ValueError, match="size"):
            nvme_ops.save({}, tmp_path / "model", max_shard_size=size)
    with pytest.raises(ValueError, match="max_shard_size is of checkpoints in several files"):
        nvme_ops.save({}, tmp_path / "model.safetensors", max_shard_size=1000)


def test_other_names_of_torchs_format(tmp_path: Path) -> None:
    nvme_ops.save({"a": 1}, tmp_path / "model.ckpt")
    nvme_ops.save({"a": 1}, tmp_path / "model.state", format="pt")
    assert torch.load(tmp_path / "model.ckpt") == torch.load(tmp_path / "model.state") == {"a": 1}
    assert nvme_ops.load(tmp_path / "model.state", format="pt") == {"a": 1}
    assert set(FORMATS) == {"sharded", "safetensors", "torch"}


@pytest.mark.parametrize("url", ["s3://bucket/model.safetensors", "hf://org/model", "https://host/model.pt"])
def test_a_url_is_told_what_to_do(url: str) -> None:
    for use in (lambda: nvme_ops.load(url), lambda: nvme_ops.save({}, url), lambda: nvme_ops.open(url)):
        with pytest.raises(ValueError, match="copy it to"):
            use()
