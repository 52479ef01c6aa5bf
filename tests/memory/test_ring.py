"""The one pipeline: every byte comes once and in order, whatever the sizes, and nothing is left under way."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import nvme_ops
from nvme_ops.future import InFlight, IoFuture
from nvme_ops.handle import aio_handle
from nvme_ops.memory.pool import Pool
from nvme_ops.memory.ring import Place, Ring
from tests.conftest import KIB, MIB, pattern
from tests.contract.faulty import Faulty

SMALL = 64 * KIB


class Counting(aio_handle):
    """Notes the priorities of its transfers."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[Any] = []
        self.writes: list[Any] = []

    def submit_preadv(self, *arguments: Any, **options: Any) -> IoFuture:
        self.reads.append(options["priority"])
        return super().submit_preadv(*arguments, **options)

    def submit_pwrite(self, *arguments: Any, **options: Any) -> IoFuture:
        self.writes.append(options["priority"])
        return super().submit_pwrite(*arguments, **options)


@pytest.fixture
def stored(folder: Path) -> tuple[Path, torch.Tensor]:
    data = pattern(MIB + 123)
    (folder / "file").write_bytes(data.numpy().tobytes())
    return folder / "file", data


# Reading


@settings(max_examples=40, deadline=None)
@given(places=st.lists(st.tuples(st.integers(0, MIB), st.integers(0, 3 * SMALL)), max_size=30), depth=st.integers(1, 4))
def test_whatever_is_asked_for_comes_in_order_and_aligned_for_any_dtype(
    tmp_path_factory: pytest.TempPathFactory, places: list[tuple[int, int]], depth: int
) -> None:
    data = pattern(2 * MIB)
    path = tmp_path_factory.getbasetemp() / "ring"
    if not path.exists():
        path.write_bytes(data.numpy().tobytes())
    ring = Ring(buffer=SMALL, depth=depth)
    found: list[torch.Tensor] = []
    for piece in ring.read(aio_handle(), (Place(path, start, size) for start, size in places)):
        assert piece.numel() <= ring.piece
        assert piece.data_ptr() % 8 == 0
        found.append(piece.clone())
    wanted = [data[start : start + size] for start, size in places]
    assert torch.equal(torch.cat([*found, data[:0]]), torch.cat([*wanted, data[:0]]))


def test_a_place_that_fits_comes_in_one_piece(stored: tuple[Path, torch.Tensor]) -> None:
    path, data = stored
    ring = Ring(buffer=SMALL)
    places = [Place(path, start, ring.piece) for start in (0, 1, 4095, 5000, 70_001)]
    for place, piece in zip(places, ring.read(aio_handle(), places), strict=True):
        assert torch.equal(piece, data[place.start : place.start + place.nbytes])


def test_small_places_are_read_together_and_the_next_piece_ahead(stored: tuple[Path, torch.Tensor]) -> None:
    handle, ring = Counting(), Ring(buffer=SMALL, priority=nvme_ops.Priority.PREFETCH)
    places = [Place(stored[0], 1000 * number, 100) for number in range(500)]
    assert sum(piece.numel() for piece in ring.read(handle, places)) == 50_000
    assert len(handle.reads) <= 2
    handle.reads.clear()
    next(ring.read(handle, [Place(stored[0], 0, MIB)]))
    assert handle.reads == [nvme_ops.Priority.PREFETCH] * 2


def test_a_reader_that_stops_leaves_nothing_under_way(stored: tuple[Path, torch.Tensor]) -> None:
    ring, handle = Ring(buffer=SMALL), Counting()
    read = ring.read(handle, [Place(stored[0], 0, MIB)])
    next(read)
    read.close()
    assert ring._uses == {}
    assert torch.equal(next(ring.read(handle, [Place(stored[0], 7, 100)])), stored[1][7:107])


@pytest.mark.parametrize(("name", "error"), [("file", EOFError), ("missing", FileNotFoundError)])
def test_a_file_that_ends_early_or_is_missing(
    stored: tuple[Path, torch.Tensor], name: str, error: type[Exception]
) -> None:
    ring = Ring(buffer=SMALL)
    with pytest.raises(error, match=name):
        list(ring.read(aio_handle(), [Place(stored[0].with_name(name), 0, stored[1].numel() + 1)]))
    assert ring._uses == {}


# Writing


@pytest.mark.parametrize("start", [0, 1, 4096, 5003])
def test_pieces_are_written_where_they_belong(folder: Path, start: int) -> None:
    data = pattern(400 * KIB)
    ring, handle = Ring(buffer=SMALL), aio_handle()
    pieces = [(start + at, data[at : at + size]) for at, size in [(0, 1000), (1000, 50_000), (51_000, 60_000)]]
    pieces.append((start + 300_000, data[300_000 : 300_000 + 60_000]))
    for (at, _), held in zip(pieces, ring.write(handle, folder / "file", pieces), strict=True):
        assert torch.equal(held, data[at - start : at - start + held.numel()])
    found = (folder / "file").read_bytes()
    for at, piece in pieces:
        assert found[at : at + piece.numel()] == piece.numpy().tobytes()


def write(folder: Path, pieces: list[tuple[int, torch.Tensor]], handle: aio_handle | None = None) -> bytes:
    for _ in Ring(buffer=SMALL).write(handle or aio_handle(), folder / "file", pieces):
        pass
    return (folder / "file").read_bytes()


