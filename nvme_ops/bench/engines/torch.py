"""``torch.save`` and ``torch.load``. What is saved reaches the device by an ``fsync``, which is timed too."""

from __future__ import annotations

from typing import cast

import torch

from nvme_ops.bench.engines.task import Task
from nvme_ops.bench.files import sync
from nvme_ops.bench.measure import Row
from nvme_ops.bench.settings import Settings
from nvme_ops.bench.work import saved_row


def row(task: Task, name: str, _: Settings) -> Row:
    """One tensor in a file of its own beside the one of the others."""
    path = f"{task.path}.pt"

    def save() -> None:
        torch.save(task.buffer, path)
        sync(path)

    def load() -> torch.Tensor:
        loaded = cast(torch.Tensor, torch.load(path, map_location=task.buffer.device))
        task.finish()
        return loaded

    return saved_row(task, name, path, lambda: task.buffer, save, load, [])
