"""Finds the mount that a folder is on, from /proc/self/mountinfo."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from nvme_ops.host import Host

NETWORK = {
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "virtiofs", "ceph", "lustre", "gpfs", "beegfs", "wekafs", "glusterfs",
    "fuse.glusterfs", "fuse.sshfs", "fuse.s3fs", "fuse.gcsfuse", "fuse.juicefs", "afs", "orangefs", "pvfs2",
}  # fmt: skip
MEMORY = {"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"}


@dataclass(frozen=True)
class Mount:
    """One line of mountinfo."""

    point: str
    kind: str  # ext4, xfs, nfs4, ...
    source: str
    options: tuple[str, ...]  # of the mount and of the file system


def mount_of(host: Host, folder: str) -> Mount | None:
    """Returns the mount of ``folder``: the longest mount point above it, the last one if several are stacked."""
    path = os.path.realpath(folder)
    best: Mount | None = None
    for line in host.read("/proc/self/mountinfo").splitlines():
        mount = _parse(line)
        if mount and _holds(mount.point, path) and (best is None or len(mount.point) >= len(best.point)):
            best = mount
    return best


def _holds(point: str, path: str) -> bool:
    return path == point or path.startswith(point.rstrip("/") + "/")


def _parse(line: str) -> Mount | None:
    # 36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue     (proc(5))
    before, separator, after = line.partition(" - ")
    left, right = before.split(), after.split()
    if not separator or len(left) < 6 or len(right) < 2:
        return None
    options = [*left[5].split(","), *(right[2].split(",") if len(right) > 2 else [])]
    return Mount(_unescape(left[4]), right[0], _unescape(right[1]), tuple(dict.fromkeys(options)))


def _unescape(text: str) -> str:
    """Decodes blanks and the like in paths, written as a backslash and three octal digits."""
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), text)
