"""The files in a checkpoint's folder: new ones beside those of the old checkpoint, until the new one is complete."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from contextlib import suppress

from nvme_ops.storage import atomic, unlink

#: Of the whole checkpoint, and of one rank where ranks save without each other.
METADATA = ".metadata"
_DATA = re.compile(r"(__\d+_)(\d+)\.distcp")
_OF_A_RANK = re.compile(r"__\d+\.metadata")


def new_name(path: str, prefix: str) -> str:
    """Returns a name for a data file: ``prefix`` and a number not yet used, ``__0_0.distcp`` in an empty folder."""
    found = [match for name in os.listdir(path) if (match := _DATA.fullmatch(name)) and match[1] == prefix]
    return f"{prefix}{max((int(match[2]) for match in found), default=-1) + 1}.distcp"


def remove_others(path: str, kept: Collection[str], prefix: str = "") -> None:
    """Removes the data of older checkpoints and of killed saves; with ``prefix`` only files of this rank.

    Not for ranks that save independently: this rank cannot know which files the others refer to.
    """
    atomic.remove_litter(path)  # never that of a running save
    names = os.listdir(path)
    alone = not prefix and any(_OF_A_RANK.fullmatch(name) for name in names)
    together = prefix and METADATA in names
    for name in names:
        if _DATA.fullmatch(name) and name.startswith(prefix) and name not in kept and not alone and not together:
            with suppress(OSError):
                unlink.unlink(os.path.join(path, name))
