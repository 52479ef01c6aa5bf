"""Checks for ``--folder DIR``: the file system, direct I/O tried for real, alignment, the device, free space."""

from __future__ import annotations

import errno
import mmap
import os
import shlex
import stat
import tempfile
from collections.abc import Sequence
from dataclasses import asdict

from nvme_ops.base.text import GIB, size_words
from nvme_ops.filesystem.device import MEMORY, NETWORK, Device, Mount, devices_under, logical_block, mount_of
from nvme_ops.op_builder.machine import Host, gpu

from . import kernel
from .result import FIXES, Checks, Json, Result, Status, judged, run_checks, symbol
from .trial import Attempt, Failure

_LIST_DISKS = "lsblk -d -o NAME,ROTA,TRAN,MODEL,SIZE  # then choose a folder on an NVMe device"


def inspect(host: Host, folder: str, tried: Attempt | None = None) -> tuple[Result, ...]:
    """Runs every check of a folder; only the first one if it is not a folder. ``tried`` has what a handle did there."""
    first = run_checks({"directory": lambda: _directory(host, folder)})
    if not os.path.isdir(folder):
        return first
    if tried is not None and folder in tried.folders and first[0].status is Status.OKAY:
        first += run_checks({"page": lambda: _page(host, folder, tried.folders[folder])})
    checks: Checks = {
        "file system": lambda: _file_system(host, folder),
        "O_DIRECT": lambda: _direct(host, folder),
        "device": lambda: _devices(host, folder),
        "free space": lambda: _free(folder),
    }
    return first + run_checks(checks)


def _directory(host: Host, folder: str) -> Result:
    name, quoted = "directory", shlex.quote(folder)
    data = {"path": os.path.realpath(folder)}
    try:
        mode = os.stat(folder).st_mode
    except FileNotFoundError:
        return Result(name, Status.NO, f"{folder} does not exist", f"mkdir -p {quoted}", data)
    except OSError as error:
        return Result(name, Status.NO, f"{folder}: {error.strerror}", f"namei -l {quoted}", data)
    if not stat.S_ISDIR(mode):
        parent = shlex.quote(os.path.dirname(os.path.abspath(folder)))
        return Result(name, Status.NO, f"{folder} is not a directory", f"nvme-report --folder {parent}", data)
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        words = f"{folder} cannot be written: {error.strerror}"
        return Result(name, Status.NO, words, _write_fix(host, folder, error), data)
    return Result(name, Status.OKAY, f"{folder}, writable", data=data)


def _page(host: Host, folder: str, failure: Failure | None) -> Result:
    if failure is None:
        return Result("page", Status.OKAY, "a handle wrote one and read it back")
    words = f"a handle cannot write one and read it back: {failure.words}"
    return Result("page", Status.NO, words, _write_fix(host, folder, OSError(failure.errno, failure.words)))


def _write_fix(host: Host, folder: str, error: OSError) -> str:
    quoted = shlex.quote(folder)
    if error.errno == errno.EROFS:
        mount = mount_of(host, folder)
        return f"mount -o remount,rw {shlex.quote(mount.point) if mount else quoted}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"df -h {quoted}; df -i {quoted}  # then make room"
    return FIXES.get(error.errno or 0) or f'sudo chown "$USER" {quoted}  # or choose a folder that you may write to'


def _file_system(host: Host, folder: str) -> Result:
    mount = mount_of(host, folder)
    if mount is None:
        return Result("file system", Status.WARNING, "no mount found", "mount -t proc proc /proc", {})
    data = {"type": mount.kind, "options": list(mount.options), "mount_point": mount.point, "source": mount.source}
    words = f"{mount.kind} on {mount.point} from {mount.source} ({','.join(mount.options)})"
    return Result("file system", Status.INFO, words, data=data)


