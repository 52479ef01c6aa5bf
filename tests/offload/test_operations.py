"""Each operation of torch's OpInfo, with tensors elsewhere and within ``save_on_nvme``; see ``operations.py``."""

from __future__ import annotations

import random
import re
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.offload.elsewhere import KINDS, alone, apart
from tests.offload.operations import OPERATIONS, POLICIES, check

#: What differs, as a pattern, and why.
DIFFERENT = {
    r"weights? that (are|is) streamed|streamed from storage": "a streamed weight cannot be changed",
    r"keeps shape and memory|cannot be resized|no memory of its own": "not in place of what it is",
    r"(linalg\.(cond|eigvalsh)|norm\.nuc).*other bits": "torch computes vectors, too, where a tensor is of a subclass",
}


def unexplained(names: list[str], way: str, dtype: torch.dtype, most: int, folder: Path) -> list[str]:
    found = apart(names, partial(check, dtype=dtype, way=way, most=most, folder=folder))
    lines = [line for said in found.values() for line in said if not line.endswith(" calls")]
    return [line for line in lines if not any(re.search(pattern, line) for pattern in DIFFERENT)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("way", [*KINDS, *POLICIES])
@alone
def test_operations(way: str, dtype: torch.dtype, folder: Path) -> None:
    names = random.Random(str(dtype)).sample(list(OPERATIONS), len(OPERATIONS) // 2)
    assert unexplained(names, way, dtype, 2, folder) == []
