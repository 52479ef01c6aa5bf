"""What the table has to find: programs that do not check, do not name, or do not clean up."""

from __future__ import annotations

import contextlib
import os
import threading

from tests.contract.adapters import Capability, require


class Plain(Capability):
    """A file written as everybody would, and read."""

    def start(self) -> None:
        self.path = self.folder / "file"
        self.do(0)

    def content(self, version: int) -> bytes:
        """Returns what is written."""
        return bytes([version % 256]) * 1_000_000

    def do(self, version: int) -> None:
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT)
        try:
            os.pwrite(fd, self.content(version), 0)
            os.fsync(fd)
        finally:
            os.close(fd)

    def check(self) -> None:
        found = self.path.read_bytes()
        require(found in (self.content(self.version), self.content(self.version + 1)), "neither the old nor the new")


class Unchecked(Plain):
    """Ignores the errors of its flush."""

    def do(self, version: int) -> None:
        with contextlib.suppress(OSError):
            super().do(version)


class Leaking(Plain):
    """Keeps a descriptor and a thread after each failure."""

    def do(self, version: int) -> None:
        try:
            super().do(version)
        except OSError:
            os.dup(0)
            threading.Thread(target=threading.Event().wait, daemon=True).start()
            raise


class Broken(Plain):
    """Cannot be used any more after a failure."""

    failed = False

    def do(self, version: int) -> None:
        try:
            require(not self.failed, "it has failed before")
            super().do(version)
        except OSError:
            self.failed = True
            raise
