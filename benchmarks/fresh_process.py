"""A new process loads a file that is not cached into memory that was never touched."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from benchmarks import command
from benchmarks.checkpoint import state_dict
from benchmarks.command import Program, Run
from benchmarks.raw_io import BUILDERS
from nvme_ops.measure.files import make_cold
from nvme_ops.measure.rows import Row, Sample
from nvme_ops.measure.tables import Table
from nvme_ops.text import size_words

GROUPS = {
    "load": "load by a new process, until every tensor is summed",
    "locked": "a new process allocates a page-locked tensor and reads a file into it",
}
_REST = 3.0  # seconds: a virtual machine's host takes back memory that was free for two

# Modules are imported before the clock starts; all tensors are summed.
_PROGRAM = """
import json, resource, sys, time
import torch
path, size = sys.argv[1], int(sys.argv[2])
{setup}
def cpu():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
before, start = cpu(), time.perf_counter()
{work}
print(json.dumps([time.perf_counter() - start, cpu() - before, total]))
"""
_SUM = "total = sum(float(tensor.sum()) for tensor in loaded.values())"
_OURS = "import nvme_ops; from nvme_ops.checkpoint import api, safetensors_file, torch_file; nvme_ops.aio_handle()"
_LOADS = {  # named as in checkpoint.py, which measures the same in warm memory
    "nvme_ops .safetensors": (_OURS, "nvme_ops.load(path)"),
    "nvme_ops .pt": (_OURS, "nvme_ops.load(path)"),
    "nvme_ops .safetensors, mmap=True": (_OURS, "nvme_ops.load(path, mmap=True)"),
    "safetensors": ("import safetensors.torch", "safetensors.torch.load_file(path)"),
    "torch.save, torch.load": ("", "torch.load(path)"),
    "torch.load(mmap=True)": ("", "torch.load(path, mmap=True)"),
}


def _row(name: str, setup: str, work: str, path: str, size: int) -> Row:
    def before() -> None:
        make_cold(path)
        time.sleep(_REST)

    def run() -> Sample:
        program = _PROGRAM.format(setup=setup, work=work)
        seconds, cpu, _ = command.in_new_process(program, path, str(size), folder=os.path.dirname(path))
        return Sample(seconds, size, cpu)

    return Row(name, run, before)


def load_rows(scratch: str, size: int) -> list[Row]:
    """Returns a row for each contender, on the format that it reads."""
    import torch
    from safetensors.torch import save_file

    tensors = state_dict("large", size)
    paths = [os.path.join(scratch, name) for name in ("file.pt", "file.safetensors")]
    torch.save(tensors, paths[0])
    save_file(tensors, paths[1])
    return [
        _row(name, setup, f"loaded = {call}\n{_SUM}", paths["safetensors" in name], size)
        for name, (setup, call) in _LOADS.items()
    ]


def locked_rows(scratch: str, size: int, packages: list[str]) -> list[Row]:
    """Returns the rows of each package through DeepNVMe's interface, with default settings."""
    path = command.data_file(scratch, size)
    setup = "from {} import AsyncIOBuilder; handle = AsyncIOBuilder().load().aio_handle()"
    work = "tensor = handle.new_cpu_locked_tensor(size, torch.empty(0, dtype=torch.uint8))\n{}total = 0"
    return [
        _row(f"{package}, {words}", setup.format(BUILDERS[package]), work.format(read), path, size)
        for words, read in (("allocation and read", "handle.sync_pread(tensor, path)\n"), ("allocation alone", ""))
        for package in packages
    ]


def tables(run: Run, scratch: str, _: dict[str, Any]) -> Iterator[Table]:
    """Yields the tables of one folder."""
    packages = [name for name in BUILDERS if name == "nvme_ops" or not run.given.no_deepspeed]
    make = {"load": partial(load_rows, scratch), "locked": partial(locked_rows, scratch, packages=packages)}
    for group in run.given.groups:
        command.show_progress(f"making the files of {group}")
        rows = make[group](run.given.size)
        reference = "safetensors" if group == "load" else rows[len(packages) - 1].name
        title = f"{GROUPS[group]}; {size_words(run.given.size)}"
        yield Table(group, title, "GB/s", rows, reference, ("CPU s/GiB",))


PROGRAM = Program(GROUPS, tables, 3)
