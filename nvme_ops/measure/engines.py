"""What moves a tensor between a file and memory: a row for each of this package's handles, and for plain ways.

A new engine is a function ``row(task, name, settings)``, which returns its ``Row`` or raises ``Unavailable`` that says
what to install, and one line of ``ENGINES``. Rows of other packages are in ``benchmarks/``.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import nvme_ops
from nvme_ops.base.settings import Settings
from nvme_ops.measure import files
from nvme_ops.measure.rows import Row, Sample, Unavailable, WrongData, timed

if TYPE_CHECKING:
    import torch

Memory = Callable[[], "torch.Tensor"]
Move = Callable[["torch.Tensor"], object]
Save = Callable[["torch.Tensor", str], object]


@dataclass
class Task:
    """A transfer of ``size`` bytes between ``path`` and memory, which all rows of a table share.

    If it is pickled before its memory is allocated, another process can use it.
    """

    path: str
    size: int
    write: bool
    gpu: int | None = None  # number of the device that holds the tensor; None: host memory
    cached: bool = False  # the file is in the page cache
    validate: bool = False
    pageable_memory: bool = False  # an ordinary tensor instead of a page-locked one
    more_paths: tuple[str, ...] = ()  # if given, each pass takes the next file
    written: int = field(default=0, init=False)  # number of checked writes, to distinguish them
    saved: dict[str, int] = field(default_factory=dict, init=False)  # checksums of what is in files of other formats

    @functools.cached_property
    def handle(self) -> nvme_ops.aio_handle:
        """A handle with default settings for all rows, made when first needed."""
        return nvme_ops.aio_handle()

    @functools.cached_property
    def pageable(self) -> torch.Tensor:
        """An ordinary tensor whose pages all exist."""
        import torch

        return files.filled(torch.empty(self.size, dtype=torch.uint8))

    @functools.cached_property
    def locked(self) -> torch.Tensor:
        """Memory of ``new_cpu_locked_tensor``."""
        return locked_tensor(self.handle, self.size)

    @functools.cached_property
    def buffer(self) -> torch.Tensor:
        """The tensor to read into or write from."""
        if self.gpu is not None:
            import torch

            return files.filled(torch.empty(self.size, dtype=torch.uint8, device=torch.device("cuda", self.gpu)))
        return self.pageable if self.pageable_memory else self.locked

    def set_cache(self, path: str = "") -> None:
        """Drops the file from the page cache, or reads it into it: the same starting point for every pass."""
        (files.make_warm if self.cached else files.make_cold)(path or self.path)

    def finish(self) -> None:
        """Waits for the GPU, if there is one."""
        if self.gpu is not None:
            import torch

            torch.cuda.synchronize(self.gpu)

    def mark(self, tensor: torch.Tensor) -> None:
        """Prepares a pass whose bytes are checked, so that one that moves nothing is noticed."""
        if self.write:  # in every page, to notice a write that leaves what the last row wrote
            self.written += 1
            tensor[::4096] = self.written % 256
        else:
            tensor.zero_()
        self.set_cache()

    def compare(self, tensor: torch.Tensor) -> None:
        """Raises WrongData if the tensor and the file differ."""
        if files.tensor_checksum(tensor) != files.checksum(self.path):
            raise WrongData("tensor and file differ")


def gpus() -> int:
    """Returns the number of GPUs that torch can use."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def locked_tensor(handle: Any, size: int) -> torch.Tensor:
    """Returns page-locked memory of a handle, this package's or DeepSpeed's, whose pages all exist."""
    import torch

    return files.filled(handle.new_cpu_locked_tensor(size, torch.empty(0, dtype=torch.uint8)))


def tensor_row(task: Task, name: str, memory: Memory, move: Move, peer: str = "", past_cache: bool = False) -> Row:
    """Returns a row that moves the whole file from or to one tensor, which ``memory`` makes when first called.

    ``past_cache``: even cached data are read from the device.
    """

    def before() -> None:
        memory()
        task.set_cache()

    def check() -> None:
        tensor = memory()
        task.mark(tensor)
        move(tensor)
        task.compare(tensor)

    reads = None if task.write or past_cache else lambda: task.path
    return Row(name, lambda: timed(lambda: move(memory()), task.size), before, check, peer, reads=reads)


def saved_row(task: Task, name: str, suffix: str, save: Save, load: Callable[[str], torch.Tensor]) -> Row:
    """Returns a row that saves ``task.buffer`` to a file of another format, durably, or loads it from there.

    Rows of one ``suffix`` share the file: the first of them saves.
    """
    path = f"{task.path}.{suffix}"

    def save_and_sync() -> None:
        save(task.buffer, path)
        files.sync(path)

    def load_and_finish() -> torch.Tensor:
        loaded = load(path)
        task.finish()
        return loaded

    def before() -> None:
        if path not in task.saved:
            save_and_sync()
            task.saved[path] = files.tensor_checksum(task.buffer)
        task.set_cache(path)

    def check() -> None:
        expected = files.tensor_checksum(task.buffer) if task.write else task.saved[path]
        if files.tensor_checksum(load(path)) != expected:
            raise WrongData("tensor and file differ")

    work, reads = (save_and_sync, None) if task.write else (load_and_finish, lambda: path)
    return Row(name, lambda: timed(work, task.size), before, check, reads=reads)


# This package's handles


def _aio(task: Task, name: str, settings: Settings) -> Row:
    handle = nvme_ops.aio_handle(**settings.as_json())
    made = handle_row(task, name, handle, not files.handles_read_the_cache())
    made.note = handle.backend
    return made


