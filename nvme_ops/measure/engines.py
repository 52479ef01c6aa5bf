"""Everything that moves a tensor between a file and memory: one row for each engine, all over one ``Task``.

A new engine is a function ``row(task, name, settings)``, which returns its ``Row`` or raises ``Unavailable`` that says
what to install, and one line of ``ENGINES``.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import nvme_ops
from nvme_ops.base.settings import Settings
from nvme_ops.measure import files, fio, stop
from nvme_ops.measure.rows import BlockTimes, Row, Sample, Unavailable, WrongData, timed

if TYPE_CHECKING:
    import torch

Memory = Callable[[], "torch.Tensor"]
Move = Callable[["torch.Tensor"], object]
_BLOCKS, _SECONDS = 512, 1.0  # limits for single blocks: count and seconds


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
    use_gds: bool = False
    more_paths: tuple[str, ...] = ()  # if given, each pass takes the next file
    written: int = field(default=0, init=False)  # number of checked writes, to distinguish them
    _contents: dict[str, int] = field(default_factory=dict, init=False, repr=False)

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
    def huge(self) -> torch.Tensor:
        """Memory of ``nvme_ops.empty``."""
        import torch

        return files.filled(nvme_ops.empty(self.size, dtype=torch.uint8))

    @functools.cached_property
    def buffer(self) -> torch.Tensor:
        """The tensor to read into or write from."""
        if self.gpu is not None:
            import torch

            return files.filled(torch.empty(self.size, dtype=torch.uint8, device=torch.device("cuda", self.gpu)))
        return self.pageable if self.pageable_memory else self.locked

    @property
    def content(self) -> int:
        """The checksum of the file at the first pass; rows that write do not use it."""
        if self.path not in self._contents:
            self._contents[self.path] = files.checksum(self.path)
        return self._contents[self.path]

    @property
    def pattern(self) -> str:
        """The direction, as fio calls it."""
        return "write" if self.write else "read"

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
        if files.tensor_checksum(tensor) != (files.checksum(self.path) if self.write else self.content):
            raise WrongData("tensor and file differ")


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


def saved_row(task: Task, name: str, path: str, save: Callable[[], object], load: Callable[[], torch.Tensor]) -> Row:
    """Returns a row that saves ``task.buffer`` to a file of another format at ``path``, or loads it from there.

    Several rows may share ``path``: the first of them saves.
    """

    def before() -> None:
        if path not in task._contents:
            save()
            task._contents[path] = files.tensor_checksum(task.buffer)
        task.set_cache(path)

    def check() -> None:
        expected = files.tensor_checksum(task.buffer) if task.write else task._contents[path]
        if files.tensor_checksum(load()) != expected:
            raise WrongData("tensor and file differ")

    reads = None if task.write else lambda: path
    return Row(name, lambda: timed(save if task.write else load, task.size), before, check, reads=reads)


# This package's handles, and DeepSpeed's: the calls are the same


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
    row.blocks = lambda: block_times(task, handle)
    return row


def block_times(task: Task, handle: Any) -> BlockTimes:
    """Times single blocks of the handle's block size at random places of the file, one after the other."""
    block = task.buffer[: handle.get_block_size()]
    start = handle.async_pwrite if task.write else handle.async_pread
    task.set_cache()
    complete, submit = [], []
    for offset in random_offsets(task.size, block.numel()):
        begin = time.perf_counter()
        start(block, task.path, offset)
        submitted = time.perf_counter()
        handle.wait()
        task.finish()
        complete.append(time.perf_counter() - begin)
        submit.append(submitted - begin)
    return BlockTimes.of(complete, submit)


