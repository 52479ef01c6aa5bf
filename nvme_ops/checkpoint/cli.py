"""Inspects and converts checkpoints: safetensors, files of torch.save, shards.

Also inspects folders of DCP.

for example:
  nvme-checkpoint info model.safetensors           names, dtypes, shapes, sizes
  nvme-checkpoint verify checkpoints/step-1000     every byte, by its checksums
  nvme-checkpoint diff old.pt new.pt               which tensors differ
  nvme-checkpoint convert model.pt model.safetensors
  nvme-checkpoint convert Llama-3-8B Llama-3-8B    its .bin files, to
                                                   safetensors beside them
  nvme-checkpoint convert --to mxfp4 Llama-3-8B Llama-3-8B-MXFP4
                                                   weights in 4 bits, for vLLM
  nvme-checkpoint clean checkpoints                what killed saves have left

exit status: 0; 1 when verify finds damage, or nothing to compare with, or diff
a difference; 2 for wrong arguments and files that cannot be read
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from nvme_ops import __version__
from nvme_ops.base.command_line import command, command_line, in_flags, say
from nvme_ops.base.progress import byte_bar
from nvme_ops.base.text import columns_text, fitted, printable, share_words, size_words
from nvme_ops.checkpoint import FORMATS
from nvme_ops.filesystem.publication import OpenFiles
from nvme_ops.formats import KINDS
from nvme_ops.formats.contents import Contents

_FLAGS = {
    "to=": "--to",
    "exclude=": "--exclude",
    "format=": "--format",
    "max_shard_size": "--max-shard-size",
    "checksums=False": "--no-checksums",
}


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the flags."""
    made = command_line("nvme-checkpoint", __doc__ or "")
    made.add_argument("--version", action="version", version=f"nvme-checkpoint {__version__}")
    commands = made.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, words, paths in (
        ("info", "what it contains; reads only the headers of files", ["path"]),
        ("verify", "check every byte against the checksums", ["path"]),
        ("diff", "which tensors of two checkpoints differ", ["first", "second"]),
    ):
        command = commands.add_parser(name, help=words, description=words)
        for path in paths:
            command.add_argument(path, metavar=path.upper(), help="a file, an index, or a folder")
        if name == "verify":
            command.add_argument("more", metavar="MORE", nargs="*", help="further ones")
        command.add_argument("--format", choices=FORMATS, help="instead of the format that the name implies")
    words = "write the tensors in another format, in bounded memory"
    command = commands.add_parser("convert", help=words, description=words)
    command.add_argument("source", metavar="SOURCE", help="a file, an index, or a folder; it stays as it is")
    words = "a .safetensors, .pt or .bin file, or a folder for several safetensors files"
    command.add_argument("target", metavar="TARGET", help=words)
    command.add_argument("--key", default="", metavar="NAME", help="the entry of a .pt file that has the tensors")
    command.add_argument("--format", choices=FORMATS, help="of TARGET, instead of the one that its name implies")
    command.add_argument("--max-shard-size", metavar="SIZE", help="of each of several files: 5GB")
    words = "pack the model in folder SOURCE in the layout of compressed-tensors, into a new folder"
    command.add_argument("--to", choices=KINDS, help=words)
    words = "tensors, or patterns, that --to leaves as they are, as it does the head, embeddings and routers"
    command.add_argument("--exclude", nargs="+", default=[], metavar="NAME", help=words)
    command.add_argument("--no-checksums", action="store_true", help="store no checksums")
    command.add_argument("--no-verify", action="store_true", help="do not first compare the source's checksums")
    words = "remove what killed saves left in a folder; files of running saves are kept"
    command = commands.add_parser("clean", help=words, description=words)
    command.add_argument("folders", metavar="FOLDER", nargs="+")
    command.add_argument("--dry-run", action="store_true", help="only list")
    for command in commands.choices.values():
        command.add_argument("--json", action="store_true", help="one JSON document instead of text")
    return made


@command("nvme-checkpoint")
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    args = parser().parse_args(argv)
    commands = {"info": _info, "verify": _verify, "diff": _diff, "convert": _convert, "clean": _clean}
    status = 0
    try:
        for result in commands[args.command](args):
            if args.json:
                print(json.dumps(result.document, indent=2, default=asdict))
            else:
                for line in result.lines:
                    print(printable(line))
            status = max(status, result.status)
    except (OSError, ValueError, ImportError) as error:
        say(f"nvme-checkpoint: {in_flags(error, _FLAGS)}")
        return 2
    return status


class _Result(NamedTuple):
    """What a command has found, for programs and for people, and its exit status."""

    document: Any
    lines: Iterable[str]
    status: int = 0


def _info(args: argparse.Namespace) -> Iterator[_Result]:
    from nvme_ops.checkpoint.contents import contents

    saved = contents(args.path, args.format)
    yield _Result(saved, _listing(saved))


