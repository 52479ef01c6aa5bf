"""safetensors' ``save_file`` and ``load_file``. The ``fsync`` that brings it to the device is timed too."""

from __future__ import annotations

import torch

from nvme_ops.bench.engines.task import Task
from nvme_ops.bench.files import sync
from nvme_ops.bench.measure import Row, Unavailable
from nvme_ops.bench.settings import Settings
from nvme_ops.bench.work import saved_row


def row(task: Task, name: str, _: Settings) -> Row:
    """One tensor in a file of its own beside the one of the others. Raises Unavailable where it is not installed."""
    try:
        from safetensors.torch import load_file, save_file
    except ImportError:
        raise Unavailable("safetensors is not installed: pip install safetensors") from None
    path = f"{task.path}.safetensors"

    def save() -> None:
        save_file({"tensor": task.buffer}, path)
        sync(path)

    def load() -> torch.Tensor:
        loaded = load_file(path, device=str(task.buffer.device))["tensor"]
        if task.gpu is None:
            task.buffer.copy_(loaded)  # the file is mapped: what nobody looks at is not read
        task.finish()
        return loaded

    return saved_row(task, name, path, lambda: task.buffer, save, load, [])
