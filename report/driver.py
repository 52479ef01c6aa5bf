"""``--open-driver``: opens cuFile's driver for real, in a process of its own, and reports its properties.

Opening may take long, fail in many ways, even hang, and forbids fork afterwards: none of that may happen to the report.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile

from nvme_ops.op_builder import GDSBuilder, cufile

from . import ops, torch_info
from .result import Json, Result, Status

LIMIT = 40.0  # seconds, for Python, torch, CUDA and cuFile to start; cuFile alone may take 20
_GRACE = 2.0  # seconds a killed process gets to go
_NAME = "cuFile driver"
_CHILD = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from nvme_ops.report import driver
driver.answer()
"""
_MARK = "cuFile says: "  # the library may print as well
_BUILD = 'python -c "from nvme_ops.op_builder import GDSBuilder; GDSBuilder().load(verbose=True)"'
_OFF = "export NVME_OPS_GDS=off  # or see the lines above"


def check() -> Result:
    """Runs the other process; reports what it found, or how it ended."""
    broken = torch_info.problem()
    if broken is not None:
        return Result(_NAME, Status.WARNING, f"not opened, torch: {broken.detail}", broken.fix)
    if ops.built(GDSBuilder()) is None:
        return Result(_NAME, Status.WARNING, "not opened, because the gds op is not compiled yet", _BUILD)
    code, output = _run()
    said = [line.removeprefix(_MARK) for line in output.splitlines() if line.startswith(_MARK)]
    if said:
        return _judge(json.loads(said[-1]))
    if code is None:
        words = f"not open after {LIMIT:.0f} s: the process that tried was ended"
    else:
        last = output.strip().rpartition("\n")[2]
        words = f"the process that opened it ended with status {code}{': ' if last else ''}{last}"
    return Result(_NAME, Status.NO, words, _OFF, {"opened": False})


def answer() -> None:
    """Runs in the other process; the last line it prints is the result."""
    import torch

    found: dict[str, Json]
    try:
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # cuFile needs a CUDA context
        found = GDSBuilder().load().open_driver(cufile.libraries())
    except Exception as error:
        found = {"error": str(error)}
    sys.stdout.write(f"\n{_MARK}{json.dumps(found)}\n")
    sys.stdout.flush()


def _run() -> tuple[int | None, str]:
    """Returns the exit status, None for a process that had to be killed, and its output."""
    command = [sys.executable, "-c", _CHILD, json.dumps(sys.path)]
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
        try:
            code: int | None = process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            code = None
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # one that is stuck in the kernel stays behind
                process.wait(_GRACE)
        output.seek(0)
        return code, output.read()


def _judge(found: dict[str, Json]) -> Result:
    error = found.get("error")
    if error is not None:
        words, _, fix = str(error).partition("; fix: ")
        return Result(_NAME, Status.NO, words, fix or _OFF, {"opened": False})
    version = found.get("version")
    number = f"{version // 1000}.{version % 1000 // 10}" if isinstance(version, int) and version else "unknown version"
    data: dict[str, Json] = {"opened": True, **found, "version": number}
    words = f"opens: {number}, {found.get('path')}"
    if found.get("fake"):
        words += ", a test double that says nothing about this machine"
    why_not = str(found.get("why_not_direct") or "")
    if not why_not:
        return Result(_NAME, Status.OKAY, f"{words}; GPUDirect Storage is available", data=data)
    return Result(_NAME, Status.WARNING, f"{words}; no GPUDirect Storage: {why_not}", "nvme-report  # see cuFile", data)
