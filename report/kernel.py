"""Checks what kernel, sysctl and seccomp permit, which backend a handle would use, and what memory there is."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import re
import resource
import struct
from collections.abc import Sequence
from typing import NamedTuple

from nvme_ops.base.text import MIB, size_words
from nvme_ops.io.arguments import BACKEND, BACKENDS
from nvme_ops.op_builder import AsyncIOBuilder
from nvme_ops.op_builder.machine import Host

from . import ops
from .result import Json, Result, Status, judged, run_checks, symbol
from .trial import Attempt

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
# errno of io_uring_setup -> what it means if neither the sysctl nor a filter explains it, and the fix
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
_FILTER = "a seccomp filter forbids io_setup", "docker run --security-opt seccomp=unconfined ..."
# the same for io_setup
_AIO_REFUSALS = {
    errno.EAGAIN: ("the system's AIO requests are used up", _RAISE),
    errno.ENOSYS: (
        "the kernel has no AIO (CONFIG_AIO), or a seccomp filter hides it",
        "use a kernel with CONFIG_AIO=y; io_uring and threads do without",
    ),
    errno.EPERM: _FILTER,
    errno.EACCES: _FILTER,
}


def version(host: Host) -> Result:
    """Reports the running kernel."""
    release = host.read_or("/proc/sys/kernel/osrelease") or platform.release()
    return Result("kernel", Status.INFO, release, data={"release": release, "machine": platform.machine()})


def _release(host: Host) -> tuple[int, ...]:
    text = host.read_or("/proc/sys/kernel/osrelease") or platform.release()
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])


def seccomp_mode(host: Host) -> int | None:
    """Returns 0 for no filter, 1 strict, 2 filtered; None if the kernel does not say."""
    mode = host.search(r"^Seccomp:\s*(\d+)", "/proc/self/status")
    return int(mode) if mode else None


def io_uring(host: Host) -> Result:
    """Reports whether a real ``io_uring_setup`` succeeds, and if not, what forbids it."""
    try:
        features = io_uring_setup(8)
    except OSError as error:
        return _forbidden(host, error)
    old = not features & _FEAT_RW_CUR_POS
    words = "the kernel's io_uring is older than 5.6 and has no plain read and write"
    fix = f"upgrade the kernel to 5.6 or later, or: {_OTHERWISE}" if old else ""
    return judged("io_uring", words if old else "io_uring_setup succeeds", fix, {"features": features}, bad=Status.NO)


def _forbidden(host: Host, error: OSError) -> Result:
    code = error.errno or 0
    sysctl = host.read_or(_SYSCTL)
    filtered = seccomp_mode(host) == 2
    if code == errno.EPERM and sysctl in ("1", "2"):
        who = "everyone" if sysctl == "2" else "unprivileged processes"
        reason, fix = f"sysctl kernel.io_uring_disabled={sysctl} forbids it to {who}", _ENABLE
    elif filtered and (code == errno.EPERM or (code == errno.ENOSYS and (sysctl or _release(host) >= (5, 1)))):
        reason, fix = "a seccomp filter forbids it (the default of container runtimes)", _ALLOW
    else:
        reason, fix = _REFUSALS.get(code, ("io_uring_setup fails", _OTHERWISE))
    data: dict[str, Json] = {"errno": symbol(error), "seccomp": filtered, "io_uring_disabled": sysctl}
    return Result("io_uring", Status.NO, f"{reason} [{symbol(error)}]", fix, data)


def io_uring_sysctl(host: Host) -> Result:
    """Reports the sysctl that forbids io_uring system-wide; kernels before 6.6 have none."""
    value = host.read_or(_SYSCTL)
    words = {"": "none (kernels before 6.6)", "1": "1 (privileged processes only)", "2": "2 (forbidden)"}
    fix, data = _ENABLE if value in ("1", "2") else "", {"io_uring_disabled": value}
    return judged("io_uring sysctl", words.get(value, f"{value} (allowed)"), fix, data, good=Status.INFO)


def seccomp(host: Host) -> Result:
    """Reports whether this process runs under a seccomp filter."""
    mode = seccomp_mode(host)
    words = {None: "unknown", 0: "no filter", 1: "strict mode", 2: "filtered"}.get(mode, f"mode {mode}")
    return Result("seccomp", Status.INFO, words, data={"mode": mode})


def aio_limit(host: Host) -> Result:
    """Reports how many of the system's AIO requests (fs.aio-max-nr) are left."""
    most = int(host.read("/proc/sys/fs/aio-max-nr"))
    used = int(host.read("/proc/sys/fs/aio-nr"))
    data = {"aio_max_nr": most, "aio_nr": used}
    return judged("aio-max-nr", f"{most}, {used} in use", _RAISE if most - used < _LOW else "", data)


