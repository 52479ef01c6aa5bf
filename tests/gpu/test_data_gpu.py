"""Loader with a real GPU: batches in page-locked memory, copied while the next ones are read."""

from __future__ import annotations

from pathlib import Path

import torch

from nvme_ops.data import Loader
from tests.data.samples import fixed, write_fixed
from tests.gpu.support import on_a_gpu

pytestmark = on_a_gpu


def test_batches_arrive(folder: Path) -> None:
    write_fixed(folder / "store", 256, 64 << 10, shard_bytes="4M")
    for _ in range(3):
        for step, batch in enumerate(Loader(folder / "store", 16, device="cuda")):
            assert batch.is_cuda
            assert torch.equal(batch[3].cpu(), fixed(16 * step + 3, 64 << 10))


def test_decoded_batches_arrive(folder: Path) -> None:
    write_fixed(folder / "store", 64, 4096)
    loader = Loader(folder / "store", 16, device="cuda", decode=lambda sample: sample.float() / 255)
    for step, batch in enumerate(loader):
        assert torch.allclose(batch[0].cpu(), fixed(16 * step).float() / 255)
