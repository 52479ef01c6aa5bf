"""Which start of the kernel this is: what was locked or reserved before it is neither any more."""

from __future__ import annotations

from pathlib import Path


def boot_id() -> str:
    """The same in all containers of a machine; ``unknown`` where the kernel does not tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return "unknown"
