"""Parts and joins of streamed weights have the right bytes, and are not read to be made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from nvme_ops.offload.weights.source import Source
from nvme_ops.offload.weights.stored import StoredTensor, Weights
from tests.offload.elsewhere import Elsewhere, elsewhere, values

SHAPE = (6, 40, 32)
VALUES = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def moved(folder: Path) -> Iterator[Elsewhere]:
    with elsewhere("streamed", [VALUES], folder) as found:
        yield found


PARTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "itself": lambda t: t[...],
    "detached": lambda t: t.detach(),
    "one": lambda t: t[2],
    "the last": lambda t: t[-1],
    "one of one": lambda t: t[2][3],
    "some": lambda t: t[1:4],
    "none": lambda t: t[3:3],
    "of another dimension": lambda t: t[:, 5:17],
    "of the last dimension": lambda t: t[..., 8:24],
    "split": lambda t: t.split(4)[1],
    "chunks": lambda t: t.chunk(3, dim=1)[2],
    "viewed": lambda t: t.view(240, 32),
    "flat": lambda t: t.reshape(-1),
    "of a view": lambda t: t.view(240, -1)[7:99],
    "one more dimension": lambda t: t.unsqueeze(1),
    "stacked": lambda t: torch.stack([t[3], t[1], t[3]]),
    "stacked further in": lambda t: torch.stack([t[3], t[1]], dim=1),
    "joined": lambda t: torch.cat([t[4:], t[:2]]),
    "joined further in": lambda t: torch.cat([t[0:2], t[2:4]], dim=1),
    "transposed": lambda t: t[1].t(),
    "transposed back": lambda t: t[1].t().transpose(0, 1),
    "of another dtype": lambda t: t.to(torch.float64),
    "half of it": lambda t: t[2].bfloat16(),
    "steps": lambda t: t[::2],
    "dimensions in another order": lambda t: t.permute(2, 0, 1),
    "part of a transpose": lambda t: t[0].t()[3:5],
    "unbound": lambda t: t.unbind(1)[2],
    "a diagonal": lambda t: t[:, :32].diagonal(0, 1, 2),
    "expanded": lambda t: t[0].unsqueeze(0).expand(3, 40, 32),
    "strided": lambda t: t.permute(1, 0, 2).as_strided((4, 5), (7, 2), 11),
    "as other bytes": lambda t: t.view(torch.int32)[::3].view(torch.float32),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_part_is_made_without_reading_and_has_its_values(name: str, moved: Elsewhere) -> None:
    before = moved.stats().bytes_read
    wanted, part = PARTS[name](VALUES), PARTS[name](moved[0])
    assert type(part) is not torch.Tensor
    assert moved.stats().bytes_read == before
    assert (part.shape, part.dtype) == (wanted.shape, wanted.dtype)
    assert torch.equal(part + 0, wanted)
    assert torch.equal(values(part), wanted)


OTHERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "an index": lambda t: t[torch.tensor([3, 1])],
    "a mask": lambda t: t[torch.tensor([True, False, True, False, False, True])],
    "a sum": lambda t: t.sum(),
    "twice another dtype": lambda t: t.bfloat16().double(),
    "joined with another": lambda t: torch.cat([t, torch.ones(1, 40, 32)]),
    "a clone": lambda t: t.clone(),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_else_is_computed_is_a_usual_tensor(name: str, moved: Elsewhere) -> None:
    found = OTHERS[name](moved[0])
    assert type(found) is torch.Tensor
    assert torch.equal(found, OTHERS[name](VALUES))


def test_its_words(moved: Elsewhere) -> None:
    assert repr(moved[0].data) == "StoredTensor(shape=(6, 40, 32), dtype=torch.float32)"


def test_before_its_model_is_complete_it_cannot_be_read() -> None:
    stored = StoredTensor(Weights(), Source([], torch.float32, (0, 3)))
    with pytest.raises(RuntimeError, match="before it is complete"):
        stored.sum()
