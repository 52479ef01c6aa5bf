"""Stores that are damaged, that lie, or that somebody writes to: the right samples or a clear error."""

from __future__ import annotations

import json
import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nvme_ops.data import Loader, SampleStore
from nvme_ops.data import store as store_module
from nvme_ops.data.index import NAME, DataFile, SampleIndex, read_index, write_index
from nvme_ops.errors import ChecksumError, FormatError
from tests.contract.faulty import flip
from tests.data.samples import data_files, fixed, index_of, index_parts, write, write_fixed, write_tar


def cut(path: Path, nbytes: int) -> None:
    os.truncate(path, nbytes if nbytes >= 0 else path.stat().st_size + nbytes)


def pipe_at(path: Path) -> None:
    path.unlink()
    os.mkfifo(path.with_suffix(".pipe"))
    path.symlink_to(path.with_suffix(".pipe"))


def another_store(path: Path) -> None:
    write(path.parent / "other")
    path.write_bytes(data_files(path.parent / "other")[0].read_bytes())


@pytest.mark.parametrize(
    ("damage", "error", "words"),
    [
        (lambda path: cut(path, -4096), FormatError, "samples-.*: has .* it was cut off or replaced"),
        (lambda path: path.unlink(), FileNotFoundError, "samples-"),
        (another_store, FormatError, "belongs to another store"),
        (pipe_at, OSError, "is no file"),
    ],
)
def test_data_files_that_are_not_those_of_the_index(
    folder: Path, damage: Callable[[Path], object], error: type[Exception], words: str
) -> None:
    write(folder / "store")
    damage(data_files(folder / "store")[0])
    with pytest.raises(error, match=words):
        SampleStore(folder / "store")


def test_a_flipped_bit(folder: Path) -> None:
    write_fixed(folder / "store", 64)
    victim = data_files(folder / "store")[1]
    number = SampleStore(folder / "store").index.files[1].first + 3
    flip(victim, 4096 * 3 + 17)
    store = SampleStore(folder / "store", verify=True)
    with pytest.raises(ChecksumError, match=f"'sample {number}'") as caught:
        store.read(range(64))
    assert caught.value.filename == str(victim)
    assert torch.equal(store[number - 1], fixed(number - 1))


# The index


@pytest.mark.parametrize(
    ("damage", "words"),
    [(lambda path, place=place: flip(path, place, 4), words) for place, words in ((0, "not the index"), (8, "version"))]
    + [(lambda path, place=place: flip(path, place), "damaged") for place in (16, 30, 10_000, 30_000)]
    + [(lambda path, left=left: cut(path, left), "index") for left in (0, 10, 100, 4096, 5000)],
)
def test_a_damaged_index(folder: Path, damage: Callable[[Path], object], words: str) -> None:
    write(folder / "store", 2500)
    damage(folder / "store" / NAME)
    with pytest.raises(FormatError, match=words):
        SampleStore(folder / "store", verify=True)


