"""Makes the files of ``tests/golden/1``, as this version of the package writes them.

    python -m tests.golden.make tests/golden/2     # once, when a format has changed; what is there stays

Each function writes one kind of file, which says nothing of the machine it was made on.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import nvme_ops
from nvme_ops import dcp
from nvme_ops.base.settings import PAGE, Settings
from nvme_ops.data import AsyncLog, SampleWriter
from nvme_ops.filesystem.device import Identity
from nvme_ops.io.tuning import store as tuning_store
from nvme_ops.offload import NvmeOptimizer
from nvme_ops.storage import Session, TensorStore
from nvme_ops.storage.slab import Slab

IDENTITY = Identity(("nvme made up 0001 1 GB",), "ext4", "f00d", "6.1", 4, "cpu", "io_uring")
SETTINGS = Settings(queue_depth=48)
STEPS, RATE = 2, 0.5


def tensors() -> dict[str, torch.Tensor]:
    return {
        "weight": torch.arange(600, dtype=torch.float32).view(20, 30),
        "half": torch.arange(7, dtype=torch.bfloat16),
        "scalar": torch.tensor(3, dtype=torch.int64),
        "empty": torch.zeros(0, 5),
    }


def stepped(parameter: torch.nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
    """One step, with gradients that depend on nothing but the parameter."""
    parameter.grad = parameter.detach() / 2 + 1
    optimizer.step()


def opened(param: torch.nn.Parameter, folder: Path) -> NvmeOptimizer:
    """The optimizer of these files."""
    options: Any = {"memory_budget": "1M", "reuse": True, "checksums": True}
    return NvmeOptimizer([param], torch.optim.Adam, folder, lr=RATE, **options)


def parameter() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.arange(24, dtype=torch.float32).view(4, 6))


def records() -> list[bytes]:
    return [b"", b"first", bytes(range(256))]


def samples() -> list[dict[str, object]]:
    return [{"image": bytes([number]) * number, "label": number} for number in range(2)]


def session(folder: Path) -> None:
    with (
        Session(folder, name="golden", reuse=True, fingerprint="1") as opened,
        TensorStore(opened, checksums=True) as store,
    ):
        for name, tensor in tensors().items():
            store.put(name, tensor.t() if name == "weight" else tensor).result()
        store.put("dropped", torch.zeros(5)).result()
        store.drop("dropped")
        store.sync()


def optimizer(folder: Path) -> None:
    param = parameter()
    with opened(param, folder) as opt:
        for _ in range(STEPS):
            stepped(param, opt)
        opt.save_states(folder / "states.safetensors")


def store_of_samples(folder: Path) -> None:
    with SampleWriter(folder, {"image": bytes, "label": torch.int64}, shard_bytes=8) as writer:
        writer.extend(samples())


def log(folder: Path) -> None:
    with AsyncLog(folder / "events") as opened:
        for record in records():
            opened.append(record)


def checkpoints(folder: Path) -> None:
    nvme_ops.save(tensors(), folder / "model.safetensors")
    nvme_ops.save({"nested": [tensors(), 5]}, folder / "model.pt")
    nvme_ops.save(tensors(), folder / "sharded", format="sharded", max_shard_size=2000)


def distributed(folder: Path) -> None:
    dcp.save({**tensors(), "step": 5}, checkpoint_id=folder)


def tuning(folder: Path) -> None:
    with mock.patch.object(tuning_store, "folder", return_value=folder):
        tuning_store.keep(IDENTITY, SETTINGS, {"found": "by hand"})


KINDS: dict[str, Callable[[Path], None]] = {
    "session": session, "optimizer": optimizer, "samples": store_of_samples, "log": log, "checkpoints": checkpoints,
    "dcp": distributed, "tuning": tuning,
}  # fmt: skip


def made(place: Path) -> None:
    """Writes all of them into a folder."""
    small = mock.patch.object(Slab.__init__, "__defaults__", (PAGE,))
    ids = [
        mock.patch(f"nvme_ops.{module}.boot_id", return_value="a start of the machine")
        for module in ("storage.session", "storage.journal", "offload.optimizer.records")
    ]
    with small, ids[0], ids[1], ids[2], mock.patch("nvme_ops.storage.session.machine_id", return_value="a machine"):
        for name, make in KINDS.items():
            (place / name).mkdir(parents=True)
            make(place / name)


if __name__ == "__main__":
    made(Path(sys.argv[1]))
