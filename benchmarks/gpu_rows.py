"""The rows between a file and GPU memory: this package's and torch's, and in a process each the other packages'.

Those share one libcufile, one state of its driver and one set of environment variables with whoever loads them; one of
them calls ``exit`` when it fails.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

import nvme_ops
from benchmarks.file_rows import practised
from nvme_ops import gds
from nvme_ops.bench.engines import Contender, deepspeed, make_row, unavailable
from nvme_ops.bench.engines.task import Task
from nvme_ops.bench.measure import Row, Sample, Unavailable
from nvme_ops.bench.remote import Remote, environment
from nvme_ops.bench.work import Work, tensor_row
from nvme_ops.measuring.files import filled, sync
from nvme_ops.op_builder import cufile
from nvme_ops.settings import Settings
from nvme_ops.text import MIB

QUEUE_DEPTH = 128  # the default of every handle

HOST = "nvme_ops aio_handle, host memory"
BOUNCE = "nvme_ops aio_handle, GPU memory"
GDS = "nvme_ops gds_handle"
GDS_PINNED = "nvme_ops gds_handle, pinned tensor"
GDS_OFF = "nvme_ops gds_handle, NVME_OPS_GDS=off"
ADAPTIVE = "nvme_ops adaptive, GPU memory"
GDSIO = "gdsio, to the GPU"
GDSIO_HOST = "gdsio, by way of the CPU"

CUFILE = "cuFile alone, one call"
CUFILE_THREADS = "cuFile alone, threads"
TORCH_CUFILE = "torch.cuda.gds.GdsFile"
KVIKIO = "kvikio, its defaults"
KVIKIO_THREADS = "kvikio, threads"
KVIKIO_COMPATIBLE = "kvikio, threads, compat mode ON"
ON_CUFILE = (CUFILE, CUFILE_THREADS, TORCH_CUFILE, KVIKIO, KVIKIO_THREADS, KVIKIO_COMPATIBLE)
DEEPSPEED = "DeepSpeed aio_handle"
DEEPSPEED_GDS = "DeepSpeed gds_handle, pinned tensor"

_MARKS = 24  # marks in a page that each row may use, for its checked writes to be told from those of the others


@dataclass
class GpuWork(Task):
    """The file, a device, and the settings that all handles get. The tests put ``cpu`` in the device's place."""

    device: torch.device = torch.device("cuda", 0)  # noqa: RUF009  (immutable)
    block_size: int = MIB
    threads: int = 8

    def __post_init__(self) -> None:
        self.gpu = self.device.index or 0

    @functools.cached_property
    def handle(self) -> nvme_ops.aio_handle:
        """One ``aio_handle`` for all rows."""
        return nvme_ops.aio_handle(self.block_size, QUEUE_DEPTH, intra_op_parallelism=self.threads)

    @functools.cached_property
    def buffer(self) -> torch.Tensor:
        """An ordinary tensor on the device."""
        return filled(torch.empty(self.size, dtype=torch.uint8, device=self.device))

    @property
    def example(self) -> torch.Tensor:
        """Of the dtype and device that pinned tensors shall have."""
        return torch.empty(0, dtype=torch.uint8, device=self.device)

    def finish(self) -> None:
        """Waits for the device; makes its context the calling thread's, too."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


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
    work: GpuWork, name: str, handle: Callable[[], nvme_ops.gds_handle], memory: Callable[[], torch.Tensor]
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


def adaptive_row(work: GpuWork) -> Row:
    """An adaptive handle, once it has learned which way to take; with cuFile if the op is built."""
    kind = nvme_ops.gds_handle if gds.is_ready() else nvme_ops.aio_handle
    made = functools.cache(
        lambda: kind.adaptive(work.path, block_size=work.block_size, intra_op_parallelism=work.threads)
    )
    row = tensor_row(work, ADAPTIVE, lambda: work.buffer, lambda tensor: mover(made(), work)(tensor))
    return practised(row, work.path, lambda: mover(made(), work)(work.buffer))


@contextmanager
def nvme_ops_rows(work: GpuWork) -> Iterator[list[Row]]:
    """Host memory as the reference, the bounce path, and ``gds_handle`` as it chooses, for plain and pinned memory."""
    pinned: list[torch.Tensor] = []

    with_cufile = functools.cache(lambda: gds_handle(work, "auto"))
    without_cufile = functools.cache(lambda: gds_handle(work, "off"))

    @functools.cache
    def pinned_memory() -> torch.Tensor:
        pinned.append(with_cufile().new_pinned_device_tensor(work.size, work.example))
        return filled(pinned[0])

    try:
        yield [
            tensor_row(work, HOST, lambda: work.locked, mover(work.handle, work)),
            tensor_row(work, BOUNCE, lambda: work.buffer, mover(work.handle, work)),
            gds_row(work, GDS, with_cufile, lambda: work.buffer),
            gds_row(work, GDS_PINNED, with_cufile, pinned_memory),
            gds_row(work, GDS_OFF, without_cufile, lambda: work.buffer),
            adaptive_row(work),
        ]
    finally:
        for tensor in pinned:
            with_cufile().free_pinned_device_tensor(tensor)


def other_rows(work: GpuWork) -> list[Row]:
    """NVIDIA's gdsio at the same block size and threads, and torch."""
    settings = Settings(work.block_size, intra_op_parallelism=work.threads)
    name = "torch.save + fsync" if work.write else "torch.load(map_location)"
    return [
        make_row(Contender("gdsio", settings, GDSIO), replace(work, use_gds=True)),
        make_row(Contender("gdsio", settings, GDSIO_HOST), work),
        make_row(Contender("torch", settings, name), work),
    ]


