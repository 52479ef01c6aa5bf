"""The formats of stores: how each is recognized, indexed and read. A format is a row of ``FORMATS``."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch

from nvme_ops.base.errors import FormatError
from nvme_ops.data import index as own
from nvme_ops.data import mds, webdataset
from nvme_ops.data.columns import Columns, Sample

#: Turns the bytes of a record into a sample. Raises FormatError.
Reader: TypeAlias = Callable[[torch.Tensor], Sample]


class StoreFormat(NamedTuple):
    """How to recognize a format by its path, make or find its index (with checksums or without), and read records."""

    matches: Callable[[str], bool]
    make_index: Callable[[str, bool], own.SampleIndex]
    reader: Callable[[own.SampleIndex], Reader]


def _has_index(path: str) -> bool:
    return os.path.isfile(os.path.join(path, own.NAME))


def _own_index(path: str, checksums: bool) -> own.SampleIndex:
    return own.read_index(os.path.join(path, own.NAME), ("ends", "checksums") if checksums else ("ends",))


FORMATS = {
    "native": StoreFormat(_has_index, _own_index, lambda index: Columns.from_json(index.columns).unpacked),
    "mds": StoreFormat(mds.matches, lambda path, _: mds.index_of(path), lambda index: mds.Shards(index).sample),
    "webdataset": StoreFormat(
        webdataset.matches, lambda path, _: webdataset.index_of(path), lambda _: webdataset.sample
    ),
}


def index_of(path: str, checksums: bool = False) -> own.SampleIndex:
    """Returns the index of the store at ``path``, with ``checksums`` if wanted and present.

    Raises:
        FileNotFoundError: nothing is there.
        FormatError: it is no store, or it is damaged.
    """
    os.stat(path)
    for candidate in FORMATS.values():
        if candidate.matches(path):
            return candidate.make_index(path, checksums)
    if webdataset.compressed(path):
        raise FormatError(f"{path}: its tars are compressed: nvme-data convert makes a store of them")
    raise FormatError(
        f"{path}: has no samples: no {own.NAME} (SampleWriter), no index.json (MDS) and no tars (WebDataset)"
    )


def reader_of(index: own.SampleIndex) -> Reader:
    """Returns the function that turns records into samples. Raises FormatError for an unknown kind."""
    if index.kind not in FORMATS:
        raise FormatError(f"{index.path}: samples of an unknown kind: {index.kind!r}")
    return FORMATS[index.kind].reader(index)
