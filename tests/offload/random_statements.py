"""Writes random programs: statements of all kinds over the model of ``random_model``, from tables of phrases.

Phrases are separated by `` | ``. A name in braces is a word that is chosen once for each statement: a tensor and what
goes with it, or one of the phrases of ``WORDS``; with a number behind it, another one of the same kind.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from tests.offload.random_model import Statement, namespace

#: By dimensions of a tensor, ``+`` for any: what is computed with it.
VALUES = {  # each operation: test_operations.py
    "": """{t} * {same} | {t} + {same} | torch.where({same}.abs() > 0.5, {t}, {same}) | torch.sin({t})
        | torch.clone({t}) | torch.sum({t}) | {t}.to(torch.float32).relu() | ({t} * {t}) | {t}[{same}.abs() > 0.7]""",
    "+": """{t}[{at}] | torch.cat([{t}, {t}]) | torch.stack([{t}, {same}]) | {t}.cumsum(0) | {t}.sum(-1)
        | {t}.softmax(-1) | {t}.sort(0).values | torch.cat([{t}.flip(0), {t}]).repeat(2)""",
    "2": """F.linear(T({seed}, 3, {columns}, dtype={dtype}), {t}) | {t} @ T({seed}, 3, {columns}, dtype={dtype}).mT
        | {t}.mT @ {t} | F.embedding(I({seed}, {rows}, 6), {t}) | {folded}
        | torch.addmm(T({seed}, {columns}, dtype={dtype}), T({seed}, 2, {rows}, dtype={dtype}), {t})""",
    "3": "torch.bmm({t}, {t}.mT) | F.conv1d(T({seed}, 2, {columns}, 30, dtype={dtype}), {t})",
    "4": "F.conv2d(T({seed}, 2, {columns}, 6, 6, dtype={dtype}), {t})",
}
#: What changes it.
CHANGES = {
    "": """{t}.add_(1) | {t}.mul_(0.5) | {t}.zero_() | {t}.fill_(0.25) | {t}.copy_({same}) | {t}.add_({same}, alpha=2)
        | {t}.masked_fill_({same}.abs() > 0.5, 2) | {t}.addcmul_({same}, {same}) | {t}.add_({t}) | {t}.mul_({t})
        | {t}.normal_(generator=G({seed})) | {t}.clamp_(-1, 1) | {t}[...] = 0.5 | {t}[{same}.abs() > 0.5] = 0.1""",
    "+": """{t}[{row}] = 0.5 | {t}[{row}].mul_(2) | {t}.view(-1)[{row}:] = 1 | {t}[0] += 1 | {t}[..., -1].fill_(3)
        | {t}.index_add_(0, {at}, {some}) | {t}[{at}] = {some} | {t}.index_put_(({at},), {some}, accumulate=True)""",
    "2": """{t}.t()[0].mul_(3) | {t}.diagonal().fill_(1) | {t}.mT[0] = 7 | {t}.unbind(1)[0].zero_()
        | {t}.addmm_(T(1, {rows}, 2, dtype={dtype}), T(2, 2, {columns}, dtype={dtype})) | {t}.view(-1)[::2].add_(1)
        | {t}.copy_({same}.t().contiguous().t())""",
}
#: Views of it.
VIEWS = {
    "": """{t}.detach() | {t}.unsqueeze(0) | {t}.view(-1) | {t}.reshape(-1) | {t}.view_as({t}) | {t}[...] | {t}.real
        | {t}.imag | {t}.conj() | {t}.mH | torch.view_as_real({t}) | {t}.detach().view(torch.int32)""",
    "+": """{t}[{row}] | {t}[{row}:] | {t}[::2] | {t}[-1] | {t}[..., 0] | {t}[..., ::3] | {t}.select(-1, -1)
        | {t}.narrow(-1, 1, 2) | {t}.unbind(-1)[1] | {t}.split(5, -1)[-1] | {t}.chunk(3)[0] | {t}.unfold(-1, 4, 2)
        | {t}.expand(2, *{t}.shape) | {t}.split_with_sizes([1, {t}.shape[-1] - 1], -1)[1]""",
    "2": """{t}.mT | {t}.t() | {t}.diagonal() | {t}.view({columns}, -1) | {t}.swapaxes(0, 1)
        | {t}.as_strided((3, {columns}), {t}.stride(), 0)""",
    "3": "{t}.transpose(0, -1) | {t}.permute(2, 0, 1) | {t}.movedim(0, 1) | {t}.unflatten(0, (-1, 1)) | {t}.squeeze()",
    "4": "{t}.transpose(0, -1) | {t}.permute(2, 0, 3, 1) | {t}.movedim(0, 1) | {t}.squeeze()",
}
WORDS = {
    "to": """.to(torch.bfloat16) | .double() | .half() | .float() | .clone() | .contiguous() | .type(torch.float64)
        | .to(torch.float32, copy=True) | .double().detach() | .data.half() | .to(torch.bfloat16).mT
        | .type_as(T(1, dtype=torch.bfloat16)) | .to('cpu')""",
    "words": "I({seed}, m.rows, 2, 5) | I({seed}, m.rows, 1, 5)",
    "forward": "m({words}) | m.down(F.gelu(m.up(m.emb({words})))) | m.head(m.norm(m.emb({words})))",
    "made": "S({forward}, {value}) | S({forward}) | S({value}) | S({value1}, {value2})",
    "hook": "lambda g: see(g) | lambda g: g * 2 | failing | lambda g: g.clamp(-0.1, 0.1)",
    "layer": "m.up | m.head | m.down",
    "list": """torch._foreach_add_(x, 1) | torch._foreach_zero_(x) | torch._foreach_mul_(x, [2.0] * len(x))
        | torch._foreach_copy_(x, [T({seed}, *each.shape, dtype=each.dtype) for each in x]) | torch._foreach_sqrt_(x)
        | torch._foreach_lerp_(x, [T({seed}, *each.shape, dtype=each.dtype) for each in x], 0.5)
        | torch._foreach_addcmul_(x, x, x) | torch._foreach_add_(x, x, alpha=2)
        | see(*torch._foreach_add(x, 1)) | see(*torch._foreach_norm(x)) | see(*torch._foreach_mul(x, x))""",
    "optimizer": """SGD(m.parameters(), lr=0.1, foreach=True) | SGD(m.parameters(), lr=0.1, momentum=0.9, foreach=False)
        | AdamW(m.parameters(), foreach=True) | RMSprop(m.parameters())""",
    "real": "[p for p in m.parameters() if p.dtype == m.up.weight.dtype]",
    "clipped": "[p for p in m.parameters() if not p.is_complex()]",
}
#: Statements: how often each is written, what an exception leaves behind, and phrases; ``&&`` is between two.
STATEMENTS: dict[str, tuple[float, str, str]] = {
    "view": (3, "read", "{new} = {view}"),
    "value": (3, "read", "{new} = {value}"),
    "convert": (4, "read", "{new} = {t}{to} | {new} = {t}.mT{to}"),
    "change": (6, "write", "with torch.no_grad(): {change} | with torch.no_grad(): {change} | {change}"),
    "foreach": (1.5, "lists", """with torch.no_grad():\n    x = [{p1}, {p2}, {p3}]\n    {list}\ndel x
        | with torch.no_grad():\n    x = [{t1}, {t2}]\n    {list}\ndel x
        | with torch.no_grad():\n    x = [{t}]\n    {list}\ndel x"""),
    "loss": (4, "read", "{saving}{new} = {made}"),
    "loss under autocast": (0.7, "read", "with amp(), saving: {new} = {made}"),
    "backward": (3, "backward", "{loss}.backward() | {loss}.backward() | {loss}.backward(retain_graph=True)"),
    "between": (2, "write backward", "with torch.no_grad(): {change} && {loss}.backward()"),
    "between lists": (1, "read lists backward", """{new} = S({forward})
        && with torch.no_grad(): torch._foreach_mul_([{p1}, {p2}], 0.5) && {new}.backward()"""),
    "copied": (2, "read write read", "{new} = {p}{to} && with torch.no_grad(): {p}.mul_(0.5) && see({new})"),
    "zeroed": (1, "backward backward read", "{made}.backward() && m.zero_grad(set_to_none=False) && see({p}.grad)"),
    "held": (2, "backward read backward read", """S(m({words})).backward() && {new} = m.up.weight.grad[1:].half()
        && m.up.weight.grad.zero_() && see({new}) | S(m({words})).backward() && {new} = m.up.weight.grad[1:]
        && m.zero_grad(set_to_none=False) && see({new}, m.up.weight.grad)"""),
    "create_graph": (0.7, "backward", "{loss}.backward(create_graph=True)\n"
        "S(*[p.grad for p in m.parameters() if p.grad is not None and p.grad.requires_grad]).backward()\n"
        "m.zero_grad()"),
    "gradient": (1.5, "backward", """see(*torch.autograd.grad({loss}, [{q1}, {q2}], allow_unused=True))
        | see(*torch.autograd.grad({loss}, [{q}], allow_unused=True, retain_graph=True))"""),
    "twice": (1, "backward", """{saving}l = {made}\n{saving}g = torch.autograd.grad(l, [{q1}, {q2}], create_graph=True,
    allow_unused=True)\nsee(*g)\nS(*g).backward()\ndel g, l
        | {saving}l = {made}\n{saving}g = torch.autograd.grad(l, [{q1}], create_graph=True, allow_unused=True)
