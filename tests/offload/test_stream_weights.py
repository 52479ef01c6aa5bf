"""``stream_weights``: any module computes the same with its weights in files, in bounded memory, whatever happens."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nvme_ops.engine import Priority
from nvme_ops.offload import stream_weights
from nvme_ops.offload.weights import window
from nvme_ops.offload.weights.source import Source
from nvme_ops.offload.weights.stored import StoredTensor, Weights
from tests.conftest import KIB, MIB
from tests.offload.elsewhere import Elsewhere, elsewhere, values
from tests.offload.models import Branching, Experts, Tied, convolutional, layers, nbytes

X = torch.randn(4, 256, generator=torch.Generator().manual_seed(3))
TOKENS = torch.tensor([[1, 2, 2], [5, 1, 3]])
IMAGES = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(4))

MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...]]] = {
    "layers": (layers, (X,)),
    "branches": (Branching, (X,)),
    "tied": (Tied, (TOKENS,)),
    "experts": (Experts, (X, [3, 1, 7])),
    "convolutional": (convolutional, (IMAGES,)),
    "lstm": (lambda: nn.LSTM(256, 256, 2), (X,)),
    "transformer": (lambda: nn.TransformerEncoderLayer(256, 4, 512, batch_first=True), (X[None],)),
    "normalized": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(256, 256)), (X,)),
}


@pytest.fixture(autouse=True)
def _no_fused_layer() -> Iterator[None]:
    """torch fuses a transformer's layer into one operation unless its weights are of another class, as these are."""
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(True)


def made(name: str) -> tuple[nn.Module, tuple[Any, ...], Any]:
    """A model, its input and its output in memory."""
    torch.manual_seed(1)
    make, inputs = MODELS[name]
    model = make().eval()
    with torch.no_grad():
        return model, inputs, model(*inputs)


def same(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    return all(same(one, other) for one, other in zip(first, second, strict=True))


def streamed(model: nn.Module, folder: Path, budget: int | str = 640 * KIB) -> Any:
    found = stream_weights(model, folder, memory_budget=budget)
    assert found is model
    return found


# Right


@pytest.mark.parametrize(("name", "budget"), [*((name, "2304K") for name in MODELS), ("experts", "64M")])
def test_the_output_is_that_of_the_model_in_memory(name: str, budget: str, folder: Path) -> None:
    model, inputs, wanted = made(name)
    with streamed(model, folder, budget), torch.no_grad():
        for _ in range(4):
            assert same(model(*inputs), wanted)


CONTEXTS: dict[str, Callable[[], Any]] = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "inference": torch.inference_mode,
}


@pytest.mark.parametrize("context", [*CONTEXTS, "compiled"])
def test_in_every_mode_of_torch(context: str, folder: Path) -> None:
    model, inputs, _ = made("layers")
    with CONTEXTS.get(context, torch.no_grad)():
        wanted = model(*inputs)
        with streamed(model, folder):
            called: Any = torch.compile(model, backend="eager") if context == "compiled" else model
            for _ in range(3):
                assert torch.equal(called(*inputs), wanted)


def test_memory_is_bounded_and_used(folder: Path) -> None:
    model, inputs, wanted = made("layers")
    size = nbytes(model)
    with streamed(model, folder, 1 * MIB) as found, torch.no_grad():
        for _ in range(5):
            assert same(model(*inputs), wanted)
        stats = found.stats()
        assert stats.peak_bytes <= MIB < size
        assert 0 < stats.bytes_kept < MIB
        model(*inputs)
        assert found.stats().bytes_read - stats.bytes_read <= size - stats.bytes_kept
        assert found.stats().bytes_on_demand == stats.bytes_on_demand, "all was read ahead"
    model, inputs, wanted = made("layers")
    with streamed(model, folder, "64M") as found, torch.no_grad():
        for _ in range(5):
            assert same(model(*inputs), wanted)
        assert found.stats().bytes_read <= size, "what fits is read once"


