"""What runs beside a job that reads: checkpoints that are saved one after another."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import nvme_ops
from nvme_ops.engine import Priority
from nvme_ops.handle import aio_handle
from nvme_ops.measuring import stop

_TENSORS = 16


class Unordered(aio_handle):
    """A handle whose transfers are all equally urgent, as in a program without priorities."""

    def submit_preadv(self, *arguments: Any, **more: Any) -> Any:
        """Reads, with the priority of demand."""
        return super().submit_preadv(*arguments, **{**more, "priority": Priority.DEMAND})

    def submit_pwrite(self, *arguments: Any, **more: Any) -> Any:
        """Writes, with the priority of demand."""
        return super().submit_pwrite(*arguments, **{**more, "priority": Priority.DEMAND})

    def submit_pwritev(self, *arguments: Any, **more: Any) -> Any:
        """Writes, with the priority of demand."""
        return super().submit_pwritev(*arguments, **{**more, "priority": Priority.DEMAND})


class Saved:
    """Bytes of checkpoints, and the seconds that saving them took."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.seconds = 0.0

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return self.nbytes / self.seconds if self.seconds else 0.0


@contextlib.contextmanager
def checkpoints(folder: Path, nbytes: int, handle: aio_handle | None = None) -> Iterator[Saved]:
    """Saves a model of ``nbytes`` again and again, by ``nvme_ops.save``, until the block ends."""
    each = max(4, nbytes // _TENSORS // 4)
    model = {f"layer.{number}": torch.full((each,), float(number)) for number in range(_TENSORS)}
    saved, ended, over, failures = Saved(), threading.Event(), threading.Event(), []

    def save() -> None:
        try:
            while not ended.is_set():
                begin = time.perf_counter()
                nvme_ops.save(model, folder / "checkpoint.safetensors", handle=handle)
                saved.seconds += time.perf_counter() - begin
                saved.nbytes += each * 4 * _TENSORS
        except Exception as error:
            failures.append(error)
        finally:
            over.set()

    thread = threading.Thread(target=save, name="nvme_ops.checkpoints", daemon=False)
    thread.start()
    try:
        yield saved
    finally:
        ended.set()
        with stop.deferred():  # or the folder is removed while the thread still saves there
            over.wait()  # before Python 3.13 a ``join`` that a signal ends takes the thread for ended
        thread.join()
    if failures:
        raise failures[0]
