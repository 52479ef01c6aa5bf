"""Memory beside the tensors: at most 64 MiB, however large they are and however they lie."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import nvme_ops
from nvme_ops.checkpoint import background
from nvme_ops.checkpoint.convert import convert
from tests.conftest import MIB, in_child
from tests.doubles import PrivateDevice, private_device

SIZE = 256 * MIB
ALLOWED = 64 * MIB
PLAIN, TURNED, FOLDER = "plain.safetensors", "turned.safetensors", "dcp"
KEPT: list[Any] = []


def plain() -> dict[str, torch.Tensor]:
    """16 tensors that lie as they are stored."""
    return {f"{number:02}": torch.full((SIZE // 64,), float(number)) for number in range(16)}


def turned() -> dict[str, torch.Tensor]:
    """Two large ones that do not."""
    return {name: torch.full((8192, SIZE // 65536), 1.0).t() for name in "ab"}


def there() -> dict[str, torch.Tensor]:
    """On a device that is simulated in host memory."""
    return {name: private_device().tensor(tensor) for name, tensor in plain().items()}


def mixed() -> dict[str, torch.Tensor]:
    return {**plain(), **turned(), **{f"small{number}": torch.ones(1000) for number in range(500)}}


def prepare(folder: Path) -> None:
    """The files that are loaded."""
    nvme_ops.save(plain(), folder / PLAIN, durable=False)
    nvme_ops.save(turned(), folder / TURNED, durable=False)
    nvme_ops.dcp.save(mixed(), folder / FOLDER)


def save(tensors: Any, folder: Path) -> None:
    nvme_ops.save(tensors, folder / "a.safetensors", durable=False)


def save_async(tensors: Any, folder: Path, **options: Any) -> None:
    nvme_ops.save_async(tensors, folder / "a.safetensors", durable=False, **options).result()


def save_and_release(tensors: Any, folder: Path) -> None:
    """Afterwards the memory of the copies is free again."""
    before = figure("VmRSS")
    save_async(tensors, folder)
    background.release_memory()
    assert figure("VmRSS") - before <= ALLOWED
    forget_peak()


def load(name: str, **options: Any) -> Callable[[Any, Path], None]:
    return lambda _, folder: KEPT.append(nvme_ops.load(folder / name, **options))


def load_into(name: str) -> Callable[[Any, Path], object]:
    return lambda tensors, folder: nvme_ops.load(folder / name, into=tensors, verify=True)


#: Which tensors there are, what is done, and the bytes of the tensors that come of it.
WORK: dict[str, tuple[Callable[[], Any], Callable[[Any, Path], object], int]] = {
    "save": (plain, save, 0),
    "save, turned": (turned, save, 0),
    "save, on a device": (there, save, 0),
    "save_async, no memory": (turned, lambda *given: save_async(*given, memory=0), 0),
    "save_async, its memory released": (plain, save_and_release, 0),
    "dcp.save": (mixed, lambda tensors, folder: nvme_ops.dcp.save(tensors, folder / "another"), 0),
    "dcp.load": (mixed, lambda tensors, folder: nvme_ops.dcp.load(tensors, folder / FOLDER, verify=True), 0),
    "load": (dict, load(PLAIN, verify=True), SIZE),
    "load, every other": (dict, load(PLAIN, keys=[f"{number:02}" for number in range(0, 16, 2)]), SIZE // 2),
    "load, to a device": (dict, load(PLAIN, map_location="privateuseone:0"), SIZE),
    "load, into": (plain, load_into(PLAIN), 0),
    "load, into turned": (turned, load_into(TURNED), 0),
    "convert": (dict, lambda _, folder: convert(str(folder / PLAIN), str(folder / "converted.pt")), 0),
}


def figure(name: str) -> int:
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(f"{name}:"))


def forget_peak() -> None:
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, the_device: PrivateDevice) -> Iterator[Path]:
    """What is loaded."""
    folder = tmp_path_factory.mktemp("memory")
    del the_device  # made here: torch learns of a device once
    nvme_ops.dcp.save({"imports": torch.ones(1)}, folder / "imported")
    in_child(lambda: prepare(folder))
    yield folder
    shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*(torch.distributed is disabled|Detected an existing checkpoint)")
@pytest.mark.parametrize("what", WORK)
def test_memory_beside_the_tensors(files: Path, what: str) -> None:
    def body() -> None:
        make, do, own = WORK[what]
        with private_device().pinned_memory(True):
            tensors = make()
            forget_peak()
            before = figure("VmRSS")
            do(tensors, files)
            grown = figure("VmHWM") - before - own
        assert grown <= ALLOWED, f"{grown / MIB:.0f} MiB"

    in_child(body)
