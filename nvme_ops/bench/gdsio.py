"""Runs NVIDIA's gdsio and parses its figures.

gdsio calls its transfers ``GPUD`` even when cuFile falls back to its compatibility mode.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess

from nvme_ops.bench.measure import Sample, Unavailable
from nvme_ops.measuring import stop

DIRECT, THROUGH_HOST = 0, 2  # its option -x: storage to GPU; storage to host memory to GPU
_PLACES = ("/usr/local/cuda/gds/tools", "/usr/local/gds/tools")
_LIMIT = 300  # seconds
_FIGURES = re.compile(r"DataSetSize: (\d+)/\d+\(KiB\).*?total_time ([\d.]+) secs", re.DOTALL)


def program() -> str:
    """Returns the path of gdsio. Raises Unavailable."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    places = [os.path.join(home, "gds", "tools")] if home else []
    found = shutil.which("gdsio", path=os.pathsep.join([os.environ.get("PATH", ""), *places, *_PLACES]))
    if found is None:
        raise Unavailable("gdsio is not installed: apt-get install nvidia-gds")
    return found


def run(path: str, size: int, write: bool, way: int, gpu: int, block_size: int, threads: int) -> Sample:
    """Runs one pass over ``path``, which gdsio may overwrite.

    Raises:
        Unavailable: gdsio is not installed.
        RuntimeError: gdsio failed; with its message.
    """
    command = [
        program(), "-f", path, "-d", str(gpu), "-w", str(threads), "-s", f"{size >> 10}K", "-i", f"{block_size >> 10}K",
        "-x", str(way), "-I", str(int(write)),
    ]  # fmt: skip
    try:
        done = subprocess.run(
            stop.tied(command), stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=_LIMIT, cwd=os.path.dirname(os.path.abspath(path)),  # cuFile's log goes to the working directory
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"gdsio: not done after {_LIMIT} s") from None
    return read_output(done.returncode, done.stdout + done.stderr)


def read_output(status: int, output: str) -> Sample:
    """Parses what gdsio printed into a sample, without CPU time. Raises RuntimeError with its message."""
    found = _FIGURES.search(output)
    if status or found is None:
        words = [line.strip() for line in output.splitlines() if line.strip()]
        raise RuntimeError(f"gdsio: {words[0] if words else f'exit status {status}'}")
    return Sample(float(found[2]), int(found[1]) << 10)
