"""Where models of the tests compute."""

from __future__ import annotations

import pytest
import torch

from tests.offload.training import make_small_chunks, take_few_in_flight
from tests.offload.where import on_the_simulated_device  # noqa: F401

_HAS_GPU = torch.cuda.is_available()


@pytest.fixture(autouse=True)
def _gpu_for_tests_of_it(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are of the CPU, which is not the default where there is a GPU."""
    if _HAS_GPU and request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # of programs that they start


@pytest.fixture
def few_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small models wait for writes of activations, as large ones do."""
    take_few_in_flight(monkeypatch.setattr)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Optimizers hold states in what a budget has beyond 1 MiB."""
    make_small_chunks(monkeypatch.setattr)
