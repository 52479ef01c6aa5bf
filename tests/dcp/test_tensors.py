"""nvme_ops.dcp: any tensor, saved whole and loaded in parts, as when it is re-sharded."""

from __future__ import annotations

import functools
import math
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from nvme_ops.base.errors import ChecksumError, FormatError
from nvme_ops.base.settings import PAGE
from nvme_ops.checkpoint import framed, strided
from nvme_ops.checkpoint.dcp import reader as reading
from nvme_ops.dcp import NvmeStorageReader, NvmeStorageWriter
from nvme_ops.memory.ring import Ring
from tests.contract.faulty import flip
from tests.dcp.states import equal, why_of

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch: no process group, quantized and nested tensors


class Part(dcp.DefaultLoadPlanner):
    """Loads a part of the only tensor of a checkpoint to one of the state dict."""

    def __init__(self, offsets: tuple[int, ...]) -> None:
        super().__init__()
        self.offsets = torch.Size(offsets)

    def create_local_plan(self) -> LoadPlan:
        ((name, tensor),) = self.state_dict.items()
        index, zeros = MetadataIndex(name, torch.Size([0] * tensor.dim())), torch.Size([0] * tensor.dim())
        return LoadPlan([ReadItem(LoadItemType.TENSOR, index, zeros, index, self.offsets, tensor.shape)])


@st.composite
def parts(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """A shape, where a part of it begins, and the part's shape."""
    shape = draw(st.lists(st.integers(1, 9), max_size=4))
    starts = [draw(st.integers(0, size - 1)) for size in shape]
    sizes = [draw(st.integers(1, size - start)) for size, start in zip(shape, starts, strict=True)]
    return tuple(shape), tuple(starts), tuple(sizes)


def numbered(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(math.prod(shape)).view(shape).to(dtype)


@pytest.mark.parametrize("writer", [NvmeStorageWriter, dcp.FileSystemWriter])
@settings(max_examples=30)
@given(data=st.data(), part=parts(), dtype=st.sampled_from([torch.uint8, torch.bfloat16, torch.float64]))
def test_any_part_of_any_tensor(
    writer: Any,
    tmp_path_factory: pytest.TempPathFactory,
    data: st.DataObject,
    part: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]],
    dtype: torch.dtype,
) -> None:
    """With limits so low that every way of reading has its turn."""
    path, (shape, starts, sizes) = tmp_path_factory.mktemp("part"), part
    whole = numbered(shape, dtype)
    dcp.save({"a": whole}, storage_writer=writer(path))
    target = torch.full(sizes, 99, dtype=data.draw(st.sampled_from([dtype, torch.float32])))
    if data.draw(st.booleans()) and len(sizes) > 1:
        target = torch.full((sizes[1], sizes[0], *sizes[2:]), 99, dtype=target.dtype).transpose(0, 1)
    gap, buffer = data.draw(st.sampled_from([(16, 2 * PAGE), (8, 2 * PAGE), (strided._GAP, None)]))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(strided, "_GAP", gap)
        patched.setattr(reading, "Ring", functools.partial(Ring, buffer=buffer))
        patched.setattr(reading, "_SMALL", 0)
        verify = writer is NvmeStorageWriter and data.draw(st.booleans())
        dcp.load({"a": target}, storage_reader=NvmeStorageReader(path, verify=verify), planner=Part(starts))
    expected = whole[tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))]
    assert torch.equal(target, expected.to(target.dtype))


