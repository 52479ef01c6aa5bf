"""Random programs with an NvmeOptimizer and with the class of torch that it is given: the same bits all the time."""

from __future__ import annotations

import contextlib
import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from nvme_ops.offload import NvmeOptimizer, swap_params
from tests.offload.elsewhere import same as differ
from tests.offload.random_model import through_file
from tests.offload.training import states

Params = list[torch.nn.Parameter]


def made(dtype: torch.dtype) -> Params:
    """Three chunks or more of a budget of 1 MiB.

    Their sizes are multiples of 128: where torch's loops end in the middle of a vector, or are divided among threads
    there, its own bits in low precision are not those of the same elements elsewhere.
    """
    generator = torch.Generator().manual_seed(5)
    return [torch.nn.Parameter(torch.randn(size, generator=generator).to(dtype)) for size in (65536, 256, 40960)]


def same(ours: torch.optim.Optimizer, plain: torch.optim.Optimizer) -> bool:
    """Whether both have the same parameters, states and options."""
    params = [[each for group in one.param_groups for each in group["params"]] for one in (ours, plain)]
    return differ([params[0], states(ours)], [params[1], states(plain)]) == ""


OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}), ("Adam", {"amsgrad": True, "weight_decay": 0.1}),
    ("AdamW", {"lr": 0.1, "fused": True}), ("RMSprop", {"momentum": 0.9, "centered": True}), ("Adadelta", {}),
    ("Adagrad", {"lr_decay": 0.1, "initial_accumulator_value": 0.5}), ("Adamax", {"foreach": True}),
    ("ASGD", {"t0": 1.0}), ("NAdam", {"decoupled_weight_decay": True}), ("RAdam", {}), ("Rprop", {"etas": (0.3, 1.5)}),
]  # fmt: skip


DTYPES = torch.float32, torch.bfloat16, torch.float32, torch.float64, torch.float16


class Program:
    """What a program does with one of the two optimizers; the same for the same numbers."""

    def __init__(self, seed: int, folder: Path | None) -> None:
        self.rng, self.folder, self.ends = random.Random(seed), folder, contextlib.ExitStack()
        self.params, self.more = made(DTYPES[seed % len(DTYPES)]), made(torch.float32)[2:]
        if self.rng.random() < 0.4 and self.folder is not None:
            module = torch.nn.ParameterList(self.params)
            self.ends.enter_context(swap_params(module, self.folder, memory_budget="1M", min_bytes=1))
            self.params = list(module)
        name, self.options = OPTIMIZERS[seed % len(OPTIMIZERS)]
        self.kind: Any = getattr(torch.optim, name)
        self.ours: dict[str, Any] = {"memory_budget": "1M", "reuse": True, "master_weights": False}
        self.ours |= {"checksums": self.rng.random() < 0.3, "free_gradients": self.rng.random() < 0.25}
        self.overlap = self.rng.random() < 0.3
        self.saved: Any = None
        self.optimizer = self.make([{"params": self.params[:1]}, {"params": self.params[1:], "weight_decay": 0.0}])

    def make(self, groups: Any) -> Any:
        if self.folder is None:
            plain = self.kind(groups, **self.options)
            if self.ours["free_gradients"]:
                plain.register_step_post_hook(lambda optimizer, *_: optimizer.zero_grad())
            return plain
        overlap: Any = "backward" if self.overlap else None
        return NvmeOptimizer(groups, self.kind, self.folder, overlap=overlap, **self.ours, **self.options)

    def train(self) -> Any:
        used, seed = self.rng.sample(self.params, self.rng.randint(1, len(self.params))), self.rng.random()

        def backward(seed: float, used: Params) -> torch.Tensor:
            loss = torch.stack([(each.float() * seed).sin().mean() + each.float().square().mean() for each in used])
            loss.sum().backward()
            return loss.sum()

        self.optimizer.zero_grad(set_to_none=self.rng.random() < 0.7)
        if self.rng.random() < 0.2 and not self.overlap:
            return self.optimizer.step(lambda: backward(seed, used))
        if self.rng.random() < 0.25:
            with contextlib.nullcontext() if self.folder is None else self.optimizer.accumulate():
                backward(seed + 1, used[:1])
        backward(seed, used)
        return self.optimizer.step()

    def change_options(self) -> None:
        self.optimizer.param_groups[self.rng.choice([0, -1])]["lr"] = self.rng.choice([0.01, 0.2])
        self.optimizer.param_groups[0]["weight_decay"] = 0.1

    def add_a_group(self) -> None:
        if self.more:
            self.optimizer.add_param_group({"params": self.more, "lr": 0.05})
            self.params, self.more = self.params + self.more, []

    def change_a_parameter(self) -> None:
        self.rng.choice(self.params).data.mul_(0.9)

    def change_a_gradient(self) -> None:
        chosen = self.rng.choice(self.params)
        if not self.overlap:
            chosen.grad = self.rng.choice([None, torch.ones_like(chosen)])
            self.optimizer.step()

    def schedule(self) -> None:
        torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.9).step()

    def load(self) -> None:
        self.optimizer.load_state_dict(through_file(self.optimizer.state_dict()))

    def save_states(self) -> None:
        if self.folder is None:
            self.saved = {key: copy.deepcopy(value) for key, value in self.optimizer.state.items()}, len(self.params)
        else:
            self.optimizer.save_states(self.folder.parent / "saved", durable=False)
            self.saved = None, len(self.params)

    def load_states(self) -> None:
        if self.saved is not None and self.saved[1] == len(self.params):
            if self.folder is None:
                self.optimizer.state.clear()
                self.optimizer.state.update({key: copy.deepcopy(value) for key, value in self.saved[0].items()})
            else:
                self.optimizer.load_states(self.folder.parent / "saved")

    def resume(self) -> None:
        if self.folder is not None:
            self.optimizer.close()
            self.optimizer = self.make([dict(each) for each in self.optimizer.param_groups])


