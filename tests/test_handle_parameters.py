"""What the constructor refuses, and the environment's say in the backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import BACKENDS, pattern

from nvme_ops import aio_handle
from nvme_ops._native import native

SIZES = ("block_size", "queue_depth", "intra_op_parallelism", "num_threads")


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("value", [0, -1, -(1 << 63), 1 << 63, 1 << 100, -(1 << 100)])
def test_sizes_out_of_range(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name.replace("num_threads", "intra_op_parallelism")):
        aio_handle(**{name: value})


@pytest.mark.parametrize("name", SIZES[:3])
@pytest.mark.parametrize("value", ["8", 1.5, True, [1], b"1"])
def test_sizes_of_another_type(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=name):
        aio_handle(**{name: value})


def test_lanes_have_a_limit() -> None:
    assert aio_handle(intra_op_parallelism=1024).get_thread_count() == 1024
    with pytest.raises(ValueError, match="at most 1024"):
        aio_handle(intra_op_parallelism=1025)


@pytest.mark.parametrize("name", ["", "AUTO", "Direct", "no", "auto "])
def test_unknown_cache_mode(name: str) -> None:
    with pytest.raises(ValueError, match="cache must be 'auto', 'direct' or 'buffered'"):
        aio_handle(cache=name)


@pytest.mark.parametrize("name", ["uring", "IO_URING", " ", "threads "])
def test_unknown_backend(name: str) -> None:
    with pytest.raises(ValueError, match=rf"backend='{name}' is not one of auto, {', '.join(BACKENDS)}"):
        aio_handle(backend=name)


@pytest.mark.parametrize("arguments", [{"backend": 5}, {"cache": None}, {"nonsense": 1}])
def test_other_types_for_names(arguments: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        aio_handle(**arguments)


def test_the_best_usable_backend_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NVME_OPS_BACKEND", raising=False)
    best = next(name for name, reason in native().backends().items() if reason is None)
    assert aio_handle().backend == aio_handle(backend="auto").backend == best


def test_the_environment_names_the_backend(backend: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("NVME_OPS_BACKEND", backend)
    handle, data = aio_handle(), pattern(10_000)
    assert handle.backend == backend
    back = torch.zeros_like(data)
    handle.sync_pwrite(data, folder / "file")
    handle.sync_pread(back, folder / "file")
    assert torch.equal(back, data)
    assert aio_handle(backend="threads").backend == "threads"  # the argument counts more


def test_the_environment_names_no_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVME_OPS_BACKEND", "")
    assert aio_handle().backend
    monkeypatch.setenv("NVME_OPS_BACKEND", "spdk")
    with pytest.raises(ValueError, match="NVME_OPS_BACKEND='spdk' is not one of auto, io_uring, libaio, threads"):
        aio_handle()
    assert aio_handle(backend="threads").backend == "threads"
