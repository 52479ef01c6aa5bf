"""Reads new tensors into one allocation, laid out like the file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import Any, TypeAlias

import torch

from nvme_ops.base.native import native
from nvme_ops.io.future import InFlight
from nvme_ops.io.handle import aio_handle
from nvme_ops.io.tensors import DEVICE_ALIGNMENT, Kind, collector_paused, lay_out, placed, pool_buffer

_AHEAD = 128 << 20  # bytes read before the header is known to be valid
_PAGE = os.sysconf("SC_PAGE_SIZE")
_HOST = torch.device("cpu")

#: A tensor to be read: where its bytes begin and end in the file, and its kind.
Wanted: TypeAlias = tuple[int, int, Kind]


class SpeculativeRead:
    """Reads the file from ``start`` on into one allocation while its header is being parsed.

    Only a bounded amount is read before the header is known to be valid, so that a damaged file costs little.
    """

    def __init__(self, handle: aio_handle, fd: int, start: int, end: int) -> None:
        self._handle, self._fd, self._run = handle, fd, (start, end)
        (self._place,), size = lay_out([self._run], _HOST)
        self._memory = _host_memory(size)
        self._reached = min(end, start + _AHEAD)
        self._in_flight = InFlight(limit=2, abandon=True)
        self._submit(start, self._reached)

    def _submit(self, start: int, end: int) -> None:
        place = self._place + start - self._run[0]
        self._in_flight.add(self._handle.submit_pread(self._memory[place : place + end - start], self._fd, start))

    def result(self, runs: Sequence[tuple[int, int]]) -> torch.Tensor | None:
        """Returns the memory once everything is read; None unless ``runs`` is the one run that was expected."""
        if list(runs) != [self._run]:
            self._in_flight.settle()
            del self._memory  # freed before the tensors are allocated
            return None
        if self._reached < self._run[1]:
            self._submit(self._reached, self._run[1])
        self._in_flight.drain()
        return self._memory

    def end(self, kind: type[BaseException] | None, *_: object) -> None:
        """Waits until nothing is in flight, unless Ctrl-C was pressed, and ignores failures."""
        self._in_flight.end(kind)


def ahead(handle: aio_handle, fd: int, start: int, end: int) -> SpeculativeRead | None:
    """Starts a speculative read of everything from ``start`` on into host memory; returns None if it would not help."""
    if start >= end or native().cached_pages(fd, start, end - start) == -(-end // _PAGE) - start // _PAGE:
        return None  # all of it is in the page cache, from which it is read fast
    try:
        return SpeculativeRead(handle, fd, start, end)
    except MemoryError:  # an absurd size: parsing the file gives a better error
        return None


def read(
    handle: aio_handle,
    fd: int,
    wanted: Sequence[Wanted],
    device: torch.device,
    mapped: bool = False,
    ahead: SpeculativeRead | None = None,
) -> list[torch.Tensor]:
    """Reads new tensors that share one allocation, which is freed with the last of them.

    On the CPU it comes from the pool of huge pages. ``mapped``: map the file instead (MAP_PRIVATE), as safetensors and
    ``torch.load(mmap=True)`` do. ``ahead``: a read of all the data, started before the header was parsed.
    """
    runs = _runs(wanted, device)
    if device.type == "cpu" and runs and mapped:
        return _map(fd, wanted, runs)
    places, size = lay_out(runs, device)
    base = None if ahead is None else ahead.result(runs)
    if base is None:
        base = _host_memory(size) if device.type == "cpu" else torch.empty(size, dtype=torch.uint8, device=device)
        targets = [base[place : place + end - start] for place, (start, end) in zip(places, runs, strict=True)]
        if targets:
            handle.submit_preadv(targets, fd, [start for start, _ in runs]).result()
    return _cut(base, wanted, runs, places)


def _host_memory(size: int) -> torch.Tensor:
    return torch.frombuffer(pool_buffer(max(1, size)), dtype=torch.uint8)


def _map(fd: int, wanted: Sequence[Wanted], runs: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
    # not Python's mmap, which holds a descriptor as long as the mapping
    memory: Any = torch.UntypedStorage.from_file(f"/proc/self/fd/{fd}", False, runs[-1][1])
    base = torch.empty(0, dtype=torch.uint8, device=_HOST).set_(memory)
    return _cut(base, wanted, runs, [start for start, _ in runs])


def _runs(wanted: Iterable[Wanted], device: torch.device) -> list[tuple[int, int]]:
    """Returns runs of the file without gaps, in each of which all tensors are aligned if the first one is."""
    least = 1 if device.type == "cpu" else DEVICE_ALIGNMENT
    runs: list[tuple[int, int]] = []
    begin = reached = -1
    for start, end, (dtype, _) in sorted(wanted, key=itemgetter(0)):
        if start == end:
            continue
        if begin < 0 or start > reached or (start == reached and (start - begin) % max(least, dtype.itemsize)):
            runs.append((start, end))
            begin, reached = start, end
        elif end > reached:
            reached = end
            runs[-1] = begin, reached
    return runs


@collector_paused
def _cut(
    base: torch.Tensor, wanted: Sequence[Wanted], runs: Sequence[tuple[int, int]], places: Sequence[int]
) -> list[torch.Tensor]:
    """Returns tensors over parts of ``base``, but not views of it: they share no version counter."""
    tensors: list[torch.Tensor] = [base] * len(wanted)
    aligned: list[int] = []
    kinds: list[tuple[int, Kind]] = []
    run = 0
    for index in sorted(range(len(wanted)), key=[start for start, _, _ in wanted].__getitem__):
        start, end, kind = wanted[index]
        dtype, shape = kind
        if end == start:
            # a view, because torch.empty computes strides, which overflow for a huge shape
            tensors[index] = torch.empty(0, dtype=dtype, device=base.device).view(shape)
            continue
        while runs[run][1] <= start:
            run += 1
        place = places[run] + start - runs[run][0]
        if place % dtype.itemsize:  # a file with an odd header
            tensors[index] = base[place : place + end - start].clone().view(dtype).view(shape)
        else:
            aligned.append(index)
            kinds.append((place, kind))
    for index, tensor in zip(aligned, placed(base, kinds), strict=True):
        tensors[index] = tensor
    return tensors
