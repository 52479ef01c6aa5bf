"""Files that were taken for others: the error says what they are and what to do."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch

import nvme_ops
from nvme_ops.errors import FormatError
from tests.conftest import run_python

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22e\nsize 12345\n"
TENSORS = {"a": torch.arange(3.0)}

MISTAKEN: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "pointer": ("a.safetensors", lambda path: path.write_bytes(POINTER), "git lfs pull"),
    "pointer .pt": ("a.pt", lambda path: path.write_bytes(POINTER), "git lfs pull"),
    "pointer index": ("a.safetensors.index.json", lambda path: path.write_bytes(POINTER), "git lfs pull"),
    "torch": ("a.safetensors", lambda path: torch.save(TENSORS, path), r"ends in \.pt"),
    "old torch": (
        "a.safetensors",
        lambda path: torch.save(TENSORS, path, _use_new_zipfile_serialization=False),
        r"written by torch\.save.* ends in \.pt",
    ),
    "safetensors": ("a.pt", lambda path: safetensors.torch.save_file(TENSORS, path), r"ends in \.safetensors"),
    "web page": ("a.safetensors", lambda path: path.write_bytes(b"<!DOCTYPE html><html>404</html>"), "a web page"),
    "compressed": ("a.pt", lambda path: path.write_bytes(gzip.compress(bytes(100))), "compressed by gzip"),
    "HDF5": ("a.bin", lambda path: path.write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(100)), "HDF5"),
    "GGUF": ("a.safetensors", lambda path: path.write_bytes(b"GGUF" + bytes(range(1, 100))), "GGUF"),
}


@pytest.mark.parametrize("kind", MISTAKEN)
def test_the_error_says_what_it_is(kind: str, folder: Path) -> None:
    name, make, words = MISTAKEN[kind]
    make(folder / name)
    with pytest.raises(FormatError, match=words) as caught:
        nvme_ops.load(folder / name)
    assert str(caught.value).startswith(f"{folder / name}: ")


def test_a_folder_of_dcp(folder: Path) -> None:
    nvme_ops.dcp.save({"a": torch.ones(3)}, folder / "saved")
    with pytest.raises(FormatError, match=r"nvme_ops\.dcp\.load\(state_dict, path\) reads it"):
        nvme_ops.load(folder / "saved")


def test_release_memory_before_the_first_save() -> None:
    run_python("import nvme_ops; nvme_ops.checkpoint.background.release_memory()", fresh=True)
