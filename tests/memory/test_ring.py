"""The one pipeline: every byte comes once and in order, whatever the sizes, and nothing is left under way."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import nvme_ops
from nvme_ops.io.future import InFlight, IoFuture
from nvme_ops.io.handle import aio_handle
from nvme_ops.memory.pool import Pool
from nvme_ops.memory.ring import Place, Ring
from tests.conftest import KIB, MIB, pattern
from tests.contract.faulty import Faulty

SMALL = 64 * KIB


class Counting(aio_handle):
    """Notes the priorities of its reads, and counts its writes."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[Any] = []
        self.writes = 0

    def submit_preadv(self, *arguments: Any, **options: Any) -> IoFuture:
        self.reads.append(options["priority"])
        return super().submit_preadv(*arguments, **options)

    def submit_pwrite(self, *arguments: Any, **options: Any) -> IoFuture:
        self.writes += 1
        return super().submit_pwrite(*arguments, **options)


@pytest.fixture
def stored(folder: Path) -> tuple[Path, torch.Tensor]:
    data = pattern(MIB + 123)
    (folder / "file").write_bytes(data.numpy().tobytes())
    return folder / "file", data


# Reading


@settings(max_examples=20, deadline=None)
@given(places=st.lists(st.tuples(st.integers(0, MIB), st.integers(0, 3 * SMALL)), max_size=30), depth=st.integers(1, 4))
def test_whatever_is_asked_for_comes_in_order_and_aligned_for_any_dtype(
    tmp_path_factory: pytest.TempPathFactory, places: list[tuple[int, int]], depth: int
) -> None:
    data = pattern(2 * MIB)
    path = tmp_path_factory.getbasetemp() / "ring"
    if not path.exists():
        path.write_bytes(data.numpy().tobytes())
    ring = Ring(buffer=SMALL, depth=depth)
    pieces: list[torch.Tensor] = []
    for piece in ring.read(aio_handle(), (Place(path, start, size) for start, size in places)):
        assert piece.numel() <= ring.piece
        assert piece.data_ptr() % 8 == 0
        pieces.append(piece.clone())
    wanted = [data[start : start + size] for start, size in places]
    assert torch.equal(torch.cat([*pieces, data[:0]]), torch.cat([*wanted, data[:0]]))


def test_a_place_that_fits_comes_in_one_piece_and_small_ones_together(stored: tuple[Path, torch.Tensor]) -> None:
    path, data = stored
    ring, handle = Ring(buffer=SMALL, priority=nvme_ops.Priority.PREFETCH), Counting()
    places = [Place(path, start, ring.piece) for start in (0, 1, 4095, 5000, 70_001)]
    for place, piece in zip(places, ring.read(aio_handle(), places), strict=True):
        assert torch.equal(piece, data[place.start : place.start + place.nbytes])
    places = [Place(path, 1000 * number, 100) for number in range(500)]
    assert sum(piece.numel() for piece in ring.read(handle, places)) == 50_000
    assert len(handle.reads) <= 2
    handle.reads.clear()
    read = ring.read(handle, [Place(path, 0, MIB)])
    next(read)
    assert handle.reads == [nvme_ops.Priority.PREFETCH] * 2, "the next piece is read ahead"
    read.close()
    assert ring._uses == {}
    assert torch.equal(next(ring.read(handle, [Place(path, 7, 100)])), data[7:107])


def test_large_places_lie_in_a_page_as_in_the_file(stored: tuple[Path, torch.Tensor]) -> None:
    path, data = stored
    places = [Place(path, start, 100 * KIB) for start in (5, 4096 + 192, 70_001)]
    for place, piece in zip(places, Ring(buffer=MIB).read(aio_handle(), places), strict=True):
        assert torch.equal(piece, data[place.start : place.start + place.nbytes])
        assert piece.data_ptr() % 64 == 0
        assert place.start % 64 or piece.data_ptr() % 4096 == place.start % 4096


# Writing


def write(folder: Path, pieces: list[tuple[int, torch.Tensor]], handle: aio_handle) -> bytes:
    for _ in Ring(buffer=SMALL).write(handle, folder / "file", pieces):
        pass
    return (folder / "file").read_bytes()


