"""Tensors that lie in a mapping of their file, and copies, which nothing done to the file can change."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest
import torch

import nvme_ops
from tests.conftest import in_child

NAMES = pytest.mark.parametrize("name", ["model.safetensors", "model.pt"])


def cached(path: Path) -> Path:
    nvme_ops.save({"a": torch.ones(100_000)}, path)
    path.read_bytes()
    return path


@NAMES
def test_what_is_done_to_a_file_in_the_page_cache_does_not_change_what_was_loaded(tmp_path: Path, name: str) -> None:
    path = cached(tmp_path / name)
    found = nvme_ops.load(path)
    with path.open("r+b") as file:
        file.write(b"\0" * path.stat().st_size)
    os.truncate(path, 0)
    assert bool((found["a"] == 1).all())


@NAMES
def test_a_mapping_follows_what_is_written_over_the_file(tmp_path: Path, name: str) -> None:
    path = cached(tmp_path / name)
    found = nvme_ops.load(path, mmap=True)
    with path.open("r+b") as file:
        file.write(b"\0" * path.stat().st_size)
    assert bool((found["a"] == 0).all())


@NAMES
def test_a_mapping_keeps_no_descriptor(tmp_path: Path, name: str) -> None:
    path = cached(tmp_path / name)

    def body() -> None:
        nvme_ops.load(path, mmap=True)
        used = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 20, used + 20))
        kept = [nvme_ops.load(path, mmap=True) for _ in range(100)]
        assert all(bool((each["a"] == 1).all()) for each in kept)

    in_child(body)


@NAMES
def test_a_change_of_a_mapped_tensor_stays_in_the_process(tmp_path: Path, name: str) -> None:
    path = cached(tmp_path / name)
    nvme_ops.load(path, mmap=True)["a"].zero_()
    assert bool((nvme_ops.load(path)["a"] == 1).all())
