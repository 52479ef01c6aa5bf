"""Reads records of ``torch.save``'s archive straight into the storages of tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from nvme_ops.base.settings import ALIGNMENT
from nvme_ops.checkpoint import new_tensors, strided
from nvme_ops.checkpoint.strided import StridedTensor
from nvme_ops.checkpoint.torch_open import require_record, require_undamaged
from nvme_ops.formats.torch_pickle import DenseTensor
from nvme_ops.formats.torch_zip import CHECKSUM, PICKLE, Archive, spans_of
from nvme_ops.io.tensors import give_storages
from nvme_ops.memory import pieces
from nvme_ops.memory.ring import Place

_GAP = 8 << 10  # bytes between two records up to which they are read as well: headers and page alignment


def read(archive: Archive, extents: Mapping[str, tuple[int, int]], device: torch.device) -> dict[str, torch.Tensor]:
    """Reads a byte range of each record into a tensor with its own storage; calls ``verify`` if records are verified.

    The storages are parts of one allocation, which is freed with the last of them; they cannot grow. They are parts of
    a mapping of the file if the archive may be mapped and its records are aligned.
    """
    if device.type == "meta":
        return {name: _bytes(end - start, device) for name, (start, end) in extents.items()}
    mapped, records = archive.mapped, [archive.records[name] for name in extents]
    whole_records = [record.size for record in records] == [end for _, end in extents.values()]
    with_headers = device.type == "cpu" and not mapped and whole_records
    if with_headers:
        places = sorted([(record.header // ALIGNMENT * ALIGNMENT, record.limit) for record in records])
    else:
        archive.locate(extents)
        starts = archive.starts
        places = sorted((starts[name] + start, starts[name] + end) for name, (start, end) in extents.items())
        places = [(start, end) for start, end in places if end > start]
        mapped = mapped and all(start % ALIGNMENT == 0 for start, _ in places)
    spans = spans_of(places, _GAP, ALIGNMENT)
    wanted = [(start, end, (torch.uint8, (end - start,))) for start, end in spans]
    memories = new_tensors.read(archive.handle, archive.fd, wanted, device, mapped)
    if with_headers:
        archive.learn(extents, [(start, memory) for (start, _), memory in zip(spans, memories, strict=True)])
    parts = _parts(archive, extents, memories, spans, device)
    if archive.verified:
        verify(archive, parts.items(), parts)
    return parts


def _bytes(size: int, device: torch.device) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device=device)


def _parts(
    archive: Archive,
    extents: Mapping[str, tuple[int, int]],
    memories: Sequence[torch.Tensor],
    spans: Sequence[tuple[int, int]],
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """Cuts the records out of the spans of the file that were read."""
    empty = _bytes(0, device)
    tensors = dict(zip(extents, [empty.data for _ in extents], strict=True))
    by_span: list[list[tuple[str, int, int]]] = [[] for _ in spans]
    places = sorted([(archive.starts[name] + start, end - start, name) for name, (start, end) in extents.items()])
    number = 0
    for start, length, name in places:
        if length == 0:
            give_storages(tensors, _bytes(1, device), [(name, 0, 0)])
            continue
        while start >= spans[number][1]:
            number += 1
        by_span[number].append((name, start - spans[number][0], length))
    for memory, parts in zip(memories, by_span, strict=True):
        aligned = [part for part in parts if part[1] % ALIGNMENT == 0]
        give_storages(tensors, memory, aligned)
        for name, place, length in set(parts).difference(aligned):
            give_storages(tensors, memory[place : place + length].clone(), [(name, 0, length)])
    return tensors


class Zip:
    """Is the reader that ``torch.serialization`` expects. ``fetch`` returns a tensor over the storage of a record."""

    def __init__(self, archive: Archive, fetch: Callable[[str], torch.Tensor]) -> None:
        self._archive, self._fetch = archive, fetch
        self.failures: list[Exception] = []  # errors that are not the file's fault

    def has_record(self, name: str) -> bool:
        """Returns whether there is such a record; hides those from which torch computes offsets, as they are known."""
        return name in self._archive.records and name not in (".format_version", ".storage_alignment")

    def get_record(self, name: str) -> bytes:
        """Returns the bytes of a record."""
        return self._archive.pickled() if name == PICKLE else self._archive.content(name)

    def get_storage_from_record(self, name: str, size: int, _: object) -> torch.Tensor:
        """Returns a tensor over the storage of a record. Raises FormatError unless it has this size."""
        require_record(self._archive, name, size)
        try:
            return self._fetch(name)
        except Exception as error:
            self.failures.append(error)
            raise

    def get_record_offset(self, name: str) -> int:
        """Returns the offset of a record's data in the file."""
        self._archive.locate([name])
        return self._archive.starts[name]

    def serialization_id(self) -> str:
        """Returns an id for torch's own logs."""
        return ""


def rebuilt(described: DenseTensor, storage: torch.UntypedStorage, first: int) -> torch.Tensor:
    """Returns the tensor as ``torch.load`` builds it. The storage begins at byte ``first`` of the saved one."""
    tensor = torch.empty(0, dtype=described.dtype, device=storage.device)
    offset = described.offset - first // described.dtype.itemsize if math.prod(described.shape) else 0
    tensor.set_(storage, offset, described.shape, described.stride)
    if described.metadata:
        torch._utils.set_tensor_metadata(tensor, described.metadata)
    if described.parameter:
        return torch.nn.Parameter(tensor, described.requires_grad)
    return tensor.requires_grad_(described.requires_grad)


def union(described: Sequence[DenseTensor]) -> tuple[int, int]:
    """Returns the byte range of their storage that covers all of these tensors, from an aligned byte on."""
    extents = [tensor.extent for tensor in described if tensor.extent[1]]
    first = min((start for start, _ in extents), default=0)
    return first // ALIGNMENT * ALIGNMENT, max((end for _, end in extents), default=0)


def fill(archive: Archive, described: Mapping[str, DenseTensor], targets: Mapping[str, torch.Tensor]) -> None:
    """Fills existing tensors from the records that hold them, through bounded memory."""
    archive.locate([described[name].storage.record for name in targets])
    plain, others = [], []
    for name, target in targets.items():
        tensor = described[name]
        start = archive.starts[tensor.storage.record] + tensor.offset * tensor.dtype.itemsize
        if tensor.contiguous and not tensor.metadata:
            plain.append((start, target))
        else:
            others.append(StridedTensor(archive.fd, start, tensor.dtype, tensor.stride, target, tensor.metadata))
    pieces.read_into(archive.handle, archive.fd, plain)
    strided.fill(archive.handle, others)


def verify(archive: Archive, held: Iterable[tuple[str, torch.Tensor]], records: Iterable[str]) -> None:
    """Compares records with the CRC-32s in the directory, in memory if ``held`` has one as a whole, else in the file.

    Raises ChecksumError with the names of the tensors in those that differ.
    """
    whole = [(record, tensor) for record, tensor in held if tensor.nbytes == archive.records[record].size]
    values = pieces.checksums_anywhere([tensor for _, tensor in whole], CHECKSUM)
    checksums = [(record, value) for (record, _), value in zip(whole, values, strict=True)]
    names = sorted(set(records) - {record for record, _ in whole})
    archive.locate(names)
    places = [Place(archive.fd, archive.starts[name], archive.records[name].size) for name in names]
    checksums += zip(names, pieces.checksums_in_files(archive.handle, places, [CHECKSUM] * len(names)), strict=True)
    require_undamaged(archive, [name for name, value in checksums if value != archive.records[name].crc])
