"""Describes the tensors of a DCP checkpoint, without reading their data: each is put together from its chunks."""

from __future__ import annotations

import functools
import io
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata

from nvme_ops.checkpoint.dcp.contents import consistent
from nvme_ops.checkpoint.dcp.folder import error_text
from nvme_ops.checkpoint.dcp.reader import tensor_in
from nvme_ops.checkpoint.request import entries_error, listed
from nvme_ops.filesystem.publication import opened
from nvme_ops.formats.mistaken import refuse
from nvme_ops.offload.weights.window import read_now
from nvme_ops.storage.source import FileExtent, Source, WeightFile, concatenated

_Sizes = tuple[int, ...]


class _Chunk(NamedTuple):
    offsets: _Sizes
    source: Source


def sources_of(
    folder: str, key: str, metadata: Metadata, open_data: Callable[[str], WeightFile]
) -> dict[str, Source | torch.Tensor]:
    """Returns the tensors whose names begin with ``key`` and a dot, without these; all when it is empty.

    Those without elements are tensors in memory, and so are those that are stored otherwise than as their bytes.
    ``open_data`` opens a data file, once for each.

    Raises:
        FormatError: the checkpoint is damaged.
        ValueError: it has other things than tensors there, or nothing.
    """
    prefix = f"{key}." if key else ""
    entries: Mapping[str, Any] = metadata.state_dict_metadata
    chosen = {name.removeprefix(prefix): name for name in entries if name.startswith(prefix)}
    tops = sorted({name.partition(".")[0] for name in entries})
    if key and not chosen:
        raise ValueError(f"{folder} has no entry {key!r}; it has {listed(tops)}")
    others = [name for name in chosen.values() if not isinstance(entries[name], TensorStorageMetadata)]
    if others:
        raise entries_error(folder, others, [] if key else [top for top in tops if top not in entries])
    places: dict[str, dict[_Sizes, Any]] = {}
    for index, info in metadata.storage_data.items():
        places.setdefault(index.fqn, {})[tuple(index.offset or ())] = info
    file = functools.cache(lambda name: open_data(os.path.join(folder, name)))
    with consistent(folder):
        return {name: _tensor(folder, full, entries[full], places[full], file) for name, full in chosen.items()}


def _tensor(
    folder: str,
    name: str,
    entry: TensorStorageMetadata,
    places: Mapping[_Sizes, Any],
    file: Callable[[str], WeightFile],
) -> Source | torch.Tensor:
    dtype, shape = entry.properties.dtype, tuple(entry.size)
    if 0 in shape:
        return torch.empty(shape, dtype=dtype, device="cpu")
    parts: list[tuple[_Sizes, Source | torch.Tensor]] = []
    for chunk in entry.chunks:
        if 0 not in chunk.sizes:
            info = places[()] if len(entry.chunks) == 1 and () in places else places[tuple(chunk.offsets)]
            parts.append((tuple(chunk.offsets), _chunk(folder, name, chunk, dtype, info, file)))
    chunks = [_Chunk(offsets, part) for offsets, part in parts if isinstance(part, Source)]
    if len(chunks) == len(parts):
        for dim in reversed(range(len(shape))):
            chunks = _joined(chunks, dim)
        if len(chunks) == 1 and chunks[0].source.shape == shape and not any(chunks[0].offsets):
            return chunks[0].source
    if sum(part.nbytes for _, part in parts) != torch.Size(shape).numel() * dtype.itemsize:
        refuse(folder, f"{name!r}: its chunks do not make a tensor of shape {list(shape)}")
    whole = torch.empty(shape, dtype=dtype, device="cpu")
    seen = torch.zeros(shape, dtype=torch.bool, device="cpu")
    for offsets, part in parts:
        values = read_now([part])[0] if isinstance(part, Source) else part
        place = tuple(slice(start, start + size) for start, size in zip(offsets, values.shape, strict=True))
        whole[place], seen[place] = values, True
    if not seen.all():
        refuse(folder, f"{name!r}: its chunks overlap")
    return whole


def _chunk(
    folder: str,
    name: str,
    chunk: ChunkStorageMetadata,
    dtype: torch.dtype,
    info: Any,
    file: Callable[[str], WeightFile],
) -> Source | torch.Tensor:
    path, shape = os.path.join(folder, info.relative_path), tuple(chunk.sizes)
    stored = tensor_in(path, name, info, dtype, shape)
    if stored is None:
        return _loaded(path, name, info, dtype, shape)
    if (stored.dtype, stored.shape) != (dtype, shape):
        refuse(path, f"{name!r} is not stored as a tensor of {dtype} {list(shape)}")
    return Source([FileExtent(file(info.relative_path), stored.start, stored.nbytes)], dtype, shape)


def _loaded(path: str, name: str, info: Any, dtype: torch.dtype, shape: _Sizes) -> torch.Tensor:
    """Loads a chunk whose bytes do not follow each other as in a contiguous tensor: a transposed one, say."""
    with opened(path) as fd:
        content = os.pread(fd, info.length, info.offset)
    try:
        value = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged one can raise anything
        refuse(path, f"{name!r}: {error_text(error)}")
    if not isinstance(value, torch.Tensor) or (value.dtype, tuple(value.shape)) != (dtype, shape):
        refuse(path, f"{name!r} is not stored as a tensor of {dtype} {list(shape)}")
    return value.detach()


def _joined(chunks: Sequence[_Chunk], dim: int) -> list[_Chunk]:
    """Joins chunks that differ in this dimension alone and follow each other there."""
    rows: dict[Any, list[_Chunk]] = {}
    for chunk in sorted(chunks, key=lambda chunk: chunk.offsets):
        shape = chunk.source.shape
        others = [offsets[:dim] + offsets[dim + 1 :] for offsets in (chunk.offsets, shape)]
        rows.setdefault(tuple(others), []).append(chunk)
    joined = []
    for row in rows.values():
        reached = row[0].offsets[dim]
        for chunk in row:
            if chunk.offsets[dim] != reached:
                return list(chunks)  # a gap, or an overlap
            reached += chunk.source.shape[dim]
        whole = row[0].source if len(row) == 1 else concatenated([chunk.source for chunk in row], dim)
        if whole is None:
            return list(chunks)
        joined.append(_Chunk(row[0].offsets, whole))
    return joined
