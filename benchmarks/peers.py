"""Rows and ops of other packages, which several benchmarks measure beside this one. fio has a module of its own."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.programs import tied
from nvme_ops.base.settings import Settings
from nvme_ops.measure.engines import Task, saved_row, unavailable
from nvme_ops.measure.rows import Row, Sample, Unavailable


def load_deepspeed(op: str = "async_io") -> Any:
    """Loads DeepSpeed's op ``async_io`` or ``gds``, first compiling it (minutes). Raises Unavailable with the reason.

    Load it before this package's op: torch counts the builds of one name in a process, and DeepSpeed compiles its op
    again, under another name, if another ``async_io`` was built before.
    """
    loaded = _loaded_deepspeed(op)
    if isinstance(loaded, Unavailable):
        raise loaded
    return loaded


@functools.cache
def _loaded_deepspeed(op: str) -> Any:
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


def needed(module: str, package: str) -> Any:
    """Returns what ``import module`` binds. Raises Unavailable if it cannot be imported."""
    try:
        return __import__(module)
    except (ImportError, RuntimeError) as error:
        raise Unavailable(f"pip install {package} ({error})") from None


def safetensors_row(task: Task, name: str) -> Row:
    """Returns the row of ``save_file`` and ``fsync``, or of ``load_file`` and a copy, since it maps the file."""
    module = functools.cache(lambda: needed("safetensors.torch", "safetensors").torch)
    return saved_row(task, name, "safetensors", lambda tensor, path: module().save_file({"tensor": tensor}, path),
                     lambda path: task.buffer.copy_(module().load_file(path)["tensor"]))  # fmt: skip


_GDSIO_PLACES = ("/usr/local/cuda/gds/tools", "/usr/local/gds/tools")
_GDSIO_LIMIT = 300  # seconds
_GDSIO_FIGURES = re.compile(r"DataSetSize: (\d+)/\d+\(KiB\).*?total_time ([\d.]+) secs", re.DOTALL)


def gdsio_row(task: Task, name: str, settings: Settings) -> Row:
    """Returns gdsio's row, with a thread for each lane. It says ``GPUD`` even where cuFile uses its own bounce path."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    places = [os.path.join(home, "gds", "tools")] if home else []
    program = shutil.which("gdsio", path=os.pathsep.join([os.environ.get("PATH", ""), *places, *_GDSIO_PLACES]))
    if program is None:
        return unavailable(name, "gdsio is not installed: apt-get install nvidia-gds")
    path = f"{task.path}.gdsio" if task.write else task.path  # it writes its own pattern
    command = tied([
        program, "-f", path, "-d", str(task.gpu), "-w", str(settings.intra_op_parallelism), "-s", f"{task.size >> 10}K",
        "-i", f"{settings.block_size >> 10}K", "-x", "0", "-I", str(int(task.write)),
    ])  # fmt: skip

    def before() -> None:
        if not os.path.exists(path):
            shutil.copyfile(task.path, path)
        task.set_cache()

    def run() -> Sample:
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
                timeout=_GDSIO_LIMIT, cwd=os.path.dirname(os.path.abspath(path)),  # where cuFile's log goes
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"gdsio: not done after {_GDSIO_LIMIT} s") from None
        return read_gdsio(done.returncode, done.stdout + done.stderr)

    return Row(name, run, before)


def read_gdsio(status: int, output: str) -> Sample:
    """Parses gdsio's output into a sample, without CPU time. Raises RuntimeError with its message if it failed."""
    match = _GDSIO_FIGURES.search(output)
    if status or match is None:
        words = [line.strip() for line in output.splitlines() if line.strip()]
        raise RuntimeError(f"gdsio: {words[0] if words else f'exit status {status}'}")
    return Sample(float(match[2]), int(match[1]) << 10)
