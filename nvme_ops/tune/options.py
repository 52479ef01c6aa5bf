"""The flags of ``nvme-tune``: ds_nvme_tune's, with their meaning, and ours."""

from __future__ import annotations

import argparse
import json
import math
import os
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nvme_ops import __version__
from nvme_ops.arguments import check_output, command_line, positive, size
from nvme_ops.text import parse_size, size_words
from nvme_ops.tune.passes import DIRECTIONS
from nvme_ops.tune.passes import LEAST as LEAST_PASS
from nvme_ops.tune.search import Axis, axes

DROP_CACHES = "/proc/sys/vm/drop_caches"
_DESCRIPTION = """\
Finds the settings of aio_handle with which a device is read and written
fastest, in less than 20 seconds. Prints them as the section "aio" that
DeepSpeed's configuration and aio_handle(**section) take, and keeps them for
aio_handle.tuned. A difference inside the noise keeps the default.
"""
_EPILOG = """\
examples:
  nvme-tune --nvme_dir /mnt/nvme                     read and write, CPU memory
  nvme-tune --nvme_dir /mnt/nvme --explain --json aio.json
                                                     why; and a file
  nvme-tune --nvme_dir /mnt/nvme0 /mnt/nvme1         each by itself, then both
  nvme-tune --nvme_dir /mnt/nvme --gpu --no_write    reads into GPU memory

A sweep configuration is a JSON file with lists of values, ds_nvme_tune's, to
which the search is restricted:
  {"block_size": ["1M", "8M"], "queue_depth": [32, 128],
   "sequential_requests": [true, false], "single_submit": [false, true],
   "io_parallel": [1, 2, 4, 8]}

exit status: 0; 2 for wrong arguments and for folders that cannot be used or
lack the space; 130 after Ctrl-C, which prints the best so far
"""


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the flags."""
    made = command_line("nvme-tune", _DESCRIPTION, _EPILOG)

    def value(flag: str, metavar: str, words: str, **more: Any) -> None:
        made.add_argument(flag, metavar=metavar, help=words, **more)

    def switch(flag: str, words: str) -> None:
        made.add_argument(flag, action="store_true", help=words)

    value("--nvme_dir", "DIR", "folders on the devices to tune, each with --io_size of free space",
          nargs="+", action="extend", required=True)  # fmt: skip
    value("--sweep_config", "FILE.json", "the values to try, see below")
    switch("--no_read", "do not measure reads")
    switch("--no_write", "do not measure writes")
    value("--io_size", "SIZE", "bytes of a full pass, at most, 32M at least; the search takes shorter ones "
          "(default 400M)", type=size, default="400M")  # fmt: skip
    switch("--gpu", "tensors in GPU memory")
    switch("--gds", "tensors in GPU memory, with gds_handle; implies --gpu")
    switch("--flush_page_cache", "before reads drop the whole page cache, which needs root; without, only the file is "
           "dropped from it, which suffices")  # fmt: skip
    value("--log_dir", "DIR", "write every pass to DIR/passes.jsonl")
    value("--loops", "N", "repetitions in each pass (default 1)", type=positive, default=1)
    switch("--verbose", "show every pass")
    value("--seconds", "S", "for each device (default 16)", type=float, default=16.0)
    switch("--explain", "show why the best is the best, and how flat the optimum")
    value("--json", "FILE", "write the result to FILE; - for standard output, then no text")
    switch("--no_store", "do not keep the result for aio_handle.tuned")
    switch("--replace", "keep the result even where a better founded one is kept already")
    made.add_argument("--version", action="version", version=f"nvme-tune {__version__}")
    return made


def parse(words: Sequence[str] | None) -> Namespace:
    """Returns the flags and what follows from them, checked: ``axes``, ``directions`` and ``way`` (``identity.WAYS``).

    Exits with status 2 and a message on wrong ones.
    """
    made = parser()
    given = made.parse_args(words)
    given.nvme_dir = list(dict.fromkeys(given.nvme_dir))
    given.directions = [name for name in DIRECTIONS if not getattr(given, f"no_{name}")]
    given.way = "gds" if given.gds else "gpu" if given.gpu else "cpu"
    try:
        _check(given)
    except ValueError as error:
        made.error(str(error))
    try:
        swept = given.sweep_config is not None
        given.axes = _sweep_axes(given.sweep_config) if swept else axes(len(os.sched_getaffinity(0)))
    except ValueError as error:
        made.error(f"--sweep_config {given.sweep_config}: {error}")
    return given


def _check(given: Namespace) -> None:
    if not given.directions:
        raise ValueError("--no_read and --no_write together leave nothing to measure")
    for folder in given.nvme_dir:
        if not os.path.isdir(folder):
            raise ValueError(f"--nvme_dir {folder}: no such folder")
    if given.io_size < LEAST_PASS:
        raise ValueError(f"--io_size {size_words(given.io_size)}: a pass of less than {size_words(LEAST_PASS)} mostly "
                         "measures how it begins and ends")  # fmt: skip
    if not 0 < given.seconds < math.inf:
        raise ValueError(f"--seconds: {given.seconds:g} is not a number of seconds above 0")
    if given.no_store and given.replace:
        raise ValueError("--replace with --no_store: nothing is kept")
    if given.json and given.json != "-":
        check_output("--json", given.json)
    if given.flush_page_cache and not os.access(DROP_CACHES, os.W_OK):
        raise ValueError(f"--flush_page_cache: {DROP_CACHES} may be written by root only; without the flag the file is "
                         "dropped from the cache, which suffices")  # fmt: skip
    if given.way != "cpu":
        import torch

        if not torch.cuda.is_available():
            raise ValueError(f"--{given.way}: torch.cuda is not available: no GPU, or torch without CUDA")
    if given.way == "gds":
        from nvme_ops.gds import gds_handle

        try:
            gds_handle()
        except RuntimeError as error:
            raise ValueError(f"--gds: {error}") from None


def _sweep_axes(path: str) -> list[Axis]:
    """Parses a sweep configuration; settings that it omits keep their default. ValueError says what is wrong."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(error.strerror) from None
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError("not an object with lists of values")
    return [_axis(key, values) for key, values in found.items()]


def _axis(key: str, values: Any) -> Axis:
    if key not in _SWEPT:
        raise ValueError(f"{key!r} is none of {', '.join(_SWEPT)}")
    if not isinstance(values, list) or not values:
        raise ValueError(f"{key} must be a list of values")
    name, read = _SWEPT[key]
    try:
        return Axis(name, sorted({read(value) for value in values}))
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None


def _switch(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{value!r} is neither true nor false")
    return value


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{value!r} is not a whole number of at least 1")
    return value


#: The keys of ds_nvme_tune: the setting that each stands for, and how its values are read.
_SWEPT: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "block_size": ("block_size", lambda value: parse_size(value) if isinstance(value, str) else _whole(value)),
    "queue_depth": ("queue_depth", _whole),
    "io_parallel": ("intra_op_parallelism", _whole),
    "sequential_requests": ("overlap_events", lambda value: not _switch(value)),
    "single_submit": ("single_submit", _switch),
}
