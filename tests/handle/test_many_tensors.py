"""Functions of the native module that take thousands of tensors at once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import nvme_ops
from nvme_ops._native import native


def test_tensors_that_share_memory_are_found() -> None:
    memory = torch.zeros(100)
    apart = [memory[:10], torch.zeros(10), memory[10:20], memory[90:]]
    assert native().overlapping(apart) is None
    assert native().overlapping([*apart, memory[19:30]]) == (2, 4)
    assert native().overlapping([*apart, memory[89:91]]) == (4, 3)
    assert native().overlapping([memory, memory]) == (0, 1)
    assert native().overlapping([]) is None


def test_strides_count_for_what_is_shared() -> None:
    """Of interleaved columns it is said too, as safetensors does: their areas overlap."""
    square = torch.zeros(4, 4)
    assert native().overlapping([square[:2], square[2:]]) is None
    assert native().overlapping([square[:, 0], square[:, 1]]) == (0, 1)
    assert native().overlapping([square[0].expand(5, 4), square[1]]) is None
    assert native().overlapping([square.t(), torch.zeros(4, 4)]) is None


def test_tensors_without_elements_share_nothing() -> None:
    memory = torch.zeros(4)
    assert native().overlapping([memory, memory[2:2], torch.empty(0), torch.empty(3, 0)]) is None


def test_what_is_no_strided_tensor_is_refused() -> None:
    with pytest.raises(TypeError, match=r"torch\.Tensor is needed, not int"):
        native().overlapping([torch.zeros(1), 3])
    with pytest.raises(ValueError, match="strided"):
        native().overlapping([torch.eye(3).to_sparse()])
    with pytest.raises(TypeError, match="sequence"):
        native().overlapping(3)


def test_tensors_are_moved_within_their_storage() -> None:
    memory = torch.arange(12)
    tensors = [memory[:3].data, memory[:4].view(2, 2).data]
    native().set_storage_offsets(tensors, [9, 5])
    assert tensors[0].tolist() == [9, 10, 11]
    assert tensors[1].tolist() == [[5, 6], [7, 8]]
    assert tensors[0].resize_(2).tolist() == [9, 10]


@pytest.mark.parametrize("offset", [-1, 10, 2**62, 2**63 - 1])
def test_no_tensor_is_moved_out_of_its_storage(offset: int) -> None:
    tensor = torch.arange(12)[:3].data
    with pytest.raises(ValueError, match="tensor 0 does not fit"):
        native().set_storage_offsets([tensor], [offset])
    assert tensor.tolist() == [0, 1, 2]


def test_offsets_that_are_not_right() -> None:
    tensor = torch.arange(4)
    with pytest.raises(ValueError, match="one offset"):
        native().set_storage_offsets([tensor], [])
    with pytest.raises(TypeError):
        native().set_storage_offsets([tensor], ["1"])
    with pytest.raises(OverflowError):
        native().set_storage_offsets([tensor], [2**64])
    with pytest.raises(ValueError, match="does not fit"):
        native().set_storage_offsets([torch.zeros(4, 4).t()], [0])


@pytest.mark.parametrize("mmap", [True, False])
def test_loaded_tensors_are_no_views_of_each_other(tmp_path: Path, mmap: bool) -> None:
    """One memory holds them, but to change one must not spoil the gradients of another."""
    path = tmp_path / "model.safetensors"
    nvme_ops.save({"a": torch.ones(3), "b": torch.ones(3)}, path)
    first, second = nvme_ops.load(path, mmap=mmap).values()
    loss = (first.requires_grad_() * first).sum()
    second.add_(1)
    loss.backward()
    assert first.grad.tolist() == [2, 2, 2]
    assert first._base is None
