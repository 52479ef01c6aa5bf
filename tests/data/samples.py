"""Samples to write and to recognize: what the tests of ``nvme_ops.data`` share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from nvme_ops.data import SampleWriter
from tests.conftest import pattern

COLUMNS: dict[str, Any] = {"image": bytes, "label": torch.int64, "name": str}


def sample(number: int) -> dict[str, Any]:
    """A sample of varying size, which tells its number; the image of every tenth has 70 KiB."""
    size = 70_000 + number if number % 10 == 9 else number * 37 % 5000
    return {"image": pattern(size, number), "label": number, "name": f"sample {number}"}


def is_sample(found: dict[str, Any], number: int) -> bool:
    wanted = sample(number)
    return bool(
        torch.equal(found["image"], wanted["image"])
        and int(found["label"]) == number
        and found["name"] == wanted["name"]
    )


def write(folders: Path | Sequence[Path], count: int = 100, **more: Any) -> None:
    """A store of samples of varying size, in several files."""
    for folder in [folders] if isinstance(folders, Path) else folders:
        folder.mkdir(exist_ok=True)
    with SampleWriter(folders, COLUMNS, **{"shard_bytes": "256K", **more}) as writer:
        writer.extend(map(sample, range(count)))


def fixed(number: int, nbytes: int = 4096) -> torch.Tensor:
    return pattern(nbytes, number)


def write_fixed(folder: Path, count: int = 100, nbytes: int = 4096, **more: Any) -> None:
    """A store of samples of one size."""
    folder.mkdir(exist_ok=True)
    with SampleWriter(folder, (torch.uint8, (nbytes,)), **{"shard_bytes": "128K", **more}) as writer:
        writer.extend(fixed(number, nbytes) for number in range(count))


def data_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("samples-*"))
