"""``from_pretrained``: transformers' models generate the same tokens with their weights in files as in memory."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import nvme_ops
from nvme_ops.base.errors import FormatError
from nvme_ops.offload import from_pretrained
from tests.conftest import KIB, MIB, in_threads
from tests.offload.models import ties

transformers: Any = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("one_thread", "quiet_transformers")


LLAMA: dict[str, Any] = {
    "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_hidden_layers": 2,
}  # fmt: skip
T5: dict[str, Any] = {
    "vocab_size": 1024, "d_model": 256, "d_ff": 512, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0,
}  # fmt: skip
LOW = torch.bfloat16
IDS = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])


def saved(folder: Path, **options: Any) -> Path:
    torch.manual_seed(1)
    config = transformers.LlamaConfig(**LLAMA, num_key_value_heads=2)
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "model", **options)
    return folder / "model"


def output(model: Any) -> torch.Tensor:
    """Greedy tokens."""
    with torch.no_grad():
        return torch.as_tensor(model.generate(IDS, max_new_tokens=4, min_new_tokens=4, do_sample=False))


def in_memory(path: Path, **options: Any) -> Any:
    kind = getattr(transformers, json.loads((path / "config.json").read_text())["architectures"][0])
    return kind.from_pretrained(path, **options).eval()


def test_tokens_are_those_of_the_model_in_memory(folder: Path) -> None:
    path = saved(folder, max_shard_size="1MB")
    wanted, files = output(in_memory(path, dtype=LOW)), sorted(path.glob("*.safetensors"))
    assert len(files) > 1
    with from_pretrained(files, memory_budget="2M", dtype=LOW) as model:
        assert next(model.parameters()).dtype == LOW
        for _ in range(2):
            assert torch.equal(output(model), wanted)
        assert model.stats().peak_bytes <= 2 * MIB


@pytest.mark.parametrize("different", [True, False])
@torch.no_grad()
def test_both_names_of_a_tied_weight_are_read(different: bool, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    bert, t5 = transformers.BertForMaskedLM, transformers.T5ForConditionalGeneration
    made = t5(transformers.T5Config(**T5)) if different else bert(transformers.BertConfig(**LLAMA))
    made.save_pretrained(folder)
    state = {name: value.clone() for name, value in made.state_dict().items()}
    if different:
        tied = [key for key in state if key in made.all_tied_weights_keys]
        state[tied[0]][-1, -1] += 1  # the last that is compared
    nvme_ops.save(state, folder / "model.safetensors", metadata={"format": "pt"})
    plain = in_memory(folder)
    monkeypatch.setattr("nvme_ops.offload.weights.pretrained._COMPARED", 100 * KIB)
    inputs = {"input_ids": IDS} | ({"decoder_input_ids": IDS} if different else {})
    with from_pretrained(folder, memory_budget="3M") as model:
        assert torch.equal(model(**inputs).logits, plain(**inputs).logits)
        assert ties(model) == ties(plain)


def test_the_configuration_and_class_may_be_given_or_found_by_the_kind(folder: Path) -> None:
    path = saved(folder)
    wanted = output(in_memory(path))
    config = transformers.AutoConfig.from_pretrained(path)
    document = path / "config.json"
    document.write_text(json.dumps({**json.loads(document.read_text()), "architectures": ["LlamaOfMine"]}))
    with from_pretrained(path, memory_budget="3M") as model:
        assert torch.equal(output(model), wanted)
    document.write_text(json.dumps({"model_type": "resnet"}))
    with pytest.raises(ValueError, match=r"ResNetConfig, names no class .* model_class="):
        from_pretrained(path, memory_budget="3M")
    document.unlink()
    given: dict[str, Any] = {"config": config, "model_class": transformers.LlamaForCausalLM}
    with from_pretrained(path / "model.safetensors", memory_budget="3M", **given) as model:
        assert torch.equal(output(model), wanted)


@pytest.mark.usefixtures("eager_switches")
def test_threads_that_load_at_once_leave_transformers_as_it_was(folder: Path) -> None:
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA, tie_word_embeddings=True)).save_pretrained(folder)
    usual = transformers.PreTrainedModel.tie_weights

    def load(_: int) -> None:
        with from_pretrained(folder, memory_budget="3M") as model:
            assert model.lm_head.weight is model.model.embed_tokens.weight

    in_threads(load, 4)
    assert transformers.PreTrainedModel.tie_weights is usual


def test_offsets_in_the_file_need_no_alignment_and_loading_reads_nothing(folder: Path) -> None:
    path = saved(folder)
    content = (path / "model.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    text = content[8 : 8 + length] + b" "  # which moves all data
    (path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    wanted = output(in_memory(path))
    with from_pretrained(path, memory_budget="3M") as model:
        assert model.stats().bytes_read == 0
        assert torch.equal(output(model), wanted)


# What is wrong with the files


def test_what_cannot_be_says_why_and_leaves_nothing_open(folder: Path) -> None:
    path = saved(folder)
    file, config = path / "model.safetensors", path / "config.json"
    content, told, before = file.read_bytes(), json.loads(config.read_text()), len(os.listdir("/proc/self/fd"))
    with pytest.raises(ValueError, match="at least"):
        from_pretrained(path, memory_budget="100K")
    config.write_text(json.dumps({**told, "intermediate_size": 640}))
    with pytest.raises((ValueError, RuntimeError), match=r"shape|mismatch"):
        from_pretrained(path, memory_budget="3M")
    config.write_text(json.dumps(told))
    os.truncate(file, len(content) // 2)
    with pytest.raises(FormatError, match=r"model\.safetensors"):
        from_pretrained(path, memory_budget="3M")
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_changed_file_is_told_and_a_replaced_one_stays_what_it_was(folder: Path) -> None:
    path = saved(folder)
    file, wanted = path / "model.safetensors", output(in_memory(path))

    def replace() -> None:
        os.link(file, folder / "link")
        file.chmod(0o640)
        shutil.copy(file, folder / "other")
        os.replace(folder / "other", file)

    def write() -> None:
        before = file.stat()
        with file.open("r+b") as stream:
            stream.seek(-4, os.SEEK_END)
            stream.write(b"xxxx")
        os.utime(file, ns=(1, before.st_mtime_ns))

    def recycle() -> None:
        shutil.copy(file, folder / "other")
        for _ in range(2):  # the second over the file that is open, had it no lease
            nvme_ops.save({"other": torch.ones(1 << 20)}, file, recycle=True)
        os.replace(folder / "other", file)

    for change in (recycle, replace, write):
        with from_pretrained(path, memory_budget="2M") as model:
            output(model)
            time.sleep(0.02)  # the clock of file systems ticks that slowly
            change()
            if change is not write:
                assert torch.equal(output(model), wanted)
                continue
            with pytest.raises(FormatError, match="changed while its weights were in use"):
                output(model)


# Names on the Hub: what the cache has of them. Downloading is the business of huggingface_hub

MAIN, OLD = "1" * 40, "2" * 40


@pytest.fixture
def cache(folder: Path) -> Path:
    """A cache with two commits of ``org/name``, in shards and as one file, and of the second one a part."""
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_attention_heads=2, num_hidden_layers=1
    )
    name = folder / "cache" / "models--org--name"
    for place, options in ((MAIN, {"max_shard_size": "400KB"}), (OLD, {}), (f"{OLD}/part", {})):
        torch.manual_seed(len(place) + int(place[0]))
        transformers.LlamaForCausalLM(config).save_pretrained(name / "snapshots" / place, **options)
    (name / "refs").mkdir()
    for revision, commit in (("main", MAIN), ("old", OLD)):
        (name / "refs" / revision).write_text(commit)
    missing = name / ".no_exist" / MAIN  # where the cache notes what a commit does not have
    missing.mkdir(parents=True)
    (missing / "model.safetensors").touch()
    return folder / "cache"


def test_a_name_is_found_by_revisions_and_parts_of_them_or_says_what_to_do(cache: Path) -> None:
    given: Any = {"memory_budget": "4M", "cache_dir": str(cache), "local_files_only": True}
    asked: list[tuple[dict[str, Any], str]] = [
        ({}, MAIN), ({"revision": "old"}, OLD), ({"revision": OLD, "subfolder": "part"}, f"{OLD}/part"),
    ]  # fmt: skip
    for options, place in asked:
        plain = transformers.LlamaForCausalLM.from_pretrained(cache / "models--org--name" / "snapshots" / place).eval()
        with from_pretrained("org/name", **given, **options) as model, torch.no_grad():
            assert {part.name_or_path for part in model.modules() if hasattr(part, "name_or_path")} == {"org/name"}
            assert torch.equal(model(IDS).logits, plain(IDS).logits)
            assert model.generation_config.to_dict() == plain.generation_config.to_dict()
    (cache / "models--org--name" / "snapshots" / OLD / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="has an adapter"):
        from_pretrained("org/name", **given, revision="old")
    for name, more in (("org/other", {}), ("org/name", {"revision": "bad"})):
        with pytest.raises(OSError, match="couldn't find them in the cached files"):
            from_pretrained(name, **{**given, **more})
    snapshot = cache / "models--org--name" / "snapshots" / MAIN
    for path in snapshot.glob("model*"):
        path.unlink()
    (cache / "models--org--name" / ".no_exist" / MAIN / "model.safetensors.index.json").touch()
    with pytest.raises(FileNotFoundError, match=r"org/name has no safetensors files: .* nvme-checkpoint convert"):
        from_pretrained("org/name", **given)


def test_it_computes_on_the_gpu_where_there_is_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here torch, which has none, is asked for memory of it."""
    path = saved(folder)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises((AssertionError, RuntimeError), match="CUDA"):
        from_pretrained(path, memory_budget="4M")
    with from_pretrained(path, memory_budget="4M", device="cpu") as model:
        assert model.device.type == "cpu"
