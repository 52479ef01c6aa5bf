"""Mixtures of experts: bits as in memory, each expert read once, those used often stay, and guesses are accounted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nvme_ops.offload import NvmeCache, from_pretrained, stream_weights
from nvme_ops.offload.weights.experts import Experts
from tests.conftest import KIB

COMMON: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_experts_per_tok": 2, "pad_token_id": None,
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
#: How many reads an expert takes, where its matrices are no neighbours in the file.
READS = {"GptOss": 2, "Mixtral": 3}


@pytest.fixture(autouse=True)
def _alone(one_thread: None) -> None:
    """The bits of a product depend on the number of threads."""


def saved(folder: Path, name: str) -> tuple[Path, Any]:
    """Saves a model, aligned as in memory, where the last bits of a product depend on that; returns its class, too."""
    transformers: Any = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    kind = getattr(transformers, f"{name}ForCausalLM")
    torch.manual_seed(1)
    model = kind(getattr(transformers, f"{name}Config")(**{**COMMON, **MODELS[name]}))
    with torch.no_grad():
        for each in model.parameters():
            each.normal_(0, 0.2)  # which routes tokens to different experts
    model.save_pretrained(folder / name)
    content = (folder / name / "model.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    text = content[8 : 8 + length] + b" " * (-(8 + length) % 64)
    (folder / name / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    return folder / name, kind


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_of_transformers_models_are_those_in_memory(name: str, implementation: str, folder: Path) -> None:
    path, kind = saved(folder, name)
    plain = kind.from_pretrained(path, experts_implementation=implementation).eval()
    budget = sum(each.nbytes for each in plain.parameters()) // 2
    options: Any = {} if implementation == "eager" else {"experts_implementation": implementation}
    usual: Any = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}
    usual |= {"return_dict_in_generate": True, "output_logits": True}
    for batch, mode in ((1, torch.no_grad), (32, torch.inference_mode)):
        tokens = torch.randint(0, 256, (batch, 7), generator=torch.Generator().manual_seed(batch))
        wanted = plain.generate(tokens, **usual)
        with from_pretrained(path, memory_budget=budget, **options) as model, mode(), NvmeCache(folder, "4M") as cache:
            experts = model._nvme_window.experts
            assert {len(each.reads) for each in experts.groups[0]} == {READS.get(name, 1)}
            for given in ({}, {"cache": cache}):
                found = model.generate(tokens, **usual, **given)
                assert all(map(torch.equal, found.logits, wanted.logits))
            assert model.stats().peak_bytes <= budget
            computed = [each._nvme_computed for each in model.modules() if hasattr(each, "_nvme_computed")]
            same = list(computed[0]._same.values())
            assert all(same) and bool(same) == (implementation == "eager"), "computed as they arrive"
            assert (model._nvme_window.experts is experts) is (implementation != "grouped_mm")


# Mixtures written by hand

WIDTH, COUNT = 64, 8
X = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(3))


class Packed(nn.Module):
    """Experts in two parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(COUNT, 2 * WIDTH, WIDTH) / 8)
        self.down = nn.Parameter(torch.randn(COUNT, WIDTH, 2 * WIDTH) / 8)

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for number in chosen.unique().tolist():
            tokens, places = torch.where(chosen == number)
            made = (x[tokens] @ self.up[number].T).relu() @ self.down[number].T
            out.index_add_(0, tokens, made * weights[tokens, places, None])
        return out


class Gathered(Packed):
    """The same, gathered by a tensor."""

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        up, down = self.up[chosen.flatten()], self.down[chosen.flatten()]
        made = torch.einsum("sd,sud->su", x.repeat_interleave(2, 0), up).relu()
        made = torch.einsum("su,sdu->sd", made, down) * weights.reshape(-1, 1)
        return made.view(len(x), 2, WIDTH).sum(1)


class Listed(nn.ModuleList):
    """Experts in modules, of several sizes if asked for."""

    def __init__(self, more: int = 0) -> None:
        widths = [2 * WIDTH + more * number for number in range(COUNT)]
        super().__init__(nn.Sequential(nn.Linear(WIDTH, wide), nn.ReLU(), nn.Linear(wide, WIDTH)) for wide in widths)


