"""Random programs over gradients: what each of them sees is to be the same with and without ``swap_gradients``."""

from __future__ import annotations

import contextlib
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from nvme_ops.offload import NvmeOptimizer, swap_gradients, swap_params

SIDE = 16
LENGTH = 14
Seen = list[tuple[str, Any]]


class Model(torch.nn.Module):
    """Weights that are used once, twice, through views, transposed and through a checkpoint; one of no use at times."""

    first: torch.nn.Parameter
    twice: torch.nn.Parameter
    viewed: torch.nn.Parameter
    again: torch.nn.Parameter
    spare: torch.nn.Parameter

    def __init__(self, seed: int) -> None:
        super().__init__()
        made = torch.Generator().manual_seed(seed)
        names = ("first", "twice", "viewed", "again", "spare")
        for name in names:
            weight = torch.randn(SIDE, SIDE, generator=made) / 4
            setattr(self, name, torch.nn.Parameter(weight.t() if name == "again" else weight))
        self.bias = torch.nn.Parameter(torch.randn(SIDE, generator=made))

    def forward(self, x: torch.Tensor, spare: bool) -> torch.Tensor:
        x = torch.nn.functional.linear(x, self.first, self.bias).tanh()
        x = torch.nn.functional.linear(x, self.twice) @ self.twice.t()
        x = torch.cat([x[:, :8] @ self.viewed[:8], x[:, 8:] @ self.viewed[8:]]).view(-1, SIDE)

        def part(y: torch.Tensor) -> torch.Tensor:
            return torch.sigmoid(y @ self.again)

        x = checkpoint(part, x, use_reentrant=False)
        return x * self.spare[0] if spare else x


class HookError(Exception):
    """Raised by a hook."""


