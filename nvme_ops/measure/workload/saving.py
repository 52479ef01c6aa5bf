"""The jobs that write: how long they keep an accelerator from computing, with this package and with plain torch."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

import nvme_ops
from nvme_ops.data import AsyncLog
from nvme_ops.measure.files import make_cold
from nvme_ops.measure.rows import latency
from nvme_ops.measure.workload.feed import Fed
from nvme_ops.measure.workload.table import Writing
from nvme_ops.storage import Session, TensorStore

Write = Callable[[], object]


class Way(NamedTuple):
    """A function that writes once, and one that is called before each write, untimed."""

    write: Write
    before: Write = lambda: None


@contextmanager
def _checkpoint(folder: Path, nbytes: int, save: Callable[[dict[str, torch.Tensor], Path], object]) -> Iterator[Way]:
    each = nbytes // 16 // 4
    model = {f"layer.{number}": torch.full((each,), float(number)) for number in range(16)}
    yield Way(lambda: save(model, folder / "checkpoint.pt"))


def _by_torch(model: dict[str, torch.Tensor], path: Path) -> None:
    torch.save(model, path)
    with path.open("rb") as file:
        os.fdatasync(file.fileno())


@contextmanager
def _checkpoint_in_the_background(folder: Path, nbytes: int) -> Iterator[Way]:
    """Waits for the previous save, as a program with memory for a single copy must."""
    under_way: list[Future[None]] = []

    def save(model: dict[str, torch.Tensor], path: Path) -> None:
        finish()
        under_way.append(nvme_ops.save_async(model, path))

    def finish() -> None:
        while under_way:
            under_way.pop().result()

    with _checkpoint(folder, nbytes, save) as way:
        try:
            yield way
        finally:
            finish()


@contextmanager
def _log(folder: Path, job: Writing) -> Iterator[Way]:
    record = bytes(job.nbytes // job.records)
    with AsyncLog(folder / "log") as log:
        yield Way(lambda: [log.append(record) for _ in range(job.records)])


@contextmanager
def _log_file(folder: Path, job: Writing) -> Iterator[Way]:
    record = bytes(job.nbytes // job.records)
    with (folder / "file").open("ab") as file:

        def write() -> None:
            for _ in range(job.records):
                file.write(record)
            file.flush()
            os.fdatasync(file.fileno())

        yield Way(write)


@contextmanager
def _swapped(folder: Path, nbytes: int) -> Iterator[Way]:
    """Writes a layer after computing on it, and reads the next one ahead."""
    layers = _layers(nbytes)
    with Session(folder, name="layers") as session, TensorStore(session) as store:
        for number, layer in enumerate(layers):
            store.put(str(number), layer).result()
        current, ahead = 0, store.get("1")

        def swap() -> None:
            nonlocal current, ahead
            store.put(str(current), layers[current])
            ahead.result()
            current = (current + 1) % len(layers)
            ahead = store.get(str((current + 1) % len(layers)))

        yield Way(swap)
        ahead.result()


@contextmanager
def _swapped_by_torch(folder: Path, nbytes: int) -> Iterator[Way]:
    layers = _layers(nbytes)
    for number, layer in enumerate(layers):
        _by_torch({"layer": layer}, folder / str(number))
    current = 0

    def following() -> Path:
        return folder / str((current + 1) % len(layers))

    def swap() -> None:
        nonlocal current
        _by_torch({"layer": layers[current]}, folder / str(current))
        torch.load(following())
        current = (current + 1) % len(layers)

    # torch.save leaves the file in the page cache; a TensorStore reads from the device
    yield Way(swap, lambda: make_cold(str(following())))


def _layers(nbytes: int) -> list[torch.Tensor]:
    """Returns the states of three layers; to read one and write one moves ``nbytes``."""
    return [torch.full((max(1, nbytes // 8),), float(number)) for number in range(3)]


def ways(job: Writing, folder: Path, nbytes: int) -> dict[str, Callable[[], AbstractContextManager[Way]]]:
    """Returns the ways to write, by name, as context managers."""
    if job.name == "inference-log":
        return {
            "nvme_ops.data.AsyncLog": lambda: _log(folder, job),
            "a file, fdatasync after each batch": lambda: _log_file(folder, job),
        }
    if job.name == "zero-infinity":
        return {
            "nvme_ops.storage.TensorStore": lambda: _swapped(folder, nbytes),
            "torch.save and torch.load, cold files": lambda: _swapped_by_torch(folder, nbytes),
        }
    return {
        "nvme_ops.save_async": lambda: _checkpoint_in_the_background(folder, nbytes),
        "nvme_ops.save": lambda: _checkpoint(folder, nbytes, nvme_ops.save),
        "torch.save + fdatasync": lambda: _checkpoint(folder, nbytes, _by_torch),
    }


def measured(make: Callable[[], AbstractContextManager[Way]], nbytes: int, compute: float, seconds: float) -> Fed:
    """Computes and writes by turns, at least four times and for ``seconds``."""
    waits: list[float] = []
    with make() as way:
        way.write()  # the first one pays for files and memory
        while len(waits) < 4 or len(waits) * compute + sum(waits) < seconds:
            way.before()
            time.sleep(compute)
            waits.append(latency(way.write))
    total = len(waits) * compute + sum(waits)
    return Fed(1, len(waits) * compute / total, len(waits), nbytes * len(waits), total, waits, waits)