def test_neighbours_are_written_together_unless_their_elements_would_begin_between_two(folder: Path) -> None:
    handle, floats = Counting(), torch.arange(10, dtype=torch.float32)
    found = write(folder, [(1000 * number, pattern(1000, seed=number)) for number in range(100)], handle)
    assert len(handle.writes) <= 3
    assert len(found) == 100_000
    assert write(folder, [(0, pattern(3)), (3, floats)])[:43] == pattern(3).numpy().tobytes() + floats.numpy().tobytes()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bool, torch.complex64, torch.float8_e5m2])
def test_tensors_of_any_kind_are_written_in_row_major_order(folder: Path, dtype: torch.dtype) -> None:
    tensor = pattern(64 * dtype.itemsize).view(torch.uint8)
    tensor = (tensor % 2 if dtype is torch.bool else tensor).view(dtype).view(8, 8)
    wanted = tensor.t().contiguous().view(torch.uint8).numpy().tobytes()
    assert write(folder, [(3, tensor.t())])[3:] == wanted


def test_a_write_that_fails_is_raised_and_waited_for(folder: Path) -> None:
    ring = Ring(buffer=SMALL)
    pieces = [(SMALL * number, pattern(SMALL // 2)) for number in range(10)]
    with pytest.raises(IsADirectoryError):
        list(ring.write(aio_handle(), folder, pieces))
    assert ring._uses == {}


# Memory


@pytest.mark.parametrize("budget", [8 * KIB, 100 * KIB, 2 * MIB])
def test_a_ring_takes_no_more_than_its_pool_has(stored: tuple[Path, torch.Tensor], budget: int) -> None:
    pool = Pool(budget)
    ring = Ring(pool, depth=4)
    pieces = [piece.clone() for piece in ring.read(aio_handle(), [Place(stored[0], 5, 300_000)])]
    assert torch.equal(torch.cat(pieces), stored[1][5:300_005])
    assert pool.peak <= budget
    del ring
    assert pool.bytes_in_use == 0
    with pytest.raises(MemoryError, match="needs buffers of 8192 bytes, and the pool has at most 4096"):
        Ring(Pool(5000))


# Transfers without buffers


class Transfer:
    def __init__(self, failure: BaseException | None = None, interrupted: bool = False) -> None:
        self.failure, self.interrupted, self.waited, self.cancelled = failure, interrupted, 0, False

    def request_cancel(self) -> None:
        self.cancelled = True

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self.waited += 1
        if self.interrupted and self.waited == 1:
            raise KeyboardInterrupt
        return self.failure


def test_only_so_many_are_under_way() -> None:
    ended: list[int] = []
    with InFlight(limit=2) as in_flight:
        for number in range(5):
            in_flight.add(Transfer(), functools.partial(ended.append, number))
            assert ended == list(range(max(0, number - 1)))
    assert ended == [0, 1, 2, 3, 4]


def fail() -> None:
    raise KeyError("of the program")


def nothing() -> None: ...


@pytest.mark.parametrize(
    ("failures", "then", "after", "raised"),
    [
        ([OSError("first"), OSError("second"), None], nothing, nothing, OSError("first")),
        ([OSError("of a transfer"), None], nothing, fail, KeyError("of the program")),
        ([None, None], fail, nothing, KeyError("of the program")),
    ],
    ids=["of transfers", "in the block", "after a transfer"],
)
def test_all_have_ended_before_a_failure_is_raised(
    failures: list[BaseException | None], then: Any, after: Any, raised: Exception
) -> None:
    transfers = list(map(Transfer, failures))
    with pytest.raises(type(raised), match=str(raised.args[0])), InFlight(limit=5) as in_flight:  # noqa: PT012
        for transfer in transfers:
            in_flight.add(transfer, then)
        after()
    assert all(transfer.waited for transfer in transfers)


@pytest.mark.parametrize("abandon", [False, True])
def test_a_wait_that_is_interrupted_is_repeated_at_the_end_unless_abandoned(abandon: bool) -> None:
    """Ctrl-C comes in the middle of a wait, and the memory of the transfer is still in use."""
    transfer = Transfer(interrupted=True)
    with pytest.raises(KeyboardInterrupt), InFlight(abandon=abandon) as in_flight:
        in_flight.add(transfer)
    assert (transfer.waited, transfer.cancelled) == ((1, True) if abandon else (2, False))


# Updates: every item is read, changed and written once, in order, also when something fails or stops

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
    file, ring = File(folder), Ring(None, buffer=SMALL, depth=3)
    updates = ring.update(range(COUNT), lambda *_: None, lambda *_: None, file.ended)
    assert [item for item, _ in updates] == list(file.failures) == list(range(COUNT))


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


@pytest.mark.parametrize("what", ["read", "write"])
@pytest.mark.parametrize("do", ["refuse", "fail"])
@pytest.mark.parametrize("number", [1, 4, COUNT])
@pytest.mark.parametrize("depth", [1, 3, 6])
def test_a_failure_is_raised_and_its_item_told(folder: Path, what: str, do: str, number: int, depth: int) -> None:
    file = File(folder, Faulty(what, do, {number}))
    with pytest.raises(OSError, match=f"device {number}"):
        file.update(Ring(None, buffer=SMALL, depth=depth))
    good = [item for item, failure in file.failures.items() if failure is None]
    bad = [item for item, failure in file.failures.items() if failure is not None]
    assert all(item < number for item in bad) if what == "read" else number - 1 in bad
    assert torch.equal(file.found()[good], file.data[good] + 1)


def test_items_that_fail_to_come(folder: Path) -> None:
    file = File(folder)

    def items() -> Iterator[int]:
        yield from range(3)
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        file.update(Ring(Pool(MIB), buffer=SMALL, depth=4), items=items())
    assert torch.equal(file.found()[3:], file.data[3:])
