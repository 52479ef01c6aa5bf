"""``from_pretrained``: transformers' models generate the same tokens with their weights in files as in memory."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import nvme_ops
from nvme_ops.errors import FormatError
from nvme_ops.offload import from_pretrained
from nvme_ops.offload.weights.stored import StoredTensor
from tests.conftest import KIB, MIB

transformers: Any = pytest.importorskip("transformers")

SMALL: dict[str, Any] = {"vocab_size": 1024}


def decoder(name: str, **options: Any) -> Callable[[], Any]:
    def make() -> Any:
        config = getattr(transformers, f"{name}Config")(**SMALL, **options)
        kind = "LMHeadModel" if name == "GPT2" else "ForCausalLM"
        return getattr(transformers, name + kind)(config)

    return make


llama = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_hidden_layers": 3}
MODELS: dict[str, Callable[[], Any]] = {
    "llama": decoder("Llama", **llama, num_key_value_heads=2),
    "llama, tied": decoder("Llama", **llama, num_key_value_heads=4, tie_word_embeddings=True),
    "opt": decoder("OPT", hidden_size=256, ffn_dim=512, num_attention_heads=4, num_hidden_layers=3),
    "gpt2": decoder("GPT2", n_embd=256, n_layer=3, n_head=4),
    "mixtral": decoder("Mixtral", **llama, num_key_value_heads=2, num_local_experts=8),
    "qwen2": decoder("Qwen2", **llama, num_key_value_heads=2),
    "t5": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(**SMALL, d_model=256, d_ff=512, num_layers=2, num_heads=4, decoder_start_token_id=0)
    ),
    "bert": lambda: transformers.BertModel(
        transformers.BertConfig(
            **SMALL, hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4
        )
    ),
    "resnet": lambda: transformers.ResNetForImageClassification(
        transformers.ResNetConfig(embedding_size=32, hidden_sizes=[64, 128, 256, 256], depths=[1, 1, 1, 1])
    ),
}  # fmt: skip
IDS = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(before)


def saved(folder: Path, name: str = "llama", **options: Any) -> Path:
    torch.manual_seed(1)
    MODELS[name]().save_pretrained(folder / "model", **options)
    return folder / "model"


def output(model: Any) -> torch.Tensor:
    """What a model makes of the same input: greedy tokens, or its output."""
    with torch.no_grad():
        if model.can_generate():
            return torch.as_tensor(model.generate(IDS, max_new_tokens=6, min_new_tokens=6, do_sample=False))
        if "ResNet" in type(model).__name__:
            images = torch.linspace(-1, 1, 2 * 3 * 64 * 64).view(2, 3, 64, 64)
            return torch.as_tensor(model(images.to(model.dtype)).logits)
        return torch.as_tensor(model(IDS).last_hidden_state)


def in_memory(path: Path, **options: Any) -> Any:
    kind = getattr(transformers, json.loads((path / "config.json").read_text())["architectures"][0])
    return kind.from_pretrained(path, **options).eval()


def size_of(path: Path) -> int:
    return sum(each.stat().st_size for each in path.glob("*.safetensors"))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_tokens_are_those_of_the_model_in_memory(name: str, dtype: torch.dtype, folder: Path) -> None:
    path = saved(folder, name)
    options = {"experts_implementation": "eager"} if name == "mixtral" else {}
    wanted = output(in_memory(path, dtype=dtype, **options))
    with from_pretrained(path, memory_budget=max(size_of(path) // 2, 2 * MIB), dtype=dtype) as model:
        assert next(model.parameters()).dtype == dtype
        for _ in range(2):
            assert torch.equal(output(model), wanted)
        assert model.stats().peak_bytes <= size_of(path) // 2 + 2 * MIB


def test_of_several_files(folder: Path) -> None:
    path = saved(folder, max_shard_size="1MB")
    assert len(list(path.glob("*.safetensors"))) > 1
    wanted = output(in_memory(path))
    with from_pretrained(path, memory_budget="3M") as model:
        assert torch.equal(output(model), wanted)
    files = sorted(path.glob("*.safetensors"))
    with from_pretrained(files, memory_budget="3M") as model:
        assert torch.equal(output(model), wanted)


BOTH_NAMES: dict[str, Callable[[], Any]] = {
    "llama": MODELS["llama, tied"],
    "gpt2": MODELS["gpt2"],
    "t5": MODELS["t5"],
    "bert": lambda: transformers.BertForMaskedLM(
        transformers.BertConfig(
            **SMALL, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4
        )
    ),
}


@pytest.mark.parametrize("name", BOTH_NAMES)
@pytest.mark.parametrize("values", ["as saved", "equal", "different"])
@torch.no_grad()
def test_a_file_with_both_names_of_a_tied_weight_is_read_as_transformers_reads_it(
    name: str, values: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1)
    made = BOTH_NAMES[name]()
    made.save_pretrained(folder)
    if values != "as saved":
        state = {name: value.clone() for name, value in made.state_dict().items()}
        tied = [each for each in state if each in made.all_tied_weights_keys]
        if values == "different":
            state[tied[0]][-1, -1] += 1  # the last that is compared
        nvme_ops.save(state, folder / "model.safetensors", metadata={"format": "pt"})
    plain = in_memory(folder)
    monkeypatch.setattr("nvme_ops.offload.weights.pretrained._COMPARED", 100 * KIB)
    inputs = {"input_ids": IDS} | ({"decoder_input_ids": IDS} if name == "t5" else {})
    with from_pretrained(folder, memory_budget="3M") as model:
        assert torch.equal(model(**inputs).logits, plain(**inputs).logits)
        assert names_of(model) == names_of(plain)


def names_of(model: Any) -> set[tuple[str, ...]]:
    """The names of each parameter: several where it is tied."""
    found: dict[int, list[str]] = {}
    for name, each in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(each), []).append(name)
    return {tuple(names) for names in found.values()}


def test_loading_reads_nothing_but_what_is_small(folder: Path) -> None:
    path = saved(folder)
    with from_pretrained(path, memory_budget="2M") as model:
        assert model.name_or_path == model.config.name_or_path == str(path)
        assert model.stats().bytes_read == 0
        stored = [each for each in model.parameters() if isinstance(each, StoredTensor)]
        assert sum(each.numel() for each in stored) > 0.7 * sum(each.numel() for each in model.parameters())


def test_the_configuration_and_class_may_be_given(folder: Path) -> None:
    path = saved(folder)
    wanted = output(in_memory(path))
    config = transformers.AutoConfig.from_pretrained(path)
    (path / "config.json").unlink()
    with from_pretrained(
        path / "model.safetensors", memory_budget="3M", config=config, model_class=transformers.LlamaForCausalLM
    ) as model:
        assert torch.equal(output(model), wanted)


def test_sampling_and_beams(folder: Path) -> None:
    path = saved(folder)
    plain = in_memory(path)
    with from_pretrained(path, memory_budget="3M") as model:
        for options in ({"num_beams": 3, "do_sample": False}, {"do_sample": True, "top_k": 20}):
            found = []
            for each in (plain, model):
                torch.manual_seed(7)
                found.append(each.generate(IDS, max_new_tokens=5, **options))
            assert torch.equal(*found)


def test_it_can_be_saved_again(folder: Path) -> None:
    path = saved(folder, "mixtral")
    with from_pretrained(path, memory_budget="4M") as model:
        wanted = output(model)
        model.save_pretrained(folder / "again")
    assert torch.equal(output(in_memory(folder / "again", experts_implementation="eager")), wanted)


def test_in_a_pipeline(folder: Path) -> None:
    path = saved(folder)
    with from_pretrained(path, memory_budget="3M") as model:
        base = transformers.pipelines.base.Pipeline
        methods: dict[str, Any] = dict.fromkeys(base.__abstractmethods__, lambda *_, **__: ({}, {}, {}))
        assert type("Echo", (base,), methods)(model=model, device="cpu").model is model


def test_offsets_in_the_file_need_no_alignment(folder: Path) -> None:
    path = saved(folder)
    content = (path / "model.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    for more in (1, 3):  # spaces behind the header move all data
        text = content[8 : 8 + length] + b" " * more
        (path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
        wanted = output(in_memory(path))
        with from_pretrained(path, memory_budget="3M") as model:
            assert torch.equal(output(model), wanted)


# What is wrong with the files


def test_missing_weights_are_named(folder: Path) -> None:
    path = saved(folder)
    state = nvme_ops.load(path / "model.safetensors")
    del state["model.layers.1.mlp.up_proj.weight"]
    nvme_ops.save(state, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"missing: model\.layers\.1\.mlp\.up_proj\.weight"):
        from_pretrained(path, memory_budget="3M")


def test_weights_of_another_shape_are_named(folder: Path) -> None:
    path = saved(folder)
    config = json.loads((path / "config.json").read_text())
    config["intermediate_size"] = 640
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises((ValueError, RuntimeError), match=r"shape|mismatch"):
        from_pretrained(path, memory_budget="3M")


def test_a_truncated_file_is_refused(folder: Path) -> None:
    path = saved(folder)
    os.truncate(path / "model.safetensors", size_of(path) // 2)
    with pytest.raises(FormatError, match=r"model\.safetensors"):
        from_pretrained(path, memory_budget="3M")


@pytest.mark.parametrize("change", ["written", "written, and its time put back", "truncated"])
def test_a_file_that_is_changed_meanwhile_is_told(change: str, folder: Path) -> None:
    path = saved(folder)
    file = path / "model.safetensors"
    with from_pretrained(path, memory_budget="2M") as model:
        output(model)
        before = file.stat()
        time.sleep(0.02)  # the clock of file systems ticks that slowly
        if change == "truncated":
            os.truncate(file, 100 * KIB)
        else:
            with file.open("r+b") as stream:
                stream.seek(-4, os.SEEK_END)
                stream.write(b"xxxx")
            os.utime(file, ns=(1, before.st_mtime_ns if "back" in change else 1))
        with pytest.raises(FormatError, match="changed while its weights were in use"):
            output(model)


def test_a_file_that_is_replaced_meanwhile_stays_what_it_was(folder: Path) -> None:
    path = saved(folder)
    wanted = output(in_memory(path))
    with from_pretrained(path, memory_budget="2M") as model:
        file = path / "model.safetensors"
        for change in (lambda: os.link(file, folder / "link"), lambda: file.chmod(0o640)):
            time.sleep(0.02)
            change()
            assert torch.equal(output(model), wanted)
        (folder / "other").write_bytes(b"nothing")
        os.replace(folder / "other", path / "model.safetensors")
        assert torch.equal(output(model), wanted)
        shutil.rmtree(path)
        assert torch.equal(output(model), wanted)


def test_a_configuration_that_names_no_class(folder: Path) -> None:
    path = saved(folder)
    told = json.loads((path / "config.json").read_text())
    wanted = output(transformers.LlamaForCausalLM.from_pretrained(path).eval())
    for architectures in (None, ["LlamaOfMine"]):
        (path / "config.json").write_text(json.dumps({**told, "architectures": architectures}))
        with from_pretrained(path, memory_budget="3M") as model:
            assert torch.equal(output(model), wanted)
    (path / "config.json").write_text(json.dumps({"model_type": "resnet"}))
    with pytest.raises(ValueError, match=r"ResNetConfig, names no class .* model_class="):
        from_pretrained(path, memory_budget="3M")


def test_a_budget_that_is_too_small_says_what_is_needed_and_leaves_nothing_open(folder: Path) -> None:
    path = saved(folder)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ValueError, match="at least"):
        from_pretrained(path, memory_budget="100K")
    assert len(os.listdir("/proc/self/fd")) == before
