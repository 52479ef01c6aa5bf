"""NvmeOptimizer beside torch's own, with options that change between steps and state dicts of other options."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nvme_ops.offload import NvmeOptimizer
from nvme_ops.offload.optimizer.states import ELEMENTWISE
from tests.offload.training import equal, values

Params = list[torch.nn.Parameter]
#: What each optimizer may have, beside the learning rate and weight decay.
SWITCHES: dict[str, list[dict[str, Any]]] = {
    "Adam": [{"amsgrad": True}], "AdamW": [{"amsgrad": True}], "NAdam": [{"decoupled_weight_decay": True}],
    "RAdam": [{"decoupled_weight_decay": True}], "RMSprop": [{"momentum": 0.9}, {"centered": True}],
    "SGD": [{"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}, {"momentum": 0.9, "dampening": 0.5}],
}  # fmt: skip


def made(dtype: torch.dtype) -> Params:
    """Three chunks or more of a budget of 1 MiB.

    Their sizes are multiples of 128: where torch's loops end in the middle of a vector, or are divided among threads
    there, its own bits in low precision are not those of the same elements elsewhere.
    """
    generator = torch.Generator().manual_seed(5)
    return [torch.nn.Parameter(torch.randn(size, generator=generator).to(dtype)) for size in (65536, 256, 40960)]


def give(params: Params, step: int, without: int = -1) -> None:
    generator = torch.Generator().manual_seed(step)
    for number, each in enumerate(params):
        gradient = torch.randn(each.shape, generator=generator).to(each.dtype)
        each.grad = None if number == without else gradient


def alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether they are equal; float16 has NaN where it is too small for eps."""
    return torch.allclose(one.detach(), other.detach(), rtol=0, atol=0, equal_nan=True)


def same(ours: torch.optim.Optimizer, plain: torch.optim.Optimizer) -> bool:
    """Whether both have the same parameters and state dicts. Adagrad has its states before the first step."""
    one, other = ours.state_dict()["state"], plain.state_dict()["state"]
    params = [[each for group in some.param_groups for each in group["params"]] for some in (ours, plain)]
    return all(map(alike, *params)) and all(
        {name: value for name, value in one[number].items() if value is not None}.keys()
        == {name for name, value in other[number].items() if value is not None}
        and all(
            alike(torch.as_tensor(value), torch.as_tensor(other[number][name])) and (
                not isinstance(value, torch.Tensor) or value.dtype == other[number][name].dtype)
            for name, value in one[number].items() if value is not None
        )
        for number in one
    ) and (set(other) == set(one) or isinstance(plain, torch.optim.Adagrad))  # fmt: skip


class Pair:
    """The same parameters twice, with torch's optimizer and ours."""

    def __init__(self, name: str, folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> None:
        self.kind = getattr(torch.optim, name)
        self.params = made(dtype), made(dtype)
        self.plain = self.kind(self.params[1], **options)
        self.ours = NvmeOptimizer(
            self.params[0], self.kind, folder, memory_budget="1M", master_weights=False, **options
        )

    def step(self, step: int, without: int = -1, **changes: Any) -> None:
        for params, optimizer in zip(self.params, (self.ours, self.plain), strict=True):
            optimizer.param_groups[0].update(changes)
            give(params, step, without)
            optimizer.step()
        assert same(self.ours, self.plain), (step, without, changes)

    def load(self, found: dict[str, Any]) -> None:
        for optimizer in (self.ours, self.plain):
            optimizer.load_state_dict(copy.deepcopy(found))
        assert same(self.ours, self.plain)


def options_of(name: str, draw: random.Random) -> dict[str, Any]:
    found: dict[str, Any] = {"foreach": draw.choice((None, True, False))}
    found["maximize"] = draw.random() < 0.3
    if name != "Rprop":
        found["weight_decay"] = draw.choice((0.0, 0.1))
    if draw.random() < 0.6:
        found.update(draw.choice(SWITCHES.get(name, [{}])))
    return found


def walk(name: str, folder: Path, seed: int) -> None:
    """Steps with options that change, parameters that have no gradient, and state dicts between; or a refusal."""
    draw = random.Random(f"{name} {seed}")
    dtype, options = draw.choice((torch.float32, torch.bfloat16, torch.float16)), options_of(name, draw)
    pair = Pair(name, folder, dtype, **options)
    saved: list[dict[str, Any]] = []
    with pair.ours:
        for step in range(8):
            what = draw.random()
            if what < 0.15:
                saved.append(copy.deepcopy(pair.plain.state_dict()))
            elif what < 0.3 and saved:
                pair.load(draw.choice(saved))
            changes: dict[str, Any] = {"lr": draw.choice((0.01, 0.001))}
            if name in ("SGD", "RMSprop") and draw.random() < 0.3:
                changes["momentum"] = draw.choice((0.0, 0.5))
                changes["nesterov"] = False
            try:
                pair.step(step, draw.choice((-1, -1, 0, 2)), **changes)
            except (RuntimeError, KeyError) as error:
                if isinstance(error, KeyError):  # torch's own says no more, when its states lack one
                    assert name == "RMSprop", seed
                else:
                    assert "has made no room for the states" in str(error), seed  # noqa: PT017
                return


@pytest.mark.parametrize("name", ELEMENTWISE)
@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 60), marks=pytest.mark.slow)], ids=["some", "many"])
def test_options_that_change_between_steps(folder: Path, name: str, seeds: range) -> None:
    for seed in seeds:
        walk(name, folder, seed)


