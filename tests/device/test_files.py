"""Tensors of files that come to an accelerator: the right values, aligned as torch aligns its own.

Kernels for operands that are less aligned are slower and round otherwise.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import safetensors.torch
import torch

import nvme_ops
from nvme_ops.data import Loader
from nvme_ops.filesystem.publication import open_to_read
from nvme_ops.formats import safetensors_format as layout
from nvme_ops.io.tensors import DEVICE_ALIGNMENT
from nvme_ops.measure.files import cached_share
from nvme_ops.memory.tier import tier_on
from nvme_ops.offload.residency.residency import Residency
from nvme_ops.offload.weights.stored import Weights, stored_tensors
from nvme_ops.offload.weights.window import Window, memory_for
from nvme_ops.storage.source import WeightFile
from tests.conftest import MIB, pattern, store
from tests.data.samples import sample, write
from tests.device.kinds import Device, in_own_process

TENSORS = {  # by the name, which is the order in the file: each after an odd number of bytes, but for the first two
    "a": torch.arange(1 << 19, dtype=torch.float32),
    "b": torch.arange(3, dtype=torch.float32),
    "c": torch.arange(1 << 18, dtype=torch.float32),
    "d": torch.arange(5, dtype=torch.bfloat16),
    "e": torch.arange(4096, dtype=torch.bfloat16),
    "f": torch.empty(0, 3),
}


def require_aligned(device: Device, tensors: dict[str, torch.Tensor]) -> None:
    """Fails where values differ, or a tensor does not begin where torch would let it begin."""
    for name, tensor in tensors.items():
        assert tensor.device == device.empty(0).device, name
        assert tensor.storage_offset() * tensor.itemsize % DEVICE_ALIGNMENT == 0, name
        assert torch.equal(device.peek(tensor).view(tensor.dtype), TENSORS[name].flatten()), name


@pytest.mark.parametrize("kind", ["safetensors", "others' safetensors", "pt"])
def test_load(device: Device, folder: Path, kind: str) -> None:
    there = device.empty(0).device
    path = folder / ("file.pt" if kind == "pt" else "file.safetensors")
    save = safetensors.torch.save_file if kind == "others' safetensors" else nvme_ops.save
    save(TENSORS, path)
    loaded = nvme_ops.load(path, map_location=there, handle=device.handle())
    assert loaded.keys() == TENSORS.keys()
    require_aligned(device, loaded)
    some = ["c", "e"]
    require_aligned(device, nvme_ops.load(path, map_location=str(there), keys=some, handle=device.handle()))


def test_weights_that_are_streamed(device: Device, folder: Path) -> None:
    """From a file in which they begin at multiples of 8 bytes, as the format lets them."""
    path, there = os.fspath(folder / "file.safetensors"), device.empty(0).device
    safetensors.torch.save_file(TENSORS, path)
    file = WeightFile(open_to_read(path), path, device.handle())
    stored = dict(stored_tensors(file, layout.read(file.file.fileno(), path), Weights(), there))
    assert any(weight.source.skipped % DEVICE_ALIGNMENT for weight in stored.values())
    assert stored["f"][:, :2].shape == (0, 2)
    sources = [weight.source for weight in stored.values()]
    nbytes = memory_for(4 * sum(tensor.nbytes for tensor in TENSORS.values()), sources)
    window = Window(Residency(), tier_on(there, nbytes).share(), sources)
    for _ in range(2):
        require_aligned(device, {name: window.fetch(weight.source) for name, weight in stored.items() if weight.nbytes})
    window.close()
    file.close()


@in_own_process
@pytest.mark.parametrize(("cached", "lanes", "threads"), [(True, None, 4), (True, 1, 1), (False, None, 1)])
def test_what_the_page_cache_has_is_copied_by_several_lanes(
    device: Device, folder: Path, cached: bool, lanes: int | None, threads: int
) -> None:
    size = 20 * MIB
    data, back = pattern(size), device.empty(size)
    path = store(folder / "file", data)
    if cached_share(str(path), size) != 0:
        pytest.skip("what is in the page cache cannot be told, or not be changed, here")
    if cached:
        path.read_bytes()
    with nvme_ops.aio_handle(intra_op_parallelism=lanes) as handle:
        before = set(os.listdir("/proc/self/task"))
        handle.sync_pread(back, path)
        assert len(set(os.listdir("/proc/self/task")) - before) == threads
        assert handle.statistics().cached_bytes == size * cached
    assert torch.equal(device.peek(back), data)


def test_columns_and_lists(device: Device, folder: Path) -> None:
    write(folder / "store", 12)
    for step, batch in enumerate(Loader(folder / "store", 4, device=device.empty(0).device)):
        assert device.peek(batch["label"]).view(torch.int64).tolist() == list(range(4 * step, 4 * step + 4))
        for number, image in enumerate(batch["image"], 4 * step):
            assert torch.equal(device.peek(image), sample(number)["image"])
        assert batch["name"][0] == f"sample {4 * step}"
