"""What everybody does once: a new process loads a file that is not cached, into memory that was never touched."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # so that it runs from anywhere, uninstalled too

from benchmarks import command
from benchmarks.checkpoint import state_dict
from nvme_ops.bench import machine, stop
from nvme_ops.bench.files import make_cold
from nvme_ops.bench.measure import Row, Sample, Unavailable
from nvme_ops.bench.scratch import scratch_folder
from nvme_ops.bench.tables import Table
from nvme_ops.text import MIB, size_words

GROUPS = {
    "load": "load by a new process, until every tensor is summed",
    "locked": "a new process allocates a page-locked tensor and reads a file into it",
}
_COLUMNS = ("CPU s/GiB",)
_REST = 3.0  # seconds: a virtual machine's host takes back memory that was free for two

# What is imported is in memory before the clock starts; the sums are of all tensors.
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
_LOADS = {  # named as in checkpoint.py, where the same is measured in memory that is warm
    "nvme_ops .safetensors": (_OURS, "nvme_ops.load(path)"),
    "nvme_ops .pt": (_OURS, "nvme_ops.load(path)"),
    "nvme_ops .safetensors, mmap=True": (_OURS, "nvme_ops.load(path, mmap=True)"),
    "safetensors": ("import safetensors.torch", "safetensors.torch.load_file(path)"),
    "torch.save, torch.load": ("", "torch.load(path)"),
    "torch.load(mmap=True)": ("", "torch.load(path, mmap=True)"),
}
_BUILDERS = {"nvme_ops": "nvme_ops.op_builder", "DeepSpeed": "deepspeed.ops.op_builder"}


def in_new_process(setup: str, work: str, path: str, size: int) -> Sample:
    """One pass. Raises Unavailable with the last line that the process said when it fails."""
    environment = {"DS_ACCELERATOR": "cpu", **os.environ}
    if "nvme_ops" in setup:  # of a checkout; DeepSpeed would take its op_builder for one of its own
        environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
        )
    else:
        environment.pop("PYTHONPATH", None)
    environment["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
    done = subprocess.run(
        stop.tied([sys.executable, "-c", _PROGRAM.format(setup=setup, work=work), path, str(size)]),
        env=environment,
        cwd=os.path.dirname(path),  # no checkout either
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        words = done.stderr.strip().splitlines()
        raise Unavailable(words[-1] if words else f"exit status {done.returncode}")
    seconds, cpu, _ = json.loads(done.stdout.strip().splitlines()[-1])
    return Sample(seconds, size, cpu)


def _row(name: str, setup: str, work: str, path: str, size: int) -> Row:
    def before() -> None:
        make_cold(path)
        time.sleep(_REST)

    row = Row(name, lambda: in_new_process(setup, work, path, size))
    row.before = before
    return row


def load_rows(scratch: str, size: int) -> list[Row]:
    """Each contender on the format that it reads."""
    import torch
    from safetensors.torch import save_file

    tensors = state_dict("large", size)
    save_file(tensors, os.path.join(scratch, "file.safetensors"))
    torch.save(tensors, os.path.join(scratch, "file.pt"))
    return [
        _row(
            name, setup, f"loaded = {call}\n{_SUM}",
            os.path.join(scratch, "file.safetensors" if "safetensors" in name else "file.pt"), size,
        )
        for name, (setup, call) in _LOADS.items()
    ]  # fmt: skip


def locked_rows(scratch: str, size: int, packages: Sequence[str]) -> list[Row]:
    """With default settings, by DeepNVMe's interface."""
    path = os.path.join(scratch, "data")
    with open(path, "wb") as file:
        for _ in range(size // command.STEP):
            file.write(os.urandom(command.STEP))
        os.fsync(file.fileno())
    setup = "from {} import AsyncIOBuilder; handle = AsyncIOBuilder().load().aio_handle()"
    work = "tensor = handle.new_cpu_locked_tensor(size, torch.empty(0, dtype=torch.uint8))\n{}total = 0"
    return [
        _row(f"{package}, {words}", setup.format(_BUILDERS[package]), work.format(read), path, size)
        for words, read in (("allocation and read", "handle.sync_pread(tensor, path)\n"), ("allocation alone", ""))
        for package in packages
    ]


def measure(given: argparse.Namespace, progress: command.Progress) -> command.Result:
    """Everything: what the JSON file shall hold, and the tables by folder."""
    result: dict[str, Any] = {"machine": machine.machine(), "size": given.size, "rounds": given.rounds, "folders": {}}
    tables: dict[str, list[Table]] = {}
    packages = [name for name in _BUILDERS if name == "nvme_ops" or not given.no_deepspeed]
    for folder in given.path:
        place = machine.place(folder)
        print(f"\n== {folder}: " + "; ".join(f"{name} {words}" for name, words in place.items()))
        result["folders"][folder] = {"place": place, "tables": []}
        tables[folder] = []
        with scratch_folder(folder, 3 * given.size + 64 * MIB) as scratch:
            for group in [name for name in GROUPS if not given.only or name in given.only]:
                progress(f"making the files of {group}")
                title = f"{GROUPS[group]}; {size_words(given.size)}"
                if group == "load":
                    table = Table(group, title, "GB/s", load_rows(scratch, given.size), "safetensors", _COLUMNS)
                else:
                    rows = locked_rows(scratch, given.size, packages)
                    table = Table(group, title, "GB/s", rows, rows[len(packages) - 1].name, _COLUMNS)
                found = command.measure_table(table, given.rounds, progress)
                tables[folder].append(table)
                result["folders"][folder]["tables"].append(found)
    return result, tables


def main(words: Sequence[str] | None = None) -> int:
    """Status 0; 1 when a folder cannot be used; 2 for wrong arguments; 130 after Ctrl-C."""
    given = command.parse(command.parser((__doc__ or "").partition("\n")[0], GROUPS), words)
    return command.run("fresh_process.py", given, measure)


if __name__ == "__main__":
    sys.exit(main())
