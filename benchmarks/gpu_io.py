"""Between files and GPU memory: this package beside cuFile, kvikio, DeepSpeed, gdsio and torch, in one run.

docs/gpu-results.md explains it.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Generator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # so that it runs from anywhere, uninstalled too

import torch

from benchmarks import command, file_rows, gpu_rows
from benchmarks.gpu_rows import GpuWork
from nvme_ops.arguments import positive, size
from nvme_ops.bench.measure import Row, Spread, spread
from nvme_ops.bench.tables import Table, with_range
from nvme_ops.op_builder import GDSBuilder, cufile
from nvme_ops.text import size_words

GROUPS = {
    "read": "read to GPU memory, of a file that is not in the page cache",
    "write": "write from GPU memory, over an existing file",
}
_PAGE = 4096

# What this package aims at: a row, those of which it is compared with the best, and the least ratio.
AIMS: list[tuple[str, str, tuple[str, ...], float]] = [
    ("the bounce path / the same handle's rate to host memory", gpu_rows.BOUNCE, (gpu_rows.HOST,), 0.95),
    ("gds_handle / the best of cuFile alone and kvikio", gpu_rows.GDS, gpu_rows.ON_CUFILE, 1.0),
    ("gds_handle with a pinned tensor / gdsio to the GPU", gpu_rows.GDS_PINNED, (gpu_rows.GDSIO,), 1.0),
]


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """Exits with status 2 on wrong ones."""

    def block_size(text: str) -> int:
        value = size(text)
        if value % _PAGE:
            raise argparse.ArgumentTypeError(f"{text} is not a multiple of 4K")
        return value

    parser = command.parser(__file__, __doc__, GROUPS)
    parser.add_argument("--gpu", type=int, default=0, metavar="N", help="number of the GPU (default 0)")
    parser.add_argument("--block-size", type=block_size, default="1M", help="of all who take one (default 1M)")
    parser.add_argument("--threads", type=positive, default=8, help="of all who take a number (default 8)")
    return command.parse(parser, words)


def why_no_gpu(number: int) -> str | None:
    """None when torch can use the GPU of this number."""
    if torch.version.cuda is None:
        return f"this torch ({torch.__version__}) is built without CUDA, and a CUDA GPU is needed: pip install torch"
    if not torch.cuda.is_available():
        return "torch.cuda is not available: a CUDA GPU and its driver are needed (nvidia-smi shows them)"
    if not 0 <= number < torch.cuda.device_count():
        return f"--gpu {number}: there are {torch.cuda.device_count()} GPUs, counted from 0"
    return None


def device_words(device: torch.device) -> dict[str, str]:
    """The GPU, and whether cuFile moves data straight between storage and GPU or why it cannot work."""
    words = {"device": str(device)}
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        words |= {"gpu": f"{found.name}, {size_words(found.total_memory)}", "cuda": str(torch.version.cuda)}
    try:
        driver = GDSBuilder().load().open_driver(cufile.libraries())
    except RuntimeError as reason:
        return words | {"cufile": str(reason).splitlines()[0]}
    kind = "a test double" if driver["fake"] else f"{driver['version'] // 1000}.{driver['version'] % 1000 // 10}"
    direct = f"not direct: {driver['why_not_direct']}" if driver["why_not_direct"] else "direct"
    return words | {"cufile": f"{kind} ({driver['path']}), {direct}"}


def against_best(mine: Row, others: Sequence[Row]) -> list[float]:
    """My rate over the best of theirs, round by round; rounds that lack mine, or all of theirs, are left out."""
    ratios = []
    for own, *theirs in itertools.zip_longest(mine.samples, *(other.samples for other in others)):
        rates = [sample.rate for sample in theirs if sample is not None]
        if own is not None and rates:
            ratios.append(own.rate / max(rates))
    return ratios


def aims(measured: Table) -> dict[str, tuple[Spread | None, float]]:
    """For each aim the ratio that was measured, None where a row is missing, and the least it should be."""
    rows = {row.name: row for row in measured.rows}
    return {
        words: (spread(against_best(rows[mine], [rows[name] for name in others if name in rows])), least)
        for words, mine, others, least in AIMS
        if mine in rows
    }


def aims_text(found: dict[str, tuple[Spread | None, float]]) -> str:
    """For a reader. Whether an aim counts here depends on the way that gds_handle took, which its row says."""
    lines = ["aims:"]
    for words, (ratio, least) in found.items():
        if ratio is None:
            lines.append(f"  {words}: not measured, see the rows' notes")
        else:
            kept = "reached" if ratio.median >= least else "missed"
            lines.append(f"  {words}: {with_range(ratio, 3)}, aim {least:g}: {kept}")
    return "\n".join(lines)


def tables(device: torch.device, run: command.Run, scratch: str, found: dict[str, Any]) -> Generator[Table, None, None]:
    """Of one folder: all who read, or write, the whole file. Their memory and processes end with the table."""
    given, found["aims"] = run.given, {}
    path = command.data_file(scratch, given.size)
    for group in given.groups:
        work = GpuWork(
            path, given.size, group == "write", device=device, block_size=given.block_size, threads=given.threads
        )
        with ExitStack() as stack:
            remote = gpu_rows.remote_rows(stack, work, not given.no_deepspeed)
            rows = file_rows.fio_rows(work)[:1] + stack.enter_context(gpu_rows.nvme_ops_rows(work)) + remote
            rows += gpu_rows.other_rows(work)
            measured = Table(group, f"{GROUPS[group]}, {size_words(work.size)}", "GB/s", rows, gpu_rows.HOST)
            yield measured
        reached = aims(measured)
        found["aims"][group] = {
            words: {"ratio": ratio and vars(ratio), "least": least} for words, (ratio, least) in reached.items()
        }
        print(f"\n{aims_text(reached)}", flush=True)


def measure(device: torch.device, given: argparse.Namespace) -> command.Run:
    """All groups."""
    words = device_words(device)
    run = command.Run(given, device=words, block_size=given.block_size, threads=given.threads)
    print(command.listed(words))
    print(f"blocks of {size_words(given.block_size)}, {given.threads} threads")
    return run.folders(3, partial(tables, device))


def main(words: Sequence[str] | None = None) -> int:
    """As raw_io.py's; status 2 where there is no CUDA GPU, too."""
    given = arguments(words)
    if reason := why_no_gpu(given.gpu):
        print(f"gpu_io.py: error: {reason}", file=sys.stderr)
        return 2
    return command.run(given, partial(measure, torch.device("cuda", given.gpu)))


if __name__ == "__main__":
    sys.exit(main())