@dataclass(frozen=True)
class Peer:
    """How a row is made in its process, and the package that it needs."""

    name: str
    make: Callable[..., Row]
    arguments: tuple[Any, ...] = ()
    package: str = ""
    variables: dict[str, str] = field(default_factory=dict)


def peers(work: GpuWork) -> list[Peer]:
    """All of them. Where they take a number of threads and a block size, they get ours."""
    threads = {"KVIKIO_NTHREADS": str(work.threads), "KVIKIO_TASK_SIZE": str(work.block_size)}
    return [
        Peer(CUFILE, cufile_row, (1, work.size)),
        Peer(CUFILE_THREADS, cufile_row, (work.threads, work.block_size)),
        Peer(TORCH_CUFILE, torch_cufile_row),
        Peer(KVIKIO, kvikio_row, (), "kvikio"),
        Peer(KVIKIO_THREADS, kvikio_row, (), "kvikio", threads),
        Peer(KVIKIO_COMPATIBLE, kvikio_row, (), "kvikio", {**threads, "KVIKIO_COMPAT_MODE": "ON"}),
        Peer(DEEPSPEED, deepspeed_row, ("async_io",), "deepspeed"),
        Peer(DEEPSPEED_GDS, deepspeed_row, ("gds",), "deepspeed"),
    ]


def remote_rows(stack: ExitStack, work: GpuWork, with_deepspeed: bool) -> list[Row]:
    """The rows. Their processes end with ``stack``."""
    # cuFile keeps its log in the working folder otherwise
    log = {"CUFILE_LOGFILE_PATH": os.environ.get("CUFILE_LOGFILE_PATH") or "/dev/null"}
    toolkit = (torch.version.cuda or "12").partition(".")[0]
    names = {"kvikio": ("kvikio", f"kvikio-cu{toolkit}"), "deepspeed": ("DeepSpeed", "deepspeed")}
    rows = []
    for number, peer in enumerate(peers(work), 1):
        if peer.package == "deepspeed" and not with_deepspeed:
            continue
        if peer.package and importlib.util.find_spec(peer.package) is None:
            name, install = names[peer.package]
            rows.append(unavailable(peer.name, Unavailable(f"{name} is not installed: pip install {install}")))
            continue
        theirs = replace(work)
        theirs.written = number * _MARKS
        remote = Remote(peer.make, theirs, *peer.arguments, variables={**log, **peer.variables})
        rows.append(stack.enter_context(remote).row(peer.name))
    return rows


# What follows runs in the row's own process.


