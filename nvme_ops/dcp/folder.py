"""The files of a checkpoint's folder: new ones beside those of the old checkpoint, until the new one is whole."""

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


def make(path: str, durable: bool) -> None:
    """Makes the folder with those above it, where they are not."""
    missing = []
    above = os.path.abspath(path)
    while not os.path.lexists(above):
        missing.append(above)
        above = os.path.dirname(above)
    os.makedirs(path, exist_ok=True)
    if durable:
        for made in missing:
            atomic.sync_folder(os.path.dirname(made))


def new_name(path: str, prefix: str) -> str:
    """For a file with data: ``prefix`` and a number that no file there has, ``__0_0.distcp`` in an empty folder."""
    found = [match for name in os.listdir(path) if (match := _DATA.fullmatch(name)) and match[1] == prefix]
    return f"{prefix}{max((int(match[2]) for match in found), default=-1) + 1}.distcp"


def remove_others(path: str, kept: Collection[str], prefix: str = "") -> None:
    """The data of older checkpoints, and what saves that were killed left. With ``prefix`` only its own files.

    Not where ranks saved without each other, for themselves: this rank cannot know what the others refer to.
    """
    atomic.remove_litter(path)  # not that of a save which lives
    names = os.listdir(path)
    alone = not prefix and any(_OF_A_RANK.fullmatch(name) for name in names)
    together = prefix and METADATA in names
    for name in names:
        if _DATA.fullmatch(name) and name.startswith(prefix) and name not in kept and not alone and not together:
            with suppress(OSError):
                unlink.unlink(os.path.join(path, name))
