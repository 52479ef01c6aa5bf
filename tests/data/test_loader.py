"""Batches: every sample once in an epoch, the same order for any number of ranks, resumed where they were left."""

from __future__ import annotations

import collections
import gc
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from nvme_ops.data import Loader, SampleStore, SampleWriter
from nvme_ops.data.order import Shuffle
from nvme_ops.errors import FormatError
from tests.conftest import MIB, REPOSITORY, in_child, in_threads, run_python
from tests.data.samples import data_files, fixed, is_sample, write, write_fixed

SHUFFLES: list[Shuffle] = [False, True, "shards"]


@pytest.fixture
def store(folder: Path) -> SampleStore:
    write(folder / "store", 103)
    return SampleStore(folder / "store")


def labels(batches: Any) -> list[list[int]]:
    return [batch["label"].tolist() for batch in batches]


def flat(batches: Any) -> list[int]:
    return list(itertools.chain.from_iterable(labels(batches)))


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_every_sample_comes_once(store: SampleStore, shuffle: Shuffle) -> None:
    loader = Loader(store, 10, shuffle=shuffle)
    first, second = flat(loader), flat(loader)
    assert sorted(first) == sorted(second) == list(range(103))
    assert (first == second) == (shuffle is False)
    assert len(loader) == 11
    assert len(labels(loader)[-1]) == 3


def test_samples_are_what_was_written(store: SampleStore) -> None:
    loader = Loader(store, 7, shuffle=True, collate_fn=list)
    for batch in loader:
        assert all(is_sample(found, int(found["label"])) for found in batch)


