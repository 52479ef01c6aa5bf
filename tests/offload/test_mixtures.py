"""Mixtures of experts whose modules are the user's own: each is called as in memory, and computes what it says."""

from __future__ import annotations

import copy
import gc
import pickle
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from nvme_ops.offload import stream_weights
from nvme_ops.offload.weights.derived import Derived, plain_class
from tests.offload.models import COUNT, WIDTH, Packed, Router, mixed, mixture, nbytes, saved

pytestmark = pytest.mark.usefixtures("one_thread")  # on whose number the bits of a product depend
X = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(3))


# Experts of one's own, derived from those of transformers


def scaled_by_its_layer(module: Any, layer: Any, *_: Any) -> None:
    class Scaled(type(module)):  # type: ignore[misc]
        def forward(self, *args: Any) -> torch.Tensor:
            return torch.as_tensor(super().forward(*args) * self.layer[0].scale)

    module.__class__, module.layer, layer.scale = Scaled, (layer,), 3.0


def patched_in_its_class(module: Any, _: Any, patch: pytest.MonkeyPatch) -> None:
    plain = plain_class(type(module)) if isinstance(module, Derived) else type(module)
    before = plain.forward
    patch.setattr(plain, "forward", lambda self, *args: before(self, *args) * 2)


def patched_itself(module: Any, *_: Any) -> None:
    before = module.forward
    module.forward = types.MethodType(lambda _, *args: before(*args) * 2, module)


def gated_otherwise(module: Any, *_: Any) -> None:
    module._apply_gate = lambda values: values.chunk(2, -1)[0] * values.mean()


def activated_and_counted(module: Any, *_: Any) -> None:
    module.seen = []
    module.act_fn = nn.SiLU()
    module.act_fn.register_forward_hook(lambda _, given, output: module.seen.append(output.clone()))


def parametrized_and_counted(module: Any, *_: Any) -> None:
    module.seen = []
    parametrize.register_parametrization(module, "down_proj", nn.Identity())
    counted = module.parametrizations.down_proj[0]
    counted.register_forward_hook(lambda *_: module.seen.append(torch.ones(1)))


def registered_by_the_user(_: Any, __: Any, patch: pytest.MonkeyPatch) -> None:
    known = pytest.importorskip("transformers.integrations.moe").ALL_EXPERTS_FUNCTIONS
    patch.setitem(known._global_mapping, "grouped_mm", lambda module, x, chosen, weights: x * module.down_proj[0, 0, 0])


