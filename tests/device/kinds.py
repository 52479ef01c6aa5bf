"""The kinds of device that the contract is tested on, with the same methods."""

from __future__ import annotations

import contextlib
import functools
import math
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import nvme_ops
from nvme_ops import aio_handle
from nvme_ops.gds import gds_handle
from tests.conftest import MIB, limited, pattern
from tests.fake_cufile import FakeCuFile, Function
from tests.gpu.support import CHUNK, GDS, KINDS, ODD, Kind, empty, gpu, keep_busy, on_a_gpu, prime, stream_for
from tests.private_device import PrivateDevice

PAGE, BLOCK = 4096, 65536
ALREADY_PINNED = 5023  # cuFile's code


@functools.cache
def _random() -> torch.Tensor:
    return pattern(100 * MIB)


def sample(size: int, seed: int = 0) -> torch.Tensor:
    """Like ``pattern``, from one pool for all tests."""
    found = _random()[4096 * seed :][:size]
    assert len(found) == size
    return found


def whole_pages(offset: int, size: int) -> int:
    first = -(-offset // PAGE) * PAGE
    return max(0, (offset + size) // PAGE * PAGE - first)


class Device:
    """What the contract asks of every kind; where one has nothing to do, this does nothing."""

    #: What ``empty`` holds.
    unwritten = PrivateDevice.unwritten
    #: Bytes that are moved at once, and of a tensor that is several of them and a little more.
    chunk, odd = CHUNK, 2 * CHUNK + 5
    count: int
    #: Makes ``handle`` and ``tensor(data)`` in a program of its own.
    program: str
    #: A device, data on it, new memory on it, and the bytes that a tensor has at this moment.
    device: Callable[..., torch.device]
    tensor: Callable[..., torch.Tensor]
    empty: Callable[..., torch.Tensor]
    peek: Callable[[torch.Tensor], torch.Tensor]
    #: What is allocated on the device.
    memory: Callable[[], int]
    #: A handle with so many lanes.
    handle: Callable[..., aio_handle]
    #: A block with a device and its default stream, or a new one, this thread's; one with another device.
    on: Callable[..., contextlib.AbstractContextManager[Any]]
    elsewhere: Callable[[], contextlib.AbstractContextManager[Any]]
    #: This thread's device and streams.
    current: Callable[[], Any]
    #: Waits for what is queued on a stream.
    synchronize: Callable[[Any], None]

    def settle(self) -> None:
        """Waits for what was queued to prepare the test."""

    def keep_busy(self) -> None:
        """Has the current stream do for a while what it is to do before the next; one that waits to be asked does."""

    def computing(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def require_pending(self, stream: Any) -> None:
        """Fails where what was queued on the stream has been run, unless the device may do so by itself."""

    def require_run(self, stream: Any) -> None:
        """Fails where what was queued on the stream has not been run yet."""
        assert stream.query()

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


class Simulated(Device):
    """``aio_handle`` and the simulated device, which computes on the host and waits until somebody asks."""

    program = (
        "from nvme_ops import aio_handle\n"
        "from tests.private_device import private_device\n"
        "tensor, handle = private_device().tensor, aio_handle()\n"
    )

    def __init__(self, simulated: PrivateDevice) -> None:
        self.simulated = simulated
        self.count = simulated.count
        self.device, self.tensor, self.empty = simulated.device, simulated.tensor, simulated.empty
        self.peek, self.computing = simulated.peek, simulated.computing  # type: ignore[method-assign]
        self.synchronize = simulated.synchronize
        self.memory = lambda: int(simulated.statistics().device_blocks)

    def handle(self, lanes: int = 1) -> aio_handle:
        return aio_handle(intra_op_parallelism=lanes)

    def on(self, default_stream: bool = False, index: int = 0) -> contextlib.AbstractContextManager[Any]:
        return self.simulated.on(0 if default_stream else None, index)

    @contextlib.contextmanager
    def elsewhere(self) -> Iterator[None]:
        with self.simulated.on(index=1) as stream, self.simulated.on(2), self.simulated.on(stream, 1):
            yield

    def current(self) -> Any:
        return self.simulated.current_device(), [self.simulated.stream(index) for index in range(self.count)]

    def require_pending(self, stream: Any) -> None:
        assert not self.simulated.idle(stream)

    def require_run(self, stream: Any) -> None:
        assert self.simulated.idle(stream)

    def held(self) -> contextlib.AbstractContextManager[Any]:
        return self.simulated.held()

    def wait_for_held_up(self) -> None:
        self.simulated.wait_for_held_up()


class SimulatedCuFile(Simulated):
    """``gds_handle``, a double of cuFile and the simulated device; used in the child that runs the test alone."""

    chunk, odd = BLOCK, 2 * MIB + 5

    def __init__(self, simulated: PrivateDevice, cufile: FakeCuFile) -> None:
        super().__init__(simulated)
        self.cufile = cufile

    def handle(self, lanes: int = 1) -> gds_handle:
        return gds_handle(BLOCK, intra_op_parallelism=lanes)

    def held(self) -> contextlib.AbstractContextManager[Any]:
        return self.cufile.held(Function.READ)

    def wait_for_held_up(self) -> None:
        self.cufile.wait_for_held_up(Function.READ)

    def require_pages(self, *ranges: tuple[int, int]) -> None:
        now = self.cufile.statistics()
        assert now.ragged == 0
        assert now.bytes_read + now.bytes_written == sum(whole_pages(*each) for each in ranges)

    def require_only(self, tensor: torch.Tensor) -> None:
        assert self.cufile.touched_only(tensor)

    def require_registered(self, count: int, size: int) -> None:
        now = self.cufile.statistics()
        assert (now.memories, now.memory_bytes) == (count, size)

    def require_code_for_pinned_twice(self, code: int | None) -> None:
        assert code == ALREADY_PINNED

    def require_route(self, handle: aio_handle) -> None:
        assert isinstance(handle, gds_handle)
        assert handle.last_path == "gds"


class Gpu(Device):
    """A real GPU and one kind of handle."""

    odd = ODD  # what gds_handle compares its ways with

    def __init__(self, kind: Kind, folder: Path) -> None:
        self.kind, self.folder = kind, folder
        self.count = torch.cuda.device_count()
        self.device, self.memory = gpu, torch.cuda.memory_allocated
        self.keep_busy, self.settle = keep_busy, torch.cuda.synchronize  # type: ignore[method-assign]
        self.tensor = lambda data, index=0: data.to(gpu(index))
        self.peek = lambda tensor: tensor.detach().cpu().view(-1).view(torch.uint8)
        self.empty = self._empty
        self.program = f"import nvme_ops\ntensor, handle = (lambda data: data.to('cuda')), nvme_ops.{kind.name}()\n"

    def _empty(self, *size: int, dtype: torch.dtype = torch.uint8, index: int = 0) -> torch.Tensor:
        return empty(math.prod(size) * dtype.itemsize, index).fill_(self.unwritten).view(dtype).view(size)

    def handle(self, lanes: int = 1) -> aio_handle:
        handle = self.kind.make(intra_op_parallelism=lanes)
        if self.kind is GDS:
            prime(handle, self.folder)
        return handle

    @contextlib.contextmanager
    def on(self, default_stream: bool = False, index: int = 0) -> Iterator[torch.cuda.Stream]:
        stream = stream_for(default_stream, index)
        with torch.cuda.device(index), torch.cuda.stream(stream):
            yield stream

    def elsewhere(self) -> contextlib.AbstractContextManager[Any]:
        return self.on(index=self.count - 1)

    def current(self) -> Any:
        return torch.cuda.current_device(), [torch.cuda.current_stream(index) for index in range(self.count)]

    def synchronize(self, stream: Any) -> None:
        stream.synchronize()

    def require_errno(self, error: OSError, expected: int) -> None:
        assert self.kind is GDS or error.errno == expected  # cuFile may tell it in its own way

    def require_route(self, handle: aio_handle) -> None:
        if self.kind is not GDS and isinstance(handle, gds_handle):
            assert handle.last_path == "bounce"


GPUS = [pytest.param(name, marks=on_a_gpu) for name in KINDS]


def on_kinds(*names: Any) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("device", names, indirect=True)


on_doubles = on_kinds("simulated", "fake-cufile")
on_simulated = on_kinds("simulated")
on_gpus = on_kinds(*GPUS)
in_own_process = on_kinds("simulated", *GPUS)


def largest_file(size: int) -> contextlib.AbstractContextManager[None]:
    """Lets this process make no file longer: in one that is longer, it cannot write beyond."""
    return limited(resource.RLIMIT_FSIZE, size)  # in no child: CUDA does not survive a fork


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


WRITES: dict[str, Call] = {
    "write-validate": lambda h, t, path, at: h.write(t, path, True, file_offset=at),
    "pwrite-validate-async": lambda h, t, path, at: (h.pwrite(t, path, True, True, at), h.wait()),
    "sync_pwrite": lambda h, t, path, at: h.sync_pwrite(t, path, at),
    "async_pwrite": lambda h, t, path, at: (h.async_pwrite(t, path, at), h.wait()),
    "submit_pwrite": lambda h, t, path, at: h.submit_pwrite(t, path, at).result(),
    "submit_pwritev": lambda h, t, path, at: h.submit_pwritev([t], path, [at]).result(),
    "File.pwrite_async": _of_file("pwrite_async", "r+"),
}
READS: dict[str, Call] = {
    "read-validate": lambda h, t, path, at: h.read(t, path, True, file_offset=at),
    "pread-validate-async": lambda h, t, path, at: (h.pread(t, path, True, True, at), h.wait()),
    "sync_pread": lambda h, t, path, at: h.sync_pread(t, path, at),
    "async_pread": lambda h, t, path, at: (h.async_pread(t, path, at), h.wait()),
    "submit_pread": lambda h, t, path, at: h.submit_pread(t, path, at).result(),
    "submit_preadv": lambda h, t, path, at: h.submit_preadv([t], path, [at]).result(),
    "File.pread_async": _of_file("pread_async", "r"),
}
both_ways = pytest.mark.parametrize("ways", [WRITES, READS], ids=["write", "read"])