see(*torch.autograd.grad(S(*g), [{q2}], allow_unused=True))\ndel g, l"""),
    "zero": (0.7, "backward", "m.zero_grad() | m.zero_grad(set_to_none=False)"),
    "look": (4, "read", "see({t}) | see({p}.grad)"),
    "hook": (1, "read", """{new} = {layer}.register_forward_hook(lambda a, b, c: see(c)) | {hooked}.remove()
        | {new} = {layer}.register_full_backward_hook(lambda a, b, c: see(*c)) | {hooked}.remove()
        | {new} = {layer}.register_forward_pre_hook(lambda a, b: see(a.weight)) | {new} = {q}.register_hook({hook})
        | {new} = {layer}.register_forward_hook(lambda a, b, c: c * 2) | {new} = m.down.register_forward_hook(failing)
        | {new} = {q}.register_post_accumulate_grad_hook(lambda p: see(p.grad))
        | {new} = {q}.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(2))
        | {new} = {q}.register_post_accumulate_grad_hook(failing)"""),
    "again": (0.7, "read", """{saving}{new} = S(checkpoint(m, {words}, use_reentrant=False))
        | {saving}{new} = S(checkpoint(lambda x: m.down(F.gelu(m.up(x))),
    T({seed}, 2, 32, dtype=m.up.weight.dtype).requires_grad_(), use_reentrant=True))"""),
    "optimizer": (0.5, "read", "{new} = torch.optim.{optimizer}"),
    "train": (1, "many", "{trained}.step()"),
    "states": (1, "read", """{new} = m.state_dict() | {new} = through_file(m.state_dict())
        | see(*m.state_dict().values())
        | {new} = copy.deepcopy(m.state_dict()) | see(*copy.deepcopy(m).parameters()) | see(copy.deepcopy(m)({words}))
        | see(*pickle.loads(pickle.dumps(dict(m.named_parameters()))).values())
        | {new} = {{key: value + 1 for key, value in m.state_dict().items()}} | see(*{state}.values())
        | del {state}"""),
    "load": (0.4, "many", "m.load_state_dict({state})"),
    "data": (1, "write", """{p}.data = {psame} | {p}.data = {p}.data * 2 | {p}.data = {p}.data.clone()
        | {p}.data = {p}.detach() | {p}.data = {p}.data[...] | {p}.requires_grad_() | {p}.requires_grad_(False)"""),
    "init": (0.5, "write", "nn.init.uniform_({p}, generator=G({seed})) | nn.init.constant_({p}, 0.3)"),
    "utility": (0.7, "many", """nn.utils.vector_to_parameters(nn.utils.parameters_to_vector({real}) * 0.5, {real})
