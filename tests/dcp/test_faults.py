"""nvme_ops.dcp: what is kept when a save fails, and what is found out when files are damaged."""

from __future__ import annotations

import functools
import inspect
import io
import os
import pickle
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

from nvme_ops._native import native
from nvme_ops.checkpoint.dcp.stored import find
from nvme_ops.dcp import NvmeStorageReader, NvmeStorageWriter
from nvme_ops.errors import ChecksumError, FormatError
from tests.conftest import MIB, give_up_root, in_child, open_to_all
from tests.contract.faulty import flip
from tests.dcp.states import equal, files, load, needs_fork, save, state, why, why_of

pytestmark = pytest.mark.filterwarnings("ignore:.*(torch.distributed is disabled|Detected an existing checkpoint)")


# The old checkpoint or the new one


def test_a_new_checkpoint_replaces_the_old_one_and_its_files(tmp_path: Path) -> None:
    for seed in range(3):
        save(tmp_path, seed)
        assert equal(load(NvmeStorageReader(tmp_path)), state(seed))
    assert files(tmp_path) == [".metadata", "__0_2.distcp"]


def test_a_checkpoint_is_kept_where_it_must_not_be_replaced(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with pytest.raises(dcp.CheckpointException, match="FileExistsError"):
        save(tmp_path, 2, overwrite=False)
    assert equal(load(NvmeStorageReader(tmp_path)), state(1))


def killed_at(call: int, body: Callable[[], object]) -> bool:
    """Runs ``body`` in a child that dies just before its ``call``-th call that changes a folder or waits for data."""
    left = call

    def die(real: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **settings)

    child = os.fork()
    if child == 0:
        for name in ("open", "rename", "fdatasync", "fsync", "unlink", "mkdir"):
            setattr(os, name, functools.partial(die, getattr(os, name)))
        torch.set_num_threads(1)
        try:
            body()
        except BaseException:
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL), status
    return status != 0


@needs_fork
@pytest.mark.parametrize("old", [NvmeStorageWriter, pytest.param(dcp.FileSystemWriter, marks=pytest.mark.slow)])
def test_a_killed_save_leaves_the_old_checkpoint_or_the_new_one(old: Any, tmp_path: Path) -> None:
    def few(seed: int) -> dict[str, Any]:
        return {"large": torch.full((MIB,), float(seed)), "small": torch.full((3,), float(seed)), "step": seed}

    dcp.save(few(1), storage_writer=old(tmp_path))
    call, seeds = 1, []
    while killed_at(call, lambda: dcp.save(few(2), storage_writer=NvmeStorageWriter(tmp_path))):
        for reader in (NvmeStorageReader(tmp_path), dcp.FileSystemReader(tmp_path)):
            found = few(99)
            dcp.load(found, storage_reader=reader)
            assert equal(found, few(found["step"]))
        seeds.append(found["step"])
        call += 1
    assert len(seeds) > 5
    assert seeds == sorted(seeds)
    assert set(seeds) == {1, 2}
    save(tmp_path, 3)
    assert len(files(tmp_path)) == 2


def test_a_plan_that_is_kept_does_not_bring_the_old_name_back(tmp_path: Path) -> None:
    try:
        planners = [dcp.DefaultSavePlanner(enable_plan_caching=True) for _ in range(3)]
    except TypeError:
        pytest.skip("this torch keeps no plans")
    for seed, planner in enumerate(planners):
        dcp.save(state(seed), storage_writer=NvmeStorageWriter(tmp_path), planner=planner)
        assert files(tmp_path) == [".metadata", f"__0_{seed}.distcp"]
    assert equal(load(dcp.FileSystemReader(tmp_path)), state(2))


def test_ranks_that_save_alone_keep_each_others_files(tmp_path: Path) -> None:
    if "use_collectives" not in inspect.signature(dcp.save).parameters:
        pytest.skip("ranks of this torch save together")
    (tmp_path / "__1_0.distcp").touch()
    for seed in range(2):
        dcp.save(state(seed), storage_writer=NvmeStorageWriter(tmp_path), use_collectives=False)
    assert files(tmp_path) == ["__0.metadata", "__0_1.distcp", "__1_0.distcp"]
    assert equal(load(NvmeStorageReader(tmp_path)), state(1))


# Damage


