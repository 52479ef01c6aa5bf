"""``Result``, which a check returns, and ``run_checks``.

A check is a function that inspects the host and returns results; it never prints, and an exception becomes a result
too. What is printed of results, cli.py decides.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"


class Status(str, Enum):
    """How a check ended."""

    OKAY = "OKAY"  # works
    INFO = "INFO"  # a fact, not judged
    WARNING = "WARNING"  # works, with something missing or slower than it need be
    NO = "NO"  # does not work
    FAIL = "FAIL"  # ninja is missing, or the check itself failed

    @property
    def needs_fix(self) -> bool:
        """True when a result of this status must say what to do about it."""
        return self not in (Status.OKAY, Status.INFO)


@dataclass(frozen=True)
class Result:
    """One line of the report: what was checked, its state, and the command that improves it."""

    name: str
    status: Status
    detail: str = ""
    fix: str = ""
    data: Mapping[str, Json] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuses a complaint without a reason or a fix, so that no check can forget one."""
        if self.status.needs_fix and not (self.detail.strip() and self.fix.strip()):
            raise ValueError(f"result {self.name!r} is [{self.status.value}] and names no reason or no fix")


def judged(
    name: str, detail: str, fix: str, data: Mapping[str, Json], good: Status = Status.OKAY, bad: Status = Status.WARNING
) -> Result:
    """Returns a result that is ``bad`` if there is something to fix, else ``good``."""
    return Result(name, bad if fix else good, detail, fix, data)


def symbol(error: OSError) -> str:
    """Returns the name of an errno, for example ``ENOENT``."""
    return errno.errorcode.get(error.errno or 0, str(error.errno))


#: The command against an error, wherever it is met.
FIXES = {
    errno.EMFILE: "ulimit -n 65536",
    errno.EFBIG: "ulimit -f unlimited",
    errno.ENOMEM: "ulimit -v unlimited",
    errno.EAGAIN: "ulimit -u unlimited  # processes and threads",
    errno.ENOSPC: 'df -h "${TMPDIR:-/tmp}"; df -i "${TMPDIR:-/tmp}"  # then make room',
}

Checks: TypeAlias = Mapping[str, Callable[[], Result | Sequence[Result]]]


def run_checks(checks: Checks) -> tuple[Result, ...]:
    """Runs every check; an exception becomes a failed result with the check's name."""
    results: list[Result] = []
    for name, check in checks.items():
        try:
            outcome = check()
        except (Exception, SystemExit) as error:  # a builder or a library may call sys.exit
            outcome = _failed(name, error)
        results.extend([outcome] if isinstance(outcome, Result) else outcome)
    return tuple(results)


def _failed(name: str, error: BaseException) -> Result:
    data = {"exception": type(error).__name__}
    path = str(error.filename or "") if isinstance(error, OSError) else ""
    if isinstance(error, OSError) and ("/proc" in path or "/sys" in path):
        words = f"cannot read {path}: {os.strerror(error.errno or 0)}"
        return Result(name, Status.WARNING, words, _unreadable_fix(error, path), data)
    fix = "the check itself failed: report this line with the output of `nvme-report --json` as a bug of nvme_ops"
    known = FIXES.get(error.errno or 0) if isinstance(error, OSError) else None
    return Result(name, Status.FAIL, f"{type(error).__name__}: {error}", known or fix, data)


def _unreadable_fix(error: OSError, path: str) -> str:
    if isinstance(error, PermissionError):
        return f"sudo cat {path}  # or run nvme-report as root"
    kind, where = ("sysfs", "/sys") if "/sys" in path and "/proc" not in path else ("proc", "/proc")
    return f"mount -t {kind} {kind} {where}  # if the kernel has this file at all"
