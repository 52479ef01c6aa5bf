"""Finds what lies under a path: its mount, the disks behind that, and an identity made of what these are.

Disks are found through partitions, device mapper, md and loop devices.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import stat
from dataclasses import asdict, dataclass
from pathlib import Path

from nvme_ops.base.text import size_words
from nvme_ops.filesystem.files import no_folder
from nvme_ops.op_builder.machine import Host

NETWORK = {
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "virtiofs", "ceph", "lustre", "gpfs", "beegfs", "wekafs", "glusterfs",
    "fuse.glusterfs", "fuse.sshfs", "fuse.s3fs", "fuse.gcsfuse", "fuse.juicefs", "afs", "orangefs", "pvfs2",
}  # fmt: skip
MEMORY = {"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"}


@dataclass(frozen=True)
class Mount:
    """One line of ``/proc/self/mountinfo``."""

    point: str
    kind: str  # ext4, xfs, nfs4, ...
    source: str
    options: tuple[str, ...]  # of the mount and of the file system


def mount_of(host: Host, folder: str) -> Mount | None:
    """Returns the mount of ``folder``: the longest mount point above it, the last one if several are stacked."""
    path = os.path.realpath(folder)
    best: Mount | None = None
    for line in host.read("/proc/self/mountinfo").splitlines():
        mount = _mount_in(line)
        if mount and f"{path}/".startswith(mount.point.rstrip("/") + "/"):
            best = mount if best is None or len(mount.point) >= len(best.point) else best
    return best


def _mount_in(line: str) -> Mount | None:
    # 36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue     (proc(5))
    before, separator, after = line.partition(" - ")
    left, right = before.split(), after.split()
    if not separator or len(left) < 6 or len(right) < 2:
        return None
    options = [*left[5].split(","), *(right[2].split(",") if len(right) > 2 else [])]
    return Mount(_unescape(left[4]), right[0], _unescape(right[1]), tuple(dict.fromkeys(options)))


def _unescape(text: str) -> str:
    """Decodes spaces and the like in paths, written as a backslash and three octal digits."""
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), text)


_LOGICAL_BLOCK = "queue/logical_block_size"  # a file of a disk in sysfs
_MAX_LEVELS = 16  # stacks are two or three deep; a loop device may name a file on itself
_BY_NAME = {"loop": "loop", "zram": "memory", "ram": "memory", "nbd": "network", "rbd": "network", "drbd": "network"}


@dataclass(frozen=True)
class Device:
    """One block device at the bottom of the stack, and the layers above it."""

    name: str  # nvme0n1, sda, vda
    kind: str  # nvme, ssd, rotational, virtio, loop, network, memory
    model: str
    logical_block: int  # bytes; 512 if the device does not say
    rotational: bool
    stack: tuple[str, ...]  # names of the devices from the file system's own down to this one


def devices(host: Host, number: int) -> list[Device]:
    """Returns the physical devices behind a device number (``st_dev``); none if sysfs has none (tmpfs, NFS)."""
    return _descend(host, _folder(host, number), (), _MAX_LEVELS)


def devices_under(host: Host, path: str, mount: Mount | None) -> list[Device]:
    """Returns the physical devices under the file system of ``path``, which is mounted as ``mount``; perhaps none."""
    physical = devices(host, os.stat(path).st_dev)
    if physical or mount is None:
        return physical
    upper = next((option[9:] for option in mount.options if option.startswith("upperdir=")), "")
    if os.path.exists(upper):  # an overlay writes there. Inside a container the path does not exist
        return devices(host, os.stat(upper).st_dev)
    if mount.source.startswith("/dev/") and os.path.exists(mount.source):
        return devices(host, os.stat(mount.source).st_rdev)  # st_dev of btrfs and others is not the device's number
    return []


def logical_block(host: Host, number: int) -> int | None:
    """Returns the device's own logical block size in bytes; None if sysfs has none."""
    folder = _folder(host, number)
    return None if folder is None else _number(_whole(folder) / _LOGICAL_BLOCK)


def _folder(host: Host, number: int) -> Path | None:
    link = host.path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    return link.resolve() if link.exists() else None


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="replace").strip()
    except OSError:
        return ""


def _number(file: Path) -> int | None:
    text = _text(file)
    return int(text) if text.isdigit() else None


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
    rotational = _text(disk / "queue/rotational") == "1"
    model = " ".join(f"{_text(disk / 'device/vendor')} {_text(disk / 'device/model')}".split())
    kind = _kind(disk, rotational)
    if kind in ("virtio", "loop", "memory"):
        model = _text(disk / "device/model") or _text(disk / "loop/backing_file")
    return Device(disk.name, kind, model, _number(disk / _LOGICAL_BLOCK) or 512, rotational, stack)


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
    if "/virtio" in place:  # virtio reports "rotational" whatever the host has
        return "virtio"
    return "rotational" if rotational else "ssd"


