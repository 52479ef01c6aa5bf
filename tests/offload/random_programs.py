"""Random programs over tensors on storage, each run on plain torch as well: the same bits, or a refusal.

    python -m tests.offload.random_programs swap_params --programs 20000 --seed 0 --processes 2

A program is a list of statements of Python over one small model. It is written from a seed, on plain torch alone, so
that a seed is the same program whatever is tested. Each statement runs with the capability first. What that refuses, in
a sentence of its own, plain torch skips; what it raises otherwise, plain torch has to raise too; what both compute is
compared bit for bit. A statement with a ``line`` is interrupted (Ctrl-C) at that line of nvme_ops: a write has then
happened as a whole, or not at all. A program that fails is printed without the statements that it fails without.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import faulthandler
import functools
import gc
import io
import json
import linecache
import math
import os
import pickle
import random
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from nvme_ops._native import native
from nvme_ops.offload import residents, save_on_nvme, stream_weights, streamed, swap_params, window

PAGE = 4096
CAPABILITIES = ("swap_params", "stream_weights", "save_on_nvme", "NvmeOptimizer")
REFUSALS = (RuntimeError, ValueError, TypeError, NotImplementedError, MemoryError)
PRODUCT = str(Path(residents.__file__).parents[1]) + os.sep
INTERRUPTED = (f"{PRODUCT}offload", f"{PRODUCT}storage{os.sep}")
LOW = (torch.bfloat16, torch.float16)

LONGEST = 20  # seconds that a program may take

Namespace = dict[str, Any]


@dataclass
class Statement:
    """A part of a program.

    ``kind`` says what an exception leaves behind: ``read``: nothing. ``write``: nothing either, and an interrupt all or
    nothing. ``backward``: parts of gradients. ``many``: what nobody knows; the program ends.
    """

    code: str
    kind: str = "read"
    line: int = 0


# What programs are made of: names that their statements use


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def values(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The same values for the same seed."""
    if dtype.is_floating_point or dtype.is_complex:
        made = torch.randn(shape, generator=_generator(seed), dtype=torch.cfloat if dtype.is_complex else torch.float)
        return made.to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 100, shape, generator=_generator(seed)).to(dtype)


def indices(seed: int, bound: int, *shape: int) -> torch.Tensor:
    """Numbers below a bound."""
    return torch.randint(0, bound, shape, generator=_generator(seed))


def scalar(*tensors: torch.Tensor | None) -> torch.Tensor:
    """Returns what can be called a loss."""
    found = [each for each in tensors if each is not None]
    sums = [(each.abs() if each.is_complex() else each).float().square().mean() for each in found if each.numel()]
    return torch.stack(sums).sum() if sums else torch.zeros(())


def in_threads(work: Callable[[int], Any], count: int) -> list[Any]:
    """Calls in several threads at once; results in the order of numbers."""
    with ThreadPoolExecutor(count) as pool:
        return [each.result() for each in [pool.submit(work, number) for number in range(count)]]


class HookError(Exception):
    """What hooks of programs raise."""


def failing(*_: Any) -> Any:
    """A hook that fails."""
    raise HookError("a hook")


