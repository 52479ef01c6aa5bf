"""The other packages between a file and GPU memory: cuFile alone, torch's cuFile, kvikio, DeepSpeed.

Each row works in a process of its own. They share one libcufile, one state of its driver and one set of environment
variables with whoever loads them; one of them calls ``exit`` when it fails.
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib.util
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from benchmarks.gpu_rows import QUEUE_DEPTH, GpuWork
from nvme_ops.bench.engines import deepspeed
from nvme_ops.bench.files import sync
from nvme_ops.bench.measure import Row, Sample, Unavailable
from nvme_ops.bench.remote import Remote
from nvme_ops.bench.work import filled, tensor_row
from nvme_ops.op_builder import cufile

CUFILE = "cuFile alone, one call"
CUFILE_THREADS = "cuFile alone, threads"
TORCH_CUFILE = "torch.cuda.gds.GdsFile"
KVIKIO = "kvikio, its defaults"
KVIKIO_THREADS = "kvikio, threads"
KVIKIO_COMPATIBLE = "kvikio, threads, compat mode ON"
DEEPSPEED = "DeepSpeed aio_handle"
DEEPSPEED_GDS = "DeepSpeed gds_handle, pinned tensor"

_MARKS = 24  # marks in a page that each row may use, for its checked writes to be told from those of the others


@dataclasses.dataclass(frozen=True)
class Peer:
    """How a row is made in its process, and the package that it needs."""

    name: str
    make: Callable[..., Row]
    arguments: tuple[Any, ...] = ()
    package: str = ""
    variables: dict[str, str] = dataclasses.field(default_factory=dict)


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


def remote_rows(work: GpuWork, with_deepspeed: bool) -> tuple[list[Row], list[Remote]]:
    """The rows, and what is to be closed after the last round."""
    # cuFile keeps its log in the working folder otherwise
    log = {"CUFILE_LOGFILE_PATH": os.environ.get("CUFILE_LOGFILE_PATH") or "/dev/null"}
    rows, remotes = [], []
    for number, peer in enumerate(peers(work), 1):
        if peer.package == "deepspeed" and not with_deepspeed:
            continue
        if peer.package and importlib.util.find_spec(peer.package) is None:
            rows.append(missing_row(peer))
            continue
        arguments = (dataclasses.replace(work), number * _MARKS, *peer.arguments)
        remotes.append(Remote(peer.make, *arguments, variables={**log, **peer.variables}))
        rows.append(remotes[-1].row(peer.name))
    return rows, remotes


def missing_row(peer: Peer) -> Row:
    """Says what is not installed, and how to."""
    toolkit = (torch.version.cuda or "12").partition(".")[0]
    name, install = {"kvikio": ("kvikio", f"kvikio-cu{toolkit}"), "deepspeed": ("DeepSpeed", "deepspeed")}[peer.package]

    def give_up() -> None:
        raise Unavailable(f"{name} is not installed: pip install {install}")

    return Row(peer.name, lambda: Sample(1, 1), give_up)


# What follows runs in the row's own process.


def cufile_row(work: GpuWork, mark: int, threads: int, piece: int) -> Row:
    """``cuFileRead`` or ``cuFileWrite`` of ``piece`` bytes at a time, by so many threads."""
    work.written = mark
    library = _CuFile(work)
    pool = ThreadPoolExecutor(threads, initializer=lambda: settle(work))

    def move(tensor: torch.Tensor) -> None:
        settle(work)
        share = -(-work.size // threads // piece) * piece
        with library.file(work.path) as file:
            starts = range(0, work.size, share)
            list(pool.map(lambda start: file.move(tensor, start, min(work.size, start + share), piece), starts))

    return tensor_row(work, "", lambda: work.plain, move)


def torch_cufile_row(work: GpuWork, mark: int) -> Row:
    """What torch itself offers: one ``cuFileRead`` or ``cuFileWrite`` for all."""
    work.written = mark
    gds: Any = getattr(torch.cuda, "gds", None)
    if not hasattr(gds, "GdsFile"):
        raise Unavailable("this torch has no torch.cuda.gds: pip install 'torch>=2.7'")
    _proc_modules()

    def move(tensor: torch.Tensor) -> None:
        settle(work)
        file = gds.GdsFile(work.path, os.O_RDWR)
        (file.save_storage if work.write else file.load_storage)(tensor.untyped_storage(), 0)

    return tensor_row(work, "", lambda: work.plain, move)


def kvikio_row(work: GpuWork, mark: int) -> Row:
    """Kvikio as its environment variables say. What it writes may pass through the page cache, hence the ``fsync``."""
    work.written = mark
    import kvikio  # type: ignore[import-not-found,unused-ignore]

    _proc_modules()

    def move(tensor: torch.Tensor) -> None:
        settle(work)
        with kvikio.CuFile(work.path, "r+" if work.write else "r") as file:
            moved = file.write(tensor) if work.write else file.read(tensor)
        if moved != work.size:
            raise OSError(f"kvikio moved {moved} of {work.size} bytes")
        if work.write:
            sync(work.path)

    return tensor_row(work, "", lambda: work.plain, move)


def deepspeed_row(work: GpuWork, mark: int, op: str) -> Row:
    """DeepSpeed's handle: ``async_io`` with an ordinary tensor on the device, ``gds`` with one that it pinned."""
    work.written = mark
    found = deepspeed.load(op)
    if isinstance(found, Unavailable):
        raise found
    settings = (work.block_size, QUEUE_DEPTH, False, False, work.threads)
    handle = found.gds_handle(*settings) if op == "gds" else found.aio_handle(*settings)
    transfer = handle.sync_pwrite if work.write else handle.sync_pread
    if op == "gds":
        example = torch.empty(0, dtype=torch.uint8, device=work.device)
        tensor = filled(handle.new_pinned_device_tensor(work.size, example))
    else:
        tensor = work.plain

    def move(tensor: torch.Tensor) -> None:
        settle(work)
        transfer(tensor, work.path)
        settle(work)

    return tensor_row(work, "", lambda: tensor, move)