#: Where data move from or to: CPU memory, GPU memory through page-locked memory, GPU memory through cuFile.
WAYS = ("cpu", "gpu", "gds")
BARE = "none"  # stands for the file system where the path is a block device
_GET_UUID = 0x80111500  # FS_IOC_GETFSUUID = _IOR(0x15, 0, struct fsuuid2), linux/fs.h since 6.9
_UUID_ANSWER = 17  # bytes: the length, and room for 16
# Files of a disk in sysfs, the first of which identifies it. A World Wide Identifier has vendor, model, serial number.
_NAMES = ("wwid", "device/wwid", "device/serial", "serial", "loop/backing_file")


@dataclass(frozen=True)
class Identity:
    """Identifies the storage and machine for which tuned settings hold; equal for folders on one file system."""

    disks: tuple[str, ...]  # kind, model, serial number and size of each disk; empty for memory and networks
    file_system: str  # ext4, xfs, nfs4, ...
    file_system_id: str  # its UUID; on a network the server's name for it; empty for memory
    kernel: str
    processors: int  # that this process may use
    way: str  # of WAYS
    backend: str  # io_uring, libaio, threads
    gpu: str = ""  # its name, unless way is cpu

    @property
    def key(self) -> str:
        """A practically unique name for files."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:20]

    def words(self) -> str:
        """Returns a short description for people."""
        return f"{self.file_system} on {' and '.join(self.disks) or self.file_system_id or 'memory'}"


def identify(path: str | os.PathLike[str], way: str, backend: str, host: Host | None = None) -> Identity:
    """Identifies the storage of a file or folder, or of the folder in which it would be created.

    Raises:
        FileNotFoundError: that folder does not exist; the error names it.
        ValueError: an unknown ``way``.
    """
    if way not in WAYS:
        raise ValueError(f"way must be one of {', '.join(map(repr, WAYS))}, not {way!r}")
    host, place, folder = host or Host(), nearest(path), os.path.dirname(os.path.abspath(path))
    if not os.path.exists(path) and place != folder:
        raise no_folder(folder)
    status = os.stat(place)
    if stat.S_ISBLK(status.st_mode):
        physical, kind, number = devices(host, status.st_rdev), BARE, ""
    else:
        try:
            mount = mount_of(host, place)
        except OSError:  # no /proc
            mount = None
        physical, kind = devices_under(host, place, mount), mount.kind if mount else "unknown"
        number = _file_system_id(place, mount)
    disks = tuple(sorted(_described(host, device) for device in physical))
    gpu = _gpu() if way != "cpu" else ""
    return Identity(disks, kind, number, os.uname().release, len(os.sched_getaffinity(0)), way, backend, gpu)


def nearest(path: str | os.PathLike[str]) -> str:
    """Returns the path itself if it exists, else its nearest parent that does."""
    place = os.path.abspath(os.fspath(path))
    while not os.path.exists(place) and place != "/":
        place = os.path.dirname(place)
    return place


def _described(host: Host, device: Device) -> str:
    """Describes a disk by kind, model, id and size; its name (sda), which may change at boot, only replaces the id."""
    folder = host.path(f"/sys/block/{device.name}")
    serial = next((text for name in _NAMES if (text := _text(folder / name))), device.name)
    size = size_words((_number(folder / "size") or 0) * 512)
    return " ".join(f"{device.kind} {device.model} {serial} {size}".split())


def _file_system_id(place: str, mount: Mount | None) -> str:
    if mount is not None and mount.kind in MEMORY:
        return ""
    if mount is not None and mount.kind in NETWORK:
        return mount.source
    number = 0
    with contextlib.suppress(OSError):  # a filter refuses it
        number = os.statvfs(place).f_fsid
    return _uuid(place) or (f"{number:x}" if number else "")


def _uuid(place: str) -> str:
    """Returns the file system's own UUID; empty if the kernel or the file system does not provide it."""
    answer = bytearray(_UUID_ANSWER)
    with contextlib.suppress(OSError):  # also for what cannot be opened: a socket, or somebody else's file
        descriptor = os.open(place, os.O_RDONLY | os.O_NONBLOCK)
        try:
            fcntl.ioctl(descriptor, _GET_UUID, answer)
        finally:
            os.close(descriptor)
    uuid = bytes(answer[1 : 1 + answer[0]])
    return uuid.hex() if any(uuid) else ""


def _gpu() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""
