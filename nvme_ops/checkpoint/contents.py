"""Lists, verifies and compares what checkpoints contain, tensor by tensor, without loading them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from nvme_ops.checkpoint.format import format_of
from nvme_ops.filesystem.publication import OpenFiles, opened
from nvme_ops.formats.contents import Contents, Item
from nvme_ops.formats.safetensors_format import DTYPES
from nvme_ops.io.file import shared_handle
from nvme_ops.memory.pieces import checksums_in_files
from nvme_ops.memory.ring import Place, Ring

_Reading: TypeAlias = Callable[[str], AbstractContextManager[int]]
OnProgress = Callable[[int], None]  # called with the number of further bytes that were read


@dataclass
class Difference:
    """The differences between two checkpoints."""

    only_first: list[str] = field(default_factory=list)
    only_second: list[str] = field(default_factory=list)
    described: list[str] = field(default_factory=list)  # texts that name a tensor and its two dtypes and shapes
    values: list[str] = field(default_factory=list)  # names of tensors whose bytes differ

    def __bool__(self) -> bool:
        """Returns whether there is any difference."""
        return bool(self.only_first or self.only_second or self.described or self.values)


def contents(path: str | os.PathLike[str], format: str | None = None, files: OpenFiles | None = None) -> Contents:
    """Lists the contents of a file, an index, a folder, or a DCP checkpoint. Raises as ``load`` does.

    ``files`` keeps what was listed open, for ``damaged`` and ``compare``: a save may replace it meanwhile.
    """
    if files is None:
        with OpenFiles() as files:
            return contents(path, format, files)
    name = os.fspath(path)
    if format is None and os.path.exists(os.path.join(name, ".metadata")):
        from nvme_ops.checkpoint.dcp.contents import described  # slow to import

        return described(name, files)[0]
    return format_of(name, format).contents(name, files)


def damaged(listing: Contents, on_progress: OnProgress = lambda _: None, files: OpenFiles | None = None) -> list[str]:
    """Returns the names of what is damaged: bytes that do not match their checksums. Skips tensors without one."""
    wrong = list(listing.damaged)
    reading = _reading(listing, files)
    for path, group in itertools.groupby(listing.items, lambda item: item.path):
        items = [(item, *item.checksum) for item in group if item.checksum is not None]
        with reading(path) as fd:
            places = [Place(fd, item.start, item.bytes) for item, _, _ in items]
            values = checksums_in_files(shared_handle(), places, [kind for _, kind, _ in items], on_progress)
        wrong += [item.name for (item, _, expected), value in zip(items, values, strict=True) if value != expected]
    return wrong


def _reading(saved: Contents, files: OpenFiles | None) -> _Reading:
    """Returns what opens a listed file. Those of DCP, perhaps thousands, are kept while ``.metadata`` is open."""
    return opened if files is None or saved.format == "dcp" else files.opened


def compare(
    first: Contents,
    second: Contents,
    on_progress: OnProgress = lambda _: None,
    ours: OpenFiles | None = None,
    theirs: OpenFiles | None = None,
) -> Difference:
    """Compares names, dtypes, shapes and bytes, also across formats. ``on_progress`` counts the bytes of one side.

    Raises ValueError if only one is a DCP checkpoint, in which each tensor's bytes are an archive.
    """
    if (first.format == "dcp") != (second.format == "dcp"):
        raise ValueError("a DCP checkpoint can only be compared with another one: convert it by dcp_to_torch_save")
    result = Difference()
    alike = first.format == second.format
    some, more = (first.items, second.items) if alike else (first.tensors, second.tensors)
    others = {item.name: item for item in more}
    names = {item.name for item in some}
    result.only_second = [name for name in others if name not in names]
    pairs: list[tuple[Item, Item]] = []
    for item in some:
        other = others.get(item.name)
        if other is None:
            result.only_first.append(item.name)
        elif (_in_torch(item.dtype), item.shape) != (_in_torch(other.dtype), other.shape):
            result.described.append(f"{item.name}: {item.dtype} {list(item.shape)}, {other.dtype} {list(other.shape)}")
        elif item.bytes != other.bytes:
            result.values.append(item.name)
        else:
            pairs.append((item, other))
    for _, group in itertools.groupby(pairs, lambda pair: (pair[0].path, pair[1].path)):
        result.values += _different(list(group), on_progress, _reading(first, ours), _reading(second, theirs))
    return result


def _in_torch(dtype: str) -> str:
    """Returns torch's name of a dtype."""
    return str(DTYPES.get(dtype, dtype)).removeprefix("torch.")


def _different(
    pairs: Sequence[tuple[Item, Item]], on_progress: OnProgress, reading: _Reading, reading_other: _Reading
) -> list[str]:
    """Returns the names of items of one file whose bytes differ from those of their counterparts in another file."""
    ring, different = Ring(), dict[str, None]()  # in order
    ours, theirs = [item for item, _ in pairs], [other for _, other in pairs]
    owners = [item.name for item in ours for _ in range(0, item.bytes, ring.piece)]
    with reading(ours[0].path) as fd, reading_other(theirs[0].path) as other_fd:
        pieces = zip(owners, _pieces(ring, fd, ours), _pieces(Ring(), other_fd, theirs), strict=True)
        for name, piece, against in pieces:
            if name not in different and not torch.equal(piece, against):
                different[name] = None
            on_progress(piece.numel())
    return list(different)


def _pieces(ring: Ring, fd: int, items: Sequence[Item]) -> Iterator[torch.Tensor]:
    """Yields the bytes of the items, each piece valid until the next."""
    return ring.read(shared_handle(), [Place(fd, item.start, item.bytes) for item in items])
