"""Removes what killed saves left in a folder, and nothing that a running save uses."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress

from nvme_ops.base.errors import FormatError
from nvme_ops.checkpoint import FORMATS
from nvme_ops.filesystem import publication
from nvme_ops.filesystem.files import abandoned, lock_files, locked
from nvme_ops.formats import integrity
from nvme_ops.formats.safetensors_format import read as read_header
from nvme_ops.formats.sharded_index import read_index, shards_of

_INDEX = FORMATS["sharded"][0]


def clean(folder: str, dry_run: bool = False) -> dict[str, int]:
    """Removes temporary files whose writer is gone, locks that nobody holds, and shards that their index omits.

    Includes the files that ``save(recycle=True)`` keeps to write the next checkpoint over. Each file is removed under
    the lock that its next user would take: names are used again. Returns the paths, and the sizes in bytes.

    A shard counts only if its header says that it belongs to another save than the index. Data files of a DCP
    checkpoint are left to its next save: what it still needs is in ``.metadata``, a pickle, which is not loaded here.
    """
    sizes: dict[str, int] = {}

    def take(path: str) -> None:
        sizes[path] = os.path.getsize(path)
        if not dry_run:
            os.unlink(path)

    for path in publication.hidden(folder):
        with suppress(OSError), abandoned(path):
            take(path)
    for name in os.listdir(folder):
        index = os.path.realpath(os.path.join(folder, name))
        if name.endswith(_INDEX) and os.path.dirname(index) == os.path.realpath(folder):
            _take_unnamed(index, folder, take)
    for path in lock_files(folder):
        with suppress(OSError), abandoned(path):
            take(path)
    return dict(sorted(sizes.items()))


def _take_unnamed(path: str, folder: str, take: Callable[[str], None]) -> None:
    """Takes the shards that an index omits, while saves to it wait; none where the file system has no locks."""
    with suppress(OSError, FormatError), locked(path) as lock:
        index = read_index(path)
        if index.save is None or not lock.excludes():
            return
        named = set(index.places.values())
        for name in shards_of(folder, os.path.basename(path).removesuffix(_INDEX)):
            shard = os.path.join(folder, name)
            if name not in named and _save_of(shard) not in (None, index.save):
                take(shard)


def _save_of(path: str) -> str | None:
    """Returns the id of the save that a shard belongs to; None if it does not say."""
    try:
        with publication.opened(path) as fd:
            return read_header(fd, path).metadata.get(integrity.SAVE)
    except (OSError, FormatError):
        return None
