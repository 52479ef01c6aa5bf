"""Modules saved and filled: tied weights come back tied, and strict means what it means in torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch

import nvme_ops

NAMES = pytest.mark.parametrize("name", ["model.safetensors", "model.pt", "folder"])


class Tied(torch.nn.Module):
    """As GPT-2: the head is the embedding."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = torch.nn.Embedding(50, 8)
        self.middle = torch.nn.Linear(8, 8)
        self.head = torch.nn.Linear(8, 50, bias=False)
        self.head.weight = self.embedding.weight


def assert_equal(one: torch.nn.Module, other: torch.nn.Module) -> None:
    for name, tensor in one.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor), name


@NAMES
def test_tied_weights_come_back_tied(tmp_path: Path, name: str) -> None:
    saved, found = Tied(1), Tied(2)
    nvme_ops.save(saved, tmp_path / name)
    nvme_ops.load(tmp_path / name, into=found, verify=True)
    assert_equal(saved, found)
    assert found.head.weight is found.embedding.weight


@NAMES
def test_in_the_background_too(tmp_path: Path, name: str) -> None:
    saved, found = Tied(1), Tied(2)
    nvme_ops.save_async(saved, tmp_path / name).result()
    nvme_ops.load(tmp_path / name, into=found)
    assert_equal(saved, found)


def test_the_file_is_that_of_safetensors(tmp_path: Path) -> None:
    saved, found = Tied(1), Tied(2)
    nvme_ops.save(saved, tmp_path / "ours.safetensors")
    safetensors.torch.save_model(saved, str(tmp_path / "theirs.safetensors"))
    ours = safetensors.safe_open(tmp_path / "ours.safetensors", "pt")
    theirs = safetensors.safe_open(tmp_path / "theirs.safetensors", "pt")
    with ours, theirs:
        assert set(ours.keys()) == set(theirs.keys())
        assert theirs.metadata().items() <= ours.metadata().items()
    missing, unexpected = safetensors.torch.load_model(found, str(tmp_path / "ours.safetensors"))
    assert not missing
    assert not unexpected
    assert_equal(saved, found)
    found = Tied(3)
    nvme_ops.load(tmp_path / "theirs.safetensors", into=found)
    assert_equal(saved, found)


def test_what_safetensors_left_out_under_the_other_name(tmp_path: Path) -> None:
    """transformers keeps the embedding, not the head."""
    saved, found = Tied(1), Tied(2)
    state = {name: tensor for name, tensor in saved.state_dict().items() if name != "head.weight"}
    nvme_ops.save(state, tmp_path / "model.safetensors")
    nvme_ops.load(tmp_path / "model.safetensors", into=found)
    assert_equal(saved, found)


@NAMES
def test_strict(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    nvme_ops.save({"a": torch.ones(3), "b": torch.ones(3)}, path)
    into = {"b": torch.zeros(3), "c": torch.zeros(3)}
    with pytest.raises(KeyError, match="strict=False"):
        nvme_ops.load(path, into=into)
    assert into["b"].sum() == 0
    assert set(nvme_ops.load(path, into=into, strict=False)) == {"b"}
    assert into["b"].sum() == 3
    assert into["c"].sum() == 0
    assert set(nvme_ops.load(path, keys=["a", "nosuch"], strict=False)) == {"a"}
    with pytest.raises(ValueError, match="shape"):
        nvme_ops.load(path, into={"a": torch.zeros(4)}, strict=False)


@NAMES
def test_a_tensor_that_is_missing_is_still_an_error(tmp_path: Path, name: str) -> None:
    saved = Tied(1)
    state = {name: tensor for name, tensor in saved.state_dict().items() if "weight" not in name or "middle" in name}
    nvme_ops.save(state, tmp_path / name)
    with pytest.raises(KeyError, match=r"embedding\.weight"):
        nvme_ops.load(tmp_path / name, into=Tied(2))


def test_errors_have_the_types_that_users_of_torch_and_safetensors_expect(tmp_path: Path) -> None:
    tensor = torch.zeros(2)
    with pytest.raises(RuntimeError, match="share memory"):
        nvme_ops.save({"a": tensor, "b": tensor}, tmp_path / "file.safetensors")
    nvme_ops.save({"a": tensor}, tmp_path / "file.safetensors")
    with pytest.raises(RuntimeError, match=r"^[^\"']*has no tensor 'b'"):
        nvme_ops.load(tmp_path / "file.safetensors", keys=["b"])
    with pytest.raises(RuntimeError, match="no counterpart"):
        nvme_ops.load(tmp_path / "file.safetensors", into=torch.nn.Linear(1, 1))
    (tmp_path / "legacy.pt").write_bytes(b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.")
    for load in (torch.load, nvme_ops.load):
        with pytest.raises(EOFError):
            load(tmp_path / "legacy.pt")
    with pytest.raises(nvme_ops.FormatError, match=r"legacy\.pt"):
        nvme_ops.load(tmp_path / "legacy.pt")
