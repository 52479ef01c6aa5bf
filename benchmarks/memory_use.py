"""How much memory a default handle stages in, idle and while an ordinary tensor is read."""

from __future__ import annotations

import re
import threading
import time

import torch

import nvme_ops
from nvme_ops.bench.files import make_cold
from nvme_ops.op_builder import AsyncIOBuilder


def staging(path: str, size: int) -> dict[str, int | None]:
    """Bytes of staging memory before, during (the most that was seen) and after one cold read, and what else was kept.

    ``peak_resident_growth`` is how far the whole process grew beyond the tensor; None where the kernel does not say.
    """
    native = AsyncIOBuilder().load()
    native.trim_pool()
    handle = nvme_ops.aio_handle()
    engine = handle._engine  # no public name: users need not know
    tensor = torch.zeros(size, dtype=torch.uint8)
    make_cold(path)
    seen, ended = [engine.staging_bytes()], threading.Event()

    def watch() -> None:
        while not ended.is_set():
            seen.append(engine.staging_bytes())
            time.sleep(0.0005)

    start = _reset_peak()
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        handle.async_pread(tensor, path)  # a blocking call's own staging memory cannot be asked for meanwhile
        handle.wait()
    finally:
        ended.set()
        watcher.join()
    peak = _status("VmHWM")
    time.sleep(0.2)  # the lane's thread gives its memory back after it has told the waiting one
    return {
        "idle_before": seen[0],
        "busy": max(seen),
        "idle_after": engine.staging_bytes(),
        "pool_kept": native.pool_statistics()["cached_bytes"],
        "peak_resident_growth": peak - start if peak is not None and start is not None else None,
    }


def _reset_peak() -> int | None:
    """Lets the peak start anew at what is resident now, and returns that; None where that cannot be done."""
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")
    except OSError:
        return None
    return _status("VmRSS")


def _status(name: str) -> int | None:
    with open("/proc/self/status", encoding="ascii") as file:
        found = re.search(rf"^{name}:\s+(\d+) kB", file.read(), re.MULTILINE)
    return int(found[1]) * 1024 if found else None