def test_no_operation_repeats_a_weight_in_memory(folder: Path) -> None:
    torch.manual_seed(1)
    model, x = nn.Linear(256, 4096, bias=False).eval(), torch.randn(64, 3, 256)
    with torch.no_grad():
        wanted = model(x)[:, -1:]
        with streamed(model, folder, "8M"):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            assert torch.allclose(model(x[:, -1:]), wanted, atol=1e-5)
            assert torch.allclose(x[:, -1:] @ next(model.parameters()).t(), wanted, atol=1e-5)
            assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * KIB, "64 times 4 MiB"


@torch.no_grad()
def test_of_experts_and_embeddings_what_is_asked_for_is_read(folder: Path) -> None:
    torch.manual_seed(1)
    experts, model = Experts().eval(), nn.Embedding(4096, 1024).eval()
    wanted = experts(X, [2, 5])
    with streamed(experts, folder) as found:
        for _ in range(3):
            assert torch.equal(experts(X, [2, 5]), wanted)
        assert found.stats().bytes_read <= 3 * 2 * 256 * KIB
    wanted = model(TOKENS)
    with streamed(model, folder, "17M") as found:
        assert torch.equal(model(TOKENS), wanted)
        assert found.stats().bytes_read == 4 * 4 * KIB  # tokens 1, 2, 3 and 5
        everything = torch.arange(4096)
        assert torch.equal(model(everything), model(everything))
        before = found.stats()
        assert torch.equal(model(TOKENS), wanted)
        assert found.stats() == before, "rows in memory are no use of the whole, which would be read ahead for ever"
        with pytest.raises(IndexError):
            model(torch.tensor([4096]))


def test_several_folders_share_the_weights(folder: Path) -> None:
    folders = [folder / "one", folder / "two"]
    for each in folders:
        each.mkdir()
    torch.manual_seed(1)
    model, x = layers(3, 1792).eval(), torch.randn(2, 1792)
    with torch.no_grad():
        wanted = model(x)
        with stream_weights(model, folders, memory_budget="26M"):
            used = [sum(path.stat().st_blocks for path in each.rglob("*") if path.is_file()) for each in folders]
            assert min(used) > 100
            assert torch.equal(model(x), wanted)
    assert [list(each.iterdir()) for each in folders] == [[], []]


# What cannot be


def test_what_cannot_be_is_refused(folder: Path) -> None:
    model, inputs, wanted = made("layers")
    with pytest.raises(ValueError, match="2 devices"):
        streamed(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device="meta")), folder)
    with pytest.raises(ValueError, match="meta device"):
        streamed(nn.Linear(4, 4, device="meta"), folder)
    with streamed(model, folder), torch.no_grad():
        for again in (model, nn.Sequential(model, nn.Linear(3, 3))):
            with pytest.raises(ValueError, match="streamed already"):
                streamed(again, folder)
        with pytest.raises(RuntimeError, match="cannot be trained"):
            model.requires_grad_()
        weight = next(model.parameters())
        for change in (weight.zero_, lambda: weight.copy_(X), lambda: torch.add(X, 1, out=weight)):
            with pytest.raises(RuntimeError, match=r"cannot be changed"):
                change()
        assert same(model(*inputs), wanted)
    stored = StoredTensor(Weights(), Source([], torch.float32, (0, 3)))
    with pytest.raises(RuntimeError, match="before it is complete"):
        stored.sum()


# Faults


def test_memory_that_the_program_holds_is_waited_for_and_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window.Window, "patience", 0.2)
    model, inputs, wanted = made("layers")
    with streamed(model, folder) as found, torch.no_grad():
        weights: list[Any] = list(found.parameters())
        held = [weights[0].in_window(), weights[2].in_window()]
        with pytest.raises(MemoryError, match="other weights that are in use"):
            model(*inputs)
        del held
        assert same(model(*inputs), wanted)