def test_neighbours_of_any_kind_are_written_together_in_row_major_order(folder: Path) -> None:
    handle = Counting()
    content = write(folder, [(1000 * number, pattern(1000, seed=number)) for number in range(100)], handle)
    assert handle.writes <= 3
    assert len(content) == 100_000
    for dtype in (torch.float64, torch.complex64, torch.float8_e5m2):
        tensor = pattern(64 * dtype.itemsize).view(dtype).view(8, 8)  # not where an element could begin
        wanted = pattern(3).numpy().tobytes() + tensor.t().contiguous().view(torch.uint8).numpy().tobytes()
        assert write(folder, [(0, pattern(3)), (3, tensor.t())], handle)[: len(wanted)] == wanted


def test_a_transfer_that_fails_is_raised_and_waited_for(stored: tuple[Path, torch.Tensor]) -> None:
    ring, (path, data) = Ring(buffer=SMALL), stored
    for name, error in (("file", EOFError), ("missing", FileNotFoundError)):
        with pytest.raises(error, match=name):
            list(ring.read(aio_handle(), [Place(path.with_name(name), 0, data.numel() + 1)]))
    with pytest.raises(IsADirectoryError):
        list(ring.write(aio_handle(), path.parent, [(SMALL * n, data[: SMALL // 2]) for n in range(10)]))
    assert ring._uses == {}


# Memory


@pytest.mark.parametrize("budget", [8 * KIB, 100 * KIB, 2 * MIB])
def test_a_ring_takes_no_more_than_its_pool_has(stored: tuple[Path, torch.Tensor], budget: int) -> None:
    pool = Pool(budget)
    ring = Ring(pool, depth=4)
    with mock.patch.object(Pool, "lease", autospec=True, side_effect=Pool.lease) as lease:
        pieces = [piece.clone() for piece in ring.read(aio_handle(), [Place(stored[0], 5, 300_000)])]
    assert {call.kwargs.get("timeout") for call in lease.mock_calls[1:]} <= {0}, "only for the first one it waits"
    assert torch.equal(torch.cat(pieces), stored[1][5:300_005])
    assert pool.peak <= budget
    del ring
    assert pool.bytes_in_use == 0
    with pytest.raises(MemoryError, match="needs buffers of 8192 bytes, and the pool has at most 4096"):
        Ring(Pool(5000))


def test_buffers_that_torch_locks_are_of_sizes_that_it_does_not_round_up(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Ring(pinned=True).piece == 8 * MIB
    monkeypatch.setattr("nvme_ops.memory.ring.can_pin", lambda: True)
    assert Ring(pinned=True).piece == 8 * MIB - 4 * KIB  # one page is reserved


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


def test_all_have_ended_before_a_failure_is_raised() -> None:
    def fail() -> None:
        raise KeyError("of the program")

    first: list[BaseException | None] = [OSError("first"), OSError("second"), None]
    for failures, then, after, raised in (
        (first, bool, bool, OSError),
        (first, bool, fail, KeyError),
        ([None, None], fail, bool, KeyError),
    ):
        transfers = list(map(Transfer, failures))
        with pytest.raises(raised, match=r"first|of the program"), InFlight(limit=5) as in_flight:  # noqa: PT012
            for transfer in transfers:
                in_flight.add(transfer, then)
            after()
        assert all(transfer.waited for transfer in transfers)


@pytest.mark.parametrize("abandon", [False, True])
def test_an_interrupted_wait_is_repeated_at_the_end_unless_abandoned(abandon: bool) -> None:
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


@pytest.mark.parametrize(("depth", "pooled"), [(1, True), (2, False), (3, True), (7, False), (20, True)])
def test_all_are_changed_once(folder: Path, depth: int, pooled: bool) -> None:
    file = File(folder)
    pool = Pool(depth * SMALL) if pooled else None
    file.update(Ring(pool, buffer=SMALL, depth=depth))
    assert torch.equal(file.found(), file.data + 1)
    assert [item for event, item in file.events if event == "ended"] == list(range(COUNT))
    assert set(file.failures.values()) == {None}
    assert pool is None or pool.bytes_in_use == 0
    updates = Ring(pool, buffer=SMALL, depth=depth).update(
        range(COUNT), lambda *_: None, lambda *_: None, File(folder).ended
    )
    assert [item for item, _ in updates] == list(range(COUNT)), "also with nothing to read or to write"


def test_reads_and_writes_are_in_flight_while_one_is_used(folder: Path) -> None:
    file = File(folder)
    updates = Ring(None, buffer=SMALL, depth=5).update(range(COUNT), file.read, file.write, file.ended)
    with contextlib.closing(updates):
        while next(updates)[0] < 4:
            pass
        assert ("read", 6) in file.events
        assert ("write", 3) in file.events
        assert ("ended", 3) not in file.events


def test_few_are_read_at_once_so_that_the_first_comes_soon(folder: Path) -> None:
    handle = Faulty("read", "hold", range(2, COUNT + 1))
    file = File(folder, handle)
    with contextlib.closing(
        Ring(None, buffer=SMALL, depth=8).update(range(COUNT), file.read, file.write, file.ended)
    ) as updates:
        next(updates)
        assert file.events == [("read", 0), ("read", 1), ("read", 2)]
        handle.go.set()
        assert len(list(updates)) == COUNT - 1


@pytest.mark.parametrize("depth", [1, 5])
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
@pytest.mark.parametrize(("number", "depth"), [(1, 3), (4, 1), (4, 6), (COUNT, 3)])
def test_a_failure_is_raised_and_its_item_told(folder: Path, what: str, do: str, number: int, depth: int) -> None:
    file = File(folder, Faulty(what, do, {number}))
    with pytest.raises(OSError, match=f"device {number}"):
        file.update(Ring(None, buffer=SMALL, depth=depth))
    good = [item for item, failure in file.failures.items() if failure is None]
    bad = [item for item, failure in file.failures.items() if failure is not None]
    assert all(item < number for item in bad) if what == "read" else number - 1 in bad
    assert torch.equal(file.found()[good], file.data[good] + 1)


@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("what", ["read", "write"])
def test_a_transfer_that_ctrl_c_has_hidden_keeps_its_buffer(folder: Path, what: str, pooled: bool) -> None:
    """Ctrl-C comes when the transfer was submitted, and before anything knows of it."""
    handle, hidden = Faulty(what, "hold", {3}), list[tuple[IoFuture | None, int]]()
    file = File(folder, handle)
    known = getattr(file, what)

    def interrupted(item: int, buffer: torch.Tensor) -> IoFuture | None:
        transfer: IoFuture | None = known(item, buffer)
        if handle.met and not hidden:
            hidden.append((transfer, buffer.data_ptr()))
            raise KeyboardInterrupt
        return transfer

    setattr(file, what, interrupted)
    ring = Ring(Pool(4 * SMALL) if pooled else None, buffer=SMALL, depth=3)
    with pytest.raises(KeyboardInterrupt):
        file.update(ring)
    nothing: list[Any] = [lambda *_: None] * 3
    places = {buffer.data_ptr() for _, buffer in ring.update(range(COUNT), *nothing)}
    assert len(places) == 3
    transfer, place = hidden[0]
    assert place not in places
    handle.go.set()
    assert transfer is not None
    assert transfer.result() == SMALL


@pytest.mark.parametrize("depth", [1, 2, 3, 5])
def test_others_are_read_ahead_in_place_of_those_in_memory(folder: Path, depth: int) -> None:
    file, ring = File(folder), Ring(None, buffer=SMALL, depth=depth)

    def read(item: int, buffer: torch.Tensor) -> IoFuture | None:
        return file.read(item, buffer) if item % 3 == 0 else None

    def write(item: int, buffer: torch.Tensor) -> IoFuture | None:
        return file.write(item, buffer) if item % 3 == 0 else None

    with contextlib.closing(ring.update(range(COUNT), read, write, file.ended, lambda item: item % 3 > 0)) as updates:
        for item, buffer in updates:
            assert (item, None) not in file.failures.items()
            assert ("read", min(item // 3 * 3 + 3, COUNT - 3)) in file.events or depth < 3
            if item % 3 == 0:
                buffer[:SMALL] += 1
    assert [item for item in file.failures if item % 3 > 0] == [1, 2, 4, 5, 7, 8]
    assert torch.equal(file.found()[::3], file.data[::3] + 1)
    assert torch.equal(file.found()[1::3], file.data[1::3])


def test_items_that_fail_to_come(folder: Path) -> None:
    file = File(folder)
    with pytest.raises(ZeroDivisionError):
        file.update(Ring(Pool(MIB), buffer=SMALL, depth=4), items=(number for number in range(9) if 1 / (3 - number)))
    assert torch.equal(file.found()[3:], file.data[3:])
