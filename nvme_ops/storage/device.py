"""Finds the disks behind a device number, through partitions, device mapper, md and loop devices."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from nvme_ops.host import Host
from nvme_ops.storage.mounts import Mount

_MOST_LEVELS = 16  # stacks are two or three deep; a loop device may name a file on itself
_BY_NAME = {"loop": "loop", "zram": "memory", "ram": "memory", "nbd": "network", "rbd": "network", "drbd": "network"}


@dataclass(frozen=True)
class Device:
    """One block device at the bottom of the stack, and the layers above it."""

    name: str  # nvme0n1, sda, vda
    kind: str  # nvme, ssd, rotational, virtio, loop, network, memory
    model: str
    logical_block: int  # bytes; 512 where the device does not say
    rotational: bool
    stack: tuple[str, ...]  # the devices passed on the way down, the file system's own first


def devices(host: Host, number: int) -> list[Device]:
    """Returns the physical devices behind a device number (``st_dev``); none where sysfs has none (tmpfs, NFS)."""
    return _descend(host, _folder(host, number), (), _MOST_LEVELS)


def devices_under(host: Host, path: str, mount: Mount | None) -> list[Device]:
    """Returns the physical devices under the file system of ``path``, mounted as ``mount``; as ``devices``."""
    found = devices(host, os.stat(path).st_dev)
    if found or mount is None:
        return found
    upper = next((option[9:] for option in mount.options if option.startswith("upperdir=")), "")
    if os.path.exists(upper):  # overlay: writes go there. In a container the path is meaningless
        return devices(host, os.stat(upper).st_dev)
    if mount.source.startswith("/dev/") and os.path.exists(mount.source):
        return devices(host, os.stat(mount.source).st_rdev)  # btrfs and others report a number of their own
    return []


def logical_block(host: Host, number: int) -> int | None:
    """Returns the device's own logical block size in bytes; None if sysfs has none."""
    folder = _folder(host, number)
    if folder is None:
        return None
    text = _text(_whole(folder) / "queue/logical_block_size")
    return int(text) if text.isdigit() else None


def _folder(host: Host, number: int) -> Path | None:
    link = host.path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    return link.resolve() if link.exists() else None


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="replace").strip()
    except OSError:
        return ""


def _whole(folder: Path) -> Path:
    """Returns the disk that a partition is part of."""
    return folder.parent if (folder / "partition").exists() else folder


def _descend(host: Host, folder: Path | None, stack: tuple[str, ...], levels: int) -> list[Device]:
    if folder is None or levels == 0:
        return []
    disk = _whole(folder)
    stack = (*stack, folder.name) if disk == folder else (*stack, folder.name, disk.name)
    below: list[Device] = []
    for slave in sorted((disk / "slaves").glob("*")):
        below += _descend(host, slave.resolve(), stack, levels - 1)
    backing = _text(disk / "loop/backing_file").removesuffix(" (deleted)")
    if backing and os.path.exists(backing):
        below += _descend(host, _folder(host, os.stat(backing).st_dev), stack, levels - 1)
    return below or [_describe(disk, stack)]


def _describe(disk: Path, stack: tuple[str, ...]) -> Device:
    block = _text(disk / "queue/logical_block_size")
    rotational = _text(disk / "queue/rotational") == "1"
    model = " ".join(f"{_text(disk / 'device/vendor')} {_text(disk / 'device/model')}".split())
    kind = _kind(disk, rotational)
    if kind in ("virtio", "loop", "memory"):
        model = _text(disk / "device/model") or _text(disk / "loop/backing_file")
    return Device(disk.name, kind, model, int(block) if block.isdigit() else 512, rotational, stack)


def _kind(disk: Path, rotational: bool) -> str:
    for prefix, kind in _BY_NAME.items():
        if disk.name.startswith(prefix):
            return kind
    if disk.name.startswith("nvme"):
        transport = _text(disk / "device/transport")
        return "network" if transport in ("tcp", "rdma", "fc") else "nvme"
    place = str(disk)
    if "/session" in place:  # iSCSI hosts appear as .../session1/target...
        return "network"
    if "/virtio" in place:  # reports rotational whatever the host has
        return "virtio"
    return "rotational" if rotational else "ssd"
