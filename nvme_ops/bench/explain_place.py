"""The file or folder that ``nvme-bench explain`` is asked about: refused, or looked at. Nothing of it is written."""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
import struct
from dataclasses import dataclass

from nvme_ops.bench.files import NotUsable
from nvme_ops.bench.page_cache import cached_bytes
from nvme_ops.report import mounts, syscalls
from nvme_ops.report.device import devices
from nvme_ops.report.host import Host
from nvme_ops.text import MIB, size_words

_FIEMAP = 0xC020660B  # FS_IOC_FIEMAP, linux/fs.h
_LEAST = MIB  # one block of a default handle; below, a call's latency counts and not a rate
_KINDS = {
    stat.S_ISCHR: "a device node",
    stat.S_ISBLK: "a device node",
    stat.S_ISFIFO: "a pipe",
    stat.S_ISSOCK: "a socket",
}


@dataclass(frozen=True)
class Place:
    """What there is to know about a file without reading it."""

    path: str
    size: int
    file_system: str
    device: str
    alignment: str
    cached: int | None  # bytes of it in the page cache; None: unknown
    extents: int | None  # pieces on the device; None: unknown
    stored: int  # bytes that it takes there; less than its size where it has holes or is compressed

    def words(self) -> str:
        """One line for the page."""
        return ", ".join(word for word in (self.file_system, self.device, self.alignment) if word)


def is_folder(path: str) -> bool:
    """Of a file or folder. Raises NotUsable for anything else."""
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        raise NotUsable(f"{path}: {error.strerror}") from error
    if stat.S_ISDIR(mode):
        return True
    if stat.S_ISREG(mode):
        return False
    kind = next((words for is_kind, words in _KINDS.items() if is_kind(mode)), "no file")
    raise NotUsable(f"{path} is {kind}: name a file, or a folder on the device")


def refuse_memory(path: str) -> None:
    """Raises NotUsable for a file system that lives in memory."""
    mount = mounts.mount_of(Host(), path)
    if mount and mount.kind in mounts.MEMORY:
        raise NotUsable(f"{path} is on {mount.kind}, which lives in memory: there is no device to explain")


def inspect(path: str) -> Place:
    """Of a file. Raises NotUsable where it cannot be read past the page cache, or is too small."""
    refuse_memory(path)
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise NotUsable(f"{path}: {error.strerror}") from error
    try:
        about = os.fstat(descriptor)
        if about.st_size == 0:
            raise NotUsable(f"{path} is empty: there is nothing to read")
        if about.st_size < _LEAST:
            words = f"{size_words(about.st_size)}, less than a block of {size_words(_LEAST)}"
            raise NotUsable(f"{path} has {words}: too little to tell a rate; name a larger file, or a folder")
        _refuse_cached_only(path)
        mount = mounts.mount_of(Host(), path)
        return Place(
            path,
            about.st_size,
            f"{mount.kind} on {mount.point}" if mount else "unknown file system",
            "; ".join(_device_words(about.st_dev, mount)),
            _alignment(descriptor),
            cached_bytes(path),
            _extents(descriptor),
            about.st_blocks * 512,  # stat(2) counts so whatever the file system's block
        )
    finally:
        os.close(descriptor)


def _refuse_cached_only(path: str) -> None:
    reason = "the file system refuses O_DIRECT, everything goes through the page cache"
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError as error:
        raise NotUsable(f"{path}: {reason} ({error.strerror})") from error
    try:
        with mmap.mmap(-1, 1 << 16) as block:  # page-aligned, and a multiple of every logical block size
            os.preadv(descriptor, [block], 0)
    except OSError as error:
        raise NotUsable(f"{path}: cannot be read past the page cache: {error.strerror}") from error
    finally:
        os.close(descriptor)


def _device_words(number: int, mount: mounts.Mount | None) -> list[str]:
    host = Host()
    found = devices(host, number)
    if not found and mount and mount.source.startswith("/dev/") and os.path.exists(mount.source):
        found = devices(host, os.stat(mount.source).st_rdev)  # btrfs and others show a number of their own
    if not found:
        return [f"network file system from {mount.source}"] if mount and mount.kind in mounts.NETWORK else []
    return [", ".join(filter(None, (device.name, device.kind, device.model))) for device in found]


def _alignment(descriptor: int) -> str:
    try:
        said = syscalls.direct_io_alignment(descriptor)
    except OSError:
        said = None
    return f"direct I/O aligned to {said.offset} bytes" if said and said.offset else ""


def _extents(descriptor: int) -> int | None:
    request = bytearray(struct.pack("=QQIIII", 0, 2**64 - 1, 0, 0, 0, 0))  # room for none: the kernel counts them
    try:
        fcntl.ioctl(descriptor, _FIEMAP, request)
    except OSError:
        return None
    return int(struct.unpack_from("=I", request, 20)[0])  # fm_mapped_extents
