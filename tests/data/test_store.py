"""Samples that were written are read: any of them, in any order, from several files, folders, threads and processes."""

from __future__ import annotations

import os
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from nvme_ops import aio_handle
from nvme_ops.data import SampleStore, SampleWriter, files
from tests.conftest import MIB, HandleFactory, in_child, in_threads, run_python
from tests.data.samples import data_files, fixed, is_sample, sample, write, write_fixed


def test_every_sample_comes_back(folder: Path, make_handle: HandleFactory) -> None:
    write(folder / "store")
    with SampleStore(folder / "store", handle=make_handle(), verify=True) as store:
        assert len(store) == 100
        assert len(data_files(folder / "store")) > 2
        assert all(is_sample(store[number], number) for number in range(100))
        numbers = random.Random(1).choices(range(-100, 100), k=300)
        found = store.read(numbers)
        assert all(is_sample(each, number % 100) for each, number in zip(found, numbers, strict=True))


@pytest.mark.parametrize("nbytes", [1, 100, 4096, 5000, 64 << 10, 70_001, 2 << 20])
def test_samples_of_one_size_are_one_tensor(folder: Path, nbytes: int) -> None:
    write_fixed(folder / "store", 20, nbytes, shard_bytes=5 * nbytes)
    store = SampleStore(folder / "store", verify=True)
    numbers = [19, 0, 7, 8, 9, -1, 7]
    batch = store.submit(numbers).batch()
    assert batch.shape == (7, nbytes)
    for row, number in zip(batch, numbers, strict=True):
        assert torch.equal(row, fixed(number % 20, nbytes))
    assert torch.equal(store[3], fixed(3, nbytes))


@pytest.mark.parametrize("alignment", [1, 8, 512, 4096])
def test_alignments(folder: Path, alignment: int) -> None:
    write(folder / "store", 60, alignment=alignment)
    store = SampleStore(folder / "store", verify=True)
    assert store.index.alignment == max(8, alignment), "not less than a label's 8 bytes"
    assert all(is_sample(found, number) for number, found in enumerate(store.read(range(60))))


def test_elements_are_aligned_whatever_the_records(folder: Path) -> None:
    columns: dict[str, Any] = {"z": torch.complex128, "n": torch.int8, "x": torch.float64, "b": bytes}
    for name, given in (("varying", columns), ("fixed", {key: columns[key] for key in "znx"})):
        (folder / name).mkdir()
        with SampleWriter(folder / name, given, alignment=1) as writer:
            for number in range(20):
                sample = {"z": complex(number, 1), "n": number, "x": number / 2, "b": bytes(number)}
                writer.add({key: sample[key] for key in given})
        batch = SampleStore(folder / name, verify=True).submit(range(20)).batch()
        assert batch["z"].tolist() == [complex(number, 1) for number in range(20)]
        assert batch["x"].tolist() == [number / 2 for number in range(20)]
        assert batch["n"].tolist() == list(range(20))


def test_pages_are_read_in_place(folder: Path) -> None:
    """The kernel fills the batch itself: no byte is copied."""
    write_fixed(folder / "store", 64, 64 << 10, shard_bytes="1M")
    handle = aio_handle(cache="direct")
    store = SampleStore(folder / "store", handle=handle)
    store.submit(torch.randperm(32) * 2).batch()
    assert handle.statistics().staged_bytes == 0
    assert handle.statistics().read_bytes == 32 * (64 << 10)


def test_neighbours_are_read_together(folder: Path) -> None:
    write_fixed(folder / "store", 256, 4096, shard_bytes="1M")
    handle = aio_handle(cache="direct")
    store = SampleStore(folder / "store", handle=handle)
    numbers = list(range(256))
    random.Random(0).shuffle(numbers)
    batch = store.submit(numbers).batch()
    assert all(torch.equal(row, fixed(number)) for row, number in zip(batch, numbers, strict=True))
    assert handle.statistics().requests <= 4


def test_hot_samples_come_from_the_page_cache(folder: Path) -> None:
    write_fixed(folder / "store", 8, 128 << 10)
    for path in data_files(folder / "store"):
        path.read_bytes()
    handle = aio_handle()
    SampleStore(folder / "store", handle=handle).read(range(8))
    assert handle.statistics().cached_bytes == 8 * (128 << 10)


