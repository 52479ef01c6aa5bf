"""The job that writes: how long checkpoints keep an accelerator from computing, by this package and by plain torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import torch

import nvme_ops
from nvme_ops.measure.files import sync
from nvme_ops.measure.rows import latency
from nvme_ops.measure.workload.feed import Fed

State = dict[str, torch.Tensor]


class BackgroundSave:
    """``save_async`` that waits for the previous save, as a program with memory for a single copy must."""

    def __init__(self) -> None:
        self._under_way: list[Future[None]] = []

    def __call__(self, state: State, path: Path) -> None:
        """Starts a save."""
        self.finish()
        self._under_way.append(nvme_ops.save_async(state, path))

    def finish(self) -> None:
        """Waits for the save that is under way."""
        while self._under_way:
            self._under_way.pop().result()


def _by_torch(state: State, path: Path) -> None:
    torch.save(state, path)
    sync(str(path))


#: The ways to save, by name: functions that return a function.
WAYS: dict[str, Callable[[], Callable[[State, Path], object]]] = {
    "nvme_ops.save_async": BackgroundSave,
    "nvme_ops.save": lambda: nvme_ops.save,
    "torch.save + fsync": lambda: _by_torch,
}


def measured(name: str, folder: Path, nbytes: int, compute: float, seconds: float) -> Fed:
    """Computes and saves ``nbytes`` by turns, at least four times and for ``seconds``."""
    save = WAYS[name]()
    state = {f"layer.{number}": torch.full((nbytes // 16 // 4,), float(number)) for number in range(16)}
    path, waits = folder / "checkpoint.pt", list[float]()
    try:
        save(state, path)  # the first one pays for files and memory
        while len(waits) < 4 or len(waits) * compute + sum(waits) < seconds:
            time.sleep(compute)
            waits.append(latency(lambda: save(state, path)))
    finally:
        if isinstance(save, BackgroundSave):
            save.finish()
    total = len(waits) * compute + sum(waits)
    return Fed(1, len(waits) * compute / total, len(waits), nbytes * len(waits), total, waits)