def libaio_name() -> str | None:
    """Returns the name under which the backend will load libaio; None if it is not installed."""
    for soname in LIBAIO:
        with contextlib.suppress(OSError):
            ctypes.CDLL(soname)
            return soname
    return None


# The backends


def backends(host: Host, tried: Attempt | None) -> tuple[Result, ...]:
    """Checks every backend, in order of preference; the last result is the one that a handle would choose.

    What the op itself has ``tried`` is what counts.
    """
    results = run_checks({"io_uring": lambda: io_uring(host), "libaio": libaio})
    results += (Result("threads", Status.OKAY, "pread and pwrite, always there"),)
    if tried is not None and tried.backends:
        results = tuple(_as_tried(result, tried.backends[result.name]) for result in results)
    return results + run_checks({"chosen": lambda: chosen(results)})


def _as_tried(result: Result, reason: str | None) -> Result:
    left_out = reason is not None and "built without" in reason
    data = {**result.data, "compiled_in": not left_out} if result.name == "libaio" else result.data
    if reason is None:
        words = result.detail if result.status is Status.OKAY else "works in the op"
        return Result(result.name, Status.OKAY, words, data=data)
    if result.status is not Status.OKAY and not left_out:
        return result  # which says more
    fix = f"{ops.rebuild_command(AsyncIOBuilder())}  # or install a wheel that was made where libaio.h is"
    return Result(result.name, Status.NO, reason.partition(" (")[0], fix if left_out else f"unset {BACKEND}", data)


def libaio() -> Result:
    """Checks whether the op would be compiled with libaio, the library, and the kernel's AIO."""
    compiled_in, library = ops.would_have_libaio(), libaio_name()
    if compiled_in and library:
        words, fix = f"{library}, io_setup succeeds", ""
        try:
            io_setup(library, _EVENTS)
        except OSError as error:
            reason, fix = _AIO_REFUSALS.get(error.errno or 0, ("io_setup fails", _RAISE))
            words = f"{reason} [{symbol(error)}]"
    else:
        words, fix = f"{LIBAIO[0]} cannot be loaded", ops.install_command("libaio")
        if not compiled_in:
            words = "libaio.h is not found, so the op is compiled without" if library else "libaio is not installed"
    return judged("libaio", words, fix, {"compiled_in": compiled_in, "library": library}, bad=Status.NO)


def chosen(results: Sequence[Result]) -> Result:
    """Reports the first usable backend, unless the environment names another."""
    usable = [result.name for result in results if result.status is Status.OKAY]
    wanted = os.environ.get(BACKEND, "")
    data: dict[str, Json] = {"backend": None, BACKEND: wanted}
    if wanted and wanted != "auto" and wanted not in usable:
        why = "is not usable here" if wanted in BACKENDS else f"is not one of auto, {', '.join(BACKENDS)}"
        return Result("chosen", Status.NO, f"{BACKEND}={wanted!r} {why}", f"unset {BACKEND}", data)
    named = wanted in usable
    data["backend"] = backend = wanted if named else usable[0]
    last = backend == BACKENDS[-1] and not named
    words = f"{backend}: neither of the faster ones is usable" if last else backend
    words = f"{backend} ({BACKEND})" if named else words
    return judged("chosen", words, next(filter(None, (result.fix for result in results))) if last else "", data)


# Memory: what may be locked, huge pages, and the shared memory of DataLoader workers

_MEMLOCK_WANTED = 64 * MIB  # the staging ring of a busy default handle
_RAISE_MEMLOCK = (
    "docker run --ulimit memlock=-1 ...  # or '* - memlock unlimited' in /etc/security/limits.conf and a new login"
)
_SHM_WANTED = 512 * MIB  # below this ds_report warns too
_CAP_IPC_LOCK = 14  # linux/capability.h
_TRANSPARENT = "/sys/kernel/mm/transparent_hugepage/enabled"


