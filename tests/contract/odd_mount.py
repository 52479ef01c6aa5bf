"""A folder that lies elsewhere (FUSE, by fusepy and libfuse2), with the manners of other mounts.

    python -m tests.contract.odd_mount /var/tmp/there /mnt/here no_chmod

Manners: ``no_chmod`` (EPERM, as CIFS and object stores), ``no_folder_sync`` (EINVAL), ``one_mode`` (everything is shown
as rwxrwxrwx, and chmod does nothing), ``no_links`` (EPERM).
"""

from __future__ import annotations

import errno
import functools
import os
import sys
from collections.abc import Callable
from typing import Any

_STATUS = ["atime", "ctime", "mtime", "gid", "uid", "mode", "nlink", "size", "ino"]
_SPACE = ["bavail", "bfree", "blocks", "bsize", "favail", "ffree", "files", "flag", "frsize", "namemax"]


def serve(root: str, place: str, *manners: str) -> None:
    """Answers the kernel until ``place`` is unmounted."""
    import fuse

    def refuse(manner: str, code: int, call: Callable[..., Any]) -> Callable[..., Any]:
        def refused(*_: Any) -> None:
            raise fuse.FuseOSError(code)

        return refused if manner in manners else call

    class Passed(fuse.Operations):  # type: ignore[misc, name-defined, unused-ignore]
        def __call__(self, operation: str, path: str | None, *given: Any) -> Any:
            return getattr(self, operation)(None if path is None else root + path, *given)

        def getattr(self, path: str, _: int | None) -> dict[str, Any]:
            status = os.lstat(path)
            shown = {f"st_{name}": getattr(status, f"st_{name}") for name in _STATUS}
            return shown | ({"st_mode": status.st_mode | 0o777} if "one_mode" in manners else {})

        def statfs(self, path: str) -> dict[str, int]:
            return {f"f_{name}": getattr(os.statvfs(path), f"f_{name}") for name in _SPACE}

        def readdir(self, path: str, _: int) -> list[str]:
            return [".", "..", *os.listdir(path)]

        def rename(self, old: str, new: str) -> None:
            os.rename(old, root + new)

        def truncate(self, path: str, size: int, _: int | None = None) -> None:
            os.truncate(path, size)

        def open(self, path: str, flags: int) -> int:
            return os.open(path, flags & ~os.O_DIRECT)

        def create(self, path: str, mode: int) -> int:
            return os.open(path, os.O_RDWR | os.O_CREAT, mode)

        def read(self, _: str, size: int, place: int, file: int) -> bytes:
            return os.pread(file, size, place)

        def write(self, _: str, data: bytes, place: int, file: int) -> int:
            return os.pwrite(file, data, place)

        def release(self, _: str, file: int) -> None:
            os.close(file)

        def fsync(self, _: str, data_only: int, file: int) -> None:
            (os.fdatasync if data_only else os.fsync)(file)

        def utimens(self, path: str, times: Any = None) -> None:
            os.utime(path, times)

        def access(self, path: str, mode: int) -> None:
            if not os.access(path, mode):
                raise fuse.FuseOSError(errno.EACCES)

        def symlink(self, link: str, target: str) -> None:
            os.symlink(target, link)

        mkdir, rmdir = staticmethod(os.mkdir), staticmethod(os.rmdir)
        unlink, readlink = staticmethod(os.unlink), staticmethod(os.readlink)
        chmod = staticmethod(refuse("no_chmod", errno.EPERM, os.chmod if "one_mode" not in manners else print))
        link = staticmethod(refuse("no_links", errno.EPERM, lambda new, old: os.link(root + old, new)))
        fsyncdir = staticmethod(refuse("no_folder_sync", errno.EINVAL, lambda *_: 0))
        opendir = staticmethod(lambda _: 0)

    quiet = functools.partial(fuse.FUSE, foreground=True, nothreads=True, allow_other=True, big_writes=True)
    quiet(Passed(), place, use_ino=True)


if __name__ == "__main__":
    serve(*sys.argv[1:])
