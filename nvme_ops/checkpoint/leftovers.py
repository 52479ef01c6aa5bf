"""What killed saves have left in a folder: found, and removed, without harm to a save that lives."""

from __future__ import annotations

import os
from contextlib import suppress

from nvme_ops.checkpoint import FORMATS, between_processes, integrity
from nvme_ops.checkpoint.safetensors_format import read as read_header
from nvme_ops.checkpoint.sharded_index import read_index, shards_of
from nvme_ops.errors import FormatError
from nvme_ops.storage import atomic

_INDEX = FORMATS["sharded"][1][0]


def leftovers(folder: str) -> list[str]:
    """The paths of temporary files whose writer is gone, of locks that nobody holds, and of shards of no index.

    With them the files that ``save(recycle=True)`` keeps to write the next checkpoint over.

    A shard counts only where its header says that it is of another save than the index. Data of a DCP checkpoint are
    left to the next save, which knows what ``.metadata`` names without unpickling it here.
    """
    found = [path for path in [*atomic.litter(folder), *atomic.spares(folder)] if atomic.is_abandoned(path)]
    for name in os.listdir(folder):
        if name.endswith(_INDEX):
            with suppress(OSError, FormatError), between_processes.locked(os.path.join(folder, name)):
                found += _unnamed(folder, name)
    found += [path for path in between_processes.locks(folder) if atomic.is_abandoned(path)]
    return sorted(found)


def _unnamed(folder: str, name: str) -> list[str]:
    index = read_index(os.path.join(folder, name))
    if index.save is None:
        return []
    named = set(index.places.values())
    others = [os.path.join(folder, each) for each in shards_of(folder, name.removesuffix(_INDEX)) if each not in named]
    return [path for path in others if _save_of(path) not in (None, index.save)]


def _save_of(path: str) -> str | None:
    """Which save a shard is of; None where it does not say."""
    try:
        with atomic.opened(path) as fd:
            return read_header(fd, path).metadata.get(integrity.SAVE)
    except (OSError, FormatError):
        return None
