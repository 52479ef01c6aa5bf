"""The backends: which can be used here, and which one a handle would choose."""

from __future__ import annotations

import os
from collections.abc import Sequence

from nvme_ops.host import Host
from nvme_ops.op_builder import ALL_OPS

from . import kernel, ops
from .packages import install_command
from .result import Json, Result, Status, run_checks

ORDER = ("io_uring", "libaio", "threads")  # as csrc/backends/registry.cpp
OVERRIDE = "NVME_OPS_BACKEND"


def section(host: Host) -> tuple[Result, ...]:
    """Returns every backend in order of preference, then the one that a handle would choose."""
    results = run_checks({"io_uring": lambda: kernel.io_uring(host), "libaio": libaio, "threads": threads})
    return results + run_checks({"chosen": lambda: chosen(results)})


def libaio() -> Result:
    """Checks its header, if the op is compiled here, its library, and the kernel's AIO."""
    compiled_in = ops.has_libaio(ALL_OPS["async_io"])
    library = kernel.libaio()
    data = {"compiled_in": compiled_in, "library": library}
    if not compiled_in:
        words = "libaio.h was not found when the op was compiled" if library else "libaio is not installed"
        return Result("libaio", Status.NO, words, install_command("libaio"), data)
    if library is None:
        return Result("libaio", Status.NO, f"{kernel.LIBAIO[0]} cannot be loaded", install_command("libaio"), data)
    reason, fix = kernel.aio_context()
    if reason:
        return Result("libaio", Status.NO, reason, fix, data)
    return Result("libaio", Status.OKAY, f"{library}, io_setup succeeds", data=data)


def threads() -> Result:
    """Returns a result that is always OKAY: pread and pwrite on threads."""
    return Result("threads", Status.OKAY, "pread and pwrite, always there")


def chosen(results: Sequence[Result]) -> Result:
    """Returns the first usable backend, unless the environment names another."""
    usable = [result.name for result in results if result.status is Status.OKAY]
    wanted = os.environ.get(OVERRIDE, "")
    data: dict[str, Json] = {"backend": None, OVERRIDE: wanted}
    if wanted not in ("", "auto", *ORDER):
        words = f"{OVERRIDE}={wanted} is not one of auto, {', '.join(ORDER)}"
        return Result("chosen", Status.NO, words, f"unset {OVERRIDE}", data)
    if wanted in ORDER and wanted not in usable:
        return Result("chosen", Status.NO, f"{OVERRIDE}={wanted} is not usable here", f"unset {OVERRIDE}", data)
    if wanted in ORDER:
        return Result("chosen", Status.OKAY, f"{wanted} ({OVERRIDE})", data={**data, "backend": wanted})
    data["backend"] = backend = usable[0]
    if backend == ORDER[-1]:
        words = f"{backend}: neither of the faster ones is usable"
        return Result("chosen", Status.WARNING, words, next(filter(None, (result.fix for result in results))), data)
    return Result("chosen", Status.OKAY, backend, data=data)
