"""What a program changes between the steps of an NvmeOptimizer: parameters, layouts, groups, states. The same bits."""

from __future__ import annotations

import collections
import contextlib
import copy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import nvme_ops
from nvme_ops.offload import NvmeOptimizer, swap_params
from nvme_ops.offload.optimizer.state_dtypes import MASTER
from tests.conftest import run_python
from tests.contract.conftest import lost_unraisable
from tests.contract.faulty import Faulty
from tests.moments import Interrupt, numbers
from tests.offload.elsewhere import same as differ
from tests.offload.elsewhere import values as values_of
from tests.offload.random_optimizers import OPTIMIZERS, made, run, with_masters
from tests.offload.random_optimizers import same as same_bits
from tests.offload.training import Twins, backward, equal, network, values

LOW = torch.bfloat16


# Random programs: what follows is what they do not do, or seldom


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("seed", range(len(OPTIMIZERS)))
def test_whatever_a_program_does_it_has_the_bits_of_torch(folder: Path, seed: int) -> None:
    assert run(seed, folder, small=False) == ""


PROGRAM = """
    import sys, warnings
    from tests.offload.random_optimizers import run_many
    warnings.simplefilter("ignore")
    failures = run_many(range(1000, 1000 + int(sys.argv[1])))
    assert not failures, "\\n".join(failures[:3])
"""


@pytest.mark.parametrize("count", [40, pytest.param(300, marks=pytest.mark.nightly)])
def test_many_small_ones_do_too(count: int) -> None:
    run_python(PROGRAM, count)


@pytest.mark.parametrize("chunks", [None, "parameter"])
def test_a_gradient_that_comes_later_than_others_in_the_backward_pass(folder: Path, chunks: Any) -> None:
    """While one has no momentum buffer, torch's foreach rounds the others' otherwise."""
    scalar = torch.tensor(0.5, dtype=torch.bfloat16)
    mine, other = ([*made(torch.bfloat16), torch.nn.Parameter(scalar.clone())] for _ in range(2))
    options: dict[str, Any] = {"lr": 0.01, "momentum": 0.9, "foreach": True}
    plain = torch.optim.SGD(other, **options)
    budget = "1M" if chunks is None else "8M"
    ours = {"memory_budget": budget, "master_weights": False, "overlap": "backward", "chunks": chunks}
    with NvmeOptimizer(mine, torch.optim.SGD, folder, **ours, **options) as optimizer:
        for step in range(4):
            for params, its_optimizer in ((mine, optimizer), (other, plain)):
                generator = torch.Generator().manual_seed(step)
                for parameter in params:
                    parameter.grad = None
                used = params if step > 1 else params[:2]
                weights = [torch.randn(one.shape, generator=generator).to(one.dtype) for one in used]
                torch.autograd.backward(used, weights)
                its_optimizer.step()
            assert same_bits(optimizer, plain) == "", step


# Parameters


def _load(model: torch.nn.Module, folder: Path) -> None:
    nvme_ops.save({name: tensor * 2 for name, tensor in model.state_dict().items()}, folder / "twice.safetensors")
    nvme_ops.load(folder / "twice.safetensors", into=model)


@torch.no_grad()
def _prune(model: torch.nn.Module, _: Path) -> None:
    for param in model.parameters():
        param.mul_(values_of(param).abs() > 0.05)


EDITS: dict[str, Callable[[torch.nn.Module, Path], Any]] = {
    "mask": _prune,
    "nan": lambda model, _: [param.detach()[..., 0].fill_(torch.nan) for param in model.parameters()],
    "load(into=)": _load,
}


@pytest.mark.parametrize(
    ("edit", "dtype", "swapped"),
    [*((edit, LOW, False) for edit in EDITS), ("mask", torch.float16, False), ("load(into=)", LOW, True)],
)
def test_float32_masters_follow_what_the_program_does_to_parameters(
    folder: Path, edit: str, dtype: torch.dtype, swapped: bool
) -> None:
    """Elements that it has not changed keep the precision of their float32 copy."""
    mine, other = network(dtype), network(dtype)
    if swapped:
        swap_params(mine, folder, memory_budget="2M", min_bytes=1)
    with Twins(folder, models=(mine, other), plain=with_masters(torch.optim.AdamW), lr=0.001) as twins:
        for step in range(4):
            for model in (mine, other):
                if step == 2:
                    EDITS[edit](model, folder)
            twins.step(step)
        assert twins.apart() == ""


