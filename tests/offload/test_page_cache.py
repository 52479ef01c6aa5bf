"""Weights that do not fit in their budget: the page cache has them where memory is free."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nvme_ops import aio_handle
from nvme_ops.measure.files import cached_bytes, handles_read_the_cache
from nvme_ops.offload import stream_weights
from nvme_ops.storage import page_cache
from tests.conftest import MIB

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not handles_read_the_cache(), reason="NVME_OPS_CACHE=direct leaves the page cache as it is"),
]

WEIGHTS = 8 * MIB


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The machine's, as far as it is free."""
    memory = SimpleNamespace(free=1 << 40)
    monkeypatch.setattr(page_cache, "free_memory", lambda: memory.free)
    monkeypatch.setattr(page_cache, "_PERIOD", 0.0)
    return memory


class Streamed:
    """A model of eight weights of 1 MiB and its file."""

    def __init__(self, folder: Path, budget: str = "3M", **options: Any) -> None:
        torch.manual_seed(1)
        model = torch.nn.Sequential(*(torch.nn.Linear(512, 512, bias=False) for _ in range(8)))
        self.inputs = torch.randn(2, 512)
        self.wanted = model(self.inputs)
        self.model = stream_weights(model, folder, memory_budget=budget, **options)
        (self.path,) = [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size >= WEIGHTS]
        self.forget()

    def forget(self) -> None:
        """The page cache gives up the file, as for a program that needs the memory. Nothing is read meanwhile."""
        for weight in list(self.model._nvme_window.present):
            if weight.arrival is not None:
                weight.arrival.exception()
        with self.path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def cached(self) -> int:
        """Bytes of the file that the page cache has, after a forward pass."""
        assert torch.equal(self.model(self.inputs), self.wanted)
        return cached_bytes(str(self.path)) or 0


@pytest.fixture
def streamed(folder: Path, memory: SimpleNamespace) -> Iterator[Streamed]:
    streamed = Streamed(folder)
    yield streamed
    streamed.model.close()


def test_free_memory_keeps_what_does_not_fit_in_the_budget(streamed: Streamed, memory: SimpleNamespace) -> None:
    memory.free = WEIGHTS - 1
    assert streamed.cached() == 0
    memory.free = 1 << 40
    assert streamed.cached() >= WEIGHTS


def test_what_others_needed_is_cached_again_later(streamed: Streamed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at once: processes whose models fit in the memory one by one would read all of them in vain."""
    streamed.cached()
    streamed.forget()
    assert streamed.cached() == 0
    monkeypatch.setattr(time, "monotonic", lambda now=time.monotonic: now() + page_cache._RENEWAL)
    assert streamed.cached() >= WEIGHTS


@pytest.mark.parametrize("options", [{"budget": "20M"}, {"handle": "direct"}], ids=str)
def test_what_is_read_once_or_directly_is_not_cached(
    folder: Path, memory: SimpleNamespace, options: dict[str, Any]
) -> None:
    if "handle" in options:
        options = {"handle": aio_handle(cache=options["handle"])}
    streamed = Streamed(folder, **options)
    assert streamed.cached() == 0
    streamed.model.close()