OWN = [
    scaled_by_its_layer, patched_in_its_class, patched_itself, gated_otherwise, activated_and_counted,
    parametrized_and_counted,
]  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
@pytest.mark.parametrize("change", [*OWN, registered_by_the_user])
@pytest.mark.parametrize("after", [False, True])
def test_experts_whose_forward_is_the_users_own_are_computed_by_that(
    change: Callable[..., None], implementation: str, after: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, kind = saved(folder, "Qwen3Moe")
    plain = kind.from_pretrained(path, experts_implementation=implementation).eval()
    ours = kind.from_pretrained(path, experts_implementation=implementation).eval()
    tokens = torch.arange(8).view(2, 4)

    def changed(model: Any) -> None:
        for layer in model.model.layers:
            change(layer.mlp.experts, layer, monkeypatch)

    if not after:
        changed(ours)
    with stream_weights(ours, folder, memory_budget=sum(param.nbytes for param in ours.parameters())) as model:
        model.set_experts_implementation(implementation)
        for part in (tokens * 0, tokens, tokens[:1, :1], tokens[:1, :1]) if after else ():
            assert torch.equal(model(part).logits, plain(part).logits)
        if after:
            changed(model)
        if change is not patched_in_its_class:  # which both have
            changed(plain)
        for part in (tokens, tokens[:1, :1], tokens[1:, 2:3]):
            assert torch.equal(model(part).logits, plain(part).logits)
        for one, other in zip(model.model.layers, plain.model.layers, strict=True):
            seen = [getattr(layer.mlp.experts, "seen", []) for layer in (one, other)]
            assert len(seen[0]) == len(seen[1])
            assert all(map(torch.equal, *seen))


@torch.no_grad()
@pytest.mark.parametrize("kind", ["packed", "indices"])
def test_a_mixture_can_be_compiled(kind: str, folder: Path) -> None:
    plain = mixture(kind)
    with stream_weights(mixture(kind), folder, memory_budget=nbytes(plain)) as model:
        torch.testing.assert_close(torch.compile(model, backend="aot_eager")(X[:2]), plain(X[:2]))


# Models that are put together in other ways


class Sizes(nn.Module):
    """Matrices in two parameters of different numbers of experts."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(first, 64, 64) / 8), nn.Parameter(torch.randn(second, 64, 64) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.up[-1] @ self.down[2]


class TwoLists(nn.Module):
    """One router that chooses in two lists."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Router("indices")
        self.up, self.down = (nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(COUNT)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x)
        return x + mixed(x, chosen, weights, lambda number, part: self.down[number](self.up[number](part).relu()))


class WithNothing(Packed):
    """Has a parameter without elements, and uses parts of several experts at once."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.zeros(COUNT, 0, WIDTH))

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        more = x @ self.down[:3].sum(0)[:, WIDTH:] + self.empty.sum() + self.empty[1].sum()
        return super().forward(x, chosen, weights) + more


def three(make: Callable[[], nn.Module]) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(make() for _ in range(3))).requires_grad_(False)


def one_router_for_all() -> nn.Sequential:
    made = mixture("indices")
    for layer in made:
        layer.router = made[0].router
    return made


def with_nothing(kind: str) -> nn.Sequential:
    made: Any = mixture(kind)
    for layer in made:
        if kind == "packed":
            layer.experts = WithNothing().requires_grad_(False)
            continue
        for expert in layer.experts:
            expert.empty = nn.Parameter(torch.zeros(0, 3), False)
    return made


MADE: dict[str, Callable[[], nn.Sequential]] = {
    "two sizes": lambda: three(lambda: Sizes(6, 4)),
    "one and more": lambda: three(lambda: Sizes(1, 4)),
    "two lists": lambda: three(TwoLists),
    "one router": one_router_for_all,
    "parts": lambda: mixture("halves"),
    "empty": lambda: with_nothing("packed"),
    "empty in lists": lambda: with_nothing("indices"),
}


@torch.no_grad()
@pytest.mark.parametrize("share", [0.5, 2.0])
@pytest.mark.parametrize("kind", MADE)
def test_models_of_other_makes_have_the_bits_in_memory(kind: str, share: float, folder: Path) -> None:
    plain = MADE[kind]()
    budget = int(nbytes(plain) * share)
    with stream_weights(MADE[kind](), folder, memory_budget=budget) as model:
        for number in range(12):
            rows = X[number : number + 1 + 3 * (number % 4 == 3)]
            assert torch.equal(model(rows), plain(rows))
        assert model.stats().peak_bytes <= budget


@pytest.mark.parametrize("kind", ["scores", "indices", "packed"])
def test_layers_are_computed_again_for_backward_as_in_memory(kind: str, folder: Path) -> None:
    plain = mixture(kind)
    with stream_weights(mixture(kind), folder, memory_budget=nbytes(plain) // 2) as model:
        for number in range(4):
            gradients: list[Any] = []
            for layers in (plain, model):
                x = X[number][None].clone().requires_grad_()
                output = x
                for layer in layers:
                    output = checkpoint(layer, output, use_reentrant=False)
                output.square().sum().backward()
                gradients.append(x.grad)
            assert torch.equal(*gradients)
        model._nvme_window.experts.guess(2, range(COUNT))  # under way when it is closed


@torch.no_grad()
def test_copies_are_in_memory_and_of_the_classes_before(folder: Path) -> None:
    plain: Any = mixture("packed")
    with stream_weights(mixture("packed"), folder, memory_budget="500K") as model:
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.deepcopy(nn.Sequential(*model))):
            assert [type(module) for module in copied.modules()] == [type(module) for module in plain.modules()]
            assert torch.equal(copied(X), plain(X))
        for layer in (*plain, *model):  # from now on of classes that torch has derived
            parametrize.register_parametrization(layer.experts, "up", nn.Tanh())
            parametrize.register_parametrization(layer.router, "weight", nn.Tanh())
        copied, wanted = copy.deepcopy(nn.Sequential(*model)), plain(X)
        assert torch.equal(model(X), wanted)
    assert torch.equal(copied(X), wanted)


@torch.no_grad()
def test_a_model_whose_modules_have_classes_of_their_own_is_freed(folder: Path) -> None:
    """torch's class of a parametrized module has that module; a table of classes had the class."""
    model: Any = mixture("packed")
    parametrize.register_parametrization(model[0].experts, "up", nn.Tanh())
    with stream_weights(model, folder, memory_budget="2M"):
        model(X)
    gone = weakref.ref(model[0].experts)
    del model
    gc.collect()
    assert gone() is None
