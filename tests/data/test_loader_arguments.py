"""What ``Loader`` refuses to be told, and what it tells the handle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nvme_ops import aio_handle
from nvme_ops.data import Loader, SampleStore, SampleWriter
from nvme_ops.engine import Priority
from tests.data.samples import write_fixed


@pytest.mark.parametrize(
    ("rank", "num_replicas", "words"),
    [
        (0, 0, "num_replicas must be an int of at least 1, not 0"),
        (0, -1, "num_replicas must be an int of at least 1"),
        (0, 2.0, "num_replicas must be an int of at least 1, not 2.0"),
        (0.5, 2, "rank must be an int of at least 0, not 0.5"),
        (-1, 2, "rank must be an int of at least 0, not -1"),
        (True, 2, "rank must be an int of at least 0, not True"),
    ],
)
def test_ranks_that_cannot_be(folder: Path, rank: Any, num_replicas: Any, words: str) -> None:
    write_fixed(folder / "store", 10)
    with pytest.raises(ValueError, match=words):
        Loader(folder / "store", 2, rank=rank, num_replicas=num_replicas)


class Noting(aio_handle):
    """Notes the priority of each request."""

    noted: list[Priority]

    def submit_preadv(self, *given: Any, priority: Priority = Priority.DEMAND, **more: Any) -> Any:
        self.noted.append(priority)
        return super().submit_preadv(*given, priority=priority, **more)


def priorities(folder: Path, **more: Any) -> list[Priority]:
    """Of the requests for an epoch of 10 batches."""
    write_fixed(folder / "store", 100)
    handle = Noting()
    handle.noted = []
    assert len(list(Loader(SampleStore(folder / "store", handle=handle), 10, **more))) == 10
    return handle.noted


def test_what_is_waited_for_goes_first(folder: Path) -> None:
    assert priorities(folder) == [Priority.DEMAND] + [Priority.PREFETCH] * 9


def test_nothing_ahead_is_all_waited_for(folder: Path) -> None:
    assert priorities(folder, prefetch=0) == [Priority.DEMAND] * 10


@pytest.mark.parametrize("epoch", [3, torch.tensor(3)])
def test_set_epoch_takes_any_integer(folder: Path, epoch: Any) -> None:
    write_fixed(folder / "store", 10)
    loader = Loader(folder / "store", 3, shuffle=True)
    loader.set_epoch(epoch)
    assert loader.state_dict()["epoch"] == 3 and type(loader.state_dict()["epoch"]) is int  # noqa: PT018
    assert len(list(loader)) == 4


@pytest.mark.parametrize("epoch", [1.5, "a", None])
def test_an_epoch_that_is_no_integer(folder: Path, epoch: Any) -> None:
    write_fixed(folder / "store", 10)
    with pytest.raises(TypeError):
        Loader(folder / "store", 3).set_epoch(epoch)


def test_set_epoch_right_behind_load_state_dict_goes_on(folder: Path) -> None:
    """The usual loop: for epoch in range(start, stop): loader.set_epoch(epoch)."""
    write_fixed(folder / "store", 26)
    first = Loader(folder / "store", 2, shuffle=True)
    first.set_epoch(4)
    batches = iter(first)
    for _ in range(5):
        next(batches)
    state = first.state_dict()
    rest = list(batches)
    second = Loader(folder / "store", 2, shuffle=True)
    second.load_state_dict(state)
    second.set_epoch(4)
    found = list(second)
    assert len(found) == len(rest) == 8
    assert all(torch.equal(one, other) for one, other in zip(found, rest, strict=True))
    second.set_epoch(4)
    assert len(list(second)) == 13, "and the same epoch again begins at its beginning"
    second.load_state_dict(state)
    second.set_epoch(5)
    assert len(list(second)) == 13, "as does another one"


def test_ranks_that_nobody_has_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_fixed(folder / "store", 10)
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(RuntimeError, match="call init_process_group first"):
        Loader(folder / "store", 2)
    assert len(Loader(folder / "store", 2, rank=1, num_replicas=4)) == 2
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert len(Loader(folder / "store", 2)) == 5


def test_what_decode_makes_is_within_the_budget(folder: Path) -> None:
    write_fixed(folder / "store", 400)
    made = 0

    def decode(sample: Any) -> torch.Tensor:
        nonlocal made
        made += 1
        return torch.zeros(1 << 16, dtype=torch.uint8)

    loader = Loader(folder / "store", 10, decode=decode, threads=1, memory_budget="2M")
    for number, _ in enumerate(loader, 1):
        assert made <= 10 * (number + 3), "three batches of 640 KiB are within 2 MiB"


def test_other_default_devices(folder: Path) -> None:
    write_fixed(folder / "store", 10)
    expected = [each.clone() for each in Loader(folder / "store", 3, shuffle=True)]
    torch.set_default_device("meta")
    try:
        found = list(Loader(folder / "store", 3, shuffle=True))
        assert len(list(Loader(folder / "store", 3, shuffle="shards", rank=0, num_replicas=2))) == 2
        with SampleWriter(folder, torch.float64) as writer:
            writer.extend([1.0, 2.0])
    finally:
        torch.set_default_device(None)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert [float(each) for each in SampleStore(folder).read([0, 1])] == [1.0, 2.0]


def test_a_loader_says_what_it_is(folder: Path) -> None:
    write_fixed(folder / "store", 10)
    assert repr(Loader(folder / "store", 3)).endswith("store': 4 batches of 3, rank 0 of 1>")


def test_a_store_takes_batches_of_a_sampler(folder: Path) -> None:
    """torch's documented pattern for reading in bulk."""
    write_fixed(folder / "store", 10)
    dataset = SampleStore(folder / "store")
    sampler = torch.utils.data.BatchSampler(torch.utils.data.SequentialSampler(dataset), 4, drop_last=False)
    loader = torch.utils.data.DataLoader(dataset, sampler=sampler, batch_size=None)
    assert [len(batch) for batch in loader] == [4, 4, 2]
