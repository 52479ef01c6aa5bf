"""``nvme-bench explain FILE|DIR``: compares what was reached with the ceiling; says what limits, and what to change.

Inspects the file, measures rows and the processor's rates, has ``judge`` draw conclusions from the rates alone, and
formats all of it as one page.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import mmap
import os
import re
import stat
import statistics
import struct
import textwrap
import timeit
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

import nvme_ops
from nvme_ops.arguments import command_line, say, show, size
from nvme_ops.limits import free_memory
from nvme_ops.measure import files, fio, machine
from nvme_ops.measure.energy import Meter
from nvme_ops.measure.engines import Task, unavailable
from nvme_ops.measure.judge import EMPTY, GDS, GPU, KEPT, LANES, LOCKED, NEW, Judgement, Measured, Variation, judge
from nvme_ops.measure.rows import Row, Spread, interleave, metered, spread, timed
from nvme_ops.measure.scratch import scratch_folder
from nvme_ops.measure.tables import Table, with_range
from nvme_ops.measure.tables import as_text as table_text
from nvme_ops.op_builder.machine import Host
from nvme_ops.progress import progress_bar
from nvme_ops.report import kernel
from nvme_ops.report.result import Status
from nvme_ops.storage.device import MEMORY, NETWORK, Mount, devices_under, mount_of
from nvme_ops.text import GIB, KIB, MIB, rate_words, size_words, terminal_width

_DESCRIPTION = """\
Measures for about half a minute how fast a default aio_handle moves an ordinary
tensor, and how fast the device is, and says on one page which part limits and
what to change. A FILE is only read; its pages are dropped from the page cache.
In a DIR a file of --io_size is made, and removed at the end.
"""
_EPILOG = """\
exit status: 0; 1 when a transfer failed; 2 for wrong arguments and places that
cannot be used
"""
_PASS_SECONDS = 0.4  # of a pass, unless the user chooses its size
_TENSORS = 4  # tensors of --io_size allocated at once, including fio's memory


def main(words: Sequence[str]) -> int:
    """Runs the command; returns 0, or 1 if a transfer failed. Raises NotUsable for places that cannot be used."""
    given = _parse(words)
    try:
        page = _explain(given)
    except (OSError, EOFError, RuntimeError) as reason:
        say(f"nvme-bench explain: {reason}")
        return 1
    show(as_text(page))
    return 0


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the flags."""
    made = command_line("nvme-bench explain", _DESCRIPTION, _EPILOG)
    add = made.add_argument
    add("path", metavar="FILE|DIR", help="a file to read, or a folder on the device")
    words_of_size = "bytes of a pass (default: what the device moves in 0.4 s, 1 GiB at most; of a smaller FILE all)"
    add("--io_size", type=size, metavar="SIZE", help=words_of_size)
    add("--rounds", type=int, default=3, metavar="N", help="timed passes of each row (default 3)")
    add("--write", action="store_true", help="explain writing too; for a folder")
    add("--device", default="cpu", metavar="cuda:N", help="GPU memory instead of an ordinary tensor")
    return made


def _parse(words: Sequence[str]) -> argparse.Namespace:
    made = parser()
    given = made.parse_args(words)
    if given.rounds < 2:
        made.error(f"--rounds {given.rounds}: at least 2, or nothing is known of the noise")
    kind, _, number = given.device.partition(":")
    if kind not in ("cpu", "cuda") or not (number or "0").isdecimal():
        made.error(f"--device {given.device}: neither cpu nor cuda:N")
    given.gpu = int(number or 0) if kind == "cuda" else None
    if given.gpu is not None and given.gpu >= torch.cuda.device_count():
        made.error(f"--device {given.device}: torch sees {torch.cuda.device_count()} GPUs")
    if given.write and os.path.isfile(given.path):
        made.error("--write: a file that exists is only read; name a folder")
    return given


def _explain(given: argparse.Namespace) -> Page:
    with _file(given) as (path, scratch):
        place = inspect(path)
        size = _size(given, place)
        meter = Meter([] if given.gpu is None else [given.gpu])
        as_found = None if scratch or place.cached == 0 else _as_found(Task(path, size, False, given.gpu), given.rounds)
        files.make_cold(path)
        page = Page(
            place, scratch, size, given.rounds, machine.machine(), meter.unavailable(), as_found,
            files.cached_bytes(path),
        )  # fmt: skip
        for write in [False, True] if given.write else [False]:
            task = Task(path, size, write, given.gpu)
            page.hindrances = hindrances(task.handle.backend, lock(task))
            page.directions.append(_direction(task, meter, page))
        return page


