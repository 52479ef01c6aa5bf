"""Modules that ``swap_params`` finds on the meta device: all of their tensors get the values that torch gives them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nvme_ops.offload import swap_params
from tests.offload.training import KIB, equal, values

SIZES = {
    "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "head_dim": 8,
}  # fmt: skip
MIXTURE = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
LATENT = {
    "num_key_value_heads": 4, "n_routed_experts": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8, "v_head_dim": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
LINEAR = {
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
ENCODER_DECODER = {
    "d_model": 32, "d_ff": 48, "d_kv": 8, "num_layers": 2, "num_heads": 4, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
}  # fmt: skip
SHORT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 4}
# by model_type of transformers: how it is made smaller than by SIZES
FAMILIES: dict[str, dict[str, Any]] = {
    "afmoe": MIXTURE, "bamba": {"attn_layer_indices": [1], "mamba_d_state": 8, "mamba_n_heads": 8},
    "bart": ENCODER_DECODER,
    "bert": {}, "bloom": {"n_layer": 2, "n_head": 4}, "codegen": {**SHORT, "n_ctx": 64}, "deepseek_v3": LATENT,
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24}, "starcoder2": {},
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_state": 8}, "flex_olmo": {"num_experts": 4},
    "gemma3_text": {"sliding_window": 8}, "glm4_moe": {**MIXTURE, "n_routed_experts": 4}, "gpt2": SHORT,
    "gpt_oss": {"num_local_experts": 4}, "gptj": SHORT, "granitemoe": {"num_local_experts": 4},
    "jamba": {"num_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8}, "llama": {},
    "lfm2_moe": {**MIXTURE, "layer_types": ["conv", "full_attention"]}, "olmoe": {"num_experts": 4},
    "mamba": {"state_size": 8}, "mamba2": {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 2},
    "mixtral": {"num_local_experts": 4}, "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2}, "olmo3": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32}, "phimoe": {"num_local_experts": 4}, "qwen2": {},
    "qwen3_next": {**MIXTURE, **LINEAR, "shared_expert_intermediate_size": 24},
    "recurrent_gemma": {"num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 16},
    "rwkv": {"attention_hidden_size": 32, "context_length": 64}, "t5": ENCODER_DECODER,
    "xglm": {"d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4},
}  # fmt: skip


def made(family: str) -> Any:
    """Returns a small model of a family on the meta device."""
    transformers: Any = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family]}, tie_word_embeddings=True)
    auto = "AutoModelForSeq2SeqLM" if FAMILIES[family] is ENCODER_DECODER else "AutoModelForCausalLM"
    with torch.device("meta"):
        return getattr(transformers, "AutoModelForPreTraining" if family == "bert" else auto).from_config(config)


def all_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    every = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: each.detach() + 0 for name, each in every}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_of_transformers_gets_the_values_of_its_initialize_weights(folder: Path, family: str) -> None:
    """Others' distributions, zeros or memory as it was came of ``reset_parameters``, and of parents before children."""
    usual = made(family).to_empty(device="cpu")
    torch.manual_seed(3)
    usual.initialize_weights()
    usual.tie_weights()
    expected = all_tensors(usual)
    for by_init_weights in (False, True):
        mine = made(family)
        torch.manual_seed(3)
        given = {"param_init_fn": mine._init_weights} if by_init_weights else {}
        with swap_params(mine, folder, memory_budget="64M", min_bytes=1 * KIB, **given):
            found = all_tensors(mine)
            assert found.keys() == expected.keys()
            assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
            assert len(list(mine.parameters())) == len(list(usual.parameters())), "tied ones are one parameter"


