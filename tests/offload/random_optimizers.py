"""Random programs of optimizers (``random_programs``): ``NvmeOptimizer`` beside the class of torch that it is given."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from nvme_ops.offload import NvmeOptimizer, swap_params
from tests.offload.random_comparison import Comparison, Outcome, Side
from tests.offload.random_model import Namespace, Statement, through_file, values

SIZES = ((1,), (7,), (300, 3), (90, 100), (200, 201), (70_001,))
OPTIONS: dict[str, dict[str, Sequence[Any]]] = {
    "SGD": {"lr": [0.1], "momentum": [0, 0.9], "dampening": [0, 0.5], "foreach": [None, True], "maximize": [True]},
    "Adam": {"betas": [(0.9, 0.99), (0, 0.9)], "amsgrad": [True], "weight_decay": [0, 0.1], "foreach": [None, True]},
    "AdamW": {"lr": [0.1], "amsgrad": [False, True], "maximize": [False, True], "fused": [None, None, True]},
    "RMSprop": {"momentum": [0, 0.9], "centered": [False, True], "weight_decay": [0, 0.1], "foreach": [None, True]},
    "Adagrad": {"lr": [0.1], "lr_decay": [0, 0.1], "initial_accumulator_value": [0, 0.5], "foreach": [None, True]},
    "Adadelta": {"rho": [0.9, 0.5], "foreach": [None, True]},
    "Adamax": {"lr": [0.1], "weight_decay": [0, 0.1], "foreach": [None, True]},
    "ASGD": {"lr": [0.1], "t0": [1, 1e6], "weight_decay": [0, 0.1], "foreach": [None, True]},
    "NAdam": {"lr": [0.1], "momentum_decay": [0.1], "decoupled_weight_decay": [False, True], "weight_decay": [0.1]},
    "RAdam": {"lr": [0.1], "weight_decay": [0, 0.1], "foreach": [None, True]},
    "Rprop": {"lr": [0.1], "etas": [(0.5, 1.2), (0.3, 1.5)], "foreach": [None, True]},
}  # fmt: skip


class Trained(nn.Module):
    """Some parameters: smaller than a chunk of states, and larger."""

    def __init__(self, seed: int, without: Sequence[str] = ()) -> None:
        super().__init__()
        rng = random.Random(seed)
        low = rng.random() < 0.2 and "low" not in without
        for number in range(rng.randint(2, 6)):
            dtype = rng.choice([torch.bfloat16, torch.float16] if low else [torch.float32] * 5 + [torch.float64])
            made = values(seed + number, *rng.choice(SIZES)).to(dtype)
            turned = rng.random() < 0.15 and made.dim() == 2
            self.register_parameter(f"p{number}", nn.Parameter(made.t() if turned else made))


def loss_of(model: nn.Module, seed: int, names: Sequence[str]) -> torch.Tensor:
    """A loss of some parameters."""
    found = [getattr(model, name) for name in names]
    return torch.stack(
        [(each.float() * values(seed, *each.shape)).mean() + each.float().square().mean() for each in found]
    ).sum()


def states(optimizer: torch.optim.Optimizer) -> list[Any]:
    """All states, with their names, but for those that Adagrad makes before it has a gradient."""
    found = optimizer.state_dict()
    found["state"] = {number: each for number, each in found["state"].items() if each.get("step", 1) != 0}
    states = [part for number, each in sorted(found["state"].items()) for name, value in sorted(each.items())
              for part in (f"{number} {name}", value)]  # fmt: skip
    groups = [{name: value for name, value in group.items() if name != "params"} for group in found["param_groups"]]
    return [*states, repr(groups)]


class OptimizerWriter:
    """Writes a program: training, and what happens to optimizers besides."""

    def __init__(self, seed: int, without: Sequence[str] = ()) -> None:
        self.rng, self.without = random.Random(f"NvmeOptimizer {seed}"), without
        self.names = [name for name, _ in Trained(seed, without).named_parameters()]
        self.program: list[Statement] = []

    def write(self, count: int) -> list[Statement]:
        """Returns a program of about so many statements."""
        rng = self.rng
        self.kind = rng.choice(sorted(OPTIONS))
        options = {name: rng.choice(each) for name, each in OPTIONS[self.kind].items() if rng.random() < 0.7}
        options = {name: value for name, value in options.items() if value is not None}
        self.overlap, self.keep = rng.random() < 0.3 and "overlap" not in self.without, rng.random() < 0.3
        ours: dict[str, Any] = {
            "reuse": self.keep,
            "checksums": rng.random() < 0.3,
            "free_gradients": rng.random() < 0.25,
        }
        ours["overlap"] = "backward" if self.overlap else None
        self.later = self.names[-1:] if len(self.names) > 2 and rng.random() < 0.4 else []
        first = [name for name in self.names if name not in self.later]
        groups = [first] if len(first) < 2 or rng.random() < 0.6 else [first[:1], first[1:]]
        given = ", ".join(f"{{'params': [{', '.join(f'm.{name}' for name in each)}]}}" for each in groups)
        words = ", ".join(f"{name}={value!r}" for name, value in {**options, **ours}.items())
        self.used = first
        self.program.append(Statement(f"o = make({self.kind!r}, [{given}], {words})", "many"))
        while len(self.program) < count:
            rows = self._rows("\n".join(each.code for each in self.program))
            code = rng.choices(list(rows), list(rows.values()))[0]
            if "add_param_group" in code:
                self.used, self.later = self.used + self.later, []
            self.program.append(Statement(code, "read" if code.startswith("see") else "many"))
        self.program.append(Statement("see(*m.parameters())\nsee(*states(o))"))
        return self.program

    def _rows(self, before: str) -> dict[str, float]:
        """Returns what may come next, and how likely it does."""
        rng = self.rng
        group, name, apart = f"o.param_groups[{rng.choice([0, -1])}]", rng.choice(self.used), float(not self.overlap)
        more = f"o.add_param_group({{'params': [{', '.join(f'm.{each}' for each in self.later)}], 'lr': 0.05}})"
        return {
            self._trained(): 7,
            self._trained_by_closure(): apart,
            "see(*m.parameters())": 1,
            "see(*states(o))": 1,
            "see(*[p.grad for p in m.parameters()])": 1,
            f"{group}['lr'] = {rng.choice([0.01, 0.2])}": 0.7,
            f"{group}['weight_decay'] = {rng.choice([0.01, 0.2])}": 0.5,
            # for which there may be no room
            f"{group}['nesterov'] = False\n{group}['momentum'] = 0.5": 0.4 * (self.kind in ("SGD", "RMSprop")),
            more: 0.7 * bool(self.later),
            "sd = through_file(o.state_dict())": 1,
            "o.load_state_dict(copy.deepcopy(sd))": 1.5 * ("sd = " in before),
            "save(o)": 0.6,
            "load(o)": 0.6 * ("save(o)" in before),
            "o = again(o)": float(self.keep),
            f"m.{rng.choice(self.names)}.data.mul_(0.9)": 0.5,
            f"m.{name}.grad = None": 0.3 * apart,
            f"m.{name}.grad = torch.ones_like(m.{name})": 0.4 * apart,
            "s = torch.optim.lr_scheduler.StepLR(o, 1, 0.9)": 0.5 * ("lr_scheduler" not in before),
            "s.step()": 0.5 * ("lr_scheduler" in before),
        }

    def _trained(self) -> str:
        rng, seed = self.rng, self.rng.randrange(1000)
        chosen = self.used if rng.random() < 0.6 else rng.sample(self.used, rng.randint(1, len(self.used)))
        lines = [rng.choice(["o.zero_grad()", "o.zero_grad()", "o.zero_grad(set_to_none=False)"])]
        if rng.random() < 0.25:
            lines.append(f"with accumulate(o): loss(m, {seed + 1}, {rng.sample(self.used, 1)}).backward()")
        lines.append(f"loss(m, {seed}, {chosen}).backward()")
        if not self.overlap and rng.random() < 0.2:
            lines.append("nn.utils.clip_grad_norm_(m.parameters(), 0.1)")
        return "\n".join([*lines, "o.step()"])

    def _trained_by_closure(self) -> str:
        inner = (
            f"o.zero_grad()\n    l = loss(m, {self.rng.randrange(1000)}, {self.used})\n    l.backward()\n    return l"
        )
        return f"def closure():\n    {inner}\nsee(o.step(closure).detach())"


class _Plain:
    """What programs call, of torch."""

    def __init__(self) -> None:
        self.files: Any = None

    def make(self, kind: str, groups: list[Any], **options: Any) -> torch.optim.Optimizer:
        ours = {name: options.pop(name) for name in ("reuse", "checksums", "overlap", "free_gradients")}
        made: torch.optim.Optimizer = getattr(torch.optim, kind)(groups, **options)
        self.made, self.free = (kind, options, ours), ours["free_gradients"]
        if self.free:
            made.register_step_post_hook(_free)
        return made

    def again(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        kind, options, ours = self.made
        made = self.make(kind, [dict(each) for each in optimizer.param_groups], **options, **ours)
        made.state = optimizer.state
        return made

    def accumulate(self, _: Any) -> Any:
        return contextlib.nullcontext()

    def save(self, optimizer: torch.optim.Optimizer) -> None:
        self.files = through_file(optimizer.state_dict()["state"])

    def load(self, optimizer: torch.optim.Optimizer) -> None:
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": copy.deepcopy(self.files), "param_groups": groups})
        for saved, group in zip(groups, optimizer.param_groups, strict=True):
            for number, each in zip(saved["params"], group["params"], strict=True):
                if number in self.files:  # as they were: load_state_dict converts all but the step
                    optimizer.state[each] = copy.deepcopy(self.files[number])


def _free(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for each in group["params"]:
            each.grad = None


class _Ours:
    """What programs call, of ``NvmeOptimizer``."""

    def __init__(self, folder: str, seed: int) -> None:
        self._folder, self._name, self._opened = folder, f"program {seed}", list[NvmeOptimizer]()
        self._file = f"{folder}/states of {seed}"

    def make(self, kind: str, groups: list[Any], **options: Any) -> NvmeOptimizer:
        self._made = kind, options
        made = NvmeOptimizer(
            groups, getattr(torch.optim, kind), self._folder, memory_budget="1M", master_weights=False,
            name=self._name, **options,
        )  # fmt: skip
        self._opened.append(made)
        return made

    def again(self, optimizer: NvmeOptimizer) -> NvmeOptimizer:
        optimizer.close()
        kind, options = self._made
        return self.make(kind, [dict(each) for each in optimizer.param_groups], **options)

    def accumulate(self, optimizer: NvmeOptimizer) -> Any:
        return optimizer.accumulate()

    def save(self, optimizer: NvmeOptimizer) -> None:
        optimizer.save_states(self._file, durable=False)

    def load(self, optimizer: NvmeOptimizer) -> None:
        optimizer.load_states(self._file)

    def close(self) -> None:
        for each in self._opened:
            each.close()


def _names(of: _Ours | _Plain) -> Namespace:
    names = ("make", "again", "accumulate", "save", "load")
    return {"states": states, "loss": loss_of, **{name: getattr(of, name) for name in names}}


def run_program(seed: int, program: Sequence[Statement], folder: str, without: Sequence[str] = ()) -> Outcome:
    """Runs a program with ``NvmeOptimizer`` and with torch's optimizers."""
    ours, plain = Trained(seed, without), Trained(seed, without)
    one, other = _Ours(folder, seed), _Plain()
    sides = Side(ours, None), Side(plain, None)
    sides[0].names.update(_names(one))
    sides[1].names.update(_names(other))
    compared = Comparison(*sides)
    with _maybe_swapped(ours, seed, folder, without), contextlib.closing(one):
        compared.run(program)
        sides[0].forget_all()
    return compared.outcome


@contextlib.contextmanager
def _maybe_swapped(model: nn.Module, seed: int, folder: str, without: Sequence[str]) -> Iterator[None]:
    if random.Random(seed).random() < 0.2 and "swapped" not in without:
        with swap_params(model, folder, memory_budget="2M", min_bytes=1):
            yield
    else:
        yield
