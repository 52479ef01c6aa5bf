"""The kinds of device that the contract is tested on, with the same methods."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import nvme_ops
from nvme_ops import aio_handle
from nvme_ops.io.gds import gds_handle
from tests.conftest import MIB, contents, limited, run_python
from tests.doubles import FakeCuFile, Function, PrivateDevice

PAGE, BLOCK = 4096, 65536
CHUNK = 8 * MIB  # kChunk of device_tensor.cpp
TELLING = 16 * MIB  # kTelling of gds_path.cpp: from here on gds_handle compares its ways
SPIN = 200_000_000  # clock cycles: about a tenth of a second
ALREADY_PINNED = 5023  # cuFile's code


@functools.cache
def _random() -> torch.Tensor:
    words = torch.randint(2**63 - 1, (100 * MIB // 8,), generator=torch.Generator().manual_seed(0))
    return words.view(torch.uint8)


def sample(size: int, seed: int = 0) -> torch.Tensor:
    """Like ``pattern``, from one pool for all tests."""
    data = _random()[4096 * seed :][:size]
    assert len(data) == size
    return data


def whole_pages(offset: int, size: int) -> int:
    first = -(-offset // PAGE) * PAGE
    return max(0, (offset + size) // PAGE * PAGE - first)


class Kind:
    """What the contract asks of every kind beside moving data; where one has nothing to do, this does nothing."""

    #: What ``empty`` holds.
    unwritten = PrivateDevice.unwritten
    #: Bytes that are moved at once, and of a tensor that is several of them and a little more.
    chunk, odd = CHUNK, 2 * CHUNK + 5
    #: Makes ``handle`` and ``tensor(data)`` in a program of its own.
    program: str

    def settle(self) -> None:
        """Waits for what was queued to prepare the test."""

    def keep_busy(self) -> None:
        """Has the current stream do for a while what it is to do before the next; one that waits to be asked does."""

    def require_pending(self, stream: Any) -> None:
        """Fails where what was queued on the stream has been run, unless the device may do so by itself."""

    def require_errno(self, error: OSError, expected: int) -> None:
        assert error.errno == expected

    def require_pages(self, *ranges: tuple[int, int]) -> None:
        """Fails where cuFile has moved anything but the whole pages of these ranges of files."""

    def require_only(self, tensor: torch.Tensor) -> None:
        """Fails where cuFile has touched other memory."""

    def require_registered(self, count: int, size: int) -> None:
        """Fails unless so many pieces of memory, of so many bytes in all, are pinned."""

    def require_code_for_pinned_twice(self, code: int | None) -> None:
        """Fails where cuFile would answer otherwise when it is to take memory that it has already."""
        assert code is None or code > 5000

    def require_route(self, handle: aio_handle) -> None:
        """Fails where the handle's last transfer did not go through what this kind is about."""


class Simulated(PrivateDevice, Kind):
    """``aio_handle`` and the simulated device, which computes on the host and waits until somebody asks."""

    program = (
        "from nvme_ops import aio_handle\n"
        "from tests.doubles import private_device\n"
        "tensor, handle = private_device().tensor, aio_handle()\n"
    )

    def memory(self) -> int:
        """What is allocated on the device."""
        return int(self.now.device_blocks)

    def handle(self, lanes: int = 1) -> aio_handle:
        return aio_handle(intra_op_parallelism=lanes)

    @contextlib.contextmanager
    def elsewhere(self) -> Iterator[None]:
        with self.on(index=1) as stream, self.on(2), self.on(stream, 1):
            yield

    def require_pending(self, stream: Any) -> None:
        assert not self.idle(stream)

    def require_run(self, stream: Any) -> None:
        assert self.idle(stream)


