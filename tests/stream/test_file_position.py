"""Modes of ``nvme_ops.open``, and who else uses the descriptor of a file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import nvme_ops


def test_what_goes_through_the_descriptor_moves_the_position(tmp_path: Path) -> None:
    with nvme_ops.open(tmp_path / "file", "w") as file:
        file.write(b"one")
        file.flush()
        os.write(file.fileno(), b"two")
        assert file.tell() == 6
        file.write(b"three")
    assert (tmp_path / "file").read_bytes() == b"onetwothree"


def test_reading_too(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"onetwothree")
    with nvme_ops.open(tmp_path / "file") as file:
        assert file.read(3) == b"one"
        file.flush()
        assert os.read(file.fileno(), 3) == b"two"
        assert file.read() == b"three"


def test_two_of_torchs_old_files_in_one(tmp_path: Path) -> None:
    tensors = [torch.arange(1000.0) + number for number in range(2)]
    with nvme_ops.open(tmp_path / "file", "w") as file:
        for tensor in tensors:
            torch.save(tensor, file, _use_new_zipfile_serialization=False)
    with (tmp_path / "file").open("rb") as plain, nvme_ops.open(tmp_path / "file") as file:
        for tensor in tensors:
            assert torch.equal(torch.load(plain), tensor)
            assert torch.equal(torch.load(file), tensor)


def test_writing_and_reading_a_new_file(tmp_path: Path) -> None:
    for mode in ("w+", "wb+"):
        with nvme_ops.open(tmp_path / "file", mode) as file:
            assert file.readable()
            assert file.writable()
            file.write(b"content")
            file.seek(0)
            assert file.read() == b"content"
    with pytest.raises(FileExistsError), nvme_ops.open(tmp_path / "file", "x"):
        pass
    with nvme_ops.open(tmp_path / "new", "xb") as file:
        assert not file.readable()
        file.write(b"content")
    with nvme_ops.open(tmp_path / "other", "x+") as file:
        file.write(b"content")
        file.seek(3)
        assert file.read() == b"tent"
