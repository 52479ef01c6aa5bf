"""The command ``nvme-data``: makes, describes and verifies stores of samples."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from nvme_ops import __version__
from nvme_ops.base.command_line import command, command_line, in_flags, say, show, size
from nvme_ops.base.errors import FormatError
from nvme_ops.base.progress import byte_bar
from nvme_ops.base.text import MIB, printable, size_words
from nvme_ops.filesystem.files import make_folder

if TYPE_CHECKING:
    from nvme_ops.data import SampleStore

_FLAGS = {"overwrite=True": "--overwrite", "alignment must": "--alignment must", "a dtype": "--dtype"}
_AT_ONCE = 32 * MIB  # of samples that ``verify`` reads at once


def parser() -> argparse.ArgumentParser:
    """Makes, describes and verifies stores of samples for training.

    Examples:
      nvme-data convert imagenet/train /mnt/nvme/train     files; folders are labels
      nvme-data convert tokens.npy /mnt/nvme/tokens        each row a sample
      nvme-data convert t.bin /mnt/nvme/t --dtype uint16 --shape 2048
                                                           as from numpy.memmap
      nvme-data convert shards /mnt/nvme0/s /mnt/nvme1/s   over two devices
      nvme-data info /mnt/nvme/train                       samples, columns, files
      nvme-data verify /mnt/nvme/train                     reads every sample

    convert, info and verify take .parquet, tars and MDS shards too; verify compares
    checksums where there are any.

    exit status: 0; 1 when verify finds damage; 2 for wrong arguments and for files
    that cannot be read or written; 130 after Ctrl-C
    """
    made = command_line("nvme-data", parser.__doc__ or "")
    made.add_argument("--version", action="version", version=f"nvme-data {__version__}")
    commands = made.add_subparsers(dest="command", required=True, metavar="COMMAND")
    words = "make a store from a folder of files, a .npy, Parquet, tars (WebDataset) or MDS shards"
    command = commands.add_parser("convert", help=words, description=words)
    add = command.add_argument
    add("source", metavar="SOURCE")
    add("folders", metavar="FOLDER", nargs="+", help="where the store goes; made if it is missing")
    add("--shard-bytes", type=size, default="4G", metavar="SIZE", help="size of a data file (default 4G)")
    add("--alignment", type=int, metavar="BYTES", help="where samples begin: at multiples of it (default: by size)")
    add("--dtype", metavar="DTYPE", help="SOURCE is raw values of this NumPy dtype (numpy.memmap)")
    add("--shape", type=int, nargs="+", default=[], metavar="N", help="of a sample, with --dtype (default: one value)")
    add("--overwrite", action="store_true", help="replace an existing store")
    for name, words in (
        ("info", "describe a store; reads only its index"),
        ("verify", "read every sample, and compare checksums where there are any"),
    ):
        commands.add_parser(name, help=words, description=words).add_argument(
            "path", metavar="PATH", help="a store, or a folder of tars or MDS shards"
        )
    for subparser in commands.choices.values():
        subparser.add_argument("--json", action="store_true", help="one JSON document instead of text")
    return made


@command("nvme-data")
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    args = parser().parse_args(argv)
    try:
        return {"convert": _convert, "info": _info, "verify": _verify}[args.command](args)
    except (OSError, ValueError, TypeError, KeyError, ImportError) as error:
        say(f"nvme-data: {in_flags(error, _FLAGS)}")
        return 2


def _convert(args: argparse.Namespace) -> int:
    from nvme_ops.data import SampleStore, SampleWriter
    from nvme_ops.data.convert import convert, open_source

    if args.shape and args.dtype is None:
        raise ValueError("--shape is for --dtype")
    source = open_source(args.source, args.dtype, args.shape)
    if source.left_out:
        some = ", ".join(source.left_out[:3]) + (", ..." if len(source.left_out) > 3 else "")
        say(printable(f"nvme-data: not converted, {len(source.left_out)} in {args.source}: {some}"))
    for folder in args.folders:
        make_folder(folder)
    options = {name: getattr(args, name) for name in ("shard_bytes", "alignment", "overwrite")}
    options["class_names"] = source.class_names
    bar = byte_bar(source.nbytes, "convert")
    with SampleWriter(args.folders, source.columns, **options) as writer, bar as advance:
        count = convert(source, writer, advance)
    nbytes = SampleStore(args.folders[0]).nbytes
    if args.json:
        print(json.dumps({"samples": count, "bytes": nbytes, "folders": args.folders}, indent=2))
    else:
        show(f"{count} samples, {size_words(nbytes)}, in {', '.join(args.folders)}")
    return 0


def _info(args: argparse.Namespace) -> int:
    from nvme_ops.data import SampleStore

    with SampleStore(args.path) as store:
        index, paths = store.index, store._files.paths
        if store.columns:
            columns = [{"name": field.name, "dtype": "str" if field.text else field.kind, "shape": list(field.shape)}
                       for field in store.columns.all]  # fmt: skip
            words = list(map(str, store.columns.all))
        else:
            words = index.more.get("column_names", [])
            columns = [{"name": name} for name in words]
        files = [
            {"path": path, "bytes": file.nbytes, "samples": count}
            for path, file, count in zip(paths, index.files, index.counts(), strict=True)
        ]
        document: dict[str, Any] = {"kind": index.kind, "samples": len(store), "bytes": store.nbytes}
        document |= {
            "record_bytes": index.record_bytes,
            "alignment": index.alignment,
            "columns": columns,
            "class_names": store.class_names,
        }
        document["files"] = files
    if args.json:
        print(json.dumps(document, indent=2))
        return 0
    mean = f", {size_words(store.nbytes // len(store))} each" if len(store) else ""
    print(f"{index.kind}: {len(store)} samples, {size_words(store.nbytes)}{mean}")
    for word in words:
        show(f"  column {word}")
    if classes := document["class_names"]:
        some = ", ".join(classes[:10]) + (", ..." if len(classes) > 10 else "")
        show(printable(f"  {len(classes)} classes: {some}"))
    for entry in document["files"]:
        show(f"  {entry['path']}: {entry['samples']} samples, {size_words(entry['bytes'])}")
    return 0


def _verify(args: argparse.Namespace) -> int:
    from nvme_ops.data import SampleStore

    damaged: list[str] = []
    with SampleStore(args.path, verify=True) as store, byte_bar(store.nbytes, "verify") as advance:
        mean = store.nbytes / max(1, len(store))
        for numbers in store.ranges(_AT_ONCE):
            damaged += _damaged(store, numbers)
            advance(int(mean * numbers.stop) - int(mean * numbers.start))
        checked = store.index.checksums is not None
    if args.json:
        print(json.dumps({"samples": len(store), "checksums": checked, "damaged": damaged}, indent=2))
    else:
        for words in damaged:
            print(printable(f"DAMAGED {words}"))
        how = "are what was written" if checked else "can be read; there are no checksums to compare with"
        okay = f"[OKAY] {len(store)} samples, {size_words(store.nbytes)}, {how}"
        print(f"[DAMAGED] {len(damaged)} of {len(store)} samples" if damaged else okay)
    return 1 if damaged else 0


def _damaged(store: SampleStore, numbers: Sequence[int]) -> list[str]:
    """Reads samples, one by one if that fails together; returns a line for each that fails."""
    try:
        store.read(numbers)
    except (FormatError, EOFError, OSError) as error:
        if len(numbers) == 1:
            return [f"sample {numbers[0]}: {error}"]
        return [words for number in numbers for words in _damaged(store, [number])]
    return []


if __name__ == "__main__":
    sys.exit(main())
