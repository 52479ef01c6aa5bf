"""``stream_weights``: any module computes the same with its weights in files, in bounded memory, whatever happens."""

from __future__ import annotations

import gc
import os
import resource
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from nvme_ops.engine import Priority
from nvme_ops.offload import stream_weights
from nvme_ops.offload.weights import window
from nvme_ops.offload.weights.streamed import StreamedModel
from tests.conftest import KIB, MIB, in_threads
from tests.offload.models import Branching, Experts, Functional, Tied, convolutional, layers, nbytes

X = torch.randn(4, 256, generator=torch.Generator().manual_seed(3))
TOKENS = torch.tensor([[1, 2, 2], [5, 1, 3]])
IMAGES = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(4))

MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...]]] = {
    "layers": (layers, (X,)),
    "branches": (Branching, (X,)),
    "tied": (Tied, (TOKENS,)),
    "experts": (Experts, (X, [3, 1, 7])),
    "functional": (Functional, (X,)),
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


each_model = pytest.mark.parametrize("name", MODELS)


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


def streamed(model: nn.Module, folder: Path, budget: int | str = 640 * KIB) -> StreamedModel:
    found = stream_weights(model, folder, memory_budget=budget)
    assert isinstance(found, StreamedModel)
    assert found is model
    return found


# Right


@each_model
@pytest.mark.parametrize("budget", ["2304K", "64M"])
def test_the_output_is_that_of_the_model_in_memory(name: str, budget: str, folder: Path) -> None:
    model, inputs, wanted = made(name)
    with streamed(model, folder, budget), torch.no_grad():
        for _ in range(4):
            assert same(model(*inputs), wanted)


def test_memory_is_bounded_and_used(folder: Path) -> None:
    model, inputs, wanted = made("layers")
    size = nbytes(model)
    with streamed(model, folder, 1 * MIB) as found, torch.no_grad():
        for _ in range(5):
            assert same(model(*inputs), wanted)
        stats = found.stats()
        assert stats.peak_bytes <= MIB < size
        assert 0 < stats.bytes_kept < MIB
        before = stats.bytes_read
        model(*inputs)
        assert found.stats().bytes_read - before <= size - stats.bytes_kept
        assert found.stats().bytes_on_demand == stats.bytes_on_demand, "all was read ahead"


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


def test_a_budget_for_all_of_it_reads_it_once(folder: Path) -> None:
    model, inputs, wanted = made("layers")
    size = nbytes(model)
    with streamed(model, folder, "64M") as found, torch.no_grad():
        for _ in range(5):
            assert same(model(*inputs), wanted)
        assert found.stats().bytes_read <= size


def test_experts_that_nobody_asks_for_are_not_read(folder: Path) -> None:
    model = Experts().eval()
    with torch.no_grad():
        wanted = model(X, [2, 5])
        with streamed(model, folder) as found:
            for _ in range(3):
                assert torch.equal(model(X, [2, 5]), wanted)
            assert found.stats().bytes_read <= 3 * 2 * 256 * KIB


def test_rows_of_an_embedding_are_read_alone(folder: Path) -> None:
    torch.manual_seed(1)
    model = nn.Embedding(4096, 1024).eval()
    with torch.no_grad():
        wanted = model(TOKENS)
        with streamed(model, folder, "17M") as found:
            assert torch.equal(model(TOKENS), wanted)
            assert found.stats().bytes_read == 4 * 4 * KIB  # tokens 1, 2, 3 and 5
            everything = torch.arange(4096)
            assert torch.equal(model(everything), model(everything))
            with pytest.raises(IndexError):
                model(torch.tensor([4096]))


def test_a_few_rows_of_an_embedding_in_memory_are_no_use_of_the_whole(folder: Path) -> None:
    torch.manual_seed(1)
    model = nn.Embedding(4096, 1024).eval()
    with torch.no_grad():
        wanted = model(TOKENS)
        with streamed(model, folder, "17M") as found:
            model(torch.arange(4096))
            before = found.stats()
            assert torch.equal(model(TOKENS), wanted)
            assert found.stats() == before, "a use would have it read ahead for ever"


@pytest.mark.parametrize("context", ["autocast", "inference", "grad"])
def test_in_every_mode_of_torch(context: str, folder: Path) -> None:
    contexts: dict[str, Callable[[], Any]] = {
        "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        "inference": torch.inference_mode,
        "grad": torch.enable_grad,
    }
    model, inputs, _ = made("layers")
    with contexts[context]():
        wanted = model(*inputs)
        with streamed(model, folder):
            for _ in range(3):
                assert torch.equal(model(*inputs), wanted)


def test_under_torch_compile(folder: Path) -> None:
    model, inputs, wanted = made("layers")
    with streamed(model, folder), torch.no_grad():
        compiled = torch.compile(model, backend="eager")
        for _ in range(2):
            assert same(compiled(*inputs), wanted)


def test_threads_run_it_at_once(folder: Path) -> None:
    model, inputs, wanted = made("branches")
    with streamed(model, folder, 2 * MIB):

        def work(_: int) -> None:
            with torch.no_grad():
                for _ in range(10):
                    assert same(model(*inputs), wanted)

        in_threads(work, 4)


def test_several_folders_share_the_weights(folder: Path) -> None:
    folders = [folder / "one", folder / "two"]
    for each in folders:
        each.mkdir()
    torch.manual_seed(1)
    model, x = layers(3, 1792).eval(), torch.randn(2, 1792)
    with torch.no_grad():
        wanted = model(x)
        stream_weights(model, folders, memory_budget="26M")
        with cast(StreamedModel, model):
            used = [sum(path.stat().st_blocks for path in each.rglob("*") if path.is_file()) for each in folders]
            assert min(used) > 0
            for _ in range(2):
                assert torch.equal(model(x), wanted)
    assert [list(each.iterdir()) for each in folders] == [[], []]


# What cannot be


def test_it_cannot_be_trained_or_changed(folder: Path) -> None:
    model, inputs, wanted = made("layers")
    with streamed(model, folder) as found:
        for forbidden in (found.requires_grad_, found.double, lambda: found.to("meta")):
            with pytest.raises(RuntimeError, match="streamed"):
                forbidden()
        weight = next(found.parameters())
        with torch.no_grad():
            for change in (weight.zero_, lambda: weight.copy_(X), lambda: torch.add(X, 1, out=weight)):
                with pytest.raises(RuntimeError, match=r"cannot be changed"):
                    change()
        with pytest.raises(RuntimeError):
            found.load_state_dict(found.state_dict())
        with torch.no_grad():
            assert same(model(*inputs), wanted)
        found.eval()


def third(model: nn.Module) -> Any:
    return model.get_submodule("2")


def test_a_parameter_that_the_user_assigns_is_used(folder: Path) -> None:
    model, inputs, _ = made("layers")
    other = nn.Parameter(torch.randn(256, 256))
    with torch.no_grad():
        third(model).weight = other
        wanted = model(*inputs)
        model, _, _ = made("layers")
        with streamed(model, folder):
            model(*inputs)
            third(model).weight = other
            for _ in range(3):
                assert same(model(*inputs), wanted)


def test_a_model_on_several_devices_is_refused(folder: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device="meta"))
    with pytest.raises(ValueError, match="2 devices"):
        stream_weights(model, folder, memory_budget="1M")
    with pytest.raises(ValueError, match="meta device"):
        stream_weights(nn.Linear(4, 4, device="meta"), folder, memory_budget="1M")


