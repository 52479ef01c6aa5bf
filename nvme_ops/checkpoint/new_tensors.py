"""Reads new tensors into one allocation that is laid out as the file is."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import Any, TypeAlias

import torch

from nvme_ops import collector
from nvme_ops._native import native
from nvme_ops.handle import aio_handle
from nvme_ops.memory.carve import DEVICE_ALIGNMENT, Kind, lay_out, placed
from nvme_ops.memory.ring import InFlight
from nvme_ops.tensors import pool_buffer

_AHEAD = 128 << 20  # bytes read before the header is known to be valid
_PAGE = os.sysconf("SC_PAGE_SIZE")
_HOST = torch.device("cpu")

#: A tensor to be read: from which byte to which of a file, and its kind.
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
        """Returns the memory for these ``runs`` once all is read; None if they are not as expected."""
        if list(runs) != [self._run]:
            self._in_flight.settle()
            del self._memory  # frees it for the tensors wanted
            return None
        if self._reached < self._run[1]:
            self._submit(self._reached, self._run[1])
        self._in_flight.drain()
        return self._memory

    def end(self, kind: type[BaseException] | None, *_: object) -> None:
        """Waits until nothing is in flight, unless Ctrl-C came, and ignores failures."""
        self._in_flight.end(kind)


def ahead(handle: aio_handle, fd: int, start: int, end: int) -> SpeculativeRead | None:
    """Starts a speculative read if it is likely to help ``read`` everything after ``start`` into host memory."""
    if start >= end or native().cached_pages(fd, start, end - start) == -(-end // _PAGE) - start // _PAGE:
        return None  # what the page cache has is read at once
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
    """Reads new tensors, which share one allocation: it is freed with the last of them.

    On the CPU it is in huge pages if the file's blocks can be read without a copy. ``mapped``: map the file instead
    (MAP_PRIVATE), as safetensors and ``torch.load(mmap=True)`` do. ``ahead``: what has been read already.
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
    # not Python's mmap, which keeps a descriptor as long as the mapping lives
    memory: Any = torch.UntypedStorage.from_file(f"/proc/self/fd/{fd}", False, runs[-1][1])
    base = torch.empty(0, dtype=torch.uint8, device=_HOST).set_(memory)
    return _cut(base, wanted, runs, [start for start, _ in runs])


def _runs(wanted: Iterable[Wanted], device: torch.device) -> list[tuple[int, int]]:
    """Returns runs of the file without gaps, in which each tensor is aligned if the first one is."""
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


@collector.paused()
def _cut(
    base: torch.Tensor, wanted: Sequence[Wanted], runs: Sequence[tuple[int, int]], places: Sequence[int]
) -> list[torch.Tensor]:
    """Returns tensors over parts of ``base`` that are not views of it: they share no version counter."""
    tensors: list[torch.Tensor] = [base] * len(wanted)
    aligned: list[int] = []
    found: list[tuple[int, Kind]] = []
    run = 0
    for index in sorted(range(len(wanted)), key=[start for start, _, _ in wanted].__getitem__):
        start, end, kind = wanted[index]
        dtype, shape = kind
        if end == start:
            # viewed: torch.empty computes strides, which a huge shape overflows
            tensors[index] = torch.empty(0, dtype=dtype, device=base.device).view(shape)
            continue
        while runs[run][1] <= start:
            run += 1
        place = places[run] + start - runs[run][0]
        if place % dtype.itemsize:  # a file with an odd header
            tensors[index] = base[place : place + end - start].clone().view(dtype).view(shape)
        else:
            aligned.append(index)
            found.append((place, kind))
    for index, tensor in zip(aligned, placed(base, found), strict=True):
        tensors[index] = tensor
    return tensors
