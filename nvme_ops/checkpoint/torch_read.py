"""Brings records of ``torch.save``'s container to where they stay: storages that need no second copy."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch

from nvme_ops import collector
from nvme_ops.checkpoint import new_tensors
from nvme_ops.checkpoint.torch_pickle import Described
from nvme_ops.checkpoint.torch_save import CHECKSUM
from nvme_ops.checkpoint.torch_zip import Archive, refuse
from nvme_ops.checksums import checksum_of
from nvme_ops.handle import aio_handle
from nvme_ops.memory import pieces
from nvme_ops.memory.carve import give_storages
from nvme_ops.memory.ring import Place, Ring
from nvme_ops.settings import ALIGNMENT
from nvme_ops.tensors import pool_buffer

_GAP = 8 << 10  # bytes between two records that are read along: headers, and what aligns a page


def content(archive: Archive, handle: aio_handle, name: str) -> bytes:
    """All of a record."""
    archive.locate(handle, [name])
    record = archive.records[name]
    if record.size == 0:
        return b""
    buffer = pool_buffer(record.size)
    memory = torch.frombuffer(buffer, dtype=torch.uint8)
    handle.submit_pread(memory, archive.fd, archive.starts[name]).result()
    with memoryview(buffer) as found:
        return bytes(found)


def storages(
    archive: Archive,
    handle: aio_handle,
    extents: Mapping[str, tuple[int, int]],
    device: torch.device,
    mapped: bool = False,
) -> dict[str, torch.Tensor]:
    """The bytes from the first to the second number of each record, as tensors with a storage of its own each.

    The storages are parts of one memory, which is freed with the last of them, and none of them can grow. ``mapped``:
    of the file's own memory, where its records are aligned.
    """
    if device.type == "meta":
        return {name: _bytes(end - start, device) for name, (start, end) in extents.items()}
    if (
        device.type == "cpu"
        and not mapped
        and all(end == archive.records[name].size for name, (_, end) in extents.items())
    ):
        memories, spans = _read_with_headers(archive, handle, extents)
    else:
        archive.locate(handle, extents)
        places = sorted((archive.starts[name] + start, end - start) for name, (start, end) in extents.items())
        places = [place for place in places if place[1]]
        spans = _spans(places)
        wanted = [(start, end, (torch.uint8, (end - start,))) for start, end in spans]
        mapped = mapped and all(start % ALIGNMENT == 0 for start, _ in places)
        memories = new_tensors.read(handle, archive.fd, wanted, device, mapped) if wanted else []
    return _parts(archive, extents, memories, spans, device)


def _bytes(size: int, device: torch.device) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device=device)


def _read_with_headers(
    archive: Archive, handle: aio_handle, extents: Mapping[str, tuple[int, int]]
) -> tuple[list[torch.Tensor], list[tuple[int, int]]]:
    """Reads the records before it is known where in them their bytes start: what is in front of these says it."""
    records = sorted((archive.records[name].header, archive.records[name].limit) for name in extents)
    spans: list[tuple[int, int]] = []
    for start, end in records:
        start -= start % ALIGNMENT
        if spans and start - spans[-1][1] <= _GAP:
            spans[-1] = (spans[-1][0], end)
        else:
            spans.append((start, end))
    wanted = [(start, end, (torch.uint8, (end - start,))) for start, end in spans]
    memories = new_tensors.read(handle, archive.fd, wanted, torch.device("cpu")) if wanted else []
    archive.learn(extents, [(start, memory) for (start, _), memory in zip(spans, memories, strict=True)])
    return memories, spans


@collector.paused()
def _parts(
    archive: Archive,
    extents: Mapping[str, tuple[int, int]],
    memories: Sequence[torch.Tensor],
    spans: Sequence[tuple[int, int]],
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """Cuts the records out of what was read of the file in these spans."""
    empty = _bytes(0, device)
    found = dict(zip(extents, [empty.data for _ in extents], strict=True))
    by_span: list[list[tuple[str, int, int]]] = [[] for _ in spans]
    places = sorted((archive.starts[name] + start, end - start, name) for name, (start, end) in extents.items())
    number = 0
    for start, length, name in places:
        if length == 0:
            give_storages(found, _bytes(1, device), [(name, 0, 0)])
            continue
        while start >= spans[number][1]:
            number += 1
        by_span[number].append((name, start - spans[number][0], length))
    for memory, parts in zip(memories, by_span, strict=True):
        aligned = [part for part in parts if part[1] % ALIGNMENT == 0]
        give_storages(found, memory, aligned)
        for name, place, length in set(parts).difference(aligned):
            give_storages(found, memory[place : place + length].clone(), [(name, 0, length)])
    return found


def _spans(places: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Stretches of the file, from start to end, with little that nobody wants in between."""
    spans: list[tuple[int, int]] = []
    for start, length in places:
        near = bool(spans) and start - spans[-1][1] <= _GAP
        if near and (start - spans[-1][0]) % ALIGNMENT == 0:
            spans[-1] = (spans[-1][0], start + length)
        else:
            spans.append((start, start + length))
    return spans


def whole(archive: Archive, names: Iterable[str]) -> dict[str, tuple[int, int]]:
    """The extents of entire records."""
    return {name: (0, archive.records[name].size) for name in names}


