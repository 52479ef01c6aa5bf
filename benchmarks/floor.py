"""The floor of all capabilities: tensors by key beside a handle, several devices as one, demand beside write-back."""

from __future__ import annotations

import contextlib
import os
import random
import threading
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch

import nvme_ops
from benchmarks.command import Program, Run
from nvme_ops.measure.rows import Row, Sample, WrongData, median_latency, timed
from nvme_ops.measure.scratch import scratch_folder
from nvme_ops.measure.tables import Table
from nvme_ops.memory.pool import Pool
from nvme_ops.storage import Session, TensorStore
from nvme_ops.text import GIB, KIB, MIB, size_words

GROUPS = {
    "store": "TensorStore.put and get beside the handle's submit_pwrite and submit_pread, tensors of 8 MiB and 64 KiB",
    "demand": "one read of 1 MiB: on an idle device, beside a full write-back, and beside one without priorities",
    "folders": "a TensorStore over all folders given by --folder beside one over each of them",
}
_LARGE = 8 * MIB
_BUDGET = 64 * MIB  # of the pool
_READS = 40  # in one round
_AHEAD = 64  # transfers submitted before the first is waited for


def _each(futures: Iterable[nvme_ops.IoFuture]) -> None:
    """Waits for all, with a bounded number under way."""
    under_way: list[nvme_ops.IoFuture] = []
    for future in futures:
        under_way.append(future)
        if len(under_way) > _AHEAD:
            under_way.pop(0).result()
    for future in under_way:
        future.result()


def _tensors(size: int, piece: int) -> list[torch.Tensor]:
    return list(nvme_ops.empty(size // piece, piece, dtype=torch.uint8).fill_(7).unbind(0))


def store_tables(scratch: str, size: int, stack: contextlib.ExitStack) -> Iterator[Table]:
    """For each size of tensor: writes, then reads."""
    store = stack.enter_context(TensorStore(stack.enter_context(Session(scratch, name="bench")), Pool(_BUDGET)))
    for piece in (_LARGE, 64 * KIB):
        tensors, handle = _tensors(size, piece), nvme_ops.aio_handle()
        file = stack.enter_context(nvme_ops.open(os.path.join(scratch, "raw"), "w+"))
        handle.submit_pwritev(tensors, file, range(0, size, piece)).result()

        def check(tensors: list[torch.Tensor] = tensors) -> None:
            if any(int(tensor[-1]) != 7 for tensor in tensors):
                raise WrongData("a tensor came back with other bytes")

        def row(name: str, submit: Callable[[int, torch.Tensor], Any], tensors: list[torch.Tensor] = tensors) -> Row:
            def move() -> None:
                _each(submit(number, tensor) for number, tensor in enumerate(tensors))

            return Row(name, lambda: timed(move, size), check=check)

        def raw(
            call: Callable[..., Any], number: int, tensor: torch.Tensor, piece: int = piece, file: Any = file
        ) -> Any:
            return call(tensor, file, number * piece)

        def new(count: int) -> None:
            for number in range(count):
                store.get(str(number)).result()

        write = partial(handle.submit_pwrite, priority=nvme_ops.Priority.WRITEBACK)  # as the store's
        writes = [
            row("handle.submit_pwrite", partial(raw, write)),
            row("store.put", lambda number, tensor: store.put(str(number), tensor)),
        ]
        yield Table("store", f"write, tensors of {size_words(piece)}", "GB/s", writes, "handle.submit_pwrite")
        reads = [
            row("handle.submit_pread", partial(raw, handle.submit_pread)),
            row("store.get into a tensor", lambda number, tensor: store.get(str(number), tensor)),
            Row(f"store.get, one new tensor at a time from a pool of {size_words(_BUDGET)}",
                partial(timed, partial(new, len(tensors)), size)),
        ]  # fmt: skip
        yield Table("store", f"read, tensors of {size_words(piece)}", "GB/s", reads, "handle.submit_pread")


def folders_tables(folders: list[str], size: int, stack: contextlib.ExitStack) -> Iterator[Table]:
    """Each folder's store has its share of the tensors of the one over all."""
    places = [stack.enter_context(scratch_folder(folder, size + GIB, "--size or --folder")) for folder in folders]
    tensors = _tensors(size, _LARGE)
    groups = {**{folder: [place] for folder, place in zip(folders, places, strict=True)}, "all of them": places}
    stores = {name: stack.enter_context(TensorStore(stack.enter_context(Session(those, name="bench"))))
              for name, those in groups.items()}  # fmt: skip

    def row(name: str, method: str) -> Row:
        chosen = tensors if name == "all of them" else tensors[: max(1, len(tensors) // len(folders))]

        def move() -> None:
            _each(getattr(stores[name], method)(str(number), tensor) for number, tensor in enumerate(chosen))

        return Row(name, lambda: timed(move, len(chosen) * _LARGE))

    for title, method in (("write", "put"), ("read", "get")):
        rows = [row(name, method) for name in groups]
        yield Table("folders", f"{title}, a TensorStore over", "GB/s", rows, "all of them")


def demand_tables(scratch: str, size: int, stack: contextlib.ExitStack) -> Iterator[Table]:
    """All transfers through one handle, as the capabilities of a process share one."""
    handle = nvme_ops.aio_handle()
    large, small = nvme_ops.empty(size, dtype=torch.uint8).fill_(7), nvme_ops.empty(MIB, dtype=torch.uint8)
    read, written = (stack.enter_context(nvme_ops.open(os.path.join(scratch, name), "w+")) for name in "rw")
    for file in (read, written):
        file.pwrite(large, 0)
    generator = random.Random(1)

    def reads(pause: Callable[[float], object] = lambda _: None) -> Sample:
        def calls() -> Iterator[Callable[[], object]]:
            for _ in range(_READS):
                pause(0.005)
                place = generator.randrange(size // MIB) * MIB
                yield lambda place=place: handle.submit_pread(small, read, place).result()  # type: ignore[misc]

        return median_latency(calls())

    def beside(priority: nvme_ops.Priority) -> Sample:
        over = threading.Event()

        def write() -> None:
            under_way = [handle.submit_pwrite(large, written, 0, priority=priority)]
            while not over.is_set():
                under_way.append(handle.submit_pwrite(large, written, 0, priority=priority))
                under_way.pop(0).result()
            under_way.pop().result()

        writer = threading.Thread(target=write)
        writer.start()
        try:
            over.wait(0.3)
            return reads(over.wait)
        finally:
            over.set()
            writer.join()

    rows = [
        Row("on an idle device", reads),
        Row("beside writes of Priority.WRITEBACK", lambda: beside(nvme_ops.Priority.WRITEBACK)),
        Row("beside writes without priorities", lambda: beside(nvme_ops.Priority.DEMAND)),
    ]
    yield Table("demand", "one read of 1 MiB, median", "us", rows, rows[0].name)


def tables(run: Run, scratch: str, _: dict[str, Any]) -> Iterator[Table]:
    """Of one folder; those over all folders come last."""
    given = run.given
    for group in given.groups:
        with contextlib.ExitStack() as stack:
            if group != "folders":
                make = store_tables if group == "store" else demand_tables
                yield from make(scratch, given.size, stack)
            elif len(run.result["folders"]) == len(given.folder) > 1:
                yield from folders_tables(given.folder, given.size, stack)


def check(given: Namespace) -> None:
    """Raises ValueError if there is nothing to compare."""
    if given.only == ["folders"] and len(given.folder) < 2:
        raise ValueError("the group folders needs --folder twice or more")


PROGRAM = Program(GROUPS, tables, 3, check=check)
