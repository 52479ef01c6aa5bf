"""Rates of storage and of an accelerator's bus, measured by moving some of what is there for about a second."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

import torch

from nvme_ops.base.errors import FormatError
from nvme_ops.base.text import MIB
from nvme_ops.io.future import InFlight, IoFuture
from nvme_ops.io.handle import aio_handle
from nvme_ops.io.tensors import empty
from nvme_ops.storage.session import Session

_CPU = torch.device("cpu")
_PIECE, _IN_FLIGHT = 16 * MIB, 4
_SECONDS = 0.5  # duration of a measurement
_SCRATCH = 256 * MIB
_MAX_STEPS = 9


def best_of_two(measure: Callable[[], float]) -> tuple[float, float]:
    """Returns the higher of two rates, and by which share of it the other is lower."""
    slower, faster = sorted(measure() for _ in range(2))
    return faster, 1 - slower / faster


def read_rate(files: Sequence[str], cached: bool = False) -> float:
    """Returns the bytes per second of large reads all over these files, which leave the page cache as it is.

    ``cached``: cached data are read from the page cache, as while a model runs; otherwise all is read from the device.
    Raises FormatError if the files are empty, and OSError.
    """
    with aio_handle(cache="auto" if cached else "direct") as handle:
        return _rate(_reads(handle, itertools.cycle(_pieces(files))))


def cached_rate(files: Sequence[str], device: torch.device) -> float:
    """Returns the bytes per second of large reads to a device from the page cache, which then has a part of the files.

    Raises what ``read_rate`` raises.
    """
    pieces = _pieces(files)[: _SCRATCH // _PIECE]
    with aio_handle(cache="buffered") as handle:
        _rate(_reads(handle, pieces), math.inf)
        return _rate(_reads(handle, itertools.cycle(pieces), device))


def _pieces(files: Sequence[str]) -> list[tuple[str, int, int]]:
    """Returns path, start and size of all pieces of files, in random order. Raises FormatError if they are empty."""
    pieces = [
        (path, start, min(_PIECE, size - start))
        for path in files
        for size in [os.path.getsize(path)]
        for start in range(0, size, _PIECE)
    ]
    if not pieces:
        raise FormatError(f"{files[0]} is empty")
    random.Random(0).shuffle(pieces)
    return pieces


def mixed_rate(folder: str) -> tuple[float, float]:
    """Returns the bytes per second that are read and written in a folder, at the same time, together, and their noise.

    The noise is by which share of the better one of two measurements the other is lower.
    """
    return best_of_two(lambda: _mixed_rate(folder))


def _mixed_rate(folder: str) -> float:
    with scratch(folder) as path, aio_handle(cache="direct") as handle:
        submits = itertools.cycle((handle.submit_pwrite, handle.submit_pread))
        places = (number * 7 * _PIECE % _SCRATCH for number in itertools.count())
        return _rate(zip(submits, _buffers(), itertools.repeat(path), places, strict=False))


@contextlib.contextmanager
def scratch(folder: str) -> Iterator[str]:
    """Yields the path of a new file in a folder, which is removed after the block."""
    with Session(folder, name="plan") as session:
        path = session.path(0, "scratch")
        os.close(session.open(0, "scratch"))
        piece = empty(_PIECE, dtype=torch.uint8).random_()
        with aio_handle() as handle:
            for start in range(0, _SCRATCH, _PIECE):
                handle.submit_pwrite(piece, path, start).result()
        yield path


def _buffers(device: torch.device = _CPU) -> Iterator[torch.Tensor]:
    """Yields one buffer more than may be in flight, over and over again. All of their pages exist."""
    allocate = empty if device == _CPU else functools.partial(torch.empty, device=device)
    return itertools.cycle([allocate(_PIECE, dtype=torch.uint8).zero_() for _ in range(_IN_FLIGHT + 1)])


_Transfer: TypeAlias = "tuple[Callable[[torch.Tensor, str, int], IoFuture], torch.Tensor, str, int]"


def _reads(
    handle: aio_handle, pieces: Iterable[tuple[str, int, int]], device: torch.device = _CPU
) -> Iterator[_Transfer]:
    for (path, start, nbytes), buffer in zip(pieces, _buffers(device), strict=False):
        yield handle.submit_pread, buffer[:nbytes], path, start


def _rate(transfers: Iterable[_Transfer], seconds: float = _SECONDS) -> float:
    """Submits transfers, for at most so many seconds; returns the bytes per second that they move."""
    moved, begin = 0, time.perf_counter()
    with InFlight(_IN_FLIGHT) as in_flight:
        for submit, memory, path, start in transfers:
            in_flight.add(submit(memory, path, start))
            moved += memory.nbytes
            if time.perf_counter() - begin > seconds:
                break
        in_flight.drain()
        return moved / (time.perf_counter() - begin)


def copy_rate(device: torch.device) -> float:
    """Returns the bytes per second that are copied to an accelerator from page-locked host memory."""
    here = torch.empty(64 * MIB, dtype=torch.uint8, device="cpu", pin_memory=True)
    there = torch.empty_like(here, device=device)
    return here.nbytes / shortest(lambda: timed(lambda: there.copy_(here, non_blocking=True), device))


def timed(work: Callable[[], object], device: torch.device) -> float:
    """Returns the seconds that work takes on a device."""
    synchronize(device)
    begin = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - begin


def synchronize(device: torch.device) -> None:
    """Waits for what is queued on an accelerator."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def shortest(seconds: Callable[[], float]) -> float:
    """Returns the shortest of several times: other programs on the machine make times longer, never shorter."""
    seconds()
    begin, times = time.perf_counter(), [seconds()]
    while len(times) < _MAX_STEPS and time.perf_counter() - begin < _SECONDS:
        times.append(seconds())
    return min(times)
