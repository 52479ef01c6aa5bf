"""Transfers between files and GPU memory: this package beside torch, cuFile, kvikio, DeepSpeed and gdsio.

Each row of another package runs in a process of its own: within a process they would share one libcufile, one state of
its driver and one set of environment variables, and one of them calls ``exit`` when it fails. See docs/gpu-results.md.
"""

from __future__ import annotations

import functools
import itertools
import os
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch

import nvme_ops
from benchmarks import accelerators, command
from benchmarks.peers import gdsio_row, load_deepspeed, needed
from benchmarks.raw_io import fio_row, mover, practised
from nvme_ops.base.command_line import size
from nvme_ops.base.settings import PAGE, Settings
from nvme_ops.base.text import MIB, size_words
from nvme_ops.io import gds
from nvme_ops.io.future import InFlight
from nvme_ops.measure.engines import Contender, Task, make_row, noting_paths, tensor_row
from nvme_ops.measure.files import filled, sync
from nvme_ops.measure.remote import Remote, joint_row
from nvme_ops.measure.rows import Row, Unavailable
from nvme_ops.measure.tables import Table
from nvme_ops.op_builder import GDSBuilder
from nvme_ops.op_builder.machine import cufile_libraries

GROUPS = {
    "read": "read to GPU memory, of a file that is not in the page cache",
    "write": "write from GPU memory, over an existing file",
    "reads": "reads to GPU memory, by bytes of a request and number in flight",
    "writes": "writes from GPU memory, by bytes of a request and number in flight",
}
_REQUESTS = [(nbytes << 10, count) for nbytes in (64, 1024, 16384) for count in (1, 8, 64)]  # bytes; in flight
QUEUE_DEPTH = 128  # the default of every handle

HOST = "nvme_ops aio_handle, host memory"
BOUNCE = "nvme_ops aio_handle, GPU memory"
GDS, GDS_PINNED = "nvme_ops gds_handle", "nvme_ops gds_handle, pinned tensor"
_LIMIT = 900  # seconds until an answer of another package: DeepSpeed may compile for minutes
_MARKS = 24  # marks of a page that each row may use, which distinguish its checked writes from those of other rows


@dataclass
class GpuWork(Task):
    """The file, a device, and the settings that all handles get. The tests use the device ``cpu``."""

    device: torch.device = torch.device("cuda", 0)  # noqa: RUF009  (immutable)
    block_size: int = MIB
    threads: int = 8

    def __post_init__(self) -> None:
        self.gpu = self.device.index or 0 if self.device.type == "cuda" else None
        self.pageable_memory = True  # in place of a GPU's

    @functools.cached_property
    def handle(self) -> nvme_ops.aio_handle:
        """The ``aio_handle`` of all rows."""
        return nvme_ops.aio_handle(self.block_size, QUEUE_DEPTH, intra_op_parallelism=self.threads)

    def pinned(self, handle: Any) -> torch.Tensor:
        """Returns a tensor on the device that is registered with cuFile."""
        return filled(handle.new_pinned_device_tensor(self.size, torch.empty(0, dtype=torch.uint8, device=self.device)))


def gds_handle(work: GpuWork, mode: str) -> nvme_ops.gds_handle:
    """Returns a handle. Raises Unavailable with the reason if cuFile cannot work."""
    with mock.patch.dict(os.environ, NVME_OPS_GDS=mode):
        try:
            return nvme_ops.gds_handle(work.block_size, QUEUE_DEPTH, intra_op_parallelism=work.threads)
        except RuntimeError as reason:
            raise Unavailable(str(reason).splitlines()[0]) from None


def gds_row(
    work: GpuWork, name: str, handle: Callable[[], nvme_ops.gds_handle], memory: Callable[[], torch.Tensor]
) -> Row:
    """Returns a row of a ``gds_handle``, whose note says which path its transfers took, and why."""
    return noting_paths(tensor_row(work, name, memory, lambda tensor: mover(handle(), work)(tensor)), handle)


