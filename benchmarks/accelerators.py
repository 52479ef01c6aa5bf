"""Where rows compute: the CPU, a GPU, or the accelerator that the tests simulate, whose bus is a row of its own.

``simulated`` is made of host memory, its bus of 4 GB/s each way: programs run on it as on a GPU, but at no rate that
says anything about one.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import itertools
import os
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks import command, fio
from nvme_ops.base.command_line import size
from nvme_ops.base.limits import host_bytes
from nvme_ops.base.text import GIB, MIB, parse_size, size_words
from nvme_ops.measure.rows import Row, Sample, Unavailable
from nvme_ops.measure.tables import Table

CPU, SIMULATED, AUTO = "cpu", "simulated", "auto"
BUS = "over the bus"  # the figure: bytes that a sample copied to the accelerator
_RATE = 4e9  # bytes a second, of the simulated bus
_COPY = 64 * MIB
_COPIES = 8

Setup = tuple[int, int | str | None]  # bytes where a row computes, and of host memory beside an accelerator's


def _host_size(text: str) -> int | str:
    return text if text == AUTO else parse_size(text, zero=True)


FLAGS: dict[str, tuple[Any, ...]] = {
    "--device": ("where rows compute: cpu, cuda:N or simulated", CPU, str),
    "--device-budget": ("of an accelerator's memory", ["8G", "16G"], size),
    "--host-budget": ("of host memory beside it, or auto", ["0", "8G", "16G", AUTO], _host_size),
}


def check(args: Namespace) -> None:
    """Raises ValueError for a device that torch cannot use."""
    kind, _, number = args.device.partition(":")
    if args.device in (CPU, SIMULATED):
        return
    if kind != "cuda" or not (number or "0").isdecimal():
        raise ValueError(f"--device {args.device}: not cuda:N")
    if int(number or 0) >= (count := torch.cuda.device_count()):
        words = "" if count else "; a CUDA GPU, its driver (nvidia-smi) and a torch with CUDA are needed"
        raise ValueError(f"--device {args.device}: there are {count} GPUs, counted from 0{words}")


def require_peer(args: Namespace, package: str) -> None:
    """Raises Unavailable without a package, and on the accelerator that none but this one knows."""
    if importlib.util.find_spec(package) is None:
        raise Unavailable(f"not installed: pip install {package}")
    if args.device == SIMULATED:
        raise Unavailable("left out: it knows no accelerator of this kind")


def prepare(args: Namespace) -> dict[str, str]:
    """Returns facts of the device."""
    words = {} if args.device == CPU else {"device": args.device}
    if args.device.startswith("cuda"):
        properties = torch.cuda.get_device_properties(args.device)
        words |= {"gpu": f"{properties.name}, {size_words(properties.total_memory)}", "cuda": str(torch.version.cuda)}
    return words


def setups(args: Namespace) -> list[Setup]:
    """Returns the budgets of an accelerator's rows; none for the CPU."""
    return [] if args.device == CPU else [(own, host) for own in args.device_budget for host in args.host_budget]


def words_of(own: int, host: int | str | None) -> str:
    """Returns budgets in words."""
    beside = [] if host is None else [host if isinstance(host, str) else size_words(host)]
    return " + ".join([size_words(own), *beside])


def beyond(nbytes: int, own: int, host: int | str | None) -> tuple[int, int]:
    """Returns how many of so many bytes have no room in both budgets, and in the first one."""
    return max(0, nbytes - own - (0 if host is None else host_bytes(host))), max(0, nbytes - own)


def bus_bound(scratch: str, args: Namespace) -> dict[str, Row]:
    """Returns the row of copies from page-locked memory, by the figure that it bounds; none for the CPU."""

    def run() -> Sample:
        return Sample(command.work("accelerators", scratch, args)["seconds"], _COPY)

    return {} if args.device == CPU else {BUS: Row("the bus, from page-locked memory", run)}


def bounded_both_ways(run: command.Run, scratch: str, table: Table, amount: int) -> None:
    """Measures a table whose rows read and write; see ``command.bounded``."""
    path = command.data_file(scratch, GIB)
    bounds = {"read and written": fio.row(f"{fio.NAME}, half read, half written", "rw", lambda: path, GIB, os.sync)}
    command.bounded(run, table, bounds | bus_bound(scratch, run.args), amount)


# What follows runs in the row's own process.


@contextlib.contextmanager
def opened(name: str) -> Iterator[torch.device]:
    """Makes a device ready; autograd must not have begun."""
    if name != SIMULATED:
        yield torch.device(name)
        return
    from tests.doubles import private_device

    simulated = private_device()
    with simulated.pinned_memory(True), simulated.computing(), simulated.in_time(_RATE, _RATE):
        yield simulated.device()


def clock(device: torch.device) -> float:
    """Returns the seconds of a clock once the device has done what it was told."""
    if device.type != CPU:
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def moved(job: Namespace) -> tuple[int, int]:
    """Returns the bytes that ``job.counting`` have read and written, and those copied to an accelerator, so far."""
    stats = [user.stats() for user in job.counting]
    copied = sum(counts.bytes_read + counts.bytes_from_host for counts in stats) if job.device.type != CPU else 0
    return sum(counts.bytes_read + counts.bytes_written for counts in stats), copied


def peak_of(device: torch.device) -> dict[str, int]:
    """Returns the most memory that was in use at once, if the device says."""
    return {"device memory": torch.cuda.max_memory_allocated(device)} if device.type == "cuda" else {}


def budgets(taker: Callable[..., Any], job: Namespace) -> dict[str, Any]:
    """Returns the arguments by which a capability gets the budgets of a row."""
    if job.host is None:
        return {"memory_budget": job.budget}
    if "device_budget" not in inspect.signature(taker).parameters:  # its host memory has what is on its way, too
        return {"host_budget": job.host or job.budget}
    return {"device_budget": job.budget, "host_budget": job.host}


def work(job: Namespace) -> dict[str, float]:
    """Copies to the device; returns the median time of a copy."""
    here, there = torch.ones(_COPY // 4).pin_memory(), torch.empty(_COPY // 4, device=job.device)
    times = [clock(job.device)]
    for _ in range(_COPIES):
        there.copy_(here, non_blocking=True)
        times.append(clock(job.device))
    return {"seconds": statistics.median(end - begin for begin, end in itertools.pairwise(times))}