# Layouts


def _convolution() -> Any:
    torch.manual_seed(0)
    return torch.nn.Conv2d(16, 160, 3)


def _train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, *steps: int) -> None:
    """Takes steps whose gradients depend on nothing but the step."""
    for step in steps:
        for number, param in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(10 * step + number)
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()


@pytest.mark.parametrize("how", ["reuse", "load_states"])
def test_states_of_another_memory_layout_are_put_in_order(folder: Path, how: str) -> None:
    mine, other = _convolution(), _convolution()
    plain = torch.optim.AdamW(other.parameters(), lr=0.01)
    _train(other, plain, 0, 1)
    options: Any = {"memory_budget": "1M", "lr": 0.01, "reuse": how == "reuse"}
    with NvmeOptimizer(mine.parameters(), torch.optim.AdamW, folder, **options) as ours:
        _train(mine, ours, 0, 1)
        ours.save_states(folder / "saved")
    mine.to(memory_format=torch.channels_last)
    for step in (2, 3):
        with NvmeOptimizer(mine.parameters(), torch.optim.AdamW, folder, **options) as ours:
            if how == "load_states":
                ours.load_states(folder / "saved")
            assert ours.steps == step
            torch.testing.assert_close(ours.state_dict()["state"], plain.state_dict()["state"], rtol=1e-6, atol=1e-7)
            _train(mine, ours, step)
            _train(other, plain, step)
            torch.testing.assert_close(values(mine), values(other), rtol=1e-6, atol=1e-7)
            ours.save_states(folder / "saved")


# Groups and states


class Pair:
    """The same parameters, once with torch's optimizer and once with ours."""

    def __init__(self, folder: Path, **options: Any) -> None:
        torch.manual_seed(0)
        shapes = [(300, 301), (50,), (7, 3)]
        first = [torch.nn.Parameter(torch.randn(shape)) for shape in [*shapes, (50,), (20000,)]]
        self.all = [first, [torch.nn.Parameter(param.detach().clone()) for param in first]]
        kind: Any = torch.optim.AdamW
        groups = [[{"params": params[:2]}, {"params": params[2:3], "lr": 0.02}] for params in self.all]
        self.optimizers: list[Any] = [kind(groups[0], lr=0.01)]
        self.optimizers.append(NvmeOptimizer(groups[1], kind, folder, memory_budget="1M", lr=0.01, **options))

    def step(self, number: int) -> None:
        for params, optimizer in zip(self.all, self.optimizers, strict=True):
            for place, param in enumerate(params):
                param.grad = (param.detach() * (number + place)).sin()
            optimizer.step()

    def edit(self, change: Callable[..., object]) -> None:
        for params, optimizer in zip(self.all, self.optimizers, strict=True):
            change(optimizer, *params)

    def apart(self) -> str:
        """What differs."""
        both = [
            [*params, *([dict(optimizer.state.get(param, {})) for param in params])]
            for params, optimizer in zip(self.all, self.optimizers, strict=True)
        ]
        return differ(both[1], both[0])


def _add_rows(optimizer: Any, one: Any, two: Any, *_: Any) -> None:
    """As those do it who add or remove rows while they train."""
    state = optimizer.state.get(two)
    for name in ("exp_avg", "exp_avg_sq"):
        state[name] = torch.cat([state[name], torch.zeros(5)])
    del optimizer.state[two]
    two.data = torch.cat([two.detach(), torch.ones(5)])
    optimizer.state[two] = state


def _forget(optimizer: Any, *_: Any) -> None:
    optimizer.state = collections.defaultdict(dict)


def _move(first: dict[str, Any], second: dict[str, Any]) -> None:
    second["params"].append(first["params"].pop(0))


GROUPS: dict[str, Callable[..., object]] = {
    "append": lambda optimizer, *params: optimizer.param_groups[0]["params"].append(params[3]),
    "move": lambda optimizer, *_: _move(*optimizer.param_groups),
    "delete a group": lambda optimizer, *_: optimizer.param_groups.pop(0),
    "swap groups": lambda optimizer, *_: optimizer.param_groups.reverse(),
    "clear": lambda optimizer, *_: optimizer.state.clear(),
    "empty": lambda optimizer, one, *_: optimizer.state[one].clear(),
    "defaultdict": _forget,
    "zero_": lambda optimizer, one, *_: optimizer.state[one]["exp_avg"].zero_(),
    "step": lambda optimizer, one, two, *_: optimizer.state[two]["step"].fill_(7),
    "rows": _add_rows,
}