def test_several_folders_share_the_load(folder: Path) -> None:
    folders = [folder / "one", folder / "two", folder / "three"]
    write(folders)
    assert all(len(data_files(each)) >= 1 for each in folders)
    store = SampleStore(folders[0], verify=True)
    assert len(store._handles) == 3
    assert all(is_sample(found, number) for number, found in enumerate(store.read(range(100))))
    store.submit(torch.randperm(100)).batch()
    assert all(handle.statistics().read_bytes > 0 for handle in store._handles)


def test_a_batch_by_column(folder: Path) -> None:
    write(folder / "store")
    batch = SampleStore(folder / "store").submit([4, 2]).batch()
    assert batch["label"].tolist() == [4, 2]
    assert batch["name"] == ["sample 4", "sample 2"]
    assert torch.equal(batch["image"][1], sample(2)["image"])


def test_the_memory_is_the_samples_alone(folder: Path) -> None:
    write_fixed(folder / "store")
    store = SampleStore(folder / "store")
    first = store.submit([1, 2]).batch()
    second = store.submit([3, 4]).batch()
    assert torch.equal(first[0], fixed(1))
    assert torch.equal(second[0], fixed(3))
    del store, second
    assert torch.equal(first[1], fixed(2))


def test_an_empty_store(folder: Path) -> None:
    for name, columns in (("bytes", None), ("rows", (torch.float32, (3,))), ("none", (torch.float32, (0,)))):
        (folder / name).mkdir()
        with SampleWriter(folder / name, columns):
            pass
        store = SampleStore(folder / name)
        assert len(store) == 0
        assert store.read([]) == []
        with pytest.raises(IndexError, match="no sample 0: it has 0"):
            store[0]


def test_no_samples_at_all(folder: Path) -> None:
    write(folder / "store", 3)
    batch = SampleStore(folder / "store").submit([]).batch()
    assert (batch["image"], batch["name"], batch["label"].tolist()) == ([], [], [])
    write_fixed(folder / "rows", 3)
    assert SampleStore(folder / "rows").submit([]).batch().shape == (0, 4096)


def test_samples_without_bytes(folder: Path) -> None:
    folder = folder / "store"
    folder.mkdir()
    with SampleWriter(folder) as writer:
        writer.extend([b"", b"abc", b"", b""])
    store = SampleStore(folder, verify=True)
    assert [bytes(found.tolist()) for found in store.read([0, 1, 2, 3, 1])] == [b"", b"abc", b"", b"", b"abc"]


@pytest.mark.parametrize("numbers", [[100], [-101], [0, 5, 2**40], [-(2**62)]])
def test_numbers_out_of_range(folder: Path, numbers: list[int]) -> None:
    write(folder / "store")
    store = SampleStore(folder / "store")
    with pytest.raises(IndexError, match=f"no sample {numbers[-1]}: it has 100"):
        store.read(numbers)


@pytest.mark.parametrize(
    "numbers",
    [[2**63], [0, -(2**64)], torch.tensor([2**63], dtype=torch.uint64), torch.tensor([3], dtype=torch.uint64)],
)
def test_numbers_that_no_store_has(folder: Path, numbers: Any) -> None:
    write_fixed(folder / "store", 3)
    store = SampleStore(folder / "store")
    with pytest.raises(IndexError, match="it has 3"):
        store.read(numbers)
    with pytest.raises(IndexError, match="it has 3"):
        store[2**63]
    assert torch.equal(store.read(torch.tensor([2], dtype=torch.uint64))[0], fixed(2))


def test_what_is_no_number(folder: Path) -> None:
    write_fixed(folder / "store", 3)
    store = SampleStore(folder / "store")
    several: tuple[Any, ...] = (torch.ones(2), torch.ones(1, 1, dtype=torch.int64), torch.ones(2, dtype=torch.bool))
    for wrong in ([1.5], None, {1, 2}, [None], *several):
        with pytest.raises(TypeError, match="must be a sequence of integers"):
            store.read(wrong)
    for one in ("a", slice(0, 2), None, 1.0):
        with pytest.raises(TypeError):
            store[one]  # type: ignore[index]
    with pytest.raises(TypeError, match="sequence of integers"):
        store.read("12")  # type: ignore[arg-type]


