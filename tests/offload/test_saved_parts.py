"""save_on_nvme: small parts of large tensors are copied, so that they do not keep the whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from nvme_ops.offload import save_on_nvme
from tests.offload.test_saved_kinds import Holding

PARTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a row": lambda h: h[3],
    "rows": lambda h: h[3:5],
    "a column": lambda h: h[:, 5],
    "some columns": lambda h: h[:, 8:40],
    "every 9th column, transposed": lambda h: h[:, ::9].t(),
    "an expanded row": lambda h: h[2].expand(8, -1),
}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("least", [1, "1M"])
def test_a_small_part_of_a_large_tensor_does_not_keep_it(folder: Path, part: str, least: Any) -> None:
    """What comes back has the strides of the part, too: operations may sum in another order where they differ."""
    looked: list[list[Any]] = []
    weight = torch.randn(1, requires_grad=True)

    def forward() -> tuple[torch.Tensor, torch.UntypedStorage]:
        h = torch.linspace(0, 1, 1 << 19).view(512, 1024)
        mine = PARTS[part](h)
        held = Holding.apply(weight, mine, strides := list[Any]())
        strides.append(mine.stride())
        looked.append(strides)
        return (mine * weight).sin().sum() + held.sum(), h.untyped_storage()

    (expected,) = torch.autograd.grad(forward()[0], weight)
    saving = save_on_nvme(folder, min_bytes=least, memory_budget=0)
    for _ in range(2):
        with saving:
            loss, storage = forward()
        large = StorageWeakRef(storage)
        del storage
        assert large.expired()
        assert torch.equal(torch.autograd.grad(loss, weight)[0], expected)
    assert saving.stats().bytes_saved <= 2 * 4 * 512 * 1024
    assert all(back.stride() == stride for stride, back in looked)


def test_a_part_that_is_modified_in_place_is_told(folder: Path) -> None:
    weight = torch.randn(1, requires_grad=True)
    for least in (1, "1M"):
        h = torch.ones(1024, 1024)
        part = h[3]
        with save_on_nvme(folder, min_bytes=least, memory_budget=0):
            loss = (part * weight).sum()
        h.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_part_of_what_is_saved_as_a_whole_is_not_copied(folder: Path) -> None:
    weight, h = torch.randn(1, requires_grad=True), torch.ones(1024, 256)
    with save_on_nvme(folder, min_bytes=1, memory_budget="64M") as saving:
        loss = (h * weight).sum() + (h[3] * weight).sum()
    assert saving.stats().bytes_saved == h.nbytes
    loss.backward()
    assert float(weight.grad if weight.grad is not None else 0) == 1024 * 256 + 256


def test_a_nested_tensor_that_was_changed_is_told(folder: Path) -> None:
    x = torch.randn(5, 8, requires_grad=True)
    with save_on_nvme(folder, min_bytes=1, memory_budget=0):
        nested = torch.nested.as_nested_tensor([x[:2] * 2, x[2:] * 2])
        loss = (nested * nested).to_padded_tensor(0.0).sum()
        nested.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
