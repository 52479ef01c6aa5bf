"""The kernel: its version, and whether it, sysctl and seccomp permit io_uring and AIO."""

from __future__ import annotations

import ctypes
import errno
import platform
import re

from nvme_ops.host import Host

from . import syscalls
from .result import Json, Result, Status

_FEAT_RW_CUR_POS = 1 << 3  # came with Linux 5.6, as did the opcodes IORING_OP_READ and IORING_OP_WRITE
_SYSCTL = "/proc/sys/kernel/io_uring_disabled"
_ALLOW = (
    "docker run --security-opt seccomp=unconfined ...  # or a profile that allows io_uring_setup, _enter, _register"
)
_OTHERWISE = "export NVME_OPS_BACKEND=libaio  # or threads"
_ENABLE = "sysctl -w kernel.io_uring_disabled=0"
_MODULE = (
    "a security module (SELinux, AppArmor) or a sandbox forbids it",
    f"journalctl -k | grep -i denied, or: {_OTHERWISE}",
)
_DESCRIPTORS = "no file descriptor is left", "ulimit -n 65536"
# what an errno of io_uring_setup means where neither the sysctl nor a filter explains it, and the fix
_REFUSALS = {
    errno.EPERM: _MODULE,
    errno.EACCES: _MODULE,
    errno.ENOSYS: (
        "the kernel has no io_uring (5.1 with CONFIG_IO_URING, or a sandbox)",
        f"upgrade the kernel, or: {_OTHERWISE}",
    ),
    errno.ENOMEM: ("the memlock limit is too small for a ring", "ulimit -l unlimited"),
    errno.EMFILE: _DESCRIPTORS,
    errno.ENFILE: _DESCRIPTORS,
}
LIBAIO = ("libaio.so.1", "libaio.so.1t64")  # Debian renamed it with the 64-bit time_t
_EVENTS = 128  # the default queue depth
_LOW = 4096  # contexts for some 30 handles of the default depth
_RAISE = "sysctl -w fs.aio-max-nr=1048576"


def version(host: Host) -> Result:
    """Reports the running kernel."""
    release = host.read_or("/proc/sys/kernel/osrelease") or platform.release()
    return Result("kernel", Status.INFO, release, data={"release": release, "machine": platform.machine()})


def _release(host: Host) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", host.read_or("/proc/sys/kernel/osrelease") or platform.release())
    return (int(found[1]), int(found[2])) if found else (0, 0)


def seccomp_mode(host: Host) -> int | None:
    """Returns 0 for no filter, 1 strict, 2 filtered; None if the kernel does not say."""
    found = re.search(r"^Seccomp:\s*(\d+)", host.read_or("/proc/self/status"), re.MULTILINE)
    return int(found[1]) if found else None


def io_uring(host: Host) -> Result:
    """Reports whether a real ``io_uring_setup`` succeeds, and if not, what forbids it."""
    try:
        features = syscalls.io_uring_setup(8)
    except OSError as error:
        return _forbidden(host, error)
    data = {"features": features}
    if not features & _FEAT_RW_CUR_POS:
        words = "the kernel's io_uring is older than 5.6 and has no plain read and write"
        return Result("io_uring", Status.NO, words, f"upgrade the kernel to 5.6 or later, or: {_OTHERWISE}", data)
    return Result("io_uring", Status.OKAY, "io_uring_setup succeeds", data=data)


def _forbidden(host: Host, error: OSError) -> Result:
    code, symbol = error.errno or 0, errno.errorcode.get(error.errno or 0, str(error.errno))
    sysctl = host.read_or(_SYSCTL)
    filtered = seccomp_mode(host) == 2
    if code == errno.EPERM and sysctl in ("1", "2"):
        who = "everyone" if sysctl == "2" else "unprivileged processes"
        reason, fix = f"sysctl kernel.io_uring_disabled={sysctl} forbids it to {who}", _ENABLE
    elif filtered and (code == errno.EPERM or (code == errno.ENOSYS and (sysctl or _release(host) >= (5, 1)))):
        reason, fix = "a seccomp filter forbids it (the default of container runtimes)", _ALLOW
    else:
        reason, fix = _REFUSALS.get(code, ("io_uring_setup fails", _OTHERWISE))
    data: dict[str, Json] = {"errno": symbol, "seccomp": filtered, "io_uring_disabled": sysctl}
    return Result("io_uring", Status.NO, f"{reason} [{symbol}]", fix, data)


def io_uring_sysctl(host: Host) -> Result:
    """Reports the sysctl that forbids io_uring system-wide; kernels before 6.6 have none."""
    name = "io_uring sysctl"
    value = host.read_or(_SYSCTL)
    data = {"io_uring_disabled": value}
    if value in ("1", "2"):
        words = {"1": "1 (privileged processes only)", "2": "2 (forbidden)"}[value]
        return Result(name, Status.WARNING, words, _ENABLE, data)
    return Result(name, Status.INFO, f"{value} (allowed)" if value else "none (kernels before 6.6)", data=data)


def seccomp(host: Host) -> Result:
    """Reports whether this process runs under a seccomp filter."""
    mode = seccomp_mode(host)
    words = {None: "unknown", 0: "no filter", 1: "strict mode", 2: "filtered"}.get(mode, f"mode {mode}")
    return Result("seccomp", Status.INFO, words, data={"mode": mode})


def aio_limit(host: Host) -> Result:
    """Reports how many of the system's AIO requests (fs.aio-max-nr) are left."""
    name = "aio-max-nr"
    most = int(host.read("/proc/sys/fs/aio-max-nr"))
    used = int(host.read("/proc/sys/fs/aio-nr"))
    data = {"aio_max_nr": most, "aio_nr": used}
    words = f"{most}, {used} in use"
    if most - used < _LOW:
        return Result(name, Status.WARNING, words, _RAISE, data)
    return Result(name, Status.OKAY, words, data=data)


def aio_context(events: int = _EVENTS) -> tuple[str, str]:
    """Returns why a real ``io_setup`` fails and the fix; two empty strings if it succeeds."""
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


def libaio() -> str | None:
    """Returns the name under which the backend will load libaio; None if it is not installed."""
    for soname in LIBAIO:
        try:
            ctypes.CDLL(soname)
        except OSError:
            continue
        return soname
    return None