def test_momentum_without_room_is_refused(folder: Path) -> None:
    pair = Pair("SGD", folder, lr=0.01)
    with pair.ours:
        pair.step(0)
        before = values(torch.nn.ParameterList(pair.params[0]))
        pair.ours.param_groups[0]["momentum"] = 0.9
        with pytest.raises(RuntimeError, match=r"momentum=0.9 now, and NvmeOptimizer has made no room"):
            pair.ours.step()
        assert equal(before, values(torch.nn.ParameterList(pair.params[0])))
        pair.step(1, momentum=0.0)


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [("SGD", "momentum", 0.9), ("RMSprop", "momentum", 0.9), ("RMSprop", "centered", True), ("AdamW", "amsgrad", True)],
)
def test_state_dicts_of_other_options(folder: Path, name: str, option: str, value: Any) -> None:
    """One with more states is refused, and nothing changes; one with fewer is as in torch."""
    more, less = Pair(name, folder, lr=0.01, **{option: value}), Pair(name, folder, lr=0.02)
    with more.ours, less.ours:
        for step in range(2):
            more.step(step)
            less.step(step)
        with pytest.raises(ValueError, match=rf"{option}={value} now, and NvmeOptimizer has made no room"):
            less.ours.load_state_dict(more.plain.state_dict())
        assert same(less.ours, less.plain)
        assert less.ours.param_groups[0]["lr"] == 0.02
        found = copy.deepcopy(more.plain.state_dict())
        found["param_groups"][0][option] = 0
        if name != "SGD" or option != "momentum":
            with pytest.raises(ValueError, match="has no room for"):
                less.ours.load_state_dict(found)
        less.step(2)
        more.load(less.plain.state_dict())
        more.step(3)


def test_a_gradient_that_comes_later_than_the_others_during_the_backward_pass(folder: Path) -> None:
    """While one has no momentum buffer, torch's foreach rounds the others' otherwise."""
    dtype = torch.bfloat16
    mine, other = made(dtype), made(dtype)
    options: dict[str, Any] = {"lr": 0.01, "momentum": 0.9, "foreach": True}
    plain = torch.optim.SGD(other, **options)
    with NvmeOptimizer(
        mine, torch.optim.SGD, folder, memory_budget="1M", master_weights=False, overlap="backward", **options
    ) as ours:
        for step in range(4):
            for params, optimizer in ((mine, ours), (other, plain)):
                generator = torch.Generator().manual_seed(step)
                for each in params:
                    each.grad = None
                used = params if step > 1 else params[:2]
                weights = [torch.randn(each.shape, generator=generator).to(dtype) for each in used]
                torch.autograd.backward(used, weights)
                optimizer.step()
            assert same(ours, plain), step


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_it_is_not_copied(folder: Path, copied: Callable[[Any], object]) -> None:
    pair = Pair("SGD", folder, lr=0.01)
    with pair.ours, pytest.raises(TypeError, match=r"cannot be copied or pickled.* state_dict\(\) or save_states\(\)"):
        copied(pair.ours)
