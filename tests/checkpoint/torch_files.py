"""What tests of files in torch.save's format share: objects to save, their comparison, and containers made by hand."""

from __future__ import annotations

import io
import pickle
import struct
import warnings
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import nvme_ops
from nvme_ops.checkpoint import new_tensors
from tests.conftest import MIB, pattern, watched

# Where the fields of an entry of a zip directory are.
METHOD, CRC, STORED, SIZE, HEADER = (10, "<H"), (16, "<I"), (20, "<I"), (24, "<I"), (42, "<I")


def storable() -> list[torch.dtype]:
    """The dtypes that torch itself saves and loads."""
    dtypes = []
    for dtype in sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str):
        stream = io.BytesIO()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                torch.save(pattern(64).view(dtype), stream)
                stream.seek(0)
                torch.load(stream, weights_only=True)
        except (KeyError, RuntimeError):
            continue
        dtypes.append(dtype)
    return dtypes


def trained() -> tuple[torch.nn.Sequential, torch.optim.Optimizer]:
    """A model with buffers and tied parameters, and its optimizer after a step."""
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 6))
    model[2].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 6)).sum().backward()
    optimizer.step()
    return model, optimizer


def views() -> dict[str, Any]:
    base = torch.arange(60.0).view(3, 20)
    return {"base": base, "row": base[1], "columns": base[:, ::2], "turned": base.t(), "again": base}


def with_attributes() -> torch.Tensor:
    tensor = torch.nn.Parameter(torch.randn(3))
    tensor.note = {"seen": 3}  # type: ignore[attr-defined]
    return tensor


def mixed_sizes() -> dict[str, torch.Tensor]:
    sizes = [0, 1, 63, 4096, 64 * 1024 - 1, 64 * 1024, 8 * MIB, 8 * MIB + 1, 17, MIB, 2 * MIB]
    return {f"{number}": pattern(size, number) for number, size in enumerate(sizes)}


#: Whatever torch.save takes and torch.load reads with weights_only.
OBJECTS: dict[str, Callable[[], Any]] = {
    "a tensor": lambda: torch.randn(3, 5),
    "plain values": lambda: {"text": "ü", "b": b"\0\1", "n": 2**70, "c": 1j, "s": {1}, "size": torch.Size([3])},
    "numbers": lambda: [0, 1, -1, 255, 256, 65535, 65536, 2**31, -(2**31), 2**62, -(2**63), 2**80, 0.5, -0.0, 1e400],
    "depths": lambda: {"": [[], {}, [{0: "é", "x" * 300: [True, None, [torch.ones(()).bfloat16()]]}]], 7: {"a": {}}},
    "views": views,
    "expanded": lambda: torch.randn(4, 1).expand(4, 1000),
    "no elements": lambda: [torch.zeros(0), torch.zeros(3, 0, dtype=torch.int16), torch.zeros(0, 3).t()],
    "conjugated": lambda: torch.randn(4, dtype=torch.complex64).conj(),
    "negated": lambda: torch.randn(4, dtype=torch.complex64).conj().imag,
    "a parameter": lambda: torch.nn.Parameter(torch.randn(3), requires_grad=False),
    "with attributes": with_attributes,
    "with gradients": lambda: torch.randn(3, requires_grad=True),
    "parameters": lambda: list(trained()[0].parameters()),
    "an optimizer's state": lambda: trained()[1].state_dict(),
    "sparse": lambda: torch.eye(4).to_sparse(),
    "sparse rows": lambda: torch.eye(4).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)]),
    "quantized": lambda: torch.quantize_per_tensor(torch.randn(4), 0.1, 3, torch.qint8),
    "quantized by channel": lambda: torch.quantize_per_channel(
        torch.randn(2, 3), torch.tensor([0.1, 0.2]), torch.tensor([1, 2]), 0, torch.quint8
    ),
    "on no device": lambda: torch.empty(3, 4, device="meta"),
    "all sizes": mixed_sizes,
    "many": lambda: {f"{number}": pattern(40_000, number) for number in range(300)},
}


