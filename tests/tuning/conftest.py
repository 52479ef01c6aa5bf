"""What the tests of adaptive and tuned handles share: nothing is known at first; transfers, and what was learned."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nvme_ops import aio_handle
from nvme_ops.base.settings import PAGE
from nvme_ops.io.tuning import adaptive
from nvme_ops.io.tuning.adaptive import TransferClass
from nvme_ops.op_builder.trust import default_root
from tests.conftest import MIB

OPS = str(default_root().parent)  # with another cache folder the op would be compiled anew
MANY = 30  # transfers, by which every class has settled, and before a changed cost counts


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing is known at first."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", OPS)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(adaptive.MODE, raising=False)
    adaptive.forget()
    return tmp_path / "cache" / "nvme_ops" / "tune"


def aligned(size: int) -> torch.Tensor:
    """Memory that stays of one class: the pool's becomes huge pages after a while, torch's is at any address."""
    memory = torch.zeros(size + PAGE, dtype=torch.uint8)
    begin = -memory.data_ptr() % PAGE
    return memory[begin : begin + size]


def write(handle: aio_handle, folder: Path, times: int = MANY, size: int = 2 * MIB) -> None:
    data = aligned(size)
    for _ in range(times):
        handle.sync_pwrite(data, folder / "used", 0)


def only(handle: aio_handle, **wanted: object) -> TransferClass:
    found = [one for one in handle.learned() if all(getattr(one, name) == value for name, value in wanted.items())]
    assert len(found) == 1, f"{found}, of {handle.learned()}"
    return found[0]