def _listing(saved: Contents) -> Iterator[str]:
    kept = sum(item.checksum is not None for item in saved.tensors)
    yield f"{saved.format}: {len(saved.tensors)} tensors, {size_words(saved.bytes)}, {kept} with checksums"
    for key, text in saved.metadata.items():
        yield from fitted(printable(f"  {key}: {text if len(text) <= 200 else text[:200] + '...'}")).split("\n")
    lines = [["", "dtype", "shape", ""]]
    lines += [[item.name, item.dtype, str(list(item.shape)), size_words(item.bytes)] for item in saved.items]
    yield from columns_text(lines).split("\n")


def _verify(args: argparse.Namespace) -> Iterator[_Result]:
    from nvme_ops.checkpoint.contents import contents, damaged

    for path in (args.path, *args.more):
        with OpenFiles() as files:  # so that no save changes what was listed
            saved = contents(path, args.format, files)
            checked = [item for item in saved.items if item.checksum is not None]
            with byte_bar(sum(item.bytes for item in checked), "verify") as advance:
                wrong = damaged(saved, advance, files)
        tensors = sum(item.checksum is not None for item in saved.tensors)  # data.pkl is checked, too, but is none
        bare = len(saved.tensors) - tensors
        lines = [*(f"DAMAGED {name}" for name in wrong), _verdict(saved, bool(checked), tensors, bare, wrong)]
        document: dict[str, Any] = {"checked": tensors, "without_checksum": bare, "damaged": wrong}
        if args.more:
            lines, document = [f"{path}: {line}" for line in lines], {"path": path, **document}
        yield _Result(document, lines, 1 if wrong or (saved.items and not checked) else 0)


def _verdict(saved: Contents, any_checked: bool, checked: int, bare: int, wrong: Sequence[str]) -> str:
    if saved.items and not any_checked:
        return "[NO CHECKSUMS] it was saved by another program, or without checksums: nothing to compare with"
    rest = f"; {bare} have no checksum" if bare else ""
    if wrong:
        names = {item.name for item in saved.tensors}
        parts = f"{checked} tensors" + ("" if names.issuperset(wrong) else " and what describes them")
        return f"[DAMAGED] {len(wrong)} of {parts} are not what was saved{rest}"
    return f"[OKAY] {checked} tensors, {size_words(saved.bytes)}, are what was saved{rest}"


def _clean(args: argparse.Namespace) -> Iterator[_Result]:
    from nvme_ops.checkpoint.leftovers import clean

    sizes = {path: size for folder in args.folders for path, size in clean(folder, args.dry_run).items()}
    lines = [f"{path}: {size_words(size)}" for path, size in sizes.items()]
    done = "would be removed" if args.dry_run else "removed"
    lines.append(f"{len(sizes)} files, {size_words(sum(sizes.values()))}, {done}" if sizes else "nothing was left here")
    yield _Result({"removed": not args.dry_run, "files": sizes}, lines)


def _diff(args: argparse.Namespace) -> Iterator[_Result]:
    from nvme_ops.checkpoint.contents import compare, contents

    with OpenFiles() as ours, OpenFiles() as theirs:
        first, second = contents(args.first, args.format, ours), contents(args.second, args.format, theirs)
        with byte_bar(first.bytes, "diff") as advance:
            difference = compare(first, second, advance, ours, theirs)
    lines = [f"only in the first: {name}" for name in difference.only_first]
    lines += [f"only in the second: {name}" for name in difference.only_second]
    lines += [f"dtype or shape differs: {name}" for name in difference.described]
    lines += [f"values differ: {name}" for name in difference.values]
    yield _Result(difference, lines or [f"the same {len(first.tensors)} tensors"], int(bool(difference)))


def _convert(args: argparse.Namespace) -> Iterator[_Result]:
    from nvme_ops.checkpoint.convert import convert
    from nvme_ops.checkpoint.request import listed

    done = convert(
        args.source,
        args.target,
        key=args.key,
        format=args.format,
        max_shard_size=args.max_shard_size,
        checksums=not args.no_checksums,
        verify=not args.no_verify,
        to=args.to,
        exclude=args.exclude,
        on_progress=lambda total: byte_bar(total, "convert"),
    )
    lines = [f"{name}: the same tensor as {stored}, which is stored" for name, stored in done.tied.items()]
    if done.kept:
        lines.append(f"{size_words(sum(done.kept.values()))} of matrices stay as they are: {listed(done.kept)}")
    error = f"; {share_words(done.error)} off (root mean square of the packed values)" if args.to else ""
    yield _Result(done, [*lines, f"[OKAY] {done.path}: {done.tensors} tensors, {size_words(done.bytes)}{error}"])


if __name__ == "__main__":
    sys.exit(main())
