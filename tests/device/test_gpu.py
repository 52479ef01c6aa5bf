"""What only a real GPU has room or operators for, for every kind of handle."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.conftest import MIB, contents, store
from tests.device.kinds import Gpu, on_gpus, sample

pytestmark = on_gpus


def round_trip(device: Gpu, path: Path, size: int, offset: int = 0, lanes: int = 1) -> None:
    handle, sent = device.handle(lanes), torch.randint(0, 256, (size,), dtype=torch.uint8, device=device.device())
    handle.sync_pwrite(sent, path, offset)
    assert path.stat().st_size == offset + size
    back = device.empty(size)
    handle.sync_pread(back, path, offset)
    assert torch.equal(sent, back)


@pytest.mark.parametrize("offset", [0, 4095, 12345])
def test_513_mib(device: Gpu, folder: Path, offset: int) -> None:
    size, before = 513 * MIB + 7, sample(offset)
    path = store(folder / "file", before)
    round_trip(device, path, size, offset)
    with path.open("rb") as file:
        assert file.read(offset) == before.numpy().tobytes()


@pytest.mark.slow
def test_more_than_4_gib(device: Gpu, folder: Path) -> None:
    size = (4 << 30) + 12345
    free, _ = torch.cuda.mem_get_info()
    if free < 2 * size + (1 << 30) or os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize < size + (1 << 30):
        pytest.skip("needs 9 GiB of the GPU's memory and 5 GiB of disk")
    round_trip(device, folder / "file", size, lanes=2)


def test_conjugated_and_negated_views(device: Gpu, folder: Path) -> None:
    handle, path, data = device.handle(), folder / "file", torch.randn(1000, dtype=torch.complex64)
    for view in (lambda t: t.conj(), lambda t: t.conj().imag):
        handle.write(view(device.tensor(data)), path)
        expected = view(data).resolve_conj().resolve_neg().contiguous()
        assert torch.equal(contents(path), expected.view(-1).view(torch.uint8))


@pytest.mark.parametrize("lanes", [1, 3])
def test_page_locked_tensors_of_torch(device: Gpu, folder: Path, lanes: int) -> None:
    handle, path, pinned = device.handle(lanes), folder / "file", sample(device.odd).pin_memory()
    assert handle.is_pinned(pinned)
    handle.sync_pwrite(pinned, path)
    back = torch.empty(device.odd, dtype=torch.uint8, pin_memory=True)
    handle.sync_pread(back, path)
    assert torch.equal(back, sample(device.odd))
