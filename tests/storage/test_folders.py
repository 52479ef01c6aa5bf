"""The folder that a capability is given is made where it is missing, and those above it are not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nvme_ops.data import AsyncLog, SampleWriter
from nvme_ops.offload import NvmeOptimizer, save_on_nvme, stream_weights, swap_gradients, swap_params


def network() -> Any:
    return nn.Linear(64, 64)


def cache(folder: Path) -> Any:
    pytest.importorskip("transformers")
    from nvme_ops.offload import NvmeCache

    return NvmeCache(folder, "8M")


MAKERS: dict[str, Callable[[Path], Any]] = {
    "AsyncLog": lambda folder: AsyncLog(folder / "log"),
    "SampleWriter": lambda folder: SampleWriter(folder),
    "NvmeOptimizer": lambda folder: NvmeOptimizer(network().parameters(), torch.optim.AdamW, folder),
    "swap_params": lambda folder: swap_params(network(), folder, memory_budget="8M", min_bytes=1),
    "swap_gradients": lambda folder: swap_gradients(network().parameters(), folder, memory_budget="8M", min_bytes=1),
    "save_on_nvme": save_on_nvme,
    "stream_weights": lambda folder: stream_weights(network().requires_grad_(False), folder, memory_budget="8M"),
    "NvmeCache": cache,
}


@pytest.mark.parametrize("maker", MAKERS)
def test_the_last_folder_of_a_path_is_made(maker: str, folder: Path) -> None:
    with pytest.raises(FileNotFoundError, match="only the last one of a path is made") as missing:
        MAKERS[maker](folder / "disk" / "job" / "new")
    assert missing.value.filename == str(folder / "disk")
    (folder / "file").write_bytes(b"")
    with pytest.raises(NotADirectoryError, match="Not a directory") as no_folder:
        MAKERS[maker](folder / "file")
    assert no_folder.value.filename == str(folder / "file")
    assert list(folder.iterdir()) == [folder / "file"]
    made = MAKERS[maker](folder / "new")
    assert (folder / "new").is_dir()
    made.close()
