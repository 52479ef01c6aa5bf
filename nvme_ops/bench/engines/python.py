"""Plain Python through the page cache: ``ndarray.tofile`` with ``fsync``, and ``readinto``."""

from __future__ import annotations

import os

import torch

from nvme_ops.bench.engines.task import Task
from nvme_ops.bench.measure import Row, Unavailable
from nvme_ops.bench.work import tensor_row
from nvme_ops.settings import Settings
from nvme_ops.tensors import bytes_of


def row(task: Task, name: str, _: Settings) -> Row:
    """Returns a row; GPU memory goes through an ordinary tensor. Raises Unavailable for a write without NumPy."""
    if task.write:
        try:
            import numpy  # noqa: F401
        except ImportError:
            raise Unavailable("NumPy is not installed: pip install numpy") from None
    return tensor_row(task, name, lambda: task.buffer, lambda tensor: _move(task, tensor))


def _move(task: Task, tensor: torch.Tensor) -> None:
    host = tensor if task.gpu is None else task.pageable
    if task.write:
        if host is not tensor:
            host.copy_(tensor)
        write(task.path, host)
        return
    read(task.path, host)
    if host is not tensor:
        tensor.copy_(host)
        task.finish()


def write(path: str, tensor: torch.Tensor) -> None:
    """Writes in place, as the other engines do."""
    with open(path, "r+b") as file:
        tensor.numpy().tofile(file)
        file.flush()
        os.fsync(file.fileno())


def read(path: str, tensor: torch.Tensor) -> None:
    """Fills ``tensor``, on the CPU."""
    with open(path, "rb", buffering=0) as file, bytes_of(tensor) as target:
        position = 0
        while position < len(target):
            moved = file.readinto(target[position:])
            if not moved:
                raise EOFError(f"{path} ends after {position} bytes")
            position += moved