def test_more_files_than_are_kept_open(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_MOST", 2)
    monkeypatch.setattr(files, "_LEAST", 2)
    write_fixed(folder / "store", 60, shard_bytes="16K")
    assert len(data_files(folder / "store")) > 10
    store = SampleStore(folder / "store", verify=True)
    reads = [store.submit(torch.randperm(60)) for _ in range(5)]
    for read in reads:
        for number, row in zip(read._numbers.tolist(), read.batch(), strict=True):
            assert torch.equal(row, fixed(number))
    assert len(store._files._open) == 2
    before = len(os.listdir("/proc/self/fd"))
    store.close()
    assert len(os.listdir("/proc/self/fd")) < before


def test_threads_share_a_store(folder: Path) -> None:
    write(folder / "store")
    store = SampleStore(folder / "store", verify=True)

    def work(seed: int) -> None:
        chosen = random.Random(seed)
        for _ in range(20):
            numbers = chosen.choices(range(100), k=16)
            assert all(is_sample(found, number) for found, number in zip(store.read(numbers), numbers, strict=True))

    in_threads(work, 4)


def test_a_forked_child_uses_the_store(folder: Path) -> None:
    write(folder / "store")
    store = SampleStore(folder / "store")
    ahead = store.submit(range(100))

    def child() -> None:
        assert all(is_sample(found, number) for number, found in enumerate(store.read(range(100))))

    in_child(child)
    assert all(is_sample(found, number) for number, found in enumerate(ahead.samples()))
    in_child(child)


def test_another_process_opens_it_by_pickle(folder: Path) -> None:
    write(folder / "store")
    store = pickle.loads(pickle.dumps(SampleStore(folder / "store", verify=True)))
    assert is_sample(store[5], 5)
    done = run_python(
        "import pickle, sys; print(int(pickle.load(open(sys.argv[1], 'rb'))[7]['label']))",
        _kept(folder / "pickled", store),
    )
    assert done.stdout == "7\n"


def _kept(path: Path, value: object) -> Path:
    path.write_bytes(pickle.dumps(value))
    return path


def test_a_closed_store(folder: Path) -> None:
    write(folder / "store")
    store = SampleStore(folder / "store")
    read = store.submit([1])
    store.close()
    store.close()
    assert is_sample(read.samples()[0], 1)
    with pytest.raises(ValueError, match="the store is closed"):
        store.read([1])


def test_a_read_that_nobody_waits_for(folder: Path) -> None:
    write_fixed(folder / "store", 64, MIB, shard_bytes="8M")
    store = SampleStore(folder / "store")
    for _ in range(20):
        store.submit(torch.randperm(64))
    store.close()
    assert torch.equal(SampleStore(folder / "store")[5], fixed(5, MIB))


def test_what_it_says_of_itself(folder: Path) -> None:
    write(folder / "store", 3)
    store = SampleStore(folder / "store")
    assert repr(store) == f"<SampleStore {str(folder / 'store')!r}: 3 samples, native>"
    assert repr(store.columns) == "Columns(image: uint8 [-1], label: int64 [], name: str)"
    assert store.nbytes == sum(path.stat().st_size for path in data_files(folder / "store"))


def test_ranges_of_bounded_bytes(folder: Path) -> None:
    sizes = [100] * 5000 + [1 << 20] * 5 + [0, 3 << 20, 7]
    with SampleWriter(folder) as writer:
        writer.extend(bytes(size) for size in sizes)
    store = SampleStore(folder)
    found = list(store.ranges(2 << 20))
    assert [number for each in found for number in each] == list(range(len(sizes)))
    assert all(len(each) == 1 or sum(sizes[number] for number in each) <= 2 << 20 for each in found)
    assert len(found) < 12
    (folder / "empty").mkdir()
    SampleWriter(folder / "empty").close()
    assert list(SampleStore(folder / "empty").ranges(1)) == []
