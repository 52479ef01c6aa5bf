"""Writes random programs: statements of all kinds over the model of ``random_model``."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tests.offload.random_model import Expressions, Statement, model_of


class Writer(Expressions):
    """Writes a program from a seed; runs it on plain torch meanwhile, to know what its names stand for."""

    def __init__(self, capability: str, seed: int, without: Sequence[str] = ()) -> None:
        self.capability, self.without = capability, without
        super().__init__(random.Random(f"{capability} {seed}"), model_of(capability, seed, without))
        self.program: list[Statement] = []

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
            if "folded" not in self.without:
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
        # "lists": Ctrl-C may come between two members
        return f"with torch.no_grad():\n    x = {names}\n    {made}\ndel x", "read" if "see" in made else "lists"

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
        if self.capability == "swap_gradients" and self.rng.random() < 0.25:
            again = "S(*[p.grad for p in m.parameters() if p.grad is not None and p.grad.requires_grad]).backward()"
            return f"{self.rng.choice(losses)}.backward(create_graph=True)\n{again}\nm.zero_grad()", "backward"
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
        return f"m.zero_grad(set_to_none={self.rng.random() < 0.6})", "backward"

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
        chosen = self.rng.choice(kinds)
        in_steps = chosen.startswith(("trunc_normal_", "orthogonal_"))  # of which an interruption leaves some
        return f"nn.init.{chosen}", "many" if in_steps else "write"

    def utility(self) -> Any:
        name = self._new()
        real = "[p for p in m.parameters() if p.dtype == m.up.weight.dtype]"
        kinds = [
            (f"{name} = nn.utils.parameters_to_vector({real})", "read"),
            (f"nn.utils.vector_to_parameters(nn.utils.parameters_to_vector({real}) * 0.5, {real})\n"
             f"for p in {real}: p.data = p.data.clone()  # at an address as others have", "many"),
            ("see(nn.utils.clip_grad_norm_([p for p in m.parameters() if not p.is_complex()], 0.1))", "many"),
            ("nn.utils.clip_grad_value_([p for p in m.parameters() if not p.is_complex()], 0.01)", "many"),
            ("m.requires_grad_()", "many"),
            ("m.train(), m.eval()", "read"),
            ("m.to('cpu')", "read"),
        ]  # fmt: skip
        return self.rng.choice(kinds)

    def toggle(self) -> Any:
        found = self.parameter()
        assert found is not None
        return f"{found[0]}.requires_grad_({self.rng.random() < 0.7})", "write"

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
            f"{name}.grad.data[1:].zero_()",
            f"see({name}.grad.mT, {name}.grad[1:].sum())",
        ]
        if self.capability == "swap_gradients":  # held, while others come
            kinds += [f"{self._new()} = {name}.grad{how}" for how in ("", ".data", ".detach()", "[1:]", ".bfloat16()")]
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
        kinds = ["t_()", "unsqueeze_(0)", "squeeze_()", "transpose_(0, -1)", "resize_(1)", "detach_()"]
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
