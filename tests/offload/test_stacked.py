"""Experts that files have one by one are stacked before transformers copies its converter for each of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import core_model_loading

from nvme_ops.formats.packed import E2M1, MatrixLayout, Packed
from nvme_ops.offload import from_pretrained
from nvme_ops.offload.weights.stacked import Stacked, _stacked
from nvme_ops.offload.weights.stored import StoredTensor
from nvme_ops.offload.weights.stored_formats import Joined
from nvme_ops.storage.source import Source
from tests.conftest import watched

EXPERTS, LAYERS = 12, 2  # more than ten, whose names are not in the order of their numbers
FILE = "model.safetensors"


@pytest.fixture(autouse=True)
def _saved(folder: Path) -> None:
    """A mixture in files."""
    torch.manual_seed(0)
    sizes: Any = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "vocab_size": 64}
    config = transformers.MixtralConfig(
        **sizes, num_hidden_layers=LAYERS, num_local_experts=EXPERTS, num_key_value_heads=1
    )
    transformers.MixtralForCausalLM(config).save_pretrained(folder)


def require_equal(model: Any, folder: Path) -> None:
    """Compares weights with those of transformers' own model of the same files, and computes with them."""
    plain = transformers.MixtralForCausalLM.from_pretrained(folder)
    for (name, one), (_, other) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert torch.equal(one.to_memory() if isinstance(one, StoredTensor) else one, other), name
    tokens = torch.arange(8)[None]
    torch.testing.assert_close(model(tokens).logits, plain(tokens).logits)


@torch.no_grad()
@pytest.mark.parametrize(("alike", "copies"), [(True, LAYERS * 3), (False, LAYERS * 3 - 1 + EXPERTS)])
def test_a_converter_is_copied_once_where_experts_are_stored_alike(
    alike: bool, copies: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of others transformers has a converter for each expert."""
    tensors = load_file(folder / FILE)
    names = [name for name in tensors if ".experts." in name]
    assert len(names) == LAYERS * EXPERTS * 3
    if not alike:
        other = next(name for name in names if ".experts.3." in name)
        tensors[other] = tensors[other].double()
        save_file(tensors, folder / FILE, {"format": "pt"})
    converters = watched(monkeypatch, core_model_loading, "deepcopy", lambda value, *_: value)
    with from_pretrained(folder, memory_budget="1M") as model:
        assert len(converters) == copies
        require_equal(model, folder)


@pytest.mark.parametrize("missing", [0, 5, EXPERTS - 1])
def test_an_expert_that_is_missing_is_an_error(missing: int, folder: Path) -> None:
    tensors = load_file(folder / FILE)
    del tensors[next(name for name in tensors if f".experts.{missing}." in name)]
    save_file(tensors, folder / FILE, {"format": "pt"})
    with pytest.raises(ValueError, match="experts"):
        from_pretrained(folder, memory_budget="1M")


@torch.no_grad()
def test_a_class_of_the_users_is_made_as_transformers_makes_it(folder: Path) -> None:
    class Own(transformers.MixtralForCausalLM):
        def __init__(self, config: Any, *, rate: float) -> None:
            super().__init__(config)
            self.rates = [rate * each.item() for each in torch.linspace(0, 1, 3)]

    config = transformers.AutoConfig.from_pretrained(folder)
    before = dict(vars(config))
    with from_pretrained(folder, memory_budget="1M", model_class=Own, config=config, rate=2.0) as model:
        assert model.rates == [0, 1, 2]
        require_equal(model, folder)
    assert vars(config) == before


def test_names_that_are_mapped_are_left_to_transformers(folder: Path) -> None:
    mapping = {r"layers\.0\.(.*)\.experts\.3\.w1": r"layers.0.\1.experts.3.w3"}
    with pytest.raises(ValueError, match=r"another shape .*: model\.layers\.0\.mlp\.experts\.gate_up_proj"):
        from_pretrained(folder, memory_budget="1M", key_mapping=mapping)


def test_a_stack_is_nothing_but_a_stack() -> None:
    one: Any = Stacked(torch.ones(2, 3))
    assert torch.equal(torch.stack([one[...].to(torch.float64)]), torch.ones(2, 3, dtype=torch.float64))
    for function, given in ((torch.stack, [one, one]), (torch.cat, [one])):
        with pytest.raises(TypeError):
            function(given)
    with pytest.raises(TypeError):
        one[0]


def test_stacks_of_matrices_are_not_stacked_again() -> None:
    form = Packed([MatrixLayout("low_first", 2, 32, 32, "e8m0", E2M1)], [(1.0,)] * 2, 2)
    parts = [Joined(Source([], torch.uint8, (2, 34)), form)] * 2
    assert _stacked(parts) is None
    assert _stacked([part._replace(stored_as=form.select(0)) for part in parts]) is not None
