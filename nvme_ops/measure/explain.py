"""``nvme-bench explain FILE|DIR``: compares the rate reached with the ceiling; says what limits it, and what to change.

It inspects the file and measures rows; ``judge`` draws conclusions from the rates alone; all is shown on one page.
"""

from __future__ import annotations

import argparse
import mmap
import os
import re
import stat
import statistics
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import nvme_ops
from nvme_ops.base.command_line import command_line, say, show, size
from nvme_ops.base.energy import Meter
from nvme_ops.base.limits import free_memory
from nvme_ops.base.progress import progress_bar
from nvme_ops.base.text import GIB, MIB, size_words, terminal_width
from nvme_ops.filesystem.device import MEMORY, NETWORK, devices_under, mount_of
from nvme_ops.measure import files, fio, machine
from nvme_ops.measure.engines import Task, unavailable
from nvme_ops.measure.judge import EMPTY, GDS, GPU, KEPT, LOCKED, NEW, Judgement, Measured, judge, two_lanes
from nvme_ops.measure.rows import Row, Spread, interleave, metered, spread, timed
from nvme_ops.measure.scratch import scratch_folder
from nvme_ops.measure.tables import Table, as_text, with_range
from nvme_ops.op_builder.machine import Host
from nvme_ops.report import kernel
from nvme_ops.report.result import Status

if TYPE_CHECKING:
    import torch