class Run:
    """One program on one model. Both runs of a seed draw the same numbers."""

    def __init__(self, seed: int, swapped: bool, folder: Path) -> None:
        self.random, self.seen = random.Random(seed), Seen()
        draw = self.random
        self.model: Any = Model(seed)
        self.held: list[Any] = []
        self.undo = contextlib.ExitStack()
        params_too, ours = draw.random() < 0.25, draw.random() < 0.5
        budget = draw.choice([32768, 32768, 1 << 20])
        foreach, kind, seed_of_words = draw.random() < 0.3, draw.choice(["SGD", "AdamW"]), draw.random()
        self.words = torch.Generator().manual_seed(int(seed_of_words * 1e9))
        self.swapped: Any = None
        if swapped:
            if params_too:
                self.undo.callback(swap_params(self.model, folder, memory_budget="1M", min_bytes=1024).close)
            self.swapped = swap_gradients(
                self.model.parameters(), folder, memory_budget=budget, min_bytes=1024, checksums=draw.random() < 0.2
            )
            self.undo.callback(self.swapped.close)
        else:
            draw.random()
        options: dict[str, Any] = {"lr": 0.01, "foreach": foreach and not params_too}
        if kind == "SGD":
            options |= {"momentum": 0.9, "weight_decay": 0.01}
        make: Any = getattr(torch.optim, kind)
        if ours and swapped:
            self.optimizer = NvmeOptimizer(self.model.parameters(), make, folder, memory_budget="1M", **options)
            self.undo.callback(self.optimizer.close)
        else:
            self.optimizer = make(self.model.parameters(), **options)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def loss(self) -> torch.Tensor:
        x = torch.randn(4, SIDE, generator=self.words)
        spare, scale = self.random.random() < 0.5, self.random.choice([1.0, 1.0, 8.0])
        return self.model(x, spare).square().mean() * scale

    def parameter(self) -> Any:
        return self.random.choice(list(self.model.parameters()))

    def note(self, name: str, value: Any) -> None:
        self.seen.append((name, None if value is None else value.detach().clone()))

    # What programs do

    def backward(self) -> None:
        self.loss().backward()

    def backward_twice(self) -> None:
        loss = self.loss()
        loss.backward(retain_graph=True)
        loss.backward()

    def backward_of_some(self) -> None:
        some = self.random.sample(list(self.model.parameters()), 3)
        try:
            self.loss().backward(inputs=some)
        except RuntimeError:  # the loss does not depend on one of them
            self.note("refused", None)

    def backward_with_graph(self) -> None:
        self.loss().backward(create_graph=True)
        with_graph = [each.grad for each in self.model.parameters() if each.grad is not None and each.grad.grad_fn]
        if with_graph and self.random.random() < 0.5:
            try:
                torch.stack([each.square().sum() for each in with_graph]).sum().backward()
            except RuntimeError:  # one from an earlier pass, whose graph is gone
                self.note("refused", None)

    def grad(self) -> None:
        for each in torch.autograd.grad(self.loss(), list(self.model.parameters()), allow_unused=True):
            self.note("grad", each)

    def penalty(self) -> None:
        loss = self.loss()
        found = torch.autograd.grad(loss, list(self.model.parameters()), create_graph=True, allow_unused=True)
        (loss + torch.stack([each.square().sum() for each in found if each is not None]).sum()).backward()

    def failing_hook(self) -> None:
        def fail(_: torch.Tensor) -> None:
            raise HookError

        parameter, kind = self.parameter(), self.random.choice(["hook", "post"])
        hook = (parameter.register_hook if kind == "hook" else parameter.register_post_accumulate_grad_hook)(fail)
        try:
            self.loss().backward()
        except HookError:
            self.note("failed", None)
        finally:
            hook.remove()

    def changing_hook(self) -> None:
        hook = self.parameter().register_hook(lambda grad: grad * 2)
        self.loss().backward()
        hook.remove()

    def hook_with_grad(self) -> None:
        def look(_: torch.Tensor) -> None:
            with torch.enable_grad():
                self.note("inner", torch.autograd.grad(self.model.first.square().sum(), self.model.first)[0])

        hook = self.model.twice.register_hook(look)
        self.loss().backward()
        hook.remove()

    def hook_afterwards(self) -> None:
        parameter, kind = self.parameter(), self.random.choice(["clip", "zero", "none", "hold"])

        def change(each: torch.Tensor) -> None:
            assert each.grad is not None
            if kind == "clip":
                each.grad.clamp_(-0.1, 0.1)
            elif kind == "zero":
                each.grad.zero_()
            elif kind == "hold":
                self.held.append(each.grad)
            else:
                each.grad = None

        hook = parameter.register_post_accumulate_grad_hook(change)
        self.loss().backward()
        hook.remove()

    def zero(self) -> None:
        how: Any = self.random.choice([self.model, self.optimizer])
        to_none = self.random.random() < 0.5
        how.zero_grad(set_to_none=to_none)

    def step(self) -> None:
        self.drop_graphs()  # which AdamW refuses
        self.optimizer.step()

    def drop_graphs(self) -> None:
        for each in self.model.parameters():
            if each.grad is not None and each.grad.requires_grad:
                each.grad = each.grad.detach()

    def scaled(self) -> None:
        self.optimizer.zero_grad()
        self.scaler.scale(self.loss()).backward()
        if self.random.random() < 0.5:
            self.scaler.unscale_(self.optimizer)
        if self.random.random() < 0.3:
            parameter = self.parameter()
            if parameter.grad is not None:
                parameter.grad[0] = float("inf")
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.note("scale", torch.tensor(self.scaler.get_scale()))

    def clip(self) -> None:
        most, kind = self.random.choice([0.01, 0.1, 10.0]), self.random.choice(["ours", "ours", "norm", "max", "value"])
        foreach = self.random.choice([None, False, True])
        params = list(self.model.parameters())
        self.drop_graphs()
        if all(each.grad is None for each in params):
            return
        if kind == "value":
            torch.nn.utils.clip_grad_value_(params, most, foreach=foreach)
            return
        norm_type = float("inf") if kind == "max" else 2.0
        if kind == "ours" and self.swapped is not None:
            self.note("norm", self.swapped.clip_grad_norm_(most))
        else:
            self.note("norm", torch.nn.utils.clip_grad_norm_(params, most, norm_type, foreach=foreach))

    def look(self) -> None:
        parameter = self.parameter()
        self.note("look", parameter.grad)
        if parameter.grad is not None:
            self.note("sum", parameter.grad.sum())
            self.note("view", parameter.grad.t()[0] if parameter.grad.dim() == 2 else parameter.grad[1:])

    def hold(self) -> None:
        if len(self.held) > 1:  # views keep their memory, of which there is little
            self.release()
        parameter = self.parameter()
        if parameter.grad is not None:
            how = self.random.choice(["grad", "data", "detach", "view", "half", "t"])
            grad = parameter.grad
            self.held.append(
                {"grad": lambda: grad, "data": lambda: grad.data, "detach": grad.detach, "view": lambda: grad[1:],
                 "half": lambda: grad.to(torch.bfloat16), "t": lambda: grad.t()}[how]()
            )  # fmt: skip

    def release(self) -> None:
        for each in self.held:
            self.note("held", each)
        self.held.clear()

    def write(self) -> None:
        parameter, kind = self.parameter(), self.random.randrange(7)
        if parameter.grad is None:
            return
        with torch.no_grad():
            if kind == 0:
                parameter.grad.mul_(0.5)
            elif kind == 1:
                parameter.grad += 1
            elif kind == 2:
                parameter.grad[0] = 3
            elif kind == 3:
                parameter.grad.data[1:].zero_()
            elif kind == 4:
                parameter.grad.data.zero_()
            elif kind == 5:
                parameter.grad.copy_(torch.ones_like(parameter.grad))
            elif self.held and not self.held[-1].requires_grad:
                self.held[-1].add_(1)

    def assign(self) -> None:
        parameter, other, kind = self.parameter(), self.model.first, self.random.randrange(5)
        if kind == 0:
            parameter.grad = torch.ones_like(parameter)
        elif kind == 1 and parameter.grad is not None:
            parameter.grad = parameter.grad.detach() * 2
        elif kind == 2 and parameter.grad is not None:
            parameter.grad = parameter.grad.detach().clone()
        elif kind == 3 and parameter.dim() == 2 and other.grad is not None:
            parameter.grad = other.grad.detach().t()
        else:
            parameter.grad = None

    def gather(self) -> None:
        some, scale = self.random.sample(list(self.model.parameters()), 2), self.random.choice([1.0, 1.0, 2.0])
        with self.swapped.gathered(some) if self.swapped is not None else contextlib.nullcontext():
            for each in some:
                self.note("gathered", each.grad)
                if each.grad is not None and scale != 1:
                    each.grad.data.mul_(scale)

    def freeze(self) -> None:
        parameter = self.parameter()
        if not parameter.is_leaf:
            return
        parameter.requires_grad_(False)
        self.loss().backward()
        parameter.requires_grad_(True)

    def run(self) -> Seen:
        """Returns all that the program saw."""
        steps: list[tuple[int, Callable[[], None]]] = [
            (8, self.backward), (2, self.backward_twice), (2, self.backward_of_some), (2, self.backward_with_graph),
            (3, self.grad), (2, self.penalty), (3, self.failing_hook), (1, self.changing_hook),
            (1, self.hook_with_grad), (2, self.hook_afterwards), (5, self.zero), (4, self.step), (2, self.scaled),
            (4, self.clip), (4, self.look), (3, self.hold), (2, self.release), (4, self.write), (2, self.assign),
            (2, self.gather), (1, self.freeze),
        ]  # fmt: skip
        with self.undo:
            for number in range(LENGTH):
                step = self.random.choices([each for _, each in steps], [weight for weight, _ in steps])[0]
                self.seen.append((f"{number}: {step.__name__}", None))
                step()
                for name, each in self.model.named_parameters():
                    if number % 3 == 0:
                        self.note(f"{name}.grad", each.grad)
            for name, each in self.model.named_parameters():
                self.note(f"{name}.grad", each.grad)
                self.note(name, each)
            self.release()
            self.held.clear()
        return self.seen


def program(seed: int) -> None:
    """Runs the program of a seed both ways; raises AssertionError where something that it sees differs."""
    with tempfile.TemporaryDirectory(prefix="gradients-") as folder:
        expected = Run(seed, False, Path(folder)).run()
        found = Run(seed, True, Path(folder)).run()
        last = ""
        for (name, one), (other_name, other) in zip(expected, found, strict=True):
            last = name if name[0].isdigit() else last
            assert name == other_name, f"seed {seed}, {last}: {name} or {other_name}"
            if one is None or other is None:
                assert one is other, f"seed {seed}, {last}: {name} is None in one of them"
            else:
                same = torch.equal(one.nan_to_num(), other.nan_to_num()) and torch.equal(one.isnan(), other.isnan())
                assert same, f"seed {seed}, {last}: {name} differs"
                assert one.stride() == other.stride(), f"seed {seed}, {last}: {name} has other strides"
