"""A libcufile over pread and pwrite on host memory, for the tests of the gds op where there is no GPU.

It does what cuFile's interface promises, fails on request, and tells of every misuse. It says nothing about the real
library's or a GPU's speed, limits or errors.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import fcntl
import functools
import hashlib
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import torch

FOLDER = Path(__file__).parent
PATIENCE = 30_000  # milliseconds until a test gives up waiting for a call

NVIDIA_FS = 2  # a major version of nvidia-fs that is there
PEER_TO_PEER = 1 << 4  # the bit of CU_FILE_P2P_SUPPORTED

# Names without which it does not say that it is a double, is as before cuFile 1.14, or cannot read.
WITHOUT_MARKER, INCOMPLETE = "nvme_ops_fake_cufile", "cuFileRead"
OLD = "cuFileDriverClose_v2; cuFileGetVersion; cuFileSetParameter*"


class Function(enum.IntEnum):
    """cuFile's functions, in the order of the enumeration in fake_cufile.cpp."""

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


class Statistics(ctypes.Structure):
    """What stands registered now, and what was done so far.

    ``ragged`` counts transfers not of whole pages; ``compatible`` tells whether compatibility mode is allowed.
    """

    calls: ctypes.Array[ctypes.c_int64]
    drivers: int
    files: int
    memories: int
    memory_bytes: int
    at_once: int
    bytes_read: int
    bytes_written: int
    ragged: int
    lowest: int
    highest: int
    compatible: int
    _fields_ = [
        ("calls", ctypes.c_int64 * len(Function)),
        *((name, ctypes.c_int64) for name in ("drivers", "files", "memories", "memory_bytes", "at_once")),
        *((name, ctypes.c_int64) for name in ("bytes_read", "bytes_written", "ragged")),
        *((name, ctypes.c_size_t) for name in ("lowest", "highest")),
        ("compatible", ctypes.c_int64),
    ]


class _Fault(ctypes.Structure):
    _fields_ = [
        ("function", ctypes.c_int),
        ("first", ctypes.c_int64),
        ("count", ctypes.c_int64),
        ("result", ctypes.c_int64),
        ("error", ctypes.c_int),
        ("most", ctypes.c_int64),
        ("delay", ctypes.c_int),
    ]


def build(without: str = "") -> Path:
    """Returns the library, which is compiled once, and linked once ``without`` some of its names."""
    from torch.utils import cpp_extension

    from nvme_ops.op_builder import machine

    found, source = machine.find_compiler(), FOLDER / "fake_cufile.cpp"
    assert found is not None
    key = hashlib.sha256("\0".join([source.read_text(), *found.command]).encode()).hexdigest()[:16]
    folder = Path(cpp_extension._get_build_directory("nvme_ops_fake_cufile", verbose=False)) / key
    folder.mkdir(parents=True, exist_ok=True)
    compiled, library = folder / "fake_cufile.o", folder / f"libfake_cufile{re.sub(r'[^a-zA-Z]+', '-', without)}.so"
    with open(folder / "building", "w") as building:
        fcntl.flock(building, fcntl.LOCK_EX)
        steps = {
            compiled: ["-std=c++17", "-O0", "-fPIC", "-c", str(source)],
            library: ["-shared", "-pthread", str(compiled), f"-Wl,--version-script={folder / 'names'}"],
        }
        (folder / "names").write_text("{ global: *; local: %s; };" % (without or "none"))
        for made, words in steps.items():
            if not made.exists():
                subprocess.run([*found.command, *words, "-o", f"{made}.unfinished"], check=True)
                os.rename(f"{made}.unfinished", made)
    return library


class FakeCuFile:
    """The library as the tests steer it, in the process that loads it; nothing is loaded before it is used."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @functools.cached_property
    def _library(self) -> ctypes.CDLL:
        library = ctypes.CDLL(str(self.path))
        library.fake_violations.restype = ctypes.c_char_p
        library.fake_configure.argtypes = [ctypes.c_uint, ctypes.c_uint, ctypes.c_size_t]
        return library

    def offer(self, nvidia_fs: int = 0, features: int = 0, memory: int | None = None) -> None:
        """What the machine has, to be told before the driver is opened, and how many bytes can be registered."""
        self._library.fake_configure(nvidia_fs, features, 2**64 - 1 if memory is None else memory)

    def fail(
        self,
        function: Function,
        code: int = 0,
        *,
        error: int = 0,
        most: int = -1,
        delay: float = 0,
        first: int = 1,
        count: int = 1,
    ) -> None:
        """Lets ``count`` calls from the ``first`` one on fail, with cuFile's ``code`` or an ``errno``, move at most
        ``most`` bytes, or take ``delay`` seconds longer. A ``count`` of -1 is for ever.
        """
        transfers = function in (Function.READ, Function.WRITE)
        result = -1 if error else -code if transfers else code
        fault = _Fault(function, first, count, result, error, most, int(delay * 1000))
        self._library.fake_inject(ctypes.byref(fault))

    def mend(self) -> None:
        self._library.fake_mend()

    @contextlib.contextmanager
    def held(self, *functions: Function) -> Iterator[None]:
        for function in functions:
            self._library.fake_hold(function, 1)
        try:
            yield
        finally:
            self.release(*functions)

    def release(self, *functions: Function) -> None:
        """Lets go those that are held up, before the block of ``held`` ends."""
        for function in functions:
            self._library.fake_hold(function, 0)

    def wait_for_held_up(self, function: Function, count: int = 1) -> None:
        assert self._library.fake_wait_held_up(function, count, PATIENCE), f"{count} calls of {function.name}"

    def calls(self, function: Function) -> int:
        return int(self.statistics().calls[function])

    def statistics(self) -> Statistics:
        now = Statistics()
        self._library.fake_statistics(ctypes.byref(now))
        return now

    def violations(self) -> str:
        return str(self._library.fake_violations().decode())

    def touched_only(self, tensor: torch.Tensor) -> bool:
        """Whether all memory that was read and written so far is the tensor's."""
        now, start = self.statistics(), tensor.data_ptr()
        return start <= now.lowest and now.highest <= start + tensor.nbytes

    def check_idle(self, drivers: int = 1) -> None:
        """Fails where the library was misused, or something is still registered with it."""
        now = self.statistics()
        assert self.violations() == ""
        assert (now.drivers, now.files, now.memories, now.memory_bytes) == (drivers, 0, 0, 0)