@contextmanager
def _file(given: argparse.Namespace) -> Iterator[tuple[str, bool]]:
    """Returns the file to work on, and whether it is one of ours."""
    if not is_folder(given.path):
        yield given.path, False
        return
    mount_of_device(given.path)
    size = given.io_size or _default_size()
    with scratch_folder(given.path, size + 64 * MIB, "--io_size or folder") as folder:
        _check_memory(size)
        path = os.path.join(folder, "data")
        try:
            files.make_file(path, size)
        except OSError as error:
            raise files.NotUsable(f"{given.path}: {error.strerror}") from error
        yield path, True


def _default_size() -> int:
    return min(GIB, max(MIB, free_memory() // _TENSORS))


def _size(given: argparse.Namespace, place: FilePlace) -> int:
    """Returns the bytes of a pass. Raises NotUsable if there is not enough memory for the tensors."""
    size = min(place.size, given.io_size or _default_size())
    if given.io_size:
        _check_memory(size)
        return size
    in_time = int(probe(place.path, size) * _PASS_SECONDS)
    return min(size, max(64 * MIB, in_time // (16 * MIB) * 16 * MIB))


def _check_memory(size: int) -> None:
    needed, free = size * _TENSORS, free_memory()
    if needed > free:
        raise files.NotUsable(
            f"--io_size {size_words(size)} takes {size_words(needed)} of memory and {size_words(free)} are free; "
            "choose a smaller one"
        )


def _as_found(task: Task, rounds: int) -> Spread | None:
    """Returns GB/s with the page cache as it is; reads that bypass it do not change it."""
    row = as_found_row(task)
    interleave([row], rounds)
    return spread([sample.rate / 1e9 for sample in row.samples if sample is not None])


def _direction(task: Task, meter: Meter, page: Page) -> Direction:
    rows = make_rows(task)
    for row in rows:
        metered(row, meter)
    rates = (copy_rate(task), new_page_rate(task), device_copy_rate(task))
    with progress_bar(len(rows) * (1 + page.rounds)) as step:
        interleave(rows, page.rounds, step)
    by_name = {row.name: row for row in rows}
    for name in (usual := reached(task), LOCKED):
        if not any(by_name[name].samples):
            raise RuntimeError(f"{name}: {by_name[name].note}")
    measured = Measured(
        task.write,
        usual,
        {row.name: [None if sample is None else sample.rate for sample in row.samples] for row in rows},
        {row.name: busy for row in rows if (busy := _busy(row)) is not None},
        variations(task),
        *rates,
        missing="" if any(by_name[fio.NAME].samples) else by_name[fio.NAME].note,
        hindrances=page.hindrances,
    )
    return Direction(rows, measured, judge(measured))


def _busy(row: Row) -> float | None:
    """Returns CPU seconds for each second of a pass."""
    known = [each for each in row.samples if each is not None and each.cpu_seconds is not None]
    return statistics.median((each.cpu_seconds or 0) / each.seconds for each in known) if known else None


_LEAST_PASS = 64 * MIB  # a pass moves a smaller file several times
_MOST_CALLS = 1024
_COPIED = 256 * MIB
_SETTINGS = (
    ("block_size", 256 * KIB),
    ("block_size", 4 * MIB),
    ("queue_depth", 32),
    ("queue_depth", 512),
    (LANES, 2),
)


def reached(task: Task) -> str:
    """Returns the row to be explained: a default handle and an ordinary tensor."""
    return GPU if task.gpu is not None else KEPT if task.write else NEW


def variations(task: Task) -> list[Variation]:
    """Returns the rows with other settings than the default."""
    return [*(Variation(LOCKED, argument, value) for argument, value in _SETTINGS), Variation(reached(task), LANES, 2)]


def make_rows(task: Task) -> list[Row]:
    """Returns rows over the first ``task.size`` bytes of its file, which is written only if ``task.write``."""
    ordinary = [GPU] if task.gpu is not None else [KEPT] if task.write else [EMPTY, KEPT, NEW]
    rows = [_fio_row(task), *(_row(task, name, task.handle, name) for name in (LOCKED, *ordinary))]
    if task.gpu is not None:
        rows.append(_gds_row(task))
    for each in variations(task):
        handle = nvme_ops.aio_handle(**{each.argument: each.value})  # type: ignore[arg-type]
        rows.append(_row(task, each.name, handle, each.of))
    return rows


def as_found_row(task: Task) -> Row:
    """Returns a row of the default handle and an ordinary tensor, with the page cache as it is."""
    row = _row(task, "as found", task.handle, NEW if task.gpu is None else GPU)
    row.before = lambda: None
    return row


def probe(path: str, size: int) -> float:
    """Returns bytes per second of one short read, to estimate how much can be read in the time available."""
    handle = nvme_ops.aio_handle()
    tensor = files.filled(nvme_ops.empty(min(size, _LEAST_PASS), dtype=torch.uint8))
    task = Task(path, tensor.numel(), write=False)
    task.set_out()
    return timed(lambda: handle.sync_pread(tensor, path, 0), tensor.numel()).rate


def lock(task: Task) -> bool:
    """Allocates the page-locked tensor; returns False if the system refuses to lock it, which works all the same."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        task.locked  # noqa: B018  (made when first asked for)
    return not any("lock" in str(warning.message) for warning in said)


def hindrances(backend: str, locked: bool) -> list[tuple[str, str]]:
    """Returns what the system denies a handle that would make it faster, each with the fix."""
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


def copy_rate(task: Task) -> float:
    """Returns bytes per second that one core copies to a tensor that has its pages: the best of three.

    Copies in blocks from a few MiB that are in its cache, as data are just after the device has written them.
    """
    count = min(task.size, _COPIED)
    source, target, block = task.locked.data_ptr(), task.pageable.data_ptr(), min(count, MIB)

    def copy() -> None:
        for offset in range(0, count - block + 1, block):
            ctypes.memmove(target + offset, source + offset % (16 * MIB), block)

    return count // block * block / _best_of_three(copy)


def new_page_rate(task: Task) -> float:
    """Returns bytes per second of new memory that one core touches for the first time: the best of three."""
    count = max(min(task.size, _COPIED), _LEAST_PASS)  # smaller allocations might reuse freed memory
    tensor = torch.empty(0)

    def make() -> None:
        nonlocal tensor
        tensor = torch.empty(count, dtype=torch.uint8)

    def touch() -> None:
        tensor[::4096] = 1

    return count / _best_of_three(touch, make)


def device_copy_rate(task: Task) -> float:
    """Returns bytes per second from pinned memory to the GPU or back: the best of three; 0 without a GPU."""
    if task.gpu is None:
        return 0.0
    count = min(task.size, _COPIED)
    pinned, device = torch.empty(count, dtype=torch.uint8, pin_memory=True), task.buffer[:count]
    target, source = (pinned, device) if task.write else (device, pinned)

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        task.finish()

    return count / _best_of_three(copy)


def _best_of_three(work: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
    return min(timeit.repeat(work, before, number=1, repeat=3))


def calls(size: int) -> int:
    """Returns how often a file of this size is moved in a pass."""
    return max(1, min(_MOST_CALLS, _LEAST_PASS // size))


def _row(task: Task, name: str, handle: nvme_ops.aio_handle, kind: str) -> Row:
    """Returns a row that gets its tensor in each call, so that allocating it is part of the pass."""
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
        task.set_out()

    return Row(name, lambda: timed(move, task.size * calls(task.size)), before)


def _gds_row(task: Task) -> Row:
    try:
        return _row(task, GDS, nvme_ops.gds_handle(), GPU)
    except RuntimeError as error:
        return unavailable(GDS, str(error).splitlines()[0])


def _fio_row(task: Task) -> Row:
    """Returns fio's row: 4 MiB x 32 in huge pages, smaller blocks for a smaller file."""
    block = fio.BLOCK
    while block > max(task.size, 4096):
        block //= 2
    shape = [f"--bs={block}", "--iodepth=32"]
    if not task.write:
        shape.append("--readonly")  # fio refuses to run when a job would write
    moved = task.size * calls(task.size)
    return fio.row(fio.NAME, task.pattern, lambda: task.path, moved, task.set_out, fio.variants(shape))


_FIEMAP = 0xC020660B  # FS_IOC_FIEMAP, linux/fs.h
_LEAST = MIB  # one block of a default handle; below, a call's latency counts and not a rate
_KINDS = {
    stat.S_IFCHR: "a device node",
    stat.S_IFBLK: "a device node",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
}


@dataclass(frozen=True)
class FilePlace:
    """What is known about a file without reading it."""

    path: str
    size: int
    file_system: str
    device: str
    alignment: str
    cached: int | None  # bytes of it in the page cache; None: unknown
    extents: int | None  # pieces on the device; None: unknown
    stored: int  # bytes that it takes there; less than its size where it has holes or is compressed


def is_folder(path: str) -> bool:
    """Returns False for a file. Raises NotUsable for anything else."""
    try:
        kind = stat.S_IFMT(os.stat(path).st_mode)
    except OSError as error:
        raise files.NotUsable(f"{path}: {error.strerror}") from error
    if kind not in (stat.S_IFDIR, stat.S_IFREG):
        raise files.NotUsable(f"{path} is {_KINDS.get(kind, 'no file')}: name a file, or a folder on the device")
    return kind == stat.S_IFDIR


def mount_of_device(path: str) -> Mount | None:
    """Returns the mount of ``path``. Raises NotUsable for a file system in memory."""
    mount = mount_of(Host(), path)
    if mount and mount.kind in MEMORY:
        raise files.NotUsable(f"{path} is on {mount.kind}, which lives in memory: there is no device to explain")
    return mount


def inspect(path: str) -> FilePlace:
    """Inspects a file. Raises NotUsable if it is too small, or can be read through the page cache only."""
    mount = mount_of_device(path)
    try:
        file = open(path, "rb", buffering=0)  # noqa: SIM115  (below)
    except OSError as error:
        raise files.NotUsable(f"{path}: {error.strerror}") from error
    with file:
        about = os.fstat(file.fileno())
        if about.st_size == 0:
            raise files.NotUsable(f"{path} is empty: there is nothing to read")
        if about.st_size < _LEAST:
            words = f"{size_words(about.st_size)}, less than a block of {size_words(_LEAST)}"
            raise files.NotUsable(f"{path} has {words}: too little to tell a rate; name a larger file, or a folder")
        _refuse_cached_only(path)
        return FilePlace(
            path,
            about.st_size,
            f"{mount.kind} on {mount.point}" if mount else "unknown file system",
            _device_words(path, mount),
            _alignment(file.fileno()),
            files.cached_bytes(path),
            _extents(file.fileno()),
            about.st_blocks * 512,  # stat(2) counts so whatever the file system's block
        )


def _refuse_cached_only(path: str) -> None:
    reason = "the file system refuses O_DIRECT, everything goes through the page cache"
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError as error:
        raise files.NotUsable(f"{path}: {reason} ({error.strerror})") from error
    try:
        with mmap.mmap(-1, 1 << 16) as block:  # page-aligned, and a multiple of every logical block size
            os.preadv(descriptor, [block], 0)
    except OSError as error:
        raise files.NotUsable(f"{path}: cannot be read past the page cache: {error.strerror}") from error
    finally:
        os.close(descriptor)


def _device_words(path: str, mount: Mount | None) -> str:
    found = devices_under(Host(), path, mount)
    if not found and mount and mount.kind in NETWORK:
        return f"network file system from {mount.source}"
    return "; ".join(", ".join(filter(None, (device.name, device.kind, device.model))) for device in found)


def _alignment(descriptor: int) -> str:
    with contextlib.suppress(OSError):
        said = kernel.direct_io_alignment(descriptor)
        if said and said.offset:
            return f"direct I/O aligned to {said.offset} bytes"
    return ""


def _extents(descriptor: int) -> int | None:
    request = bytearray(struct.pack("=QQIIII", 0, 2**64 - 1, 0, 0, 0, 0))  # room for none: the kernel counts them
    try:
        fcntl.ioctl(descriptor, _FIEMAP, request)
    except OSError:
        return None
    return int(struct.unpack_from("=I", request, 20)[0])  # fm_mapped_extents


_NOTE = 50


@dataclass(frozen=True)
class Direction:
    """The measurements and conclusions of one direction."""

    rows: list[Row]
    measured: Measured
    judgement: Judgement


@dataclass
class Page:
    """Everything on the page."""

    place: FilePlace
    scratch: bool  # the file is one of ours
    size: int  # bytes of a pass
    rounds: int
    machine: dict[str, str]
    energy: str  # why there is none
    as_found: Spread | None  # GB/s, before the page cache was emptied
    still_cached: int | None  # bytes that could not be dropped from the page cache
    hindrances: list[tuple[str, str]] = field(default_factory=list)
    directions: list[Direction] = field(default_factory=list)


def as_text(page: Page) -> str:
    """Returns the verdicts, then for each direction its table and findings, then the place and the machine."""
    lines = [direction.judgement.verdict for direction in page.directions]
    for direction in page.directions:
        lines += ["", _table_text(_table(page, direction)), "", *_findings(direction)]
    return "\n".join([*lines, "", *_surroundings(page)])


def _table(page: Page, direction: Direction) -> Table:
    judgement = direction.judgement
    marks = {judgement.ceiling: "the ceiling", judgement.reached: "what was reached"}
    rows = [replace(row, note=", ".join(filter(None, (marks.get(row.name), row.note)))) for row in direction.rows]
    word = "write" if direction.measured.write else "read"
    title = (
        f"{word} of {size_words(page.size)} past the page cache, default aio_handle, medians of {page.rounds} rounds"
    )
    return Table(word, title, "GB/s", rows, judgement.ceiling, ("CPU s/GiB", "J/GiB"))


def _table_text(table: Table) -> str:
    """Returns what fits on a screen; the document has the notes in full."""
    short = [replace(row, note=textwrap.shorten(row.note, _NOTE, placeholder=" ...")) for row in table.rows]
    return table_text(replace(table, rows=short))


def _findings(direction: Direction) -> list[str]:
    judgement, measured = direction.judgement, direction.measured
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
    if not any("one core" in finding.evidence for finding in judgement.findings):
        copied, made = rate_words(measured.copy_rate), rate_words(measured.new_page_rate)
        words += f" One core copies {copied} and makes new pages at {made}."
    return lines + _wrapped("", words)


def _surroundings(page: Page) -> list[str]:
    place, about, lines = page.place, page.machine, []
    if not page.scratch:
        extents = "" if place.extents is None else f" in {place.extents} extent{'' if place.extents == 1 else 's'}"
        lines.append(f"file: {place.path}, {size_words(place.size)}{extents}; {_cache_words(page)}")
    if place.stored < place.size:
        missing = size_words(place.size - place.stored)
        lines.append(f"caution: {missing} of it are not on the device (holes or compression)")
    if page.still_cached is not None and page.still_cached > page.size // 50:
        lines.append(f"caution: {size_words(page.still_cached)} of it stay in the page cache: others map them")
    lines += [f"refused: {words}; fix: {fix}" for words, fix in page.hindrances]
    if page.energy:
        lines.append(f"energy: {page.energy}")
    lines.append(f"place: {', '.join(filter(None, (place.file_system, place.device, place.alignment)))}")
    lines.append(
        f"machine: {about['cpu']}; {about['memory']}; kernel {about['kernel']}; python {about['python']}; "
        f"torch {about['torch']}; {about['backends']}"
    )
    return [part for line in lines for part in _wrapped("", line, "  ")]


def _cache_words(page: Page) -> str:
    cached = page.place.cached
    if cached == 0:
        return "nothing of it in the page cache"
    share = "unknown how much of it" if cached is None else f"{cached / page.place.size:.0%} of it"
    return f"{share} in the page cache, as found {with_range(page.as_found, 3)} GB/s"


def _wrapped(label: str, text: str, indent: str | None = None) -> list[str]:
    whole = label + re.sub(r" (?=[GM]B/s)", "\xa0", text)  # keeps a number and its unit together
    lines = textwrap.wrap(
        whole, terminal_width(), subsequent_indent=" " * len(label) if indent is None else indent,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
    return [line.replace("\xa0", " ") for line in lines]
