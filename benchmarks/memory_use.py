"""How much memory a default handle stages in, idle and while an ordinary tensor is read."""

from __future__ import annotations

import threading
import time

import torch

import nvme_ops
from nvme_ops.bench.files import make_cold
from nvme_ops.bench.measure import timed
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
        while not ended.wait(0.0005):
            seen.append(engine.staging_bytes())

    def read() -> None:
        handle.async_pread(tensor, path)  # a blocking call's own staging memory cannot be asked for meanwhile
        handle.wait()

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        peak = timed(read, size).peak_bytes
    finally:
        ended.set()
        watcher.join()
    time.sleep(0.2)  # the lane's thread gives its memory back after it has told the waiting one
    return {
        "idle_before": seen[0],
        "busy": max(seen),
        "idle_after": engine.staging_bytes(),
        "pool_kept": native.pool_statistics()["cached_bytes"],
        "peak_resident_growth": peak,
    }