def lie(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes the header of an index, and its checksum too."""
    header, sections = index_parts((folder / NAME).read_bytes())
    change(header)
    (folder / NAME).write_bytes(index_of(json.dumps(header).encode(), sections))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"record_bytes": 8}, "record_bytes is 8, and the columns have another size"),
        ({"record_bytes": None}, "record_bytes is None, and the columns"),
        ({"records": 1_000_000}, r"cannot hold \d+ records"),
        ({"records": 2**62}, "a size that cannot be"),
        ({"alignment": 0}, "a size that cannot be"),
        ({"alignment": -8}, "a size that cannot be"),
        ({"alignment": "8"}, "a size that cannot be"),
        ({"columns": []}, "columns must not be empty"),
        *[
            ({"alignment": 1 << 61}, "alignment"),
            ({"more": 5}, "no text"),
            ({"id": 5}, "no text"),
            ({"kind": None}, ""),
        ],
        *[({"columns": 5}, "damaged"), ({"sections": 5}, "damaged"), ({"kind": None}, "damaged")],
        *[({"files": [{"name": name, "nbytes": 0, "first": 0}]}, "damaged") for name in (5, "\ud800", "a\0")],
        (lambda header: header["files"][0].update(start=4096), "does not begin with its first record"),
        (lambda header: header["files"][0].update(start=-1), "a size that cannot be"),
        (lambda header: header["files"].reverse(), "files in no possible order"),
        (lambda header: header["sections"]["checksums"].update(offset=1 << 40), "was cut off within section"),
        (lambda header: header["sections"]["checksums"].update(offset=-4096), "was cut off within section"),
    ],
)
def test_a_header_that_cannot_be_true(folder: Path, change: Any, words: str) -> None:
    write_fixed(folder / "store", 64)
    lie(folder / "store", change if callable(change) else lambda header: header.update(change))
    with pytest.raises(FormatError, match=words):
        SampleStore(folder / "store", verify=True)


@pytest.mark.parametrize(
    ("record", "end"), [(5, lambda _: 10**15), (5, lambda _: -7), (5, lambda _: 0), (4, lambda ends: ends[5] + 100_000)]
)
def test_an_index_that_lies_about_places(folder: Path, record: int, end: Callable[[Any], Any]) -> None:
    """By a defect of whoever wrote it: its own checksum is right."""
    write(folder / "store")
    index = read_index(str(folder / "store" / NAME), ("ends", "checksums"))
    assert index.ends is not None
    before = int(index.ends[record])
    index.ends[record] = end(index.ends)
    write_index(str(folder / "store" / NAME), index)
    with pytest.raises(FormatError, match=r"the index is wrong: record \d+ cannot lie"):
        SampleStore(folder / "store").read(range(20))
    index.ends[record] = before - 8  # which could be, and only the checksums tell
    write_index(str(folder / "store" / NAME), index)
    with pytest.raises((ChecksumError, FormatError)):
        SampleStore(folder / "store", verify=True).read(range(20))


def test_an_index_that_names_no_first_file() -> None:
    with pytest.raises(FormatError, match="no possible order"):
        SampleIndex("", "native", 3, [DataFile("x", 1, 5)])


# Files that change while the store is open


def write_over(path: Path, later: int = 1_000_000) -> None:
    """Other bytes in place, as many as before."""
    time.sleep(0.02)  # the clock of file systems ticks that slowly
    before = path.stat()
    with path.open("r+b") as file:
        file.write(b"other" * 100)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + later))  # clocks of file systems may be coarse
    assert path.stat().st_size == before.st_size


@pytest.mark.parametrize("later", [0, 1_000_000])
def test_a_data_file_that_is_written_to_in_place(folder: Path, later: int) -> None:
    write_fixed(folder / "store", 64)
    store = SampleStore(folder / "store")
    reading = store.submit(range(10))
    write_over(data_files(folder / "store")[0], later)
    for do in (reading.samples, reading.samples, lambda: store[3]):
        with pytest.raises(FormatError, match="was replaced or changed while the store was open"):
            do()
    assert torch.equal(store[63], fixed(63)), "other files are what they were"


@pytest.mark.parametrize(
    "change",
    [
        lambda path: path.rename(path.with_suffix(".moved")),
        lambda path: os.link(path, path.with_suffix(".link")),
        lambda path: path.chmod(0o640),
        lambda path: path.unlink(),
    ],
)
def test_a_data_file_whose_bytes_stay_is_the_same(folder: Path, change: Callable[[Path], object]) -> None:
    write_fixed(folder / "store", 64)
    store = SampleStore(folder / "store")
    assert torch.equal(store[3], fixed(3))
    time.sleep(0.02)
    change(data_files(folder / "store")[0])
    assert torch.equal(store[3], fixed(3))
    assert torch.equal(store[4], fixed(4))


def test_a_data_file_that_is_cut_off(folder: Path) -> None:
    write_fixed(folder / "store", 100, shard_bytes="1M")
    store = SampleStore(folder / "store")
    (victim,) = data_files(folder / "store")
    os.truncate(victim, 40_000)
    with pytest.raises(EOFError, match=victim.name):
        store.read([5, 50])
    with pytest.raises(FormatError, match="was cut off"):
        store[5]
    with pytest.raises((EOFError, FormatError), match=victim.name):
        list(Loader(store, 8, prefetch=1))


def test_a_store_that_is_removed_or_replaced_is_read_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_fixed(folder / "store", 64)
    monkeypatch.setattr(store_module, "_AT_ONCE", 1)
    first = SampleStore(folder / "store")
    monkeypatch.undo()
    whole, sent = SampleStore(folder / "store"), pickle.dumps(first)
    assert torch.equal(pickle.loads(sent)[5], fixed(5))
    write_fixed(folder / "store", 64, overwrite=True)
    assert all(torch.equal(each, fixed(number)) for number, each in enumerate(whole.read(range(64))))
    assert torch.equal(first[0], fixed(0))
    with pytest.raises(FileNotFoundError):  # it was not open yet
        first[63]
    with pytest.raises(FormatError, match="was replaced since the process that sent it here opened it"):
        pickle.loads(sent)
    for path in (folder / "store").iterdir():
        path.unlink()
    assert torch.equal(whole[63], fixed(63))
    with pytest.raises(FormatError, match="has no samples"):
        SampleStore(folder / "store")


def test_another_file_of_the_same_bytes_is_not_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_fixed(folder / "store", 62)
    monkeypatch.setattr(store_module, "_MOST", 1)
    monkeypatch.setattr(store_module, "_LEAST", 1)
    store = SampleStore(folder / "store")
    for path in data_files(folder / "store"):
        content = path.read_bytes()
        path.unlink()
        path.write_bytes(content)
    with pytest.raises(FormatError, match="was replaced or changed while the store was open"):
        store.read(range(62))


@pytest.mark.parametrize("later", [0, 1_000_000])
def test_a_tar_that_is_written_to_in_place(folder: Path, later: int) -> None:
    write_tar(folder / "x.tar", range(10))
    store = SampleStore(folder)
    sent = pickle.dumps(store)
    assert len(pickle.loads(sent).read(range(10))) == 10
    write_over(folder / "x.tar", later)
    with pytest.raises(FormatError, match="was changed after its index was made" if later else "while the store"):
        store.read(range(10))
    with pytest.raises(FormatError):  # its index is made again
        SampleStore(folder)
    write_tar(folder / "x.tar", range(11))
    with pytest.raises(FormatError, match="was replaced since"):
        pickle.loads(sent)
    assert len(SampleStore(folder)) == 11
