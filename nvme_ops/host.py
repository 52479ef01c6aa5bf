"""The machine as the kernel shows it: files of /proc and /sys under a root. Tests give another root."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Host:
    """Where to look: ``root`` stands before every absolute path."""

    root: Path = Path("/")

    def path(self, name: str) -> Path:
        """The file that plays the part of ``name`` (an absolute path)."""
        return self.root / name.lstrip("/")

    def read(self, name: str) -> str:
        """The stripped text of a file; OSError when it cannot be read."""
        return self.path(name).read_text(errors="replace").strip()

    def read_or(self, name: str, default: str = "") -> str:
        """The stripped text of a file, or ``default`` where it cannot be read."""
        try:
            return self.read(name)
        except OSError:
            return default

    def exists(self, name: str) -> bool:
        """True when the file is there (False too where looking is not allowed)."""
        return os.path.exists(self.path(name))
