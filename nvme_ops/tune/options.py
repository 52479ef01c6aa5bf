"""The flags of ``nvme-tune``: ds_nvme_tune's, with their meaning, and ours."""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nvme_ops.arguments import check_output, positive
from nvme_ops.text import parse_size, size_words
from nvme_ops.tune.passes import LEAST as LEAST_PASS
from nvme_ops.tune.search import MOST_CANDIDATES, Axis, axes

DROP_CACHES = "/proc/sys/vm/drop_caches"
_DESCRIPTION = """\
Finds the settings of aio_handle with which a device is read and written fastest, in less than a minute. Prints them as
the section "aio" that DeepSpeed's configuration and aio_handle(**section) take, and keeps them for
nvme_ops.tuned_handle. A difference inside the noise keeps the default.
"""
_EPILOG = """\
examples:
  nvme-tune --nvme_dir /mnt/nvme                           read and write, CPU memory
  nvme-tune --nvme_dir /mnt/nvme --explain --json aio.json why, and the result in a file
  nvme-tune --nvme_dir /mnt/nvme0 /mnt/nvme1               each by itself, then what suits both at once
  nvme-tune --nvme_dir /mnt/nvme --gpu --no_write          reads into GPU memory

A sweep configuration is a JSON file with lists of values, ds_nvme_tune's, to which the search is restricted:
  {"block_size": ["1M", "8M"], "queue_depth": [32, 128], "sequential_requests": [true, false],
   "single_submit": [false, true], "io_parallel": [1, 2, 4, 8]}

exit status: 0; 2 for wrong arguments and for folders that cannot be used or lack the space; 130 after Ctrl-C, which
prints the best so far
"""


@dataclass(frozen=True)
class Options:
    """What a run shall do, checked."""

    folders: list[str]
    axes: list[Axis]
    directions: list[str]
    size: int
    way: str  # of identity.WAYS
    flush_page_cache: bool
    loops: int
    seconds: float
    log_dir: str | None = None
    verbose: bool = False
    explain: bool = False
    json: str | None = None
    store: bool = True
    replace: bool = False


