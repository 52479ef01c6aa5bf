"""This package's rows between a file and GPU memory, and torch's, in this process. The others are in gpu_peers.py."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch

import nvme_ops
from nvme_ops.bench import gdsio
from nvme_ops.bench.files import make_cold, make_file, sync
from nvme_ops.bench.measure import Row, Sample, Unavailable
from nvme_ops.bench.remote import environment
from nvme_ops.bench.work import Work, filled, saved_row, tensor_row
from nvme_ops.text import MIB

QUEUE_DEPTH = 128  # the default of every handle

HOST = "nvme_ops aio_handle, host memory"
BOUNCE = "nvme_ops aio_handle, GPU memory"
GDS = "nvme_ops gds_handle"
GDS_PINNED = "nvme_ops gds_handle, pinned tensor"
GDS_OFF = "nvme_ops gds_handle, NVME_OPS_GDS=off"
GDSIO = "gdsio, to the GPU"
GDSIO_HOST = "gdsio, by way of the CPU"

_UINT8 = torch.empty(0, dtype=torch.uint8)


@dataclass
class GpuWork(Work):
    """The file, a device, and the settings that all handles get. The tests put ``cpu`` in the device's place."""

    device: torch.device = torch.device("cuda", 0)  # noqa: RUF009  (immutable)
    block_size: int = MIB
    threads: int = 8

    @functools.cached_property
    def handle(self) -> nvme_ops.aio_handle:
        """One ``aio_handle`` for all rows."""
        return nvme_ops.aio_handle(self.block_size, QUEUE_DEPTH, intra_op_parallelism=self.threads)

    @functools.cached_property
    def plain(self) -> torch.Tensor:
        """An ordinary tensor on the device."""
        return filled(torch.empty(self.size, dtype=torch.uint8, device=self.device))


def mover(handle: nvme_ops.aio_handle, work: Work) -> Callable[[torch.Tensor], object]:
    """Moves a tensor from or to the file."""
    move = handle.sync_pwrite if work.write else handle.sync_pread
    return lambda tensor: move(tensor, work.path)


def gds_handle(work: GpuWork, mode: str) -> nvme_ops.gds_handle:
    """Raises Unavailable with the reason where cuFile cannot work."""
    with environment(NVME_OPS_GDS=mode):
        try:
            return nvme_ops.gds_handle(work.block_size, QUEUE_DEPTH, intra_op_parallelism=work.threads)
        except RuntimeError as reason:
            raise Unavailable(str(reason).splitlines()[0]) from None


def path_words(statistics: dict[str, Any]) -> str:
    """What a handle says of the ways it took: ``compat (why); transfers: bounce 2, compat 8``."""
    if statistics["last"] is None:
        return "no tensor on an accelerator was moved"
    uses = statistics["uses"]
    words = f"{statistics['last']} ({statistics['why']})"
    if len(uses) > 1:
        words += "; transfers: " + ", ".join(f"{way} {use['transfers']}" for way, use in sorted(uses.items()))
    return words


def gds_row(
    work: GpuWork,
    name: str,
    handle: Callable[[], nvme_ops.gds_handle],
    memory: Callable[[], torch.Tensor],
) -> Row:
    """A row of a ``gds_handle`` whose note says which way its transfers took, and why."""
    row = tensor_row(work, name, memory, lambda tensor: mover(handle(), work)(tensor))
    run = row.run

    def run_and_note() -> Sample:
        sample = run()
        row.note = path_words(handle().path_statistics())
        return sample

    row.run = run_and_note
    return row


@contextmanager
def nvme_ops_rows(work: GpuWork) -> Iterator[list[Row]]:
    """Host memory as the reference, the bounce path, and ``gds_handle`` as it chooses, for plain and pinned memory."""
    pinned: list[torch.Tensor] = []

    @functools.cache
    def with_cufile() -> nvme_ops.gds_handle:
        return gds_handle(work, "auto")

    @functools.cache
    def without_cufile() -> nvme_ops.gds_handle:
        return gds_handle(work, "off")

    @functools.cache
    def pinned_memory() -> torch.Tensor:
        example = torch.empty(0, dtype=torch.uint8, device=work.device)
        pinned.append(with_cufile().new_pinned_device_tensor(work.size, example))
        return filled(pinned[0])

    try:
        yield [
            tensor_row(work, HOST, lambda: work.locked, mover(work.handle, work)),
            tensor_row(work, BOUNCE, lambda: work.plain, mover(work.handle, work)),
            gds_row(work, GDS, with_cufile, lambda: work.plain),
            gds_row(work, GDS_PINNED, with_cufile, pinned_memory),
            gds_row(work, GDS_OFF, without_cufile, lambda: work.plain),
        ]
    finally:
        for tensor in pinned:
            with_cufile().free_pinned_device_tensor(tensor)


def torch_row(work: GpuWork) -> Row:
    """``torch.save`` from the device, or ``torch.load`` to it."""
    path = f"{work.path}.pt"

    def save() -> None:
        torch.save(work.plain, path)
        sync(path)

    def load() -> torch.Tensor:
        loaded = cast(torch.Tensor, torch.load(path, map_location=work.device))
        if work.device.type == "cuda":
            torch.cuda.synchronize(work.device)
        return loaded

    name = "torch.save + fsync" if work.write else "torch.load(map_location)"
    return saved_row(work, name, path, lambda: work.plain, save, load, [])


def gdsio_rows(work: GpuWork) -> list[Row]:
    """NVIDIA's gdsio at the same block size and threads. When it writes, then to a file of its own."""
    path = f"{work.path}.gdsio" if work.write else work.path
    made: list[str] = []

    def before() -> None:
        gdsio.program()
        if work.write and not made:
            make_file(path, work.size)
            made.append(path)
        make_cold(path)

    def row(name: str, way: int) -> Row:
        settings = (work.device.index or 0, work.block_size, work.threads)
        return Row(name, lambda: gdsio.run(path, work.size, work.write, way, *settings), before)

    return [row(GDSIO, gdsio.DIRECT), row(GDSIO_HOST, gdsio.THROUGH_HOST)]