for p in {real}: p.data = p.data.clone()  # at an address as others have
        | see(nn.utils.clip_grad_norm_({clipped}, 0.1)) | nn.utils.clip_grad_value_({clipped}, 0.01)
        | m.requires_grad_() | nn.init.orthogonal_({p}, generator=G({seed}))"""),
    "module": (0.3, "read", "{new} = nn.utils.parameters_to_vector({real}) | m.train(), m.eval() | m.to('cpu')"),
    "threads": (0.7, "read", """see(*in_threads(lambda i: m(I({seed} + i, m.rows, 2, 5)), 3))
        | see(*in_threads(lambda i: torch.autograd.grad(S(m({words}), m.up.weight), m.up.weight)[0], 2))
        | see(*in_threads(lambda i: [{value1}, {value2}][i], 2))
        | see(*in_threads(lambda i: list(m.parameters())[i].double(), 3))"""),
    "threads backward": (0.2, "backward",
        "m.zero_grad()\nin_threads(lambda i: S(m(I(i, m.rows, 2, 5))).backward(), 2)"),
    "set_gradient": (0.7, "read", """{p}.grad = {psame} | {p}.grad = None | {p}.grad.mul_(2)
        | {p}.grad = {p}.detach().clone()
        | {p}.grad.data[1:].zero_() | see({p}.grad.mT, {p}.grad[1:].sum())"""),
    "hold": (0.4, "read", """{new} = {p}.grad | {new} = {p}.grad.data | {new} = {p}.grad.detach() | {new} = {p}.grad[1:]
        | {new} = {p}.grad.bfloat16()"""),
    "door": (0.5, "write", """see(torch.from_numpy({t}.detach().numpy().copy())) | {t}.detach().numpy()[...] = 1
        | {new} = float({t}.detach().abs().sum()) | see(through_file({t}.detach())) | {t}.detach().set_(T(3, 5))
        | {new} = pickle.loads(pickle.dumps({t}.detach())) | see({t}.detach().is_contiguous(), {t}.stride())
        | {new} = torch.empty_like({t}).copy_({t}) | {new} = nn.Parameter({t}.detach())"""),
    "functional": (0.5, "read", """see(torch.func.functional_call(m, {{'up.weight': m.up.weight * 2}}, ({words},)))
        | see(torch.func.functional_call(m, {{k: v.detach() for k, v in m.named_parameters()}}, ({words},)))
        | see(torch.func.grad(lambda w: S(F.linear(T(1, 2, 32, dtype=w.dtype), w)))(m.up.weight))
        | see(torch.func.vmap(lambda x: F.linear(x, m.up.weight))(T(1, 3, 2, 32, dtype=m.up.weight.dtype)))
        | see(torch.func.jvp(lambda w: w.sin(), (m.up.weight,), (m.up.weight,))[1])
        | see(torch.func.vmap(lambda w: w.sum())(m.up.weight))
        | see(torch.autograd.functional.jacobian(lambda w: w.sum(0)[:2], m.up.weight))"""),
    "amp": (1, "many", """with amp(), saving:\n    a = {layer}({given})\n    {change}\n    b = {layer}({given} * 2)
