"""Files that somebody writes to or replaces while a store is open, or on its way to another process."""

from __future__ import annotations

import os
import pickle
import time
from pathlib import Path

import pytest
import torch

from nvme_ops.data import SampleStore, files
from nvme_ops.errors import FormatError
from tests.data.samples import data_files, fixed, is_sample, write, write_fixed
from tests.data.test_foreign import write_tar


def write_over(path: Path, later: int = 1_000_000) -> None:
    """Other bytes in place, as many as before."""
    before = path.stat()
    with path.open("r+b") as file:
        file.write(b"other" * 100)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + later))  # clocks of file systems may be coarse
    assert path.stat().st_size == before.st_size


@pytest.mark.parametrize("later", [0, 1_000_000])
@pytest.mark.parametrize("verify", [False, True])
def test_a_data_file_that_is_written_to_in_place(folder: Path, verify: bool, later: int) -> None:
    write_fixed(folder / "store", 64)
    store = SampleStore(folder / "store", verify=verify)
    assert torch.equal(store[3], fixed(3))
    time.sleep(0.02)  # the clock of file systems ticks that slowly
    write_over(data_files(folder / "store")[0], later)
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


@pytest.mark.parametrize("change", ["rename", "link", "chmod", "unlink"])
def test_a_data_file_whose_bytes_stay_is_the_same(folder: Path, change: str) -> None:
    write_fixed(folder / "store", 64)
    store = SampleStore(folder / "store")
    assert torch.equal(store[3], fixed(3))
    path = data_files(folder / "store")[0]
    time.sleep(0.02)
    if change == "rename":
        path.rename(path.with_suffix(".moved"))
    elif change == "link":
        os.link(path, folder / "link")
    elif change == "chmod":
        path.chmod(0o640)
    else:
        path.unlink()
    assert torch.equal(store[3], fixed(3))
    assert torch.equal(store[4], fixed(4))


def test_the_index_of_a_tar_is_made_again_when_it_was_written_to(folder: Path) -> None:
    write_tar(folder / "x.tar", range(10))
    SampleStore(folder).close()
    before = (folder / "x.tar").stat()
    time.sleep(0.02)
    content = bytearray((folder / "x.tar").read_bytes())
    content[: len(b"00000000")] = b"renamed0"
    with (folder / "x.tar").open("r+b") as file:
        file.write(content)
    os.utime(folder / "x.tar", ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(FormatError, match="checksum"):
        SampleStore(folder)


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