def parser() -> argparse.ArgumentParser:
    """The arguments of ``nvme-tune``."""
    made = argparse.ArgumentParser(
        prog="nvme-tune",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument(
        "--nvme_dir", nargs="+", action="extend", required=True, metavar="DIR",
        help="folders on the devices to tune, each with --io_size of free space",
    )  # fmt: skip
    made.add_argument("--sweep_config", metavar="FILE.json", help="the values to try, see below")
    made.add_argument("--no_read", action="store_true", help="do not measure reads")
    made.add_argument("--no_write", action="store_true", help="do not measure writes")
    made.add_argument(
        "--io_size", default="400M", metavar="SIZE",
        help="bytes of a full pass, at most, 32M at least; the search takes shorter ones (default 400M)",
    )  # fmt: skip
    made.add_argument("--gpu", action="store_true", help="tensors in GPU memory")
    made.add_argument("--gds", action="store_true", help="tensors in GPU memory, with gds_handle; implies --gpu")
    made.add_argument(
        "--flush_page_cache", action="store_true",
        help="before reads drop the whole page cache, which needs root; without, only the file is dropped from it, "
        "which suffices",
    )  # fmt: skip
    made.add_argument("--log_dir", metavar="DIR", help="write every pass to DIR/passes.jsonl")
    made.add_argument("--loops", type=positive, default=1, metavar="N", help="repetitions in each pass (default 1)")
    made.add_argument("--verbose", action="store_true", help="show every pass")
    made.add_argument("--seconds", type=_seconds, default=45.0, metavar="S", help="for each device (default 45)")
    made.add_argument("--explain", action="store_true", help="show why the best is the best, and how flat the optimum")
    made.add_argument("--json", metavar="FILE", help="write the result to FILE; - for standard output, then no text")
    made.add_argument("--no_store", action="store_true", help="do not keep the result for tuned_handle")
    made.add_argument(
        "--replace", action="store_true", help="keep the result even where a better founded one is kept already"
    )
    made.add_argument("--version", action="version", version=f"nvme-tune {_version()}")
    return made


def parse(words: Sequence[str] | None) -> Options:
    """Exits with status 2 and a message on wrong arguments."""
    made = parser()
    given = made.parse_args(words)
    try:
        return _checked(given)
    except ValueError as error:
        made.error(str(error))


def _checked(given: argparse.Namespace) -> Options:
    directions = [name for name in ("write", "read") if not getattr(given, f"no_{name}")]
    if not directions:
        raise ValueError("--no_read and --no_write together leave nothing to measure")
    for folder in given.nvme_dir:
        if not os.path.isdir(folder):
            raise ValueError(f"--nvme_dir {folder}: no such folder")
    try:
        size = parse_size(given.io_size)
    except ValueError as error:
        raise ValueError(f"--io_size: {error}") from None
    if size < LEAST_PASS:
        least = size_words(LEAST_PASS)
        raise ValueError(
            f"--io_size {given.io_size}: a pass of less than {least} mostly measures how it begins and ends"
        )
    if given.no_store and given.replace:
        raise ValueError("--replace with --no_store: nothing is kept")
    if given.json and given.json != "-":
        check_output("--json", given.json)
    if given.flush_page_cache and not os.access(DROP_CACHES, os.W_OK):
        raise ValueError(f"--flush_page_cache: {DROP_CACHES} may be written by root only; without the flag the file is "
                         "dropped from the cache, which suffices")  # fmt: skip
    way = "gds" if given.gds else "gpu" if given.gpu else "cpu"
    if way != "cpu":
        _check_gpu(way)
    searched = axes(len(os.sched_getaffinity(0)))
    if given.sweep_config is not None:
        searched = sweep_axes(given.sweep_config)
    return Options(
        list(dict.fromkeys(given.nvme_dir)), searched, directions, size, way, given.flush_page_cache, given.loops,
        given.seconds, given.log_dir, given.verbose, given.explain, given.json, not given.no_store, given.replace,
    )  # fmt: skip


def _check_gpu(way: str) -> None:
    import torch

    if not torch.cuda.is_available():
        raise ValueError(f"--{way}: torch.cuda is not available: no GPU, or torch without CUDA")
    if way == "gds":
        from nvme_ops.gds import gds_handle

        try:
            gds_handle()
        except RuntimeError as error:
            raise ValueError(f"--gds: {error}") from None


def sweep_axes(path: str) -> list[Axis]:
    """The axes in a sweep configuration; what it leaves out keeps its default. ValueError names the wrong key."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"--sweep_config {path}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"--sweep_config {path}: not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"--sweep_config {path}: not an object with lists of values")
    made = []
    for key, values in found.items():
        if key not in _SWEPT:
            raise ValueError(f"--sweep_config {path}: {key!r} is none of {', '.join(_SWEPT)}")
        if not isinstance(values, list) or not values:
            raise ValueError(f"--sweep_config {path}: {key} must be a list of values")
        name, read = _SWEPT[key]
        try:
            made.append(Axis(name, sorted({read(value) for value in values})))
        except ValueError as error:
            raise ValueError(f"--sweep_config {path}: {key}: {error}") from None
    count = math.prod(len(axis.values) for axis in made)
    if count > MOST_CANDIDATES:
        raise ValueError(f"--sweep_config {path}: {count} combinations, at most {MOST_CANDIDATES} can be searched")
    return made


def _switch(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{value!r} is neither true nor false")
    return value


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{value!r} is not a whole number of at least 1")
    return value


def _bytes(value: Any) -> int:
    return parse_size(value) if isinstance(value, str) else _whole(value)


#: The keys of ds_nvme_tune: the setting that each stands for, and how its values are read.
_SWEPT: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "block_size": ("block_size", _bytes),
    "queue_depth": ("queue_depth", _whole),
    "io_parallel": ("intra_op_parallelism", _whole),
    "sequential_requests": ("overlap_events", lambda value: not _switch(value)),
    "single_submit": ("single_submit", _switch),
}


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value


def _version() -> str:
    from nvme_ops import __version__

    return __version__