def memlock(host: Host) -> Result:
    """Reports how much memory may be locked; io_uring's registered buffers need as much as the staging memory."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = soft == resource.RLIM_INFINITY
    capabilities = host.search(r"^CapEff:\s*([0-9a-fA-F]+)", "/proc/self/status") or "0"
    privileged = bool(int(capabilities, 16) >> _CAP_IPC_LOCK & 1)
    limits = [None if limit == resource.RLIM_INFINITY else limit for limit in (soft, hard)]
    words, fix = "unlimited" if unlimited else size_words(soft), ""
    if privileged and not unlimited:
        words += ", not binding (CAP_IPC_LOCK)"
    if not (unlimited or privileged or soft >= _MEMLOCK_WANTED):
        words += ", staging buffers may stay unregistered and tensors unlocked"
        enough = hard == resource.RLIM_INFINITY or hard >= _MEMLOCK_WANTED
        fix = f"ulimit -l {_MEMLOCK_WANTED // 1024}" if enough else _RAISE_MEMLOCK
    return judged("memlock limit", words, fix, {"soft": limits[0], "hard": limits[1], "privileged": privileged})


def transparent(host: Host) -> Result:
    """Reports whether the kernel uses huge pages on request (``madvise``) or for all memory (``always``)."""
    mode = host.search(r"\[(\w+)\]", _TRANSPARENT) or ""
    words, fix = mode, ""
    if mode not in ("always", "madvise"):
        words = mode or "not in this kernel"
        if os.environ.get("NVME_OPS_HUGETLB", "0") not in ("", "0") and _reserved(host, "nr_hugepages"):
            words += ", the reserved ones serve"
        else:
            words += ": staging buffers lie in small pages, which is slower"
            fix = "sysctl -w vm.nr_hugepages=64; export NVME_OPS_HUGETLB=1"
            fix = f"echo madvise > {_TRANSPARENT}" if mode else fix
    good = Status.OKAY if words == mode else Status.INFO
    return judged("transparent huge pages", words, fix, {"mode": mode}, good=good)


def reserved(host: Host) -> Result:
    """Reports the reserved 2 MiB pages (hugetlb), used only with ``NVME_OPS_HUGETLB=1``; none are needed."""
    total, free = _reserved(host, "nr_hugepages"), _reserved(host, "free_hugepages")
    words = f"{free} of {total} free, 2 MiB each" if total else "none reserved"
    return Result("huge pages (hugetlb)", Status.INFO, words, data={"total": total, "free": free})


def _reserved(host: Host, count: str) -> int:
    text = host.read_or(f"/sys/kernel/mm/hugepages/hugepages-2048kB/{count}")
    return int(text) if text.isdigit() else 0


def shared(host: Host) -> Result:
    """Reports the size of /dev/shm, through which DataLoader workers and collective libraries pass tensors."""
    name = "shared memory (/dev/shm) size"
    try:
        stat = os.statvfs(host.path("/dev/shm"))
    except OSError as error:
        return Result(name, Status.WARNING, str(error), "mount -t tmpfs -o size=1G tmpfs /dev/shm")
    total, free = stat.f_frsize * stat.f_blocks, stat.f_frsize * stat.f_bavail
    fix = "" if total >= _SHM_WANTED else "docker run --shm-size=1g ...  # or: mount -o remount,size=1G /dev/shm"
    words = f"{size_words(total)}, " + ("too small for DataLoader workers" if fix else f"{size_words(free)} free")
    return judged(name, words, fix, {"total": total, "free": free})


# System calls that Python does not offer, through ctypes. Each raises OSError with the kernel's errno.

_IO_URING_SETUP = 425  # on every architecture
_IO_URING_PARAMS_BYTES = 120  # sizeof(struct io_uring_params), linux/io_uring.h
_FEATURES_OFFSET = 20
_STATX_BYTES = 256  # sizeof(struct statx), linux/stat.h
_STATX_DIOALIGN = 0x2000
_DIOALIGN_OFFSET = 0x98  # stx_dio_mem_align, then stx_dio_offset_align
_AT_EMPTY_PATH = 0x1000


class Alignment(NamedTuple):
    """What direct I/O on a file requires, in bytes; both 0 if the file does not support it."""

    memory: int
    offset: int


def io_uring_setup(entries: int) -> int:
    """Sets up an io_uring and closes it; returns the feature bits that the kernel reports."""
    params = ctypes.create_string_buffer(_IO_URING_PARAMS_BYTES)
    number, size = ctypes.c_long(_IO_URING_SETUP), ctypes.c_long(entries)
    ring = ctypes.CDLL(None, use_errno=True).syscall(number, size, params)
    if ring < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    os.close(ring)
    return int(struct.unpack_from("=I", params, _FEATURES_OFFSET)[0])


def io_setup(library: str, events: int) -> None:
    """Makes a kernel AIO context for ``events`` requests and destroys it, by libaio's functions."""
    libaio, context = ctypes.CDLL(library), ctypes.c_void_p()
    if (result := libaio.io_setup(events, ctypes.byref(context))) < 0:
        raise OSError(-result, os.strerror(-result))
    libaio.io_destroy(context)


def direct_io_alignment(descriptor: int) -> Alignment | None:
    """Returns the alignment from ``statx(STATX_DIOALIGN)`` for an open file; None if it is not reported."""
    buffer = ctypes.create_string_buffer(_STATX_BYTES)  # refused by old kernels and containers, it stays 0
    ctypes.CDLL(None).statx(descriptor, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, buffer)
    if not struct.unpack_from("=I", buffer, 0)[0] & _STATX_DIOALIGN:
        return None
    return Alignment(*struct.unpack_from("=II", buffer, _DIOALIGN_OFFSET))
