"""Finds the storages in a file that torch wrote before version 1.6: five pickles, then each storage's size and bytes.

The pickles are: a magic number, a version, what the machine was like, the object, and the keys of the storages, in
order. Source: ``torch.serialization._legacy_save``.
"""

from __future__ import annotations

import os
from typing import Any

from nvme_ops.formats import torch_pickle
from nvme_ops.formats.mistaken import refuse
from nvme_ops.formats.pickle_scan import walk
from nvme_ops.formats.torch_pickle import CODES, Storage

_FIRST = 1 << 20  # bytes that are read for the pickles at first; then twice as many, up to _MOST
_MOST = 1 << 28
_COUNT = 8  # bytes of the number of elements in front of each storage


def read(fd: int, path: str) -> tuple[Any, list[Storage], dict[str, int]]:
    """Returns the tree and the storages as ``torch_pickle.read``, and where the bytes of each begin, by its record.

    Raises FormatError for a damaged file, and for one that has something else than storages of their own.
    """
    size = os.fstat(fd).st_size
    (_, _, machine, content, keys), place = _pickles(fd, size, path)
    root, mentioned = torch_pickle.read(content, path)
    told, _ = torch_pickle.read(machine, path)
    if not isinstance(told, dict) or told.get("little_endian") is not True:
        refuse(path, "was written on a machine of the other byte order")
    named, _ = torch_pickle.read(keys, path)
    storages = {storage.key: storage for storage in mentioned}
    if not isinstance(named, list) or sorted(map(str, named)) != sorted(storages):
        refuse(path, "lists other storages than its object has")
    starts = {}
    for key in named:
        storage = storages[str(key)]
        count = int.from_bytes(os.pread(fd, _COUNT, place), "little")
        place += _COUNT
        if count * storage.dtype.itemsize != storage.size or place + storage.size > size:
            refuse(path, f"storage {key!r} of {storage.size} bytes is not at byte {place} of {size}")
        starts[storage.record] = place
        place += storage.size
    return root, mentioned, starts


def _pickles(fd: int, size: int, path: str) -> tuple[list[bytes], int]:
    """Returns the five pickles, and where they end."""
    length = _FIRST
    while True:
        content, place, pickles = os.pread(fd, length, 0), 0, list[bytes]()
        while len(pickles) < 5:
            problem, end = walk(content, CODES, place)
            if problem:
                break
            pickles.append(content[place:end])
            place = end
        else:
            return pickles, place
        if len(content) >= size or length >= _MOST or end < len(content):
            refuse(path, f"pickle {len(pickles) + 1} of 5: {problem}")
        length *= 2
