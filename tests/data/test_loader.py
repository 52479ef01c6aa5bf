"""Batches: the same order for any number of ranks, resumed anywhere, within a budget; and torch's own loader."""

from __future__ import annotations

import collections
import itertools
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nvme_ops import aio_handle
from nvme_ops.data import Loader, SampleStore, SampleWriter
from nvme_ops.data import loader as module
from nvme_ops.data.order import EpochOrder, Shuffle
from nvme_ops.io.engine import Priority
from tests.conftest import KIB, MIB, in_child, watched
from tests.data.samples import fixed, is_sample, sample, write, write_fixed

SHUFFLES: list[Shuffle] = [False, True, "shards"]


@pytest.fixture
def store(folder: Path) -> SampleStore:
    write(folder / "store", 103)
    return SampleStore(folder / "store")


def test_what_was_loaded_is_counted(store: SampleStore) -> None:
    loader, nbytes = Loader(store, 20), store.index.locate(torch.arange(103))[2]
    batches = iter(loader)
    for count in (1, 2):
        next(batches)
        stats = loader.stats()
        assert (stats.batches, stats.samples) == (count, 20 * count)
        assert stats.bytes_read == nbytes[: 20 * count].sum()
        assert stats.seconds_waited > 0
    assert store.stats().samples == 40, "not those that are being read ahead"
    assert len(list(itertools.chain(batches, loader))) == 4 + 6
    for stats, count in ((loader.stats(), 12), (store.stats(), 0)):
        assert (stats.batches, stats.samples, stats.bytes_read) == (count, 2 * 103, 2 * int(nbytes.sum()))


# The order


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[int, SampleStore]:
    """Stores of so many samples, which are their numbers, in files of twenty."""
    made = {}
    for count in (0, 3, 103):
        folder = tmp_path_factory.mktemp(f"store{count}")
        with SampleWriter(folder, torch.int64, shard_bytes=160, alignment=8) as writer:
            writer.extend(range(count))
        made[count] = SampleStore(folder)
    return made


