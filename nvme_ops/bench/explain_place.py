"""Inspects, or refuses, the file or folder given to ``nvme-bench explain``, without writing to it."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import stat
import struct
from dataclasses import dataclass

from nvme_ops.measuring.files import NotUsable
from nvme_ops.measuring.page_cache import cached_bytes
from nvme_ops.op_builder.machine import Host
from nvme_ops.report import kernel
from nvme_ops.storage.device import MEMORY, NETWORK, Mount, devices_under, mount_of
from nvme_ops.text import MIB, size_words

_FIEMAP = 0xC020660B  # FS_IOC_FIEMAP, linux/fs.h
_LEAST = MIB  # one block of a default handle; below, a call's latency counts and not a rate
_KINDS = {
    stat.S_IFCHR: "a device node",
    stat.S_IFBLK: "a device node",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
}


@dataclass(frozen=True)
class FilePlace:
    """What is known about a file without reading it."""

    path: str
    size: int
    file_system: str
    device: str
    alignment: str
    cached: int | None  # bytes of it in the page cache; None: unknown
    extents: int | None  # pieces on the device; None: unknown
    stored: int  # bytes that it takes there; less than its size where it has holes or is compressed


def is_folder(path: str) -> bool:
    """Returns False for a file. Raises NotUsable for anything else."""
    try:
        kind = stat.S_IFMT(os.stat(path).st_mode)
    except OSError as error:
        raise NotUsable(f"{path}: {error.strerror}") from error
    if kind not in (stat.S_IFDIR, stat.S_IFREG):
        raise NotUsable(f"{path} is {_KINDS.get(kind, 'no file')}: name a file, or a folder on the device")
    return kind == stat.S_IFDIR


def mount_of_device(path: str) -> Mount | None:
    """Returns the mount of ``path``. Raises NotUsable for a file system in memory."""
    mount = mount_of(Host(), path)
    if mount and mount.kind in MEMORY:
        raise NotUsable(f"{path} is on {mount.kind}, which lives in memory: there is no device to explain")
    return mount


def inspect(path: str) -> FilePlace:
    """Inspects a file. Raises NotUsable if it is too small, or can be read through the page cache only."""
    mount = mount_of_device(path)
    try:
        file = open(path, "rb", buffering=0)  # noqa: SIM115  (below)
    except OSError as error:
        raise NotUsable(f"{path}: {error.strerror}") from error
    with file:
        about = os.fstat(file.fileno())
        if about.st_size == 0:
            raise NotUsable(f"{path} is empty: there is nothing to read")
        if about.st_size < _LEAST:
            words = f"{size_words(about.st_size)}, less than a block of {size_words(_LEAST)}"
            raise NotUsable(f"{path} has {words}: too little to tell a rate; name a larger file, or a folder")
        _refuse_cached_only(path)
        return FilePlace(
            path,
            about.st_size,
            f"{mount.kind} on {mount.point}" if mount else "unknown file system",
            _device_words(path, mount),
            _alignment(file.fileno()),
            cached_bytes(path),
            _extents(file.fileno()),
            about.st_blocks * 512,  # stat(2) counts so whatever the file system's block
        )


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


def _device_words(path: str, mount: Mount | None) -> str:
    found = devices_under(Host(), path, mount)
    if not found and mount and mount.kind in NETWORK:
        return f"network file system from {mount.source}"
    return "; ".join(", ".join(filter(None, (device.name, device.kind, device.model))) for device in found)


def _alignment(descriptor: int) -> str:
    with contextlib.suppress(OSError):
        said = kernel.direct_io_alignment(descriptor)
        if said and said.offset:
            return f"direct I/O aligned to {said.offset} bytes"
    return ""


def _extents(descriptor: int) -> int | None:
    request = bytearray(struct.pack("=QQIIII", 0, 2**64 - 1, 0, 0, 0, 0))  # room for none: the kernel counts them
    try:
        fcntl.ioctl(descriptor, _FIEMAP, request)
    except OSError:
        return None
    return int(struct.unpack_from("=I", request, 20)[0])  # fm_mapped_extents
