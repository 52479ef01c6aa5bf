"""What random programs over streamed mixtures are made of: layers of all kinds, and what users do with these.

Programs call a mixture, change it while it is streamed, derive classes from those of its modules, patch them and hook
them. Each model has classes of its own, so that a patch of one is none of the other.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.offload.models import PACKED, Packed, mixed
from tests.offload.random_model import HookError, Statement, values
from tests.offload.random_statements import WORDS as ALL_WORDS
from tests.offload.random_statements import Writer

WIDTH, WIDE = 32, 64
KINDS = ("eager", "eager", "grouped_mm", "gated", "turned", "packed", "gathered", "halves", "list", "two lists")


class Router(nn.Module):
    """Counts its calls and the load of experts; returns experts and their weights, or scores; may change its input."""

    load: torch.Tensor
    correction: torch.Tensor | None

    def __init__(self, rng: random.Random, count: int, is_pure: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(count, WIDTH))
        self.bias = nn.Parameter(torch.randn(count)) if rng.random() < 0.2 else None
        self.calls, self.in_place = 0, not is_pure
        self.register_buffer("load", torch.zeros(count))
        self.register_buffer("correction", torch.randn(count) if rng.random() < 0.2 else None)

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        scores = nn.functional.linear(x, self.weight, self.bias)
        if self.correction is not None:
            scores = scores.sigmoid() + self.correction
        weights, chosen = scores.topk(2, -1)
        self.load += torch.bincount(chosen.flatten(), minlength=len(self.load))
        if self.in_place:
            x.mul_(1.25)
        return weights.softmax(-1), chosen


class Scores(Router):
    """Returns scores alone."""

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        return nn.functional.linear(x, self.weight, self.bias)


def of_transformers(kind: str, count: int) -> nn.Module:
    """Experts of transformers: loops over them, with a gate of their own, or with transposed weights and a bias."""
    import transformers
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    classes = {"gated": DeepseekV4Experts, "turned": GptOssExperts}
    of: Any = classes.get(kind, Qwen3MoeExperts)
    make = getattr(transformers, of.__name__.replace("Experts", "Config"))
    config = make(hidden_size=WIDTH, hidden_act="silu", num_experts=count, n_routed_experts=count)
    config.num_local_experts, config.moe_intermediate_size, config.intermediate_size = count, WIDE, WIDE
    config._experts_implementation = "grouped_mm" if kind == "grouped_mm" else "eager"
    made: nn.Module = of(config)
    made.config = config
    for param in made.parameters():
        nn.init.normal_(param, std=0.2)
    return made


class Layer(nn.Module):
    """A router and its experts."""

    def __init__(self, kind: str, rng: random.Random) -> None:
        super().__init__()
        self.count = count = rng.choice([4, 8])
        self.kind = kind
        of_scores = rng.random() < 0.4
        self.router: Any = (Scores if of_scores else Router)(rng, count, rng.random() < 0.9)
        experts: Any
        if "list" in kind:
            experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))
            self.second = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count)) if kind == "two lists" else None
        else:
            experts = Packed(kind, count, WIDTH) if kind in PACKED else of_transformers(kind, count)
            experts.__class__ = type("Own", (type(experts),), {})
            self.own: Any = type(experts)
        self.router.__class__ = type("OwnRouter", (type(self.router),), {})
        self.experts = experts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        routed = self.router(x)
        # of as many scores as there are experts: for one that is not there "grouped_mm" returns uninitialised memory
        weights, chosen = routed if isinstance(routed, tuple) else routed[..., : self.count].topk(2, -1)
        if isinstance(self.experts, nn.ModuleList):
            return x + mixed(x, chosen, weights, self._one)
        return x + torch.as_tensor(self.experts(x, chosen, weights.to(x.dtype)))

    def _one(self, number: int, x: torch.Tensor) -> torch.Tensor:
        made = self.experts[number](x).tanh()
        return made if self.second is None else self.second[number](made)


class Mixture(nn.Module):
    """Layers of a kind, sometimes of two; two may share a router."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        rng = random.Random(f"mixture {seed}")
        torch.default_generator.manual_seed(seed)
        kinds = rng.sample(KINDS, 2)
        self.layers = nn.ModuleList(Layer(kinds[rng.random() < 0.15], rng) for _ in range(rng.choice([2, 3, 3])))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 16)
        made: Any = self.layers
        if len({len(layer.router.weight) for layer in made}) == 1 and rng.random() < 0.1:
            made[1].router = made[0].router
        if rng.random() < 0.2:
            self.to(torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return torch.as_tensor(self.head(self.norm(x)))

    def put(self, name: str, seed: int) -> None:
        """Assigns another parameter."""
        module, _, name = name.rpartition(".")
        old = self.get_submodule(module)._parameters[name]
        assert old is not None
        setattr(self.get_submodule(module), name, nn.Parameter(values(seed, *old.shape, dtype=old.dtype) / 8, False))

    def counts(self) -> list[Any]:
        """Returns what the routers have counted."""
        layers: Any = self.layers
        return [count for layer in layers for count in (layer.router.calls, layer.router.load)]


#: Like those of ``random_statements``.
WORDS = {
    "x": """T({seed}, 1, 32, dtype=m.head.weight.dtype) | T({seed}, 1, 32, dtype=m.head.weight.dtype)
        | T({seed}, 1, 32, dtype=m.head.weight.dtype) | T({seed}, 5, 32, dtype=m.head.weight.dtype)
        | T({seed}, 2, 32, dtype=m.head.weight.dtype) | T({seed}, 1, 32, dtype=m.head.weight.dtype) * 0""",
    "l": "m.layers[0] | m.layers[1] | m.layers[-1]",
    "function": """lambda s, *a, f=before: f(s, *a) * 2 | lambda s, *a, f=before: f(s, *a).clamp(-0.1, 0.1)
        | lambda s, x, *a, f=before: f(s, x * 0.5, *a) | lambda s, *a: a[0] * 0.5
        | lambda s, *a, f=before: see(*a) or f(s, *a)""",
    "seen": "lambda a, b, c: see(c) | lambda a, b, c: c * 2 | lambda a, b, c: see(*b) | failing",
    "watched": """{l}.experts | {l}.router | {l}.experts.act_fn | {l}.experts[1] | {l} | m.norm""",
}
#: What is refused in the middle of a call has counted, and nobody knows what: the program ends.
STATEMENTS = {
    "call": (12, "call", """see(m({x})) | see(m({x})) | see(m({x}))\nsee(m({x1}))\nsee(m({x2}))\nsee(m({x3}))
        | with torch.no_grad(): see(m({x}), m({x1}), m({x2}), m({x3})) | with torch.inference_mode(): see(m({x}))"""),
    "part": (2, "call", """see({l}({x})) | see({l}.router({x})) | see({l}.experts[2]({x}))
        | see({l}.experts({x}, I({seed}, 4, len({x}), 2), T(1, len({x}), 2, dtype=m.head.weight.dtype)))"""),
    "otherwise": (2, "call", """with amp(): see(m({x})) | see(copy.deepcopy(m)({x})) | see(copy.deepcopy({l})({x}))
        | see(torch.func.functional_call(m, {{'head.weight': T({seed}, 16, 32, dtype=m.head.weight.dtype)}}, ({x},)))
        | see(torch.func.vmap(m.layers[0].experts[1])({x}))"""),
    "gradient": (3, "call", """x = {x}.requires_grad_()\nm(x).square().sum().backward()\nsee(x.grad)
        | x = {x}.requires_grad_()\ny = x * 1\nfor each in m.layers: y = checkpoint(each, y, use_reentrant=False)
y.square().sum().backward()\nsee(x.grad)
        | x = {x}.requires_grad_()\nsee(*torch.autograd.grad(m(x * 1).sum(), [x]))"""),
    "counts": (4, "read", "see(*m.counts())"),
    "look": (1, "call", "see({p}) | see({p}.sum(-1)) | see(*m.state_dict().values()) | see({l}.router.weight.T)"),
    "weight": (2, "call", """m.put({name}, {seed}) | m.put({name}, {seed}) | {l}.router = copy.deepcopy({l}.router)
        | {l}.experts[1] = nn.Linear(32, 32, dtype=m.head.weight.dtype).requires_grad_(False)
        | {l}.experts = copy.deepcopy({l}.experts) | {l}.experts[0] = {l}.experts[1]
        | {l}.experts.up = nn.Parameter({l}.experts.up.flip(0), False)"""),
    "layers": (0.7, "call", """m.layers[0], m.layers[1] = m.layers[1], m.layers[0] | m.layers.append({l})
        | m.layers[0] = copy.deepcopy({l})"""),
    "class": (2, "call", """before = type({l}.experts).forward
{l}.experts.__class__ = type('C', (type({l}.experts),), dict(forward={function}))
        | before = type({l}.router).forward
{l}.router.__class__ = type('C', (type({l}.router),), dict(forward={function}))"""),
    "class patch": (2, "call", """before = {l}.own.forward\n{l}.own.forward = {function}
        | before = {l}.own._apply_gate\n{l}.own._apply_gate = lambda s, x, f=before: f(s, x) * 2
        | {l}.own._apply_gate = lambda s, x: x.chunk(2, -1)[0] * x.mean()"""),
    "patch": (2, "call", """{l}.experts.forward = lambda *a, f={l}.experts.forward: f(*a) * 2
        | {l}.router.forward = lambda x, f={l}.router.forward: see(x) or f(x)
        | {l}.experts._apply_gate = lambda x: see(x) or x.chunk(2, -1)[1] | {l}.experts.act_fn = nn.Tanh()
        | {l}.experts.act_fn = lambda x: see(x) or x | {l}.experts.act_fn = F.gelu | {l}.experts.scale = 0.5
        | {l}.experts.num_experts = 9 | {l}.experts.is_transposed = True | {l}.experts.has_bias = False"""),
    "implementation": (1, "call", """{l}.experts.config._experts_implementation = 'eager'
        | {l}.experts.config._experts_implementation = 'grouped_mm'
        | {l}.experts.config._experts_implementation = 'batched_mm'"""),
    "hook": (2, "call", """{new} = {watched}.register_forward_hook({seen}) | {hooked}.remove()
        | {new} = {watched}.register_forward_pre_hook(lambda a, b: see(*b))
        | x = torch.nn.modules.module.register_module_forward_hook(lambda a, b, c: see(c))
try: see(m({x}))\nfinally: x.remove()"""),
    "parametrization": (0.7, "call", """parametrize({l}.router, 'weight', nn.Tanh())
        | parametrize({l}.experts, 'down_proj', nn.Tanh()) | parametrize({l}.experts, 'down', nn.Tanh())
        | parametrize({l}.experts[1], 'weight', nn.Tanh())
        | torch.nn.utils.parametrize.remove_parametrizations({l}.router, 'weight')"""),
    "mode": (0.7, "call", "m.eval() | m.train() | m.to('cpu') | {l}.requires_grad_(False) | m.zero_grad()"),
}  # fmt: skip


class MixtureWriter(Writer):
    """Writes programs over a mixture, of statements that torch does not refuse."""

    statements, words = STATEMENTS, {**ALL_WORDS, **WORDS}

    def write(self, count: int) -> list[Statement]:
        """Returns a program of so many statements."""
        self.names["parametrize"] = nn.utils.parametrize.register_parametrization
        self.program = [Statement("parametrize = torch.nn.utils.parametrize.register_parametrization")]
        super().write(count)
        return [*self.program, Statement("see(*m.counts())")]

    def _add(self, code: str, kind: str = "read") -> None:
        torch.default_generator.manual_seed(len(self.program))
        try:
            exec(code, self.names)
        except Exception as error:
            if not isinstance(error, HookError):
                return
        self.program.append(Statement(code, kind))

    def _choose(self, usable: Callable[[torch.Tensor], bool]) -> str:
        return f"m.get_parameter({self._name(None)})"

    def _name(self, _: Any) -> str:
        return repr(self.rng.choice([name for name, _ in self.names["m"].named_parameters()]))