@pytest.mark.parametrize("edit", GROUPS)
def test_groups_and_states_are_edited_as_in_torch(folder: Path, edit: str) -> None:
    pair = Pair(folder)
    for step in range(4):
        if step == 2:
            pair.edit(GROUPS[edit])
        pair.step(step)
        assert pair.apart() == "", step
    pair.optimizers[1].close()


def test_states_that_a_program_holds_while_backward_begins_a_step(folder: Path) -> None:
    """What has been updated is on storage; the program sees it after the step, and must not change it before."""
    params = [torch.nn.Parameter(torch.ones(300, 301)) for _ in range(3)]
    with NvmeOptimizer(params, torch.optim.AdamW, folder, memory_budget="1M", overlap="backward") as optimizer:
        for step in range(3):
            average = optimizer.state[params[0]]["exp_avg"] if step else torch.empty(0)
            sum(param.square().sum() for param in params).backward()  # type: ignore[union-attr]
            end = time.monotonic() + 60
            while not all(map(optimizer._states.is_done, optimizer._states.division.chunks)):
                assert time.monotonic() < end
                time.sleep(0.01)
            if step < 2:
                optimizer.step()
                assert not step or equal([average], [copy.deepcopy(optimizer.state[params[0]])["exp_avg"]])
        average.zero_()
        with pytest.raises(RuntimeError, match=r"optimizer.state were changed after a step had begun"):
            optimizer.step()


def test_what_was_edited_is_in_what_is_saved_and_kept(folder: Path) -> None:
    pair = Pair(folder, reuse=True)
    pair.step(0)
    pair.edit(GROUPS["append"])
    pair.edit(GROUPS["zero_"])
    assert float(pair.optimizers[1].state_dict()["state"][0]["exp_avg"].abs().max()) == 0
    pair.edit(lambda optimizer, one, *_: optimizer.state[one]["exp_avg_sq"].data.mul_(2))
    saved = [copy.deepcopy(pair.optimizers[0].state[param]) for param in pair.all[0][:3]]
    pair.optimizers[1].save_states(folder / "saved")
    pair.edit(GROUPS["empty"])
    pair.optimizers[1].close()
    groups = [{"params": pair.all[1][:2] + pair.all[1][3:4]}, {"params": pair.all[1][2:3], "lr": 0.02}]
    options: Any = {"memory_budget": "1M", "lr": 0.01, "reuse": True}
    pair.optimizers[1] = NvmeOptimizer(groups, torch.optim.AdamW, folder, **options)
    pair.step(1)
    assert pair.apart() == ""
    pair.optimizers[1].load_states(folder / "saved")
    assert differ([dict(pair.optimizers[1].state[param]) for param in pair.all[1][:3]], saved) == ""
    pair.optimizers[1].close()