def random_offsets(size: int, block: int) -> Iterator[int]:
    """Yields different multiples of ``block`` within ``size``, always the same ones, up to a count or time limit."""
    blocks = max(1, size // block)
    end = time.perf_counter() + _SECONDS
    for place in random.Random(0).sample(range(blocks), min(_BLOCKS, blocks)):
        yield place * block
        if time.perf_counter() > end:
            return


def _deepspeed(task: Task, name: str, settings: Settings) -> Row:
    op = load_deepspeed("gds" if task.use_gds else "async_io")
    handle = (op.gds_handle if task.use_gds else op.aio_handle)(**settings.as_json())
    if task.gpu is None and not task.pageable_memory and "buffer" not in vars(task):
        # DeepSpeed recognises only memory that it locked itself; no other engine runs in this process
        task.buffer = locked_tensor(handle, task.size)
    return handle_row(task, name, handle, past_cache=True)


def load_deepspeed(op: str = "async_io") -> Any:
    """Loads DeepSpeed's op ``async_io`` or ``gds``, first compiling it (minutes). Raises Unavailable with the reason.

    Load it before this package's op: torch counts the builds of one name in a process, and DeepSpeed compiles its op
    again, under another name, if another ``async_io`` was built before.
    """
    found = _loaded_deepspeed(op)
    if isinstance(found, Unavailable):
        raise found
    return found


@functools.cache
def _loaded_deepspeed(op: str) -> Any:
    import torch

    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        try:
            with _silenced(output.fileno()):
                from deepspeed.ops import op_builder  # type: ignore[import-not-found,import-untyped,unused-ignore]

                logging.getLogger("DeepSpeed").setLevel(logging.ERROR)  # it warns of wear at the first write
                builder = op_builder.GDSBuilder if op == "gds" else op_builder.AsyncIOBuilder
                return builder().load(verbose=False)
        except Exception as error:  # a builder can raise anything
            if isinstance(error, ImportError) and error.name == "deepspeed":
                return Unavailable("DeepSpeed is not installed: pip install deepspeed")
            output.seek(0)
            reason = [line.strip() for line in output if "WARNING" in line] or [f"{type(error).__name__}: {error}"]
            return Unavailable(f"DeepSpeed's {op} does not load: {reason[-1].splitlines()[0]}")


@contextlib.contextmanager
def _silenced(target: int) -> Iterator[None]:
    """Redirects stdout and stderr to ``target``, by descriptor: DeepSpeed's probes fail if sys.stderr has none."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = {descriptor: os.dup(descriptor) for descriptor in (1, 2)}
    try:
        for descriptor in kept:
            os.dup2(target, descriptor)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for descriptor, copy in kept.items():
            os.dup2(copy, descriptor)
            os.close(copy)


# Other programs

_CACHED = ["--ioengine=psync", "--bs=1M", "--direct=0", "--invalidate=0"]  # reads cached data


def _fio_row(task: Task, name: str, variants: Sequence[fio.Variant], lanes: int = 1) -> Row:
    fio.require()
    made = fio.row(name, task.pattern, lambda: task.path, task.size, task.set_cache, variants, lanes=lanes)
    made.reads = (lambda: task.path) if task.cached else None
    return made


def _fio(task: Task, name: str, settings: Settings) -> Row:
    """Returns fio's row with the block size, queue depth and lanes of ``settings``, in fio's own memory."""
    block, depth = f"--bs={settings.block_size}", f"--iodepth={settings.queue_depth}"
    variants = [([*_CACHED, block], "psync")] if task.cached else fio.variants([block, depth])
    made = _fio_row(task, name, variants, settings.intra_op_parallelism)
    if not task.cached:
        made.blocks = lambda: _fio_blocks(task, block)
    return made


def _fio_best(task: Task, name: str, _: Settings) -> Row:
    """Returns fio's best row, whatever the settings: 4 MiB x 32 in huge pages; cached files by buffered reads."""
    return _fio_row(task, name, [(_CACHED, "")] if task.cached else fio.best(task.size))


def _fio_blocks(task: Task, block: str) -> BlockTimes:
    """Measures single random blocks, one after the other, as many and as large as for the handles."""
    limits = ["--iodepth=1", f"--runtime={_SECONDS:g}", f"--number_ios={_BLOCKS}"]
    for options, _ in fio.variants([block, *limits]):
        task.set_cache()
        try:
            return fio.latencies(f"rand{task.pattern}", task.path, task.size, options)
        except RuntimeError as error:
            failure = error
    raise failure


_GDSIO_PLACES = ("/usr/local/cuda/gds/tools", "/usr/local/gds/tools")
_GDSIO_LIMIT = 300  # seconds
_GDSIO_FIGURES = re.compile(r"DataSetSize: (\d+)/\d+\(KiB\).*?total_time ([\d.]+) secs", re.DOTALL)


def _gdsio(task: Task, name: str, settings: Settings) -> Row:
    """Returns gdsio's row, with a thread for each lane. It says ``GPUD`` even where cuFile uses its own bounce path."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    places = [os.path.join(home, "gds", "tools")] if home else []
    program = shutil.which("gdsio", path=os.pathsep.join([os.environ.get("PATH", ""), *places, *_GDSIO_PLACES]))
    if program is None:
        raise Unavailable("gdsio is not installed: apt-get install nvidia-gds")
    path = f"{task.path}.gdsio" if task.write else task.path  # it writes its own pattern
    if task.write:
        files.make_file(path, task.size)
    command = stop.tied([
        program, "-f", path, "-d", str(task.gpu), "-w", str(settings.intra_op_parallelism), "-s", f"{task.size >> 10}K",
        "-i", f"{settings.block_size >> 10}K", "-x", "0" if task.use_gds else "2", "-I", str(int(task.write)),
    ])  # fmt: skip

    def run() -> Sample:
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
                timeout=_GDSIO_LIMIT, cwd=os.path.dirname(os.path.abspath(path)),  # where cuFile's log goes
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"gdsio: not done after {_GDSIO_LIMIT} s") from None
        return read_gdsio(done.returncode, done.stdout + done.stderr)

    return Row(name, run, task.set_cache)


def read_gdsio(status: int, output: str) -> Sample:
    """Parses gdsio's output into a sample, without CPU time. Raises RuntimeError with its message if it failed."""
    found = _GDSIO_FIGURES.search(output)
    if status or found is None:
        words = [line.strip() for line in output.splitlines() if line.strip()]
        raise RuntimeError(f"gdsio: {words[0] if words else f'exit status {status}'}")
    return Sample(float(found[2]), int(found[1]) << 10)


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


_Save = Callable[["torch.Tensor", str], object]


def _torch(task: Task, name: str, _: Settings) -> Row:
    import torch

    def load(path: str) -> Any:
        return torch.load(path, map_location=task.buffer.device)

    return _file_of_its_own(task, name, "pt", torch.save, load)


def _safetensors(task: Task, name: str, _: Settings) -> Row:
    try:
        from safetensors.torch import load_file, save_file
    except ImportError:
        raise Unavailable("safetensors is not installed: pip install safetensors") from None

    def load(path: str) -> torch.Tensor:
        loaded = load_file(path, device=str(task.buffer.device))["tensor"]
        if task.gpu is None:
            task.buffer.copy_(loaded)  # the file is mapped: only pages that are touched are read
        return loaded

    return _file_of_its_own(task, name, "safetensors", lambda tensor, path: save_file({"tensor": tensor}, path), load)


def _file_of_its_own(task: Task, name: str, suffix: str, save: _Save, load: Callable[[str], torch.Tensor]) -> Row:
    path = f"{task.path}.{suffix}"

    def save_and_sync() -> None:
        save(task.buffer, path)
        files.sync(path)

    def load_and_finish() -> torch.Tensor:
        loaded = load(path)
        task.finish()
        return loaded

    return saved_row(task, name, path, save_and_sync, load_and_finish)


@dataclass(frozen=True)
class BenchEngine:
    """A row of ``ENGINES``. ``takes``: the settings that affect it."""

    words: str
    row: Callable[[Task, str, Settings], Row]
    takes: tuple[str, ...] = ()
    gpu_only: bool = False
    own_file: bool = False  # it uses a file in another format
    own_process: bool = False  # its code may exit, hang, or disturb the others


_ALL = ("block_size", "queue_depth", "single_submit", "overlap_events", "intra_op_parallelism")

ENGINES = {
    "aio_handle": BenchEngine("this package, from and to host memory; a GPU's by its own bounce path", _aio, _ALL),
    "gds_handle": BenchEngine("this package, from and to GPU memory", _gds, _ALL, gpu_only=True),
    "torch": BenchEngine("torch.save with fsync, torch.load", _torch, own_file=True),
    "python": BenchEngine("ndarray.tofile with fsync, readinto", _python),
    "safetensors": BenchEngine("save_file with fsync, load_file", _safetensors, own_file=True),
    "deepspeed": BenchEngine("DeepSpeed's aio_handle; gds_handle with --use-gds", _deepspeed, _ALL, own_process=True),
    "fio": BenchEngine("fio with the same settings", _fio, ("block_size", "queue_depth", "intra_op_parallelism")),
    "gdsio": BenchEngine(
        "NVIDIA's gdsio", _gdsio, ("block_size", "intra_op_parallelism"), gpu_only=True, own_file=True
    ),
}
_REFERENCE = BenchEngine("fio at its best", _fio_best)


@dataclass(frozen=True)
class Contender:
    """An engine with settings: one row. ``fio.NAME`` as the engine is the reference, whatever the settings."""

    engine: str
    settings: Settings
    name: str


def make_row(contender: Contender, task: Task) -> Row:
    """Returns the contender's row; if it is not available, one that says why."""
    engine = ENGINES.get(contender.engine, _REFERENCE)
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
