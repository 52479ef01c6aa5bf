"""The floor of all capabilities: tensors by key beside a handle, several devices as one, demand beside write-back."""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import statistics
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # so that it runs from anywhere, uninstalled too

import torch

import nvme_ops
from benchmarks import command
from nvme_ops.bench.measure import Row, Sample, WrongData, interleave, latency, timed
from nvme_ops.bench.tables import Table
from nvme_ops.measuring.scratch import scratch_folder
from nvme_ops.memory.pool import Pool
from nvme_ops.storage import Session, TensorStore
from nvme_ops.text import GIB, KIB, MIB, size_words

GROUPS = {
    "store": "TensorStore.put and get beside the handle's submit_pwrite and submit_pread, tensors of 8 MiB and 64 KiB",
    "folders": "a TensorStore over all folders given by --path beside one over each of them",
    "demand": "one read of 1 MiB: on an idle device, beside a full write-back, and beside one without priorities",
}
_PIECES = (8 * MIB, 64 * KIB)
_BUDGET = 64 * MIB  # of the pool
_READS = 40  # in one round
_AHEAD = 64  # transfers submitted before the first is waited for


def _each(futures: Iterator[nvme_ops.IoFuture]) -> None:
    """Waits for all, with a bounded number under way."""
    under_way: list[nvme_ops.IoFuture] = []
    for future in futures:
        under_way.append(future)
        if len(under_way) > _AHEAD:
            under_way.pop(0).result()
    for future in under_way:
        future.result()


