"""Models of all shapes for the tests of streamed weights, and what is the same about their outputs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import nvme_ops

WIDTH, COUNT = 64, 8  # of mixtures of experts
COMMON: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_experts_per_tok": 3, "pad_token_id": None,
}  # fmt: skip
SHARED = {"moe_intermediate_size": 64, "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 0}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
MODELS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 8},
    "Qwen3Moe": {"moe_intermediate_size": 64, "num_experts": 8, "head_dim": 16},
    "DeepseekV3": {**SHARED, **LATENT, "num_key_value_heads": 4, "n_group": 2, "topk_group": 1},
    "GptOss": {"num_local_experts": 8, "head_dim": 16},
    "Glm4Moe": {**SHARED, "head_dim": 16},
    "Olmoe": {"num_experts": 8},
}


class Tied(nn.Module):
    """An embedding whose weight is the last layer's, as in many language models."""

    def __init__(self, rows: int = 512) -> None:
        super().__init__()
        self.embedding = nn.Embedding(rows, 256)
        self.body = nn.Sequential(*(nn.Linear(256, 256) for _ in range(3)))
        self.head = nn.Linear(256, rows, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.head(self.body(self.embedding(tokens))))


class Experts(nn.Module):
    """Weights of experts in one parameter, of which those that are asked for are used."""

    def __init__(self, count: int = 8) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(count, 256, 256) / 16)

    def forward(self, x: torch.Tensor, chosen: list[int]) -> torch.Tensor:
        for expert in chosen:
            x = nn.functional.linear(x, self.up[expert])
        return x


def layers(count: int = 8, width: int = 256) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(count)))


def nbytes(model: nn.Module) -> int:
    return sum(param.nbytes for param in model.parameters())


def ties(model: nn.Module) -> set[tuple[str, ...]]:
    """The names of each parameter and buffer: several where it is tied."""
    tied: dict[int, list[str]] = {}
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
        tied.setdefault(id(tensor), []).append(name)
    return {tuple(names) for names in tied.values()}


def mixed(x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, one: Callable[..., Any]) -> torch.Tensor:
    """Adds what each expert makes of its tokens, as transformers does."""
    out = torch.zeros_like(x)
    for number in chosen.unique().tolist():
        tokens, places = torch.where(chosen == number)
        out.index_add_(0, tokens, one(number, x[tokens]) * weights[tokens, places, None])
    return out


PACKED = "packed", "gathered", "halves"


class Packed(nn.Module):
    """Experts in two parameters, of PACKED: selected one by one, gathered by a tensor, or used in parts."""

    def __init__(self, kind: str = "packed", count: int = COUNT, width: int = WIDTH) -> None:
        super().__init__()
        self.kind, self.act_fn, self.scale = kind, nn.SiLU(), 1.0
        self.up = nn.Parameter(torch.randn(count, 2 * width, width) / 8)
        self.down = nn.Parameter(torch.randn(count, width, 2 * width) / 8)

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if self.kind == "gathered":
            up, down = self.up[chosen.flatten()], self.down[chosen.flatten()]
            made = self.act_fn(torch.einsum("sd,sud->su", x.repeat_interleave(2, 0), up))
            made = torch.einsum("su,sdu->sd", made, down) * weights.reshape(-1, 1)
            return made.view(len(x), 2, -1).sum(1) * self.scale
        return mixed(x, chosen, weights, self._one) * self.scale

    def _one(self, at: int, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "halves":
            gate, up = self.up[at][: x.shape[1]], self.up[at].chunk(2)[1]
            return (self.act_fn(x @ gate.T) * (x @ up.T)) @ self.down[at][:, : x.shape[1]].T
        return torch.as_tensor(self.act_fn(x @ self.up[at].T) @ self.down[at].T)


class Router(nn.Module):
    """Returns experts and their weights, or their scores."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.weight, self.kind, self.calls = nn.Parameter(torch.randn(COUNT, WIDTH)), kind, 0

    def forward(self, x: torch.Tensor, *more: bool) -> Any:
        self.calls += 1
        return x @ self.weight.T if self.kind in ("scores", "sizes") else best(x @ self.weight.T)


def best(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weights, chosen = scores.topk(2, -1)
    return weights.softmax(-1), chosen


class Block(nn.Module):
    """A layer of a mixture of some kind, which changes what the next one sees by ``change``."""

    def __init__(self, kind: str, change: float) -> None:
        super().__init__()
        self.kind, self.change = kind, change
        widths = [2 * WIDTH + 32 * number * (kind == "sizes") for number in range(COUNT)]
        lists = (nn.Sequential(nn.Linear(WIDTH, wide), nn.ReLU(), nn.Linear(wide, WIDTH)) for wide in widths)
        self.experts: Any = Packed(kind) if kind in PACKED else nn.ModuleList(lists)
        if kind == "parameter":
            self.router: Any = nn.Parameter(torch.randn(COUNT, WIDTH))
        elif kind != "none":
            self.router = Router(kind)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "parameter":
            routed: Any = x @ self.router.T
        else:
            routed = x[:, :COUNT] if self.kind == "none" else self.router(x, True)
        weights, chosen = best(routed) if isinstance(routed, torch.Tensor) else routed
        if isinstance(self.experts, Packed):
            return x + self.change * torch.as_tensor(self.experts(x, chosen, weights))
        return x + self.change * mixed(x, chosen, weights, lambda number, part: self.experts[number](part))


def mixture(kind: str, change: float = 1.0) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(Block(kind, change) for _ in range(3))).eval().requires_grad_(False)


def saved(folder: Path, name: str) -> tuple[Path, Any]:
    """Saves a model and returns its class, too. In float32 the last bits depend on where weights are in memory."""
    transformers: Any = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    kind = getattr(transformers, f"{name}ForCausalLM")
    torch.manual_seed(1)
    model = kind(getattr(transformers, f"{name}Config")(**{**COMMON, **MODELS[name]})).bfloat16()
    with torch.no_grad():
        for param in model.parameters():
            param.normal_(0, 0.2)  # which routes tokens to different experts
    model.save_pretrained(folder / name)
    return folder / name, kind


#: Of a name and its values: what is written in their place, by name, and what that stands for; None leaves them.
Change = Callable[[str, torch.Tensor], tuple[dict[str, torch.Tensor], torch.Tensor] | None]


def rewritten(path: Path, change: Change, settings: Any = None) -> Path:
    """Changes tensors in the file of a model; returns a folder with a model of what they stand for."""
    shutil.copytree(path, plain := path / "plain")
    written, meant = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for name, value in nvme_ops.load(path / "model.safetensors", map_location=torch.empty(0).device).items():
        new, meant[name] = change(name, value) or ({name: value}, value)
        written |= {key: tensor.clone() for key, tensor in new.items()}
    for folder, tensors in ((path, written), (plain, meant)):
        nvme_ops.save(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if settings is not None:
        document = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**document, "quantization_config": settings}))
    return plain
