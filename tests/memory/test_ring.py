"""The one pipeline: every byte comes once and in order, whatever the sizes, and nothing is left under way."""

from __future__ import annotations

import functools
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import nvme_ops
from nvme_ops.future import IoFuture
from nvme_ops.handle import aio_handle
from nvme_ops.memory.pool import Pool
from nvme_ops.memory.ring import InFlight, Place, Ring
from tests.conftest import KIB, MIB, pattern

SMALL = 64 * KIB


class Counting(aio_handle):
    """Knows how many of its transfers have been submitted."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = self.writes = 0

    def submit_preadv(self, *arguments: Any, **options: Any) -> IoFuture:
        self.reads += 1
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


@settings(max_examples=40, deadline=None)
@given(
    places=st.lists(st.tuples(st.integers(0, MIB), st.integers(0, 3 * SMALL)), max_size=30),
    depth=st.integers(1, 4),
)
def test_whatever_is_asked_for_comes_in_order(
    tmp_path_factory: pytest.TempPathFactory, places: list[tuple[int, int]], depth: int
) -> None:
    data = pattern(2 * MIB)
    path = tmp_path_factory.getbasetemp() / "ring"
    if not path.exists():
        path.write_bytes(data.numpy().tobytes())
    ring = Ring(buffer=SMALL, depth=depth)
    wanted = [data[start : start + size] for start, size in places]
    read = ring.read(aio_handle(), (Place(path, start, size) for start, size in places))
    found = [piece.clone() for piece in read]
    assert torch.equal(torch.cat([*found, torch.empty(0, dtype=torch.uint8)]), torch.cat([*wanted, data[:0]]))
    assert all(piece.numel() <= ring.piece for piece in found)


def test_a_place_that_fits_comes_in_one_piece(stored: tuple[Path, torch.Tensor]) -> None:
    path, data = stored
    ring = Ring(buffer=SMALL)
    places = [Place(path, start, ring.piece) for start in (0, 1, 4095, 5000, 70_001)]
    for place, piece in zip(places, ring.read(aio_handle(), places), strict=True):
        assert torch.equal(piece, data[place.start : place.start + place.nbytes])


def test_small_places_are_read_together(stored: tuple[Path, torch.Tensor]) -> None:
    handle = Counting()
    places = [Place(stored[0], 1000 * number, 100) for number in range(500)]
    assert sum(piece.numel() for piece in Ring(buffer=SMALL).read(handle, places)) == 50_000
    assert handle.reads <= 2


def test_the_next_piece_is_on_its_way_while_one_is_used(stored: tuple[Path, torch.Tensor]) -> None:
    handle = Counting()
    read = Ring(buffer=SMALL).read(handle, [Place(stored[0], 0, MIB)])
    next(read)
    assert handle.reads == 2
    next(read)
    assert handle.reads == 3
    read.close()


def test_pieces_are_aligned_for_any_dtype(folder: Path) -> None:
    data = pattern(MIB)
    (folder / "odd").write_bytes(b"x" * 7 + data.numpy().tobytes())
    places = [Place(folder / "odd", 7 + 8 * start, 80_000) for start in (0, 1, 3, 1000, 20_001)]
    for place, piece in zip(places, Ring().read(aio_handle(), places), strict=True):
        assert torch.equal(piece.view(torch.int64), data[place.start - 7 :][:80_000].clone().view(torch.int64))


def test_a_reader_that_stops_leaves_nothing_under_way(stored: tuple[Path, torch.Tensor]) -> None:
    ring, handle = Ring(buffer=SMALL), Counting()
    read = ring.read(handle, [Place(stored[0], 0, MIB)])
    next(read)
    read.close()
    assert ring._uses == {}
    assert torch.equal(next(ring.read(handle, [Place(stored[0], 7, 100)])), stored[1][7:107])


def test_a_file_that_ends_early(stored: tuple[Path, torch.Tensor]) -> None:
    path, data = stored
    ring = Ring(buffer=SMALL)
    with pytest.raises(EOFError, match=str(path)):
        for _ in ring.read(aio_handle(), [Place(path, 0, data.numel() + 1)]):
            pass
    assert ring._uses == {}


def test_files_that_are_not_there(folder: Path) -> None:
    with pytest.raises(FileNotFoundError, match="missing"):
        list(Ring().read(aio_handle(), [Place(folder / "missing", 0, 10)]))


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


def test_a_neighbour_whose_elements_would_begin_between_two_is_written_apart(folder: Path) -> None:
    bytes_, floats = pattern(3), torch.arange(10, dtype=torch.float32)
    for _ in Ring(buffer=SMALL).write(aio_handle(), folder / "file", [(0, bytes_), (3, floats)]):
        pass
    assert (folder / "file").read_bytes() == bytes_.numpy().tobytes() + floats.numpy().tobytes()


def test_neighbours_are_written_together(folder: Path) -> None:
    handle = Counting()
    pieces = [(1000 * number, pattern(1000, seed=number)) for number in range(100)]
    for _ in Ring(buffer=SMALL).write(handle, folder / "file", pieces):
        pass
    assert handle.writes <= 3
    assert (folder / "file").stat().st_size == 100_000


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.bool, torch.complex64, torch.float8_e5m2])
def test_tensors_of_any_kind_are_written_in_row_major_order(folder: Path, dtype: torch.dtype) -> None:
    tensor = pattern(64 * dtype.itemsize).view(torch.uint8)
    tensor = (tensor % 2 if dtype is torch.bool else tensor).view(dtype).view(8, 8)
    for _ in Ring(buffer=SMALL).write(aio_handle(), folder / "file", [(3, tensor.t())]):
        pass
    wanted = tensor.t().contiguous().view(torch.uint8).numpy().tobytes()
    assert (folder / "file").read_bytes()[3:] == wanted


def test_a_write_that_fails_is_raised_and_waited_for(folder: Path) -> None:
    ring = Ring(buffer=SMALL)
    pieces = [(SMALL * number, pattern(SMALL // 2)) for number in range(10)]
    with pytest.raises(IsADirectoryError):
        for _ in ring.write(aio_handle(), folder, pieces):
            pass
    assert ring._uses == {}


# Memory


def test_a_ring_takes_no_more_than_its_pool_has(stored: tuple[Path, torch.Tensor]) -> None:
    pool = Pool(2 * MIB)
    ring = Ring(pool, buffer=2 * MIB, depth=4)
    read = b"".join(piece.numpy().tobytes() for piece in ring.read(aio_handle(), [Place(stored[0], 0, MIB)]))
    assert read == stored[1][:MIB].numpy().tobytes()
    assert pool.peak == 2 * MIB
    del ring
    assert pool.bytes_in_use == 0


@pytest.mark.parametrize("budget", [8 * KIB, 100 * KIB])
def test_a_small_pool_makes_small_pieces(stored: tuple[Path, torch.Tensor], budget: int) -> None:
    pool = Pool(budget)
    pieces = [piece.clone() for piece in Ring(pool).read(aio_handle(), [Place(stored[0], 5, 300_000)])]
    assert torch.equal(torch.cat(pieces), stored[1][5:300_005])
    assert pool.peak <= budget


def test_a_budget_smaller_than_one_piece_is_refused() -> None:
    with pytest.raises(MemoryError, match="needs buffers of 8192 bytes, and the pool has at most 4096"):
        Ring(Pool(5000))


def test_a_second_ring_waits_for_the_first(stored: tuple[Path, torch.Tensor]) -> None:
    pool = Pool(2 * MIB)
    first = Ring(pool, buffer=2 * MIB)
    list(first.read(aio_handle(), [Place(stored[0], 0, 10)]))
    found: list[int] = []
    thread = threading.Thread(
        target=lambda: found.extend(
            piece.numel() for piece in Ring(pool, buffer=2 * MIB).read(aio_handle(), [Place(stored[0], 0, 10)])
        )
    )
    thread.start()
    thread.join(0.05)
    assert not found
    del first
    thread.join(60)
    assert found == [10]


def test_priorities_reach_the_handle(stored: tuple[Path, torch.Tensor]) -> None:
    seen: list[Any] = []

    class Noting(aio_handle):
        def submit_preadv(self, *arguments: Any, **options: Any) -> IoFuture:
            seen.append(options["priority"])
            return super().submit_preadv(*arguments, **options)

    list(Ring(priority=nvme_ops.Priority.PREFETCH).read(Noting(), [Place(stored[0], 0, 10)]))
    assert seen == [nvme_ops.Priority.PREFETCH]


# Transfers without buffers


class Transfer:
    def __init__(self, failure: BaseException | None = None) -> None:
        self.failure, self.waited, self.cancelled = failure, 0, False

    def request_cancel(self) -> None:
        self.cancelled = True

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self.waited += 1
        return self.failure


def test_only_so_many_are_under_way() -> None:
    ended: list[int] = []
    transfers = [Transfer() for _ in range(5)]
    with InFlight(limit=2) as in_flight:
        for number, transfer in enumerate(transfers):
            in_flight.add(transfer, functools.partial(ended.append, number))
            assert ended == list(range(max(0, number - 1)))
    assert ended == [0, 1, 2, 3, 4]


def run(transfers: list[Transfer], then: Any = lambda: None, after: Any = lambda: None) -> None:
    with InFlight(limit=5) as in_flight:
        for transfer in transfers:
            in_flight.add(transfer, then)
        after()


def fail() -> None:
    raise KeyError("of the program")


def test_all_have_ended_before_a_failure_is_raised() -> None:
    transfers = [Transfer(OSError("first")), Transfer(OSError("second")), Transfer()]
    with pytest.raises(OSError, match="first"):
        run(transfers)
    assert all(transfer.waited for transfer in transfers)


def test_a_wait_that_is_interrupted_is_repeated_at_the_end() -> None:
    """Ctrl-C comes in the middle of a wait, and the memory of the transfer is still in use."""

    class Interrupted(Transfer):
        def exception(self, timeout: float | None = None) -> BaseException | None:
            super().exception(timeout)
            if self.waited == 1:
                raise KeyboardInterrupt
            return None

    transfer = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        run([transfer])
    assert transfer.waited == 2
    abandoned = Interrupted()  # it keeps its memory until it ends
    with pytest.raises(KeyboardInterrupt), InFlight(abandon=True) as in_flight:
        in_flight.add(abandoned)
    assert (abandoned.waited, abandoned.cancelled) == (1, True)


def test_an_exception_in_the_block_waits_for_all_and_stays() -> None:
    transfers = [Transfer(OSError("of a transfer")), Transfer()]
    with pytest.raises(KeyError):
        run(transfers, after=fail)
    assert all(transfer.waited for transfer in transfers)


def test_what_is_called_after_a_transfer_may_fail() -> None:
    transfers = [Transfer(), Transfer()]
    with pytest.raises(KeyError):
        run(transfers, then=fail)
    assert all(transfer.waited for transfer in transfers)
