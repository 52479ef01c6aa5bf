"""Files that somebody writes to or replaces while a store is open, or on its way to another process."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import torch

from nvme_ops.data import SampleStore, files
from nvme_ops.errors import FormatError
from tests.data.samples import data_files, fixed, is_sample, write, write_fixed
from tests.data.test_foreign import write_tar


def write_over(path: Path) -> None:
    """Other bytes in place, as many as before."""
    before = path.stat()
    with path.open("r+b") as file:
        file.write(b"other" * 100)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1_000_000))  # clocks of file systems may be coarse
    assert path.stat().st_size == before.st_size


@pytest.mark.parametrize("verify", [False, True])
def test_a_data_file_that_is_written_to_in_place(folder: Path, verify: bool) -> None:
    write_fixed(folder / "store", 64)
    store = SampleStore(folder / "store", verify=verify)
    assert torch.equal(store[3], fixed(3))
    write_over(data_files(folder / "store")[0])
    with pytest.raises(FormatError, match="was replaced or changed while the store was open"):
        store[3]
    assert torch.equal(store[63], fixed(63)), "other files are what they were"


def test_a_data_file_that_is_written_to_while_it_is_read(folder: Path) -> None:
    write(folder / "store")
    store = SampleStore(folder / "store")
    reading = store.submit(range(100))
    write_over(data_files(folder / "store")[0])
    for _ in range(2):
        with pytest.raises(FormatError, match="was replaced or changed while the store was open"):
            reading.samples()


def test_a_tar_that_is_written_to_in_place(folder: Path) -> None:
    write_tar(folder / "x.tar", range(10))
    store = SampleStore(folder)
    assert len(store.read(range(10))) == 10
    write_over(folder / "x.tar")
    with pytest.raises(FormatError, match="was changed after its index was made"):
        store.read(range(10))


def test_a_store_that_is_replaced_before_another_process_opens_it(folder: Path) -> None:
    write(folder / "store")
    sent = pickle.dumps(SampleStore(folder / "store"))
    assert is_sample(pickle.loads(sent)[5], 5)
    write(folder / "store", 100, overwrite=True)
    with pytest.raises(FormatError, match="was replaced since the process that sent it here opened it"):
        pickle.loads(sent)


def test_a_tar_that_is_replaced_before_another_process_opens_it(folder: Path) -> None:
    write_tar(folder / "x.tar", range(10))
    sent = pickle.dumps(SampleStore(folder))
    assert len(pickle.loads(sent)) == 10
    write_tar(folder / "x.tar", range(11))
    with pytest.raises(FormatError, match="was replaced since"):
        pickle.loads(sent)


def test_files_that_were_not_open_yet_when_the_store_was_replaced(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_AT_ONCE", 1)
    write_fixed(folder / "store", 64)
    store = SampleStore(folder / "store")
    write_fixed(folder / "store", 64, overwrite=True)
    assert torch.equal(store[0], fixed(0))
    with pytest.raises(FileNotFoundError):
        store[63]