def steps(order: list[int], start: int, batch: int, ranks: int, drop_last: bool) -> list[list[list[int]]]:
    """The batches of all ranks, step by step."""
    batches, step = [], batch * ranks
    for place in range(start, len(order), step):
        taken = order[place : place + step]
        if len(taken) < step and drop_last:
            break
        share = -(-len(taken) // ranks)
        taken = [*taken, *itertools.islice(itertools.cycle(order), share * ranks - len(taken))]
        batches.append([taken[rank * share : (rank + 1) * share] for rank in range(ranks)])
    return batches


def taken(loaders: list[Loader]) -> list[list[list[int]]]:
    return [[batch.tolist() for batch in step] for step in zip(*loaders, strict=True)]


@settings(max_examples=25)
@given(
    st.sampled_from((0, 3, 103)), st.sampled_from(SHUFFLES), st.sampled_from((None, 0, 3)), st.booleans(),
    st.tuples(st.integers(1, 40), st.integers(1, 8)), st.tuples(st.integers(1, 40), st.integers(1, 8)),
    st.integers(0, 3), st.integers(1, 12),
)  # fmt: skip
def test_ranks_share_one_order_and_resume_anywhere(
    stores: dict[int, SampleStore], count: int, shuffle: Shuffle, prefetch: int | None, drop_last: bool,
    first: tuple[int, int], second: tuple[int, int], epoch: int, stop: int,
) -> None:  # fmt: skip
    """Two runs, with other batches and ranks; the second continues where the first was left."""
    store = stores[count]
    options: dict[str, Any] = {"shuffle": shuffle, "seed": 5, "drop_last": drop_last, "prefetch": prefetch}

    def loaders(batch: int, ranks: int) -> list[Loader]:
        return [Loader(store, batch, rank=rank, num_replicas=ranks, **options) for rank in range(ranks)]

    def order(epoch: int) -> list[int]:
        return EpochOrder(store.index.counts(), shuffle, 5, epoch).at(0, count).tolist()

    ours = loaders(*first)
    for loader in ours:
        loader.set_epoch(epoch)
    expected = steps(order(epoch), 0, *first, drop_last)
    assert {len(loader) for loader in ours} == {len(expected)}
    assert taken(ours) == expected
    assert taken(ours) == steps(order(epoch + 1), 0, *first, drop_last), "then the next epoch"

    one = ours[0]
    one.set_epoch(epoch)
    batches = iter(one)
    done = len(list(itertools.islice(batches, stop)))
    state = json.loads(json.dumps(one.state_dict()))
    position = min(count, done * first[0] * first[1])
    assert state["position"] == position
    rest = steps(order(epoch), position, *second, drop_last)
    if not rest and position:
        epoch, rest = epoch + 1, steps(order(epoch + 1), 0, *second, drop_last)
    theirs = loaders(*second)
    for loader in theirs:
        loader.load_state_dict(state)
        assert loader.state_dict() == state
    assert taken(theirs) == rest
    assert taken(theirs) == steps(order(epoch + 1), 0, *second, drop_last)


def test_set_epoch_right_behind_load_state_dict_goes_on(stores: dict[int, SampleStore]) -> None:
    """The usual loop: for epoch in range(start, stop): loader.set_epoch(epoch)."""
    first, second = (Loader(stores[103], 10, shuffle=True) for _ in range(2))
    first.set_epoch(4)
    batches = iter(first)
    next(batches)
    state = first.state_dict()
    second.load_state_dict(state)
    second.set_epoch(4)
    assert [batch.tolist() for batch in second] == [batch.tolist() for batch in batches]
    for epoch in (4, 5):
        second.set_epoch(epoch)
        assert len(list(second)) == 11, "the same epoch again begins at its beginning, as does another one"
        second.load_state_dict(state)


def test_states_of_something_else(store: SampleStore, folder: Path) -> None:
    state = Loader(store, 5, seed=1).state_dict()
    for wrong in ({"seed": 2}, {"samples": 5}, {"shuffle": True}, {"position": 104}, {"position": -1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Loader(store, 5, seed=1).load_state_dict({**state, **wrong})
    with pytest.raises(KeyError):
        Loader(store, 5).load_state_dict({})
    write(folder / "other", 103, shard_bytes="64K")
    with pytest.raises(ValueError, match="the state has files="):
        Loader(folder / "other", shuffle="shards").load_state_dict(Loader(store, shuffle="shards").state_dict())
    Loader(folder / "other", shuffle=True).load_state_dict(Loader(store, shuffle=True).state_dict())


def test_wrong_arguments(stores: dict[int, SampleStore], monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in (
        {"batch_size": 0}, {"batch_size": 2.5}, {"prefetch": -1}, {"threads": 0, "decode": len}, {"threads": 2},
        {"memory_budget": 0}, {"memory_budget": "many"}, {"shuffle": "files"}, {"rank": 1}, {"shuffle": 1},
        {"rank": 2, "num_replicas": 2}, {"rank": 0, "num_replicas": 2.0}, {"rank": True, "num_replicas": 2},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=rf"{next(iter(wrong))}|num_replicas|decode|size"):
            Loader(stores[3], **wrong)
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(RuntimeError, match="call init_process_group first"):
        Loader(stores[103], 2)
    assert len(Loader(stores[103], 2, rank=1, num_replicas=4)) == 13
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert len(Loader(stores[103], 2)) == 52


# What is made of the samples


def test_batches_of_any_samples(store: SampleStore) -> None:
    for batch in Loader(store, 7, shuffle=True, collate_fn=list):
        assert all(is_sample(member, int(member["label"])) for member in batch)
    batch = next(iter(Loader(store, 7)))
    assert batch["name"] == [f"sample {number}" for number in range(7)]
    assert torch.equal(batch["image"][3], sample(3)["image"])
    pair = collections.namedtuple("pair", "one two")
    (batch, *_) = Loader(store, 8, device="cpu", collate_fn=lambda samples: pair(torch.zeros(1), (1, [2])))
    assert (type(batch), batch.two) == (pair, (1, [2]))


def test_decoding_in_threads(store: SampleStore) -> None:
    seen = set()

    def decode(sample: dict[str, Any]) -> tuple[int, int]:
        seen.add(threading.current_thread().name)
        if int(sample["label"]) == 95:
            raise RuntimeError("cannot decode 95")
        return int(sample["label"]), sample["image"].numel()

    batches, decoded = iter(Loader(store, 10, decode=decode, threads=3)), []
    for _ in range(9):
        decoded += next(batches)[0].tolist()
    with pytest.raises(RuntimeError, match="cannot decode 95"):
        next(batches)
    with pytest.raises(StopIteration):
        next(batches)
    assert decoded == list(range(90))
    assert 1 <= len(seen) <= 3, "a thread that has nothing to do takes the next part"
    assert all(name.startswith("nvme_ops.data") for name in seen)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("nvme_ops.data")]


# Memory, and who waits for what


@pytest.mark.parametrize("kind", ["rows", "a few large"])
def test_reading_ahead_stays_within_the_budget(folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    unit = 64 * KIB
    if kind == "rows":
        write_fixed(folder / "store", 64, unit, shard_bytes="1M")
    else:
        with SampleWriter(folder / "store") as writer:
            writer.extend([b"small"] * 30 + [bytes(unit)] * 12 + [b"small"] * 30)
    begun: list[int] = []
    submit = SampleStore.submit

    def counted(self: SampleStore, *given: Any, **more: Any) -> Any:
        read = submit(self, *given, **more)
        begun.append(read.nbytes)
        return read

    monkeypatch.setattr(SampleStore, "submit", counted)
    for budget, batch in ((16 * unit, 4), (2 * unit, 4), (4 * unit, 6)):
        begun.clear()
        for number, _ in enumerate(Loader(folder / "store", batch, memory_budget=budget, prefetch=50)):
            flying = begun[number:]
            assert sum(flying) <= budget or len(flying) == 1, "a batch larger than the budget is alone"
            assert kind != "rows" or len(flying) == max(1, min(16 - number, budget // (batch * unit))) or batch == 6


def test_what_decode_makes_is_within_the_budget(folder: Path) -> None:
    write_fixed(folder / "store", 200)
    made = 0

    def decode(_: Any) -> torch.Tensor:
        nonlocal made
        made += 1
        return torch.zeros(1 << 16, dtype=torch.uint8)

    for number, _ in enumerate(Loader(folder / "store", 10, decode=decode, threads=1, memory_budget="2M"), 1):
        assert made <= 10 * (number + 3), "three batches of 640 KiB are within 2 MiB"
    assert len(list(Loader(folder / "store", 50, decode=decode, memory_budget="2M"))) == 4, "each exceeds the budget"
    write(folder / "other", 10)
    batches = iter(Loader(folder / "other", 5, memory_budget="64K"))
    next(batches)
    with pytest.raises(ValueError, match=r"sample 9 has 68.* and only 64 KiB are allowed"):
        next(batches)


def test_memory_of_large_batches_is_used_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LARGE", MIB)
    write_fixed(folder / "store", 64, 256 << 10, shard_bytes="4M")
    loader = Loader(folder / "store", 4, memory_budget="4M")
    places = set()
    for number, batch in enumerate(loader):
        assert torch.equal(batch[3], fixed(4 * number + 3, 256 << 10))
        places.add(batch.data_ptr())
        del batch
    assert len(places) <= 6
    in_child(lambda: None)  # has the same pages: the first write would make small ones of huge ones
    assert places.isdisjoint([batch.data_ptr() for batch in loader])
    kept = list(loader)
    assert all(torch.equal(batch[0], fixed(4 * number, 256 << 10)) for number, batch in enumerate(kept))


def test_what_is_waited_for_goes_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_fixed(folder / "store", 100)
    noted = watched(monkeypatch, aio_handle, "submit_preadv", lambda *_, priority, **__: priority)
    assert len(list(Loader(folder / "store", 10))) == len(list(Loader(folder / "store", 10, prefetch=0))) == 10
    assert noted[-20:] == [Priority.DEMAND] + [Priority.PREFETCH] * 9 + [Priority.DEMAND] * 10


# torch's own loader, and what is built on it


def test_a_batch_of_torchs_loader_is_one_request(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_fixed(folder / "store", 64)
    calls = watched(monkeypatch, SampleStore, "read", lambda _, numbers: len(numbers))
    dataset = SampleStore(folder / "store", transform=torch.neg)
    loader, data = torch.utils.data.DataLoader, torch.utils.data
    assert sum(len(batch) for batch in loader(dataset, 16, shuffle=True)) == 64
    sampler = data.BatchSampler(data.SequentialSampler(dataset), 32, drop_last=False)
    assert len(list(loader(dataset, sampler=sampler, batch_size=None))) == 2
    assert calls == [16] * 4 + [32] * 2
    by_workers = torch.cat(list(loader(dataset, 16, num_workers=2, multiprocessing_context="fork")))
    assert torch.equal(by_workers, -torch.stack([fixed(number) for number in range(64)]))


# The order of an epoch: every sample once, the same everywhere, and random enough


@settings(max_examples=30)
@given(st.integers(1, 3000), st.integers(-(2**62), 2**62), st.floats(0, 1), st.floats(0, 1))
def test_everything_comes_once_and_a_part_is_that_of_the_whole(count: int, seed: int, one: float, other: float) -> None:
    order = EpochOrder([count], True, seed, 1)
    whole = order.at(0, count)
    assert torch.equal(whole.sort().values, torch.arange(count))
    start, stop = sorted((int(one * count), int(other * count)))
    assert torch.equal(order.at(start, stop), whole[start:stop])


def test_the_order_is_one_for_all_versions() -> None:
    """Who resumes with a later version must go on in the same order."""
    assert EpochOrder([2000], True, 7, 3).at(0, 8).tolist() == [1226, 581, 41, 1235, 38, 483, 64, 101]
    assert EpochOrder([1000], True, 7, 3).at(0, 8).tolist() == [87, 2, 851, 120, 813, 927, 403, 728]
    order = EpochOrder([6, 5, 6], "shards", 7, 3).at(0, 17).tolist()
    assert order == [12, 16, 13, 11, 14, 15, 10, 6, 7, 8, 9, 2, 1, 3, 5, 4, 0]


def test_shards_come_one_after_the_other() -> None:
    for counts in ([100, 0, 7, 0, 250], [0, 4]):
        order = EpochOrder(counts, "shards", 1, 0).at(0, sum(counts))
        assert sorted(order.tolist()) == list(range(sum(counts)))
        shards = torch.searchsorted(torch.tensor(counts).cumsum(0), order, right=True)
        assert len(shards.unique_consecutive()) == sum(count > 0 for count in counts)
    assert (
        EpochOrder([3000], "shards", 2, 0).at(0, 50).tolist() != EpochOrder([3000], "shards", 1, 0).at(0, 50).tolist()
    )