@pytest.mark.parametrize("shuffle", SHUFFLES)
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_the_order_does_not_depend_on_the_ranks(store: SampleStore, shuffle: Shuffle, ranks: int) -> None:
    alone = flat(Loader(store, 30, shuffle=shuffle, drop_last=True))
    loaders = [
        Loader(store, 30 // ranks, shuffle=shuffle, drop_last=True, rank=rank, num_replicas=ranks)
        for rank in range(ranks)
    ]
    together = [number for step in zip(*map(labels, loaders), strict=True) for batch in step for number in batch]
    assert together == alone


def test_ranks_have_as_many_batches_as_each_other(store: SampleStore) -> None:
    for ranks in (2, 4, 7):
        found = [labels(Loader(store, 8, shuffle=True, rank=rank, num_replicas=ranks)) for rank in range(ranks)]
        assert len({tuple(map(len, batches)) for batches in found}) == 1
        assert {number for batches in found for batch in batches for number in batch} == set(range(103))
        assert len(found[0]) == len(Loader(store, 8, rank=0, num_replicas=ranks))


@pytest.mark.parametrize("shuffle", SHUFFLES)
@pytest.mark.parametrize("prefetch", [None, 0, 3])
def test_it_goes_on_in_mid_epoch(store: SampleStore, shuffle: Shuffle, prefetch: int | None) -> None:
    def made(batch: int = 10) -> Loader:
        return Loader(store, batch, shuffle=shuffle, seed=5, prefetch=prefetch)

    whole = made()
    flat(whole)
    expected = [flat(whole), flat(whole)]
    first = made()
    flat(first)
    batches = iter(first)
    seen = flat(itertools.islice(batches, 4))
    state = first.state_dict()
    assert state["position"] == 40
    for batch in (10, 7):
        second = made(batch)
        second.load_state_dict(state)
        assert second.state_dict() == state
        assert seen + flat(second) == expected[0]
        assert flat(second) == expected[1], "then the next epoch"


def test_it_goes_on_with_other_ranks(store: SampleStore) -> None:
    one = Loader(store, 24, shuffle=True, drop_last=True)
    batches = iter(one)
    next(batches)
    state = one.state_dict()
    rest = flat(batches)
    loaders = [Loader(store, 12, shuffle=True, drop_last=True, rank=rank, num_replicas=2) for rank in range(2)]
    for loader in loaders:
        loader.load_state_dict(state)
    together = [number for step in zip(*map(labels, loaders), strict=True) for batch in step for number in batch]
    assert together == rest


def test_states_of_something_else(store: SampleStore) -> None:
    state = Loader(store, 5, seed=1).state_dict()
    for wrong in ({"seed": 2}, {"samples": 5}, {"shuffle": True}, {"position": 104}, {"position": -1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Loader(store, 5, seed=1).load_state_dict({**state, **wrong})
    with pytest.raises(KeyError):
        Loader(store, 5).load_state_dict({})


def test_epochs_can_be_chosen(store: SampleStore) -> None:
    loader = Loader(store, 10, shuffle=True)
    found = [flat(loader) for _ in range(3)]
    loader.set_epoch(1)
    assert flat(loader) == found[1]
    assert flat(loader) == found[2]


def test_an_iteration_that_is_left(store: SampleStore) -> None:
    loader = Loader(store, 10, shuffle=True)
    for _ in loader:
        break
    gc.collect()
    assert sorted(flat(loader)) == list(range(103))


def test_decoding_in_threads(store: SampleStore) -> None:
    seen = set()

    def decode(sample: dict[str, Any]) -> tuple[int, int]:
        seen.add(threading.current_thread().name)
        return int(sample["label"]), sample["image"].numel()

    found = list(Loader(store, 10, decode=decode, threads=3))
    assert [label for batch in found for label in batch[0].tolist()] == list(range(103))
    assert 1 <= len(seen) <= 3, "a thread that has nothing to do takes the next part"
    assert all(name.startswith("nvme_ops.data") for name in seen)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("nvme_ops.data")]


def test_what_decode_raises_ends_the_iteration(store: SampleStore) -> None:
    def decode(sample: dict[str, Any]) -> int:
        if int(sample["label"]) == 25:
            raise RuntimeError("cannot decode 25")
        return int(sample["label"])

    batches = iter(Loader(store, 10, decode=decode))
    assert next(batches).tolist() == list(range(10))
    next(batches)
    with pytest.raises(RuntimeError, match="cannot decode 25"):
        next(batches)
    with pytest.raises(StopIteration):
        next(batches)


def test_samples_of_one_size_come_as_one_tensor(folder: Path) -> None:
    write_fixed(folder / "store", 50)
    batches = list(Loader(folder / "store", 16))
    assert [tuple(batch.shape) for batch in batches] == [(16, 4096), (16, 4096), (16, 4096), (2, 4096)]


def test_reading_ahead_stays_within_the_budget(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_fixed(folder / "store", 64, MIB, shard_bytes="16M")
    store = SampleStore(folder / "store")
    live: list[int] = []
    submit = SampleStore.submit

    def counted(self: SampleStore, *arguments: Any, **more: Any) -> Any:
        read = submit(self, *arguments, **more)
        live.append(read.nbytes)
        return read

    monkeypatch.setattr(SampleStore, "submit", counted)
    returned = 0
    for batch in Loader(store, 4, memory_budget="16M", prefetch=50):
        returned += batch.nbytes
        assert sum(live) - returned <= 16 * MIB
    live.clear()
    for number, _ in enumerate(Loader(store, 4, memory_budget="2M")):
        assert len(live) <= number + 1, "a batch larger than the budget is alone"


def test_a_sample_larger_than_the_budget(folder: Path) -> None:
    write(folder / "store")
    batches = iter(Loader(folder / "store", 5, memory_budget="64K"))
    next(batches)
    with pytest.raises(ValueError, match=r"sample 9 has 68.* and only 64 KiB are allowed"):
        next(batches)


def test_batches_may_be_kept(folder: Path) -> None:
    write_fixed(folder / "store", 256, 64 << 10)
    kept = list(Loader(folder / "store", 16, memory_budget="2M"))
    assert sum(batch.nbytes for batch in kept) == 256 * (64 << 10)


def test_memory_of_large_batches_is_used_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nvme_ops.data import loader as module

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


def test_a_file_that_is_cut_off_meanwhile(folder: Path) -> None:
    write_fixed(folder / "store", 200, 4096, shard_bytes="64K")
    loader = Loader(folder / "store", 8, prefetch=1)
    batches = iter(loader)
    next(batches)
    for path in data_files(folder / "store"):
        os.truncate(path, 0)
    with pytest.raises((EOFError, FormatError), match="samples-"):  # by what was read ahead of it
        list(batches)


def test_an_empty_store(folder: Path) -> None:
    with SampleWriter(folder):
        pass
    for shuffle in SHUFFLES:
        loader = Loader(folder, 4, shuffle=shuffle)
        assert list(loader) == []
        assert len(loader) == 0
        assert list(Loader(folder, 4, shuffle=shuffle, rank=1, num_replicas=2)) == []


@pytest.mark.parametrize("drop_last", [False, True])
def test_behind_the_last_batch_is_the_next_epoch(store: SampleStore, drop_last: bool) -> None:
    loader = Loader(store, 30, shuffle=True, drop_last=drop_last)
    assert list(loader)
    again = Loader(store, 30, shuffle=True, drop_last=drop_last)
    again.load_state_dict(loader.state_dict())
    assert labels(again) == labels(loader)
    again.set_epoch(5)
    assert again.state_dict()["epoch"] == 5


def test_a_state_of_other_files(folder: Path) -> None:
    for name, size in (("one", 80), ("two", 160)):
        (folder / name).mkdir()
        with SampleWriter(folder / name, torch.int64, shard_bytes=size) as writer:
            writer.extend(range(100))
    state = Loader(folder / "one", shuffle="shards").state_dict()
    with pytest.raises(ValueError, match="the state has files="):
        Loader(folder / "two", shuffle="shards").load_state_dict(state)
    Loader(folder / "two", shuffle=True).load_state_dict(Loader(folder / "one", shuffle=True).state_dict())


def test_a_large_batch_is_read_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with SampleWriter(folder) as writer:
        writer.extend([b"small"] * 30)
        writer.extend([bytes(MIB)] * 12)
        writer.extend([b"small"] * 30)
    begun: list[int] = []
    begin = Loader._begin

    def noted(*given: Any, **more: Any) -> Any:
        batch = begin(*given, **more)
        begun.append(batch.read.nbytes)
        return batch

    monkeypatch.setattr(Loader, "_begin", noted)
    ended = 0
    for number, _ in enumerate(Loader(folder, 6, memory_budget=4 * MIB)):
        flying = begun[number:]
        assert sum(flying) <= 4 * MIB or len(flying) == 1
        ended += 1
    assert ended == len(begun) == 12


def test_a_child_does_not_go_on_with_its_parents_iterator(store: SampleStore) -> None:
    parents = iter(Loader(store, 8, decode=lambda sample: sample["name"], collate_fn=list, threads=2))
    first = next(parents)

    def body() -> None:
        with pytest.raises(RuntimeError, match="forked child iterates over the loader anew"):
            next(parents)

    in_child(body)
    assert next(parents) != first


def test_at_exit_nothing_more_is_decoded(folder: Path) -> None:
    write(folder, 200)
    program = f"""
import time
from nvme_ops.data import Loader
def slow(sample):
    time.sleep(0.2)
    return 1
found = iter(Loader({str(folder)!r}, 4, decode=slow, threads=2))
next(found)
print(time.time())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, check=True, stdout=subprocess.PIPE, text=True
    )
    assert time.time() - float(done.stdout) < 20, "all that is read ahead would take 40 seconds"


def test_batches_keep_their_types(store: SampleStore) -> None:
    pair = collections.namedtuple("pair", "one two")
    (batch, *_) = Loader(store, 8, device="cpu", collate_fn=lambda samples: pair(torch.zeros(1), (1, [2])))
    assert isinstance(batch, pair)
    assert batch.two == (1, [2])


def test_threads_iterate_at_once(store: SampleStore) -> None:
    loaders = [Loader(store, 10, shuffle=True, seed=seed) for seed in range(3)]
    shared = Loader(store, 10)

    def work(number: int) -> None:
        assert sorted(flat(loaders[number])) == list(range(103))
        assert flat(shared) == list(range(103)), "each iteration is its own"

    in_threads(work, 3)


def test_a_child_that_is_forked_in_mid_epoch(store: SampleStore) -> None:
    batches = iter(Loader(store, 10, prefetch=4))
    seen = flat([next(batches)])

    def child() -> None:
        nonlocal batches
        del batches  # what its parent reads ahead is not the child's to wait for
        gc.collect()
        assert flat(Loader(store, 10)) == list(range(103))

    in_child(child)
    assert seen + flat(batches) == list(range(103))


class Interrupted(Exception):  # noqa: N818
    pass


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # raised in a callback, it is lost
def test_a_signal_whose_handler_raises(store: SampleStore) -> None:
    """It ends the iteration, and the next one has every sample."""

    def interrupt(*_: object) -> None:
        raise Interrupted

    loader, interrupted = Loader(store, 3, shuffle=True), 0
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for attempt in range(20):
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.0005 * (1 + attempt))
                flat(loader)
            except Interrupted:
                interrupted += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert interrupted > 0
    assert sorted(flat(loader)) == list(range(103))


@pytest.mark.parametrize(
    "wrong",
    [
        {"batch_size": 0}, {"batch_size": 2.5}, {"prefetch": -1}, {"threads": 0, "decode": len}, {"threads": 2},
        {"memory_budget": 0}, {"memory_budget": "many"}, {"rank": 1}, {"rank": 2, "num_replicas": 2},
        {"shuffle": "files"},
    ],
)  # fmt: skip
def test_wrong_arguments(store: SampleStore, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  (a message for each)
        Loader(store, **wrong)


def test_a_few_samples_for_many_ranks(folder: Path) -> None:
    write(folder / "store", 3)
    found = [flat(Loader(folder / "store", 4, rank=rank, num_replicas=8)) for rank in range(8)]
    assert [len(each) for each in found] == [1] * 8
    assert {each[0] for each in found} == {0, 1, 2}


# torch's own loader, and what is built on it


def double(sample: dict[str, Any]) -> int:
    return int(sample["label"]) * 2


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_of_torchs_loader(store: SampleStore, context: str) -> None:
    dataset = SampleStore(store.path, transform=double)
    loader = torch.utils.data.DataLoader(dataset, 10, num_workers=2, multiprocessing_context=context)
    assert [number for batch in loader for number in batch.tolist()] == [2 * number for number in range(103)]


def test_a_batch_of_torchs_loader_is_one_request(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_fixed(folder / "store", 64)
    calls = []
    read = SampleStore.read

    def counted(self: SampleStore, numbers: Any) -> Any:
        calls.append(len(numbers))
        return read(self, numbers)

    monkeypatch.setattr(SampleStore, "read", counted)
    batches = list(torch.utils.data.DataLoader(SampleStore(folder / "store"), 16, shuffle=True))
    assert calls == [16] * 4
    assert batches[0].shape == (16, 4096)


def test_a_worker_that_is_killed(store: SampleStore) -> None:
    """In a process of its own: torch raises what it learns of a worker wherever the program is at that moment."""
    done = run_python(
        """
        import os, sys, torch
        from nvme_ops.data import SampleStore
        def die(sample):
            if int(sample["label"]) == 50:
                os.kill(os.getpid(), 9)
            return int(sample["label"])
        store = SampleStore(sys.argv[1], transform=die)
        list(torch.utils.data.DataLoader(store, 10, num_workers=1, multiprocessing_context="fork"))
        """,
        store.path,
        check=False,
    )
    assert done.returncode == 1
    # Whether torch sees the signal first, or the end of the worker's pipe, is chance.
    assert re.search(r"RuntimeError: DataLoader worker|ConnectionResetError|EOFError", done.stderr), done.stderr
    assert is_sample(store[3], 3)


def test_the_stateful_loader_of_torchdata(store: SampleStore) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    dataset = SampleStore(store.path, transform=double)
    loader = stateful.StatefulDataLoader(dataset, batch_size=10, num_workers=1, multiprocessing_context="fork")
    batches = iter(loader)
    seen = [next(batches).tolist() for _ in range(3)]
    state = loader.state_dict()
    other = stateful.StatefulDataLoader(dataset, batch_size=10, num_workers=1, multiprocessing_context="fork")
    other.load_state_dict(state)
    rest = [batch.tolist() for batch in other]
    assert list(itertools.chain(*seen, *rest)) == [2 * number for number in range(103)]


def test_accelerate_prepares_it(folder: Path) -> None:
    pytest.importorskip("accelerate")
    write(folder / "store", 20)
    done = run_python(
        """
        import sys, torch
        from accelerate import Accelerator
        from nvme_ops.data import SampleStore
        store = SampleStore(sys.argv[1], transform=lambda sample: int(sample["label"]))
        loader = torch.utils.data.DataLoader(store, 6, shuffle=True)
        prepared = Accelerator(cpu=True).prepare(loader)
        print(sorted(number for batch in prepared for number in batch.tolist()))
        """,
        folder / "store",
    )
    assert done.stdout.splitlines()[-1] == str(list(range(20)))


def test_ranks_of_torch_distributed(folder: Path) -> None:
    write(folder / "store", 40)
    program = """
        import sys, torch
        from nvme_ops.data import Loader
        def work(rank):
            torch.distributed.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
            loader = Loader(sys.argv[1], 5, shuffle=True)
            found = [None] * 2
            torch.distributed.all_gather_object(found, [batch["label"].tolist() for batch in loader])
            if rank == 0:
                print([number for step in zip(*found) for batch in step for number in batch])
            torch.distributed.destroy_process_group()
        torch.multiprocessing.start_processes(work, nprocs=2, start_method="fork")
    """
    done = run_python(program, folder / "store", folder / "rendezvous")
    assert done.stdout.splitlines()[-1] == str(flat(Loader(folder / "store", 10, shuffle=True)))