def test_two_models_in_one_folder_do_not_meet(folder: Path) -> None:
    first, inputs, wanted = made("layers")
    second, _, other = made("branches")
    with streamed(first, folder), streamed(second, folder), torch.no_grad():
        for _ in range(2):
            assert same(first(*inputs), wanted)
            assert same(second(*inputs), other)
        with pytest.raises(ValueError, match="streamed already"):
            stream_weights(first, folder, memory_budget="1M")
    assert list(folder.iterdir()) == []


def test_after_close_it_says_so(folder: Path) -> None:
    model, inputs, _ = made("layers")
    found = streamed(model, folder)
    found.close()
    found.close()
    with pytest.raises(ValueError, match="closed"):
        model(*inputs)
    assert list(folder.iterdir()) == []


def test_nothing_is_left_of_a_model_that_is_forgotten(folder: Path) -> None:
    streamed(layers(), folder).close()
    before = len(os.listdir("/proc/self/fd"))
    model, inputs, _ = made("layers")
    streamed(model, folder)
    model(*inputs)
    del model
    gc.collect()
    assert list(folder.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) <= before


# Faults


def test_an_exception_in_mid_forward_leaves_it_usable(folder: Path) -> None:
    model, inputs, wanted = made("layers")

    def stop(*_: Any) -> None:
        raise ZeroDivisionError

    with streamed(model, folder), torch.no_grad():
        hook = list(model.children())[4].register_forward_hook(stop)
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                model(*inputs)
        hook.remove()
        for _ in range(3):
            assert same(model(*inputs), wanted)


def test_a_read_that_fails_is_told_and_tried_again(folder: Path) -> None:
    model, inputs, wanted = made("layers")
    with streamed(model, folder), torch.no_grad():
        (path,) = [each for each in folder.rglob("*") if each.is_file() and each.stat().st_size > MIB]
        content = path.read_bytes()
        os.truncate(path, 100 * KIB)
        for _ in range(2):
            with pytest.raises(EOFError, match=path.name):
                model(*inputs)
        path.write_bytes(content)
        for _ in range(2):
            assert same(model(*inputs), wanted)


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


@pytest.mark.parametrize("budget", ["64K", "1G"])
def test_weights_that_are_smaller_than_a_page_are_used_together(
    folder: Path, budget: str, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    stream_weights(model, folder, memory_budget=budget)
    assert torch.equal(model(x), wanted)


def test_reads_ahead_that_fail_and_are_not_needed_any_more_are_not_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", told.append)
    model: Any = torch.nn.Sequential(*(torch.nn.Linear(256, 256, bias=False) for _ in range(12)))
    with stream_weights(model, folder, memory_budget="600K"), torch.no_grad():
        for _ in range(2):
            model(torch.ones(1, 256))
        for file in next(folder.iterdir()).iterdir():
            if file.name != "owner":
                os.truncate(file, 0)
        for layer in (model, model, model[7], model[1]):
            with pytest.raises(EOFError):
                layer(torch.ones(1, 256))
    assert not told


def test_rows_of_a_weight_whose_read_ahead_failed_are_read_again(folder: Path) -> None:
    """As when another thread needs its memory, which ends the read that this one waits for."""
    embedding: Any = torch.nn.Embedding(4096, 64)
    model, wanted = torch.nn.ModuleList([embedding, torch.nn.Linear(512, 512)]), embedding.weight[3].clone()
    with stream_weights(model, folder, memory_budget="1200K"), torch.no_grad():
        weights, source = embedding.weight._weights._open(), embedding.weight.source
        files = {file: file.read_bytes() for file in next(folder.iterdir()).iterdir() if file.name != "owner"}
        for file in files:
            os.truncate(file, 0)
        weight = weights._weight(source)
        assert weights._begin(weight, Priority.PREFETCH)
        assert isinstance(weight.arriving.exception(), EOFError)
        for file, values in files.items():
            file.write_bytes(values)
        assert torch.equal(embedding(torch.tensor([3]))[0], wanted)