class Doubles(Simulated):
    """``gds_handle``, a double of cuFile and the simulated device; used in the child that runs the test alone."""

    chunk, odd = BLOCK, 2 * MIB + 5

    def __init__(self, cufile: FakeCuFile) -> None:
        super().__init__()
        self.cufile = cufile

    def handle(self, lanes: int = 1) -> gds_handle:
        return gds_handle(BLOCK, intra_op_parallelism=lanes)

    def held(self) -> contextlib.AbstractContextManager[None]:
        return self.cufile.held(Function.READ)

    def wait_for_held_up(self) -> None:
        self.cufile.wait_for_held_up(Function.READ)

    def require_pages(self, *ranges: tuple[int, int]) -> None:
        now = self.cufile.now
        assert now.ragged == 0
        assert now.bytes_read + now.bytes_written == sum(whole_pages(*span) for span in ranges)

    def require_only(self, tensor: torch.Tensor) -> None:
        assert self.cufile.touched_only(tensor)

    def require_registered(self, count: int, size: int) -> None:
        assert (self.cufile.now.memories, self.cufile.now.memory_bytes) == (count, size)

    def require_code_for_pinned_twice(self, code: int | None) -> None:
        assert code == ALREADY_PINNED

    def require_route(self, handle: aio_handle) -> None:
        assert isinstance(handle, gds_handle)
        assert handle.last_path == "gds"


class Gpu(Kind):
    """A real GPU and a kind of handle, with a value of ``NVME_OPS_GDS``.

    Queues are kept busy with a kernel that spins, so a transfer that does not wait for it meets what stood in memory
    before.
    """

    odd = 3 * CHUNK + 5  # more in whole pages than what gds_handle compares its ways with, wherever it lies
    settle = staticmethod(torch.cuda.synchronize)
    memory = staticmethod(torch.cuda.memory_allocated)

    def __init__(self, name: str, mode: str, folder: Path) -> None:
        self.name, self.mode, self.folder = name, mode, folder
        self.count = torch.cuda.device_count()
        self.program = f"import nvme_ops\ntensor, handle = (lambda data: data.to('cuda')), nvme_ops.{name}()\n"

    @staticmethod
    def device(index: int = 0) -> torch.device:
        return torch.device("cuda", index)

    @property
    def may_take_cufile(self) -> bool:
        return (self.name, self.mode) == ("gds_handle", "auto")

    def tensor(self, data: torch.Tensor, index: int = 0) -> torch.Tensor:
        return data.to(self.device(index))

    def empty(self, *size: int, dtype: torch.dtype = torch.uint8, index: int = 0) -> torch.Tensor:
        bytes_ = math.prod(size) * dtype.itemsize
        there = torch.full((bytes_,), self.unwritten, dtype=torch.uint8, device=self.device(index))
        return there.view(dtype).view(size)

    @staticmethod
    def peek(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().cpu().view(-1).view(torch.uint8)

    def handle(self, lanes: int = 1) -> aio_handle:
        handle: aio_handle = getattr(nvme_ops, self.name)(intra_op_parallelism=lanes)
        if self.may_take_cufile:  # once the bounce path is measured, where there is no GPUDirect Storage
            path, there = self.folder / f"primed{id(handle)}", self.empty(TELLING)  # threads do so at once
            handle.sync_pwrite(there, path)
            handle.sync_pread(there, path)
            path.unlink()
        return handle

    @contextlib.contextmanager
    def on(self, stream: int | None = None, index: int = 0) -> Iterator[Any]:
        device = self.device(index)
        made = torch.cuda.Stream(device) if stream is None else torch.cuda.default_stream(device)
        with torch.cuda.device(index), torch.cuda.stream(made):
            yield made

    def elsewhere(self) -> contextlib.AbstractContextManager[Any]:
        return self.on(index=self.count - 1)

    def current(self) -> Any:
        return torch.cuda.current_device(), [torch.cuda.current_stream(index) for index in range(self.count)]

    def keep_busy(self) -> None:
        torch.cuda._sleep(SPIN)

    def computing(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def synchronize(self, stream: Any) -> None:
        stream.synchronize()

    def require_run(self, stream: Any) -> None:
        assert stream.query()

    def require_errno(self, error: OSError, expected: int) -> None:
        assert self.may_take_cufile or error.errno == expected  # cuFile may tell it in its own way

    def require_route(self, handle: aio_handle) -> None:
        if not self.may_take_cufile and isinstance(handle, gds_handle):
            assert handle.last_path == "bounce"


Device = Simulated | Gpu


@functools.cache
def cufile_refusal() -> str:
    """Why cuFile cannot work here, in the words of ``gds_handle``; empty where it can."""
    program = "import nvme_ops\ntry: nvme_ops.gds_handle()\nexcept RuntimeError as reason: print(reason)"
    try:
        return run_python(program, NVME_OPS_GDS="auto").stdout.strip()
    except subprocess.TimeoutExpired as late:
        return f"gds_handle() did not return within {late.timeout} s"


def code_of_refusal(call: Callable[..., object], *arguments: object) -> int | None:
    """The errno of the OSError that a call raises; None when it raises none."""
    try:
        call(*arguments)
    except OSError as error:
        return error.errno
    return None


on_a_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="torch.cuda is not available: no GPU, or torch without CUDA"
    ),
]
SIMULATED = pytest.mark.skipif(
    torch.cuda.is_available() or shutil.which(os.environ.get("CXX", "c++")) is None,
    reason="torch has a real accelerator, or there is no C++ compiler, which builds the simulated one",
)
HANDLES = {"gpu-aio": ("aio_handle", "auto"), "gpu-gds": ("gds_handle", "auto"), "gpu-gds-off": ("gds_handle", "off")}
GPUS = [pytest.param(name, marks=on_a_gpu) for name in HANDLES]