def cufile_row(work: GpuWork, threads: int, piece: int) -> Row:
    """``cuFileRead`` or ``cuFileWrite`` of ``piece`` bytes at a time, by so many threads."""
    library = _CuFile(work)
    pool = ThreadPoolExecutor(threads, initializer=work.finish)

    def move(tensor: torch.Tensor) -> None:
        work.finish()
        share = -(-work.size // threads // piece) * piece
        with library.registered(work.path) as handle:
            starts = range(0, work.size, share)
            ends = (min(work.size, start + share) for start in starts)
            list(pool.map(lambda start, end: library.move(handle, tensor, start, end, piece), starts, ends))

    return tensor_row(work, "", lambda: work.buffer, move)


def torch_cufile_row(work: GpuWork) -> Row:
    """What torch itself offers: one ``cuFileRead`` or ``cuFileWrite`` for all."""
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
    """Kvikio as its environment variables say. What it writes may pass through the page cache, hence the ``fsync``."""
    import kvikio  # type: ignore[import-not-found,unused-ignore]

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
    """DeepSpeed's handle: ``async_io`` with an ordinary tensor on the device, ``gds`` with one that it pinned."""
    found = deepspeed.load(op)
    if isinstance(found, Unavailable):
        raise found
    settings = (work.block_size, QUEUE_DEPTH, False, False, work.threads)
    handle = found.gds_handle(*settings) if op == "gds" else found.aio_handle(*settings)
    transfer = handle.sync_pwrite if work.write else handle.sync_pread
    tensor = work.buffer if op == "async_io" else filled(handle.new_pinned_device_tensor(work.size, work.example))

    def move(tensor: torch.Tensor) -> None:
        work.finish()
        transfer(tensor, work.path)
        work.finish()

    return tensor_row(work, "", lambda: tensor, move)


def _proc_modules() -> None:
    if not os.path.exists("/proc/modules"):
        raise Unavailable("cuFile would wait for /proc/modules, which is missing here, for ever")


class _Status(ctypes.Structure):
    _fields_ = [("code", ctypes.c_int), ("cuda", ctypes.c_int)]


class _Description(ctypes.Structure):
    """CUfileDescr_t, whose type 1 is an opaque file descriptor: the first bytes of a union as long as a pointer."""

    _fields_ = [("type", ctypes.c_int), ("descriptor", ctypes.c_int64), ("operations", ctypes.c_void_p)]


class _CuFile:
    """The library, by ctypes."""

    def __init__(self, work: GpuWork) -> None:
        self._library = _loaded_cufile()
        if not hasattr(self._library, "nvme_ops_fake_cufile"):
            _proc_modules()
        self._library.cuFileDriverOpen.restype = self._library.cuFileHandleRegister.restype = _Status
        self._library.cuFileHandleDeregister.restype = None
        self._library.cuFileHandleDeregister.argtypes = [ctypes.c_void_p]
        self._name = "cuFileWrite" if work.write else "cuFileRead"
        self._transfer = getattr(self._library, self._name)
        self._transfer.restype = ctypes.c_ssize_t
        self._transfer.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_long, ctypes.c_long]
        work.finish()  # a context must exist before
        self._check("cuFileDriverOpen")

    def _check(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(*arguments)
        if status.code != 0:
            raise Unavailable(f"{name}: cuFile error {status.code}")

    @contextmanager
    def registered(self, path: str) -> Iterator[ctypes.c_void_p]:
        """The handle of an open file."""
        handle, descriptor = ctypes.c_void_p(), os.open(path, os.O_RDWR | os.O_DIRECT)
        try:
            description = _Description(type=1, descriptor=descriptor)
            self._check("cuFileHandleRegister", ctypes.byref(handle), ctypes.byref(description))
            try:
                yield handle
            finally:
                self._library.cuFileHandleDeregister(handle)
        finally:
            os.close(descriptor)

    def move(self, handle: ctypes.c_void_p, tensor: torch.Tensor, start: int, end: int, piece: int) -> None:
        """From or to the same place of the file and the tensor."""
        for position in range(start, end, piece):
            wanted = min(piece, end - position)
            moved = self._transfer(handle, tensor.data_ptr(), wanted, position, position)
            if moved != wanted:
                raise OSError(f"{self._name} moved {moved} of {wanted} bytes (errno {ctypes.get_errno()})")


def _loaded_cufile() -> ctypes.CDLL:
    override = os.environ.get("NVME_OPS_CUFILE_LIBRARY")
    for place in [override] if override else [cufile.LIBRARY, *cufile.libraries()]:
        try:
            return ctypes.CDLL(place, use_errno=True)
        except OSError as error:
            reason = error
    wheel = "nvidia-cufile-cu12" if (torch.version.cuda or "").startswith("12.") else "nvidia-cufile"
    raise Unavailable(f"cuFile cannot be loaded ({reason}): pip install {wheel}")
