"""Samples that were written are read: any of them, in any order, from several files, folders, threads and processes."""

from __future__ import annotations

import json
import os
import pickle
import random
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nvme_ops import aio_handle
from nvme_ops.base.errors import ChecksumError, FormatError
from nvme_ops.data import Loader, SampleStats, SampleStore, SampleWriter, formats
from nvme_ops.data import store as store_module
from nvme_ops.data.index import NAME, SampleIndex, read_index, write_index
from tests.conftest import MIB, in_child, pattern
from tests.contract.faulty import flip
from tests.data.samples import (
    are_samples,
    data_files,
    fixed,
    index_of,
    index_parts,
    is_sample,
    write,
    write_fixed,
    write_tar,
)

SIZES = {
    "varying": [70_000 + number if number % 10 == 9 else number * 37 % 5000 for number in range(60)],
    "bytes": [1] * 40,
    "pages": [4096] * 100,
    "odd": [5000] * 40,
    "large": [70_001] * 20,
    "very large": [2 << 20] * 2,
    "without bytes": [0, 3, 0, 0],
    "none": [],
}


@pytest.mark.parametrize(
    ("kind", "alignment"),
    [
        ("varying", None), ("varying", 1), ("bytes", 4096), ("pages", None), ("odd", 1), ("odd", 512), ("large", 4096),
        ("very large", None), ("without bytes", 512), ("none", None),
    ],
)  # fmt: skip
def test_any_samples_in_any_order(folder: Path, kind: str, alignment: int | None) -> None:
    sizes = SIZES[kind]
    contents = [pattern(size, number) for number, size in enumerate(sizes)]
    rows: Any = (torch.uint8, (sizes[0] if sizes else 4096,))
    for name, columns in {"varying": None, **({"rows": rows} if len({*sizes}) < 2 else {})}.items():
        with SampleWriter(folder / name, columns, alignment=alignment, shard_bytes=200_000) as writer:
            writer.extend(contents)
        store = SampleStore(folder / name, verify=True)
        assert len(store) == len(sizes)
        numbers = random.Random(1).choices(range(-len(sizes), len(sizes)), k=2 * len(sizes)) if sizes else []
        read, tensor = store.submit(numbers), torch.tensor(numbers)
        for samples in (store.read(numbers), read.batch(), store.submit(tensor).records()):
            assert all(torch.equal(sample, contents[at]) for sample, at in zip(samples, numbers, strict=True))
        assert name == "varying" or store.submit([]).batch().shape == (0, *rows[1])


def test_columns_from_several_folders(folder: Path) -> None:
    folders = [folder / "one", folder / "two", folder / "three"]
    write(folders)
    with SampleStore(folders[0], verify=True) as store:
        assert are_samples(store.read(range(100)), range(100))
        batch = store.submit([4, 2, -1]).batch()
        assert are_samples([{key: batch[key][k] for key in batch} for k in range(3)], [4, 2, 99])
        assert batch["label"].tolist() == [4, 2, 99]
        assert all(handle.statistics().read_bytes > 0 for handle in store._handles)
        empty = store.submit([]).batch()
        assert (empty["image"], empty["label"].tolist()) == ([], [])


def test_elements_are_aligned_whatever_the_records(folder: Path) -> None:
    columns: dict[str, Any] = {"z": torch.complex128, "n": torch.int8, "x": torch.float64, "b": bytes}
    samples = [{"z": complex(n, 1), "n": n, "x": n / 2, "b": bytes(n)} for n in range(20)]
    for names in ("zxnb", "zxn"):  # records of varying and of one size
        with SampleWriter(folder / names, {name: columns[name] for name in names}, alignment=1) as writer:
            writer.extend({name: sample[name] for name in names} for sample in samples)
        batch = SampleStore(folder / names, verify=True).submit(range(20)).batch()
        assert all(batch[name].tolist() == [sample[name] for sample in samples] for name in "zxn")


def test_what_a_batch_costs(folder: Path) -> None:
    """The kernel fills the batch itself, neighbours come by one request, and what the page cache has from there."""
    write_fixed(folder / "store", 256, shard_bytes="512K")
    handle = aio_handle(cache="direct")
    store = SampleStore(folder / "store", handle=handle)
    numbers = torch.randperm(256)
    read = store.submit(numbers)
    batch = read.batch()
    assert all(torch.equal(row, fixed(number)) for row, number in zip(batch, numbers.tolist(), strict=True))
    assert batch.untyped_storage().data_ptr() == read.memory.untyped_storage().data_ptr()
    assert handle.statistics().requests <= 8
    before = handle.statistics().staged_bytes
    store.submit(torch.randperm(128) * 2).batch()
    assert handle.statistics().staged_bytes == before
    assert all(path.read_bytes() for path in data_files(folder / "store"))
    handle = aio_handle()
    SampleStore(folder / "store", handle=handle).read(range(256))
    assert handle.statistics().cached_bytes == 256 * 4096


