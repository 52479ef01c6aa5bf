"""Files whose loading computes with the weights, or rearranges them: the model is the one in memory, streamed.

Whole models of that kind are in ``test_architectures.py``: KimiLinear is one.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import nvme_ops
from nvme_ops.filesystem.publication import open_to_read
from nvme_ops.formats import safetensors_format
from nvme_ops.io.file import shared_handle
from nvme_ops.offload import from_pretrained
from nvme_ops.offload.weights.stored import StoredTensor, Weights, stored_tensors
from nvme_ops.storage.source import WeightFile
from tests.offload.llama import SIZES

transformers: Any = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("one_thread", "quiet_transformers")

IDS = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])


@pytest.fixture
def stored(tmp_path: Path) -> Iterator[tuple[dict[str, torch.Tensor], dict[str, StoredTensor], Weights]]:
    """Tensors, the same in a file of a model that is being put together, and what these are read through."""
    torch.manual_seed(1)
    tensors = {"matrix": torch.randn(8, 6), "packed": torch.randn(5, 8, 6), "low": torch.randn(5, 8, 6).bfloat16()}
    path = tmp_path / "model.safetensors"
    nvme_ops.save(tensors, path)
    file, weights = WeightFile(open_to_read(str(path)), str(path), shared_handle()), Weights(10_000)
    header = safetensors_format.read(file.file.fileno(), file.path)
    yield tensors, dict(stored_tensors(file, header, weights)), weights
    file.close()


@pytest.mark.parametrize("name", ["matrix", "packed", "low"])
@pytest.mark.parametrize("dtype", [None, torch.float64])
@torch.no_grad()
def test_elements_that_are_rearranged_stay_in_the_file(name: str, dtype: torch.dtype | None, stored: Any) -> None:
    tensors, in_file, _ = stored

    def interleaved(tensor: torch.Tensor, dim: int, inner: bool) -> torch.Tensor:
        size = tensor.shape[dim] // 2
        parts = (2, size) if inner else (size, 2)
        split = tensor.reshape(*tensor.shape[:dim], *parts, *tensor.shape[dim + 1 :])
        return split.transpose(dim, dim + 1).reshape(tensor.shape).contiguous()

    for dim in range(tensors[name].dim() - 2, tensors[name].dim()):
        for inner in (True, False):
            ours, wanted = (interleaved(source[name].to(dtype), dim, inner) for source in (in_file, tensors))
            assert isinstance(ours, StoredTensor)
            assert torch.equal(ours.to_memory(), wanted)
            assert ours.has_parts() is (name != "matrix"), "of packed matrices each is read alone"
            part: Any = ours[3]
            assert torch.equal(part.to_memory() if isinstance(part, StoredTensor) else part, wanted[3])
            assert isinstance(part, StoredTensor) or name == "matrix"
    moved = in_file["packed"].transpose(0, 1).contiguous()
    assert torch.equal(moved.to_memory(), tensors["packed"].transpose(0, 1))
    assert not moved.has_parts(), "an index has elements of all"
    assert torch.equal(moved[3], tensors["packed"][:, 3])
    for tensor in (in_file, tensors):
        some = tensor["matrix"][:, ::2].contiguous()
        assert torch.equal(some.to_memory() if isinstance(some, StoredTensor) else some, tensors["matrix"][:, ::2])


@torch.no_grad()
def test_computing_before_the_model_is_complete_is_bounded(stored: Any) -> None:
    tensors, in_file, weights = stored
    assert torch.equal(in_file["matrix"].exp(), tensors["matrix"].exp())
    assert weights.early == tensors["matrix"].nbytes
    weights.early = weights.budget - 1
    with pytest.raises(MemoryError, match="computes with more weights than device_budget has room for"):
        in_file["packed"].exp()


def test_weights_that_loading_has_computed_count_towards_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1)
    sizes: Any = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=256, **sizes)).save_pretrained(tmp_path)
    tie = transformers.LlamaForCausalLM.tie_weights

    def doubled(model: Any, *args: Any, **options: Any) -> Any:
        if not model.lm_head.weight.is_meta and not hasattr(model, "doubled"):
            model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight * 2)  # as a conversion that computes does
            model.doubled = True
        return tie(model, *args, **options)

    monkeypatch.setattr(transformers.LlamaForCausalLM, "tie_weights", doubled)
    plain = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    cases: list[tuple[Any, str]] = [
        ({"memory_budget": "100K"}, r"memory_budget of 100 KiB is too small for this model: at least 1\d\d"),
        ({"memory_budget": "30K"}, "loading the model computes with more weights than memory_budget has room for"),
        ({"host_budget": "30K"}, "loading the model computes with more weights than host_budget has room for"),
    ]
    for given, words in cases:
        with pytest.raises(ValueError, match=words):
            from_pretrained(tmp_path, **given)
    with from_pretrained(tmp_path, memory_budget="200K") as model, torch.no_grad():
        assert torch.equal(model(IDS).logits, plain(IDS).logits)
        assert type(model.lm_head.weight) is torch.nn.Parameter
        assert not model.lm_head.weight.requires_grad


@pytest.mark.parametrize("sets", [False, True])
def test_what_a_class_sets_whenever_it_is_loaded_is_so_already_or_refused(
    sets: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, pad_token_id=0)).eval()
    with torch.no_grad():
        model.get_input_embeddings().weight[0] = -float(sets)
    model.save_pretrained(tmp_path)
    before = transformers.LlamaPreTrainedModel._init_weights

    def change(itself: Any, module: torch.nn.Module) -> None:
        before(itself, module)
        if isinstance(module, torch.nn.Embedding) and sets:
            module.weight.data[0] = -1.0  # as Zaya does
        elif isinstance(module, torch.nn.Embedding):
            torch.nn.init.zeros_(module.weight.data[0])  # as Funnel and Youtu do, of the row of padding

    monkeypatch.setattr(transformers.LlamaPreTrainedModel, "_init_weights", change)
    with torch.no_grad(), from_pretrained(tmp_path, memory_budget="64M") as streamed:
        assert torch.equal(streamed(IDS).logits, model(IDS).logits)
        model.get_input_embeddings().weight[0] = 1.0
    model.save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="changes a part of a weight whenever it loads"):
        from_pretrained(tmp_path, memory_budget="64M")
