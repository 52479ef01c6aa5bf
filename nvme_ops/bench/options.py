"""The flags of ``nvme-bench``: ds_io's, with their meaning, and ours."""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from nvme_ops.arguments import check_output, count, positive
from nvme_ops.bench.engines import ENGINES
from nvme_ops.bench.settings import Settings
from nvme_ops.text import parse_size

_DESCRIPTION = """\
Moves tensors between files and memory by all engines asked for, on the same file in interleaved rounds, and says how
fast each was, at what cost, and how close to fio at its best. Writes by default; --read reads.
"""
_EPILOG = """\
examples:
  nvme-bench --folder /mnt/nvme --read                             this package, 1 GiB
  nvme-bench --folder /mnt/nvme --read --engine all                beside torch, safetensors, DeepSpeed, fio, ...
  nvme-bench --folder /mnt/nvme --sweep block_size=64K,1M,8M queue_depth=1,32,128 --plot sweep.png
  nvme-bench --folder_to_device_mapping /mnt/nvme0:0 /mnt/nvme1:1 --read --gpu --scaling
  nvme-bench explain /mnt/nvme                                     what limits, and what to change
  nvme-bench explain model.safetensors                             the same for a file, which is only read

exit status: 0; 1 when an engine moved wrong bytes; 2 for wrong arguments and for folders that cannot be used or lack
the space; 130 after Ctrl-C, which prints what was measured until then
"""
#: What --sweep takes, by the name of the setting it changes.
_SWEEPABLE = {
    "block_size": "block_size",
    "queue_depth": "queue_depth",
    "io_parallel": "intra_op_parallelism",
    "single_submit": "single_submit",
    "sequential_requests": "overlap_events",
}
_SWITCHES = {"0": False, "1": True, "false": False, "true": True}


@dataclass(frozen=True)
class Place:
    """Where one process works: a folder, and the number of the device that it maps to."""

    folder: str
    device: int


@dataclass(frozen=True)
class Options:
    """What a run shall do, checked."""

    places: list[Place]
    size: int
    write: bool
    engines: list[str]
    settings: list[Settings]  # several for a sweep
    swept: list[str]
    loops: int
    warmup_loops: int
    validate: bool
    gpu: bool
    use_gds: bool
    slow_bounce_buffer: bool
    cached: bool
    pageable: bool
    different_files: bool
    reference: bool
    scaling: bool
    json: str | None = None
    csv: str | None = None
    plot: str | None = None
    words: list[str] = field(default_factory=list)

    @property
    def files(self) -> int:
        """How many each process works on."""
        return self.loops + max(1, self.warmup_loops) if self.different_files else 1


