"""Memory beside the tensors: at most 64 MiB, however large they are and however they lie."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import nvme_ops
from nvme_ops.checkpoint import background
from tests.conftest import MIB, in_child
from tests.private_device import private_device

SIZE = 512 * MIB
ALLOWED = 64 * MIB

Tensors = dict[str, torch.Tensor]
Work = tuple[Callable[[], object], int]  # what is done, and the bytes of the tensors that come of it


def plain() -> Tensors:
    """16 tensors that lie as they are stored."""
    return {f"{number:02}": torch.full((SIZE // 64,), float(number)) for number in range(16)}


def transposed() -> Tensors:
    """Two large ones that do not."""
    return {name: torch.full((8192, SIZE // 65536), 1.0).t() for name in "ab"}


def zeros(tensors: Tensors) -> Tensors:
    for tensor in tensors.values():
        tensor.zero_()
    return tensors


def there(tensors: Tensors) -> Tensors:
    """On a device that is simulated in host memory."""
    return {name: private_device().tensor(tensor) for name, tensor in tensors.items()}


def prepare(folder: Path) -> int:
    """The files that are loaded."""
    nvme_ops.save(plain(), folder / "plain.safetensors", durable=False)
    nvme_ops.save(transposed(), folder / "transposed.safetensors", durable=False)
    head = json.dumps({
        "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "b": {"dtype": "F32", "shape": [SIZE // 4], "data_offsets": [1, SIZE + 1]},
    }).encode()  # fmt: skip
    with open(folder / "odd.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(head)) + head + b"a")
        return file.truncate(8 + len(head) + 1 + SIZE)


def save(tensors: Tensors, path: Path) -> Work:
    return lambda: nvme_ops.save(tensors, path, durable=False), 0


def save_in_background(tensors: Tensors, path: Path, strategy: Any, memory: int | None = None) -> Work:
    return lambda: nvme_ops.save_async(tensors, path, strategy=strategy, memory=memory, durable=False).result(), 0


def released(tensors: Tensors, path: Path) -> Work:
    """What is left of the copies' memory."""
    before = figure("VmRSS")
    nvme_ops.save_async(tensors, path, durable=False).result()
    background.release_memory()
    return lambda: None, before - figure("VmRSS")


def load(path: Path, size: int = SIZE, **options: object) -> Work:
    return lambda: KEPT.append(nvme_ops.load(path, **options)), size  # type: ignore[arg-type]


def save_dcp(folder: Path, tensors: Tensors) -> Work:
    return lambda: nvme_ops.dcp.save(tensors, folder), 0


def load_dcp(folder: Path, tensors: Tensors, verify: bool) -> Work:
    nvme_ops.dcp.save(tensors, folder)
    return lambda: nvme_ops.dcp.load(tensors, folder, verify=verify), 0


def mixed() -> Tensors:
    return {**plain(), **transposed(), **{f"small{number}": torch.ones(1000) for number in range(500)}}


KEPT: list[Tensors] = []

SAVED: dict[str, Callable[[Path], Work]] = {
    "save": lambda path: save(plain(), path),
    "save, transposed": lambda path: save(transposed(), path),
    "save, many small": lambda path: save({f"{number}": torch.zeros(1024) for number in range(20_000)}, path),
    "save, on a device": lambda path: save(there(plain()), path),
    "save_async, copy_free, transposed": lambda path: save_in_background(transposed(), path, "copy_free"),
    "save_async, no memory": lambda path: save_in_background(transposed(), path, "copy", 0),
    "save_async, its memory released": lambda path: released(plain(), path),
    "dcp.save": lambda path: save_dcp(path.with_name("dcp"), mixed()),
    "dcp.load": lambda path: load_dcp(path.with_name("dcp"), mixed(), False),
    "dcp.load, verified": lambda path: load_dcp(path.with_name("dcp"), mixed(), True),
}
LOADED: dict[str, Callable[[Path], Work]] = {
    "load": lambda folder: load(folder / "plain.safetensors", mmap=False, verify=True),
    "load, mapped": lambda folder: load(folder / "plain.safetensors", mmap=True, verify=True),
    "load, every other": lambda folder: load(
        folder / "plain.safetensors", SIZE // 2, mmap=False, keys=[f"{number:02}" for number in range(0, 16, 2)]
    ),
    "load, into": lambda folder: load(folder / "plain.safetensors", 0, into=zeros(plain()), verify=True),
    "load, into transposed, verified": lambda folder: load(
        folder / "transposed.safetensors", 0, into=zeros(transposed()), verify=True
    ),
    "load, at odd places": lambda folder: load(folder / "odd.safetensors", mmap=False),
    "load, to a device": lambda folder: load(folder / "plain.safetensors", map_location=private_device().device()),
    "load, into a device's": lambda folder: load(folder / "plain.safetensors", 0, into=there(plain()), verify=True),
}


def figure(name: str) -> int:
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(f"{name}:"))


def peak(work: Callable[[], object]) -> int:
    """The most memory in use at any time, beyond what was in use before."""
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")  # forgets the peak until now
    before = figure("VmRSS")
    work()
    return figure("VmHWM") - before


def measure(what: str, path: Path) -> int:
    """Returns the bytes beside the tensors."""
    with private_device().pinned_memory(True):
        work, own = {**SAVED, **LOADED}[what](path)
        return peak(work) - own


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What is loaded."""
    folder = tmp_path_factory.mktemp("memory")
    private_device()  # here: torch learns of a device once
    in_child(lambda: prepare(folder))
    nvme_ops.dcp.save({"imports": torch.ones(1)}, folder / "dcp")
    yield folder
    shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*(torch.distributed is disabled|Detected an existing checkpoint)")
@pytest.mark.parametrize("what", [*SAVED, *LOADED])
def test_memory_beside_the_tensors(files: Path, what: str) -> None:
    path = files / "saved.safetensors" if what in SAVED else files

    def body() -> None:
        found = measure(what, path)
        assert found <= ALLOWED, f"{found / MIB:.0f} MiB"

    in_child(body)