def _direct(host: Host, folder: str) -> list[Result]:
    """Opens a temporary file with O_DIRECT, writes a block and reads it back; reports its alignment."""
    try:
        descriptor, name = tempfile.mkstemp(prefix=".nvme-report-", dir=folder)
    except OSError as error:
        words = f"not tried, no file can be made here: {error.strerror}"
        return [Result("O_DIRECT", Status.WARNING, words, _write_fix(host, folder, error), {"supported": None})]
    try:
        refusal = _refusal(name)
        return [_direct_result(host, folder, refusal), _alignment(host, descriptor, refusal is None)]
    finally:
        os.close(descriptor)
        os.unlink(name)


def _refusal(name: str) -> OSError | None:
    try:
        descriptor = os.open(name, os.O_RDWR | os.O_DIRECT | os.O_NOFOLLOW)  # others may write to the folder
    except OSError as error:
        return error
    try:
        with mmap.mmap(-1, 1 << 16) as block:  # page-aligned, and a multiple of every logical block size
            block[:4] = b"nvme"
            os.pwrite(descriptor, block, 0)
            block[:4] = b"    "
            if os.preadv(descriptor, [block], 0) != len(block) or block[:4] != b"nvme":
                return OSError(errno.EIO, "what was written did not come back")
    except OSError as error:
        return error
    finally:
        os.close(descriptor)
    return None


def _direct_result(host: Host, folder: str, refusal: OSError | None) -> Result:
    if refusal is None:
        return Result("O_DIRECT", Status.OKAY, "a block was written and read back", data={"supported": True})
    data: dict[str, Json] = {"supported": False, "errno": symbol(refusal)}
    words = f"refused by the file system [{symbol(refusal)}]: I/O goes through the page cache"
    if refusal.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        words = f"opens, but a block could not be written [{symbol(refusal)}]"
        return Result("O_DIRECT", Status.NO, words, _write_fix(host, folder, refusal), data)
    return Result("O_DIRECT", Status.WARNING, words, _LIST_DISKS, data)


def _alignment(host: Host, descriptor: int, direct: bool) -> Result:
    said = kernel.direct_io_alignment(descriptor)
    memory, offset, source = (said.memory, said.offset, "statx") if said else (None, None, None)
    words = f"{memory} bytes in memory, {offset} in the file (statx)"
    if said and direct and not offset:
        words = "statx: none of its files is reached past the page cache"
    elif not offset:
        memory = offset = logical_block(host, os.fstat(descriptor).st_dev) if direct else None
        source = "logical block" if offset else None
        words = f"{offset} bytes (the device's logical block)" if offset else "none needed"
    return Result("alignment", Status.INFO, words, data={"memory": memory, "offset": offset, "source": source})


def _devices(host: Host, folder: str) -> list[Result]:
    mount = mount_of(host, folder)
    physical = devices_under(host, folder, mount)
    direct = gpudirect(mount, physical, bool(gpu(host).found))
    if not physical:
        return [_no_device(mount.kind if mount else "unknown"), direct]
    rotating = any(device.kind == "rotational" for device in physical)
    words = "; ".join(map(_words, physical)) + (": a rotating disk" if rotating else "")
    devices = [{**asdict(device), "stack": list(device.stack)} for device in physical]
    data: dict[str, Json] = {"kind": physical[0].kind, "devices": devices}
    return [judged("device", words, _LIST_DISKS if rotating else "", data, good=Status.INFO), direct]


def _words(device: Device) -> str:
    way = f" (through {', '.join(device.stack[:-1])})" if len(device.stack) > 1 else ""
    return ", ".join(filter(None, (device.name, device.kind, device.model))) + way


def _no_device(file_system: str) -> Result:
    if file_system in MEMORY:
        kind, words = "memory", f"none, {file_system} lives in memory"
    elif file_system in NETWORK:
        kind, words = "network", f"network file system ({file_system})"
    else:
        kind, words = "unknown", f"none found behind {file_system}"
    return Result("device", Status.INFO, words, data={"kind": kind, "devices": []})