def settle(work: GpuWork) -> None:
    """Waits for the device; makes its context the calling thread's, too."""
    if work.device.type == "cuda":
        torch.cuda.synchronize(work.device)


def _proc_modules() -> None:
    if not os.path.exists("/proc/modules"):
        raise Unavailable("cuFile would wait for /proc/modules, which is missing here, for ever")


class _Status(ctypes.Structure):
    _fields_ = [("code", ctypes.c_int), ("cuda", ctypes.c_int)]


class _Place(ctypes.Union):
    _fields_ = [("descriptor", ctypes.c_int), ("handle", ctypes.c_void_p)]


class _Description(ctypes.Structure):
    """CUfileDescr_t, whose type 1 is an opaque file descriptor."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("place", _Place),
        ("operations", ctypes.c_void_p),
    ]


class _CuFile:
    """The library, by ctypes."""

    def __init__(self, work: GpuWork) -> None:
        override = os.environ.get("NVME_OPS_CUFILE_LIBRARY")
        places = [override] if override else [cufile.LIBRARY, *cufile.libraries()]
        for place in places:
            try:
                self._library = ctypes.CDLL(place, use_errno=True)
                break
            except OSError as error:
                reason = error
        else:
            wheel = "nvidia-cufile-cu12" if (torch.version.cuda or "").startswith("12.") else "nvidia-cufile"
            raise Unavailable(f"cuFile cannot be loaded ({reason}): pip install {wheel}")
        if not hasattr(self._library, "nvme_ops_fake_cufile"):
            _proc_modules()
        for name in ("cuFileDriverOpen", "cuFileHandleRegister"):
            self.function(name).restype = _Status
        self.function("cuFileHandleDeregister").restype = None
        for name in ("cuFileRead", "cuFileWrite"):
            function = self.function(name)
            function.restype = ctypes.c_ssize_t
            function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_long, ctypes.c_long]
        self.function("cuFileHandleDeregister").argtypes = [ctypes.c_void_p]
        settle(work)  # a context must exist before
        self.check(self.function("cuFileDriverOpen")(), "cuFileDriverOpen")
        self.name = "cuFileWrite" if work.write else "cuFileRead"

    def function(self, name: str) -> Any:
        return getattr(self._library, name)

    def check(self, status: Any, name: str) -> None:
        if status.code != 0:
            raise Unavailable(f"{name}: cuFile error {status.code}")

    def file(self, path: str) -> _RegisteredFile:
        return _RegisteredFile(self, path)


class _RegisteredFile:
    def __init__(self, library: _CuFile, path: str) -> None:
        self._library, self._handle = library, ctypes.c_void_p()
        self._descriptor = os.open(path, os.O_RDWR | os.O_DIRECT)
        description = _Description(type=1, place=_Place(descriptor=self._descriptor))
        register = library.function("cuFileHandleRegister")
        library.check(register(ctypes.byref(self._handle), ctypes.byref(description)), "cuFileHandleRegister")

    def __enter__(self) -> _RegisteredFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._library.function("cuFileHandleDeregister")(self._handle)
        os.close(self._descriptor)

    def move(self, tensor: torch.Tensor, start: int, end: int, piece: int) -> None:
        transfer, base = self._library.function(self._library.name), tensor.data_ptr()
        for position in range(start, end, piece):
            wanted = min(piece, end - position)
            moved = transfer(self._handle, base, wanted, position, position)
            if moved != wanted:
                raise OSError(f"{self._library.name} moved {moved} of {wanted} bytes (errno {ctypes.get_errno()})")
