"""The folder that a capability is given is made where it is missing, and those above it are not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nvme_ops.data import AsyncLog, SampleWriter
from nvme_ops.offload import NvmeOptimizer, save_on_nvme, stream_weights, swap_params


def network() -> Any:
    return nn.Linear(64, 64)


MAKERS: tuple[Callable[[Path], Any], ...] = (
    lambda folder: AsyncLog(folder / "log"),
    SampleWriter,
    lambda folder: NvmeOptimizer(network().parameters(), torch.optim.AdamW, folder),
    lambda folder: swap_params(network(), folder, memory_budget="8M", min_bytes=1),
    save_on_nvme,
    lambda folder: stream_weights(network().requires_grad_(False), folder, memory_budget="8M"),
)


@pytest.mark.parametrize("maker", MAKERS)
def test_the_last_folder_of_a_path_is_made(maker: Callable[[Path], Any], folder: Path) -> None:
    with pytest.raises(FileNotFoundError, match="only the last one of a path is made") as missing:
        maker(folder / "disk" / "job" / "new")
    assert missing.value.filename == str(folder / "disk")
    (folder / "file").write_bytes(b"")
    with pytest.raises(NotADirectoryError, match="Not a directory") as no_folder:
        maker(folder / "file")
    assert no_folder.value.filename == str(folder / "file")
    assert list(folder.iterdir()) == [folder / "file"]
    made = maker(folder / "new")
    assert (folder / "new").is_dir()
    made.close()
