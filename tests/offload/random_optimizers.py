"""Random programs with an NvmeOptimizer and with the class of torch that it is given: the same bits all the time.

    python -m tests.offload.random_optimizers 20000

Between steps a program edits parameters, their layouts, groups, states and gradients, saves, loads and resumes.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import random
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch

from nvme_ops.offload import NvmeOptimizer, swap_params
from nvme_ops.offload.optimizer import nvme_optimizer
from nvme_ops.offload.optimizer import states as optimizer_states
from nvme_ops.offload.optimizer.chunks import HALF
from nvme_ops.offload.optimizer.state_dtypes import MASTER
from tests.offload.elsewhere import apart, values
from tests.offload.elsewhere import same as differ
from tests.offload.random_model import through_file
from tests.offload.training import states

Params = list[torch.nn.Parameter]

LARGE = ((65536,), (256,), (64, 10, 8, 8))  # three chunks or more of a budget of 1 MiB
SMALL = ((16, 8, 4, 4), (256,), (32, 16), (8, 16, 2, 4))  # of one of 64 KiB
SMALL_BUDGET = 1 << 16
SMALL_BUFFER = SMALL_BUDGET // 4


def made(dtype: torch.dtype, shapes: tuple[tuple[int, ...], ...] = LARGE, seed: int = 5) -> Params:
    """Parameters.

    Their sizes are multiples of 128: where torch's loops end in the middle of a vector, or are divided among threads
    there, its own bits in low precision are not those of the same elements elsewhere.
    """
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def parameters(optimizer: torch.optim.Optimizer) -> Params:
    return [param for group in optimizer.param_groups for param in group["params"]]


def same(ours: torch.optim.Optimizer, plain: torch.optim.Optimizer) -> str:
    """What differs of parameters, states and options, if anything does."""
    params = [[param.detach() for param in parameters(one)] for one in (ours, plain)]
    every = plain.state  # torch makes no state dict of parameters that are in no group any more
    plain.state = collections.defaultdict(dict, {param: every[param] for param in parameters(plain) if param in every})
    try:
        return differ([params[0], states(ours)], [params[1], states(plain)])
    finally:
        plain.state = every


def with_masters(kind: Any) -> Any:
    """An optimizer of torch that updates a copy in float32 of each bfloat16 and float16 parameter, one of its states.

    ``master_weights=True`` is compared with it. What the program has changed in a parameter is changed in the copy.
    """

    class WithMasters(kind):
        def __init__(self, params: Any, **options: Any) -> None:
            super().__init__(params, **options)
            for param, state in self.state.items():  # of Adagrad
                state.update({name: value.float() for name, value in state.items() if param.dtype in HALF})

        def load_state_dict(self, state_dict: Any) -> None:
            super().load_state_dict(state_dict)
            numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
            for param, number in zip(self._params(), numbers, strict=True):  # torch casts them to its dtype
                if param.dtype in HALF and number in state_dict["state"]:
                    self.state[param] = copy.deepcopy(state_dict["state"][number])

        def _params(self) -> list[torch.Tensor]:
            return [param for group in self.param_groups for param in group["params"]]

        def step(self, closure: Any = None) -> Any:
            with torch.enable_grad():
                loss = None if closure is None else closure()
            halves = [(param, param.data, param.grad) for param in self._params() if param.dtype in HALF]
            before = [(param, now, gradient) for param, now, gradient in halves if gradient is not None]
            for param, now, gradient in before:
                master = self.state[param].pop(MASTER, None)
                master = now.float() if master is None else master
                master.copy_(torch.where(now == master.to(now.dtype), master, now.float()))
                param.grad = None
                param.data = master
                param.grad = gradient.float()
            super().step()
            for param, now, gradient in before:
                states = self.state[param]
                first = {name: value for name, value in states.items() if not torch.is_tensor(value) or not value.dim()}
                self.state[param] = {**first, MASTER: param.data, **states}
                param.grad = None
                param.data = now.copy_(param.data)
                param.grad = gradient
            return loss

    return WithMasters


OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}), ("Adam", {"amsgrad": True, "weight_decay": 0.1}),
    ("AdamW", {"lr": 0.1, "fused": True}), ("RMSprop", {"momentum": 0.9, "centered": True}), ("Adadelta", {}),
    ("Adagrad", {"lr_decay": 0.1, "initial_accumulator_value": 0.5}), ("Adamax", {"foreach": True}),
    ("ASGD", {"t0": 1.0}), ("NAdam", {"decoupled_weight_decay": True}), ("RAdam", {}), ("Rprop", {"etas": (0.3, 1.5)}),
]  # fmt: skip
DTYPES = torch.float32, torch.bfloat16, torch.float32, torch.float64, torch.float16


def turned(tensor: torch.Tensor, order: list[int]) -> torch.Tensor:
    """The same values with their dimensions in another order in memory."""
    back = sorted(range(len(order)), key=order.__getitem__)
    return tensor.detach().permute(order).clone(memory_format=torch.contiguous_format).permute(back)


class Program:
    """What a program does with one of the two optimizers; the same for the same numbers."""

    def __init__(self, seed: int, folder: Path | None, small: bool = False) -> None:
        self.rng, self.folder, self.ends = random.Random(seed), folder, contextlib.ExitStack()
        shapes, dtype = SMALL if small else LARGE, DTYPES[seed % len(DTYPES)]
        self.params = made(dtype, shapes)
        self.more = made(torch.float32, shapes[2:3], 6) + made(dtype, shapes[:2], 7)
        if self.rng.random() < 0.4 and self.folder is not None:
            module = torch.nn.ParameterList(self.params)
            self.ends.enter_context(swap_params(module, self.folder, memory_budget="1M", min_bytes=1))
            self.params = list(module)
        name, self.options = OPTIMIZERS[seed % len(OPTIMIZERS)]
        self.kind: Any = getattr(torch.optim, name)
        budgets = (SMALL_BUDGET, 11 * SMALL_BUFFER, "1M") if small else ("1M",)  # hold none, some and all states
        self.ours: dict[str, Any] = {"host_budget": budgets[seed // 3 % len(budgets)], "reuse": seed // 2 % 2 > 0}
        self.ours["master_weights"] = self.rng.random() < 0.4
        self.ours |= {"checksums": self.rng.random() < 0.3, "free_gradients": self.rng.random() < 0.25}
        self.overlap = self.rng.random() < 0.3
        self.saved: Any = None
        self.held: list[torch.Tensor] = []
        self.optimizer = self.make([{"params": self.params[:1]}, {"params": self.params[1:], "weight_decay": 0.0}])

    def make(self, groups: Any) -> Any:
        if self.folder is None:
            kind = with_masters(self.kind) if self.ours["master_weights"] else self.kind
            plain = kind(groups, **self.options)
            if self.ours["free_gradients"]:
                plain.register_step_post_hook(lambda optimizer, *_: optimizer.zero_grad())
            return plain
        overlap: Any = "backward" if self.overlap else None
        return NvmeOptimizer(groups, self.kind, self.folder, overlap=overlap, **self.ours, **self.options)

    def inside(self) -> Params:
        """The parameters in groups."""
        return parameters(self.optimizer)

    # Steps

    def train(self) -> Any:
        used, seed = self.rng.sample(self.inside(), self.rng.randint(1, len(self.inside()))), self.rng.random()
        used = [param for param in used if param.requires_grad]

        def backward(seed: float, used: Params) -> torch.Tensor:
            loss = torch.stack([(param.float() * seed).sin().mean() + param.float().square().mean() for param in used])
            loss.sum().backward()
            return loss.sum()

        self.optimizer.zero_grad(set_to_none=self.rng.random() < 0.7)
        closure, twice = self.rng.random() < 0.2 and not self.overlap, self.rng.random() < 0.25
        if not used:
            return None
        if closure:
            return self.optimizer.step(lambda: backward(seed, used))
        if twice:
            with contextlib.nullcontext() if self.folder is None else self.optimizer.accumulate():
                backward(seed + 1, used[:1])
        backward(seed, used)
        return self.optimizer.step()

    def resume(self) -> None:
        self.forget_others()
        if not self.ours["reuse"]:
            return
        if self.folder is not None:
            self.optimizer.close()
            self.optimizer = self.make([dict(group) for group in self.optimizer.param_groups])
        else:
            for param, state in self.optimizer.state.items():  # others than those that are held
                self.optimizer.state[param] = copy.deepcopy(state)

    # Options, gradients and parameters

    def change_options(self) -> None:
        self.optimizer.param_groups[self.rng.choice([0, -1])]["lr"] = self.rng.choice([0.01, 0.2])
        self.optimizer.param_groups[0]["weight_decay"] = 0.1

    def schedule(self) -> None:
        torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.9).step()

    def change_a_parameter(self) -> None:
        self.rng.choice(self.inside()).data.mul_(0.9)

    def freeze_a_parameter(self) -> None:
        chosen = self.rng.choice(self.inside())
        chosen.requires_grad_(not chosen.requires_grad)

    def change_a_gradient(self) -> None:
        chosen, order = self.rng.choice(self.inside()), self.rng.random()
        if not self.overlap:
            gradient = torch.ones_like(chosen)
            if chosen.dim() > 1 and order < 0.5 and self.folder is not None:
                gradient = turned(gradient, list(range(chosen.dim()))[::-1])
            chosen.grad = self.rng.choice([None, gradient])
            self.optimizer.step()

    def change_a_layout(self) -> None:
        """Those of torch's states and gradients become the same: its loops over two layouts round otherwise."""
        chosen = self.rng.choice(self.inside())
        order = self.rng.sample(range(chosen.dim()), chosen.dim())
        if self.rng.random() < 0.5 and chosen.dim() == 4:
            order = [0, 2, 3, 1]  # channels_last
        chosen.grad = None
        chosen.data = turned(values(chosen), order)
        if self.folder is None:
            for name, value in self.optimizer.state.get(chosen, {}).items():
                if torch.is_tensor(value) and value.shape == chosen.shape:
                    self.optimizer.state[chosen][name] = turned(value, order)
        self.held.clear()

    # Groups

    def add_a_group(self) -> None:
        if self.more:
            self.optimizer.add_param_group({"params": [self.more.pop()], "lr": 0.05})

    def group(self) -> Params:
        params: Params = self.rng.choice(self.optimizer.param_groups)["params"]
        return params

    def append_a_parameter(self) -> None:
        chosen, place = self.group(), self.rng.random()
        if self.more and self.kind is not torch.optim.Adagrad:
            chosen.insert(int(place * (len(chosen) + 1)), self.more.pop(0))

    def remove_a_parameter(self) -> None:
        """What has states keeps them, for the time when it is added again."""
        chosen, other = self.group(), self.group()
        place, moves = self.rng.random(), self.rng.random() < 0.5
        if chosen and len(self.inside()) > 2:
            removed = chosen.pop(int(place * len(chosen)))
            removed.grad = None
            (other if moves else self.more).append(removed)

    def replace_a_parameter(self) -> None:
        """And perhaps gives the new one the old one's states."""
        chosen, heirs = self.group(), self.rng.random() < 0.5
        if not chosen or self.kind is torch.optim.Adagrad:
            return
        old = chosen[0]
        chosen[0] = torch.nn.Parameter(values(old) * 0.5)
        state = self.optimizer.state.pop(old, None)
        if heirs and state is not None:
            self.optimizer.state[chosen[0]] = state

    def forget_others(self) -> None:
        """Deletes states of parameters in no group."""
        for param in [param for param in self.optimizer.state if not any(param is one for one in self.inside())]:
            del self.optimizer.state[param]

    # States

    def entry(self) -> tuple[torch.nn.Parameter, str | None]:
        """A parameter and the name of one of its states, if it has any with its shape."""
        chosen, number = self.rng.choice(self.inside()), self.rng.random()
        state = {} if self.kind is torch.optim.Adagrad else self.optimizer.state.get(chosen, {})
        names = [name for name in sorted(state) if torch.is_tensor(state[name]) and state[name].shape == chosen.shape]
        return chosen, names[int(number * len(names))] if names else None

    def look_at_states(self) -> list[Any]:
        if self.kind is torch.optim.Adagrad:  # torch makes its states in the constructor
            return []
        return [copy.deepcopy(dict(self.optimizer.state.get(param, {}))) for param in self.inside()]

    def change_a_state(self) -> None:
        (chosen, name), how = self.entry(), self.rng.randrange(6)
        if name is None:
            return
        state = self.optimizer.state[chosen]
        if how == 0:
            state[name].mul_(0.5)
        elif how == 1:
            state[name].data.mul_(0.25)
        elif how == 2:
            state[name] = torch.full_like(state[name], 0.125)
        elif how == 3:
            self.optimizer.state[chosen] = {key: copy.deepcopy(value) for key, value in state.items()}
        elif how == 4:
            for key, value in state.items():
                if torch.is_tensor(value):
                    state[key] = value.to("cpu", copy=True)
        elif torch.is_tensor(state.get("step")):
            state["step"] += 3

    def hold_a_state(self) -> None:
        chosen, name = self.entry()
        if name is not None:
            self.held.append(self.optimizer.state[chosen][name])

    def look_at_what_is_held(self) -> list[torch.Tensor]:
        copies = [value.clone() for value in self.held]
        for value in self.held[:1]:
            value.mul_(0.75)
        if self.rng.random() < 0.5:
            self.held.clear()
        return copies

    def delete_states(self) -> None:
        chosen, all_of_them = self.rng.choice(self.inside()), self.rng.random() < 0.3
        if self.kind is torch.optim.Adagrad:
            return
        if all_of_them:
            self.optimizer.state.clear()
        else:
            self.optimizer.state.pop(chosen, None)

    # Saved ones

    def load(self) -> None:
        self.forget_others()
        self.optimizer.load_state_dict(through_file(self.optimizer.state_dict()))
        self.held.clear()

    def save_states(self) -> None:
        kept = [[id(param) for param in group["params"]] for group in self.optimizer.param_groups]
        if self.folder is None:
            self.saved = {param: copy.deepcopy(self.optimizer.state.get(param, {})) for param in self.inside()}, kept
        else:
            self.optimizer.save_states(self.folder.parent / "saved", durable=False)
            self.saved = None, kept

    def load_states(self) -> None:
        kept = [[id(param) for param in group["params"]] for group in self.optimizer.param_groups]
        if self.saved is not None and self.saved[1] == kept:
            self.held.clear()
            if self.folder is None:
                for param, saved in self.saved[0].items():
                    state = copy.deepcopy(saved)
                    for name, value in state.items():
                        if torch.is_tensor(value) and value.shape == param.shape:
                            state[name] = torch.empty_like(param, dtype=value.dtype).copy_(value)
                    self.optimizer.state[param] = state
            else:
                self.optimizer.load_states(self.folder.parent / "saved")