def through_file(value: Any) -> Any:
    """Saves and loads."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    found = torch.load(file, weights_only=True)
    return found.contiguous() if isinstance(found, torch.Tensor) else found  # what has gaps may come without them


class Model(nn.Module):
    """A dozen of parameters of all kinds, some tied, some frozen."""

    def __init__(self, seed: int, without: Sequence[str] = ()) -> None:
        super().__init__()
        rng = random.Random(seed)
        torch.default_generator.manual_seed(seed)
        self.rows = rng.choice([33, 64, 120])
        self.emb = nn.Embedding(self.rows, 32)
        self.up, self.down = nn.Linear(32, 48), nn.Linear(48, 32, bias=rng.random() < 0.5)
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, self.rows, bias=False)
        if rng.random() < 0.6:
            self.head.weight = self.emb.weight
        if rng.random() < 0.3:
            self.to(rng.choice([torch.bfloat16, torch.float64]))
        others: dict[str, Callable[[], torch.Tensor]] = {
            "half": lambda: values(seed, 24, 40).bfloat16(),
            "double": lambda: values(seed, 20, 24).double(),
            "complex": lambda: values(seed, 12, 20, dtype=torch.complex64),
            "cube": lambda: values(seed, 4, 12, 16),
            "turned": lambda: values(seed, 24, 50).t(),
            "vector": lambda: values(seed, 1500),
            "one": lambda: values(seed),
            "kernel": lambda: values(seed, 8, 4, 3, 3),
        }
        for name in rng.sample(sorted(others.keys() - set(without)), 3):
            self.register_parameter("w_" + name, nn.Parameter(others[name](), rng.random() < 0.85))
        self.register_buffer("buffer", values(seed, 16, 32))
        for each in self.parameters():
            if rng.random() < 0.08:
                each.requires_grad_(False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.emb(words)
        x = x + self.down(functional.gelu(self.up(x)))
        return torch.as_tensor(self.head(self.norm(x)))


def namespace(model: nn.Module, see: Callable[..., None], saving: Any) -> Namespace:
    """Returns the names that statements know."""
    return {
        "torch": torch, "F": functional, "nn": nn, "copy": copy, "pickle": pickle, "checkpoint": checkpoint, "m": model,
        "T": values, "I": indices, "S": scalar, "G": _generator, "see": see, "saving": saving,
        "in_threads": in_threads, "failing": failing, "through_file": through_file,
        "amp": functools.partial(torch.autocast, "cpu", torch.bfloat16),
    }  # fmt: skip


# Programs are written


class Writer:
    """Writes a program from a seed; runs it on plain torch meanwhile, to know what its names stand for."""

    def __init__(self, capability: str, seed: int, without: Sequence[str] = ()) -> None:
        self.rng, self.capability, self.without = random.Random(f"{capability} {seed}"), capability, without
        model = model_of(capability, seed, without)
        self.names = namespace(model, lambda *_: None, contextlib.nullcontext())
        self.program: list[Statement] = []
        self.number = 0

    def write(self, count: int) -> list[Statement]:
        """Returns a program of about so many statements."""
        found = {make: each for make, each in self._makers().items() if make.__name__ not in self.without}
        makers, weights = zip(*found.items(), strict=True)
        while len(self.program) < count:
            made = self.rng.choices(makers, weights)[0]()
            if made is not None:
                self._add(*((made,) if isinstance(made, str) else made))
            if len(self._variables()) > 9 and self.rng.random() < 0.7:
                self._add(f"del {self.rng.choice([name for name, _ in self._variables()])}")
        return self.program

    def _add(self, code: str, kind: str = "read") -> None:
        line = 0
        if kind in ("read", "write", "backward") and self.rng.random() < 0.08 and "interrupts" not in self.without:
            line = int(math.exp(self.rng.uniform(0, 5)))
        self.program.append(Statement(code, kind, line))
        torch.default_generator.manual_seed(len(self.program))
        with contextlib.suppress(Exception):
            exec(code, self.names)

    def _makers(self) -> dict[Callable[[], Any], float]:
        return {
            self.view: 3, self.value: 3, self.convert: 4, self.change: 6, self.foreach: 1.5, self.out: 1,
            self.loss: 4, self.backward: 3, self.gradient: 1.5, self.twice: 1, self.zero: 0.7, self.look: 4,
            self.hook: 1, self.again: 0.7, self.train: 1.5, self.states: 1, self.data: 1, self.init: 0.5,
            self.utility: 0.7, self.toggle: 0.5, self.threads: 0.7, self.set_gradient: 0.7, self.door: 0.5,
            self.functional: 0.5, self.turn: 0.3, self.amp: 1, self.between: 2,
        }  # fmt: skip

    # Names

    def _new(self) -> str:
        self.number += 1
        return f"v{self.number}"

    def _seed(self) -> int:
        return self.rng.randrange(1000)

    def _parameters(self) -> list[tuple[str, torch.Tensor]]:
        return [(f"m.{name}", each) for name, each in self.names["m"].named_parameters(remove_duplicate=False)]

    def _variables(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, value) for name, value in self.names.items() if isinstance(value, torch.Tensor)]

    def _losses(self) -> list[str]:
        return [name for name, each in self._variables() if not each.dim() and each.requires_grad]

    def parameter(self, usable: Callable[[torch.Tensor], bool] = lambda _: True) -> tuple[str, torch.Tensor] | None:
        found = [each for each in self._parameters() if usable(each[1])]
        return self.rng.choice(found) if found else None

    def tensor(self) -> tuple[str, torch.Tensor]:
        """A parameter, a variable, or a view of one."""
        chance = self.rng.random()
        variables = self._variables()
        if variables and chance < 0.35:
            name, value = self.rng.choice(variables)
        elif chance < 0.4:
            name, value = "m.buffer", self.names["m"].buffer
        else:
            name, value = self.rng.choice(self._parameters())
            if self.rng.random() < 0.2:
                name += self.rng.choice([".data", ".detach()"])
                value = value.detach()
        if self.rng.random() < 0.35:
            name, value = self.seen_through(name, value)
        return name, value

    def seen_through(self, name: str, value: torch.Tensor) -> tuple[str, torch.Tensor]:
        """A view of a tensor."""
        for _ in range(4):
            made = self._view(name, value)
            try:
                return made, eval(made, self.names)
            except Exception:
                continue
        return name, value

    def _view(self, name: str, value: torch.Tensor) -> str:
        rng, shape = self.rng, value.shape
        found = [".detach()", ".unsqueeze(0)", ".view(-1)", ".reshape(-1)", ".flatten()", ".view_as({0})", "[...]"]
        if value.is_complex():
            found += [".real", ".imag", ".conj()", ".mH"]
            if rng.random() < 0.4:
                return f"torch.view_as_real({name})"
        elif value.dtype == torch.float32 and rng.random() < 0.05:
            return f"{name}.detach().view(torch.int32)"
        if value.dim():
            dim = rng.randrange(value.dim())
            size = max(1, shape[dim])
            at = rng.randrange(size)
            long = rng.randint(1, size - at)
            found += [
                f"[{rng.randrange(max(1, shape[0]))}]", f"[{rng.randrange(max(1, shape[0]))}:]", "[::2]", "[-1]",
                f"[..., {rng.randrange(max(1, shape[-1]))}]", f"[..., :{rng.randint(1, max(1, shape[-1]))}]",
                "[..., ::3]", f".select({dim}, {at})", f".narrow({dim}, {at}, {long})", f".unbind({dim})[{at}]",
                f".split({long}, {dim})[0]", f".split({long}, {dim})[-1]", f".chunk(3, {dim})[0]",
                f".unfold({dim}, {long}, 2)", f".expand(2, {', '.join(['-1'] * value.dim())})",
                f".tensor_split(2, {dim})[1]", f".split_with_sizes([{at}, {size - at}], {dim})[1]",
            ]  # fmt: skip
        if value.dim() > 1:
            other = list(range(value.dim()))
            rng.shuffle(other)
            turns = [".mT", ".transpose(0, -1)", ".T", f".permute({other})", ".movedim(0, 1)", ".diagonal()", ".t()"]
            found += turns * 2 + [f".unflatten(0, ({shape[0]}, 1))", ".swapaxes(0, 1)", ".squeeze()"]
            found += [f".as_strided(({min(3, shape[0])}, {shape[1]}), {tuple(value.stride()[:2])}, 0)"]
            found += [f".view({shape[-1]}, -1)"]
        return name + rng.choice(found).format(name)

    # Statements

    def view(self) -> Any:
        name, value = self.tensor()
        return f"{self._new()} = {self.seen_through(name, value)[0]}"

    def _value(self) -> str:
        rng = self.rng
        name, value = self.tensor()
        shape, dtype, seed = tuple(value.shape), value.dtype, self._seed()
        same = f"T({', '.join(map(str, (seed, *shape)))}, dtype={dtype})"
        found = [f"{name} * {same}", f"{name} + {same}", f"torch.where({same}.abs() > 0.5, {name}, {same})"]
        found += [f"torch.{each}({name})" for each in ("tanh", "sin", "abs", "square", "exp", "neg", "clone", "sum")]
        found += [f"{name}.mul(0.5)", f"{name}.pow(2)", f"{name}.mean()", f"{name}.to(torch.float32).relu()"]
        found += [f"torch.atleast_2d({name}).norm(dim=-1)", f"({name} * {name})", f"{name}[{same}.abs() > 0.7]"]
        if shape:
            at = f"I({seed}, {max(1, shape[0])}, 3)"
            found += [f"{name}[{at}]", f"{name}.index_select(0, {at})", f"torch.cat([{name}, {name}])"]
            found += [f"torch.stack([{name}, {same}])", f"{name}.cumsum(0)", f"{name}.sum(-1)", f"{name}.flip(0)"]
            found += [f"{name}.softmax(-1)", f"{name}.repeat(2, *[1] * {len(shape) - 1})", f"{name}.sort(0).values"]
        if len(shape) == 2:
            rows, columns = shape
            given = f"T({seed}, 3, {columns}, dtype={dtype})"
            linear = [f"F.linear({given}, {name})", f"{given} @ {name}.t()", f"{name} @ {given}.mT"]
            linear += [f"torch.einsum('ij,kj->ik', {given}, {name})", f"{name}.mT @ {name}"]
            linear += [f"torch.addmm(T({seed}, {columns}, dtype={dtype}), T({seed}, 2, {rows}, dtype={dtype}), {name})"]
            linear += [f"F.embedding(I({seed}, {max(rows, 1)}, 2, 3), {name})", f"F.layer_norm({name}, ({columns},))"]
            linear += [f"F.linear(T({seed}, 2, {columns}, 3, dtype={dtype}).mT, {name})"]
            found += linear * 3
        if len(shape) == 4:
            found += [f"F.conv2d(T({seed}, 2, {shape[1]}, 6, 6, dtype={dtype}), {name})"] * 6
        if len(shape) == 3:
            found += [f"torch.bmm({name}, {name}.mT)", f"F.conv1d(T({seed}, 2, {shape[1]}, 30, dtype={dtype}), {name})"]
        return rng.choice(found)

    def value(self) -> Any:
        return f"{self._new()} = {self._value()}"

    def convert(self) -> Any:
        name, value = self.tensor()
        if self.rng.random() < 0.15:
            name += ".t()" if value.dim() == 2 else ""
        kinds = [".to(torch.bfloat16)", ".double()", ".half()", ".float()", ".bfloat16()", ".clone()", ".contiguous()"]
        kinds += [".to(torch.float64)", ".to(torch.float16)", ".type(torch.float64)", ".to(torch.float32, copy=True)"]
        kinds += [".to(torch.bfloat16).t()" if value.dim() == 2 else ".to('cpu')", ".double().detach()", ".data.half()"]
        kinds += [f".type_as(T(1, dtype={self.rng.choice(['torch.float64', 'torch.bfloat16'])}))"]
        return f"{self._new()} = {name}{self.rng.choice(kinds)}"

    def _written(self) -> str:
        """An expression that changes a tensor."""
        rng = self.rng
        name, value = self.tensor()
        shape, dtype, seed = tuple(value.shape), value.dtype, self._seed()
        same = f"T({', '.join(map(str, (seed, *shape)))}, dtype={dtype})"
        found = [f"add_({rng.choice([1, 0.5])})", "mul_(0.5)", "zero_()", "fill_(0.25)", f"copy_({same})", "neg_()"]
        found += [f"add_({same}, alpha=2)", f"masked_fill_({same}.abs() > 0.5, 2)", f"addcmul_({same}, {same})"]
        found += [f"sub_({same})", "div_(2)", f"lerp_({same}, 0.5)", "square_()", f"add_({name})", f"mul_({name})"]
        if dtype.is_floating_point:
            found += [f"uniform_(generator=G({seed}))", f"normal_(generator=G({seed}))", "clamp_(-1, 1)"]
        found = [f"{name}.{each}" for each in found]
        found += [f"{name}[...] = 0.5", f"{name}[{same}.abs() > 0.5] = 0.1"]
        if shape:
            row = rng.randrange(max(1, shape[0]))
            some = f"T({', '.join(map(str, (seed, 2, *shape[1:])))}, dtype={dtype})"
            at = f"I({seed}, {max(shape[0], 1)}, 2)"
            found += [
                f"{name}[{row}] = 0.5",
                f"{name}[{row}].mul_(2)",
                f"{name}.view(-1)[{row}:] = 1",
                f"{name}[0] += 1",
            ]
            found += [f"{name}[..., {rng.randrange(max(1, shape[-1]))}].fill_(3)", f"{name}.index_fill_(0, {at}, 0.5)"]
            found += [f"{name}.index_add_(0, {at}, {some})", f"{name}.index_put_(({at},), {some}, accumulate=True)"]
            found += [f"{name}[{at}] = {some}", f"{name}.index_copy_(0, torch.tensor([{row}]), {some}[:1])"]
        if len(shape) == 2:
            found += [f"{name}.t()[0].mul_(3)", f"{name}.diagonal().fill_(1)", f"{name}.mT[0] = 7"]
            found += [f"{name}.unbind(1)[0].zero_()"]
            found += [f"{name}.addmm_(T(1, {shape[0]}, 2, dtype={dtype}), T(2, 2, {shape[1]}, dtype={dtype}))"]
            found += [f"{name}.copy_({same}.t().contiguous().t())", f"{name}.view(-1)[::2].add_(1)"]
        return rng.choice(found)

    def change(self) -> Any:
        made = self._written()
        return (f"with torch.no_grad(): {made}" if self.rng.random() < 0.85 else made), "write"

    def between(self) -> Any:
        """Changes something between forward and backward."""
        loss = self._new()
        if not self._losses():
            self._add(self._loss(loss))
        self._add(*self.change())
        return self.backward()

    def foreach(self) -> Any:
        rng, seed = self.rng, self._seed()
        chosen = [self.tensor()[0] for _ in range(rng.randint(1, 3))]
        if rng.random() < 0.5:
            chosen = [rng.choice(self._parameters())[0] for _ in range(rng.randint(1, 3))]
        names = f"[{', '.join(dict.fromkeys(chosen))}]"
        kinds = [
            "torch._foreach_add_(x, 1)", "torch._foreach_mul_(x, 0.5)", "torch._foreach_zero_(x)",
            f"torch._foreach_copy_(x, [T({seed}, *each.shape, dtype=each.dtype) for each in x])",
            "torch._foreach_addcmul_(x, x, x)", "torch._foreach_neg_(x)", "torch._foreach_add_(x, x, alpha=2)",
            f"torch._foreach_lerp_(x, [T({seed}, *each.shape, dtype=each.dtype) for each in x], 0.5)",
            "see(*torch._foreach_add(x, 1))", "see(*torch._foreach_norm(x))", "see(*torch._foreach_mul(x, x))",
            "torch._foreach_sub_(x, 1)", "torch._foreach_sqrt_(x)", "torch._foreach_mul_(x, [2.0] * len(x))",
        ]  # fmt: skip
        made = rng.choice(kinds)
        return f"with torch.no_grad():\n    x = {names}\n    {made}\ndel x", "read" if "see" in made else "write"

    def out(self) -> Any:
        found = self.tensor()
        name, value = found
        same = f"T({', '.join(map(str, (self._seed(), *value.shape)))}, dtype={value.dtype})"
        kinds = [f"torch.add({same}, 1, out={name})", f"torch.mul({same}, {name}, out={name})"]
        kinds += [f"torch.tanh({same}, out={name})", f"torch.sum({same}, 0, keepdim=True, out={name}[:1])"]
        if value.dim() == 2:
            rows, columns = value.shape
            dtype = value.dtype
            kinds += [f"torch.mm(T(1, {rows}, 3, dtype={dtype}), T(2, 3, {columns}, dtype={dtype}), out={name})"]
        return f"with torch.no_grad(): {self.rng.choice(kinds)}", "write"

    def _forward(self) -> str:
        words = f"I({self._seed()}, m.rows, {self.rng.randint(1, 3)}, 5)"
        return self.rng.choice(
            [f"m({words})", f"m.down(F.gelu(m.up(m.emb({words}))))", f"m.head(m.norm(m.emb({words})))"]
        )

    def _loss(self, name: str) -> str:
        parts = [self._forward()] if self.rng.random() < 0.5 else []
        parts += [self._value() for _ in range(self.rng.randint(0 if parts else 1, 2))]
        made = f"{name} = S({', '.join(parts)})"
        if self.rng.random() < (0.8 if self.capability == "save_on_nvme" else 0):
            made = f"with saving: {made}"
        if self.rng.random() < 0.15:
            made = f"with amp(): {made}" if not made.startswith("with") else f"with amp(), saving: {made[13:]}"
        return made

    def loss(self) -> Any:
        return self._loss(self._new())

    def backward(self) -> Any:
        losses = self._losses()
        if not losses:
            return None
        options = self.rng.choice(["", "", "", "retain_graph=True"])
        return f"{self.rng.choice(losses)}.backward({options})", "backward"

    def _wrt(self) -> str:
        wanted = [name for name, value in self._parameters() + self._variables() if value.requires_grad]
        if not wanted:
            return "[m.emb.weight]"
        return f"[{', '.join(dict.fromkeys(self.rng.choices(wanted, k=self.rng.randint(1, 3))))}]"

    def gradient(self) -> Any:
        losses = self._losses()
        if not losses:
            return None
        retain = self.rng.random() < 0.5
        made = (
            f"torch.autograd.grad({self.rng.choice(losses)}, {self._wrt()}, allow_unused=True, retain_graph={retain})"
        )
        return f"see(*{made})", "backward"

    def twice(self) -> Any:
        parts = ", ".join(self._value() for _ in range(self.rng.randint(1, 2)))
        loss, found = self._new(), self._new()
        forward = f"{loss} = S({parts if self.rng.random() < 0.6 else self._forward()})"
        with_saving = "with saving: " if self.capability == "save_on_nvme" else ""
        again = f"see(*torch.autograd.grad(S(*{found}), {self._wrt()}, allow_unused=True))"
        end = self.rng.choice([f"S(*{found}).backward()", again])
        return (
            f"{with_saving}{forward}\n{with_saving}{found} = torch.autograd.grad({loss}, {self._wrt()}, "
            f"create_graph=True, allow_unused=True)\nsee(*{found})\n{end}\ndel {found}, {loss}"
        ), "backward"

    def zero(self) -> Any:
        return f"m.zero_grad(set_to_none={self.rng.random() < 0.6})"

    def look(self) -> Any:
        name = self.tensor()[0]
        return f"see({name})" if self.rng.random() < 0.6 else f"see({self.rng.choice(self._parameters())[0]}.grad)"

    def hook(self) -> Any:
        name = self._new()
        hooks = ["lambda g: see(g)", "lambda g: g * 2", "failing", "lambda g: g.clamp(-0.1, 0.1)"]
        found = self.parameter(lambda each: each.requires_grad)
        kinds = [
            f"{name} = m.{self.rng.choice(['up', 'norm', 'emb'])}.register_forward_hook(lambda a, b, c: see(c))",
            f"{name} = m.{self.rng.choice(['up', 'down'])}.register_full_backward_hook(lambda a, b, c: see(*c))",
            f"{name} = m.up.register_forward_pre_hook(lambda a, b: see(a.weight))",
            f"{name} = m.down.register_forward_hook({self.rng.choice(['failing', 'lambda a, b, c: c * 2'])})",
        ]  # fmt: skip
        if found is not None:
            kinds += [f"{name} = {found[0]}.register_hook({self.rng.choice(hooks)})"] * 2
            after = self.rng.choice(
                ["lambda p: see(p.grad)", "lambda p: see(p)", "failing", "lambda p: p.grad.mul_(2)"]
            )
            kinds += [f"{name} = {found[0]}.register_post_accumulate_grad_hook({after})"] * 2
        known = [key for key, value in self.names.items() if isinstance(value, torch.utils.hooks.RemovableHandle)]
        if known and self.rng.random() < 0.6:
            return f"{self.rng.choice(known)}.remove()"
        return self.rng.choice(kinds)

    def again(self) -> Any:
        reentrant = self.rng.random() < 0.3
        words = f"I({self._seed()}, m.rows, 2, 5)"
        inner = "m, " + words
        if reentrant:
            inner = (
                f"lambda x: m.down(F.gelu(m.up(x))), T({self._seed()}, 2, 32, dtype=m.up.weight.dtype).requires_grad_()"
            )
        made = f"{self._new()} = S(checkpoint({inner}, use_reentrant={reentrant}))"
        return f"with saving: {made}" if self.capability == "save_on_nvme" else made

    def train(self) -> Any:
        known = [name for name, value in self.names.items() if isinstance(value, torch.optim.Optimizer)]
        if known and self.rng.random() < 0.7:
            return f"{self.rng.choice(known)}.step()", "many"
        kind = self.rng.choice([
            "SGD(PARAMS, lr=0.1, foreach=True)", "SGD(PARAMS, lr=0.1, momentum=0.9, foreach=False)",
            "Adam(PARAMS, foreach=False)", "AdamW(PARAMS, foreach=True)", "SGD(PARAMS, lr=0.1, weight_decay=0.1)",
            "RMSprop(PARAMS)", "Adagrad(PARAMS, lr=0.1)",
        ])  # fmt: skip
        return f"{self._new()} = torch.optim.{kind.replace('PARAMS', 'm.parameters()')}"

    def states(self) -> Any:
        name = self._new()
        known = [key for key, value in self.names.items() if isinstance(value, dict) and "emb.weight" in value]
        kinds = [f"{name} = m.state_dict()", f"{name} = through_file(m.state_dict())", "see(*m.state_dict().values())"]
        kinds += [f"{name} = copy.deepcopy(m.state_dict())", "see(*copy.deepcopy(m).parameters())"]
        kinds += [f"see(copy.deepcopy(m)({f'I({self._seed()}, m.rows, 2, 5)'}))"]
        kinds += ["see(*pickle.loads(pickle.dumps(dict(m.named_parameters()))).values())"]
        kinds += [f"{name} = {{key: value + 1 for key, value in m.state_dict().items()}}"]
        made = self.rng.choice(kinds)
        if known and self.rng.random() < 0.6:
            one = self.rng.choice(known)
            chosen = self.rng.choice([f"m.load_state_dict({one})", f"see(*{one}.values())", f"del {one}"])
            return chosen, "many" if "load" in chosen else "read"
        return made

    def data(self) -> Any:
        found = self.parameter()
        assert found is not None
        name, value = found
        same = f"T({', '.join(map(str, (self._seed(), *value.shape)))}, dtype={value.dtype})"
        kinds = [f"{name}.data = {same}", f"{name}.data = {name}.data * 2", f"{name}.data = {name}.data.clone()"]
        kinds += [f"{name}.data = {name}.detach()", f"{name}.data = {name}.data[...]"]
        return self.rng.choice(kinds), "write"

    def init(self) -> Any:
        found = self.parameter(lambda each: each.dim() > 1 and each.is_floating_point())
        if found is None:
            return None
        name, seed = found[0], f"generator=G({self._seed()})"
        kinds = [f"uniform_({name}, {seed})", f"xavier_normal_({name}, {seed})", f"kaiming_uniform_({name}, {seed})"]
        kinds += [
            f"zeros_({name})",
            f"constant_({name}, 0.3)",
            f"trunc_normal_({name}, {seed})",
            f"orthogonal_({name}, {seed})",
        ]
        return f"nn.init.{self.rng.choice(kinds)}", "write"

    def utility(self) -> Any:
        name = self._new()
        real = "[p for p in m.parameters() if p.dtype == m.up.weight.dtype]"
        kinds = [
            (f"{name} = nn.utils.parameters_to_vector({real})", "read"),
            (f"nn.utils.vector_to_parameters(nn.utils.parameters_to_vector({real}) * 0.5, {real})", "many"),
            ("see(nn.utils.clip_grad_norm_([p for p in m.parameters() if not p.is_complex()], 0.1))", "many"),
            ("nn.utils.clip_grad_value_([p for p in m.parameters() if not p.is_complex()], 0.01)", "many"),
            ("m.requires_grad_()", "read"),
            ("m.train(), m.eval()", "read"),
            ("m.to('cpu')", "read"),
        ]  # fmt: skip
        return self.rng.choice(kinds)

    def toggle(self) -> Any:
        found = self.parameter()
        assert found is not None
        return f"{found[0]}.requires_grad_({self.rng.random() < 0.7})"

    def threads(self) -> Any:
        count, seed = self.rng.randint(2, 3), self._seed()
        words = f"I({seed} + i, m.rows, 2, 5)"
        kinds = [
            f"see(*in_threads(lambda i: m({words}), {count}))",
            f"see(*in_threads(lambda i: torch.autograd.grad(S(m({words}), m.up.weight), m.up.weight)[0], {count}))",
            f"see(*in_threads(lambda i: [{self._value()}, {self._value()}][i], 2))",
            f"see(*in_threads(lambda i: list(m.parameters())[i].double(), {count}))",
        ]
        if self.rng.random() < 0.3:
            return (
                f"m.zero_grad()\nin_threads(lambda i: S(m({words})).backward(), 2)",
                "backward",
            )  # order does not matter
        return self.rng.choice(kinds)

    def set_gradient(self) -> Any:
        found = self.parameter()
        assert found is not None
        name, value = found
        same = f"T({', '.join(map(str, (self._seed(), *value.shape)))}, dtype={value.dtype})"
        kinds = [
            f"{name}.grad = {same}",
            f"{name}.grad = None",
            f"{name}.grad.mul_(2)",
            f"{name}.grad = {name}.detach().clone()",
        ]
        return self.rng.choice(kinds)

    def door(self) -> Any:
        """Ways to values that go around torch's dispatch."""
        name = self.tensor()[0]
        new = self._new()
        kinds = [
            f"see(torch.from_numpy({name}.detach().numpy().copy()))", f"{new} = torch.tensor({name}.detach().tolist())",
            f"{new} = torch.from_dlpack({name}.detach())", f"see(torch.equal({name}, {name}.clone()))",
            f"{new} = float({name}.detach().abs().sum())", f"{name}.share_memory_()",
            f"{name}.detach().numpy()[...] = 1",
            f"{new} = pickle.loads(pickle.dumps({name}.detach()))", f"see(through_file({name}.detach()))",
            f"{new} = copy.deepcopy({name}.detach())", f"{new} = torch.asarray({name}.detach())",
            f"{new} = torch.Tensor({name}.detach())", f"{new} = {name}.new_tensor({name}.detach())",
            f"{new} = torch.as_tensor({name}).detach()", f"see({name}.detach().is_contiguous(), {name}.stride())",
            f"{new} = {name}.detach().cpu()", f"{new} = torch.empty_like({name}).copy_({name})",
            f"{name}.detach().set_(T(3, 5))", f"{new} = nn.Parameter({name}.detach())",
        ]  # fmt: skip
        return self.rng.choice(kinds), "write"

    def functional(self) -> Any:
        words = f"I({self._seed()}, m.rows, 2, 5)"
        kinds = [
            f"see(torch.func.functional_call(m, {{'up.weight': m.up.weight * 2}}, ({words},)))",
            f"see(torch.func.functional_call(m, {{k: v.detach() for k, v in m.named_parameters()}}, ({words},)))",
            "see(torch.func.grad(lambda w: S(F.linear(T(1, 2, 32, dtype=w.dtype), w)))(m.up.weight))",
            "see(torch.func.vmap(lambda x: F.linear(x, m.up.weight))(T(1, 3, 2, 32, dtype=m.up.weight.dtype)))",
            "see(torch.func.jvp(lambda w: w.sin(), (m.up.weight,), (m.up.weight,))[1])",
            "see(torch.func.vmap(lambda w: w.sum())(m.up.weight))",
            "see(torch.autograd.functional.jacobian(lambda w: w.sum(0)[:2], m.up.weight))",
        ]
        return self.rng.choice(kinds)

    def turn(self) -> Any:
        """Changes the shape of a tensor in place."""
        name = self.tensor()[0]
        kinds = ["t_()", "unsqueeze_(0)", "squeeze_()", "transpose_(0, -1)", "resize_(3)", "detach_()"]
        return f"with torch.no_grad(): {name}.{self.rng.choice(kinds)}", "write"

    def amp(self) -> Any:
        """Changes weights between two uses under autocast."""
        a, b, name = self._new(), self._new(), self.rng.choice(["m.up", "m.head", "m.down"])
        given = f"T({self._seed()}, 2, {name}.weight.shape[1], dtype={name}.weight.dtype)"
        made = [f"{a} = {name}({given})", f"{b} = {name}({given} * 2)"]
        if self.rng.random() < 0.6:
            made.insert(1, f"with torch.no_grad(): {self._written()}")
        inner = "\n    ".join(made)
        end = self.rng.choice([f"{a} = S({a}, {b})\ndel {b}", f"S({a}, {b}).backward()\ndel {a}, {b}"])
        saved = ", saving" if self.capability == "save_on_nvme" else ""
        return f"with amp(){saved}:\n    {inner}\n{end}", "many"


