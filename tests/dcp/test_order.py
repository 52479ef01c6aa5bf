"""NvmeStorageWriter and NvmeStorageReader beside other programs that save to and load from the same folder."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from nvme_ops.checkpoint.dcp.folder import Reading
from nvme_ops.dcp import NvmeStorageReader, NvmeStorageWriter
from tests.conftest import forked, in_threads
from tests.dcp.states import files, needs_fork

pytestmark = pytest.mark.filterwarnings("ignore:.*(torch.distributed is disabled|Detected an existing checkpoint)")


def numbered(number: float) -> dict[str, torch.Tensor]:
    return {f"t{i}": torch.full((1000,), number) for i in range(6)}


def save(path: Path, number: float) -> None:
    dcp.save(numbered(number), storage_writer=NvmeStorageWriter(path))


def number_in(path: Path) -> float:
    state = numbered(-1)
    dcp.load(state, storage_reader=NvmeStorageReader(path, verify=True))
    (value,) = {float(value) for tensor in state.values() for value in tensor}
    return value


def savers_and_loader(path: Path, count: int, rounds: int) -> int:
    """Loads beside so many processes that save; how many saves were seen."""

    def body(number: int) -> None:
        for each in range(rounds):
            save(path, float(number * rounds + each))

    save(path, 0)
    seen: set[float] = set()
    with forked(count, body) as running:
        while running() or not seen:
            seen.add(number_in(path))
    save(path, 1)
    assert number_in(path) == 1
    assert len(files(path)) == 2
    return len(seen)


@needs_fork
def test_processes_that_save_to_one_folder_do_not_mix(tmp_path: Path) -> None:
    assert savers_and_loader(tmp_path, 4, 5) > 1


@needs_fork
@pytest.mark.slow
@pytest.mark.parametrize("count", [4, 8, 16])
def test_many_processes_that_save_to_one_folder_do_not_mix(tmp_path: Path, count: int) -> None:
    savers_and_loader(tmp_path, count, 500 // count + 1)


def test_a_save_leaves_the_files_that_are_being_read(tmp_path: Path) -> None:
    save(tmp_path, 1)
    reading = Reading(str(tmp_path / ".metadata"))
    for number in (2, 3):
        save(tmp_path, number)
    names = {info.relative_path for info in reading.metadata.storage_data.values()}
    assert names <= set(files(tmp_path))
    reading.end()
    save(tmp_path, 4)
    assert files(tmp_path) == [".metadata", files(tmp_path)[1]]
    assert number_in(tmp_path) == 4


def test_a_save_that_failed_holds_up_no_other(tmp_path: Path) -> None:
    class Unsaveable:
        def __reduce__(self) -> str:
            raise ValueError("not to be saved")

    kept = []
    for _ in range(2):
        with pytest.raises(dcp.CheckpointException) as error:
            dcp.save({"a": Unsaveable()}, storage_writer=NvmeStorageWriter(tmp_path))
        kept.append(error)  # and with it the writer
    save(tmp_path, 1)
    assert number_in(tmp_path) == 1


def test_threads_wait_for_each_other(tmp_path: Path) -> None:
    first = NvmeStorageWriter(tmp_path)
    first.set_up_storage_writer(True)
    begun, over = threading.Event(), threading.Event()

    def begin() -> None:
        first.prepare_global_plan([])
        begun.set()
        over.wait()

    thread, saver = threading.Thread(target=begin), threading.Thread(target=save, args=[tmp_path, 1])
    thread.start()
    begun.wait()
    saver.start()
    time.sleep(0.2)
    assert saver.is_alive()
    over.set()
    thread.join()
    assert first._saving is not None
    first._saving.end()
    saver.join()
    assert number_in(tmp_path) == 1


def test_threads_that_save_to_one_folder_do_not_mix(tmp_path: Path) -> None:
    save(tmp_path, 0)
    seen: set[float] = set()

    def work(number: int) -> None:
        for each in range(5):
            if number == 0:
                seen.add(number_in(tmp_path))
            else:
                save(tmp_path, 10.0 * number + each)

    in_threads(work, 4)
    assert seen <= {0.0} | {10.0 * number + each for number in range(1, 4) for each in range(5)}
    assert number_in(tmp_path) in {14.0, 24.0, 34.0}
    save(tmp_path, 1)
    assert len(files(tmp_path)) == 2


def test_a_checkpoint_that_came_while_waiting_is_not_replaced(tmp_path: Path) -> None:
    writer = NvmeStorageWriter(tmp_path, overwrite=False)
    writer.set_up_storage_writer(True)
    save(tmp_path, 1)
    with pytest.raises(FileExistsError):
        writer.prepare_global_plan([])
    save(tmp_path, 2)


def test_ranks_that_found_different_checkpoints_are_told(tmp_path: Path) -> None:
    plans = []
    for number in (1, 2):
        save(tmp_path, number)
        reader = NvmeStorageReader(tmp_path)
        reader.set_up_storage_reader(reader.read_metadata(), True)
        plans.append(reader.prepare_local_plan(dcp.LoadPlan([])))
    with pytest.raises(ValueError, match="a save has replaced the checkpoint while ranks opened it"):
        reader.prepare_global_plan(plans)
    assert reader.prepare_global_plan(plans[1:]) == plans[1:]


def test_a_reader_that_goes_lets_go(tmp_path: Path) -> None:
    save(tmp_path, 1)
    before = len(os.listdir("/proc/self/fd"))
    reader = NvmeStorageReader(tmp_path)
    reader.read_metadata()
    reader.read_metadata()
    del reader
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_system_without_locks_or_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOLCK, "no locks here")

    monkeypatch.setattr(fcntl, "flock", refuse)
    for number in range(3):
        save(tmp_path, number)
        assert number_in(tmp_path) == number
    assert files(tmp_path) == [".metadata", "__0_2.distcp"]
    monkeypatch.setattr(os, "link", refuse)
    save(tmp_path, 3)
    assert files(tmp_path) == [".metadata", "__0_3.distcp"]
    assert number_in(tmp_path) == 3