ACTIONS = [
    *[Program.train] * 9, Program.change_options, Program.add_a_group, Program.change_a_parameter, Program.schedule,
    Program.change_a_gradient, Program.load, Program.save_states, Program.load_states, Program.resume,
    Program.freeze_a_parameter, *[Program.change_a_layout] * 2, Program.append_a_parameter, Program.remove_a_parameter,
    Program.replace_a_parameter, Program.look_at_states, *[Program.change_a_state] * 2, Program.hold_a_state,
    Program.look_at_what_is_held, Program.delete_states,
]  # fmt: skip


def run(seed: int, folder: Path, small: bool, count: int = 20) -> str:
    """Runs a program with both; returns what differs."""
    (folder / "states").mkdir()
    ours, plain, rng = Program(seed, folder / "states", small), Program(seed, None, small), random.Random(seed)
    done: list[str] = []
    with ours.ends:
        for _ in range(count):
            action = rng.choice(ACTIONS)
            done.append(action.__name__)
            result, wanted = action(ours), action(plain)
            if differ(result, wanted) or same(ours.optimizer, plain.optimizer):
                where = f"seed {seed}: {ours.kind.__name__} {ours.params[0].dtype} {ours.ours}: {' '.join(done)}: "
                return where + (differ(result, wanted) or same(ours.optimizer, plain.optimizer))
        ours.optimizer.close()
    return ""


def run_many(seeds: range) -> list[str]:
    """Runs small programs in children; returns what differs."""
    nvme_optimizer.MIN_BUDGET, optimizer_states._BUFFER = SMALL_BUDGET, SMALL_BUFFER
    torch.set_num_threads(1)

    def work(seed: str) -> list[str]:
        with tempfile.TemporaryDirectory() as folder:
            try:
                return [run(int(seed), Path(folder), small=True)]
            except Exception:
                return [f"seed {seed}: " + traceback.format_exc()[-1500:]]

    return [line for (line,) in apart([str(seed) for seed in seeds], work, 60).values() if line]


if __name__ == "__main__":
    print(*run_many(range(*map(int, sys.argv[1:]))), sep="\n")
