"""``StoredTensor`` and ``Source``: parts and joins of weights have the right bytes, and are not read to be made."""

from __future__ import annotations

import copy
import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from nvme_ops.file import shared_handle
from nvme_ops.offload.weights.source import FileExtent, Source, WeightFile, concatenated, narrowed
from nvme_ops.offload.weights.stored import StoredTensor, Weights
from nvme_ops.offload.weights.window import Window
from tests.conftest import MIB, store

SHAPE = (6, 40, 32)
VALUES = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def file(folder: Path) -> Iterator[WeightFile]:
    path = store(folder / "weights", VALUES.contiguous().view(torch.uint8).flatten())
    file = WeightFile(os.open(path, os.O_RDONLY), str(path), shared_handle())
    yield file
    file.close()


@pytest.fixture
def stored(file: WeightFile) -> Iterator[StoredTensor]:
    weights = Weights()
    source = Source([FileExtent(file, 0, VALUES.nbytes)], torch.float32, SHAPE)
    weights.window = Window(MIB, torch.device("cpu"), [source])
    yield StoredTensor(weights, source)
    weights.window.close()


def bytes_read(tensor: StoredTensor) -> int:
    window = tensor._weights.window
    assert window is not None
    return window.stats().bytes_read


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
def test_a_part_is_made_without_reading_and_has_its_values(name: str, stored: StoredTensor) -> None:
    wanted, part = PARTS[name](VALUES), PARTS[name](stored)
    assert isinstance(part, StoredTensor)
    assert bytes_read(stored) == 0
    assert (part.shape, part.dtype) == (wanted.shape, wanted.dtype)
    assert torch.equal(part + 0, wanted)
    assert torch.equal(part.to_memory(), wanted)


OTHERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "an index": lambda t: t[torch.tensor([3, 1])],
    "a mask": lambda t: t[torch.tensor([True, False, True, False, False, True])],
    "a sum": lambda t: t.sum(),
    "twice another dtype": lambda t: t.bfloat16().double(),
    "joined with another": lambda t: torch.cat([t, torch.ones(1, 40, 32)]),
    "a clone": lambda t: t.clone(),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_else_is_computed_is_a_usual_tensor(name: str, stored: StoredTensor) -> None:
    found = OTHERS[name](stored)
    assert type(found) is torch.Tensor
    assert torch.equal(found, OTHERS[name](VALUES))


def test_the_same_part_is_the_same_source(stored: StoredTensor) -> None:
    source = stored.source
    assert source.rows(1, 3) is source.rows(1, 3)
    assert source.rows(0, 6) is source
    assert source.view((240, 32)) is source.view((240, 32))


def test_neighbours_become_one_extent(stored: StoredTensor) -> None:
    joined = concatenated([stored.source.rows(0, 2), stored.source.rows(2, 6)], 0)
    assert joined is not None
    assert len(joined.extents) == 1
    part = narrowed(stored.source, 1, 0, 20)
    assert part is not None
    assert len(part.extents) == 6


def test_copies_are_usual_tensors(stored: StoredTensor) -> None:
    for found in (copy.deepcopy(stored), saved_and_loaded(stored), torch.nn.Parameter(stored, False).data.clone()):
        assert not isinstance(found, StoredTensor)
        assert torch.equal(found, VALUES)
    parameter = copy.deepcopy(torch.nn.Parameter(stored, False))
    assert isinstance(parameter, torch.nn.Parameter)
    assert repr(stored) == "StoredTensor(shape=(6, 40, 32), dtype=torch.float32)"


def saved_and_loaded(tensor: torch.Tensor) -> torch.Tensor:
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    buffer.seek(0)
    return torch.as_tensor(torch.load(buffer, weights_only=True))


def test_before_its_model_is_complete_it_cannot_be_read(file: WeightFile) -> None:
    stored = StoredTensor(Weights(), Source([FileExtent(file, 0, VALUES.nbytes)], torch.float32, SHAPE))
    with pytest.raises(RuntimeError, match="before it is complete"):
        stored.sum()
