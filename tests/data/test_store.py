"""Samples that were written are read: any of them, in any order, from several files, folders, threads and processes."""

from __future__ import annotations

import os
import pickle
import random
import resource
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from nvme_ops import aio_handle
from nvme_ops.data import Loader, SampleStore, SampleWriter, formats
from nvme_ops.data.index import SampleIndex
from tests.conftest import MIB, HandleFactory, in_child, in_threads, pattern, run_python
from tests.data.samples import are_samples, data_files, fixed, is_sample, write, write_fixed

SIZES = {
    "varying": [70_000 + number if number % 10 == 9 else number * 37 % 5000 for number in range(60)],
    "bytes": [1] * 40,
    "pages": [4096] * 100,
    "odd": [5000] * 40,
    "large": [70_001] * 20,
    "very large": [2 << 20] * 5,
    "without bytes": [0, 3, 0, 0],
    "none": [],
}


@pytest.mark.parametrize("alignment", [None, 1, 512, 4096])
@pytest.mark.parametrize("kind", SIZES)
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
        for found in (
            store.read(numbers),
            store.submit(numbers).batch(),
            store.submit(torch.tensor(numbers)).records(),
        ):
            assert all(torch.equal(each, contents[at]) for each, at in zip(found, numbers, strict=True))
        assert name == "varying" or store.submit([]).batch().shape == (0, *rows[1])


def test_columns_from_several_folders(folder: Path, make_handle: HandleFactory) -> None:
    folders = [folder / "one", folder / "two", folder / "three"]
    write(folders)
    assert all(data_files(each) for each in folders)
    with SampleStore(folders[0], handle=make_handle(), verify=True) as store:
        assert are_samples(store.read(range(100)), range(100))
        batch = store.submit([4, 2, -1]).batch()
        assert are_samples([{key: batch[key][k] for key in batch} for k in range(3)], [4, 2, 99])
        assert batch["label"].tolist() == [4, 2, 99]
        assert all(handle.statistics().read_bytes > 0 for handle in store._handles)
        empty = store.submit([]).batch()
        assert (empty["image"], empty["label"].tolist()) == ([], [])


@pytest.mark.parametrize("names", ["zxnb", "zxn"])
def test_elements_are_aligned_whatever_the_records(folder: Path, names: str) -> None:
    columns: dict[str, Any] = {"z": torch.complex128, "n": torch.int8, "x": torch.float64, "b": bytes}
    with SampleWriter(folder, {name: columns[name] for name in names}, alignment=1) as writer:
        for number in range(20):
            values = {"z": complex(number, 1), "n": number, "x": number / 2, "b": bytes(number)}
            writer.add({name: values[name] for name in names})
    batch = SampleStore(folder, verify=True).submit(range(20)).batch()
    assert batch["z"].tolist() == [complex(number, 1) for number in range(20)]
    assert batch["x"].tolist() == [number / 2 for number in range(20)]
    assert batch["n"].tolist() == list(range(20))


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
    hot = [path.read_bytes() for path in data_files(folder / "store")]
    handle = aio_handle()
    SampleStore(folder / "store", handle=handle).read(range(256))
    assert hot
    assert handle.statistics().cached_bytes == 256 * 4096


def test_the_memory_is_the_samples_alone(folder: Path) -> None:
    write_fixed(folder / "store")
    store = SampleStore(folder / "store")
    first, second = store.submit([1, 2]).batch(), store.submit([3, 4]).batch()
    del store, second
    assert torch.equal(first[1], fixed(2))


@pytest.mark.parametrize(
    ("numbers", "error"),
    [
        ([100], IndexError), ([-101], IndexError), ([0, 5, 2**40], IndexError), ([-(2**62)], IndexError),
        ([2**63], IndexError), ([0, -(2**64)], IndexError), (torch.tensor([2**63], dtype=torch.uint64), IndexError),
        (torch.tensor([100], dtype=torch.uint64), IndexError), ([1.5], TypeError), (None, TypeError),
        ({1, 2}, TypeError), ([None], TypeError), ("12", TypeError), (torch.ones(2), TypeError),
        (torch.ones(1, 1, dtype=torch.int64), TypeError), (torch.ones(2, dtype=torch.bool), TypeError),
    ],
)  # fmt: skip
def test_what_is_no_number_of_a_sample(folder: Path, numbers: Any, error: type[Exception]) -> None:
    write(folder / "store")
    store = SampleStore(folder / "store")
    with pytest.raises(error, match="it has 100" if error is IndexError else "must be a sequence of integers"):
        store.read(numbers)
    for one in ("a", slice(0, 2), None, 1.0):
        with pytest.raises(TypeError):
            store[one]  # type: ignore[index]
    assert is_sample(store.read(torch.tensor([2], dtype=torch.uint64))[0], 2)


