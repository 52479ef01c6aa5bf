"""What the tests of sessions and stores share."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from nvme_ops.storage import Session, TensorStore


@pytest.fixture
def session(folder: Path) -> Iterator[Session]:
    with Session(folder, name="job") as opened:
        yield opened


def kept(folder: Path, fingerprint: str = "") -> Session:
    return Session(folder, name="job", reuse=True, fingerprint=fingerprint)


def same(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Bit by bit, NaN and all."""
    plain = [
        tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
        for tensor in (first, second)
    ]
    return (first.dtype, first.shape) == (second.dtype, second.shape) and torch.equal(
        *(tensor.reshape(-1).view(torch.uint8) for tensor in plain)
    )


def got(store: TensorStore, key: str, out: torch.Tensor | None = None) -> torch.Tensor:
    future = store.get(key, out)
    assert future.result() == future.tensor.nbytes
    return future.tensor


def failing(monkeypatch: pytest.MonkeyPatch, call: str, path: str) -> None:
    """Lets the next ``call`` for the file fail with EIO, once."""
    real, failed = getattr(os, call), list[int]()

    def fail(fd: int) -> None:
        if not failed and os.path.samefile(f"/proc/self/fd/{fd}", path):
            failed.append(fd)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(fd)

    monkeypatch.setattr(os, call, fail)
