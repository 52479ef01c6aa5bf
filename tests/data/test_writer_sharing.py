"""SampleWriter used by several threads, and the alignment that it chooses."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from nvme_ops.data import SampleStore, SampleWriter

THREADS, EACH = 4, 500


def test_threads_that_share_a_writer(folder: Path) -> None:
    barrier = threading.Barrier(THREADS)
    numbers: list[list[int]] = [[] for _ in range(THREADS)]
    with SampleWriter(folder, {"value": torch.int64, "text": bytes}, shard_bytes="64K") as writer:

        def work(thread: int) -> None:
            barrier.wait()
            for k in range(EACH):
                text = bytes([thread]) * (1 + k % 300)
                numbers[thread].append(writer.add({"value": thread * EACH + k, "text": text}))

        threads = [threading.Thread(target=work, args=(thread,)) for thread in range(THREADS)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    assert sorted(number for mine in numbers for number in mine) == list(range(THREADS * EACH))
    with SampleStore(folder, verify=True) as store:
        for thread, mine in enumerate(numbers):
            for k, sample in enumerate(store.read(mine)):
                assert int(sample["value"]) == thread * EACH + k
                assert sample["text"].tolist() == [thread] * (1 + k % 300)


@pytest.mark.parametrize("first", [b"", b"x", b"x" * 4000, b"x" * 70000])
def test_the_first_record_does_not_decide_how_much_padding_the_others_have(folder: Path, first: bytes) -> None:
    with SampleWriter(folder) as writer:
        writer.add(first)
        writer.extend(bytes(100) for _ in range(1000))
    store = SampleStore(folder)
    assert store.index.alignment == 8
    assert store.nbytes < len(first) + 1000 * 104 + 2 * 4096


@pytest.mark.parametrize(("length", "alignment"), [(4096, 4096), (4000, 4096), (100, 8), (0, 8), (65536 + 100, 4096)])
def test_records_of_fixed_size_begin_on_pages_where_that_costs_little(
    folder: Path, length: int, alignment: int
) -> None:
    with SampleWriter(folder, (torch.uint8, (length,))) as writer:
        writer.add(bytes(length))
    assert SampleStore(folder).index.alignment == alignment


def test_large_records_of_varying_size_begin_on_pages(folder: Path) -> None:
    sizes = [100_000 + 1000 * (number % 50) for number in range(40)]
    with SampleWriter(folder) as writer:
        for number, size in enumerate(sizes):
            buffer = bytearray([number]) * size
            assert writer.add(buffer) == number
            assert len(writer) == number + 1
            buffer[:] = bytes(size)  # what was added is not changed any more
    store = SampleStore(folder, verify=True)
    assert store.index.alignment == 4096
    for number, sample in enumerate(store.read(range(40))):
        assert sample.numel() == sizes[number]
        assert bool((sample == number).all())


def test_a_store_of_few_or_no_records(folder: Path) -> None:
    (folder / "empty").mkdir()
    SampleWriter(folder / "empty").close()
    assert len(SampleStore(folder / "empty")) == 0
    with SampleWriter(folder) as writer:
        writer.extend([b"", b"", b"abc"])
    assert [bytes(each.tolist()) for each in SampleStore(folder, verify=True).read(range(3))] == [b"", b"", b"abc"]
