"""What the constructor refuses, and the environment's say in the backend and the cache mode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import nvme_ops
from nvme_ops import aio_handle
from nvme_ops._native import native
from tests.conftest import pattern

SIZES = ("block_size", "queue_depth", "intra_op_parallelism", "num_threads")


def refused(error: type[Exception], match: str, **arguments: Any) -> None:
    with pytest.raises(error, match=match):
        aio_handle(**arguments)


def test_sizes_out_of_range_or_of_another_type() -> None:
    for name in SIZES:
        told = name.replace("num_threads", "intra_op_parallelism")
        for value in (0, -1, -(1 << 63), 1 << 63, 1 << 100, -(1 << 100)):
            refused(ValueError, told, **{name: value})
        for other in ("8", 1.5, True, [1], b"1"):
            refused(TypeError, told, **{name: other})
    assert aio_handle(intra_op_parallelism=1024).get_thread_count() == 1024
    refused(ValueError, "at most 1024", intra_op_parallelism=1025)


@pytest.mark.parametrize("name", ["single_submit", "overlap_events"])
def test_switches_are_what_pybind11_takes_for_bools(name: str) -> None:
    for value in ("false", "True", "", b"", [], [False], {}, object()):
        refused(TypeError, f"{name} must be a bool", **{name: value})
    switches: list[Any] = [
        True,
        1,
        np.bool_(True),
        np.int64(1),
        1.0,
        torch.tensor(True),
        False,
        0,
        np.bool_(False),
        None,
    ]
    for switch in switches:
        assert getattr(aio_handle(**{name: switch}), f"get_{name}")() is bool(switch)


def test_the_environment_names_the_backend(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVME_OPS_BACKEND", backend)
    assert aio_handle().backend == backend
    assert aio_handle(backend="threads").backend == "threads"  # the argument counts more
    best = next(name for name, reason in native().backends().items() if reason is None)
    for nothing in ("", "auto"):
        monkeypatch.setenv("NVME_OPS_BACKEND", nothing)
        assert aio_handle().backend == aio_handle(backend="auto").backend == best
    monkeypatch.setenv("NVME_OPS_BACKEND", "spdk")
    refused(ValueError, "NVME_OPS_BACKEND='spdk' is not one of auto, io_uring, libaio, threads")
    assert aio_handle(backend="threads").backend == "threads"


@pytest.mark.parametrize(
    ("value", "given", "mode"),
    [
        ("direct", None, "direct"),
        ("buffered", None, "buffered"),
        ("", None, "auto"),
        ("direct", "buffered", "buffered"),
        ("nonsense", "auto", "auto"),
        ("nonsense", None, ""),
        ("DIRECT", None, ""),
    ],
)
def test_the_environment_names_the_cache_mode(
    monkeypatch: pytest.MonkeyPatch, folder: Path, value: str, given: Any, mode: str
) -> None:
    monkeypatch.setenv("NVME_OPS_CACHE", value)
    monkeypatch.setenv("NVME_OPS_GDS", "off")
    for kind in (aio_handle, nvme_ops.gds_handle):
        if not mode:
            with pytest.raises(ValueError, match=f"NVME_OPS_CACHE='{value}' is not one of auto, direct, buffered"):
                kind()
            continue
        handle, data, back = kind(cache=given), pattern(1 << 20), torch.zeros(1 << 20, dtype=torch.uint8)
        assert f"cache='{mode}'" in repr(handle)
        handle.sync_pwrite(data, folder / "file")
        handle.sync_pread(back, folder / "file")
        assert torch.equal(back, data)
