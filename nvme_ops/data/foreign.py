"""The index of files that other programs wrote: made once, kept beside them, and made again when they change."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from nvme_ops.checksums import checksums_of
from nvme_ops.data.index import DataFile, SampleIndex, read_index, write_index
from nvme_ops.errors import FormatError

_NAME = "foreign.nvmedata"


class Found(NamedTuple):
    """What a file holds: where its first record begins, and where each ends."""

    start: int
    ends: torch.Tensor


def index_of(
    kind: str, folder: str, names: Sequence[str], about: bytes, scan: Callable[[str, int], Found], more: dict[str, Any],
    of: str = "",
) -> SampleIndex:  # fmt: skip
    """Returns the kept index if it matches these files as they are now; else makes and keeps a new one.

    Args:
        kind: of the index.
        folder: that has the files.
        names: of the files, in the order of their records.
        about: whatever else the index depends on.
        scan: finds the records of a file, given its path and number.
        more: what else the index is to hold.
        of: the name of the file, if the index is for a single one, not for the folder.
    """
    name = f".{os.fsdecode(os.fsencode(of)[:200])}{'.' * bool(of)}{_NAME}"  # hidden: programs list these folders
    path = os.path.join(folder, name)
    found = [os.stat(os.path.join(folder, name)) for name in names]
    # A file that was written to in place may have its modification time put back, but not the time of its change.
    changes = repr([(each.st_ino, each.st_ctime_ns) for each in found]).encode()
    stamp = checksums_of([about + changes], "crc32c")[0]
    now = [(name, each.st_size, each.st_mtime_ns) for name, each in zip(names, found, strict=True)]
    try:
        kept = read_index(path)
        before = [(file.name, file.nbytes, file.stamp) for file in kept.files]
        if (kept.kind, kept.more.get("about"), before) == (kind, stamp, now):
            return kept
    except (FormatError, OSError):
        pass
    files, ends, records = [], [torch.empty(0, dtype=torch.int64, device="cpu")], 0
    for number, (name, nbytes, changed) in enumerate(now):
        start, its_ends = scan(os.path.join(folder, name), number)
        files.append(DataFile(name, nbytes, records, start, changed))
        ends.append(its_ends)
        records += len(its_ends)
    more = {**more, "about": stamp}
    index = SampleIndex(os.urandom(8).hex(), kind, records, files, more=more, ends=torch.cat(ends), path=path)
    try:
        write_index(path, index)
    except OSError as error:
        words = f"{folder}: its index cannot be kept and is made anew each time it is opened: {error}"
        warnings.warn(words, RuntimeWarning, stacklevel=5)
    return index