@contextmanager
def nvme_ops_rows(work: GpuWork) -> Iterator[list[Row]]:
    """Yields host memory as the reference, the bounce path, ``gds_handle`` as it chooses, and an adaptive handle."""
    with_cufile = functools.cache(lambda: gds_handle(work, "auto"))
    without_cufile = functools.cache(lambda: gds_handle(work, "off"))
    pinned = functools.cache(lambda: work.pinned(with_cufile()))
    kind = nvme_ops.gds_handle if gds.is_ready() else nvme_ops.aio_handle  # with cuFile if the op is built
    options: dict[str, Any] = {"block_size": work.block_size, "intra_op_parallelism": work.threads}
    learning = functools.cache(lambda: mover(kind.adaptive(work.path, **options), work))
    adaptive = tensor_row(work, "nvme_ops adaptive, GPU memory", lambda: work.buffer, lambda tensor: learning()(tensor))
    try:
        yield [
            tensor_row(work, HOST, lambda: work.locked, mover(work.handle, work)),
            tensor_row(work, BOUNCE, lambda: work.buffer, mover(work.handle, work)),
            gds_row(work, GDS, with_cufile, lambda: work.buffer),
            gds_row(work, GDS_PINNED, with_cufile, pinned),
            gds_row(work, f"{GDS}, NVME_OPS_GDS=off", without_cufile, lambda: work.buffer),
            practised(adaptive, work.path, lambda: learning()(work.buffer)),
        ]
    finally:
        if pinned.cache_info().currsize:
            with_cufile().free_pinned_device_tensor(pinned())


def request_rows(work: GpuWork) -> Iterator[Row]:
    """Yields rows of many requests: by the bounce path, which copies page-locked memory, and by ``gds_handle``."""
    with_cufile = functools.cache(lambda: gds_handle(work, "auto"))
    handles: dict[str, Callable[[], Any]] = {BOUNCE: lambda: work.handle, GDS: with_cufile}

    def move(handle: Callable[[], Any], tensor: torch.Tensor, *, nbytes: int, count: int) -> None:
        submit = handle().submit_pwrite if work.write else handle().submit_pread
        with InFlight(count) as in_flight:
            for start in range(0, work.size, nbytes):
                in_flight.add(submit(tensor[start : start + nbytes], work.path, start))

    for (nbytes, count), name in itertools.product(_REQUESTS, handles):
        words = f", {size_words(nbytes)}, {count} in flight"
        move_by = functools.partial(move, handles[name], nbytes=nbytes, count=count)
        row = tensor_row(work, name + words, lambda: work.buffer, move_by, (BOUNCE + words) * (name == GDS))
        yield noting_paths(row, with_cufile) if name == GDS else row


def remote_rows(stack: ExitStack, work: GpuWork, with_deepspeed: bool) -> list[Row]:
    """Returns the rows of other packages, with our number of threads and block size where they take these.

    Their processes end with ``stack``.
    """
    # cuFile keeps its log in the working folder otherwise
    log = {"CUFILE_LOGFILE_PATH": os.environ.get("CUFILE_LOGFILE_PATH") or "/dev/null"}
    threads = {"KVIKIO_NTHREADS": str(work.threads), "KVIKIO_TASK_SIZE": str(work.block_size)}
    peers: list[tuple[str, Callable[..., Row], tuple[str, ...], dict[str, str]]] = [
        ("torch.cuda.gds.GdsFile", cufile_row, (), {}),  # cuFile alone
        ("kvikio, its defaults", kvikio_row, (), {}),
        ("kvikio, threads", kvikio_row, (), threads),
        ("DeepSpeed aio_handle", deepspeed_row, ("async_io",), {}),
        ("DeepSpeed gds_handle, pinned tensor", deepspeed_row, ("gds",), {}),
    ]
    rows = []
    for number, (name, make, arguments, variables) in enumerate(peers if with_deepspeed else peers[:3], 1):
        theirs = replace(work)
        theirs.written = number * _MARKS
        remote = Remote(_elsewhere, {**log, **variables}, make, theirs, *arguments, limit=_LIMIT)
        rows.append(joint_row(name, [stack.enter_context(remote)], 0))
    return rows


# What follows runs in the row's own process.


def _elsewhere(variables: dict[str, str], make: Callable[..., Row], *arguments: Any) -> list[Row]:
    os.environ.update(variables)
    return [make(*arguments)]


def cufile_row(work: GpuWork) -> Row:
    """Returns the row of torch's own interface: one ``cuFileRead`` or ``cuFileWrite`` for all."""
    gds: Any = getattr(torch.cuda, "gds", None)
    if not hasattr(gds, "GdsFile"):
        raise Unavailable("this torch has no torch.cuda.gds: pip install 'torch>=2.7'")
    _proc_modules()

    def move(tensor: torch.Tensor) -> None:
        work.finish()
        file = gds.GdsFile(work.path, os.O_RDWR)
        (file.save_storage if work.write else file.load_storage)(tensor.untyped_storage(), 0)

    return tensor_row(work, "", lambda: work.buffer, move)


