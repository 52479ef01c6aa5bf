"""Modules that ``swap_params`` finds on the meta device: all of their tensors get the values that torch gives them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nvme_ops.offload import swap_params
from tests.offload.architectures import tiny_config
from tests.offload.training import KIB, equal, values

#: Classes of transformers, one of each way to initialize weights.
FAMILIES = (
    "AfmoeForCausalLM", "BambaForCausalLM", "BartForConditionalGeneration", "BertForPreTraining", "BloomForCausalLM",
    "CodeGenForCausalLM", "DeepseekV3ForCausalLM", "Ernie4_5_MoeForCausalLM", "FalconH1ForCausalLM",
    "FlexOlmoForCausalLM", "GPT2LMHeadModel", "Gemma3ForCausalLM", "GptOssForCausalLM", "GraniteMoeForCausalLM",
    "JambaForCausalLM", "Lfm2MoeForCausalLM", "Mamba2ForCausalLM", "MambaForCausalLM", "MptForCausalLM",
    "OPTForCausalLM", "PhimoeForCausalLM", "Qwen3NextForCausalLM", "RecurrentGemmaForCausalLM", "RwkvForCausalLM",
    "T5ForConditionalGeneration", "XGLMForCausalLM",
)  # fmt: skip


def made(family: str) -> Any:
    """Returns a small model of a family on the meta device, its embeddings tied."""
    kind = getattr(pytest.importorskip("transformers"), family)
    config = tiny_config(kind)
    config.tie_word_embeddings = True
    with torch.device("meta"):
        return kind(config)


def all_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    every = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: tensor.detach() + 0 for name, tensor in every}


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
            actual = all_tensors(mine)
            assert actual.keys() == expected.keys()
            assert [name for name in expected if not torch.equal(actual[name], expected[name])] == []
            assert len(list(mine.parameters())) == len(list(usual.parameters())), "tied ones are one parameter"


def several() -> Any:
    return torch.nn.Sequential(torch.nn.Embedding(50, 64, padding_idx=1), torch.nn.Linear(64, 256),
                               torch.nn.BatchNorm1d(256), torch.nn.Linear(256, 64))  # fmt: skip


def tied() -> Any:
    """As where it is tied once both are made; those of the last module lasted, so the row of padding was not zeros."""
    model: Any = torch.nn.Sequential(torch.nn.Embedding(50, 64, padding_idx=1), torch.nn.Linear(64, 50))
    model[1].weight = model[0].weight
    return model


class Parent(torch.nn.Module):
    """Initializes a child anew, so that it has to come after it."""

    def __init__(self) -> None:
        super().__init__()
        self.child, self.attention = torch.nn.Linear(30, 30), torch.nn.MultiheadAttention(32, 4)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        torch.nn.init.ones_(self.child.weight)


@pytest.mark.parametrize("make", [several, tied, Parent])
def test_a_module_gets_the_values_that_its_layers_would_have(folder: Path, make: Callable[[], Any]) -> None:
    """Also one that is larger than the budget."""
    torch.manual_seed(5)
    other = make()
    with torch.device("meta"):
        mine = make()
    torch.manual_seed(5)
    with swap_params(mine, folder, memory_budget=70 * KIB, min_bytes=1):
        assert equal(values(mine), values(other))
        assert all(torch.equal(*both) for both in zip(mine.buffers(), other.buffers(), strict=True))
        assert len(list(mine.parameters())) == len(list(other.parameters())), "tied ones are one parameter"


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

    def fill(layer: Any, whole: bool) -> None:
        if isinstance(layer, Partial):
            layer.reset_parameters()
            if whole:
                layer.table = torch.zeros_like(layer.table)
        elif whole and isinstance(layer, torch.nn.Linear):
            layer.weight.data = torch.ones(60, 60)
            layer.bias.data = torch.ones(60)

    given: Any = {"memory_budget": "1M", "min_bytes": 1 * KIB}
    with pytest.raises(ValueError, match=r"initializes 0.table of this module .* \(neither reset_parameters nor init"):
        swap_params(make(), folder, **given)
    with pytest.raises(ValueError, match=r"initializes 1.weight and 2 more tensors .* \(param_init_fn does not\)"):
        swap_params(make(), folder, **given, param_init_fn=lambda layer: fill(layer, False))
    module: Any = make()
    with swap_params(module, folder, **given, param_init_fn=lambda layer: fill(layer, True)):
        assert not module[0].table.any()
        assert torch.equal(module[1].weight + 0, torch.ones(60, 60))
    assert not list(folder.iterdir())


def test_modules_with_nothing_on_the_meta_device_are_left_alone(folder: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(30, 30, device="meta"), torch.nn.BatchNorm1d(30, affine=False))
    norm: Any = model[1]
    norm.running_mean.fill_(5)
    with swap_params(model, folder, memory_budget="1M", min_bytes=1):
        assert norm.running_mean.tolist() == [5.0] * 30
