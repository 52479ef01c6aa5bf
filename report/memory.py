"""Memory: what may be locked, huge pages, and the shared memory of DataLoader workers."""

from __future__ import annotations

import os
import re
import resource

from nvme_ops.host import Host

from .result import Result, Status

MIB = 1 << 20
GIB = 1 << 30
_MEMLOCK_WANTED = 64 * MIB  # the staging ring of a busy default handle
_RAISE_MEMLOCK = (
    "docker run --ulimit memlock=-1 ...  # or '* - memlock unlimited' in /etc/security/limits.conf and a new login"
)
_SHM_WANTED = 512 * MIB  # below this ds_report warns too
_CAP_IPC_LOCK = 14  # linux/capability.h
_TRANSPARENT = "/sys/kernel/mm/transparent_hugepage/enabled"


def size(count: int) -> str:
    """Formats a number of bytes: ``512 B``, ``64 MiB``, ``1.5 GiB``."""
    power = min(max(count.bit_length() - 1, 0) // 10, 4)
    return f"{count / (1 << 10 * power):.1f}".removesuffix(".0") + (" B", " KiB", " MiB", " GiB", " TiB")[power]


def memlock(host: Host) -> Result:
    """Reports how much memory may be locked; io_uring's registered buffers need as much as the staging memory."""
    name = "memlock limit"
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = soft == resource.RLIM_INFINITY
    privileged = _may_lock_anything(host)
    limits = [None if each == resource.RLIM_INFINITY else each for each in (soft, hard)]
    data = {"soft": limits[0], "hard": limits[1], "privileged": privileged}
    words = "unlimited" if unlimited else size(soft)
    if privileged and not unlimited:
        words += ", not binding (CAP_IPC_LOCK)"
    if unlimited or privileged or soft >= _MEMLOCK_WANTED:
        return Result(name, Status.OKAY, words, data=data)
    words += ", staging buffers may stay unregistered and tensors unlocked"
    enough = hard == resource.RLIM_INFINITY or hard >= _MEMLOCK_WANTED
    fix = f"ulimit -l {_MEMLOCK_WANTED // 1024}" if enough else _RAISE_MEMLOCK
    return Result(name, Status.WARNING, words, fix, data)


def _may_lock_anything(host: Host) -> bool:
    found = re.search(r"^CapEff:\s*([0-9a-fA-F]+)", host.read_or("/proc/self/status"), re.MULTILINE)
    return bool(found and int(found[1], 16) >> _CAP_IPC_LOCK & 1)


def transparent(host: Host) -> Result:
    """Reports whether the kernel gives huge pages on request (``madvise``) or to all (``always``)."""
    name = "transparent huge pages"
    text = host.read_or(_TRANSPARENT)
    found = re.search(r"\[(\w+)\]", text)
    mode = found[1] if found else ""
    data = {"mode": mode}
    if mode in ("always", "madvise"):
        return Result(name, Status.OKAY, mode, data=data)
    asked = os.environ.get("NVME_OPS_HUGETLB", "0") not in ("", "0")
    if asked and _reserved(host, "nr_hugepages"):
        return Result(name, Status.INFO, f"{mode or 'not in this kernel'}, the reserved ones serve", data=data)
    if mode:
        fix = f"echo madvise > {_TRANSPARENT}"
    else:
        mode, fix = "not in this kernel", "sysctl -w vm.nr_hugepages=64; export NVME_OPS_HUGETLB=1"
    return Result(name, Status.WARNING, f"{mode}: staging buffers lie in small pages, which is slower", fix, data)


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
    data = {"total": total, "free": free}
    if total < _SHM_WANTED:
        fix = "docker run --shm-size=1g ...  # or: mount -o remount,size=1G /dev/shm"
        return Result(name, Status.WARNING, f"{size(total)}, too small for DataLoader workers", fix, data)
    return Result(name, Status.OKAY, f"{size(total)}, {size(free)} free", data=data)