FILES = 300
USUAL = 40  # descriptors of a process that has just begun to test


def test_few_descriptors_are_enough(folder: Path) -> None:
    with SampleWriter(folder, torch.int64, shard_bytes=8) as writer:
        writer.extend(range(FILES))

    def body() -> None:
        most = 100 + max(0, len(os.listdir("/proc/self/fd")) - USUAL)  # earlier tests of this process may have some
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        with SampleStore(folder) as store:
            orders = [torch.randperm(FILES) for _ in range(5)]
            reads = [store.submit(order) for order in orders]
            assert all(torch.equal(read.batch(), order) for read, order in zip(reads, orders, strict=True))
            for batch in (7, FILES):
                found = torch.cat(list(Loader(store, batch, shuffle=True)))
                assert torch.equal(found.sort().values, torch.arange(FILES))
            assert len(list(Loader(store, 64, shuffle=True, decode=int))) == -(-FILES // 64)
            before = len(os.listdir("/proc/self/fd"))
        assert len(os.listdir("/proc/self/fd")) < before

    in_child(body)


def replace(folder: Path, first: int) -> None:
    with SampleWriter(folder, torch.int64, shard_bytes=8, overwrite=True) as writer:
        writer.extend(range(first, first + 30))


def test_a_store_that_is_replaced_while_it_is_opened(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its index has been read, and its files are gone."""
    replace(folder, 0)
    index_of = formats.index_of

    def late(path: str, checksums: bool = False) -> SampleIndex:
        monkeypatch.undo()
        index = index_of(path, checksums)
        replace(folder, 1000)
        return index

    monkeypatch.setattr(formats, "index_of", late)
    assert [int(each) for each in SampleStore(folder).read([0, 29])] == [1000, 1029]


def test_opening_while_others_replace_it(folder: Path) -> None:
    def work(number: int) -> None:
        if number:
            while not ended.is_set():
                with SampleStore(folder) as store:
                    first, *others = (int(each) for each in store.read([0, 1, 29]))
                    assert others == [first + 1, first + 29]
            return
        try:
            for round_ in range(1, 8):
                replace(folder, 1000 * round_)
        finally:
            ended.set()

    ended = threading.Event()
    replace(folder, 0)
    in_threads(work, 3)
    assert len(os.listdir(folder)) == 30 + 1


def test_threads_share_a_store(folder: Path) -> None:
    write(folder / "store")
    store = SampleStore(folder / "store", verify=True)

    def work(seed: int) -> None:
        chosen = random.Random(seed)
        for _ in range(10):
            numbers = chosen.choices(range(100), k=16)
            assert are_samples(store.read(numbers), numbers)

    in_threads(work, 4)


def test_a_forked_child_uses_the_store(folder: Path) -> None:
    write(folder / "store")
    store = SampleStore(folder / "store")
    ahead = store.submit(range(100))
    in_child(lambda: are_samples(store.read(range(100)), range(100)) or pytest.fail("other samples"))
    assert are_samples(ahead.samples(), range(100))


def test_another_process_opens_it_by_pickle(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(folder / "store")
    monkeypatch.chdir(folder)
    store = SampleStore("store", verify=True)
    monkeypatch.chdir("/")
    (folder / "pickled").write_bytes(pickle.dumps(store))
    assert are_samples(store.read(range(100)), range(100))
    program = "import pickle, sys; print(int(pickle.load(open(sys.argv[1], 'rb'))[7]['label']))"
    assert run_python(program, folder / "pickled").stdout == "7\n"


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


def test_ranges_of_bounded_bytes(folder: Path) -> None:
    sizes = [100] * 5000 + [1 << 20] * 5 + [0, 3 << 20, 7]
    with SampleWriter(folder) as writer:
        writer.extend(bytes(size) for size in sizes)
    found = list(SampleStore(folder).ranges(2 << 20))
    assert [number for each in found for number in each] == list(range(len(sizes)))
    assert all(len(each) == 1 or sum(sizes[number] for number in each) <= 2 << 20 for each in found)
    assert len(found) < 12
