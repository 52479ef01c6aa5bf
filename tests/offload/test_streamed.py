"""A streamed model beside computing: it is copied, saved, put into other modules, set to modes, and trained in part."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import nvme_ops
from nvme_ops.offload import stream_weights
from nvme_ops.offload.weights import stored
from nvme_ops.offload.weights.stored import stored_in
from tests.offload.models import Tied, layers

X = torch.randn(4, 256, generator=torch.Generator().manual_seed(3))
TOKENS = torch.tensor([[1, 2, 2], [5, 1, 3]])


def streamed(model: nn.Module, folder: Path, budget: str = "1M", **options: Any) -> Any:
    torch.manual_seed(1)
    return stream_weights(model, folder, memory_budget=budget, **options)


def ties(model: nn.Module) -> set[tuple[str, ...]]:
    found: dict[int, list[str]] = {}
    for name, each in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
        found.setdefault(id(each), []).append(name)
    return {tuple(names) for names in found.values()}


def trainable(model: nn.Module) -> set[str]:
    return {name for name, each in model.named_parameters() if each.requires_grad}


def in_files(model: nn.Module) -> set[str]:
    return {name for name, each in model.named_parameters(remove_duplicate=False) if stored_in(each) is not None}


# Copies and state dicts


def saved_by_torch(model: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES: tuple[Callable[[Any], Any], ...] = (
    copy.deepcopy,
    lambda model: pickle.loads(pickle.dumps(model)),
    saved_by_torch,
)


def test_a_shallow_copy_outlives_the_name_of_the_original(folder: Path) -> None:
    model = streamed(layers(), folder)
    wanted = model(X)
    model = copy.copy(model)
    gc.collect()
    assert torch.equal(model(X), wanted)
    model.close()


def test_safetensors_saves_the_same_file_and_refuses_to_load_into_it(folder: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    model = Tied().eval()
    safetensors.save_model(model, folder / "plain.safetensors")
    wanted = model(TOKENS)
    with streamed(model, folder):
        safetensors.save_model(model, folder / "streamed.safetensors")
        with pytest.raises(RuntimeError, match="cannot be loaded into"):
            safetensors.load_model(model, folder / "plain.safetensors")
        assert torch.equal(model(TOKENS), wanted)
    assert (folder / "plain.safetensors").read_bytes() == (folder / "streamed.safetensors").read_bytes()


def test_a_state_dict_is_refused_before_anything_is_copied_but_for_what_is_in_memory(folder: Path) -> None:
    model: Any = layers().eval()
    with streamed(model, folder, exclude="0.weight"):
        wanted = model(X)
        parent: Any = nn.Sequential(model)
        for loaded in (model, parent):
            changed = {name: value + 1 for name, value in loaded.state_dict().items()}
            with pytest.raises(RuntimeError, match=r"cannot be loaded into \(.*1\.weight\)"):
                loaded.load_state_dict(changed)
        assert torch.equal(model(X), wanted), "small ones too are what they were"
        before = model.state_dict()["0.weight"].clone()
        model.load_state_dict({"0.weight": before + 1}, strict=False)
        assert torch.equal(model[0].weight, before + 1)


def test_of_a_parent_s_state_dict_only_what_is_used_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Any] = []
    usual: Any = vars(stored)["read_now"]

    def noted(sources: Any) -> Any:
        read.append(sources)
        return usual(sources)

    monkeypatch.setattr(stored, "read_now", noted)
    model = Tied().eval()
    wanted = {f"0.{name}": value.clone() for name, value in model.state_dict().items()}
    with streamed(model, folder):
        found = nn.Sequential(model).state_dict()
        assert list(found) == list(wanted)
        assert read == []
        assert found["0.head.weight"].data_ptr() == found["0.embedding.weight"].data_ptr() != 0
        assert torch.equal(found["0.head.weight"][1:3] * 2, wanted["0.head.weight"][1:3] * 2)
        assert len(read) == 1
        nvme_ops.save(found, folder / "model.pt")
        assert saved_by_torch(found).keys() == found.keys()
    loaded = nvme_ops.load(folder / "model.pt")
    assert all(torch.equal(loaded[name], wanted[name]) for name in wanted)


# Modes, and where it is

NOTHING: tuple[Callable[[nn.Module], Any], ...] = (
    lambda module: module.to("cpu"),
    lambda module: module.to(torch.float32),
    lambda module: module.cpu(),
    lambda module: module.float(),
)
SOMETHING: dict[str, Callable[[Any], Any]] = {
    "another device": lambda module: module.to("meta"),
    "another dtype": lambda module: module.to(torch.float64),
    "to_empty": lambda module: module.to_empty(device="cpu"),
    "share_memory": lambda module: module.share_memory(),
    "in place": lambda module: module._apply(lambda tensor: tensor.zero_()),
}


def family(folder: Path) -> tuple[nn.Module, list[nn.Module], nn.Module]:
    """A streamed module between others, its brothers, and the parent of its parent."""
    brothers = [nn.Conv2d(3, 3, 3), nn.LSTM(3, 3), nn.BatchNorm1d(3)]
    model = nn.Sequential(nn.Conv2d(128, 128, 3), *layers(4))
    streamed(model, folder)
    assert {"0.weight", "1.weight"} <= in_files(model)
    return model, brothers, nn.Sequential(brothers[0], nn.ModuleList([brothers[1], model]), brothers[2])


def test_a_conversion_that_changes_nothing_works(folder: Path) -> None:
    model, _, parent = family(folder)
    before = list(parent.parameters())
    for change in NOTHING:
        for module in (parent, model, list(model.children())[1]):
            assert change(module) is module
    assert all(one is other for one, other in zip(before, parent.parameters(), strict=True))
    assert torch.isfinite(list(model.children())[1](X)).all()
    others = nn.Sequential(nn.LSTM(3, 3), torch.jit.script(nn.Linear(3, 3))).to(torch.float64)
    assert {each.dtype for each in others.parameters()} == {torch.float64}, "modules without streamed weights"


@pytest.mark.parametrize("change", SOMETHING)
def test_a_conversion_is_refused_before_anything_is_changed(change: str, folder: Path) -> None:
    model, brothers, parent = family(folder)
    before = {name: (id(each), each.dtype, each.device) for name, each in parent.named_parameters()}
    values = [each.clone() for module in brothers for each in module.parameters()]
    for module in (parent, model, next(iter(model.children()))):
        with pytest.raises(RuntimeError, match="streamed"):
            SOMETHING[change](module)
    assert {name: (id(each), each.dtype, each.device) for name, each in parent.named_parameters()} == before
    assert all(map(torch.equal, values, [each for module in brothers for each in module.parameters()]))
    assert not any(each.is_shared() for module in brothers for each in module.parameters())


def test_what_ddp_ignores_are_streamed_ones_and_what_the_user_names(folder: Path) -> None:
    with streamed(layers(2), folder, exclude="1.weight") as model:
        ignore = torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
        ignore(model, ["1.weight"])
        assert {"0.weight", "base_model.model.0.weight", "1.weight"} <= set(model._ddp_params_and_buffers_to_ignore)
        assert "1.bias" not in model._ddp_params_and_buffers_to_ignore


# What stays in memory


def test_what_is_trained_beside_frozen_weights_stays_also_where_the_budget_is_too_small(folder: Path) -> None:
    model: Any = nn.Sequential(layers(4), nn.Linear(256, 16), nn.Dropout(0.5)).train()
    model[0].requires_grad_(False)
    names, before = trainable(model), list(model.parameters())
    with pytest.raises(ValueError, match="too small"):
        streamed(model, folder, "100K")
    assert all(one is other for one, other in zip(before, model.parameters(), strict=True))
    with streamed(model, folder, "560K"):
        assert trainable(model) == names == {"1.weight", "1.bias"}
        assert model[1].weight is before[-2], "an optimizer may have it"
        assert model.training
        assert model.stats().peak_bytes <= 560 << 10


def test_attention_over_another_sequence_has_the_same_bits(folder: Path) -> None:
    """torch multiplies by other kernels where the input is not contiguous and the weight takes no gradient."""
    torch.manual_seed(0)
    layer = nn.TransformerDecoderLayer(128, 2, 256, 0.0, batch_first=True)
    target, memory = torch.rand(3, 5, 128), torch.rand(3, 5, 128)
    with torch.no_grad():
        expected = layer(target, memory)
    with streamed(layer, folder) as model, torch.no_grad():
        assert in_files(model)
        assert torch.equal(model(target, memory), expected)


def test_a_frozen_table_beside_trainable_weights_is_told_and_does_not_keep_these_in_memory(folder: Path) -> None:
    model = layers().train()
    next(iter(model.parameters())).requires_grad_(False)
    with pytest.warns(UserWarning, match=r"15 parameters require a gradient, 1 do not, and all are frozen.*exclude="):
        streamed(model, folder)
    assert trainable(model) == set()
    assert not model.training
    assert "2.weight" in in_files(model)


@pytest.mark.parametrize("exclude", ["head.*", ["embedding.weight"]])
def test_excluded_ones_stay_what_they_are_by_any_of_their_names(exclude: Any, folder: Path) -> None:
    model = Tied()
    weight = model.head.weight
    for wrong, words in ((["nothing", "*dding*"], "no parameter or buffer 'nothing'"), ("*", "nothing to stream")):
        with pytest.raises(ValueError, match=words):
            streamed(model, folder, exclude=wrong)
    with streamed(model, folder, exclude=exclude):
        assert model.head.weight is model.embedding.weight is weight
        assert trainable(model) == {"embedding.weight"}
        assert in_files(model) == {f"body.{number}.weight" for number in range(3)}


@pytest.mark.filterwarnings("ignore:torch.ao.quantization:DeprecationWarning", "ignore::UserWarning")
def test_weights_that_torch_has_packed_are_refused(folder: Path) -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.LayerNorm(256))
    packed = torch.ao.quantization.quantize_dynamic(model.eval(), {nn.Linear}, dtype=torch.qint8)
    with pytest.raises(ValueError, match=r"packed the weights.*\(0\._packed_params.*quantize='int8'"):
        streamed(packed, folder)
    wanted = packed(X)
    with streamed(packed, folder, exclude="0.*"):
        assert torch.equal(packed(X), wanted)


KINDS = ["plain", "shared", "tied", "buffer", "view", "statistics"]  # what is parametrized torch does not pickle


class Random(nn.Module):
    """Layers of all kinds that share weights, memory, buffers and themselves."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        chosen = random.Random(seed)
        self.layers = nn.ModuleList()
        for number in range(8):
            kind = chosen.choice(KINDS if seed % len(COPIES) else [*KINDS, "normed", "spectral"])
            layer: Any = nn.Linear(256, 256, bias=chosen.random() < 0.7)
            plain = [each for each in self.layers if type(each) is nn.Linear]
            if kind == "normed":
                layer = nn.utils.parametrizations.weight_norm(layer)
            elif kind == "spectral":
                layer = nn.utils.parametrizations.spectral_norm(layer)
            elif kind == "shared" and number:
                layer = chosen.choice(list(self.layers))
            elif kind == "tied" and plain:
                layer.weight = chosen.choice(plain).weight
            elif kind in ("buffer", "view"):
                layer.register_buffer("more", layer.weight if kind == "buffer" else layer.weight.detach()[:3])
            elif kind == "statistics":
                layer = nn.Sequential(layer, nn.BatchNorm1d(256), nn.Dropout(0.5))
            self.layers.append(layer)
        if chosen.random() < 0.7:
            self.requires_grad_(False)
            for parameter in chosen.sample(list(self.parameters()), 3):
                parameter.requires_grad_()
        self.exclude = chosen.choice([(), "layers.0.*", "layers.[12]*", ["layers.3.*", "layers.4.*"]])
        self.budget = chosen.choice(["1700K", "2400K", "30M"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) + 1e-3 * torch.as_tensor(getattr(layer, "more", x)).sum()
        return x


@pytest.mark.filterwarnings("ignore:.*require a gradient:UserWarning")
@pytest.mark.parametrize("seeds", [range(8), pytest.param(range(8, 120), marks=pytest.mark.slow)], ids=["few", "many"])
def test_random_models_compute_train_and_are_copied_as_in_memory(seeds: range, folder: Path) -> None:
    for seed in seeds:
        plain, model = Random(seed), Random(seed)
        known = ties(plain)
        with streamed(model, folder, model.budget, exclude=model.exclude):
            assert ties(model) == known, seed
            left = trainable(model)
            for name, parameter in plain.named_parameters():
                parameter.requires_grad_(name in left)
            for mode in (True, False, True):
                outputs = []
                for each in (plain, model):
                    torch.manual_seed(seed)
                    outputs.append(each.train(mode)(X))
                assert torch.equal(*outputs), seed
                if left:
                    for each, output in zip((plain, model), outputs, strict=True):
                        output.sum().backward()
                        torch.optim.SGD([one for one in each.parameters() if one.requires_grad], 1e-3).step()
            small = [each for each in model.parameters() if stored_in(each) is None]
            assert not any(each._is_view() or each.untyped_storage().nbytes() > each.nbytes for each in small), seed
            how = COPIES[seed % len(COPIES)]
            for copied, usual in ((how(model), how(plain)), (how(nn.Sequential(model))[0], how(plain))):
                assert type(copied) is Random
                assert (ties(copied), in_files(copied)) == (ties(usual), set()), seed
                assert torch.equal(copied.eval()(X), usual.eval()(X)), seed