def test_a_model_larger_than_memory_begins_on_the_meta_device(folder: Path) -> None:
    def make(device: str) -> torch.nn.Sequential:
        torch.manual_seed(5)
        with torch.device(device):
            return torch.nn.Sequential(torch.nn.Embedding(50, 64, padding_idx=1), torch.nn.Linear(64, 256),
                                       torch.nn.BatchNorm1d(256), torch.nn.Linear(256, 64))  # fmt: skip

    def twos(module: torch.nn.Module) -> None:
        for each in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            each.fill_(2)

    mine, other = make("meta"), make("cpu")
    torch.manual_seed(5)
    with swap_params(mine, folder, memory_budget=70 * KIB, min_bytes=4 * KIB):
        assert equal(values(mine), values(other))
        assert all(torch.equal(*both) for both in zip(mine.buffers(), other.buffers(), strict=True))
    mine = make("meta")
    with swap_params(mine, folder, memory_budget=70 * KIB, min_bytes=4 * KIB, param_init_fn=twos):
        assert all(torch.equal(each, torch.full_like(each, 2)) for each in values(mine))


def test_a_tied_weight_keeps_the_values_of_its_first_module(folder: Path) -> None:
    """As where it is tied once both are made; those of the last module lasted, so the row of padding was not zeros."""

    def make(device: str) -> torch.nn.Sequential:
        torch.manual_seed(5)
        with torch.device(device):
            model: Any = torch.nn.Sequential(torch.nn.Embedding(50, 64, padding_idx=1), torch.nn.Linear(64, 50))
            model[1].weight = model[0].weight
        return model

    mine, other = make("meta"), make("cpu")
    torch.manual_seed(5)
    with swap_params(mine, folder, memory_budget="1M", min_bytes=1):
        assert mine[0].weight is mine[1].weight
        assert equal(values(mine), values(other))


class Partial(torch.nn.Module):
    """Makes tensors that its ``reset_parameters`` does not fill."""

    table: torch.Tensor

    def __init__(self, shape: tuple[int, ...] = (300,), dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(60, 60))
        self.register_buffer("table", torch.ones(shape, dtype=dtype), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        torch.nn.init.normal_(self.weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
@pytest.mark.parametrize("shape", [(), (300,)])
def test_what_nothing_initializes_is_refused_by_its_name(
    folder: Path, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """It had what was in memory before."""

    def make() -> torch.nn.ModuleList:
        with torch.device("meta"):
            return torch.nn.ModuleList([Partial(shape, dtype), torch.nn.Linear(60, 60)])

    def fill(each: Any, whole: bool) -> None:
        if isinstance(each, Partial):
            each.reset_parameters()
            if whole:
                each.table = torch.zeros_like(each.table)
        elif whole and isinstance(each, torch.nn.Linear):
            each.weight.data = torch.ones(60, 60)
            each.bias.data = torch.ones(60)

    given: Any = {"memory_budget": "1M", "min_bytes": 1 * KIB}
    with pytest.raises(ValueError, match=r"initializes 0.table of this module .* \(neither reset_parameters nor init"):
        swap_params(make(), folder, **given)
    with pytest.raises(ValueError, match=r"initializes 1.weight and 2 more tensors .* \(param_init_fn does not\)"):
        swap_params(make(), folder, **given, param_init_fn=lambda each: fill(each, False))
    module: Any = make()
    with swap_params(module, folder, **given, param_init_fn=lambda each: fill(each, True)):
        assert not module[0].table.any()
        assert torch.equal(module[1].weight + 0, torch.ones(60, 60))
    assert not list(folder.iterdir())


def test_modules_with_nothing_on_the_meta_device_are_left_alone(folder: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(30, 30, device="meta"), torch.nn.BatchNorm1d(30, affine=False))
    norm: Any = model[1]
    norm.running_mean.fill_(5)
    with swap_params(model, folder, memory_budget="1M", min_bytes=1):
        assert norm.running_mean.tolist() == [5.0] * 30


def test_what_initializes_a_parent_comes_after_its_children(folder: Path) -> None:
    class Parent(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.child, self.attention = torch.nn.Linear(30, 30), torch.nn.MultiheadAttention(32, 4)
            self.reset_parameters()

        def reset_parameters(self) -> None:
            torch.nn.init.ones_(self.child.weight)

    torch.manual_seed(2)
    other = Parent()
    with torch.device("meta"):
        mine = Parent()
    torch.manual_seed(2)
    with swap_params(mine, folder, memory_budget="1M", min_bytes=1):
        assert equal(values(mine), values(other))