def test_no_such_part_is_an_error_and_of_a_part_the_whole_item_is_verified(tmp_path: Path) -> None:
    dcp.save({"a": numbered((50, 4000), torch.float32)}, storage_writer=NvmeStorageWriter(tmp_path))
    target, reader = torch.zeros(3, 4000), NvmeStorageReader(tmp_path, verify=True)
    for starts in ((48, 0), (-1, 0), (0, 2)):
        error = why_of(lambda: dcp.load({"a": target}, storage_reader=reader, planner=Part(starts)))  # noqa: B023
        assert isinstance(error, FormatError)
        assert f"'a': (3, 4000) from {starts} on is not part of (50, 4000)" in str(error)
    assert not target.any()
    (data,) = tmp_path.glob("*.distcp")
    flip(data, data.stat().st_size // 4)
    error = why_of(lambda: dcp.load({"a": target}, storage_reader=reader, planner=Part((40, 0))))
    assert isinstance(error, ChecksumError)  # though this part lies in one piece, and not there
    assert error.tensors == ["a"]


def test_many_groups_of_items(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(framed, "_SMALL_GROUP", 10_000)
    monkeypatch.setattr(framed, "SMALL", 20_000)
    monkeypatch.setattr(framed, "_LARGE_GROUP", 50_000)
    monkeypatch.setattr(reading, "_GROUP", 30_000)
    state = {str(number): numbered((number, 1 + number % 7), torch.float32) for number in range(1200, 6000, 97)}
    state |= {f"small {number}": numbered((number,), torch.float32) for number in range(50)}
    dcp.save(state, storage_writer=NvmeStorageWriter(tmp_path))
    for verify in (False, True):
        loaded = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        dcp.load(loaded, storage_reader=NvmeStorageReader(tmp_path, verify=verify))
        assert equal(loaded, state)


# What is more than a plain tensor


def quantized(values: torch.Tensor) -> torch.Tensor:
    return torch.quantize_per_tensor(values, 0.5, 1, torch.quint8)


TURNED = torch.arange(900_000.0).view(3, -1).t()
#: A tensor of the kind, and another to load to. What DCP's writer says of strides, gradients and the like is no matter.
SPECIAL: dict[str, Callable[[], tuple[torch.Tensor, torch.Tensor]]] = {
    "quantized": lambda: (quantized(torch.ones(2, 3)), quantized(torch.zeros(2, 3))),
    "parameter": lambda: (torch.nn.Parameter(torch.ones(4)), torch.nn.Parameter(torch.zeros(4))),
    "expanded": lambda: (torch.ones(1).expand(3, 100_000), torch.zeros(3, 100_000)),
    "negated": lambda: (torch.tensor([1 + 2j, 3 + 4j]).conj().imag, torch.zeros(2)),
    "storage of others": lambda: (torch.arange(100_000.0)[7:-3], torch.zeros(99_990)),
    "turned": lambda: (TURNED, torch.zeros(TURNED.shape)),
    "turned, small": lambda: (TURNED[:10], torch.zeros(10, 3)),
    "a new dtype": lambda: (TURNED.to(torch.uint16), torch.zeros(TURNED.shape, dtype=torch.uint16)),
    "no rows": lambda: (torch.zeros(0, 7), torch.zeros(0, 7)),
    "no dimensions": lambda: (torch.tensor(3.0), torch.tensor(0.0)),
}


@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        (NvmeStorageWriter, NvmeStorageReader),
        (NvmeStorageWriter, dcp.FileSystemReader),
        (dcp.FileSystemWriter, NvmeStorageReader),
    ],
)
def test_special_tensors(writer: Any, reader: Any, tmp_path: Path) -> None:
    pairs = {kind: make() for kind, make in SPECIAL.items()}
    dcp.save({kind: saved for kind, (saved, _) in pairs.items()}, storage_writer=writer(tmp_path))
    dcp.load({kind: target for kind, (_, target) in pairs.items()}, storage_reader=reader(tmp_path))
    for kind, (saved, target) in pairs.items():
        assert (target.dtype, target.shape) == (saved.dtype, saved.shape), kind
        if kind == "quantized":
            target, saved = target.dequantize(), saved.dequantize()
        assert torch.equal(target, saved), kind


def zipped_anew(path: Path, compression: int = zipfile.ZIP_STORED, **changed: bytes) -> Path:
    """The archive with other contents, by names without their folder and dots."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, changed.get(name.rpartition("/")[2].replace(".", "_"), content))
    return path


@pytest.mark.parametrize(
    "change",
    [
        {"compression": zipfile.ZIP_DEFLATED},
        {"byteorder": b"big"},
        {"byteorder": b"little".ljust(20)},
        {"data_pkl": pickle.dumps("x" * (2 << 20))},
    ],
    ids=["compressed", "other byte order", "strange byte order", "long description"],
)
def test_an_archive_of_another_kind_is_left_to_torch(change: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "archive"
    torch.save(torch.zeros(2, 3), path)
    zipped_anew(path)
    assert reading.find(str(path), 0, path.stat().st_size) is not None
    zipped_anew(path, **change)
    assert reading.find(str(path), 0, path.stat().st_size) is None
