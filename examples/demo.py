"""Writes 1 GiB from a tensor, reads it back, compares every byte, and times torch.save and torch.load beside it.

python examples/demo.py [--size 1G] [--path FOLDER] [--rounds 3]
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable

import torch

import nvme_ops

MIB, GIB = 1 << 20, 1 << 30
PIECE = 16 * MIB  # a step of the progress bar


def main() -> int:
    given = arguments()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that files are removed then, too
    if complaint := lacking(given.path, given.size):
        print(f"demo.py: {complaint}", file=sys.stderr)
        return 1
    try:
        with tempfile.TemporaryDirectory(prefix="nvme_ops-demo-", dir=given.path) as folder:
            return run(folder, given.size, given.rounds)
    except KeyboardInterrupt:
        print("\ninterrupted; the files are removed", file=sys.stderr)
        return 130
    except OSError as error:
        print(f"\ndemo.py: {error}", file=sys.stderr)
        return 1


def run(folder: str, size: int, rounds: int) -> int:
    path = os.path.join(folder, "tensor.bin")
    print("getting the op ready (it is compiled the first time: half a minute or less)", flush=True)
    start = time.perf_counter()
    handle = nvme_ops.aio_handle()
    print(f"ready after {time.perf_counter() - start:.1f} s, on {handle.backend}")

    source = torch.randint(-(2**63), 2**63 - 1, (size // 8,))
    loaded = torch.zeros_like(source)
    transfer("write", handle.submit_pwrite, source, path)
    forget(path)
    transfer("read", handle.submit_pread, loaded, path)
    equal = torch.equal(source, loaded)
    print(f"compared {size} bytes: {'every one is the same' if equal else 'THEY DIFFER'}\n")
    os.unlink(path)
    if equal:
        compare(handle, source, loaded, folder, rounds)
    return 0 if equal else 1


def transfer(verb: str, submit: Callable[..., nvme_ops.IoFuture], tensor: torch.Tensor, path: str) -> None:
    """Makes one transfer in pieces, all submitted at once, with a bar that shows how many have ended."""
    start = time.perf_counter()
    pieces = tensor.split(PIECE // tensor.element_size())
    futures = [submit(piece, path, number * PIECE) for number, piece in enumerate(pieces)]
    moved = 0
    for future in futures:
        moved += future.result()
        seconds = time.perf_counter() - start
        done = moved == tensor.nbytes
        if sys.stdout.isatty() or done:
            filled = 30 * moved // tensor.nbytes
            bar = f"[{'#' * filled}{'.' * (30 - filled)}]"
            words = f"{verb:5} {bar} {moved // MIB:5} of {tensor.nbytes // MIB} MiB  {moved / seconds / 1e9:5.2f} GB/s"
            print(words, end="\n" if done else "\r", flush=True)


def compare(handle: nvme_ops.aio_handle, tensor: torch.Tensor, loaded: torch.Tensor, folder: str, rounds: int) -> None:
    """Moves the same tensor by torch.save and torch.load, in turns; a save counts when it is on the disk."""
    ours, theirs = os.path.join(folder, "tensor.bin"), os.path.join(folder, "tensor.pt")

    def write() -> None:
        handle.sync_pwrite(tensor, ours)
        sync(ours)

    def save() -> None:
        torch.save(tensor, theirs)
        sync(theirs)

    contenders: list[tuple[str, str, Callable[[], object], Callable[[], object]]] = [
        ("nvme_ops", ours, write, lambda: handle.sync_pread(loaded, ours)),
        ("torch", theirs, save, lambda: torch.load(theirs)),
    ]
    seconds: dict[str, list[float]] = {}
    for number in range(rounds):
        print(f"beside torch.save and torch.load: round {number + 1} of {rounds}", flush=True)
        for name, path, store, load in contenders if number % 2 == 0 else contenders[::-1]:
            seconds.setdefault(f"{name} write", []).append(timed(store))
            forget(path)
            seconds.setdefault(f"{name} read", []).append(timed(load))
            os.unlink(path)
    speed = {name: tensor.nbytes / statistics.median(times) / 1e9 for name, times in seconds.items()}
    print(f"\n{tensor.nbytes / GIB:.4g} GiB, median of {rounds}   nvme_ops   torch.save, torch.load   ratio")
    for verb, words in (("write", "write, on the disk"), ("read", "read, not cached")):
        mine, other = speed[f"nvme_ops {verb}"], speed[f"torch {verb}"]
        print(f"{words:22} {mine:5.2f} GB/s {other:18.2f} GB/s {mine / other:7.1f}")


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def sync(path: str) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def forget(path: str) -> None:
    """Drops the file from the page cache, so that a read comes from the disk."""
    sync(path)
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def lacking(folder: str, size: int) -> str:
    """Returns what the demo lacks; empty if nothing."""
    if not os.path.isdir(folder):
        return f"--path {folder}: no such folder"
    needed, free = size + size // 16 + 16 * MIB, shutil.disk_usage(folder).free
    if free < needed:
        return (
            f"{needed / GIB:.2f} GiB of free space are needed in {folder} and there are {free / GIB:.2f}; "
            "choose a smaller --size or another --path"
        )
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if memory < 4 * size:
        return f"{memory / GIB:.1f} GiB of memory is too little for --size {size / GIB:.4g}G; choose a quarter of it"
    return ""


def arguments() -> argparse.Namespace:
    def size(text: str) -> int:
        units = {"K": 1 << 10, "M": MIB, "G": GIB}
        number = text[:-1] if text[-1:].upper() in units else text
        if not number.isdigit() or int(number) < 1:
            raise argparse.ArgumentTypeError(f"{text!r} is not a size; examples: 64M, 1G")
        return -(-int(number) * units.get(text[-1:].upper(), 1) // 8) * 8

    def rounds(text: str) -> int:
        if not text.isdigit() or int(text) < 1:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
        return int(text)

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--size", type=size, default=GIB, help="bytes, or with K, M, G (default 1G)")
    parser.add_argument("--path", default=".", metavar="FOLDER", help="folder on the disk to use (default: this one)")
    parser.add_argument("--rounds", type=rounds, default=3, help="of the comparison (default 3)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