def _gds(task: Task, name: str, settings: Settings) -> Row:
    handle = nvme_ops.gds_handle(**settings.as_json())
    return noting_paths(handle_row(task, name, handle, not files.handles_read_the_cache()), lambda: handle)


def noting_paths(row: Row, handle: Callable[[], nvme_ops.gds_handle]) -> Row:
    """Makes the note of a row say which paths the handle's transfers took, and why."""
    run = row.run

    def run_and_note() -> Sample:
        sample, statistics = run(), handle().path_statistics()
        row.note = path_words(statistics)
        if statistics["last"] != "bounce":  # cuFile reads from the device
            row.found = None
        return sample

    row.run = run_and_note
    return row


def path_words(statistics: dict[str, Any]) -> str:
    """Returns the paths that a handle took: ``compat (why); transfers: bounce 2, compat 8``."""
    if statistics["last"] is None:
        return "no tensor on an accelerator was moved"
    words, uses = f"{statistics['last']} ({statistics['why']})", statistics["uses"]
    if len(uses) > 1:
        words += "; transfers: " + ", ".join(f"{path} {use['transfers']}" for path, use in sorted(uses.items()))
    return words


def handle_row(task: Task, name: str, handle: Any, past_cache: bool = False) -> Row:
    """Returns a row that times an asynchronous call and ``wait``, as in ds_io. ``past_cache``: see ``tensor_row``."""
    start = handle.pwrite if task.write else handle.pread
    submitted = 0.0

    def move(tensor: torch.Tensor) -> None:
        nonlocal submitted
        begin = time.perf_counter()
        start(tensor, task.path, task.validate, True)
        submitted = time.perf_counter() - begin
        handle.wait()
        task.finish()

    row = tensor_row(task, name, lambda: task.buffer, move, past_cache=past_cache)
    run = row.run
    row.run = lambda: replace(run(), submit_seconds=submitted)
    return row


# Through the page cache. The ``fsync`` that makes a write durable is timed, too


def _python(task: Task, name: str, _: Settings) -> Row:
    """Returns the row of ``ndarray.tofile``, or of ``readinto``; GPU memory goes through an ordinary tensor."""
    from nvme_ops.io.tensors import bytes_of

    if task.write:
        try:
            import numpy  # noqa: F401
        except ImportError:
            raise Unavailable("NumPy is not installed: pip install numpy") from None

    def move(tensor: torch.Tensor) -> None:
        host = tensor if task.gpu is None else task.pageable
        if task.write:
            host.copy_(tensor) if host is not tensor else None
            with open(task.path, "r+b") as file:  # in place, as the other engines do
                host.numpy().tofile(file)
                file.flush()
                os.fsync(file.fileno())
            return
        with open(task.path, "rb") as file, bytes_of(host) as target:
            if (count := file.readinto(target)) != len(target):
                raise EOFError(f"{task.path} ends after {count} bytes")
        if host is not tensor:
            tensor.copy_(host)
            task.finish()

    return tensor_row(task, name, lambda: task.buffer, move)


def _torch(task: Task, name: str, _: Settings) -> Row:
    import torch

    def load(path: str) -> Any:
        return torch.load(path, map_location=task.buffer.device)

    return saved_row(task, name, "pt", torch.save, load)


@dataclass(frozen=True)
class BenchEngine:
    """A row of ``ENGINES``. ``takes``: the settings that affect it."""

    words: str
    row: Callable[[Task, str, Settings], Row]
    takes: tuple[str, ...] = ()
    gpu_only: bool = False
    own_file: bool = False  # it uses a file in another format


_ALL = ("block_size", "queue_depth", "single_submit", "overlap_events", "intra_op_parallelism")

ENGINES = {
    "aio_handle": BenchEngine("this package, from and to host memory; a GPU's by its own bounce path", _aio, _ALL),
    "gds_handle": BenchEngine("this package, from and to GPU memory", _gds, _ALL, gpu_only=True),
    "torch": BenchEngine("torch.save with fsync, torch.load", _torch, own_file=True),
    "python": BenchEngine("ndarray.tofile with fsync, readinto", _python),
}


@dataclass(frozen=True)
class Contender:
    """An engine with settings: one row."""

    engine: str
    settings: Settings
    name: str


def make_row(contender: Contender, task: Task) -> Row:
    """Returns the contender's row; if it is not available, one that says why."""
    engine = ENGINES[contender.engine]
    if engine.gpu_only and task.gpu is None:
        return unavailable(contender.name, "moves GPU memory only: --device cuda")
    try:
        return _over_files(task, engine.row(task, contender.name, contender.settings))
    except (Unavailable, ValueError, RuntimeError, OSError) as error:  # settings that it refuses, for example
        return unavailable(contender.name, f"{error}".splitlines()[0])


def make_rows(task: Task, contenders: Sequence[Contender]) -> list[Row]:
    """Returns all rows of one process, which share the file and its memory."""
    return [make_row(contender, task) for contender in contenders]


def unavailable(name: str, reason: str) -> Row:
    """Returns a row without samples, whose note is ``reason``."""

    def give_up() -> None:
        raise Unavailable(reason)

    return Row(name, before=give_up)


def _over_files(task: Task, row: Row) -> Row:
    """Makes every pass of ``row`` use the next of the task's files; all rows use the same ones."""
    paths = (task.path, *task.more_paths)
    before, passes = row.before, 0

    def take_next() -> None:
        nonlocal passes
        task.path = paths[passes % len(paths)]
        passes += 1
        before()

    row.before = take_next
    return row
