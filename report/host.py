"""The machine as the checks see it: files under a root, and commands. Tests give another root."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

COMMAND_TIMEOUT = 10.0  # seconds; a compiler that does not answer `--version` in this time is of no use


@dataclass(frozen=True)
class Host:
    """Where the checks look: ``root`` stands before every absolute path."""

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


def output(*command: str) -> str:
    """What a short command prints; OSError when it cannot run, fails or does not answer."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            timeout=COMMAND_TIMEOUT, text=True, errors="replace",
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise OSError(f"{' '.join(command)}: no answer in {COMMAND_TIMEOUT:.0f} s") from error
    if done.returncode:
        raise OSError(f"{' '.join(command)}: exit status {done.returncode}: {done.stdout.strip()}")
    return done.stdout.strip()