_PASS_SECONDS = 0.4  # duration of a pass, unless the user chooses its size
_MIN_PASS = 64 * MIB  # a pass moves a smaller file several times
_MAX_CALLS = 1024
_TENSORS = 4  # tensors of --io-size allocated at once, including fio's memory
_MIN_FILE = MIB  # one block of a default handle; with less, a call is bound by its latency
_NOTE = 50  # the most characters of a row's note


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns 0, or 1 if a transfer failed. Raises NotUsable for places that cannot be used."""
    args = _parse(argv)
    try:
        page = _explain(args)
    except (OSError, EOFError, RuntimeError) as reason:
        say(f"nvme-bench explain: {reason}")
        return 1
    show("\n".join(page))
    return 0


def parser() -> argparse.ArgumentParser:
    """Compares how fast a default aio_handle moves an ordinary tensor with its device.

    Measures for about half a minute, and says on one page which part limits and
    what to change. A FILE is only read; its pages are dropped from the page cache.
    In a DIR a file of --io-size is made, and removed at the end.

    exit status: 0; 1 when a transfer failed; 2 for wrong arguments and places that
    cannot be used
    """
    made = command_line("nvme-bench explain", parser.__doc__ or "")
    add = made.add_argument
    add("path", metavar="FILE|DIR", help="a file to read, or a folder on the device")
    words = "bytes of a pass, the whole FILE at most (default: what the device moves in 0.4 s, 1 GiB at most)"
    add("--io-size", type=size, metavar="SIZE", help=words)
    add("--rounds", type=int, default=3, metavar="N", help="timed passes of each row (default 3)")
    add("--write", action="store_true", help="explain writing too; for a folder")
    add("--device", default="cpu", metavar="cuda:N", help="GPU memory instead of an ordinary tensor")
    return made


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    made = parser()
    args = made.parse_args(argv)
    if args.rounds < 2:
        made.error(f"--rounds {args.rounds}: at least 2, or nothing is known of the noise")
    kind, _, number = args.device.partition(":")
    if kind not in ("cpu", "cuda") or not (number or "0").isdecimal():
        made.error(f"--device {args.device}: neither cpu nor cuda:N")
    args.gpu = int(number or 0) if kind == "cuda" else None
    if args.write and os.path.isfile(args.path):
        made.error("--write: a file that exists is only read; name a folder")
    if args.gpu is not None:
        import torch

        if args.gpu >= torch.cuda.device_count():
            made.error(f"--device {args.device}: torch sees {torch.cuda.device_count()} GPUs")
    return args


def _explain(args: argparse.Namespace) -> list[str]:
    """Returns the verdicts, then for each direction its table and findings, then the place and the machine."""
    with _file(args) as path:
        place = _require_device(path)
        most = min(os.path.getsize(path), args.io_size or _default_size())
        if args.io_size:
            _check_memory(most)
        meter = Meter([] if args.gpu is None else [args.gpu])
        found = Task(path, min(most, _MIN_PASS), False, args.gpu)
        about = [] if path != args.path else [_as_found(found, args.rounds)]
        files.make_cold(path)
        task = Task(path, most if args.io_size else _in_time(path, most), False, args.gpu)
        about += _cautions(path, task.size)
        verdicts, page = [], []
        for write in [False, True] if args.write else [False]:
            task = replace(task, write=write)
            refused = hindrances(task.handle.backend, _lock(task))
            judgement, lines = _direction(task, meter, args.rounds, refused)
            verdicts.append(judgement.verdict)
            page += ["", *lines]
        about += [f"refused: {words}; fix: {fix}" for words, fix in refused]
        about += [f"energy: {meter.unavailable()}"] if meter.unavailable() else []
        about += [f"place: {place}", f"machine: {machine.facts(machine.machine())}"]
        return [*verdicts, *page, "", *(part for line in about for part in _wrapped("", line, "  "))]


@contextmanager
def _file(args: argparse.Namespace) -> Iterator[str]:
    """Yields the file to work on: the one that is named, or a new one in the folder."""
    if not _is_folder(args.path):
        yield args.path
        return
    _require_device(args.path)
    size = args.io_size or _default_size()
    with scratch_folder(args.path, size + 64 * MIB, "--io-size or folder") as folder:
        _check_memory(size)
        path = os.path.join(folder, "data")
        try:
            files.make_file(path, size)
        except OSError as error:
            raise files.NotUsable(f"{args.path}: {error.strerror}") from error
        yield path


def _is_folder(path: str) -> bool:
    """Returns True for a folder, False for a file that can be explained. Raises NotUsable for anything else."""
    try:
        about = os.stat(path)
        if stat.S_ISDIR(about.st_mode):
            return True
        if not stat.S_ISREG(about.st_mode):
            raise files.NotUsable(f"{path} is no regular file: name a file, or a folder on the device")
        _require_device(path)
        if about.st_size < _MIN_FILE:
            words = f"{size_words(about.st_size)}, less than a block of {size_words(_MIN_FILE)}"
            raise files.NotUsable(f"{path} has {words}: too little to tell a rate; name a larger file, or a folder")
        _require_direct(path)
    except OSError as error:
        raise files.NotUsable(f"{path}: {error.strerror}") from error
    return False


def _require_device(path: str) -> str:
    """Returns file system and device in words. Raises NotUsable for a file system in memory."""
    mount = mount_of(Host(), path)
    if mount is None:
        return "unknown file system"
    if mount.kind in MEMORY:
        raise files.NotUsable(f"{path} is on {mount.kind}, which lives in memory: there is no device to explain")
    words = [f"{mount.kind} on {mount.point}"]
    for device in devices_under(Host(), path, mount):
        words += filter(None, (device.name, device.kind, device.model))
    return ", ".join(words + [f"from {mount.source}"] * (mount.kind in NETWORK))


def _require_direct(path: str) -> None:
    """Raises NotUsable for a file without direct I/O, OSError for one that cannot be read."""
    os.close(os.open(path, os.O_RDONLY))
    try:
        with (
            open(path, "rb", 0, opener=lambda name, flags: os.open(name, flags | os.O_DIRECT)) as file,
            mmap.mmap(-1, 1 << 16) as block,  # page-aligned, and a multiple of every logical block size
        ):
            file.readinto(block)
    except OSError as error:
        reason = "the file system refuses O_DIRECT, everything goes through the page cache"
        raise files.NotUsable(f"{path}: {reason} ({error.strerror})") from error


def _default_size() -> int:
    return min(GIB, max(MIB, free_memory() // _TENSORS))


def _in_time(path: str, most: int) -> int:
    """Returns how many bytes a pass of ``_PASS_SECONDS`` moves, by one short read of a cold file; at most ``most``."""
    import torch

    tensor = files.filled(nvme_ops.empty(min(most, _MIN_PASS), dtype=torch.uint8))
    rate = timed(lambda: nvme_ops.aio_handle().sync_pread(tensor, path, 0), tensor.numel()).rate
    return min(most, max(_MIN_PASS, int(rate * _PASS_SECONDS) // (16 * MIB) * 16 * MIB))


def _check_memory(size: int) -> None:
    needed, free = size * _TENSORS, free_memory()
    if needed > free:
        raise files.NotUsable(
            f"--io-size {size_words(size)} takes {size_words(needed)} of memory and {size_words(free)} are free; "
            "choose a smaller one"
        )


def _as_found(task: Task, rounds: int) -> str:
    """Returns a line on how much of a file is in the page cache, and how fast it is read as it is."""
    size, cached = os.path.getsize(task.path), files.cached_bytes(task.path)
    words = "nothing of it in the page cache"
    if cached != 0:
        row = _row(task, "as found", task.handle, NEW if task.gpu is None else GPU)
        row.before = lambda: None
        interleave([row], rounds)
        rate: Spread | None = spread([sample.rate / 1e9 for sample in row.samples if sample is not None])
        share = "unknown how much of it" if cached is None else f"{cached / size:.0%} of it"
        words = f"{share} in the page cache, as found {with_range(rate, 3)} GB/s"
    return f"file: {task.path}, {size_words(size)}; {words}"


def _cautions(path: str, size: int) -> list[str]:
    """Returns lines on what makes the file look faster than the device."""
    about, cached = os.stat(path), files.cached_bytes(path) or 0
    missing = about.st_size - about.st_blocks * 512  # stat(2)'s unit, whatever the file system's block
    words = [f"{size_words(missing)} of it are not on the device (holes or compression)"] if missing > 0 else []
    words += [f"{size_words(cached)} of it stay in the page cache: others map them"] if cached > size // 50 else []
    return [f"caution: {each}" for each in words]


def _direction(task: Task, meter: Meter, rounds: int, refused: list[tuple[str, str]]) -> tuple[Judgement, list[str]]:
    """Measures one direction; returns the judgement, and its table and findings as lines."""
    rows = make_rows(task)
    for row in rows:
        metered(row, meter)
    with progress_bar(len(rows) * (1 + rounds)) as step:
        interleave(rows, rounds, step)
    by_name = {row.name: row for row in rows}
    for name in (usual := reached(task), LOCKED):
        if not any(by_name[name].samples):
            raise RuntimeError(f"{name}: {by_name[name].note}")
    measured = Measured(
        task.write,
        usual,
        {row.name: [None if sample is None else sample.rate for sample in row.samples] for row in rows},
        {row.name: busy for row in rows if (busy := _busy(row)) is not None},
        missing="" if any(by_name[fio.NAME].samples) else by_name[fio.NAME].note,
        hindrances=refused,
    )
    judgement = judge(measured)
    marks = {judgement.ceiling: "the ceiling", usual: "what was reached"}
    for row in rows:
        note = ", ".join(filter(None, (marks.get(row.name), row.note)))
        row.note = textwrap.shorten(note, _NOTE, placeholder=" ...")
    word = "write" if task.write else "read"
    title = f"{word} of {size_words(task.size)} past the page cache, default aio_handle, medians of {rounds} rounds"
    table = Table(word, title, "GB/s", rows, judgement.ceiling, ("CPU s/GiB", "J/GiB"))
    return judgement, [as_text(table), "", *_findings(judgement, measured)]


def _busy(row: Row) -> float | None:
    """Returns CPU seconds for each second of a pass."""
    known = [each for each in row.samples if each is not None and each.cpu_seconds is not None]
    return statistics.median((each.cpu_seconds or 0) / each.seconds for each in known) if known else None


def reached(task: Task) -> str:
    """Returns the name of the row to be explained: a default handle and an ordinary tensor."""
    return GPU if task.gpu is not None else KEPT if task.write else NEW


def make_rows(task: Task) -> list[Row]:
    """Returns rows over the first ``task.size`` bytes of its file, which is written only if ``task.write``."""
    ordinary = [GPU] if task.gpu is not None else [KEPT] if task.write else [EMPTY, KEPT, NEW]
    moved, best = task.size * calls(task.size), fio.best(task.size)
    rows = [fio.row(fio.NAME, task.pattern, lambda: task.path, moved, task.set_cache, best)]
    rows += [*(_row(task, name, task.handle, name) for name in (LOCKED, *ordinary))]
    if task.gpu is not None:
        rows.append(_gds_row(task))
    lanes = nvme_ops.aio_handle(intra_op_parallelism=2)
    return rows + [_row(task, two_lanes(name), lanes, name) for name in (LOCKED, reached(task))]


def _lock(task: Task) -> bool:
    """Allocates the page-locked tensor; returns False if the system refuses to lock it. It can be used all the same."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        task.locked  # noqa: B018  (made when first asked for)
    return not any("lock" in str(warning.message) for warning in caught)