# Programs run


def model_of(capability: str, seed: int, without: Sequence[str] = ()) -> Model:
    """The same model for the same seed."""
    model = Model(seed, without)
    return model.eval().requires_grad_(False) if capability == "stream_weights" else model


@contextlib.contextmanager
def opened(capability: str, model: Model, folder: str, rng: random.Random) -> Iterator[tuple[Any, Any]]:
    """Yields what saves tensors, if anything, and what was opened: with room for all, or for a few."""
    sizes = [max(1, -(-each.nbytes // PAGE)) for each in [*model.parameters(), *model.buffers()]]
    pages = rng.choice([max(sizes), max(sizes) + 2, 2 * max(sizes), sum(sizes) // 2, sum(sizes), 2 * sum(sizes)])
    budget, checksum = PAGE * max(pages, *sizes), rng.random() < 0.3
    if capability == "swap_params":
        with swap_params(model, folder, memory_budget=budget, min_bytes=1, checksum=checksum) as swapped:
            yield contextlib.nullcontext(), swapped
    elif capability == "stream_weights":
        while True:
            with contextlib.suppress(ValueError):  # too small
                stream_weights(model, folder, memory_budget=budget)
                break
            budget += 4 * PAGE
        with model:  # type: ignore[attr-defined]
            yield contextlib.nullcontext(), model
    else:
        saving = save_on_nvme(
            folder, min_bytes=1, memory_budget=rng.choice([0, 0, PAGE, 6 * PAGE]), checksum=checksum,
            policy=rng.choice(["nvme", "auto"]),
        )  # fmt: skip
        with contextlib.closing(saving):
            yield saving, saving


def snapshot(value: Any) -> Any:
    """Returns what a tensor is now."""
    if not isinstance(value, torch.Tensor):
        return value
    try:
        leaf = value.is_leaf
    except RuntimeError:  # a view that was changed and may not be
        leaf = False
    kept = value.detach().clone().resolve_conj().resolve_neg()
    strides = tuple(each for each, size in zip(value.stride(), value.shape, strict=True) if size > 1)
    return kept.contiguous(), tuple(value.shape), strides * bool(value.numel()), value.requires_grad, leaf


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.reshape(-1)).view(torch.uint8)


def difference(ours: Any, plain: Any) -> str:
    """Says in what two snapshots differ; nothing if they do not."""
    if not (isinstance(ours, tuple) and ours and isinstance(ours[0], torch.Tensor)):
        same = ours == plain or (isinstance(ours, float) and isinstance(plain, float) and math.isnan(ours + plain))
        return "" if type(ours) is type(plain) and same else f"{ours!r} is not {plain!r}"[:200]
    if not isinstance(plain, tuple):
        return "a tensor, and none in torch"
    one, other = ours[0], plain[0]
    for name, mine, its in zip(("shape", "strides", "requires_grad", "is_leaf"), ours[1:], plain[1:], strict=True):
        if mine != its:
            return f"{name}: {mine} is not {its}"
    if one.dtype != other.dtype:
        return f"dtype: {one.dtype} is not {other.dtype}"
    if not one.numel() or torch.equal(_bytes(one), _bytes(other)):
        return ""
    if torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(), other.nan_to_num()):
        return ""  # bits of what is no number
    wrong = (one != other) & ~(one.isnan() & other.isnan())
    return f"values: {int(wrong.sum())} of {one.numel()} differ"


@dataclass
class Outcome:
    """What became of a program."""

    failure: str = ""
    at: int = 0
    detail: str = ""
    refusals: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def kind(self) -> str:
        """What failures of one cause are likely to have in common."""
        detail = self.detail.split("\n")[0].split(" (")[0]
        return re.sub(r"m\.[\w.]+|\d+", "N", f"{self.failure}: {detail}")


def said(error: BaseException) -> str:
    """An error without what differs from one time to the next."""
    text = re.sub(r"0x[0-9a-f]+|\d+(\.\d+)?", "N", f"{type(error).__name__}: {error}")
    return text.split("\n")[0][:160]


def is_refusal(error: BaseException) -> bool:
    """Whether the product's own code raised it, in a sentence."""
    if "modified by an inplace operation" in str(error):
        return False  # torch has to say the same
    if str(error).startswith("Error(s) in loading state_dict"):
        return "storage" in str(error) or "no memory" in str(error)
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None or not isinstance(error, REFUSALS):
        return False
    file = last.tb_frame.f_code.co_filename
    return file.startswith(PRODUCT) and linecache.getline(file, last.tb_lineno).strip().startswith("raise")


@contextlib.contextmanager
def interrupted(line: int) -> Iterator[None]:
    """Raises KeyboardInterrupt at the so-manieth line of the product; at none for 0."""
    left = line

    def local(frame: Any, event: str, _: Any) -> Any:
        nonlocal left
        if event == "line":
            left -= 1
            if left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return local

    def begin(frame: Any, event: str, _: Any) -> Any:
        return local if frame.f_code.co_filename.startswith(INTERRUPTED) else None

    if line:
        sys.settrace(begin)
    try:
        yield
    finally:
        sys.settrace(None)


class Side:
    """A program's names, and what it has seen."""

    def __init__(self, model: nn.Module, saving: Any) -> None:
        self.model, self.log = model, list[Any]()
        self.names = namespace(model, self.see, saving)

    def see(self, *observed: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # whose turn it is is nobody's choice
        with torch.no_grad():
            self.log += map(snapshot, observed)

    def run(self, statement: Statement, number: int, line: int = 0) -> BaseException | None:
        """Returns what was raised."""
        self.log.clear()
        before = dict(self.names)
        torch.default_generator.manual_seed(number)
        code = compile(statement.code, f"<statement {number}>", "exec")
        try:
            with interrupted(line):
                exec(code, self.names)
        except (Exception, KeyboardInterrupt) as error:
            self.names.clear()
            self.names.update(before)
            return error
        return None

    def state(self) -> dict[str, Any]:
        """Values of all parameters and variables."""
        with torch.no_grad():
            found = dict([*self.model.named_parameters(), *self.model.named_buffers(), *self.names.items()])
            return {name: snapshot(value) for name, value in found.items() if isinstance(value, torch.Tensor)}

    def forget_graphs(self) -> None:
        for each in self.model.parameters():
            each.grad = None
        for name, value in list(self.names.items()):
            if isinstance(value, torch.Tensor) and value.requires_grad:  # is_leaf raises of some views
                del self.names[name]

    def forget_all(self) -> None:
        self.log.clear()
        self.names.clear()
        for each in self.model.parameters():
            each.grad = None


def differences(ours: dict[Any, Any], plain: dict[Any, Any]) -> str:
    """Says what differs."""
    if ours.keys() != plain.keys():
        return f"{list(ours)} is not {list(plain)}"
    return next((f"{found} ({name})" for name in ours if (found := difference(ours[name], plain[name]))), "")


class Comparison:
    """Runs a program on both sides."""

    def __init__(self, ours: Side, plain: Side) -> None:
        self.ours, self.plain, self.outcome = ours, plain, Outcome()

    def run(self, program: Sequence[Statement]) -> bool:
        """Returns whether all is known at the end."""
        for number, statement in enumerate(program):
            self.outcome.at = number
            if not self._statement(statement, number):
                return False
        return True

    def _fail(self, failure: str, detail: object) -> bool:
        self.outcome.failure, self.outcome.detail = failure, str(detail)
        return False

    def _statement(self, statement: Statement, number: int) -> bool:
        raised = self.ours.run(statement, number, statement.line)
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            torch._C._autograd._pop_saved_tensors_default_hooks()
            return self._fail("tensors are saved on storage for ever", said(raised or ValueError()))
        if isinstance(raised, NameError):
            return True  # of a statement that was refused
        if isinstance(raised, KeyboardInterrupt) or (raised is not None and is_refusal(raised)):
            refused = not isinstance(raised, KeyboardInterrupt)
            (self.outcome.refusals if refused else self.outcome.counts)[said(raised)] += 1
            del raised
            return self._refused(statement, number, refused)
        error = self.plain.run(statement, number)
        if raised is None and error is None:
            self.outcome.counts["equal"] += 1
            if (found := differences(dict(enumerate(self.ours.log)), dict(enumerate(self.plain.log)))) != "":
                return self._fail("a difference", found)
        elif raised is None:
            assert error is not None
            return self._fail("torch raises, ours does not", said(error))
        elif error is None:
            where = "".join(traceback.format_tb(raised.__traceback__)[-3:])
            return self._fail("ours raises, torch does not", f"{said(raised)}\n{where}")
        else:
            self.outcome.counts["both raise" + (" the same" if said(raised) == said(error) else "")] += 1
            if statement.kind == "many":
                return False
            if statement.kind == "backward":
                self._forget_graphs()
        return True

    def _refused(self, statement: Statement, number: int, refused: bool) -> bool:
        if statement.kind == "many":
            self.outcome.counts["ended by a refusal"] += 1
            return False
        if statement.kind == "backward":
            self._forget_graphs()
        if statement.kind == "write":
            try:
                now = self.ours.state()
            except MemoryError:
                self.outcome.counts["ended by a lack of memory"] += 1
                return False
            if (old := differences(now, self.plain.state())) != "":
                self.plain.run(statement, number)
                if (new := differences(now, self.plain.state())) != "":
                    before = "refused" if refused else "interrupted"
                    return self._fail(f"{before}, neither old nor new", f"{old}; {new}")
        return True

    def _forget_graphs(self) -> None:
        self.ours.forget_graphs()
        self.plain.forget_graphs()

    def end(self, known: bool) -> None:
        """Looks at all, and at whether all can still be used."""
        if self.outcome.failure:
            return
        self.outcome.at += 1
        if known:
            looks = [f"see({name})" for name in sorted(self.ours.names) if name.startswith("v")]
            looks += [f"see(m.{name}.grad)" for name, _ in self.ours.model.named_parameters()]
            for look in looks:
                shown = isinstance(self.plain.names.get(look[4:-1]), torch.Tensor | None)
                if shown and not self._statement(Statement(look), 0):
                    self.outcome.detail += f" ({look} at the end)"
                    return
        self.ours.forget_all()
        self.plain.forget_all()
        residents._PATIENCE = window._PATIENCE = 3.0  # of a device that is slow, and of nobody else
        for (name, mine), its in zip(self.ours.model.named_parameters(), self.plain.model.parameters(), strict=True):
            try:
                with torch.no_grad():
                    try:
                        now = snapshot(mine)
                    except MemoryError:
                        gc.collect()
                        now = snapshot(mine)
                    found = difference(now, snapshot(its))
            except Exception as error:
                self._fail("not usable at the end", f"{name}: {said(error)}")
                return
            if found and known:
                self._fail("a difference", f"m.{name} at the end: {found}")
                return


def run_program(
    capability: str, seed: int, program: Sequence[Statement], folder: str, without: Sequence[str] = ()
) -> Outcome:
    """Runs a program with a capability and on plain torch."""
    _be_quick()
    if capability == "NvmeOptimizer":
        from tests.offload import random_optimizers

        with tempfile.TemporaryDirectory(dir=folder) as folder:
            return random_optimizers.run_program(seed, program, folder, without)
    ours, plain = model_of(capability, seed, without), model_of(capability, seed, without)
    with opened(capability, ours, folder, random.Random(seed)) as (saving, used):
        compared = Comparison(Side(ours, saving), Side(plain, contextlib.nullcontext()))
        known = compared.run(program)
        compared.end(known)
        if capability == "stream_weights" and not compared.outcome.failure:
            compared.outcome.counts["bytes read"] += used.stats().bytes_read
        if capability == "swap_params" and not compared.outcome.failure and random.Random(seed).random() < 0.2:
            used.restore()
            if known and (found := differences(compared.ours.state(), compared.plain.state())) != "":
                compared._fail("a difference", f"restored: {found}")
        return compared.outcome


def _be_quick() -> None:
    """Memory that others hold is given up soon, and small weights are streamed too."""
    for module, name, value in (
        (residents, "_PATIENCE", 0.03), (residents, "_LONG", 0.01), (window, "_PATIENCE", 0.03),
        (streamed, "_SMALL", 0),
    ):  # fmt: skip
        if hasattr(module, name):
            setattr(module, name, value)
    torch.set_num_threads(1)


# Many programs run


def write_program(capability: str, seed: int, without: Sequence[str] = ()) -> list[Statement]:
    """Returns the program of a seed; ``without`` some kinds of statements."""
    if capability == "NvmeOptimizer":
        from tests.offload.random_optimizers import OptimizerWriter

        return OptimizerWriter(seed, without).write(random.Random(seed).randint(6, 30))
    return Writer(capability, seed, without).write(random.Random(seed).randint(6, 30))


def _child(seeds: Sequence[int], work: Callable[[int], Outcome], report: int) -> None:
    """Runs programs in this process, which may crash, and writes lines about them."""
    native()  # which may have to be compiled
    with open(report, "w") as file:
        for seed in seeds:
            print(json.dumps({"begin": seed}), file=file, flush=True)
            faulthandler.dump_traceback_later(LONGEST, exit=True)
            try:
                outcome = work(seed)
            except BaseException as error:
                last = traceback.format_exception(error)[-6:]
                outcome = Outcome("the harness raises", 0, said(error) + "\n" + "".join(last))
            print(json.dumps(vars(outcome)), file=file, flush=True)
    faulthandler.cancel_dump_traceback_later()


def in_children(seeds: Sequence[int], work: Callable[[int], Outcome], batch: int = 50) -> Iterator[tuple[int, Outcome]]:
    """Runs programs in children, a batch each; a crash or a hang is an outcome."""
    left = list(seeds)
    errors = tempfile.TemporaryFile()  # noqa: SIM115  (for as long as children are)
    while left:
        reading, writing = os.pipe()
        errors.truncate(0)
        child = os.fork()
        if child == 0:
            os.close(reading)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.dup2(errors.fileno(), 2)
            faulthandler.enable()
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            try:
                _child(left[:batch], work, writing)
            finally:
                os._exit(0)
        os.close(writing)
        done, begun = 0, None
        with open(reading) as lines:
            for line in lines:
                found = json.loads(line)
                if "begin" in found:
                    begun = found["begin"]
                else:
                    for name in ("refusals", "counts"):
                        found[name] = Counter(found[name])
                    yield left[done], Outcome(**found)
                    done, begun = done + 1, None
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if begun is not None or done < min(batch, len(left)):
            errors.seek(0)
            stacks = errors.read().decode(errors="replace").strip("\0")[-3000:]
            yield left[done], Outcome("hangs" if status == 1 else f"crashes with {status}", detail="\n" + stacks)
            done += 1
        del left[:done]


def shrunk(
    capability: str, seed: int, program: list[Statement], kind: str, folder: str, without: Sequence[str]
) -> list[Statement]:
    """Returns the program without the statements that it fails without."""

    def fails(tried: list[Statement]) -> bool:
        found = in_children([seed], lambda seed: run_program(capability, seed, tried, folder, without))
        return next(found)[1].kind == kind

    end = time.monotonic() + 60
    for size in (8, 4, 2, 1, 1):
        at = len(program) - size
        while at >= 0 and time.monotonic() < end and not kind.startswith("hangs"):
            tried = program[:at] + program[at + size :]
            if fails(tried):
                program = tried
            at -= size
    plain = [Statement(each.code, each.kind) for each in program]
    return plain if fails(plain) else program


def printed(program: Sequence[Statement]) -> str:
    """A program as it is shown."""
    lines = [f"{each.code}{f'  # Ctrl-C at line {each.line}' if each.line else ''}" for each in program]
    return "\n".join("    " + line for each in lines for line in each.split("\n"))


@dataclass
class Summary:
    """What became of many programs."""

    programs: int = 0
    failures: list[str] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, other: Summary) -> None:
        self.programs += other.programs
        self.failures += other.failures
        for name in ("kinds", "refusals", "counts"):
            getattr(self, name).update(getattr(other, name))


def run_many(
    capability: str,
    seeds: Sequence[int],
    folder: str,
    *,
    without: Sequence[str] = (),
    shrink: int = 1,
    show: bool = False,
) -> Summary:
    """Runs the programs of seeds; of each kind of failure, the first ``shrink`` are shown."""
    _be_quick()
    for seed in range(30):  # what torch imports when it is used first
        write_program(capability, seed, without)
    gc.collect()
    gc.freeze()
    summary = Summary()

    def work(seed: int) -> Outcome:
        return run_program(capability, seed, write_program(capability, seed, without), folder, without)

    for seed, outcome in in_children(seeds, work):
        summary.programs += 1
        summary.refusals += outcome.refusals
        summary.counts += outcome.counts
        if not outcome.failure:
            continue
        kind = outcome.kind
        summary.kinds[kind] += 1
        if summary.kinds[kind] <= shrink:
            program = write_program(capability, seed, without)
            if outcome.at:
                del program[outcome.at + 1 :]
            program = shrunk(capability, seed, program, kind, folder, without)
            text = f"{capability}, seed {seed}: {outcome.failure}: {outcome.detail}\n{printed(program)}"
            summary.failures.append(text)
            if show:
                print(text, flush=True)
    return summary


def main(words: Sequence[str] | None = None) -> int:
    """Runs programs and prints what failed."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.offload.random_programs", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("capability", choices=CAPABILITIES)
    parser.add_argument("--programs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--shrink", type=int, default=1, help="failures of each kind that are shown")
    parser.add_argument(
        "--without",
        default="",
        help="kinds of statements to leave out: names of Writer, or parameters of Model, with commas",
    )
    parser.add_argument("--folder", help="where tensors go; a new one when left out")
    parser.add_argument("--print", action="store_true", help="print the programs, and run none")
    given = parser.parse_args(words)
    seeds = range(given.seed, given.seed + given.programs)
    without = given.without.split(",")
    if given.print:
        for seed in seeds:
            print(f"seed {seed}\n{printed(write_program(given.capability, seed, without))}")
        return 0
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        workers = []
        for number in range(given.processes):
            child = os.fork()
            if child == 0:
                try:
                    mine = seeds[number :: given.processes]
                    found = run_many(given.capability, mine, folder, without=without, shrink=given.shrink, show=True)
                    Path(folder, f"summary {number}").write_bytes(pickle.dumps(found))
                finally:
                    os._exit(0)
            workers.append(child)
        total = Summary()
        for number, child in enumerate(workers):
            os.waitpid(child, 0)
            total.add(pickle.loads(Path(folder, f"summary {number}").read_bytes()))
    seconds = time.perf_counter() - begin
    print(f"\n{total.programs} programs of {given.capability} in {seconds:.0f} s; {sum(total.kinds.values())} failed")
    for title, counter in (("failures", total.kinds), ("refusals", total.refusals), ("statements", total.counts)):
        print(f"{title}:")
        for text, count in counter.most_common(60):
            print(f"  {count:7} {text}")
    return int(bool(total.kinds))


if __name__ == "__main__":
    sys.exit(main())
