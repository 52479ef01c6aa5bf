"""One capability after the other, at work in a folder of its own."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from nvme_ops.base.native import native
from tests.contract.adapters import Capability
from tests.contract.suite import ADAPTERS, NEEDS


@pytest.fixture(params=sorted(ADAPTERS))
def kind(request: pytest.FixtureRequest) -> type[Capability]:
    """Each of them in turn."""
    name = str(request.param)
    for module in NEEDS.get(name, "").split():
        pytest.importorskip(module)
    native()  # loaded once, not in every child
    return ADAPTERS[name]


@pytest.fixture
def make(kind: type[Capability], folder: Path) -> Iterator[Callable[..., Capability]]:
    """Makes one at work in a folder of the name; all are closed in the end."""
    with contextlib.ExitStack() as end:

        def made(name: str = "work", parent: Path | None = None, **options: object) -> Capability:
            place = (parent or folder) / name
            place.mkdir(exist_ok=True)
            one = kind(place, **options)  # type: ignore[arg-type]
            end.callback(one.close)
            return one

        yield made


@pytest.fixture
def one(make: Callable[..., Capability]) -> Capability:
    made = make()
    made.work()
    return made


@pytest.fixture
def lost_unraisable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ctrl-C in what frees an object is lost, and so is ``no_grad``'s end; pytest would keep the exception."""
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    yield
    torch.set_grad_enabled(True)
