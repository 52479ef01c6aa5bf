"""Which parts of a tensor go to which folder: all of it, once, in proportion to the rates."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nvme_ops import aio_handle
from nvme_ops.storage import Session, TensorStore, striped
from nvme_ops.storage.slab import Slab
from nvme_ops.storage.striped import Striping, measured
from tests.conftest import KIB, MIB, in_threads, pattern
from tests.storage.conftest import got

PAGE = 4 * KIB
weights_of = st.lists(st.floats(1e-3, 1e12), min_size=1, max_size=8)


@given(weights_of, st.integers(0, 1 << 40))
def test_the_parts_are_the_tensor_in_proportion_to_the_weights(weights: list[float], nbytes: int) -> None:
    parts = Striping(weights).parts(nbytes)
    assert [part.begin for part in parts] == [0, *(part.begin + part.nbytes for part in parts)][:-1]
    assert sum(part.nbytes for part in parts) == nbytes
    assert all(part.nbytes % PAGE == 0 for part in parts[:-1])
    folders = [part.folder for part in parts]
    assert folders == sorted(set(folders))
    assert set(folders) <= set(range(len(weights)))
    if nbytes >= 8 * MIB:
        sizes = {part.folder: part.nbytes for part in parts}
        for folder, weight in enumerate(weights):
            assert abs(sizes.get(folder, 0) - nbytes * weight / sum(weights)) <= PAGE + nbytes * 1e-9


@given(st.lists(st.floats(0.5, 20), min_size=2, max_size=5), st.lists(st.integers(1, 8 * MIB - 1), min_size=50))
def test_small_tensors_stay_whole_and_are_balanced(weights: list[float], sizes: list[int]) -> None:
    striping, given_to = Striping(weights), [0.0] * len(weights)
    for size in sizes:
        (part,) = striping.parts(size)
        assert (part.begin, part.nbytes) == (0, size)
        given_to[part.folder] += size
    busy = [amount / weight for amount, weight in zip(given_to, weights, strict=True)]
    assert max(busy) - min(busy) <= max(sizes) / min(weights) + 1


def test_weights_are_positive_numbers_one_for_each_folder(folder: Path) -> None:
    with Session([folder / "a", folder / "b"], name="job") as session:
        for weights in ([0.0, 1.0], [math.nan, 1.0], [1.0, math.inf], [1.0] * 3):
            with pytest.raises(ValueError, match=r"weights must be positive|weights for 2 folders"):
                TensorStore(session, weights=weights)
        TensorStore(session, weights=[1, 1])  # nothing has stayed of the other


def test_rates_are_measured_once_at_the_first_put(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def counted(*arguments: Any) -> list[float]:
        calls.append(1)
        others: list[Callable[[], object]] = [store.keys, lambda: store.bytes_in_use, store.wait]
        in_threads(lambda _: [call() for call in others], 1)
        return measured(*arguments)

    monkeypatch.setattr(striped, "measured", counted)
    monkeypatch.setattr(striped, "_SECONDS", 0.01)
    with Session([folder / "a", folder / "b"], name="job") as session, TensorStore(session) as store:
        assert calls == []
        in_threads(lambda number: store.put(str(number), pattern(9 * MIB, number).view(torch.int32)).result(), 3)
        assert calls == [1]
        for number in range(3):
            assert torch.equal(got(store, str(number)), pattern(9 * MIB, number).view(torch.int32))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_rates_without_room_to_measure_are_the_same_for_all(folder: Path, code: int) -> None:
    class Failing(Slab):
        def allocate(self, nbytes: int) -> Any:
            raise OSError(code, os.strerror(code), "failing")

    with (folder / "slab").open("w+b") as file:
        fd = file.fileno()
        slabs = [Slab(fd, "slab", step=MIB), Failing(fd, "failing")]
        if code == errno.ENOSPC:
            assert measured([aio_handle()] * 2, slabs, [fd, fd]) == [1.0, 1.0]
        else:
            with pytest.raises(OSError, match="failing"):
                measured([aio_handle()] * 2, slabs, [fd, fd])
        assert slabs[0].bytes_in_use == 0
