"""The states of an optimizer in one file: chunks as they are on storage, shared with it where the file system can.

It is a safetensors file. The tensor ``chunk.N`` has the bytes of a chunk, aligned to pages; the metadata's entry
``nvme_ops.optimizer`` is the JSON of what the optimizer commits with a step.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
from typing import Any

import torch

from nvme_ops.durable import sync_above
from nvme_ops.errors import FormatError
from nvme_ops.file import shared_handle
from nvme_ops.formats import safetensors_format
from nvme_ops.future import IoFuture
from nvme_ops.handle import aio_handle
from nvme_ops.offload.optimizer.chunks import Chunk, Version
from nvme_ops.offload.optimizer.records import read_back, required
from nvme_ops.offload.optimizer.states import States
from nvme_ops.settings import PAGE
from nvme_ops.storage.publication import opened, replacing
from nvme_ops.text import parse_json

_METADATA = "nvme_ops.optimizer"


def save(states: States, path: str, record: dict[str, Any], durable: bool, handle: aio_handle) -> bool:
    """Writes ``path``; see ``NvmeOptimizer.save_states``."""
    stored = [chunk for chunk in states.chunks if states.now[chunk].slot is not None and chunk.nbytes]
    header = _header(stored, record)
    places, size = {}, len(header)
    for chunk in stored:
        places[chunk], size = size, size + chunk.nbytes
    with replacing(path, durable) as file:
        os.truncate(file.fd, size)
        shared = all(states.share(chunk, file.fd, places[chunk]) for chunk in stored)
        if not shared:
            os.posix_fallocate(file.fd, 0, size)

            def write(chunk: Chunk, buffer: torch.Tensor) -> IoFuture:
                return handle.submit_pwrite(buffer[: chunk.nbytes], file.fd, places[chunk])

            states.copy_out(stored, write)
        written = 0
        while written < len(header):
            written += os.pwrite(file.fd, header[written:], written)
    if durable:
        sync_above(os.path.dirname(os.path.realpath(path)))
    return shared


def _header(stored: list[Chunk], record: dict[str, Any]) -> bytes:
    described: dict[str, Any] = {"__metadata__": {_METADATA: json.dumps(record)}}
    begin = 0
    for chunk in stored:
        end = begin + chunk.nbytes
        described[f"chunk.{chunk.number}"] = {"dtype": "U8", "shape": [chunk.nbytes], "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(described).encode()
    text += b" " * (-(8 + len(text)) % PAGE)
    return struct.pack("<Q", len(text)) + text


def load(states: States, path: str, made: Any) -> tuple[dict[str, Any], dict[Chunk, Version]]:
    """Writes the states in ``path`` beside those of now; returns what ``save`` was given, and what to commit.

    Raises:
        FormatError: it is no such file.
        ValueError: it has states of other parameters or another optimizer, or chunks of another size.
    """
    with opened(path) as fd:
        header = safetensors_format.read(fd, path)
        record = _record(header, path)
        if record["made"] != made:
            raise ValueError(
                f"{path} has the states of other parameters, of another optimizer, or of another memory_budget"
            )
        scalars = _scalars(states, record, path)

        def read(chunk: Chunk, buffer: torch.Tensor) -> IoFuture | None:
            entry = header.entries.get(f"chunk.{chunk.number}")
            if entry is None and not (chunk.nbytes and any(scalars[chunk].values())):
                return None
            if entry is None:
                raise FormatError(f"{path}: {f'chunk.{chunk.number}'} is missing")
            if entry.end - entry.start != chunk.nbytes:
                raise FormatError(f"{path}: {f'chunk.{chunk.number}'} has {entry.end - entry.start} bytes")
            return shared_handle().submit_pread(buffer[: chunk.nbytes], fd, entry.start)

        versions: dict[Chunk, Version] = {}
        with contextlib.closing(states.fill(read, versions)) as updates:
            for chunk, _ in updates:
                chunk.scalars.update(scalars[chunk])
    return record, versions


def _record(header: safetensors_format.Header, path: str) -> dict[str, Any]:
    try:
        return required(parse_json(header.metadata[_METADATA]))
    except (LookupError, ValueError) as error:
        raise FormatError(f"{path}: no states that NvmeOptimizer.save_states has written") from error


def _scalars(states: States, record: dict[str, Any], path: str) -> dict[Chunk, dict[Any, Any]]:
    """Returns the scalar states of each slice. Raises FormatError for whatever the record may have in their place."""
    try:
        found = {}
        for chunk in states.chunks:
            written = [read_back(each, chunk.device) for each in record["chunks"][chunk.number][1]]
            found[chunk] = {each: one for each, one in zip(chunk.slices, written, strict=True) if one is not None}
        return found
    except Exception as error:  # whatever a damaged record makes of an interpreter
        raise FormatError(f"{path}: the record of the states is damaged: {error}") from error
