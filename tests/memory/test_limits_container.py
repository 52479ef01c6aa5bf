"""In a cgroup with a limit on its memory, as in a container: nobody is killed for copies that could be done without."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nvme_ops.limits import _cgroups

MIB = 1 << 20
LIMIT = 1024 * MIB

PROGRAM = """
import os, sys
open(sys.argv[1], "w").write("0")
import torch, nvme_ops
from nvme_ops.limits import free_memory
assert free_memory() < 1024 << 20
state = {str(i): torch.full((64 << 20,), i, dtype=torch.uint8) for i in range(9)}
future = nvme_ops.save_async(state, sys.argv[2])
future.result()
print(os.path.getsize(sys.argv[2]) >> 20)
"""


def remove(group: Path) -> None:
    """Once its last process has quite ended."""
    end = time.monotonic() + 10
    while True:
        try:
            return group.rmdir()
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.02)


@pytest.fixture
def limited() -> Iterator[Path]:
    """The file that takes a process into a group which may have 1 GiB."""
    if os.geteuid() != 0:
        pytest.skip("only root makes groups of processes")
    for kind, _, folder in _cgroups(Path("/")):
        group = folder / f"nvme_ops-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / ("memory.max" if kind == "cgroup2" else "memory.limit_in_bytes")).write_text(str(LIMIT))
        except OSError:  # the group above hands the controller of memory down to nobody
            group.rmdir()
            continue
        yield group / "cgroup.procs"
        remove(group)
        return
    pytest.skip("no group of processes with a limit on memory can be made here")


def test_a_save_in_the_background_keeps_to_the_limit(limited: Path, folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(limited), str(folder / "state.safetensors")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode != -signal.SIGKILL, "killed for want of memory"
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == 9 * 64
