"""Which parts of a tensor go to which folder: all of it, once, in proportion to the rates."""

from __future__ import annotations

import errno
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nvme_ops import aio_handle
from nvme_ops.storage import Session, TensorStore, striped
from nvme_ops.storage.slab import Slab
from nvme_ops.storage.striped import Part, Striping, measured
from tests.conftest import KIB, MIB, in_threads, pattern

PAGE = 4 * KIB
weights_of = st.lists(st.floats(1e-3, 1e12), min_size=1, max_size=8)


@pytest.fixture
def places(folder: Path) -> list[Path]:
    found = [folder / name for name in "abc"]
    for place in found:
        place.mkdir()
    return found


@given(weights_of, st.integers(0, 1 << 40))
def test_the_parts_are_the_tensor(weights: list[float], nbytes: int) -> None:
    parts = Striping(weights).parts(nbytes)
    assert [part.begin for part in parts] == [0, *(part.begin + part.nbytes for part in parts)][:-1]
    assert sum(part.nbytes for part in parts) == nbytes
    assert all(part.nbytes % PAGE == 0 for part in parts[:-1])
    folders = [part.folder for part in parts]
    assert folders == sorted(set(folders))
    assert set(folders) <= set(range(len(weights)))


@given(weights_of, st.integers(8 * MIB, 1 << 40))
def test_large_tensors_are_divided_by_the_weights(weights: list[float], nbytes: int) -> None:
    parts = {part.folder: part.nbytes for part in Striping(weights).parts(nbytes)}
    for folder, weight in enumerate(weights):
        assert abs(parts.get(folder, 0) - nbytes * weight / sum(weights)) <= PAGE + nbytes * 1e-9


@given(st.lists(st.floats(0.5, 20), min_size=2, max_size=5), st.lists(st.integers(1, 8 * MIB - 1), min_size=50))
def test_small_tensors_stay_whole_and_are_balanced(weights: list[float], sizes: list[int]) -> None:
    striping, given_to = Striping(weights), [0.0] * len(weights)
    for size in sizes:
        (part,) = striping.parts(size)
        assert (part.begin, part.nbytes) == (0, size)
        given_to[part.folder] += size
    busy = [amount / weight for amount, weight in zip(given_to, weights, strict=True)]
    assert max(busy) - min(busy) <= max(sizes) / min(weights) + 1


@pytest.mark.parametrize("weights", [[], [0.0], [1.0, -1.0], [math.nan, 1.0], [1.0, math.inf]])
def test_weights_are_positive_numbers(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="weights must be positive"):
        Striping(weights)


def test_weights_are_as_many_as_folders(places: list[Path]) -> None:
    with Session(places, name="job") as session:
        with pytest.raises(ValueError, match="2 weights for 3 folders"):
            TensorStore(session, weights=[1, 1])
        with pytest.raises(ValueError, match="positive"):
            TensorStore(session, weights=[1, 0, 1])
        TensorStore(session, weights=torch.ones(3).tolist())  # nothing has stayed of those


def test_rates_are_measured_once_at_the_first_put(places: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def counted(*arguments: Any) -> list[float]:
        calls.append(1)
        return measured(*arguments)

    monkeypatch.setattr("nvme_ops.storage.striped.measured", counted)
    monkeypatch.setattr(striped, "_SECONDS", 0.01)
    with Session(places[:2], name="job") as session, TensorStore(session) as store:
        assert calls == []
        in_threads(lambda number: store.put(str(number), pattern(9 * MIB, number)).result(), 3)
        assert calls == [1]
        for number in range(3):
            future = store.get(str(number))
            future.result()
            assert torch.equal(future.tensor, pattern(9 * MIB, number))


def test_others_use_the_store_while_rates_are_measured(places: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with Session(places[:2], name="job") as session, TensorStore(session) as store:

        def meanwhile(*_: Any) -> list[float]:
            in_threads(lambda _: (store.keys(), "a" in store, store.bytes_in_use), 1)
            in_threads(lambda _: store.wait(), 1)
            return [1.0, 2.0]

        monkeypatch.setattr("nvme_ops.storage.striped.measured", meanwhile)
        assert store.put("a", pattern(100)).result() == 100


class Full(Slab):
    """Of a disk without room."""

    def allocate(self, nbytes: int) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "full")


class Failing(Slab):
    """Of a device that fails."""

    def allocate(self, nbytes: int) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO), "failing")


def test_rates_without_room_to_measure_are_the_same_for_all(folder: Path) -> None:
    fd = os.open(folder / "slab", os.O_RDWR | os.O_CREAT)
    try:
        slabs = [Slab(fd, "slab", step=MIB), Full(fd, "full")]
        assert measured([aio_handle()] * 2, slabs, [fd, fd]) == [1.0, 1.0]
        assert slabs[0].bytes_in_use == 0
        with pytest.raises(OSError, match="failing"):
            measured([aio_handle()], [Failing(fd, "failing")], [fd])
    finally:
        os.close(fd)


def test_one_folder_has_all() -> None:
    assert Striping([7]).parts(100 * MIB) == [Part(0, 0, 100 * MIB)]