class Router(nn.Module):
    """Returns experts and their weights, or with ``scores`` these alone; ``strict`` has it want a second argument."""

    def __init__(self, scores: bool = False, strict: bool = False) -> None:
        super().__init__()
        self.weight, self.scores, self.strict, self.calls = nn.Parameter(torch.randn(COUNT, WIDTH)), scores, strict, 0

    def forward(self, x: torch.Tensor, given: bool = False) -> Any:
        self.calls += 1
        if self.strict and not given:
            raise TypeError("one argument more")
        scores = x @ self.weight.T
        return scores if self.scores else best(scores)


def best(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weights, chosen = scores.topk(2, -1)
    return weights.softmax(-1), chosen


class Block(nn.Module):
    """A layer of a mixture. ``change`` says how much it changes what the next one sees."""

    def __init__(self, kind: str, change: float = 1.0) -> None:
        super().__init__()
        self.kind, self.change = kind, change
        kinds: dict[str, Callable[[], nn.Module]] = {"sizes": lambda: Listed(32), "packed": Packed, "strict": Packed}
        self.experts: Any = {**kinds, "gathered": Gathered}.get(kind, Listed)()
        if kind == "parameter":
            self.router: Any = nn.Parameter(torch.randn(COUNT, WIDTH))
        elif kind != "none":
            self.router = Router(kind in ("scores", "sizes"), kind == "strict")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "none":
            found: Any = x[:, :COUNT]
        elif self.kind == "parameter":
            found = x @ self.router.T
        else:
            found = self.router(x, True)
        weights, chosen = best(found) if isinstance(found, torch.Tensor) else found
        if not isinstance(self.experts, nn.ModuleList):
            return x + self.change * torch.as_tensor(self.experts(x, chosen, weights))
        out = torch.zeros_like(x)
        for number in chosen.unique().tolist():
            tokens, places = torch.where(chosen == number)
            out.index_add_(0, tokens, self.experts[number](x[tokens]) * weights[tokens, places, None])
        return x + self.change * out


def mixture(kind: str, change: float = 1.0) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(Block(kind, change) for _ in range(3))).eval().requires_grad_(False)


@pytest.mark.parametrize("kind", ["packed", "gathered", "scores", "sizes", "indices", "parameter", "none"])
@torch.no_grad()
def test_mixtures_of_any_kind_have_the_bits_in_memory_and_read_what_is_used(kind: str, folder: Path) -> None:
    plain = mixture(kind)
    size = sum(each.nbytes for each in plain.parameters())
    with stream_weights(mixture(kind), folder, memory_budget=size // 2) as model:
        for batch in (32, 1, 2, 1, 32):
            assert torch.equal(model(X[:batch]), plain(X[:batch]))
        before = model.stats()
        for number in range(12):
            assert torch.equal(model(X[number : number + 1]), plain(X[number : number + 1]))
        stats = model.stats()
        assert stats.peak_bytes <= size // 2
        if kind == "none":
            assert stats.experts_used == 0, "read in the order foreseen"
            return
        used = stats.experts_used - before.experts_used
        assert used == 12 * 3 * 2
        read = used - (stats.expert_hits - before.expert_hits)
        if kind != "sizes":  # neither is anything else read
            wrong = stats.bytes_guessed_wrong - before.bytes_guessed_wrong
            assert stats.bytes_read - before.bytes_read <= read * 18 * 4 * KIB + wrong


@torch.no_grad()
def test_the_least_budget_is_named_and_any_above_it_works(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Experts, "patience", 1.0)
    wanted = mixture("packed")(X)
    with pytest.raises(ValueError, match="at least 32 KiB are needed"):
        stream_weights(mixture("packed"), folder, memory_budget=32 * KIB - 1)
    for budget in (32, 72, 96, 136, 140):  # 72: memory for one expert
        with stream_weights(mixture("packed"), folder, memory_budget=budget * KIB) as model:
            assert torch.equal(model(X), wanted)
            assert torch.equal(model(X), wanted)
            assert model.stats().peak_bytes <= budget * KIB
            assert (model.stats().experts_used > 0) is (budget > 64)