def _free(folder: str) -> Result:
    space = os.statvfs(folder)
    free, total = space.f_bavail * space.f_frsize, space.f_blocks * space.f_frsize
    data = {"free": free, "total": total, "free_inodes": space.f_favail if space.f_files else None}
    no_inode = space.f_files and not space.f_favail
    words = f"{size_words(free)} of {size_words(total)}" + (", but no inode is left for a new file" if no_inode else "")
    full = no_inode or (total and free < GIB)
    fix = f"df -h {shlex.quote(folder)}; df -i {shlex.quote(folder)}  # then make room" if full else ""
    return judged("free space", words, fix, data)


# Whether GPUDirect Storage supports a file system, according to NVIDIA's release notes and the page of nvidia-fs. ext4
# must be mounted with data=ordered: cuFile looks for that among the mount's options, where newer kernels show it only
# if it was given

_GDS = "GPUDirect Storage"
_LOCAL = ("ext4", "xfs")
_DISTRIBUTED = {
    "beegfs": "BeeGFS", "gpfs": "IBM Spectrum Scale", "lustre": "Lustre", "panfs": "PanFS", "scatefs": "ScaTeFS",
    "virtiofs": "virtiofs", "wekafs": "WekaFS",
}  # fmt: skip
_NFS = ("nfs", "nfs4")
_ELSEWHERE = "lsblk -o NAME,FSTYPE,TRAN,MOUNTPOINT  # then choose a folder on ext4 or xfs on an NVMe device"


def gpudirect(mount: Mount | None, devices: Sequence[Device], has_gpu: bool) -> Result:
    """Reports whether data can move directly between this file system and a GPU; a complaint only with a GPU."""
    reason, fix = obstacle(mount, devices)
    data: dict[str, Json] = {"supported": not reason, "reason": reason}
    words = f"not supported: {reason}"
    if mount is not None and not reason:
        on = f"{mount.kind} on {', '.join(device.name for device in devices) or 'RDMA'}"
        words = f"supported: {_DISTRIBUTED.get(mount.kind, on)}"
    if not has_gpu:
        return Result(_GDS, Status.INFO, words, data=data)
    return Result(_GDS, Status.WARNING if reason else Status.OKAY, words, fix, data)


def obstacle(mount: Mount | None, devices: Sequence[Device]) -> tuple[str, str]:
    """Returns why GPUDirect Storage is not supported, and the fix; two empty strings if nothing is known against it."""
    if mount is None:
        return "the file system is not known", "mount -t proc proc /proc"
    if mount.kind in _DISTRIBUTED:
        return "", ""
    if mount.kind in _NFS:
        if {"proto=rdma", "rdma"} & set(mount.options):
            return "", ""
        return f"{mount.kind} without proto=rdma", "mount -o proto=rdma,...  # needs the NFS client of MLNX_OFED"
    if mount.kind == "overlay":
        return "overlay is the container's own file system", "docker run -v /mnt/nvme:/mnt/nvme ..."
    if mount.kind not in _LOCAL:
        return f"{mount.kind} is not among the file systems that NVIDIA lists", _ELSEWHERE
    if not devices:
        return "the device under the file system is not known", _ELSEWHERE
    for device in devices:
        for name in device.stack[:-1]:
            if name.startswith(("dm-", "loop", "zram", "bcache", "drbd", "nbd")):
                return f"it lies on {name}, and only NVMe devices and RAID of them are listed", _ELSEWHERE
        if not device.name.startswith("nvme"):
            return f"{device.name} is not an NVMe device ({device.kind})", _ELSEWHERE
    return _journal_obstacle(mount) if mount.kind == "ext4" and "data=ordered" not in mount.options else ("", "")


def _journal_obstacle(mount: Mount) -> tuple[str, str]:
    other = next((option for option in mount.options if option.startswith("data=")), "")
    point = shlex.quote(mount.point)
    fix = f"umount {point} && mount -o data=ordered {shlex.quote(mount.source)} {point}"
    if other:
        return f"ext4 is mounted with {other}, not with data=ordered", fix
    return "the options of the mount do not show data=ordered, which cuFile looks for on ext4", fix
