"""What the constructor refuses, and the environment's say in the backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import nvme_ops
from nvme_ops import aio_handle
from nvme_ops._native import native
from tests.conftest import BACKENDS, pattern

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
        aio_handle(cache=name)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["uring", "IO_URING", " ", "threads "])
def test_unknown_backend(name: str) -> None:
    with pytest.raises(ValueError, match=rf"backend='{name}' is not one of auto, {', '.join(BACKENDS)}"):
        aio_handle(backend=name)


@pytest.mark.parametrize("arguments", [{"backend": 5}, {"cache": 5}, {"nonsense": 1}])
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


@pytest.mark.parametrize("name", ["single_submit", "overlap_events"])
def test_switches_of_another_type(name: str) -> None:
    """As pybind11's caster, which knows numbers and None for bools, and so DeepNVMe's programs may rely on it."""
    others: list[Any] = ["false", "True", "", b"", [], [False], {}, object()]
    for value in others:
        with pytest.raises(TypeError, match=rf"{name} must be a bool, not {type(value).__name__}"):
            aio_handle(**{name: value})
    bools: list[Any] = [True, 1, np.bool_(True), np.int64(1), 1.0, torch.tensor(True)]
    for value in bools:
        assert getattr(aio_handle(**{name: value}), f"get_{name}")() is True
    bools = [False, 0, np.bool_(False), None]
    for value in bools:
        assert getattr(aio_handle(**{name: value}), f"get_{name}")() is False


def test_the_environment_names_the_cache_mode(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    path, data, back = folder / "file", pattern(1 << 20), torch.zeros(1 << 20, dtype=torch.uint8)
    for value, given, mode in [
        ("direct", None, "direct"),
        ("buffered", None, "buffered"),
        ("auto", None, "auto"),
        ("", None, "auto"),
        ("direct", "buffered", "buffered"),
        ("nonsense", "auto", "auto"),
    ]:
        monkeypatch.setenv("NVME_OPS_CACHE", value)
        handle = aio_handle(cache=given)  # type: ignore[arg-type]
        assert f"cache='{mode}'" in repr(handle)
        handle.sync_pwrite(data, path)
        handle.sync_pread(back.zero_(), path)
        assert torch.equal(back, data)
    monkeypatch.delenv("NVME_OPS_CACHE")
    assert "cache='auto'" in repr(aio_handle())


@pytest.mark.parametrize("name", ["DIRECT", "auto ", "0", "none"])
def test_the_environment_names_no_cache_mode(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("NVME_OPS_CACHE", name)
    with pytest.raises(ValueError, match=f"NVME_OPS_CACHE='{name}' is not one of auto, direct, buffered"):
        aio_handle()
    assert aio_handle(cache="direct").wait() == 0


def test_the_gds_handle_heeds_the_environment_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVME_OPS_GDS", "off")
    monkeypatch.setenv("NVME_OPS_CACHE", "nonsense")
    with pytest.raises(ValueError, match="NVME_OPS_CACHE='nonsense' is not one of"):
        nvme_ops.gds_handle()