def test_a_flipped_bit_anywhere_in_an_item_is_found(tmp_path: Path) -> None:
    save(tmp_path, 1)
    metadata: Metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    for index, info in metadata.storage_data.items():
        if index.fqn == "model.empty":  # DCP asks for none of it
            continue
        for place in {info.offset, info.offset + info.length // 2, info.offset + info.length - 1}:
            flip(tmp_path / info.relative_path, place)
            error = why(NvmeStorageReader(tmp_path, verify=True))
            assert isinstance(error, ChecksumError)
            assert error.tensors == [index.fqn]
            flip(tmp_path / info.relative_path, place)
    assert equal(load(NvmeStorageReader(tmp_path, verify=True)), state(1))


def test_a_flipped_bit_in_the_metadata_is_found(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """And logged: torch before 2.13 raises no more than that there are none."""
    save(tmp_path, 1)
    for place in (20, (tmp_path / ".metadata").stat().st_size // 2):
        flip(tmp_path / ".metadata", place)
        caplog.clear()
        assert "metadata is None" in str(why(NvmeStorageReader(tmp_path)))
        (said,) = [record for record in caplog.records if record.name == "nvme_ops.dcp"]
        assert str(tmp_path / ".metadata") in said.getMessage()
        flip(tmp_path / ".metadata", place)


@pytest.mark.parametrize("writer", [dcp.FileSystemWriter, lambda path: NvmeStorageWriter(path, checksums=False)])
def test_there_must_be_checksums_to_verify(writer: Any, tmp_path: Path) -> None:
    dcp.save(state(1), storage_writer=writer(tmp_path))
    error = why(NvmeStorageReader(tmp_path, verify=True))
    assert isinstance(error, ValueError)
    assert "no checksums" in str(error)


@pytest.mark.parametrize("writer", [NvmeStorageWriter, dcp.FileSystemWriter])
def test_a_truncated_file_is_an_error_that_names_it_and_changes_nothing(writer: Any, tmp_path: Path) -> None:
    dcp.save(state(1), storage_writer=writer(tmp_path))
    os.truncate(tmp_path / "__0_0.distcp", 100_000)
    error = why(NvmeStorageReader(tmp_path))
    assert isinstance(error, FormatError)
    assert "__0_0.distcp" in str(error)
    assert "100000 bytes" in str(error)


def test_a_damaged_file_of_dcp_is_an_error_that_names_it(tmp_path: Path) -> None:
    dcp.save({"large": state(1)["model"]["large"]}, storage_writer=dcp.FileSystemWriter(tmp_path))
    flip(tmp_path / "__0_0.distcp", (tmp_path / "__0_0.distcp").stat().st_size - 20)  # the end of the directory
    found = {"large": torch.zeros(3 * MIB)}
    with pytest.raises(dcp.CheckpointException, match=r"__0_0\.distcp"):
        dcp.load(found, storage_reader=NvmeStorageReader(tmp_path))


def test_what_damage_makes_of_an_item_of_dcp_is_inside_it_or_an_error(tmp_path: Path) -> None:
    file, path, chance = io.BytesIO(), tmp_path / "item", random.Random(1)
    torch.save(torch.zeros(70, 100), file)
    content = file.getvalue()
    described = [*range(700), *range(len(content) - 1000, len(content))]  # all but the data
    outcomes = set()
    for _ in range(2000):
        damaged = bytearray(content)
        for _ in range(chance.choice([1, 1, 3])):
            damaged[chance.choice(described)] = chance.choice([0, 255, chance.randrange(256)])
        path.write_bytes(b"before" + damaged[: chance.choice([len(damaged), chance.randrange(len(damaged))])])
        try:
            stored = find(str(path), 6, path.stat().st_size - 6)
        except FormatError as error:
            outcomes.add("error")
            assert str(path) in str(error)  # noqa: PT017  (most damage is none that matters)
            continue
        outcomes.add("found")
        assert stored is None or stored.start + stored.nbytes <= path.stat().st_size
    assert outcomes == {"error", "found"}


def test_a_missing_file_and_a_missing_checkpoint_are_named(tmp_path: Path) -> None:
    assert str(tmp_path / ".metadata") in str(why(NvmeStorageReader(tmp_path)))
    save(tmp_path, 1)
    (tmp_path / "__0_0.distcp").unlink()
    error = why(NvmeStorageReader(tmp_path))
    assert isinstance(error, FileNotFoundError)
    assert error.filename == str(tmp_path / "__0_0.distcp")


def test_metadata_that_are_something_else_are_an_error(tmp_path: Path) -> None:
    for content in (b"", b"no pickle", pickle.dumps({"a": 1})):
        (tmp_path / ".metadata").write_bytes(content)
        assert ".metadata" in str(why(NvmeStorageReader(tmp_path)))


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    open_to_all(tmp_path)
    native()  # the child may not read where it was built
    save(tmp_path, 1)
    tmp_path.chmod(0o555)

    def body() -> None:
        give_up_root()
        with pytest.raises(dcp.CheckpointException, match="PermissionError"):
            save(tmp_path, 2)

    in_child(body)
    tmp_path.chmod(0o777)
    assert equal(load(NvmeStorageReader(tmp_path)), state(1))
    assert files(tmp_path) == [".metadata", "__0_0.distcp"]


def test_a_disk_that_is_full_leaves_the_old_checkpoint(make_file_system: Callable[..., Path]) -> None:
    path = make_file_system(32 * MIB) / "checkpoint"
    save(path, 1)
    dcp.save({"new": torch.ones(1)}, storage_writer=NvmeStorageWriter(path.with_name("other")))
    writer = NvmeStorageWriter(path)
    with pytest.raises(dcp.CheckpointException, match="No space left"):
        dcp.save({"new": torch.ones(6 * MIB)}, storage_writer=writer)
    assert files(path) == [".metadata", "__0_0.distcp"], "the writer is alive, and holds no lock"
    assert equal(load(NvmeStorageReader(path, verify=True)), state(1))
    assert files(path) == [".metadata", "__0_0.distcp"]


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("kind", ["to_sparse", "to_sparse_csr"])
def test_a_sparse_tensor_is_refused(kind: str, tmp_path: Path) -> None:
    """DCP's planners load nothing to one, and say nothing of it."""
    state = {"dense": torch.ones(3), "thin": getattr(torch.eye(3), kind)()}
    error = why_of(lambda: dcp.save(state, storage_writer=NvmeStorageWriter(tmp_path)))
    assert isinstance(error, ValueError)
    assert "'thin'" in str(error)
    assert "to_dense()" in str(error)
    assert list(tmp_path.glob("*.distcp")) == []
