"""Programs that a benchmark starts, and that do not outlive it."""

from __future__ import annotations

import functools
import shutil
import subprocess
from collections.abc import Sequence


def tied(command: Sequence[str], end: str = "KILL") -> list[str]:
    """Returns a command that runs ``command`` and gets the signal ``end`` when the thread that starts it ends or dies.

    Without util-linux's setpriv, returns ``command`` itself. A ``preexec_fn`` would cost a copy of all page tables.
    """
    setpriv = _setpriv()
    return [setpriv, "--pdeathsig", end, "--", *command] if setpriv else list(command)


@functools.cache
def _setpriv() -> str:
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        return ""
    with subprocess.Popen([setpriv, "--help"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        return setpriv if "--pdeathsig" in process.communicate()[0] else ""
