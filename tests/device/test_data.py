"""Batches that are copied to an accelerator: from memory that is theirs, with the right bytes."""

from __future__ import annotations

from pathlib import Path

import torch

from nvme_ops.data import Loader
from tests.data.samples import fixed, sample, write, write_fixed
from tests.device.kinds import Device

pytest_plugins = ("tests.fake_cufile.fixtures",)


def test_batches_of_one_size(device: Device, folder: Path) -> None:
    write_fixed(folder / "store", 40)
    loader = Loader(folder / "store", 8, shuffle=True, device=device.empty(0).device)
    seen = []
    for batch in loader:
        assert batch.device == device.empty(0).device
        for row in batch:
            here = device.peek(row)
            seen.append(next(number for number in range(40) if torch.equal(here, fixed(number))))
    assert sorted(seen) == list(range(40))


def test_columns_and_lists(device: Device, folder: Path) -> None:
    write(folder / "store", 12)
    for step, batch in enumerate(Loader(folder / "store", 4, device=device.empty(0).device)):
        assert device.peek(batch["label"]).view(torch.int64).tolist() == list(range(4 * step, 4 * step + 4))
        for number, image in enumerate(batch["image"], 4 * step):
            assert torch.equal(device.peek(image), sample(number)["image"])
        assert batch["name"][0] == f"sample {4 * step}"