def test_what_is_no_number_of_a_sample(folder: Path) -> None:
    write(folder / "store", 10)
    store = SampleStore(folder / "store")
    beyond: list[Any] = [[10], [-11], [0, -(2**64)], torch.tensor([2**63], dtype=torch.uint64)]
    others: list[Any] = [[1.5], None, {1, 2}, "12", torch.ones(1, 1, dtype=torch.int64), torch.ones(2).bool()]
    for numbers in beyond:
        with pytest.raises(IndexError, match="it has 10"):
            store.read(numbers)
    for numbers in others:
        with pytest.raises(TypeError, match="must be a sequence of integers"):
            store.read(numbers)
    assert is_sample(store.read(torch.tensor([2], dtype=torch.uint64))[0], 2)


def test_few_descriptors_are_enough(folder: Path) -> None:
    count = 150
    with SampleWriter(folder, torch.int64, shard_bytes=8) as writer:
        writer.extend(range(count))

    def body() -> None:
        # earlier tests of this process may have some; 40 are usual when it begins
        most = 100 + max(0, len(os.listdir("/proc/self/fd")) - 40)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        with SampleStore(folder) as store:
            orders = [torch.randperm(count) for _ in range(5)]
            reads = [store.submit(order) for order in orders]
            assert all(torch.equal(read.batch(), order) for read, order in zip(reads, orders, strict=True))
            for batch in (7, count):
                loaded = torch.cat(list(Loader(store, batch, shuffle=True)))
                assert torch.equal(loaded.sort().values, torch.arange(count))
            assert len(list(Loader(store, 50, shuffle=True, decode=int))) == 3
            before = len(os.listdir("/proc/self/fd"))
        assert len(os.listdir("/proc/self/fd")) < before

    in_child(body)