def store_rows(scratch: str, size: int, stack: contextlib.ExitStack) -> Iterator[Table]:
    """For each size of tensor: writes, then reads."""
    store = stack.enter_context(TensorStore(stack.enter_context(Session(scratch, name="bench")), Pool(_BUDGET)))
    path = os.path.join(scratch, "raw")
    for piece in _PIECES:
        tensors = list(nvme_ops.empty(size // piece, piece, dtype=torch.uint8).fill_(7).unbind(0))
        file = stack.enter_context(nvme_ops.open(path, "w+"))
        handle = nvme_ops.aio_handle()
        handle.submit_pwritev(tensors, file, range(0, size, piece)).result()

        def raw(submit: Callable[..., nvme_ops.IoFuture], file: Any, tensors: Any, piece: int) -> None:
            _each(submit(tensor, file, number * piece) for number, tensor in enumerate(tensors))

        def put(tensors: Any) -> None:
            _each(store.put(str(number), tensor) for number, tensor in enumerate(tensors))

        def get(tensors: Any) -> None:
            _each(store.get(str(number), tensor) for number, tensor in enumerate(tensors))

        def new(tensors: Any) -> None:
            for number in range(len(tensors)):
                store.get(str(number)).result()

        def check(tensors: Any) -> None:
            if any(int(tensor[-1]) != 7 for tensor in tensors):
                raise WrongData("a tensor came back with other bytes")

        def row(name: str, work: Callable[..., None], *arguments: Any, tensors: Any = tensors) -> Row:
            return Row(name, lambda: timed(partial(work, *arguments), size), check=partial(check, tensors))

        words = size_words(piece)
        write = partial(handle.submit_pwrite, priority=nvme_ops.Priority.WRITEBACK)  # as the store's
        writes = [
            row("handle.submit_pwrite", raw, write, file, tensors, piece),
            row("store.put", put, tensors),
        ]
        yield Table("store", f"write, tensors of {words}", "GB/s", writes, "handle.submit_pwrite")
        reads = [
            row("handle.submit_pread", raw, handle.submit_pread, file, tensors, piece),
            row("store.get into a tensor", get, tensors),
            row(f"store.get, one new tensor at a time from a pool of {size_words(_BUDGET)}", new, tensors),
        ]
        yield Table("store", f"read, tensors of {words}", "GB/s", reads, "handle.submit_pread")


def folders_rows(folders: Sequence[str], size: int, stack: contextlib.ExitStack) -> Iterator[Table]:
    """Each folder's store has its share of the tensors of the one over all."""
    tensors = list(nvme_ops.empty(size // (8 * MIB), 8 * MIB, dtype=torch.uint8).fill_(7).unbind(0))
    groups = {**{folder: [folder] for folder in folders}, "all of them": list(folders)}
    stores = {
        name: stack.enter_context(TensorStore(stack.enter_context(Session(places, name="bench"))))
        for name, places in groups.items()
    }

    def move(name: str, method: str) -> None:
        chosen = tensors if name == "all of them" else tensors[: max(1, len(tensors) // len(folders))]
        _each(getattr(stores[name], method)(str(number), tensor) for number, tensor in enumerate(chosen))

    def amount(name: str) -> int:
        return size if name == "all of them" else max(1, len(tensors) // len(folders)) * 8 * MIB

    for title, method in (("write", "put"), ("read", "get")):
        rows = [Row(name, partial(timed, partial(move, name, method), amount(name))) for name in groups]
        yield Table("folders", f"{title}, a TensorStore over", "GB/s", rows, "all of them")


def demand_rows(scratch: str, size: int, stack: contextlib.ExitStack) -> Iterator[Table]:
    """All transfers through one handle, as the capabilities of a process share one."""
    handle = nvme_ops.aio_handle()
    large, small = nvme_ops.empty(size, dtype=torch.uint8).fill_(7), nvme_ops.empty(MIB, dtype=torch.uint8)
    read, written = (stack.enter_context(nvme_ops.open(os.path.join(scratch, name), "w+")) for name in "rw")
    for file in (read, written):
        file.pwrite(large, 0)
    generator = random.Random(1)

    def once() -> float:
        place = generator.randrange(size // MIB) * MIB
        return latency(lambda: handle.submit_pread(small, read, place).result())

    def beside(priority: nvme_ops.Priority | None) -> Sample:
        over = threading.Event()

        def write() -> None:
            under_way = [handle.submit_pwrite(large, written, 0, priority=priority or nvme_ops.Priority.DEMAND)]
            while not over.is_set():
                under_way.append(handle.submit_pwrite(large, written, 0, priority=priority or nvme_ops.Priority.DEMAND))
                under_way.pop(0).result()
            under_way.pop().result()

        writer = threading.Thread(target=write)
        writer.start()
        try:
            over.wait(0.3)
            return Sample(statistics.median(once() for _ in range(_READS) if not over.wait(0.005)), 1)
        finally:
            over.set()
            writer.join()

    idle = "on an idle device"
    rows = [
        Row(idle, lambda: Sample(statistics.median(once() for _ in range(_READS)), 1)),
        Row("beside writes of Priority.WRITEBACK", lambda: beside(nvme_ops.Priority.WRITEBACK)),
        Row("beside writes without priorities", lambda: beside(None)),
    ]
    yield Table("demand", "one read of 1 MiB, median", "us", rows, idle)


def _tables(run: command.Run, scratch: str, _: dict[str, Any]) -> Generator[Table, None, None]:
    for group, make in {"store": store_rows, "demand": demand_rows}.items():
        if group in run.given.groups:
            with contextlib.ExitStack() as stack:
                yield from make(scratch, run.given.size, stack)


def measure(given: argparse.Namespace) -> command.Run:
    """All groups."""
    run = command.Run(given)
    if {"store", "demand"} & set(given.groups):
        run.folders(3, _tables)
    if "folders" in given.groups and len(given.path) > 1:
        with contextlib.ExitStack() as stack:
            places = [stack.enter_context(scratch_folder(folder, given.size + GIB)) for folder in given.path]
            run.result["all folders"] = []
            for table in folders_rows(places, given.size, stack):
                interleave(table.rows, given.rounds, command.show_progress)
                run.result["all folders"].append(run.show("all", table))
    return run


def main(words: Sequence[str] | None = None) -> int:
    """Status 0; 1 when a folder cannot be used or a row moved wrong bytes; 2 for wrong arguments; 130 after Ctrl-C."""
    parser = command.parser(__file__, __doc__, GROUPS)
    given = command.parse(parser, words)
    if given.only == ["folders"] and len(given.path) < 2:
        parser.error("the group folders needs --path twice or more")
    return command.run(given, measure)


if __name__ == "__main__":
    sys.exit(main())
