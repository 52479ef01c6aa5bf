"""The command ``nvme-bench``: ds_io's flags, with the same meaning, and more of our own; ``run`` does the work."""

from __future__ import annotations

import argparse
import inspect
import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass

from nvme_ops import __version__
from nvme_ops.base.command_line import command_line, count, listed, positive, say, size
from nvme_ops.base.settings import Settings
from nvme_ops.measure.engines import ENGINES, gpus
from nvme_ops.measure.stop import measuring
from nvme_ops.measure.sweep import SWEPT, combinations
from nvme_ops.measure.tables import add_outputs, check_outputs, deliver

_SWEPT = ", ".join(SWEPT).replace("_", "-")


@dataclass(frozen=True)
class Workplace:
    """Where one process works: a folder, and the number of the device that it maps to."""

    folder: str
    device: int


def parser() -> argparse.ArgumentParser:
    """Moves tensors between files and memory by all engines asked for.

    All work on the same file in interleaved rounds. Says how fast each was, and at
    what cost. Writes by default; --read reads.

    engines:
    {engines}

    Examples:
      nvme-bench --folder /mnt/nvme --read
      nvme-bench --folder /mnt/nvme --read --engine all   beside torch and Python
      nvme-bench --folder /mnt/nvme --sweep block-size=64K,1M queue-depth=1,32,128
      nvme-bench --folder-to-device-mapping /mnt/a:0 /mnt/b:1 --read --gpu --scaling
      nvme-bench explain /mnt/nvme               what limits, and what to change
      nvme-bench explain model.safetensors       the same for a file, only read
      nvme-bench workload resnet50 --folder /mnt/nvme   accelerators kept busy

    exit status: 0; 1 when an engine moved wrong bytes; 2 for wrong arguments and
    for folders that cannot be used or lack the space; 130 after Ctrl-C, which
    prints what was measured until then
    """
    engines = listed(((name, engine.words) for name, engine in ENGINES.items()), 12)
    made = command_line("nvme-bench", inspect.cleandoc(parser.__doc__ or "").format(engines=engines))
    made.usage = (
        "nvme-bench --folder DIR [--read] [options]\n"
        "       nvme-bench --folder-to-device-mapping DIR:N [DIR:N ...] [options]\n"
        "       nvme-bench explain FILE|DIR [options]\n"
        "       nvme-bench workload JOB [JOB ...] --folder DIR [options]"
    )
    where = made.add_argument_group("where").add_mutually_exclusive_group(required=True).add_argument
    where("--folder", metavar="DIR", help="a folder for all processes")
    words = "folders, each with the number of the GPU that its process uses (any number on the CPU)"
    where("--folder-to-device-mapping", nargs="+", action="extend", metavar="DIR:N", help=words)
    what = made.add_argument_group("what").add_argument
    words = "engines, listed below, or all"
    what("--engine", dest="engines", nargs="+", default=["aio_handle"], metavar="NAME", help=words)
    words = "bytes that each process moves (default 1G)"
    what("--io-size", dest="size", type=size, default="1G", metavar="SIZE", help=words)
    what("--read", dest="write", action="store_false", help="read (default: write)")
    what("--multi-process", type=positive, default=1, metavar="N", help="processes in --folder (default 1)")
    what("--loops", type=positive, default=3, metavar="N", help="timed passes (default 3)")
    what("--warmup-loops", type=count, default=1, metavar="N", help="untimed passes before (default 1)")
    what("--validate", action="store_true", help="handles read again what they moved and compare")
    words = "a file for every pass"
    what("--different-file-each-iteration", dest="different_files", action="store_true", help=words)
    what("--cached", action="store_true", help="read a file that is in the page cache")
    how = made.add_argument_group("how").add_argument
    how("--block-size", type=size, default="1M", metavar="SIZE", help="bytes of one request (default 1M)")
    how("--queue-depth", type=positive, default=128, metavar="N", help="requests in flight (default 128)")
    how("--single-submit", action="store_true", help="every request in a system call of its own")
    how("--sequential-requests", action="store_true", help="handles with overlap_events=False (default: True)")
    words = "intra_op_parallelism of a handle (default 1)"
    how("--io-parallel", type=positive, default=1, metavar="N", help=words)
    words = f"all combinations of these values; NAME: {_SWEPT}"
    how("--sweep", nargs="+", action="extend", default=[], metavar="NAME=A,B", help=words)
    memory = made.add_argument_group("memory").add_argument
    memory("--device", choices=["cpu", "cuda"], default="cpu", help="where tensors are (default cpu)")
    memory("--gpu", dest="device", action="store_const", const="cuda", help="the same as --device cuda")
    memory("--pageable", action="store_true", help="an ordinary CPU tensor (default: a page-locked one)")
    memory("--use-gds", action="store_true", help="gds_handle in place of aio_handle; with a GPU")
    out = made.add_argument_group("comparison and output").add_argument
    out("--scaling", action="store_true", help="also 1, 2, ... of the folders, against the sum of each alone")
    add_outputs(out, ".json, a picture's")
    made.add_argument("--version", action="version", version=f"nvme-bench {__version__}")
    return made


