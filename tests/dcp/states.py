"""What the tests of nvme_ops.dcp save and load in one process."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from nvme_ops.dcp import NvmeStorageWriter
from tests.conftest import MIB

needs_fork = pytest.mark.skipif(
    torch.cuda.is_available(), reason="DCP asks CUDA about every tensor, and CUDA does not survive the test's fork"
)


def state(seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype)

    return {
        "model": {
            "weight": random(300, 333),
            "large": random(3 * MIB),
            "turned": random(700, 601).t(),
            "conjugate": random(5, 6, dtype=torch.complex64).conj(),
            "part": random(64, 64)[3:, ::2],
            "half": random(7).bfloat16(),
            "empty": torch.empty(0, 3),
            "scalar": random(),
            "flags": random(9) > 0,
        },
        "step": seed,
        "words": ["a", {"b": seed}],
    }


def equal(actual: Any, expected: Any) -> bool:
    if isinstance(expected, dict):
        return actual.keys() == expected.keys() and all(equal(actual[name], expected[name]) for name in expected)
    if isinstance(expected, torch.Tensor):
        return actual.dtype == expected.dtype and torch.equal(actual, expected)
    return bool(actual == expected)


def save(path: Path, seed: int, **settings: Any) -> None:
    dcp.save(state(seed), storage_writer=NvmeStorageWriter(path, **settings))


def load(reader: Any) -> dict[str, Any]:
    loaded = state(99)
    dcp.load(loaded, storage_reader=reader)
    return loaded


def why_of(call: Callable[[], object]) -> BaseException:
    """What the rank met, of which DCP makes an exception for all."""
    with pytest.raises(dcp.CheckpointException) as caught:
        call()
    failures: dict[int, Any] = caught.value.failures
    return failures[0][0]


def why(reader: Any) -> BaseException:
    """Why this reader could not load ``state``."""
    return why_of(lambda: load(reader))


def files(path: Path) -> list[str]:
    return sorted(os.listdir(path))
