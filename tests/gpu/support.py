"""What the tests on a real GPU share.

The queues are kept busy with a kernel that spins, so a transfer that does not wait for it meets what stood in memory
before.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import nvme_ops
from nvme_ops import aio_handle
from tests.conftest import MIB, REPOSITORY

on_a_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="torch.cuda is not available: no GPU, or torch without CUDA"
    ),
]

CHUNK = 8 * MIB  # kChunk of device_tensor.cpp
TELLING = 16 * MIB  # kTelling of gds_path.cpp: from here on gds_handle compares its ways
ODD = 3 * CHUNK + 5  # more than that in whole pages, wherever it lies
SPIN = 200_000_000  # clock cycles: about a tenth of a second
PATIENCE = 60  # seconds for a process whose work takes a few


def gpu(index: int = 0) -> torch.device:
    return torch.device("cuda", index)


def empty(size: int, index: int = 0) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.uint8, device=gpu(index))


def stream_for(default_stream: bool, index: int = 0) -> torch.cuda.Stream:
    return torch.cuda.default_stream(gpu(index)) if default_stream else torch.cuda.Stream(gpu(index))


def keep_busy() -> None:
    """Queues a kernel on the current stream that ends well after the next call has begun."""
    torch.cuda._sleep(SPIN)


@dataclass(frozen=True)
class Kind:
    """A handle, and the value of ``NVME_OPS_GDS`` for it."""

    name: str
    mode: str

    def make(self, **settings: int) -> aio_handle:
        made: aio_handle = getattr(nvme_ops, self.name)(**settings)
        return made


AIO = Kind("aio_handle", "auto")
GDS = Kind("gds_handle", "auto")
GDS_OFF = Kind("gds_handle", "off")
KINDS = {"gpu-aio": AIO, "gpu-gds": GDS, "gpu-gds-off": GDS_OFF}


def prime(handle: aio_handle, folder: Path) -> None:
    """Has the bounce path measured, so that where there is no GPUDirect Storage the next transfer takes cuFile."""
    path, there = folder / f"primed{id(handle)}", empty(TELLING)  # threads do so at once
    handle.sync_pwrite(there, path)
    handle.sync_pread(there, path)
    path.unlink()


def run_limited(
    program: str, *arguments: object, seconds: int = PATIENCE, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs a program in an interpreter of its own, which is killed when it hangs: subprocess.TimeoutExpired."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), **environment},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


def run_well(program: str, *arguments: object, **environment: str) -> str:
    done = run_limited(program, *arguments, seconds=PATIENCE, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def code_of_refusal(call: Callable[..., object], *arguments: object) -> int | None:
    """The errno of the OSError that a call raises; None when it raises none."""
    try:
        call(*arguments)
    except OSError as error:
        return error.errno
    return None


@functools.cache
def cufile_refusal() -> str:
    """Why cuFile cannot work here, in the words of ``gds_handle``; empty where it can."""
    program = """
        import nvme_ops
        try:
            nvme_ops.gds_handle()
        except RuntimeError as reason:
            print(reason)
    """
    try:
        return run_well(program, NVME_OPS_GDS="auto").strip()
    except subprocess.TimeoutExpired:
        return f"gds_handle() did not return within {PATIENCE} s"
