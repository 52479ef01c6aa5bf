"""Saves and loads a dict of tensors in several files with an index, as in the folders of ``save_pretrained``.

The index is a JSON object: ``weight_map`` names the file of each tensor, ``metadata.total_size`` counts all bytes.

A save never writes over a shard that the present index names: after ``model-00001-of-00003.safetensors`` the next ones
are called ``model-g2-00001-of-00003.safetensors``, then ``-g3`` and so on. Shards are written first, then the index is
replaced, then shards that it does not name are removed. So a crash at any point leaves the old index with the old
shards, or the new one with the new; the next save removes whatever else it left. (A power failure after a save with
``durable=False`` may leave neither.) When saved to a folder, the shards replace its ``model.safetensors``, which is
removed last.

A reader that finds a shard missing, or belonging to another save, because a save replaced them meanwhile, starts again
with the new index. Processes that save to one index take turns (``locked``); where the file system has no locks, a
mixture is recognised by the id of the save, which is in the index and in every shard.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from nvme_ops.base.errors import AnotherSaveError, ChecksumError, FormatError
from nvme_ops.base.text import bytes_of
from nvme_ops.checkpoint import FORMATS, safetensors_file, torch_file
from nvme_ops.checkpoint.request import FileFormat, Request, SaveOptions, Targets
from nvme_ops.checkpoint.safetensors_file import require_tensors
from nvme_ops.filesystem.files import make_folder, sync_folder, unlink
from nvme_ops.filesystem.publication import OpenFiles, Publication
from nvme_ops.formats import integrity
from nvme_ops.formats.contents import Contents, Item
from nvme_ops.formats.mistaken import refuse
from nvme_ops.formats.safetensors_format import MAX_HEADER
from nvme_ops.formats.sharded_index import ShardedIndex, names_for, read_index, resolved, shards_of, text_of
from nvme_ops.formats.torch_zip import PICKLE
from nvme_ops.io.handle import aio_handle
from nvme_ops.io.tensors import groups
from nvme_ops.memory.pieces import BorrowedTensors

SUFFIXES = FORMATS["sharded"]

#: Bytes of tensors in one shard, unless one tensor is larger.
MAX_SHARD_SIZE = 5 * 1000**3

_INDEX = ".index.json"
_Read = TypeVar("_Read")


@dataclass
class ShardedPlan:
    """Several safetensors files and their index; ``tensors`` are those of all files, in order."""

    shards: list[safetensors_file.SafetensorsPlan]
    tensors: list[torch.Tensor]
    metadata: dict[str, Any]
    options: SaveOptions

    def write(self, path: str, handle: aio_handle, borrowed: BorrowedTensors | None = None) -> None:
        """Implements ``Plan``. Creates a missing folder; an index that is a symbolic link stays one."""
        index = self.target(path)
        folder = os.path.dirname(index)
        make_folder(folder, self.options.durable)
        with Publication(index, self.options.durable) as publication:
            self._write(publication, handle, borrowed)
            if not path.endswith(SUFFIXES):  # the folder's previous model, which readers would prefer
                with suppress(FileNotFoundError):
                    unlink(index.removesuffix(SUFFIXES[0]) + ".safetensors")
        if self.options.durable:
            sync_folder(folder)

    def target(self, path: str) -> str:
        """Implements ``Plan``: the index."""
        index = os.path.realpath(path if path.endswith(SUFFIXES) else os.path.join(path, "model" + SUFFIXES[0]))
        if not index.endswith(SUFFIXES[0]):
            raise ValueError(f"{path}: shards are saved as safetensors: the name must end with {SUFFIXES[0]}")
        return index

    def _write(self, publication: Publication, handle: aio_handle, borrowed: BorrowedTensors | None) -> None:
        folder, name = os.path.split(publication.manifest)
        stem = name.removesuffix(SUFFIXES[0])
        names = names_for(folder, name, stem, len(self.shards))
        tensors = iter(self.tensors)
        for shard in self.shards:
            shard.tensors = list(itertools.islice(tensors, len(shard.header.entries)))
        work = list(zip(self.shards, names, strict=True))
        if borrowed is not None:  # first the shards with borrowed tensors, which a caller waits for
            work.sort(key=lambda job: not any(map(borrowed.holds, job[0].tensors)))
        begun: list[str] = []
        try:
            for shard, file in work:
                begun.append(file)
                shard.write(os.path.join(folder, file), handle, borrowed)
            publication.publish(self._index(names))
        except BaseException:
            with suppress(OSError, FormatError):
                present = os.path.exists(publication.manifest)
                publication.sweep(begun, read_index(publication.manifest).places.values() if present else ())
            raise
        publication.sweep(shards_of(folder, stem), names)

    def _index(self, names: Sequence[str]) -> bytes:
        places = {name: file for shard, file in zip(self.shards, names, strict=True) for name in shard.header.entries}
        headers = {file: shard.seal for shard, file in zip(self.shards, names, strict=True) if shard.seal is not None}
        metadata = {**self.metadata, **({integrity.SHARDS: headers} if headers else {})}
        return text_of({"metadata": metadata, "weight_map": places})


def plan(obj: Any, options: SaveOptions) -> ShardedPlan:
    """Plans shards of the tensors in their order, as transformers does; the strings of ``metadata`` go to the index.

    Raises TypeError and ValueError for what safetensors cannot store.
    """
    most = MAX_SHARD_SIZE
    if options.max_shard_size is not None:
        most = bytes_of("max_shard_size", options.max_shard_size)
    tensors = require_tensors(obj)
    items = list(tensors.items())
    sizes = [tensor.nbytes for tensor in tensors.values()]
    described = [safetensors_file.header_bytes(name, tensor) for name, tensor in items]
    parts = [
        dict(items[group.start + part.start : group.start + part.stop])
        for group in groups(sizes, most)
        for part in groups(described[group.start : group.stop], MAX_HEADER // 2)  # of many small tensors
    ] or [{}]
    save = os.urandom(8).hex()
    alike = replace(options, metadata=None)
    shards = [safetensors_file.plan(part, alike, save) for part in parts]
    about = {**(options.metadata or {}), "total_size": sum(sizes), integrity.SAVE: save}
    if options.checksums:
        about[integrity.KEY] = integrity.placeholder(0)
    return ShardedPlan(shards, [tensor for shard in shards for tensor in shard.tensors], about, options)


def _format(path: str) -> FileFormat:
    return safetensors_file if path.endswith(FORMATS["safetensors"]) else torch_file


def load(path: str, into: Mapping[str, Any] | torch.nn.Module | None, request: Request) -> Any:
    """Loads the tensors by name, in the order of the index. Opens only shards that have a requested tensor."""
    file = resolved(path)
    if not file.endswith(_INDEX):
        return _format(file).load(file, into, request)
    return from_one_save(file, lambda index: _load(index, into, request))


def from_one_save(path: str, read: Callable[[ShardedIndex], _Read]) -> _Read:
    """Calls ``read`` with the index and its shards; retries while a save replaces them."""
    index = read_index(path)
    while True:
        try:
            return read(index)
        except (FileNotFoundError, AnotherSaveError) as error:
            before, index = index, read_index(path)
            if index != before:
                continue
            if isinstance(error, AnotherSaveError):
                raise
            refuse(path, f"weight_map names {os.path.basename(str(error.filename))!r}, which is missing")


def _load(
    index: ShardedIndex, into: Mapping[str, Any] | torch.nn.Module | None, request: Request
) -> dict[str, torch.Tensor]:
    targets = None if into is None else Targets(into)
    names = request.chosen(index.places, index.path, targets)
    if targets is not None:
        targets.require(index.path, names, request)
    loaded: dict[str, torch.Tensor] = {}
    requests = {
        path: replace(request, keys=tuple(some), part=index.part(path)) for path, some in index.shards(names).items()
    }
    try:
        if targets is not None:
            for path, asked in requests.items():
                targets.require_fit(path, _format(path).kinds(path, asked))
        for path, asked in requests.items():
            loaded.update(_format(path).read(path, targets, asked))
    except KeyError as error:
        raise FormatError(f"{index.path}: weight_map does not match its shard: {error.args[0]}") from None
    if request.verify and index.fits is False:
        raise ChecksumError(index.path, [integrity.INDEX])
    return {name: loaded[name] for name in names}


def contents(path: str, files: OpenFiles) -> Contents:
    """Lists what all the shards contain, in the order of the index."""
    file = resolved(path)
    if not file.endswith(_INDEX):
        return _format(file).contents(file, files)
    return from_one_save(file, lambda index: _contents(index, files))


def _contents(index: ShardedIndex, files: OpenFiles) -> Contents:
    files.close()  # shards of another save
    saved = Contents("sharded", [], index.metadata)
    if index.fits is False:
        saved.damaged.append(integrity.INDEX)
    for path, names in index.shards(index.places).items():
        shard = _format(path).contents(path, files, index.part(path))
        saved.items.extend(_items(index, path, names, shard))
        wrong = [name if name == integrity.INDEX else _in_shard(name, path) for name in shard.damaged]
        saved.damaged.extend(name for name in wrong if name not in saved.damaged)
    return saved


def _items(index: ShardedIndex, path: str, names: Iterable[str], shard: Contents) -> Iterator[Item]:
    if _format(path) is torch_file:  # storages, under the names of all tensors in them
        for item in shard.items:
            yield replace(item, name=_in_shard(item.name, path)) if item.name == PICKLE else item
        return
    known = {item.name: item for item in shard.items}
    for name in names:
        if name not in known:
            refuse(index.path, f"weight_map says that {name!r} is in {path}, and it is not")
        yield known[name]


def _in_shard(name: str, path: str) -> str:
    return f"{os.path.basename(path)}: {name}"