MISTAKES: dict[str, tuple[Callable[..., object], str]] = {
    "shape": (
        lambda _, one, two, *__: setattr(two, "data", torch.ones(9)),
        r"'exp_avg' of shape \(50,\) is for a para",
    ),
    "dtype": (lambda _, one, two, *__: setattr(two, "data", two.detach().double()), "is torch.float32 and has to be"),
    "state": (lambda optimizer, one, two, *_: optimizer.state[two].update(exp_avg=torch.ones(3)), r"\(3,\) is for a"),
    "name": (lambda optimizer, one, two, *_: optimizer.state[two].update(more=torch.ones(50)), "has no room for"),
    "lacking": (lambda optimizer, one, two, *_: optimizer.state[two].pop("exp_avg"), "there is no 'exp_avg'"),
    "twice": (lambda optimizer, one, *_: optimizer.param_groups[1]["params"].append(one), "more than once"),
    "gaps": (lambda _, one, two, *__: setattr(two, "data", torch.ones(50, 2)[:, 0]), r"gaps .* data\.contiguous"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_edits_that_do_not_fit_are_refused_by_the_next_step(folder: Path, mistake: str) -> None:
    pair = Pair(folder)
    pair.step(0)
    edit, said = MISTAKES[mistake]
    _, ours = pair.optimizers
    edit(ours, *pair.all[1])
    before = copy.deepcopy(pair.all[1])
    for param in pair.all[1]:
        param.grad = torch.ones_like(param)
    for _ in range(2):
        with pytest.raises(ValueError, match=said):
            ours.step()
    assert differ(pair.all[1], before) == ""
    ours.close()


def test_a_model_converted_between_steps_goes_on_with_float32_copies(folder: Path) -> None:
    model: Any = network()
    with NvmeOptimizer(model.parameters(), torch.optim.AdamW, folder, memory_budget="1M", lr=0.01) as optimizer:
        backward(model, 0)
        optimizer.step()
        average = optimizer.state[model[0].weight]["exp_avg"].clone()
        model.bfloat16()
        backward(model, 1)
        gradient = model[0].weight.grad
        optimizer.step()
        state = optimizer.state[model[0].weight]
        assert differ(state["exp_avg"], average.lerp(gradient.float(), 1 - 0.9)) == ""
        assert differ(state[MASTER].bfloat16(), model[0].weight.detach()) == ""


def test_edits_after_a_step_has_begun_in_the_backward_pass_are_refused(folder: Path) -> None:
    model = network()
    options: Any = {"memory_budget": "1M", "overlap": "backward"}
    with NvmeOptimizer(model.parameters(), torch.optim.AdamW, folder, **options) as optimizer:
        backward(model, 0)
        optimizer.step()
        for edit in (
            optimizer.state.clear,
            lambda: model[3].to(torch.float64),
            optimizer.param_groups[0]["params"].pop,
        ):
            backward(model, 1)
            edit()
            with pytest.raises(RuntimeError, match=r"change them before it or after step\(\); zero_grad\(\) abandons"):
                optimizer.step()
            optimizer.zero_grad()
            model.float()


def test_a_parameter_that_takes_no_gradient_now_during_the_backward_pass(folder: Path) -> None:
    """It can take one later."""
    models = network(), network()
    for model in models:
        model[3].requires_grad_(False)
    with Twins(folder, models=models, ours={"overlap": "backward", "free_gradients": True}) as twins:
        for step in range(5):
            for model in models:
                model[3].requires_grad_(step >= 2)
                model[0].requires_grad_(step < 3)
            twins.step(step)
        assert twins.apart() == ""


@pytest.mark.parametrize("name", ["AdamW", "SGD", "NAdam", "Adagrad", "ASGD"])
def test_state_dicts_of_earlier_versions_of_torch(folder: Path, name: str) -> None:
    """Their steps are numbers, and their groups lack options such as foreach."""
    options: dict[str, Any] = {"lr": 0.01, **({"momentum": 0.9} if name == "SGD" else {})}
    with Twins(folder, getattr(torch.optim, name), **options) as twins:
        twins.step(0)
        for _, optimizer in twins.both():
            saved = copy.deepcopy(optimizer.state_dict())
            for state in saved["state"].values():
                for key, value in state.items():
                    if torch.is_tensor(value) and not value.dim():
                        state[key] = int(value) if key == "step" else value.item()
            for group in saved["param_groups"]:
                for key in ("foreach", "fused", "maximize", "capturable", "differentiable", "decoupled_weight_decay"):
                    group.pop(key, None)
            optimizer.load_state_dict(saved)
        for step in (1, 2):
            twins.step(step)
        assert twins.apart() == ""


# Failures


@pytest.mark.usefixtures(lost_unraisable.__name__)
@pytest.mark.parametrize("edit", ["append", "clear", "zero_", "move"])
def test_an_edit_that_fails_or_is_interrupted_is_taken_by_the_next_step(folder: Path, edit: str) -> None:
    """Wherever that happens."""
    handle = Faulty()
    pair = Pair(folder, handle=handle)
    pair.step(0)
    pair.edit(GROUPS[edit])
    handle.will("write", "refuse", {1})
    with contextlib.nullcontext() if edit == "clear" else pytest.raises(OSError, match="Input/output error"):
        pair.optimizers[1].state_dict()  # nothing is written where all was deleted
    handle.will()
    counted = Interrupt()
    with counted:
        pair.optimizers[1].state_dict()
    assert pair.apart() == ""
    for number in numbers(edit, counted.count, 12):
        pair.step(number)
        pair.edit(GROUPS["clear" if edit == "clear" else "zero_"])
        if edit != "zero_":
            pair.edit(lambda optimizer, *_: optimizer.param_groups.reverse())
        with contextlib.suppress(KeyboardInterrupt), Interrupt(number) as moment:
            pair.optimizers[1].state_dict()
        pair.step(number + 1)
        assert pair.apart() == "", moment.where
    pair.optimizers[1].close()
