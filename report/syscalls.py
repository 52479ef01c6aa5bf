"""System calls that Python does not offer, through ctypes. Each raises OSError with the kernel's errno."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from dataclasses import dataclass

# Numbers from the kernel's unistd.h; architectures that came after 2012 share one table.
_GENERIC = {"io_setup": 0, "io_destroy": 1, "statx": 291, "io_uring_setup": 425}
_NUMBERS = {
    "x86_64": {"io_setup": 206, "io_destroy": 207, "statx": 332, "io_uring_setup": 425},
    "ppc64le": {"io_setup": 227, "io_destroy": 228, "statx": 383, "io_uring_setup": 425},
    "s390x": {"io_setup": 243, "io_destroy": 244, "statx": 379, "io_uring_setup": 425},
    "aarch64": _GENERIC,
    "riscv64": _GENERIC,
    "loongarch64": _GENERIC,
}
_IO_URING_PARAMS_BYTES = 120  # sizeof(struct io_uring_params), linux/io_uring.h
_FEATURES_OFFSET = 20
_STATX_BYTES = 256  # sizeof(struct statx), linux/stat.h
_STATX_DIOALIGN = 0x2000
_DIOALIGN_OFFSET = 0x98  # stx_dio_mem_align, then stx_dio_offset_align
_AT_EMPTY_PATH = 0x1000


@dataclass(frozen=True)
class Alignment:
    """What direct I/O on a file requires, in bytes; both 0 if the file does not support it."""

    memory: int
    offset: int


def _call(name: str, *arguments: object) -> int:
    number = _NUMBERS.get(platform.machine(), {}).get(name)
    if number is None:
        raise OSError(errno.ENOSYS, f"{name}: no number known for {platform.machine()}")
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    result = int(libc.syscall(ctypes.c_long(number), *arguments))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
    return result


def io_uring_setup(entries: int) -> int:
    """Sets up an io_uring and closes it; returns the feature bits that the kernel reports."""
    params = ctypes.create_string_buffer(_IO_URING_PARAMS_BYTES)
    os.close(_call("io_uring_setup", ctypes.c_long(entries), params))
    return int(struct.unpack_from("=I", params, _FEATURES_OFFSET)[0])


def io_setup(events: int) -> None:
    """Makes a kernel AIO context for ``events`` requests and destroys it."""
    context = ctypes.c_ulong(0)
    _call("io_setup", ctypes.c_long(events), ctypes.byref(context))
    _call("io_destroy", context)


def direct_io_alignment(descriptor: int) -> Alignment | None:
    """Returns the alignment from ``statx(STATX_DIOALIGN)`` for an open file; None if it is not reported."""
    buffer = ctypes.create_string_buffer(_STATX_BYTES)
    try:
        flags, mask = ctypes.c_long(_AT_EMPTY_PATH), ctypes.c_long(_STATX_DIOALIGN)
        _call("statx", ctypes.c_long(descriptor), b"", flags, mask, buffer)
    except OSError as error:
        if error.errno == errno.ENOSYS:
            return None
        raise
    if not struct.unpack_from("=I", buffer, 0)[0] & _STATX_DIOALIGN:
        return None
    memory, offset = struct.unpack_from("=II", buffer, _DIOALIGN_OFFSET)
    return Alignment(memory, offset)
