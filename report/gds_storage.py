"""Checks whether GPUDirect Storage supports a file system: NVIDIA's list, and the devices under it.

The list: NVIDIA's GPUDirect Storage release notes and the page of nvidia-fs. ext4 must be mounted with data=ordered:
cuFile looks for it among the mount's options, where newer kernels show it only if it was given.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from nvme_ops.storage.device import Device, Mount

from .result import Json, Result, Status

_NAME = "GPUDirect Storage"
_LOCAL = ("ext4", "xfs")
_DISTRIBUTED = {
    "beegfs": "BeeGFS", "gpfs": "IBM Spectrum Scale", "lustre": "Lustre", "panfs": "PanFS", "scatefs": "ScaTeFS",
    "virtiofs": "virtiofs", "wekafs": "WekaFS",
}  # fmt: skip
_NFS = ("nfs", "nfs4")
_ELSEWHERE = "lsblk -o NAME,FSTYPE,TRAN,MOUNTPOINT  # then choose a folder on ext4 or xfs on an NVMe device"


def check(mount: Mount | None, found: Sequence[Device], has_gpu: bool) -> Result:
    """Reports whether data can go straight between this file system and a GPU; a complaint only with a GPU."""
    reason, fix = obstacle(mount, found)
    data: dict[str, Json] = {"supported": not reason, "reason": reason}
    words = f"not supported: {reason}"
    if mount is not None and not reason:
        on = f"{mount.kind} on {', '.join(device.name for device in found) or 'RDMA'}"
        words = f"supported: {_DISTRIBUTED.get(mount.kind, on)}"
    if not has_gpu:
        return Result(_NAME, Status.INFO, words, data=data)
    return Result(_NAME, Status.WARNING if reason else Status.OKAY, words, fix, data)


def obstacle(mount: Mount | None, found: Sequence[Device]) -> tuple[str, str]:
    """Returns why not, and the fix; two empty strings if nothing is known to prevent it."""
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
    if not found:
        return "the device under the file system is not known", _ELSEWHERE
    for device in found:
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
