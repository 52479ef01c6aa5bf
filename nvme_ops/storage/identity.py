"""Which device lies under a path, by what it is and not by where it is mounted."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import stat
from dataclasses import asdict, dataclass
from pathlib import Path

from nvme_ops.host import Host
from nvme_ops.storage.atomic import no_folder
from nvme_ops.storage.device import Device, devices, devices_under
from nvme_ops.storage.mounts import MEMORY, NETWORK, Mount, mount_of
from nvme_ops.text import size_words

#: Between storage and CPU memory, GPU memory through page-locked memory, GPU memory through cuFile.
WAYS = ("cpu", "gpu", "gds")
BARE = "none"  # the file system of a path that is a block device itself
_GET_UUID = 0x80111500  # FS_IOC_GETFSUUID = _IOR(0x15, 0, struct fsuuid2), linux/fs.h since 6.9
_UUID_ANSWER = 17  # bytes: the length, and room for 16
# The first that a disk has. The World Wide Identifier of NVMe and SCSI disks holds vendor, model and serial number.
_NAMES = ("wwid", "device/wwid", "device/serial", "serial", "loop/backing_file")


@dataclass(frozen=True)
class Identity:
    """What tuned settings hold for. Two folders on one file system have the same."""

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
        """A name for files: as good as unique."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:20]

    def words(self) -> str:
        """For a reader."""
        return f"{self.file_system} on {' and '.join(self.disks) or self.file_system_id or 'memory'}"


def identify(path: str | os.PathLike[str], way: str, backend: str, host: Host | None = None) -> Identity:
    """The device of a file or folder, or of where it would be: in a folder that exists.

    Raises:
        FileNotFoundError: that folder is missing, and is named.
    """
    host, place, folder = host or Host(), nearest(path), os.path.dirname(os.path.abspath(path))
    if not os.path.exists(path) and place != folder:
        raise no_folder(folder)
    status = os.stat(place)
    if stat.S_ISBLK(status.st_mode):
        found, kind, number = devices(host, status.st_rdev), BARE, ""
    else:
        try:
            mount = mount_of(host, place)
        except OSError:  # no /proc
            mount = None
        found, kind = devices_under(host, place, mount), mount.kind if mount else "unknown"
        number = _file_system_id(place, mount)
    disks = tuple(sorted(_describe(host, device) for device in found))
    processors, gpu = len(os.sched_getaffinity(0)), _gpu() if way != "cpu" else ""
    return Identity(disks, kind, number, os.uname().release, processors, way, backend, gpu)


def nearest(path: str | os.PathLike[str]) -> str:
    """The path itself where it exists, else its nearest parent that does."""
    place = os.path.abspath(os.fspath(path))
    while not os.path.exists(place) and place != "/":
        place = os.path.dirname(place)
    return place


def _describe(host: Host, device: Device) -> str:
    """Names of devices (nvme0n1, sda) change from one start to the next: only where there is nothing better."""
    folder = Path("/sys/block", device.name)
    serial = next((text for name in _NAMES if (text := host.read_or(str(folder / name)))), device.name)
    sectors = host.read_or(str(folder / "size"), "0")
    size = size_words(int(sectors) * 512) if sectors.isdigit() else ""
    return " ".join(f"{device.kind} {device.model} {serial} {size}".split())


def _file_system_id(place: str, mount: Mount | None) -> str:
    if mount is not None and mount.kind in MEMORY:
        return ""
    if mount is not None and mount.kind in NETWORK:
        return mount.source
    number = os.statvfs(place).f_fsid
    return _uuid(place) or (f"{number:x}" if number else "")


def _uuid(place: str) -> str:
    """The file system's own UUID; empty where kernel or file system do not tell."""
    answer = bytearray(_UUID_ANSWER)
    with contextlib.suppress(OSError):  # also for what may not be opened: a socket, or somebody else's
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
