"""Lets two files share blocks, where the file system can: XFS, Btrfs, bcachefs, OCFS2."""

from __future__ import annotations

import errno
import fcntl
import struct

_FICLONERANGE = 0x4020940D  # linux/fs.h: _IOW(0x94, 13, struct file_clone_range)
_CANNOT = {errno.EOPNOTSUPP, errno.ENOTTY, errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EPERM}


def share(source: int, start: int, nbytes: int, target: int, place: int) -> bool:
    """Has ``nbytes`` of ``source`` from byte ``start`` on in ``target`` from ``place`` on, without copying them.

    Returns False where that cannot be: on most file systems, between two, or for places within a block.

    Raises:
        OSError: ENOSPC, EIO: what else can be wrong.
    """
    try:
        fcntl.ioctl(target, _FICLONERANGE, struct.pack("qQQQ", source, start, nbytes, place))
    except OSError as error:
        if error.errno in _CANNOT:
            return False
        raise
    return True