S(a, b).backward()\ndel a, b
        | with amp(), saving:\n    a = {layer}({given})\n    b = {layer}({given} * 2)\n{new} = S(a, b)\ndel a, b"""),
}  # fmt: skip
#: Statements for one capability alone.
ONLY = dict.fromkeys(("create_graph", "hold", "held", "zeroed"), "swap_gradients")


def phrases(text: str) -> list[str]:
    """Returns the phrases of a table."""
    return [phrase.strip() for phrase in text.split(" | ")]


class Words(dict[str, str]):
    """The words of a statement, each made when it is first met."""

    def __init__(self, writer: Writer, **words: str) -> None:
        super().__init__(words)
        self._writer = writer

    def __missing__(self, name: str) -> str:
        self[name] = made = self.make(name.rstrip("0123456789"))
        return made

    def make(self, kind: str) -> str:
        """Returns a new word of a kind."""
        if kind in self._writer.words:
            return self._writer.rng.choice(phrases(self._writer.words[kind])).format_map(self)
        return MADE[kind](self._writer, self) if kind in MADE else str(getattr(self._writer, f"_{kind}")(self))


class Writer:
    """Writes a program from a seed; runs it on plain torch meanwhile, to know what its names stand for."""

    statements, words = STATEMENTS, WORDS

    def __init__(self, capability: str, seed: int, model: nn.Module, without: Sequence[str] = ()) -> None:
        self.capability, self.without = capability, without
        self.rng, self.number = random.Random(f"{capability} {seed}"), 0
        self.names = namespace(model, lambda *_: None, contextlib.nullcontext())
        self.program: list[Statement] = []

    def write(self, count: int) -> list[Statement]:
        """Returns a program of so many statements."""
        usable = {
            name: entry for name, entry in self.statements.items() if ONLY.get(name, self.capability) == self.capability
        }
        while len(self.program) < count:
            _, kind, text = self.rng.choices(list(usable.values()), [weight for weight, *_ in usable.values()])[0]
            with contextlib.suppress(IndexError):  # there is nothing of a kind that it needs
                made = self.rng.choice(phrases(text)).format_map(Words(self))
                for part, its in zip(made.split("&& "), kind.split(), strict=True):
                    self._add(part.strip(), its)
            if len(known := self._known(torch.Tensor)) > 9 and self.rng.random() < 0.7:
                self._add(f"del {self.rng.choice(known)}")
        return self.program

    def _add(self, code: str, kind: str = "read") -> None:
        self.program.append(Statement(code, kind))
        torch.default_generator.manual_seed(len(self.program))
        with contextlib.suppress(Exception):
            exec(code, self.names)

    def _known(self, kind: type) -> list[str]:
        """Names of this program for what is of a class."""
        return [name for name, value in self.names.items() if name[0] == "v" and isinstance(value, kind)]

    def _of(self, table: dict[str, str], t: str, words: Words) -> str:
        """One of the phrases of a table for a tensor of as many dimensions."""
        dim = self._value_of(t).dim()
        texts = phrases(table[""]) + (phrases(table["+"]) if dim else []) + 3 * phrases(table.get(str(dim), table[""]))
        return self.rng.choice(texts).format_map(words)

    def _value_of(self, name: str) -> Any:
        return eval(name, self.names)

    def _choose(self, usable: Callable[[torch.Tensor], bool]) -> str:
        named = self.names["m"].named_parameters(remove_duplicate=False)
        return self.rng.choice([f"m.{name}" for name, param in named if usable(param)])

    def _like(self, name: str, first: int | None = None) -> str:
        """A tensor of the same shape, or of another first dimension."""
        value = self._value_of(name)
        shape = tuple(value.shape) if first is None else (first, *value.shape[1:])
        return f"T({', '.join(map(str, (self.rng.randrange(1000), *shape)))}, dtype={value.dtype})"

    def _made(self, table: dict[str, str]) -> str:
        words = Words(self)
        return self._of(table, words["t"], words)

    # Words: those of three lines or more

    def _new(self, _: Words) -> str:
        self.number += 1
        return f"v{self.number}"

    def _t(self, words: Words) -> str:
        """A parameter, a variable, or a view of one."""
        chance, variables = self.rng.random(), self._known(torch.Tensor)
        if variables and chance < 0.35:
            name = self.rng.choice(variables)
        elif chance < 0.4:
            name = "m.buffer"
        else:
            name = words.make("p") + self.rng.choice(["", "", "", "", "", "", "", "", ".data", ".detach()"])
        return self._seen_through(name) if self.rng.random() < 0.35 else name

    def _seen_through(self, name: str) -> str:
        """A view of a tensor."""
        for _ in range(4):
            words = Words(self, t=name)
            with contextlib.suppress(Exception):  # torch does not make such a view of it
                made = self._of(VIEWS, name, words)
                self._value_of(made)
                return made
        return name

    def _given(self, words: Words) -> str:
        weight = self._value_of(f"{words['layer']}.weight")
        return f"T({words.make('seed')}, 2, {weight.shape[1]}, dtype={weight.dtype})"

    def _folded(self, words: Words) -> str:
        """What torch folds where the weight takes no gradient."""
        if "folded" in self.without:
            return words["t"]
        return f"F.linear(T({words.make('seed')}, 2, {words['columns']}, 3, dtype={words['dtype']}).mT, {words['t']})"

    def _loss(self, _: Words) -> str:
        known = [(name, self.names[name]) for name in self._known(torch.Tensor)]
        return self.rng.choice([name for name, value in known if not value.dim() and value.requires_grad])

    def _saving(self, _: Words) -> str:
        return "with saving: " if self.capability in ("save_on_nvme", "one_memory") and self.rng.random() < 0.8 else ""


#: The other words.
MADE: dict[str, Callable[[Any, Words], str]] = {
    "seed": lambda by, _: str(by.rng.randrange(1000)),
    "p": lambda by, _: by._choose(lambda _: True),
    "q": lambda by, _: by._choose(lambda param: param.requires_grad),
    "view": lambda by, words: by._seen_through(words["t"]),
    "value": lambda by, _: by._made(VALUES),
    "change": lambda by, _: by._made(CHANGES),
    "same": lambda by, words: by._like(words["t"]),
    "psame": lambda by, words: by._like(words["p"]),
    "some": lambda by, words: by._like(words["t"], 2),
    "dtype": lambda by, words: str(by._value_of(words["t"]).dtype),
    "rows": lambda by, words: str(max([1, *by._value_of(words["t"]).shape[:1]])),
    "columns": lambda by, words: str(by._value_of(words["t"]).shape[1]),
    "row": lambda by, words: str(by.rng.randrange(int(words.make("rows")))),
    "at": lambda by, words: f"I({words.make('seed')}, {words.make('rows')}, 2)",
    "hooked": lambda by, _: by.rng.choice(by._known(torch.utils.hooks.RemovableHandle)),
    "trained": lambda by, _: by.rng.choice(by._known(torch.optim.Optimizer)),
    "state": lambda by, _: by.rng.choice(by._known(dict)),
}