def test_weights_that_are_smaller_than_a_page_are_used_together(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes a page, and there was memory for as many bytes as they have: after a minute that was a MemoryError."""
    monkeypatch.setattr(window.Window, "patience", 1.0)

    class TwoTensors(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (torch.nn.Parameter(torch.randn(3, 8, 8)) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ torch.add(self.first[0], self.first[1]) @ (self.first + self.second)[2]

    model, x = TwoTensors(), torch.randn(4, 8)
    wanted = model(x)
    streamed(model, folder, "64K")
    assert torch.equal(model(x), wanted)


def test_rows_of_a_weight_whose_read_ahead_failed_are_read_again(folder: Path) -> None:
    """As when another thread needs its memory, which ends the read that this one waits for."""
    embedding: Any = torch.nn.Embedding(4096, 64)
    model, wanted = torch.nn.ModuleList([embedding, torch.nn.Linear(512, 512)]), embedding.weight[3].clone()
    with streamed(model, folder, "1200K"), torch.no_grad():
        weights, source = embedding.weight._weights.open(), embedding.weight.source
        (file,) = [each for each in next(folder.iterdir()).iterdir() if each.name != "owner"]
        content = file.read_bytes()
        os.truncate(file, 0)
        weight = weights._weight(source)
        assert weights._begin(weight, Priority.PREFETCH)
        assert isinstance(weight.arriving.exception(), EOFError)
        file.write_bytes(content)
        assert torch.equal(embedding(torch.tensor([3]))[0], wanted)


# Parts and joins of a weight have the right bytes, and are not read to be made

SHAPE = (6, 40, 32)
VALUES = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))
PARTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "one": lambda t: t[2],
    "some": lambda t: t[1:4],
    "none": lambda t: t[3:3],
    "of another dimension": lambda t: t[:, 5:17],
    "split": lambda t: t.split(4)[1],
    "of a view": lambda t: t.view(240, -1)[7:99],
    "one more dimension": lambda t: t.unsqueeze(1),
    "stacked": lambda t: torch.stack([t[3], t[1], t[3]]),
    "joined": lambda t: torch.cat([t[4:], t[:2]]),
    "transposed": lambda t: t[1].t(),
    "of another dtype": lambda t: t.to(torch.float64),
    "steps": lambda t: t[::2],
    "part of a transpose": lambda t: t[0].t()[3:5],
    "expanded": lambda t: t[0].unsqueeze(0).expand(3, 40, 32),
    "strided": lambda t: t.permute(1, 0, 2).as_strided((4, 5), (7, 2), 11),
    "as other bytes": lambda t: t.view(torch.int32)[::3].view(torch.float32),
}
COMPUTED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "an index": lambda t: t[torch.tensor([3, 1])],
    "a mask": lambda t: t[torch.tensor([True, False, True, False, False, True])],
    "twice another dtype": lambda t: t.bfloat16().double(),
    "joined with another": lambda t: torch.cat([t, torch.ones(1, 40, 32)]),
    "a clone": lambda t: t.clone(),
}


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Elsewhere]:
    with elsewhere("streamed", [VALUES], tmp_path_factory.mktemp("stored")) as found:
        yield found


@pytest.mark.parametrize("name", PARTS)
def test_a_part_is_made_without_reading_and_has_its_values(name: str, moved: Elsewhere) -> None:
    before = moved.stats().bytes_read
    wanted, part = PARTS[name](VALUES), PARTS[name](moved[0])
    assert repr(part).startswith("StoredTensor(shape=")
    assert moved.stats().bytes_read == before
    assert (part.shape, part.dtype) == (wanted.shape, wanted.dtype)
    assert torch.equal(part + 0, wanted)
    assert torch.equal(values(part), wanted)


@pytest.mark.parametrize("name", COMPUTED)
def test_what_else_is_computed_is_a_usual_tensor(name: str, moved: Elsewhere) -> None:
    found = COMPUTED[name](moved[0])
    assert type(found) is torch.Tensor
    assert torch.equal(found, COMPUTED[name](VALUES))
