"""Checksums of safetensors files: of the tensors and of the header."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import nvme_ops
from nvme_ops.errors import ChecksumError, FormatError
from nvme_ops.formats import integrity
from nvme_ops.inspection.contents import contents, damaged
from tests.checkpoint.test_safetensors import assert_same, filled

their = pytest.importorskip("safetensors.torch", reason="safetensors is not installed: pip install safetensors")

IN_A_FOLDER = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def path(folder: Path) -> Path:
    return folder / "model.safetensors"


CHECKED = {"a": filled(torch.float32, 500), "none": torch.zeros(0), "t": filled(torch.int16, 70, 30).t()}
SIZE = sum(tensor.nbytes for tensor in CHECKED.values())


@given(st.integers(0, SIZE * 8 - 1))
@example(0)
@example(SIZE * 8 - 1)
@settings(IN_A_FOLDER, max_examples=80)
def test_a_flipped_bit_anywhere_is_found(path: Path, bit: int) -> None:
    nvme_ops.save(CHECKED, path, durable=False)
    content = bytearray(path.read_bytes())
    content[len(content) - SIZE + bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
    wrong = "a" if bit // 8 < CHECKED["a"].nbytes else "t"
    targets = {name: torch.zeros_like(tensor) for name, tensor in CHECKED.items()}
    for options in ({"mmap": True}, {"mmap": False}, {"into": targets}, {"keys": [wrong]}):
        with pytest.raises(ChecksumError, match=f"in '{wrong}': '{path}'") as caught:
            nvme_ops.load(path, verify=True, **options)
        assert (caught.value.tensors, caught.value.filename) == ([wrong], str(path))
    nvme_ops.load(path)
    nvme_ops.load(path, verify=True, keys=[name for name in CHECKED if name != wrong])


@pytest.mark.parametrize("where", ["name", "shape", "metadata"])
def test_a_flipped_bit_in_the_header_is_found(path: Path, where: str) -> None:
    """One that makes another valid header: of a name, of two dimensions, of what the caller noted."""
    nvme_ops.save({"tensor": torch.ones(2, 3), "other": torch.ones(1)}, path, metadata={"step": "7"})
    content = path.read_bytes()
    place, turned = {
        "name": (b'"tensor"', b'"uensor"'),
        "shape": (b"[2,3]", b"[3,2]"),
        "metadata": (b'"step":"7"', b'"step":"6"'),
    }[where]
    at = content.index(place)
    path.write_bytes(content[:at] + turned + content[at + len(place) :])
    nvme_ops.load(path)
    with pytest.raises(ChecksumError, match="in 'header'"):
        nvme_ops.load(path, verify=True)
    assert damaged(contents(path)) == ["header"]


def test_no_flipped_bit_of_a_header_goes_unnoticed(path: Path) -> None:
    nvme_ops.save({"tensor": torch.ones(2, 3)}, path, metadata={"step": "7"}, durable=False)
    content = path.read_bytes()
    end = content.rindex(b"}") + 4  # and some of the spaces behind it
    for bit in range(end * 8):
        path.write_bytes(content[: bit // 8] + bytes([content[bit // 8] ^ 1 << bit % 8]) + content[bit // 8 + 1 :])
        with pytest.raises((FormatError, ChecksumError, ValueError)):
            nvme_ops.load(path, verify=True)


def test_every_tensor_that_differs_is_named(path: Path) -> None:
    nvme_ops.save({f"{number:02}": filled(torch.int8, 5) for number in range(30)}, path)
    content = path.read_bytes()
    path.write_bytes(content[:-150] + bytes(byte ^ 1 for byte in content[-150:]))
    with pytest.raises(ChecksumError, match="'09' and 20 more") as caught:
        nvme_ops.load(path, verify=True)
    assert caught.value.tensors == [f"{number:02}" for number in range(30)]


def test_files_without_checksums(path: Path) -> None:
    for save in (
        lambda: their.save_file({"a": torch.ones(1)}, path),
        lambda: nvme_ops.save(CHECKED, path, checksums=False),
    ):
        save()
        with pytest.raises(ValueError, match=r"model\.safetensors has no checksums to verify"):
            nvme_ops.load(path, verify=True)
    their.save_file({}, path)
    assert nvme_ops.load(path, verify=True) == {}


@pytest.mark.parametrize("words", ["", "0" * 31, "0" * 33, "0" * 24, "x" * 32, "0" * 31 + "g", "-" + "0" * 31])
def test_checksums_that_do_not_fit(path: Path, words: str) -> None:
    """As when a program keeps the metadata of a file of ours for other tensors."""
    their.save_file({name: tensor.contiguous() for name, tensor in CHECKED.items()}, path, {integrity.KEY: words})
    with pytest.raises(FormatError, match=rf"model\.safetensors: __metadata__: {integrity.KEY} does not fit"):
        nvme_ops.load(path, verify=True)
    assert_same(nvme_ops.load(path), CHECKED)