def essence(obj: Any, storages: dict[int, int] | None = None) -> Any:
    """What makes two objects equal: structure, tensors to the last bit, and which of them share memory."""
    storages = {} if storages is None else storages
    if isinstance(obj, torch.Tensor):
        shape = None if obj.is_nested else obj.shape
        return type(obj), obj.dtype, shape, obj.requires_grad, vars(obj), _memory(obj.detach(), storages)
    if isinstance(obj, Mapping):
        attributes = essence(vars(obj), storages) if hasattr(obj, "__dict__") else None
        return type(obj), [(key, essence(value, storages)) for key, value in obj.items()], attributes
    if isinstance(obj, list | tuple):
        return type(obj), [essence(value, storages) for value in obj]
    return obj


def _memory(tensor: torch.Tensor, storages: dict[int, int]) -> Any:
    if tensor.layout == torch.sparse_coo:
        return essence([tensor._indices(), tensor._values(), tensor.is_coalesced()], storages)
    if tensor.layout == torch.sparse_csr:
        return essence([tensor.crow_indices(), tensor.col_indices(), tensor.values()], storages)
    if tensor.is_nested:
        return essence([part.clone() for part in tensor.unbind()])
    if tensor.is_meta:
        return tensor.stride()
    storage = tensor.untyped_storage()
    number = storages.setdefault(storage._cdata, len(storages))
    scales = str(tensor) if tensor.is_quantized else ""
    return number, raw(storage), tensor.stride(), tensor.storage_offset(), tensor.is_conj(), tensor.is_neg(), scales


def raw(storage: torch.UntypedStorage) -> bytes:
    """All its bytes."""
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy().tobytes()


def torch_save_content(obj: Any) -> tuple[bytes, dict[str, bytes]]:
    """The pickle of torch.save and the records of storages."""
    stream = io.BytesIO()
    torch.save(obj, stream)
    with zipfile.ZipFile(stream) as archive:
        records = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
    content = records.pop("data.pkl")
    return content, {name: record for name, record in records.items() if name.startswith("data/")}


def write_zip(path: Path, content: bytes, storages: Mapping[str, bytes], **options: Any) -> Path:
    """A container by Python's own writer, which aligns nothing."""
    with zipfile.ZipFile(path, "w", **options) as archive:
        archive.writestr("archive/data.pkl", content)
        archive.writestr("archive/version", b"3\n")
        for name, storage in storages.items():
            archive.writestr(f"archive/{name}", storage)
    return path


def set_entry(path: Path, name: str, field: tuple[int, str], value: int) -> None:
    """Changes a number in the zip directory."""
    data = bytearray(path.read_bytes())
    place = data.rfind(name.encode()) - 46
    assert data[place : place + 4] == b"PK\1\2"
    struct.pack_into(field[1], data, place + field[0], value)
    path.write_bytes(data)


def tensor_pickle(
    size: Any, stride: Any, offset: int = 0, key: str = "0", count: int = 4, kind: str = "FloatStorage"
) -> bytes:
    """The pickle of ``{"t": a tensor}`` with any numbers at all."""

    def plain(value: Any) -> bytes:
        return pickle.dumps(value, protocol=2)[2:-1]

    def text(word: str) -> bytes:
        return b"X" + struct.pack("<I", len(word)) + word.encode()

    storage = b"(" + text("storage") + f"ctorch\n{kind}\n".encode() + text(key) + text("cpu") + plain(count) + b"tQ"
    arguments = storage + plain(offset) + plain(size) + plain(stride) + b"\x89" + b"}"
    return b"\x80\x02}X\x01\x00\x00\x00tctorch._utils\n_rebuild_tensor_v2\n(" + arguments + b"tRs."


class Evil:
    """A pickle that makes a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (str(self.path), "w")


def saved_by_torch(path: Path, obj: Any) -> Path:
    torch.save(obj, path)
    return path


def saved_here(path: Path, obj: Any) -> Path:
    nvme_ops.save(obj, path)
    return path


def bytes_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What each call from now on reads of storages."""
    return watched(
        monkeypatch, new_tensors, "read", lambda _, fd, wanted, *__: sum(end - start for start, end, _ in wanted)
    )
