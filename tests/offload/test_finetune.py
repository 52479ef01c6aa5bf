"""Adapters of peft over streamed weights: trained to the same bits as in memory, by whatever trains them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from nvme_ops.offload import from_pretrained, stream_weights
from nvme_ops.offload.weights.stored import StoredTensor, stored_in
from tests.offload.llama import saved_llama
from tests.offload.models import saved
from tests.offload.trainer_models import Texts, trainer

transformers: Any = pytest.importorskip("transformers")
peft: Any = pytest.importorskip("peft", reason="peft is not installed")
accelerate: Any = pytest.importorskip("accelerate")

pytestmark = pytest.mark.usefixtures("one_thread", "quiet_transformers")

BUDGET = "4M"
LORA: dict[str, Any] = {"r": 4, "lora_dropout": 0.1, "target_modules": ["q_proj", "v_proj", "down_proj"]}


@pytest.fixture
def path(folder: Path) -> Path:
    return saved_llama(folder, num_hidden_layers=3, vocab_size=1000, attention_dropout=0.1, use_cache=False)


def in_memory(path: Path) -> Any:
    return transformers.LlamaForCausalLM.from_pretrained(path)


def adapted(model: Any, **options: Any) -> Any:
    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **{**LORA, **options}))


STREAMED: dict[str, Callable[..., Any]] = {
    "files, adapters": lambda path, **options: adapted(from_pretrained(path, memory_budget=BUDGET), **options),
    "streamed, adapters": lambda path, **options: adapted(
        stream_weights(in_memory(path), path.parent, memory_budget=BUDGET), **options
    ),
    "adapters, streamed": lambda path, **options: stream_weights(
        adapted(in_memory(path), **options), path.parent, memory_budget=BUDGET
    ),
}


def loop(model: Any, prepare: Callable[[Any, Any], Any] = lambda *both: both) -> list[float]:
    trained = [param for param in model.parameters() if param.requires_grad]
    model, optimizer = prepare(model, torch.optim.AdamW(trained, lr=1e-2))
    model.train()
    torch.manual_seed(5)
    losses = []
    for number in range(3):
        ids = Texts()[number]["input_ids"][None]
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def trained(model: Any, folder: Path, begin: str | None = None, **options: Any) -> list[float]:
    made = trainer(folder, model=model, save_strategy="steps", save_steps=2, learning_rate=1e-2, **options)
    made.train(resume_from_checkpoint=begin)
    return [entry["loss"] for entry in made.state.log_history if "loss" in entry]


def in_parallel(model: Any) -> list[float]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        return loop(model, lambda model, optimizer: (torch.nn.parallel.DistributedDataParallel(model), optimizer))
    finally:
        torch.distributed.destroy_process_group()


def resumed(model: Any, folder: Path) -> list[float]:
    trained(model, folder)
    return trained(model, folder, begin=str(folder / "checkpoint-2"))


WAYS: dict[str, Callable[[Any, Path], list[float]]] = {
    "loop": lambda model, _: loop(model),
    "accelerate": lambda model, _: loop(model, accelerate.Accelerator(cpu=True).prepare),
    "DistributedDataParallel": lambda model, _: in_parallel(model),
    "trainer, resumed": resumed,
    "trainer, checkpointed, bfloat16": partial(trained, gradient_checkpointing=True, bf16=True),
}


def adapters(model: Any) -> dict[str, torch.Tensor]:
    return {name: param.detach() for name, param in model.named_parameters() if param.requires_grad}


CASES = [*(("loop", order) for order in STREAMED), *zip([*WAYS][1:], itertools.cycle(STREAMED))]


@pytest.mark.parametrize(("way", "order"), CASES)
def test_adapters_are_trained_to_the_same_bits_as_in_memory(way: str, order: str, path: Path) -> None:
    plain = adapted(in_memory(path))
    model = STREAMED[order](path)
    assert WAYS[way](model, path / "streamed") == WAYS[way](plain, path / "plain")
    actual, wanted = adapters(model), adapters(plain)
    assert actual.keys() == wanted.keys()
    assert all(torch.equal(actual[name], wanted[name]) for name in wanted)
    assert sum(stored_in(param) is not None for param in model.parameters()) >= 10
    assert model.stats().peak_bytes <= 4 << 20
    model.close()


@pytest.mark.parametrize(
    "options",
    [{"use_dora": True, "lora_dropout": 0.0}, {"modules_to_save": ["lm_head"]},
     {"target_modules": ["embed_tokens", "lm_head"]}, {"bias": "all"}],
)  # fmt: skip
def test_other_adapters_are_too(path: Path, options: dict[str, Any]) -> None:
    plain, model = adapted(in_memory(path), **options), STREAMED["files, adapters"](path, **options)
    assert loop(model) == loop(plain)
    model.close()


@pytest.mark.parametrize("order", STREAMED)
def test_adapters_are_saved_without_the_rest_and_not_merged_into_it(
    order: str, path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = STREAMED[order](path)
    loop(model)
    model.eval()
    with torch.no_grad():
        wanted = model(input_ids=torch.tensor([[1, 2, 3]])).logits
    with monkeypatch.context() as patched:
        patched.setattr(StoredTensor, "to_memory", lambda _: pytest.fail("a weight was read"))
        model.save_pretrained(folder / "adapter")
        onto = peft.PeftModel.from_pretrained(from_pretrained(path, memory_budget=BUDGET), folder / "adapter")
    for other in (peft.PeftModel.from_pretrained(in_memory(path), folder / "adapter"), onto):
        with torch.no_grad():
            assert torch.equal(other.eval()(input_ids=torch.tensor([[1, 2, 3]])).logits, wanted)
    for merge in (model.merge_adapter, model.merge_and_unload):
        with pytest.raises(RuntimeError, match="streamed"):
            merge()
    with torch.no_grad():
        assert torch.equal(model(input_ids=torch.tensor([[1, 2, 3]])).logits, wanted)
    model.close()
    onto.close()


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("name", ["Qwen3Moe", "GptOss"])
def test_factors_of_packed_experts_are_trained_to_the_bits_in_memory(name: str, order: str, folder: Path) -> None:
    path, kind = saved(folder, name)

    def with_factors(model: Any) -> Any:
        torch.manual_seed(1)
        names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        return peft.get_peft_model(model, peft.LoraConfig(r=4, target_parameters=names))

    def trained(model: Any) -> list[torch.Tensor]:
        torch.manual_seed(1)
        factors = [param for param in model.train().parameters() if param.requires_grad]
        for factor in factors:
            torch.nn.init.normal_(factor, std=0.1)
        optimizer, ids, outputs = torch.optim.SGD(factors, lr=1e-2), torch.arange(14).view(2, 7), []
        for _ in range(3):
            outputs.append(model(input_ids=ids, labels=ids).loss)
            outputs[-1].backward()
            optimizer.step()
        with torch.no_grad(), model.disable_adapter():
            outputs.append(model(input_ids=ids).logits)
        return [*outputs, *factors]

    plain = kind.from_pretrained(path, experts_implementation="eager")
    wanted = trained(with_factors(plain))
    if order == "before":
        model = from_pretrained(path, memory_budget="300K")
        actual = trained(with_factors(model))
    else:
        model = with_factors(kind.from_pretrained(path))
        actual = trained(stream_weights(model, folder, memory_budget="300K"))
    assert all(map(torch.equal, actual, wanted))
    assert model._nvme_window.experts is not None, "each expert is read with its own factors"
    assert model.stats().peak_bytes <= 300_000
    model.close()