def parser() -> argparse.ArgumentParser:
    """The arguments of ``nvme-bench``."""
    made = argparse.ArgumentParser(
        prog="nvme-bench",
        description=_DESCRIPTION,
        epilog=_engine_words() + "\n" + _EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    where = made.add_argument_group("where").add_mutually_exclusive_group(required=True)
    where.add_argument("--folder", metavar="DIR", help="a folder for all processes")
    where.add_argument(
        "--folder_to_device_mapping", nargs="+", action="extend", metavar="DIR:N",
        help="folders, each with the number of the GPU that its process uses (on the CPU: of the process)",
    )  # fmt: skip
    what = made.add_argument_group("what")
    what.add_argument(
        "--engine", nargs="+", default=["aio_handle"], metavar="NAME", help="engines, listed below, or all"
    )
    what.add_argument("--io_size", default="1G", metavar="SIZE", help="bytes that each process moves (default 1G)")
    what.add_argument("--read", action="store_true", help="read (default: write)")
    what.add_argument(
        "--multi_process", type=positive, default=1, metavar="N", help="processes in --folder (default 1)"
    )
    what.add_argument("--loops", type=positive, default=3, metavar="N", help="timed passes (default 3)")
    what.add_argument("--warmup_loops", type=count, default=1, metavar="N", help="untimed passes before (default 1)")
    what.add_argument("--validate", action="store_true", help="handles read again what they moved and compare")
    what.add_argument("--different_file_each_iteration", action="store_true", help="a file for every pass")
    what.add_argument("--cached", action="store_true", help="read a file that lies in the page cache")
    how = made.add_argument_group("how")
    how.add_argument("--block_size", default="1M", metavar="SIZE", help="bytes of one request (default 1M)")
    how.add_argument("--queue_depth", type=positive, default=128, metavar="N", help="requests in flight (default 128)")
    how.add_argument("--single_submit", action="store_true", help="every request in a system call of its own")
    how.add_argument(
        "--sequential_requests", action="store_true", help="handles with overlap_events=False (default: True)"
    )
    how.add_argument(
        "--io_parallel",
        type=positive,
        default=1,
        metavar="N",
        help="intra_op_parallelism of a handle (default 1)",
    )
    how.add_argument(
        "--sweep", nargs="+", action="extend", default=[], metavar="NAME=A,B",
        help=f"all combinations of these values; NAME: {', '.join(_SWEEPABLE)}",
    )  # fmt: skip
    memory = made.add_argument_group("memory")
    memory.add_argument("--pageable", action="store_true", help="an ordinary CPU tensor (default: a page-locked one)")
    memory.add_argument("--gpu", action="store_true", help="GPU memory")
    memory.add_argument("--use_gds", action="store_true", help="through cuFile where an engine can; with --gpu")
    memory.add_argument(
        "--slow_bounce_buffer", action="store_true",
        help="handles go through host memory that is page-locked anew for every pass; with --gpu",
    )  # fmt: skip
    out = made.add_argument_group("comparison and output")
    out.add_argument("--no_reference", action="store_true", help="leave out the row of fio at its best")
    out.add_argument(
        "--scaling", action="store_true", help="also 1, 2, ... of the folders, against the sum of each alone"
    )
    out.add_argument("--json", metavar="FILE", help="every figure of every pass; - for standard output, then no text")
    out.add_argument("--csv", metavar="FILE", help="one line for every pass")
    out.add_argument("--plot", metavar="FILE.png", help="throughput by setting, engine or number of devices")
    made.add_argument("--version", action="version", version=f"nvme-bench {_version()}")
    return made


def parse(words: Sequence[str]) -> Options:
    """Exits with status 2 and a message on wrong arguments."""
    made = parser()
    given = made.parse_args(words)
    try:
        return _checked(given, list(words))
    except ValueError as error:
        made.error(str(error))


def _checked(given: argparse.Namespace, words: list[str]) -> Options:
    engines = list(ENGINES) if "all" in given.engine else list(dict.fromkeys(given.engine))
    if unknown := [name for name in engines if name not in ENGINES]:
        raise ValueError(f"--engine {unknown[0]}: there are {', '.join(ENGINES)}, and all")
    if "all" in given.engine and not given.gpu:
        engines = [name for name in engines if not ENGINES[name].gpu_only]
    places = _places(given)
    for flag, needs in (("use_gds", "gpu"), ("slow_bounce_buffer", "gpu"), ("cached", "read")):
        if getattr(given, flag) and not getattr(given, needs):
            raise ValueError(f"--{flag} goes with --{needs}")
    if given.gpu:
        _check_gpus(places, given.pageable)
    if given.scaling and len({place.folder for place in places}) < 2:
        raise ValueError("--scaling needs several folders: --folder_to_device_mapping")
    size, block = _size("--io_size", given.io_size), _size("--block_size", given.block_size)
    base = Settings(block, given.queue_depth, given.single_submit, not given.sequential_requests, given.io_parallel)
    settings, swept = _sweep(base, given.sweep)
    if len(settings) > 1 and given.scaling:
        raise ValueError("--sweep and --scaling are two runs")
    _check_outputs(given)
    return Options(
        places, size, not given.read, engines, settings, swept, given.loops, given.warmup_loops, given.validate,
        given.gpu, given.use_gds, given.slow_bounce_buffer, given.cached, given.pageable,
        given.different_file_each_iteration, not given.no_reference, given.scaling, given.json, given.csv, given.plot,
        words,
    )  # fmt: skip


def _places(given: argparse.Namespace) -> list[Place]:
    if given.folder is not None:
        places = [Place(given.folder, number) for number in range(given.multi_process)]
        if given.gpu:  # as ds_io: process N uses GPU N, as far as there are
            gpus = max(1, torch.cuda.device_count())
            places = [Place(place.folder, place.device % gpus) for place in places]
    else:
        if given.multi_process not in (1, len(given.folder_to_device_mapping)):
            raise ValueError("--multi_process: --folder_to_device_mapping has one process for each folder")
        places = []
        for entry in given.folder_to_device_mapping:
            folder, separator, device = entry.rpartition(":")
            if not separator or not device.isdigit():
                raise ValueError(f"--folder_to_device_mapping {entry}: not FOLDER:NUMBER")
            places.append(Place(folder, int(device)))
    for place in places:
        if not os.path.isdir(place.folder):
            raise ValueError(f"{place.folder}: no such folder")
    return places


def _check_gpus(places: list[Place], pageable: bool) -> None:
    if not torch.cuda.is_available():
        raise ValueError("--gpu: torch.cuda is not available: no GPU, or torch without CUDA")
    if pageable:
        raise ValueError("--pageable is about CPU memory: leave out --gpu")
    there = torch.cuda.device_count()
    for place in places:
        if place.device >= there:
            raise ValueError(f"GPU {place.device} of {place.folder}: there are {there}, from 0 on")


def _sweep(base: Settings, entries: Sequence[str]) -> tuple[list[Settings], list[str]]:
    axes: dict[str, list[object]] = {}
    for entry in entries:
        name, separator, values = entry.partition("=")
        if not separator or not values or name not in _SWEEPABLE:
            raise ValueError(f"--sweep {entry}: not NAME=VALUE,...; names are {', '.join(_SWEEPABLE)}")
        if _SWEEPABLE[name] in axes:
            raise ValueError(f"--sweep {name}: twice; name all its values once")
        axes[_SWEEPABLE[name]] = [_swept_value(name, value) for value in values.split(",")]
    combinations = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    settings = [replace(base, **changes) for changes in combinations]  # type: ignore[arg-type]
    return list(dict.fromkeys(settings)), list(axes)


def _swept_value(name: str, text: str) -> object:
    if name in ("single_submit", "sequential_requests"):
        if text.lower() not in _SWITCHES:
            raise ValueError(f"--sweep {name}: {text!r} is neither true nor false")
        return _SWITCHES[text.lower()] != (name == "sequential_requests")
    if name == "block_size":
        return _size("--sweep block_size", text)
    try:
        return positive(text)
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"--sweep {name}: {error}") from None


def _check_outputs(given: argparse.Namespace) -> None:
    for flag in ("json", "csv", "plot"):
        file = getattr(given, flag)
        if file == "-" and flag != "json":
            raise ValueError(f"--{flag} -: only --json can go to standard output")
        if file and file != "-":
            check_output(f"--{flag}", file)
    if given.plot:
        try:
            import matplotlib  # type: ignore[import-not-found,unused-ignore]  # noqa: F401
            from matplotlib.backend_bases import FigureCanvasBase  # type: ignore[import-not-found,unused-ignore]
        except ImportError:
            raise ValueError("--plot needs matplotlib: pip install matplotlib") from None
        kinds = sorted(FigureCanvasBase.get_supported_filetypes())
        if os.path.splitext(given.plot)[1][1:].lower() not in kinds:
            raise ValueError(f"--plot {given.plot}: a picture's name ends with one of {', '.join(kinds)}")


def _size(flag: str, text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise ValueError(f"{flag}: {error}") from None


def _engine_words() -> str:
    return "engines:\n" + "\n".join(f"  {name:12}{engine.words}" for name, engine in ENGINES.items()) + "\n"


def _version() -> str:
    from nvme_ops import __version__

    return __version__