ACTIONS = [
    *[Program.train] * 5, Program.change_options, Program.add_a_group, Program.change_a_parameter, Program.schedule,
    Program.change_a_gradient, Program.load, Program.save_states, Program.load_states, Program.resume,
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("seed", range(len(OPTIMIZERS)))
def test_whatever_a_program_does_it_has_the_bits_of_torch(folder: Path, seed: int) -> None:
    (folder / "states").mkdir()
    ours, plain, rng = Program(seed, folder / "states"), Program(seed, None), random.Random(seed)
    for number in range(20):
        action = rng.choice(ACTIONS)
        found, wanted = action(ours), action(plain)
        assert differ(found, wanted) == "", f"{number}: {action.__name__}"
        assert same(ours.optimizer, plain.optimizer), f"{number}: {action.__name__}"
    ours.optimizer.close()
    ours.ends.close()


def test_a_gradient_that_comes_later_than_the_others_during_the_backward_pass(folder: Path) -> None:
    """While one has no momentum buffer, torch's foreach rounds the others' otherwise."""
    mine, other = made(torch.bfloat16), made(torch.bfloat16)
    options: dict[str, Any] = {"lr": 0.01, "momentum": 0.9, "foreach": True}
    plain = torch.optim.SGD(other, **options)
    ours: dict[str, Any] = {"memory_budget": "1M", "master_weights": False, "overlap": "backward"}
    with NvmeOptimizer(mine, torch.optim.SGD, folder, **ours, **options) as optimizer:
        for step in range(4):
            for params, each in ((mine, optimizer), (other, plain)):
                generator = torch.Generator().manual_seed(step)
                for parameter in params:
                    parameter.grad = None
                used = params if step > 1 else params[:2]
                weights = [torch.randn(one.shape, generator=generator).to(one.dtype) for one in used]
                torch.autograd.backward(used, weights)
                each.step()
            assert same(optimizer, plain), step
