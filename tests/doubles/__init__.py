"""Doubles, made of host memory, of what this package uses where there is a GPU: an accelerator of torch and libcufile.

The accelerator's streams run nothing before somebody waits for them, so a missing wait shows as wrong bytes. What it
has no operator for, torch computes on the host, between a copy there and one back. The library is one over pread and
pwrite that does what cuFile's interface promises. Both fail on request and tell of every misuse; neither says anything
about the speed, limits or errors of what it stands for.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import functools
import gc
import os
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map

from nvme_ops.base.native import native
from nvme_ops.op_builder import finished, jit, machine
from nvme_ops.op_builder.recipe import Recipe, headers

FOLDER = Path(__file__).parent
PATIENCE = 30  # seconds until a test gives up waiting for a call

NVIDIA_FS = 2  # a major version of nvidia-fs that is there
PEER_TO_PEER = 1 << 4  # the bit of CU_FILE_P2P_SUPPORTED

# Names without which libcufile does not say that it is a double, is as before cuFile 1.14, or cannot read.
WITHOUT_MARKER, INCOMPLETE = ("nvme_ops_fake_cufile",), ("cuFileRead",)
OLD = ("cuFileDriverClose_v2", "cuFileGetVersion", "cuFileSetParameterString", "cuFileSetParameterBool")


def build(name: str) -> Path:
    """The shared object of ``name``.cpp: compiled as an op is, once for these sources, this torch and compiler."""
    recipe = Recipe(
        name=f"double_of_{name}",
        sources=(FOLDER / f"{name}.cpp",),
        united=(),
        headers=tuple(headers(FOLDER)),
        include_paths=(),
        cxx_args=("-O0", "-g0"),
        ldflags=("-Wl,--as-needed",),
        compiler=machine.find_compiler(),
    )
    return (finished.find_cached(recipe) or jit.build(recipe)).library


def _numbers(*names: str) -> list[tuple[str, Any]]:
    return [(name, ctypes.c_int64) for name in names]


class Calls(ctypes.Structure):
    """The calls of one function: ``made`` so far, and ``held_up`` now."""

    made: int
    held_up: int
    held: int
    _fields_ = _numbers("made", "held_up", "held", "first", "count", "result", "error", "most", "delay")

    def fail(
        self, result: int = 0, *, error: int = 0, most: int = -1, delay: float = 0, first: int = 1, count: int = 1
    ) -> None:
        """Lets ``count`` calls from the ``first`` one on return ``result``, with an ``errno``, move at most ``most``
        bytes, or take ``delay`` seconds longer. A ``count`` of -1 is for ever.
        """
        self.count = 0  # until all else is set
        self.first, self.result, self.error, self.most, self.delay = first, result, error, most, int(delay * 1000)
        self.count = count

    def wait_for_held_up(self, count: int = 1) -> None:
        end = time.monotonic() + PATIENCE
        while self.held_up < count:
            assert time.monotonic() < end, f"{self.held_up} calls, not {count}"
            time.sleep(0.001)


@contextlib.contextmanager
def held(*functions: Calls) -> Iterator[None]:
    """Holds up all who call the functions, until they are not ``held`` any more: at the end of the block."""
    for calls in functions:
        calls.held = 1
    try:
        yield
    finally:
        for calls in functions:
            calls.held = 0


class Double:
    """A shared object and what it lets a test see and set; it is loaded when it is first used."""

    State: type[ctypes.Structure]
    state_name: str

    def __init__(self, path: Path) -> None:
        self.path = path

    @functools.cached_property
    def library(self) -> ctypes.CDLL:
        library = ctypes.CDLL(str(self.path))
        library.violations_so_far.restype = ctypes.c_char_p
        return library

    @functools.cached_property
    def now(self) -> Any:
        """The structure that both sides read and write."""
        return self.State.in_dll(self.library, self.state_name)

    def violations(self) -> str:
        return str(self.library.violations_so_far().decode())


# The accelerator


class DeviceState(ctypes.Structure):
    """Blocks of memory, of the device and page-locked, and events that are alive; what there is."""

    _fields_ = [
        ("copies", Calls),
        ("allocations", Calls),
        *_numbers(
            "bytes", "limit", "device_blocks", "pinned_blocks", "events", "pinned_memory", "copying_at_once", "random"
        ),
        ("rates", ctypes.c_int64 * 3),
    ]


class Current(ctypes.Structure):
    """A thread's device, and its stream of each."""

    _fields_ = [("device", ctypes.c_int64), ("streams", ctypes.c_int64 * 2)]


_library = torch.library.Library("aten", "IMPL")


def _on_host(function: Any) -> Any:
    """An operation that torch does not compute on the host by itself, of tensors the first of which is there."""

    def run(*arguments: Any) -> Any:
        there = arguments[0].device
        moved = tree_map(lambda value: value.cpu() if isinstance(value, torch.Tensor) else value, arguments)
        return tree_map(lambda value: value.to(there) if isinstance(value, torch.Tensor) else value, function(*moved))

    return run


