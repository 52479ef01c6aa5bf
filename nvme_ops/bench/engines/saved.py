"""Engines with a format and a file of their own. The ``fsync`` that makes it durable is timed too."""

from __future__ import annotations

from collections.abc import Callable

import torch

from nvme_ops.bench.engines.task import Task
from nvme_ops.bench.measure import Row, Unavailable
from nvme_ops.bench.work import saved_row
from nvme_ops.measuring.files import sync
from nvme_ops.settings import Settings


def torch_row(task: Task, name: str, _: Settings) -> Row:
    """Returns a row of ``torch.save`` and ``torch.load``."""
    return _row(task, name, "pt", torch.save, lambda path: torch.load(path, map_location=task.buffer.device))


def safetensors_row(task: Task, name: str, _: Settings) -> Row:
    """Returns a row of safetensors' ``save_file`` and ``load_file``. Raises Unavailable if it is not installed."""
    try:
        from safetensors.torch import load_file, save_file
    except ImportError:
        raise Unavailable("safetensors is not installed: pip install safetensors") from None

    def load(path: str) -> torch.Tensor:
        loaded = load_file(path, device=str(task.buffer.device))["tensor"]
        if task.gpu is None:
            task.buffer.copy_(loaded)  # the file is mapped: only what is touched is read
        return loaded

    return _row(task, name, "safetensors", lambda tensor, path: save_file({"tensor": tensor}, path), load)


def _row(
    task: Task,
    name: str,
    suffix: str,
    save: Callable[[torch.Tensor, str], None],
    load: Callable[[str], torch.Tensor],
) -> Row:
    """Returns a row for one tensor in a file beside that of the others."""
    path = f"{task.path}.{suffix}"

    def save_and_sync() -> None:
        save(task.buffer, path)
        sync(path)

    def load_and_finish() -> torch.Tensor:
        loaded = load(path)
        task.finish()
        return loaded

    return saved_row(task, name, path, lambda: task.buffer, save_and_sync, load_and_finish, [])
