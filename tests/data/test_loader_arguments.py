"""What ``Loader`` refuses to be told, and what it tells the handle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nvme_ops import aio_handle
from nvme_ops.data import Loader, SampleStore
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