def parse(argv: Sequence[str]) -> Namespace:
    """Returns the flags and what follows: ``places``, ``settings`` (several for a sweep), ``swept``, ``files``.

    Exits with status 2 and a message on wrong arguments.
    """
    made = parser()
    args = made.parse_args(argv)
    args.words, args.gpu = list(argv), args.device == "cuda"
    try:
        _check(args)
        args.places = _places(args)
        args.settings, args.swept = _settings(args)
    except ValueError as error:
        made.error(str(error))
    # of each process
    args.files = args.loops + max(1, args.warmup_loops) if args.different_files else 1
    return args


def _check(args: Namespace) -> None:
    args.engines = [name.replace("-", "_") for name in args.engines]
    if unknown := [name for name in args.engines if name not in (*ENGINES, "all")]:
        raise ValueError(f"--engine {unknown[0]}: there are {', '.join(ENGINES)}, and all")
    wanted = [name for name, engine in ENGINES.items() if args.gpu or not engine.gpu_only]
    args.engines = wanted if "all" in args.engines else list(dict.fromkeys(args.engines))
    if args.use_gds:
        if not args.gpu:
            raise ValueError("--use-gds goes with --device cuda")
        args.engines = list(dict.fromkeys("gds_handle" if name == "aio_handle" else name for name in args.engines))
    if args.cached and args.write:
        raise ValueError("--cached goes with --read")
    check_outputs(args.output, pictures=True)


def _places(args: Namespace) -> list[Workplace]:
    if args.folder is not None:
        count = max(1, gpus()) if args.gpu else args.multi_process
        # as ds_io: process N uses GPU N, or begins again at 0 if there are fewer
        places = [Workplace(args.folder, number % count) for number in range(args.multi_process)]
    else:
        if args.multi_process not in (1, len(args.folder_to_device_mapping)):
            raise ValueError("--multi-process: --folder-to-device-mapping has one process for each folder")
        places = []
        for entry in args.folder_to_device_mapping:
            folder, separator, device = entry.rpartition(":")
            if not separator or not device.isdigit():
                raise ValueError(f"--folder-to-device-mapping {entry}: not FOLDER:NUMBER")
            places.append(Workplace(folder, int(device)))
    for place in places:
        if not os.path.isdir(place.folder):
            raise ValueError(f"{place.folder}: no such folder")
    if args.gpu:
        _check_gpus(places, args.pageable)
    if args.scaling and len({place.folder for place in places}) < 2:
        raise ValueError("--scaling needs several folders: --folder-to-device-mapping")
    return places


def _check_gpus(places: list[Workplace], pageable: bool) -> None:
    if not gpus():
        raise ValueError("--device cuda: torch.cuda is not available: no GPU, or torch without CUDA")
    if pageable:
        raise ValueError("--pageable is about CPU memory: leave out --device cuda")
    for place in places:
        if place.device >= gpus():
            raise ValueError(f"GPU {place.device} of {place.folder}: there are {gpus()}, from 0 on")


def _settings(args: Namespace) -> tuple[list[Settings], list[str]]:
    """Returns all combinations of the values of --sweep, and the names of the settings that differ."""
    values: list[tuple[str, list[str]]] = []
    for entry in args.sweep:
        name, _, texts = entry.partition("=")
        if not texts or name.replace("-", "_") not in SWEPT:
            raise ValueError(f"--sweep {entry}: not NAME=VALUE,...; names are {_SWEPT}")
        values.append((name, texts.split(",")))
    base = Settings(
        args.block_size, args.queue_depth, args.single_submit, not args.sequential_requests, args.io_parallel
    )
    try:
        settings = combinations(values, base)
    except ValueError as error:
        raise ValueError(f"--sweep {error}") from None
    if len(settings) > 1 and args.scaling:
        raise ValueError("--sweep and --scaling are two runs")
    return settings, [SWEPT[name.replace("-", "_")][0] for name, _ in values]


@measuring("nvme-bench")
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0; 1 for wrong data; 2 for wrong arguments and unusable folders; 130 after Ctrl-C."""
    argv = argv or []
    if argv and argv[0] == "explain":
        from nvme_ops.measure import explain

        return explain.main(argv[1:])
    if argv and argv[0] == "workload":
        from nvme_ops.measure.workload import cli as workload

        return workload.main(argv[1:])
    args = parse(argv)
    from nvme_ops.measure import run

    result = run.run(args)
    deliver(result.options, run.as_document(result), run.text(result))
    if result.wrong:
        say(f"nvme-bench: wrong data: {', '.join(result.wrong)}")
    return 130 if result.interrupted else 1 if result.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