def _convolution_backward(grad: Any, given: Any, weight: Any, *options: Any) -> Any:
    bias = [grad.shape[1]]
    return torch.ops.aten.convolution_backward.default(grad, given, weight, bias, *options)


@functools.cache
def _register() -> Path:
    """From now on torch has an accelerator: renaming is how torch learns of one, and it looks for such a module."""
    path, module = build("device"), types.ModuleType("torch.privateuseone")
    torch.ops.load_library(str(path))
    _library.impl("convolution_overrideable", _on_host(torch.ops.aten.convolution.default), "PrivateUse1")
    _library.impl("convolution_backward_overrideable", _on_host(_convolution_backward), "PrivateUse1")
    torch.utils.rename_privateuse1_backend("privateuseone")
    vars(module).update(
        is_available=lambda: True,
        device_count=lambda: PrivateDevice.count,
        get_amp_supported_dtype=lambda: [torch.bfloat16],
        _is_in_bad_fork=lambda: False,  # without it, each seeding warns
        manual_seed_all=lambda seed: None,
        device=lambda where: contextlib.nullcontext(),  # torch.load makes it the current one, and names it as well
    )
    torch._register_device_module("privateuseone", module)
    return path


class PrivateDevice(Double):
    """The device as the tests steer it. Streams are numbers, 0 the default one; all calls are of the calling thread."""

    State, state_name = DeviceState, "pd_state"
    count = 2
    unwritten = 0xEE  # kUnwritten of device.cpp

    def __init__(self) -> None:
        super().__init__(_register())
        self.library.pd_new_stream.restype = ctypes.c_int64
        self.library.pd_current.restype = ctypes.POINTER(Current)
        self.library.pd_idle.restype = self.library.pd_synchronize.restype = ctypes.c_bool

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
        there = bytearray(ctypes.string_at(tensor.data_ptr(), tensor.nbytes) if tensor.nbytes else b"\0")
        return torch.frombuffer(there, dtype=torch.uint8)[: tensor.nbytes]

    def current(self) -> tuple[int, list[int]]:
        """This thread's device, and its stream of each."""
        current = self.library.pd_current().contents
        return current.device, list(current.streams)

    @contextlib.contextmanager
    def on(self, stream: int | None = None, index: int = 0) -> Iterator[Any]:
        """Makes a device and a stream of it, a new one by default, this thread's."""
        stream = self.library.pd_new_stream(index) if stream is None else stream
        current, (device, streams) = self.library.pd_current().contents, self.current()
        current.device, current.streams[index] = index, stream
        try:
            yield stream
        finally:
            current.device, current.streams[index] = device, streams[index]

    def idle(self, stream: int, index: int = 0) -> bool:
        return bool(self.library.pd_idle(index, ctypes.c_int64(stream)))

    def synchronize(self, stream: int = 0, index: int = 0) -> None:
        """Runs what is queued on the stream; RuntimeError when some of it failed."""
        if not self.library.pd_synchronize(index, ctypes.c_int64(stream)):
            raise RuntimeError("a copy failed")

    @contextlib.contextmanager
    def _with(self, switch: str, value: int) -> Iterator[None]:
        before = getattr(self.now, switch)
        setattr(self.now, switch, value)
        try:
            yield
        finally:
            setattr(self.now, switch, before)

    def pinned_memory(self, available: bool) -> contextlib.AbstractContextManager[None]:
        """Whether torch gets page-locked memory. Not outside of this block: other tests expect none."""
        return self._with("pinned_memory", available)

    def computing(self) -> contextlib.AbstractContextManager[None]:
        """For programs that free what is queued, whose memory a real device gives away in the order of its stream."""
        return self._with("copying_at_once", 1)

    def in_random_order(self, seed: int) -> contextlib.AbstractContextManager[None]:
        """Runs some of what is queued early, in an order that a real device may have; with 0 nothing."""
        return self._with("random", seed * 0x9E3779B97F4A7C15 % (1 << 63))

    @functools.cached_property
    def _time(self) -> int:
        """Starts the thread that keeps time, and returns in which process it is."""
        self.library.pd_keep_time()
        return os.getpid()

    @contextlib.contextmanager
    def in_time(self, to_device: float = 0, from_device: float = 0, computing: float = 0) -> Iterator[None]:
        """Work takes as long as at these rates, in bytes a second; 0: no time. What computes counts its arguments."""
        assert self._time == os.getpid(), "the thread that keeps time is the parent's: call this in a child alone"
        self.now.rates[:] = [int(rate) for rate in (to_device, from_device, computing)]
        try:
            yield
            for index in range(self.count):
                torch.accelerator.synchronize(self.device(index))
        finally:
            self.now.rates[:] = [0, 0, 0]

    @contextlib.contextmanager
    def left_as_found(self) -> Iterator[None]:
        """With page-locked memory; fails where memory, events, or another current stream or device are left behind."""
        alive = ("device_blocks", "pinned_blocks", "events")
        before, current, violations = [getattr(self.now, name) for name in alive], self.current(), self.violations()
        with self.pinned_memory(True):
            yield
        gc.collect()
        native().wait_for_ending(native().endings(), 0)  # transfers that nobody asks for have their tensors until then
        assert self.violations() == violations
        for name, number in zip(alive, before, strict=True):
            assert getattr(self.now, name) <= number, name
        assert self.current() == current

    @contextlib.contextmanager
    def failing(self, what: str, skipped: int = 0, count: int = 1) -> Iterator[None]:
        """Lets a copy fail after ``skipped`` more: its ``"queue"``ing, its ``"run"``, or its event's ``"record"``.

        Or an ``"allocation"`` of the device's memory, by torch's error that there is none.
        """
        calls = self.now.allocations if what == "allocation" else self.now.copies
        calls.fail(1 + ("queue", "run", "record", "allocation").index(what), first=skipped + 1, count=count)
        try:
            yield
        finally:
            calls.count = 0

    def room(self, nbytes: int) -> contextlib.AbstractContextManager[None]:
        """Lets the device have so many more bytes of memory than are in use."""
        return self._with("limit", self.now.bytes + nbytes)

    def held(self) -> contextlib.AbstractContextManager[None]:
        """Holds up all who want to copy until the end of the block."""
        return held(self.now.copies)

    def wait_for_held_up(self) -> None:
        self.now.copies.wait_for_held_up()


