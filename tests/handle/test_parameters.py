"""What the constructor refuses, and the environment's say in the backend and the cache mode; its end."""

from __future__ import annotations

import pickle
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


def test_switches_are_what_pybind11_takes_for_bools() -> None:
    for value in ("false", "", b"", [], {}, object()):
        refused(TypeError, "single_submit must be a bool", single_submit=value)
        refused(TypeError, "overlap_events must be a bool", overlap_events=value)
    switches: list[Any] = [True, 1, np.int64(1), 1.0, torch.tensor(True), False, 0, np.bool_(False), None]
    for switch in switches:
        handle = aio_handle(single_submit=switch, overlap_events=switch)
        assert handle.get_single_submit() is handle.get_overlap_events() is bool(switch)


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


def test_the_environment_names_the_cache_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVME_OPS_GDS", "off")
    for value, given, mode in (
        ("direct", None, "direct"),
        ("", None, "auto"),
        ("direct", "buffered", "buffered"),
        ("nonsense", "auto", "auto"),
        ("DIRECT", None, None),
    ):
        monkeypatch.setenv("NVME_OPS_CACHE", value)
        for kind in (aio_handle, nvme_ops.gds_handle):
            if mode is None:
                with pytest.raises(ValueError, match=f"NVME_OPS_CACHE='{value}' is not one of auto, direct, buffered"):
                    kind()
            else:
                assert f"cache='{mode}'" in repr(kind(cache=given))  # type: ignore[arg-type]


# Beside its work


def test_a_handle_ends_with_its_block_and_raises_what_was_pending(tmp_path: Path) -> None:
    data = pattern(100_001)
    with aio_handle(intra_op_parallelism=2) as handle:
        handle.async_pwrite(data, tmp_path / "file")
    assert (tmp_path / "file").stat().st_size == 100_001  # what was pending is done
    for use in (handle.wait, lambda: handle.read(data, tmp_path / "file"), lambda: handle.backend, handle.statistics):
        with pytest.raises(ValueError, match="the handle is closed"):
            use()
    handle = aio_handle()
    handle.async_pread(torch.zeros(10), tmp_path / "nosuch")
    with pytest.raises(FileNotFoundError):
        handle.close()
    assert handle.closed


def test_a_handle_says_what_it_is_and_is_pickled_by_that() -> None:
    handle = aio_handle(4096, 8, True, False, backend="threads", cache="direct")
    words = (
        "aio_handle(block_size=4096, queue_depth=8, single_submit=True, overlap_events=False, "
        "intra_op_parallelism=None, backend='threads', cache='direct')"
    )
    found = pickle.loads(pickle.dumps(handle))
    assert found is not handle
    assert repr(found) == repr(handle) == words
    handle.close()
    assert repr(handle) == words + " closed"
