"""``Ring.update``: every item is read, changed and written once, in order, also when something fails or stops."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nvme_ops.future import IoFuture
from nvme_ops.handle import aio_handle
from nvme_ops.memory.pool import Pool
from nvme_ops.memory.ring import Ring
from tests.conftest import KIB, MIB, pattern

SMALL = 64 * KIB
COUNT = 9


class File:
    """Items of a file, to which one is added; notes what was asked for, and how each ended."""

    def __init__(self, folder: Path, handle: aio_handle | None = None) -> None:
        self.path, self.handle = folder / "file", handle or aio_handle()
        self.data = pattern(COUNT * SMALL).view(COUNT, SMALL)
        self.path.write_bytes(self.data.numpy().tobytes())
        self.events: list[tuple[str, int]] = []
        self.failures: dict[int, BaseException | None] = {}

    def read(self, item: int, buffer: torch.Tensor) -> IoFuture | None:
        self.events.append(("read", item))
        return self.handle.submit_pread(buffer[:SMALL], self.path, item * SMALL)

    def write(self, item: int, buffer: torch.Tensor) -> IoFuture | None:
        self.events.append(("write", item))
        return self.handle.submit_pwrite(buffer[:SMALL], self.path, item * SMALL)

    def ended(self, item: int, buffer: torch.Tensor, failure: BaseException | None) -> None:
        assert item not in self.failures
        self.events.append(("ended", item))
        self.failures[item] = failure

    def found(self) -> torch.Tensor:
        return torch.frombuffer(bytearray(self.path.read_bytes()), dtype=torch.uint8).view(COUNT, SMALL)

    def update(self, ring: Ring, stop: int = COUNT, items: Iterator[int] | None = None) -> None:
        with contextlib.closing(
            ring.update(iter(range(COUNT)) if items is None else items, self.read, self.write, self.ended)
        ) as updates:
            for item, buffer in updates:
                if item == stop:
                    raise KeyError(item)
                assert torch.equal(buffer[:SMALL], self.data[item])
                buffer[:SMALL] += 1


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 7, 20])
@pytest.mark.parametrize("pooled", [True, False])
def test_all_are_changed_once(folder: Path, depth: int, pooled: bool) -> None:
    file = File(folder)
    pool = Pool(depth * SMALL) if pooled else None
    file.update(Ring(pool, buffer=SMALL, depth=depth))
    assert torch.equal(file.found(), file.data + 1)
    assert [item for event, item in file.events if event == "ended"] == list(range(COUNT))
    assert set(file.failures.values()) == {None}
    assert pool is None or pool.bytes_in_use == 0


def test_reads_and_writes_are_in_flight_while_one_is_used(folder: Path) -> None:
    file = File(folder)
    ring = Ring(None, buffer=SMALL, depth=5)
    with contextlib.closing(ring.update(range(COUNT), file.read, file.write, file.ended)) as updates:
        for item, _ in updates:
            if item == 4:
                break
        before = list(file.events)
    assert ("read", 6) in before
    assert ("write", 3) in before
    assert ("ended", 3) not in before


def test_nothing_to_read_or_to_write(folder: Path) -> None:
    file = File(folder)
    file.read = file.write = lambda *_: None  # type: ignore[method-assign]
    ring = Ring(None, buffer=SMALL, depth=3)
    assert [item for item, _ in ring.update(range(COUNT), file.read, file.write, file.ended)] == list(range(COUNT))
    assert list(file.failures) == list(range(COUNT))


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_a_program_that_stops_leaves_nothing_under_way(folder: Path, depth: int) -> None:
    file = File(folder)
    ring = Ring(None, buffer=SMALL, depth=depth)
    with pytest.raises(KeyError):
        file.update(ring, stop=4)
    assert torch.equal(file.found()[:4], file.data[:4] + 1)
    assert torch.equal(file.found()[4:], file.data[4:])
    assert [file.failures[item] for item in range(4)] == [None] * 4
    assert isinstance(file.failures[4], GeneratorExit)
    assert max(file.failures) == 4
    file.data, file.failures = file.found(), {}
    file.update(ring)  # it can be used again
    assert torch.equal(file.found(), file.data + 1)


class Failing(aio_handle):
    """Fails one read or write, when it is submitted or on the way."""

    def __init__(self, which: str, number: int, later: bool) -> None:
        super().__init__()
        self.which, self.left, self.later = which, number, later

    def _path(self, which: str, path: Any) -> Any:
        if which == self.which:
            self.left -= 1
            if self.left < 0:
                self.left = COUNT
                if not self.later:
                    raise OSError(5, "submitted")
                return str(path) + ".none" if which == "read" else "/dev/full"
        return path

    def submit_pread(self, tensor: Any, file: Any, file_offset: Any = 0, **options: Any) -> Any:
        return super().submit_pread(tensor, self._path("read", file), file_offset, **options)

    def submit_pwrite(self, tensor: Any, file: Any, file_offset: Any = None, **options: Any) -> Any:
        return super().submit_pwrite(tensor, self._path("write", file), file_offset, **options)


@pytest.mark.parametrize("which", ["read", "write"])
@pytest.mark.parametrize("number", [0, 3, COUNT - 1])
@pytest.mark.parametrize("later", [True, False])
@pytest.mark.parametrize("depth", [1, 3, 6])
def test_a_failure_is_raised_and_its_item_told(folder: Path, which: str, number: int, later: bool, depth: int) -> None:
    file = File(folder, Failing(which, number, later))
    with pytest.raises(OSError):  # noqa: PT011
        file.update(Ring(None, buffer=SMALL, depth=depth))
    good = [item for item, failure in file.failures.items() if failure is None]
    bad = [item for item, failure in file.failures.items() if failure is not None]
    assert all(item < number for item in bad) if which == "read" else number in bad
    found = file.found()
    assert torch.equal(found[good], file.data[good] + 1)
    if which == "write":
        assert torch.equal(found[number], file.data[number])


def test_items_that_fail_to_come(folder: Path) -> None:
    file = File(folder)

    def items() -> Iterator[int]:
        yield from range(3)
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        file.update(Ring(Pool(MIB), buffer=SMALL, depth=4), items=items())
    assert torch.equal(file.found()[3:], file.data[3:])