class Zip:
    """What ``torch.serialization`` asks of its reader of containers. ``fetch`` gives the storage of a record."""

    def __init__(self, archive: Archive, handle: aio_handle, fetch: Callable[[str], torch.Tensor]) -> None:
        self._archive, self._handle, self._fetch = archive, handle, fetch
        self.failure: Exception | None = None  # of ours or the caller's, not of what the file says

    def has_record(self, name: str) -> bool:
        """Whether there is one. Not of those from which places are computed: we know them."""
        return name in self._archive.records and name not in (".format_version", ".storage_alignment")

    def get_record(self, name: str) -> bytes:
        """Its bytes."""
        return content(self._archive, self._handle, name)

    def storage(self, name: str, size: int) -> torch.Tensor:
        """A tensor over the storage of a record that must have this size."""
        record = self._archive.records.get(name)
        if record is None or record.size != size:
            actual = "which the zip directory does not have" if record is None else f"which has {record.size} bytes"
            refuse(self._archive.path, f"data.pkl: a storage of {size} bytes in record {name!r}, {actual}")
        try:
            return self._fetch(name)
        except Exception as error:
            self.failure = error
            raise

    def get_storage_from_record(self, name: str, size: int, _: object) -> torch.Tensor:
        """As ``storage``."""
        return self.storage(name, size)

    def get_record_offset(self, name: str) -> int:
        """Where its bytes start in the file."""
        self._archive.locate(self._handle, [name])
        return self._archive.starts[name]

    def serialization_id(self) -> str:
        """For torch's own logs."""
        return ""


def rebuilt(described: Described, storage: torch.UntypedStorage, first: int) -> torch.Tensor:
    """The tensor as ``torch.load`` makes it. The storage begins at byte ``first`` of the saved one."""
    tensor = torch.empty(0, dtype=described.dtype, device=storage.device)
    offset = described.offset - first // described.dtype.itemsize if math.prod(described.shape) else 0
    tensor.set_(storage, offset, described.shape, described.stride)
    _mark(tensor, described)
    if described.parameter:
        return torch.nn.Parameter(tensor, described.requires_grad)
    return tensor.requires_grad_(described.requires_grad)


def _mark(tensor: torch.Tensor, described: Described) -> None:
    """As conjugated or negated, which is yet to be done with the bytes."""
    if described.metadata:
        torch._utils.set_tensor_metadata(tensor, described.metadata)


def union(described: Sequence[Described]) -> tuple[int, int]:
    """The bytes of the storage that hold all of these."""
    extents = [each.extent for each in described if each.extent[1]]
    first = min((start for start, _ in extents), default=0)
    return first // ALIGNMENT * ALIGNMENT, max((end for _, end in extents), default=0)


def fill(
    archive: Archive, handle: aio_handle, described: Mapping[str, Described], targets: Mapping[str, torch.Tensor]
) -> None:
    """Fills existing tensors from the records that hold them, with bounded memory in between."""
    archive.locate(handle, [described[name].storage.record for name in targets])
    plain, strided = [], []
    for name, target in targets.items():
        each = described[name]
        start = archive.starts[each.storage.record] + each.offset * each.dtype.itemsize
        if each.contiguous and not each.metadata:
            plain.append((start, target))
        else:
            strided.append((start, each, target))
    pieces.read_into(handle, archive.fd, plain)
    _fill_strided(archive, handle, strided)


def _fill_strided(archive: Archive, handle: aio_handle, wanted: Sequence[tuple[int, Described, torch.Tensor]]) -> None:
    """Fills tensors from elements that do not follow each other in the file."""
    ring = Ring()
    blocks = [block for start, each, target in wanted for block in _blocks(start, each, target, ring.piece)]
    held = ring.read(handle, (Place(archive.fd, start, extent) for start, extent, _, _ in blocks))
    for (_, _, each, part), found in zip(blocks, held, strict=True):
        view = found.view(each.dtype).as_strided(part.shape, each.stride)
        _mark(view, each)
        part.copy_(view)


def _blocks(
    start: int, each: Described, target: torch.Tensor, most: int
) -> Iterator[tuple[int, int, Described, torch.Tensor]]:
    """Halves of halves of a tensor until the stretch of the file that holds one has at most ``most`` bytes."""
    size = each.dtype.itemsize
    waiting = [(start, target)]
    while waiting:
        begin, part = waiting.pop()
        if part.numel() == 0:
            continue
        reaches = [(length - 1) * step for length, step in zip(part.shape, each.stride, strict=True)]
        extent = (sum(reaches) + 1) * size
        if extent <= most:
            yield begin, extent, each, part
            continue
        widest = reaches.index(max(reaches))
        half = part.shape[widest] // 2
        waiting.append((begin, part.narrow(widest, 0, half)))
        after = part.narrow(widest, half, part.shape[widest] - half)
        waiting.append((begin + half * each.stride[widest] * size, after))


def damaged(archive: Archive, found: Mapping[str, torch.Tensor]) -> list[str]:
    """The records whose bytes do not have the CRC-32 of the directory."""
    names = list(found)
    values = pieces.checksums_anywhere([found[name] for name in names], CHECKSUM)
    return [name for name, value in zip(names, values, strict=True) if value != archive.records[name].crc]


def damaged_in_file(archive: Archive, handle: aio_handle, names: Iterable[str]) -> list[str]:
    """The records whose bytes in the file do not have the CRC-32 of the directory."""
    names = list(names)
    archive.locate(handle, names)
    ring = Ring()
    places = [Place(archive.fd, archive.starts[name], archive.records[name].size) for name in names]
    owners = [name for name, place in zip(names, places, strict=True) for _ in range(0, place.nbytes, ring.piece)]
    values = dict.fromkeys(names, 0)
    for name, piece in zip(owners, ring.read(handle, places), strict=True):
        values[name] = checksum_of(piece, CHECKSUM, values[name])
    return [name for name, value in values.items() if value != archive.records[name].crc]