private_device = functools.cache(PrivateDevice)  # the only one in this process: torch knows one of this kind


# The library


class Function(enum.IntEnum):
    """cuFile's functions, in the order of the enumeration in cufile.cpp."""

    DRIVER_OPEN = 0
    DRIVER_CLOSE = enum.auto()
    PROPERTIES = enum.auto()
    REGISTER_FILE = enum.auto()
    DEREGISTER_FILE = enum.auto()
    REGISTER_MEMORY = enum.auto()
    DEREGISTER_MEMORY = enum.auto()
    READ = enum.auto()
    WRITE = enum.auto()
    SET_FLAG = enum.auto()


class CuFileState(ctypes.Structure):
    """What the machine has, to be told before the driver is opened; what stands registered now, and was done so far.

    ``ragged`` counts transfers not of whole pages; ``compatible`` tells whether compatibility mode is allowed.
    """

    _fields_ = [
        ("calls", Calls * len(Function)),
        *_numbers("nvidia_fs", "features", "memory_limit"),
        *_numbers("drivers", "files", "memories", "memory_bytes"),
        *_numbers("at_once", "bytes_read", "bytes_written", "ragged", "lowest", "highest", "compatible"),
    ]


class FakeCuFile(Double):
    """The library as the tests steer it, in the process that loads it."""

    State, state_name = CuFileState, "fake_state"

    def without(self, names: tuple[str, ...], folder: Path) -> FakeCuFile:
        """Another one, in ``folder``, that lacks these names."""
        there = self.path.read_bytes()
        for name in names:
            there = there.replace(b"\0%b\0" % name.encode(), b"\0_%b\0" % name[1:].encode())
        (folder / "libcufile.so.0").write_bytes(there)
        return FakeCuFile(folder / "libcufile.so.0")

    def offer(self, nvidia_fs: int = 0, features: int = 0, memory: int = sys.maxsize) -> None:
        """What the machine has, and how many bytes can be registered."""
        self.now.nvidia_fs, self.now.features, self.now.memory_limit = nvidia_fs, features, memory

    def of(self, function: Function) -> Calls:
        calls: Calls = self.now.calls[function]
        return calls

    def fail(self, function: Function, code: int = 0, *, error: int = 0, **how: Any) -> None:
        """As ``Calls.fail``, with cuFile's ``code`` or an ``errno``."""
        transfers = function in (Function.READ, Function.WRITE)
        self.of(function).fail(-1 if error else -code if transfers else code, error=error, **how)

    def mend(self) -> None:
        for calls in self.now.calls:
            calls.count = 0

    def held(self, *functions: Function) -> contextlib.AbstractContextManager[None]:
        return held(*map(self.of, functions))

    def release(self, function: Function) -> None:
        """Lets go those that are held up, before the block of ``held`` ends."""
        self.of(function).held = 0

    def wait_for_held_up(self, function: Function, count: int = 1) -> None:
        self.of(function).wait_for_held_up(count)

    def calls(self, function: Function) -> int:
        return self.of(function).made

    def touched_only(self, tensor: torch.Tensor) -> bool:
        """Whether all memory that was read and written so far is the tensor's."""
        return tensor.data_ptr() <= self.now.lowest and self.now.highest <= tensor.data_ptr() + tensor.nbytes

    def check_idle(self, drivers: int = 1) -> None:
        """Fails where the library was misused, or something is still registered with it."""
        now = self.now
        assert self.violations() == ""
        assert (now.drivers, now.files, now.memories, now.memory_bytes) == (drivers, 0, 0, 0)
