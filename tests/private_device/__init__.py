"""A device made of host memory, for the tests of tensors on accelerators where there is none.

Its streams run nothing before somebody waits for them, so a missing wait shows as wrong bytes. What it has no operator
for, torch computes on the host, between a copy there and one back. It says nothing about any real device's speed or
errors.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import gc
import hashlib
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path

import torch

from nvme_ops._native import native

FOLDER = Path(__file__).parent
UNWRITTEN = 0xEE  # kUnwritten of queue.h


class Statistics(ctypes.Structure):
    """What the device holds: blocks of memory and events alive, copies queued so far, uses of freed memory."""

    device_blocks: int
    pinned_blocks: int
    events: int
    copies: int
    violations: int
    _fields_ = [(name, ctypes.c_int64) for name in ("device_blocks", "pinned_blocks", "events", "copies", "violations")]


def build() -> Path:
    """The shared object: compiled once for these sources, this torch and this Python."""
    from torch.utils import cpp_extension

    sources = sorted(FOLDER.glob("*.cpp"))
    parts = [path.read_bytes() for path in (*sources, *FOLDER.glob("*.h"))]
    key = hashlib.sha256(b"\0".join([*parts, torch.__version__.encode(), sys.version.encode()])).hexdigest()[:16]
    folder = Path(cpp_extension._get_build_directory("nvme_ops_private_device", verbose=False)) / key
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / "private_device.so"
    with open(folder / "building", "w") as building:
        fcntl.flock(building, fcntl.LOCK_EX)
        if not library.exists():
            (folder / "lock").unlink(missing_ok=True)  # left by a build that was killed: torch would wait for ever
            cpp_extension.load(
                "private_device",
                [str(source) for source in sources],
                extra_cflags=["-O0", "-g0"],
                build_directory=str(folder),
                is_python_module=False,
            )
    return library


class PrivateDevice:
    """The device as the tests steer it. Streams are numbers, 0 the default one; all calls are of the calling thread."""

    count = 2
    unwritten = UNWRITTEN

    def __init__(self) -> None:
        path = build()
        torch.ops.load_library(str(path))
        self._library = ctypes.CDLL(str(path))
        for name in ("pd_stream", "pd_new_stream"):
            getattr(self._library, name).restype = ctypes.c_int64
        self._library.pd_start()
        # From now on torch has an accelerator: renaming is how torch learns of one, and it looks for such a module.
        torch.utils.rename_privateuse1_backend("privateuseone")
        module = types.ModuleType("torch.privateuseone")
        module.is_available = lambda: True  # type: ignore[attr-defined]
        module.device_count = lambda: self.count  # type: ignore[attr-defined]
        module.get_amp_supported_dtype = lambda: [torch.bfloat16]  # type: ignore[attr-defined]
        module._is_in_bad_fork = lambda: False  # type: ignore[attr-defined]  # without it, each seeding warns
        module.manual_seed_all = lambda seed: None  # type: ignore[attr-defined]
        torch._register_device_module("privateuseone", module)

    @staticmethod
    def device(index: int = 0) -> torch.device:
        return torch.device("privateuseone", index)

    def tensor(self, data: torch.Tensor, index: int = 0) -> torch.Tensor:
        return data.to(self.device(index))

    def empty(self, *size: int, dtype: torch.dtype = torch.uint8, index: int = 0) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=self.device(index))

    @staticmethod
    def peek(tensor: torch.Tensor) -> torch.Tensor:
        """The bytes that stand in the memory of a contiguous tensor at this moment, whatever is queued."""
        size = tensor.numel() * tensor.element_size()
        if size == 0:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(bytearray(ctypes.string_at(tensor.data_ptr(), size)), dtype=torch.uint8)

    def current_device(self) -> int:
        return int(self._library.pd_device())

    def stream(self, index: int = 0) -> int:
        return int(self._library.pd_stream(index))

    @contextlib.contextmanager
    def on(self, stream: int | None = None, index: int = 0) -> Iterator[int]:
        """Makes a device and a stream of it, a new one by default, this thread's."""
        stream = int(self._library.pd_new_stream(index)) if stream is None else stream
        device, before = self.current_device(), self.stream(index)
        self._library.pd_set_device(index)
        self._library.pd_set_stream(index, ctypes.c_int64(stream))
        try:
            yield stream
        finally:
            self._library.pd_set_stream(index, ctypes.c_int64(before))
            self._library.pd_set_device(device)

    def idle(self, stream: int, index: int = 0) -> bool:
        return bool(self._library.pd_idle(index, ctypes.c_int64(stream)))

    def synchronize(self, stream: int = 0, index: int = 0) -> None:
        """Runs what is queued on the stream; RuntimeError when some of it failed."""
        if self._library.pd_synchronize(index, ctypes.c_int64(stream)) != 0:
            raise RuntimeError("a copy failed")

    @contextlib.contextmanager
    def pinned_memory(self, available: bool) -> Iterator[None]:
        """Whether torch gets page-locked memory. Not outside of this block: other tests expect none."""
        self._library.pd_set_pinned(int(available))
        try:
            yield
        finally:
            self._library.pd_set_pinned(0)

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """For programs that free what is queued, whose memory a real device gives away in the order of its stream."""
        self._library.pd_set_copying_at_once(1)
        try:
            yield
        finally:
            self._library.pd_set_copying_at_once(0)

    @contextlib.contextmanager
    def left_as_found(self) -> Iterator[None]:
        """With page-locked memory; fails where memory, events, or another current stream or device are left behind."""
        before, streams = self.statistics(), [self.stream(index) for index in range(self.count)]
        with self.pinned_memory(True):
            yield
        gc.collect()
        native().wait_for_ending(native().endings(), 0)  # transfers that nobody asks for have their tensors until then
        after = self.statistics()
        assert after.violations == before.violations
        for name in ("device_blocks", "pinned_blocks", "events"):
            assert getattr(after, name) <= getattr(before, name), name
        assert self.current_device() == 0
        assert [self.stream(index) for index in range(self.count)] == streams

    @contextlib.contextmanager
    def failing(self, what: str, skipped: int = 0) -> Iterator[None]:
        """Lets a copy fail after ``skipped`` more: its ``"queue"``ing, its ``"run"``, or its event's ``"record"``."""
        self._library.pd_fail_copy(("none", "queue", "run", "record").index(what), skipped)
        try:
            yield
        finally:
            self._library.pd_fail_copy(0, 0)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Holds up all who want to copy between host and device until the end of the block."""
        self._library.pd_hold(1)
        try:
            yield
        finally:
            self._library.pd_hold(0)

    def wait_for_held_up(self) -> None:
        while not self._library.pd_held_up():
            time.sleep(0.001)

    def statistics(self) -> Statistics:
        now = Statistics()
        self._library.pd_statistics(ctypes.byref(now))
        return now


@functools.lru_cache(maxsize=1)
def private_device() -> PrivateDevice:
    """The only one in this process: torch knows one device of this kind."""
    return PrivateDevice()