def on_kinds(*names: Any) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("device", names, indirect=True)


on_doubles = on_kinds("simulated", "fake-cufile")
on_simulated = on_kinds("simulated")
on_gpus = on_kinds(*GPUS)
in_own_process = on_kinds("simulated", *GPUS)


def largest_file(size: int) -> contextlib.AbstractContextManager[None]:
    """Lets this process make no file longer: in one that is longer, it cannot write beyond."""
    return limited(resource.RLIMIT_FSIZE, size)  # in no child: CUDA does not survive a fork


def round_trip(device: Device, handle: aio_handle, path: Path, size: int = 0, offset: int = 0) -> None:
    data, back = sample(size or device.odd), device.empty(size or device.odd)
    handle.sync_pwrite(device.tensor(data), path, offset)
    assert torch.equal(contents(path)[offset:], data)
    handle.sync_pread(back, path, offset)
    assert torch.equal(device.peek(back), data)


def still_works(device: Device, handle: aio_handle, folder: Path) -> None:
    path, data, back = folder / "afterwards", sample(device.odd, 9), device.empty(device.odd)
    handle.write(device.tensor(data), path)
    handle.async_pread(back, path)
    assert handle.wait() == 1
    assert torch.equal(device.peek(back), data)
    device.require_route(handle)


# Every way in which a user moves one tensor: at a byte offset of a file, done when the call returns.
Call = Callable[[aio_handle, torch.Tensor, Path, int], object]


def _of_file(method: str, mode: str) -> Call:
    def call(handle: aio_handle, tensor: torch.Tensor, path: Path, offset: int) -> None:
        if mode == "r+":
            path.touch()
        with nvme_ops.open(path, mode, handle=handle) as file:  # type: ignore[arg-type]
            assert getattr(file, method)(tensor, offset).result() == tensor.nbytes

    return call


def _ways(verb: str, mode: str) -> dict[str, Call]:
    call = f"p{verb}"
    calls: dict[str, Any] = {
        f"{verb}-validate": lambda h, t, path, at: getattr(h, verb)(t, path, True, file_offset=at),
        f"{call}-validate-async": lambda h, t, path, at: (getattr(h, call)(t, path, True, True, at), h.wait()),
        f"sync_{call}": lambda h, t, path, at: getattr(h, f"sync_{call}")(t, path, at),
        f"async_{call}": lambda h, t, path, at: (getattr(h, f"async_{call}")(t, path, at), h.wait()),
        f"submit_{call}": lambda h, t, path, at: getattr(h, f"submit_{call}")(t, path, at).result(),
        f"submit_{call}v": lambda h, t, path, at: getattr(h, f"submit_{call}v")([t], path, [at]).result(),
        f"File.{call}_async": _of_file(f"{call}_async", mode),
    }
    return calls


WRITES, READS = _ways("write", "r+"), _ways("read", "r")
both_ways = pytest.mark.parametrize("ways", [WRITES, READS], ids=["write", "read"])
