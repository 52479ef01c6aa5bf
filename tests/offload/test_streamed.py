"""A streamed model beside computing: it is copied, saved, put into other modules, set to modes, and trained in part."""

from __future__ import annotations

import copy
import gc
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import nvme_ops
from nvme_ops.offload import stream_weights, swap_params
from nvme_ops.offload.weights import stored
from nvme_ops.offload.weights.stored import stored_in
from tests.conftest import watched
from tests.offload.elsewhere import saved_by_torch
from tests.offload.models import Tied, layers, ties

X = torch.randn(4, 256, generator=torch.Generator().manual_seed(3))
TOKENS = torch.tensor([[1, 2, 2], [5, 1, 3]])


def streamed(model: nn.Module, folder: Path, budget: str = "1M", **options: Any) -> Any:
    torch.manual_seed(1)
    return stream_weights(model, folder, memory_budget=budget, **options)


def trainable(model: nn.Module) -> set[str]:
    return {name for name, param in model.named_parameters() if param.requires_grad}


def in_files(model: nn.Module) -> set[str]:
    return {name for name, param in model.named_parameters(remove_duplicate=False) if stored_in(param) is not None}


# Copies and state dicts


class Sharing(nn.Module):
    """Shares a weight, its memory, and a layer, beside statistics that change."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.tied, self.bound = (nn.Linear(256, 256) for _ in range(3))
        self.tied.weight, self.again, self.norm = self.first.weight, self.bound, nn.BatchNorm1d(256)
        self.register_buffer("part", self.first.weight.detach()[:3])
        self.register_buffer("whole", self.bound.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own: Any = self
        return torch.as_tensor(
            own.norm(own.again(own.bound(own.tied(own.first(x))))) + own.part.sum() + own.whole.sum()
        )


@pytest.mark.parametrize(("budget", "exclude"), [("1M", ()), ("30M", ()), ("1M", "first.*")])
def test_what_is_shared_stays_so_and_copies_are_in_memory(budget: str, exclude: Any, folder: Path) -> None:
    plain: Any = Sharing().requires_grad_(False)
    with streamed(copy.deepcopy(plain), folder, budget, exclude=exclude) as model:
        assert ties(model) == ties(plain)
        for mode in (True, False):
            assert torch.equal(model.train(mode)(X), plain.train(mode)(X))
        small = [param for param in model.parameters() if stored_in(param) is None]
        assert not any(param._is_view() or param.untyped_storage().nbytes() > param.nbytes for param in small)
        copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model)), saved_by_torch(nn.Sequential(model))[0]
        for copied in copies:
            assert type(copied) is Sharing
            assert (ties(copied), in_files(copied)) == (ties(plain), set())
            assert torch.equal(copied(X), plain(X))


def test_a_copy_part_or_weight_outlives_the_model_and_the_last_closes_it(folder: Path) -> None:
    model = streamed(nn.Sequential(layers(), nn.Tanh()), folder)
    window, wanted = model._nvme_window, model[0](X)
    model = copy.copy(model)
    gc.collect()
    part: Any = model[0]
    weight: Any = part[7].weight
    del model
    gc.collect()
    assert torch.equal(part(X), wanted)
    del part
    gc.collect()
    assert weight.sum().isfinite()
    assert not window.closed
    del weight
    gc.collect()
    assert window.closed
    assert not os.listdir(folder)


@pytest.mark.parametrize("move", [stream_weights, swap_params])
def test_torch_func_stacks_models_on_storage(move: Any, folder: Path) -> None:
    models = [layers(1, 512).eval() for _ in range(2)]
    wanted, _ = torch.func.stack_module_state(models)
    with move(models[0], folder, memory_budget="8M"), move(models[1], folder, memory_budget="8M"):
        stacked, _ = torch.func.stack_module_state(models)
    assert all(torch.equal(stacked[name], wanted[name]) for name in wanted)


def test_a_state_dict_is_refused_whole_but_for_what_is_in_memory(folder: Path) -> None:
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
    read = watched(monkeypatch, stored, "read_now", lambda sources: sources)
    model = Tied().eval()
    wanted = {f"0.{name}": value.clone() for name, value in model.state_dict().items()}
    with streamed(model, folder):
        state = nn.Sequential(model).state_dict()
        assert list(state) == list(wanted)
        assert read == []
        assert state["0.head.weight"].data_ptr() == state["0.embedding.weight"].data_ptr() != 0
        assert torch.equal(state["0.head.weight"][1:3] * 2, wanted["0.head.weight"][1:3] * 2)
        assert len(read) == 1
        nvme_ops.save(state, folder / "model.pt")
        assert saved_by_torch(state).keys() == state.keys()
    loaded = nvme_ops.load(folder / "model.pt")
    assert all(torch.equal(loaded[name], wanted[name]) for name in wanted)


# Modes, and where it is

SOMETHING: tuple[Callable[[Any], Any], ...] = (
    lambda module: module.to("meta"),
    lambda module: module.to(torch.float64),
    lambda module: module.to_empty(device="cpu"),
    lambda module: module.share_memory(),
    lambda module: module._apply(lambda tensor: tensor.zero_()),
)


def test_conversions_that_change_something_are_refused_as_a_whole(folder: Path) -> None:
    brothers = [nn.Conv2d(3, 3, 3), nn.LSTM(3, 3), nn.BatchNorm1d(3)]
    model = nn.Sequential(nn.Conv2d(128, 128, 3), *layers(4))
    parent = nn.Sequential(brothers[0], nn.ModuleList([brothers[1], model]), brothers[2])

    def seen() -> dict[str, Any]:
        return {name: (id(param), param.dtype, param.device) for name, param in parent.named_parameters()}

    with streamed(model, folder):
        assert {"0.weight", "1.weight"} <= in_files(model)
        before, values = seen(), [param.clone() for module in brothers for param in module.parameters()]
        for module in (parent, model, model[1]):
            assert module.to("cpu").float() is module
        for module in (parent, model, model[0]):
            for change in SOMETHING:
                with pytest.raises(RuntimeError, match="streamed"):
                    change(module)
        assert seen() == before
        assert all(map(torch.equal, values, [param for module in brothers for param in module.parameters()]))
        assert not any(param.is_shared() for module in brothers for param in module.parameters())
        others = nn.Sequential(nn.LSTM(3, 3), torch.jit.script(nn.Linear(3, 3))).to(torch.float64)
        assert {param.dtype for param in others.parameters()} == {torch.float64}, "modules without streamed weights"


def test_what_ddp_ignores_are_streamed_ones_and_what_the_user_names(folder: Path) -> None:
    with streamed(layers(2), folder, exclude="1.weight") as model:
        ignore = torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
        ignore(model, ["1.weight"])
        assert {"0.weight", "base_model.model.0.weight", "1.weight"} <= set(model._ddp_params_and_buffers_to_ignore)
        assert "1.bias" not in model._ddp_params_and_buffers_to_ignore


# What stays in memory


def test_what_is_trained_beside_frozen_weights_stays_what_it_is(folder: Path) -> None:
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


def test_a_frozen_table_does_not_keep_trainable_weights_in_memory(folder: Path) -> None:
    model = layers().train()
    next(iter(model.parameters())).requires_grad_(False)
    with pytest.warns(UserWarning, match=r"15 parameters require a gradient, 1 do not, and all are frozen.*exclude="):
        streamed(model, folder)
    assert trainable(model) == set()
    assert not model.training
    assert "2.weight" in in_files(model)


def test_excluded_ones_stay_what_they_are_by_any_of_their_names(folder: Path) -> None:
    model = Tied()
    weight = model.head.weight
    for wrong, words in ((["nothing", "*dding*"], "no parameter or buffer 'nothing'"), ("*", "nothing to stream")):
        with pytest.raises(ValueError, match=words):
            streamed(model, folder, exclude=wrong)
    with streamed(model, folder, exclude="head.*"):
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