def test_a_store_that_is_replaced_while_it_is_opened(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its index has been read, and its files are gone."""

    def replace(first: int) -> None:
        with SampleWriter(folder, torch.int64, shard_bytes=8, overwrite=True) as writer:
            writer.extend(range(first, first + 30))

    def late(path: str, checksums: bool = False) -> SampleIndex:
        monkeypatch.undo()
        index = formats.index_of(path, checksums)
        replace(1000)
        return index

    replace(0)
    monkeypatch.setattr(formats, "index_of", late)
    assert [int(value) for value in SampleStore(folder).read([0, 29])] == [1000, 1029]


def test_a_closed_store_has_what_is_being_read(folder: Path) -> None:
    write_fixed(folder / "store", 64, MIB // 4, shard_bytes="8M")
    store = SampleStore(folder / "store")
    for _ in range(20):
        store.submit(torch.randperm(64))  # nobody waits for it
    read = store.submit([5])
    store.close()
    store.close()
    assert torch.equal(read.samples()[0], fixed(5, MIB // 4))
    with pytest.raises(ValueError, match="the store is closed"):
        store.read([1])


def test_what_was_read_is_counted_once_and_a_flipped_bit_is_told(folder: Path) -> None:
    write_fixed(folder / "store", 64)
    flip(data_files(folder / "store")[1], 0)
    store = SampleStore(folder / "store", verify=True)
    read = store.submit([1, 2, 2])
    assert store.stats() == SampleStats()
    read.samples()
    read.records()
    stats = store.stats()
    assert (stats.samples, stats.bytes_read) == (3, 3 * 4096)
    assert stats.seconds_waited > 0
    with pytest.raises(ChecksumError) as caught:
        store.read(range(64))
    assert (caught.value.filename, caught.value.tensors) == (str(data_files(folder / "store")[1]), ["sample 32"])
    assert store.stats() == stats


def test_ranges_of_bounded_bytes(folder: Path) -> None:
    sizes = [100] * 5000 + [1 << 20] * 5 + [0, 3 << 20, 7]
    with SampleWriter(folder) as writer:
        writer.extend(map(bytes, sizes))
    ranges = list(SampleStore(folder).ranges(2 << 20))
    assert [number for numbers in ranges for number in numbers] == list(range(len(sizes)))
    assert all(len(numbers) == 1 or sum(sizes[number] for number in numbers) <= 2 << 20 for numbers in ranges)
    assert len(ranges) < 12


# Stores that are damaged, that lie, or that somebody writes to: the right samples or a clear error


def test_data_files_that_are_not_those_of_the_index(folder: Path) -> None:
    write(folder / "other")
    write(folder / "store")
    path = data_files(folder / "store")[0]
    content = path.read_bytes()

    def pipe() -> None:
        os.mkfifo(folder / "pipe")
        path.unlink()
        path.symlink_to(folder / "pipe")

    table: list[tuple[Callable[[], object], type[Exception], str]] = [
        (lambda: path.write_bytes(content[:-4096]), FormatError, "samples-.*: has .* it was cut off or replaced"),
        (lambda: path.write_bytes(data_files(folder / "other")[0].read_bytes()), FormatError, "another store"),
        (pipe, OSError, "is no regular file"),
        (path.unlink, FileNotFoundError, "samples-"),
    ]
    for damage, error, words in table:
        damage()
        with pytest.raises(error, match=words):
            SampleStore(folder / "store")


# The index


def test_a_damaged_index(folder: Path) -> None:
    with SampleWriter(folder) as writer:
        writer.extend(bytes(number % 9) for number in range(2500))  # whose index has several pages
    for place, words in {0: "not the index", 8: "version", 30: "damaged", 10_000: "damaged", 30_000: "damaged"}.items():
        flip(folder / NAME, place, 4)
        with pytest.raises(FormatError, match=words):
            SampleStore(folder, verify=True)
        flip(folder / NAME, place, 4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"record_bytes": 8}, "record_bytes is 8, and the columns have another size"),
        ({"records": 1_000_000}, r"cannot hold \d+ records"),
        ({"alignment": 0}, "an impossible size"),
        ({"alignment": 1 << 61}, "alignment"),
        ({"id": 5}, "no text"),
        ({"kind": "another"}, "an unknown kind"),
        ({"files": [{"name": "a\0", "nbytes": 0, "first": 0}]}, "damaged"),
        (lambda header: header["files"][0].update(start=4096), "does not begin with its first record"),
        (lambda header: header["files"].reverse(), "files in an impossible order"),
        (lambda header: header["sections"]["checksums"].update(offset=1 << 40), "was cut off within section"),
    ],
)
def test_a_header_that_cannot_be_true(folder: Path, change: Any, words: str) -> None:
    write_fixed(folder / "store", 64)
    header, sections = index_parts((folder / "store" / NAME).read_bytes())
    change(header) if callable(change) else header.update(change)
    (folder / "store" / NAME).write_bytes(index_of(json.dumps(header).encode(), sections))
    with pytest.raises(FormatError, match=words):
        SampleStore(folder / "store", verify=True)


def test_an_index_that_lies_about_places(folder: Path) -> None:
    """By a defect of whoever wrote it: its own checksum is right."""
    write(folder / "store", 30)
    path = str(folder / "store" / NAME)
    index = read_index(path, ("ends", "checksums"))
    assert index.ends is not None
    ends = index.ends.clone()
    for record, end in ((5, 10**15), (5, -7), (5, 0), (4, int(ends[5]) + 100_000)):
        index.ends[:] = ends
        index.ends[record] = end
        write_index(path, index)
        with pytest.raises(FormatError, match=r"the index is wrong: record \d+ cannot lie"):
            SampleStore(folder / "store").read(range(20))
    index.ends[:] = ends
    index.ends[5] -= 8  # which could be, and only the checksums tell
    write_index(path, index)
    with pytest.raises((ChecksumError, FormatError)):
        SampleStore(folder / "store", verify=True).read(range(20))


# Files that change while the store is open


def write_over(path: Path, later: int) -> None:
    """Other bytes in place, as many as before."""
    time.sleep(0.02)  # the clock of file systems ticks that slowly
    before = path.stat()
    with path.open("r+b") as file:
        file.write(b"other" * 100)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + later))  # clocks of file systems may be coarse
    assert path.stat().st_size == before.st_size


def test_a_data_file_that_is_written_to_in_place(folder: Path) -> None:
    write_fixed(folder / "store", 64)
    store = SampleStore(folder / "store")
    reading = store.submit(range(10))
    write_over(data_files(folder / "store")[0], later=0)
    for do in (reading.samples, lambda: store[3]):
        with pytest.raises(FormatError, match="was replaced or changed while the store was open"):
            do()
    assert torch.equal(store[63], fixed(63)), "other files are what they were"


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
    monkeypatch.chdir(folder)
    whole, sent = SampleStore("store", verify=True), pickle.dumps(first)
    monkeypatch.chdir("/")
    for restored in (pickle.loads(sent), pickle.loads(pickle.dumps(whole))):
        assert torch.equal(restored[5], fixed(5))
    write_fixed(folder / "store", 64, overwrite=True)
    assert all(torch.equal(sample, fixed(number)) for number, sample in enumerate(whole.read(range(64))))
    assert torch.equal(first[0], fixed(0))
    with pytest.raises(FileNotFoundError):  # it was not open yet
        first[63]
    with pytest.raises(FormatError, match="was replaced since the process that sent it here opened it"):
        pickle.loads(sent)
    for path in (folder / "store").iterdir():
        path.unlink()
    assert torch.equal(whole[63], fixed(63))


def test_another_file_of_the_same_bytes_is_not_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_fixed(folder / "store", 62)
    monkeypatch.setattr(store_module, "_MAX", 1)
    monkeypatch.setattr(store_module, "_MIN", 1)
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
