"""Kernel AIO, which the libaio backend stands on: the system-wide limit, the system call and the library."""

from __future__ import annotations

import ctypes
import errno

from . import syscalls
from .host import Host
from .result import Result, Status

SONAMES = ("libaio.so.1", "libaio.so.1t64")  # Debian renamed it with the 64-bit time_t
EVENTS = 128  # the default queue depth
_LOW = 4096  # contexts for some 30 handles of the default depth
_RAISE = "sysctl -w fs.aio-max-nr=1048576"


def limit(host: Host) -> Result:
    """How many of the system's AIO requests (fs.aio-max-nr) are still to be had."""
    name = "aio-max-nr"
    most = int(host.read("/proc/sys/fs/aio-max-nr"))
    used = int(host.read("/proc/sys/fs/aio-nr"))
    data = {"aio_max_nr": most, "aio_nr": used}
    words = f"{most}, {used} in use"
    if most - used < _LOW:
        return Result(name, Status.WARNING, words, _RAISE, data)
    return Result(name, Status.OKAY, words, data=data)


def kernel_context(events: int = EVENTS) -> tuple[str, str]:
    """Why a real ``io_setup`` fails and the fix; two empty strings when it succeeds."""
    try:
        syscalls.io_setup(events)
    except OSError as error:
        symbol = errno.errorcode.get(error.errno or 0, str(error.errno))
        if error.errno == errno.EAGAIN:
            return f"the system's AIO requests are used up [{symbol}]", _RAISE
        if error.errno == errno.ENOSYS:
            reason = f"the kernel has no AIO (CONFIG_AIO), or a seccomp filter hides it [{symbol}]"
            return reason, "use a kernel with CONFIG_AIO=y; io_uring and threads do without"
        if error.errno in (errno.EPERM, errno.EACCES):
            return f"a seccomp filter forbids io_setup [{symbol}]", "docker run --security-opt seccomp=unconfined ..."
        return f"io_setup fails [{symbol}]", _RAISE
    return "", ""


def library() -> str | None:
    """The name under which libaio can be loaded, as the backend will load it; None when it is not installed."""
    for soname in SONAMES:
        try:
            ctypes.CDLL(soname)
        except OSError:
            continue
        return soname
    return None