def hindrances(backend: str, locked: bool) -> list[tuple[str, str]]:
    """Returns what the system refuses a handle that would be faster with it, each with the fix."""
    host = Host()
    found = []
    if wanted := os.environ.get("NVME_OPS_BACKEND"):
        if backend != "io_uring":
            found.append((f"NVME_OPS_BACKEND={wanted}", "unset NVME_OPS_BACKEND"))
    elif backend != "io_uring" and (result := kernel.io_uring(host)).status is not Status.OKAY:
        found.append((f"io_uring: {result.detail}", result.fix))
    if not locked:
        fix = kernel.memlock(host).fix or "ulimit -l unlimited"
        found.append(("memory cannot be locked (RLIMIT_MEMLOCK)", fix))
    huge = kernel.transparent(host)
    if huge.status is Status.WARNING:
        found.append((f"huge pages: {huge.detail}", huge.fix))
    return found


def calls(size: int) -> int:
    """Returns how often a file of this size is moved in a pass."""
    return max(1, min(_MAX_CALLS, _MIN_PASS // size))


def _row(task: Task, name: str, handle: nvme_ops.aio_handle, kind: str) -> Row:
    """Returns a row that gets its tensor for each call, so that allocating a new one is part of the pass."""
    import torch

    start = handle.sync_pwrite if task.write else handle.sync_pread
    memory: Callable[[], torch.Tensor] = {
        LOCKED: lambda: task.locked,
        EMPTY: lambda: nvme_ops.empty(task.size, dtype=torch.uint8),
        KEPT: lambda: task.pageable,
        NEW: lambda: torch.empty(task.size, dtype=torch.uint8),
        GPU: lambda: task.buffer,
    }[kind]

    def move() -> None:
        for _ in range(calls(task.size)):
            start(memory(), task.path, 0)
        task.finish()

    def before() -> None:
        memory()
        task.set_cache()

    return Row(name, lambda: timed(move, task.size * calls(task.size)), before)


def _gds_row(task: Task) -> Row:
    try:
        return _row(task, GDS, nvme_ops.gds_handle(), GPU)
    except RuntimeError as error:
        return unavailable(GDS, str(error).splitlines()[0])


def _findings(judgement: Judgement, measured: Measured) -> list[str]:
    lines = []
    for number, finding in enumerate(judgement.findings, 1):
        lines.append(f"{number}. {finding.name}: {finding.share:.0%} of the gap")
        lines += _wrapped("   measured: ", finding.evidence) + _wrapped("   change: ", finding.fix)
    if not judgement.findings:
        lines.append("Nothing to change: no part of this program costs more than the noise of the measurement.")
    if judgement.ceiling != fio.NAME:
        why = measured.missing or f"{fio.NAME} is slower here"
        lines += _wrapped("", f"The ceiling is this package's own best with page-locked memory: {why}.")
    words = f"Differences below {judgement.noise:.0%} cannot be distinguished from noise (try more --rounds)."
    return lines + _wrapped("", words)


def _wrapped(label: str, text: str, indent: str | None = None) -> list[str]:
    whole = label + re.sub(r" (?=[GM]B/s)", "\xa0", text)  # keeps a number and its unit together
    lines = textwrap.wrap(
        whole, terminal_width(), subsequent_indent=" " * len(label) if indent is None else indent,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
    return [line.replace("\xa0", " ") for line in lines]
