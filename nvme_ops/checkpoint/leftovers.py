"""Finds what killed saves left in a folder, and nothing that a running save uses."""

from __future__ import annotations

import os
from contextlib import suppress

from nvme_ops.checkpoint import FORMATS
from nvme_ops.errors import FormatError
from nvme_ops.formats import integrity
from nvme_ops.formats.safetensors_format import read as read_header
from nvme_ops.formats.sharded_index import read_index, shards_of
from nvme_ops.storage import publication
from nvme_ops.storage.files import is_abandoned, lock_files, locked

_INDEX = FORMATS["sharded"][1][0]


def leftovers(folder: str) -> list[str]:
    """Returns temporary files whose writer is gone, locks that nobody holds, and shards that their index omits.

    Includes the files that ``save(recycle=True)`` keeps to write the next checkpoint over.

    A shard counts only if its header says that it belongs to another save than the index. Data files of a DCP
    checkpoint are left to its next save: what it still needs is in ``.metadata``, a pickle, which is not loaded here.
    """
    found = [path for path in publication.hidden(folder) if is_abandoned(path)]
    for name in os.listdir(folder):
        if name.endswith(_INDEX):
            with suppress(OSError, FormatError), locked(os.path.join(folder, name)):
                found += _unnamed(folder, name)
    found += [path for path in lock_files(folder) if is_abandoned(path)]
    return sorted(found)


def _unnamed(folder: str, name: str) -> list[str]:
    index = read_index(os.path.join(folder, name))
    if index.save is None:
        return []
    named = set(index.places.values())
    others = [os.path.join(folder, each) for each in shards_of(folder, name.removesuffix(_INDEX)) if each not in named]
    return [path for path in others if _save_of(path) not in (None, index.save)]


def _save_of(path: str) -> str | None:
    """Returns the id of the save that a shard belongs to; None if it does not say."""
    try:
        with publication.opened(path) as fd:
            return read_header(fd, path).metadata.get(integrity.SAVE)
    except (OSError, FormatError):
        return None