def kvikio_row(work: GpuWork) -> Row:
    """Returns kvikio's row. What it writes may pass through the page cache, hence the ``fsync``."""
    kvikio = needed("kvikio", f"kvikio-cu{(torch.version.cuda or '12').partition('.')[0]}")
    _proc_modules()

    def move(tensor: torch.Tensor) -> None:
        work.finish()
        with kvikio.CuFile(work.path, "r+" if work.write else "r") as file:
            moved = file.write(tensor) if work.write else file.read(tensor)
        if moved != work.size:
            raise OSError(f"kvikio moved {moved} of {work.size} bytes")
        if work.write:
            sync(work.path)

    return tensor_row(work, "", lambda: work.buffer, move)


def deepspeed_row(work: GpuWork, op: str) -> Row:
    """Returns DeepSpeed's row: ``async_io`` with an ordinary tensor on the device, ``gds`` with one that it pinned."""
    module = load_deepspeed(op)
    settings = (work.block_size, QUEUE_DEPTH, False, False, work.threads)
    handle = module.gds_handle(*settings) if op == "gds" else module.aio_handle(*settings)
    tensor = work.buffer if op == "async_io" else work.pinned(handle)
    transfer = mover(handle, work)

    def move(tensor: torch.Tensor) -> None:
        work.finish()
        transfer(tensor)
        work.finish()

    return tensor_row(work, "", lambda: tensor, move)


def _proc_modules() -> None:
    if not os.path.exists("/proc/modules"):
        raise Unavailable("cuFile would wait for /proc/modules, which is missing here, for ever")


def check(args: Namespace) -> None:
    """Raises ValueError for what cannot be measured."""
    if args.block_size % PAGE:
        raise ValueError(f"--block-size {args.block_size}: not a multiple of 4K")
    if args.device == accelerators.CPU:
        raise ValueError("--device cpu: not cuda:N")
    accelerators.check(args)


def prepare(args: Namespace) -> dict[str, str]:
    """Returns the GPU, and whether cuFile moves data directly between storage and GPU, or why it cannot work."""
    words = accelerators.prepare(args) | {"blocks": size_words(args.block_size), "threads": str(args.threads)}
    try:
        driver = GDSBuilder().load().open_driver(cufile_libraries())
    except RuntimeError as reason:
        return words | {"cufile": str(reason).splitlines()[0]}
    kind = "a test double" if driver["fake"] else f"{driver['version'] // 1000}.{driver['version'] % 1000 // 10}"
    direct = f"not direct: {driver['why_not_direct']}" if driver["why_not_direct"] else "direct"
    return words | {"cufile": f"{kind} ({driver['path']}), {direct}"}


def tables(run: command.Run, scratch: str, _: dict[str, Any]) -> Iterator[Table]:
    """Yields the table of each direction. The rows' memory and processes end with it."""
    args, path = run.args, command.data_file(scratch, run.args.size)
    for group in args.groups:
        settings: dict[str, Any] = {"block_size": args.block_size, "threads": args.threads}
        with ExitStack() as stack:
            device = stack.enter_context(accelerators.opened(args.device))
            work = GpuWork(path, args.size, group.startswith("write"), device=device, **settings)
            title = f"{GROUPS[group]}, {size_words(work.size)}"
            if group.endswith("s"):
                yield Table(group, title, "GB/s", list(request_rows(work)), peers="the bounce path")
                continue
            rows = [fio_row(work), *stack.enter_context(nvme_ops_rows(work))]
            rows += remote_rows(stack, work, not args.no_deepspeed)
            alike = Settings(work.block_size, intra_op_parallelism=work.threads)
            name = "torch.save + fsync" if work.write else "torch.load(map_location)"
            rows += [gdsio_row(work, "gdsio, to the GPU", alike), make_row(Contender("torch", alike, name), work)]
            yield Table(group, title, "GB/s", rows, HOST)


_FLAGS = {
    "--device": ("the GPU", "cuda:0", str),
    "--block-size": ("of all rows that take one", "1M", size),
    "--threads": ("of all rows that take a number", 8),
}
PROGRAM = command.Program(GROUPS, tables, 3, _FLAGS, check, prepare=prepare)
