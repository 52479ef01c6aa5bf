"""``nvme-checkpoint convert --to``: a model in 8 or 4 bits that other programs load, or none."""

from __future__ import annotations

import functools
import itertools
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import nvme_ops
from nvme_ops.checkpoint import packed_model
from nvme_ops.checkpoint.cli import main
from nvme_ops.checkpoint.convert import convert
from nvme_ops.formats import KINDS, quantizing
from nvme_ops.memory import ring
from nvme_ops.offload import from_pretrained
from tests.conftest import KIB, MIB, in_threads, refusal
from tests.crashing_save import at_second

transformers: Any = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("one_thread", "quiet_transformers")

IDS = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
SIZES: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": None, "num_experts_per_tok": 2,
}  # fmt: skip
ENDS = ("", "_bias")
MOE = ("Mixtral", "Qwen2Moe")
#: By model: its configuration, and what stays of its first layer. Experts are stored one by one, but in gpt-oss.
MODELS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "Llama": ({"tie_word_embeddings": True}, set()),
    "Mixtral": ({"num_local_experts": 4}, {"block_sparse_moe.gate.weight"}),
    "Qwen2Moe": (
        {"num_experts": 4, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64},
        {"mlp.gate.weight", "mlp.shared_expert_gate.weight"},
    ),
    "GptOss": (
        {"num_local_experts": 4, "head_dim": 16},
        {"mlp.router.weight", *(f"mlp.experts.{key}{end}" for key in ("gate_up_proj", "down_proj") for end in ENDS)},
    ),
}  # fmt: skip


def saved(folder: Path, name: str = "Llama", dtype: torch.dtype = torch.bfloat16, **fields: Any) -> Path:
    torch.manual_seed(1)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **MODELS[name][0], **fields})
    model = getattr(transformers, f"{name}ForCausalLM")(config).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)  # which routes tokens to different experts
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    (folder / "templates").mkdir()
    (folder / "templates" / "chat.jinja").write_text("chat")
    (folder / ".cache").mkdir()
    (folder / ".cache" / "lock").write_text("of a download")
    (folder / "consolidated.00.pth").write_bytes(b"the same weights")
    return folder


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    return dict(nvme_ops.load(folder / "model.safetensors.index.json"))


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize(("name", "kind"), [("Llama", "int8"), ("GptOss", "int4"), *itertools.product(MOE, KINDS)])
@torch.no_grad()
def test_what_is_written_is_what_transformers_and_compressed_tensors_read(
    name: str, kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compressors = pytest.importorskip("compressed_tensors.compressors")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    monkeypatch.setattr(ring, "PIECE", 12 * KIB)  # so that matrices are in several pieces
    source, target = saved(tmp_path / "source", name), tmp_path / "target"
    assert main(["convert", "--to", kind, str(source), str(target), "--max-shard-size", "30KB"]) == 0
    said = capsys.readouterr().out
    assert main(["verify", str(target)]) == 0
    assert len(list(target.glob("*.safetensors"))) > 1
    beside = set(files_in(source)) - {"model.safetensors", "consolidated.00.pth", ".cache/lock"}
    assert beside == {path for path in files_in(target) if not path.startswith("model")}

    settings = json.loads((target / "config.json").read_text())["quantization_config"]
    scheme = quantization.QuantizationConfig.model_validate(settings).config_groups["group_0"]
    compressor = compressors.BaseCompressor.get_value_from_registry(settings["format"])
    before, after = dict(nvme_ops.load(source / "model.safetensors")), tensors_in(target)
    packed = {key.removesuffix("_packed") for key in after if key.endswith("_packed")}
    stay = {f"model.layers.{number}.{key}" for number in (0, 1) for key in MODELS[name][1]}
    stay |= {"lm_head.weight", "model.embed_tokens.weight"}
    assert {key for key, value in before.items() if value.dim() > 1} - packed == stay & before.keys()
    assert set(settings["ignore"]) >= {key.removesuffix(".weight") for key in stay if key.endswith(".weight")}
    if name == "GptOss":
        assert r"re:model\.layers\.1\.mlp\.experts\..*" in settings["ignore"]
    meant, wrong, total = dict[str, torch.Tensor](), 0.0, 0.0
    for key, value in before.items():
        if key not in packed:
            assert torch.equal(after[key], value)
            meant[key] = value
            continue
        module = key.removesuffix("weight")
        parts = {part.removeprefix(module): after[part] for part in after if part.startswith(f"{key}_")}
        assert set(parts) == set(compressor.compression_param_names(scheme))
        meant[key] = compressor.decompress(parts, scheme)["weight"].bfloat16()
        wrong += float((meant[key].double() - value.double()).pow(2).sum())
        total += float(value.double().pow(2).sum())
    error = (wrong / total) ** 0.5
    assert {"int8": 0.004, "int4": 0.07, "mxfp4": 0.1}[kind] < error < {"int8": 0.01, "int4": 0.11, "mxfp4": 0.13}[kind]
    assert f"; {'< 1' if kind == 'int8' else round(100 * error)} % off" in said

    plain, model_class = tmp_path / "plain", getattr(transformers, f"{name}ForCausalLM")
    model = model_class.from_pretrained(source)
    model.save_pretrained(plain)
    nvme_ops.save(meant, plain / "model.safetensors", metadata={"format": "pt"})
    expanded = model_class.from_pretrained(plain)
    for options in ({}, {"quantization_config": transformers.CompressedTensorsConfig(dequantize=True)}):
        loaded, info = model_class.from_pretrained(target, output_loading_info=True, **options)
        assert not any(info.values())
        assert torch.equal(loaded(IDS).logits, expanded(IDS).logits)
    with from_pretrained(target, memory_budget="4M") as streamed:
        for key, value in streamed.state_dict().items():
            assert torch.equal(value, expanded.state_dict()[key])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_and_what_is_excluded(dtype: torch.dtype, tmp_path: Path) -> None:
    source, target = saved(tmp_path / "source", "Mixtral", dtype), tmp_path / "target"
    excluded = ["model.layers.1.self_attn.q_proj.weight", "*layers.0*experts.3.w2.weight"]
    assert excluded[0] in convert(str(source), str(tmp_path / "one"), to="int8", exclude=excluded[0]).kept
    done = convert(str(source), str(target), to="int4", exclude=excluded)
    before, after = dict(nvme_ops.load(source / "model.safetensors")), tensors_in(target)
    experts = [key for key in before if "layers.0.block_sparse_moe.experts" in key]
    assert set(done.kept) >= {excluded[0], *experts}, "of a layer's experts all are packed, or none"
    assert all(torch.equal(after[key], before[key]) for key in done.kept)
    assert "model.layers.1.block_sparse_moe.experts.3.w2.weight_packed" in after
    with from_pretrained(target, memory_budget="4M") as streamed:
        assert streamed.dtype == dtype


@torch.no_grad()
def test_mxfp4_is_computed_in_the_dtype_to_which_others_expand_it(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    source, target = saved(tmp_path / "source", dtype=torch.float16), tmp_path / "target"
    convert(str(source), str(target), to="mxfp4")
    with from_pretrained(target, memory_budget="4M") as streamed:
        assert streamed.dtype == torch.bfloat16
        logits = transformers.AutoModelForCausalLM.from_pretrained(target)(IDS).logits
        assert torch.equal(streamed(IDS).logits, logits)
    part = {"dtype": "float16", "text_config": {"torch_dtype": "float32", "size": 1}}
    assert packed_model._in_bfloat16(part) == {
        "dtype": "bfloat16", "text_config": {"torch_dtype": "bfloat16", "size": 1}
    }  # fmt: skip


def test_the_target_may_be_in_the_source_or_have_other_files_which_stay(tmp_path: Path) -> None:
    source = saved(tmp_path / "source")
    target = source / "target"
    target.mkdir()
    for name in ("notes", "tokenizer.json"):
        (target / name).write_text("mine")
    with pytest.raises(ValueError, match=r"tokenizer\.json is there already, and is not the source's"):
        convert(str(source), str(target), to="int4")
    assert files_in(target) == ["notes", "tokenizer.json"]
    (target / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantizing, "_scales", functools.partial(raise_, ValueError("is not finite")))
        with pytest.raises(ValueError, match="is not finite"):
            convert(str(source), str(target), to="int4")
    assert files_in(target) == ["notes", "tokenizer.json"]
    convert(str(source), str(target), to="int4")
    assert not (target / "target").exists()
    assert (target / "notes").read_text() == "mine"


def raise_(error: Exception, *_: object) -> None:
    raise error


def test_a_layer_that_is_tied_to_an_embedding_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = saved(tmp_path / "source")
    monkeypatch.setattr(transformers.LlamaForCausalLM, "get_output_embeddings", lambda _: None)
    assert list(convert(str(source), str(tmp_path / "target"), to="int8").kept) == ["model.embed_tokens.weight"]


def test_what_cannot_be_packed_is_refused(tmp_path: Path) -> None:
    source, number = saved(tmp_path / "source"), 0

    def refused(words: str, *options: str, path: Path = source, target: Path | None = None) -> None:
        nonlocal number
        number += 1
        new = tmp_path / f"target{number}"
        status, said = refusal(main, ["convert", "--to", "int4", str(path), str(target or new), *options])
        assert status == 2
        assert words in said
        assert not new.exists()

    refused("has no tensor 'head'", "--exclude", "head")
    refused("--to packs the model in a folder", path=source / "model.safetensors")
    refused("--to packs the model in a folder", target=tmp_path / "model.safetensors")
    refused("--to packs the model in a folder", target=source / "tokenizer.json")
    refused("no folder of a model: it has no config.json", path=tmp_path / "none")
    refused("is a model already: name another folder", target=source)
    convert(str(source), str(tmp_path / "target"), to="int8")
    refused("is a model already: name another folder", target=tmp_path / "target")
    refused("is quantized already", path=tmp_path / "target")
    assert refusal(main, ["convert", "--exclude", "head", str(source), str(tmp_path / "new")])[0] == 2
    with pytest.raises(ValueError, match="must be one of 'int8', 'int4', 'mxfp4'"):
        convert(str(source), str(tmp_path / "new"), to="int2")  # type: ignore[arg-type]
    transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=64, n_layer=1, n_head=2)).save_pretrained(
        tmp_path / "transposed"
    )
    refused("has no matrix that can be packed", path=tmp_path / "transposed")
    llama4 = transformers.Llama4TextConfig(**SIZES, num_local_experts=4, head_dim=16, intermediate_size_mlp=64)
    transformers.Llama4ForCausalLM(llama4).save_pretrained(tmp_path / "llama4")
    refused("which in a model that is quantized transformers expects one by one", path=tmp_path / "llama4")
    tensors = dict(nvme_ops.load(source / "model.safetensors"))
    name = "model.layers.1.mlp.up_proj.weight"
    for spoil, words in (
        (lambda: tensors[name].fill_(torch.nan), f"{name}: a weight that is not finite cannot be quantized"),
        (lambda: tensors.pop(name), f"weights are missing: {name}"),
        (lambda: tensors.update({name: torch.ones(96, 64, dtype=torch.int8)}), f"{name} is stored as torch.int8"),
    ):
        spoil()
        nvme_ops.save(tensors, source / "model.safetensors", metadata={"format": "pt"})
        refused(words)
    (source / "config.json").unlink()
    refused("it has no config.json")


def test_a_full_disk_leaves_nothing(make_file_system: Any, tmp_path: Path) -> None:
    source = saved(tmp_path / "source", hidden_size=512, intermediate_size=4096)  # of 20 MB
    disk = make_file_system(4 * MIB)
    status, said = refusal(main, ["convert", "--to", "mxfp4", str(source), str(disk / "target")])
    assert status == 2
    assert "No space left on device" in said
    assert str(disk / "target") in said
    assert not (disk / "target").exists()
    (source / "tokenizer.json").write_bytes(bytes(8 * MIB))
    status, said = refusal(main, ["convert", "--to", "mxfp4", str(source), str(disk / "target")])
    assert (status, "tokenizer.json" in said) == (2, True)
    assert not (disk / "target").exists()


def test_a_killed_conversion_is_no_model_and_the_next_one_completes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ring, "PIECE", 12 * KIB)
    source, target = saved(tmp_path / "source"), tmp_path / "target"
    convert(str(source), str(tmp_path / "whole"), to="int4", max_shard_size="50KB")
    if (child := os.fork()) == 0:
        on_progress = at_second(lambda: os.kill(os.getpid(), signal.SIGKILL))
        convert(str(source), str(target), to="int4", max_shard_size="50KB", on_progress=on_progress)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert "config.json" in files_in(target)
    with pytest.raises(FileNotFoundError, match=r"has no model\.safetensors"):
        from_pretrained(target, memory_budget="4M")
    with pytest.raises(OSError, match="no file named"):
        transformers.AutoModelForCausalLM.from_pretrained(target)
    convert(str(source), str(target), to="int4", max_shard_size="50KB")
    assert files_in(target) == files_in(tmp_path / "whole")
    whole, tensors = tensors_in(tmp_path / "whole"), tensors_in(target)
    assert whole.keys() == tensors.keys()
    assert all(torch.equal(tensors[name], whole[name]) for name in whole)


def test_of_two_that_convert_to_one_folder_the_first_wins(tmp_path: Path) -> None:
    source, target, outcomes = saved(tmp_path / "source"), tmp_path / "target", list[str]()

    def work(number: int) -> None:
        try:
            convert(str(source), str(target), to="int4" if number else "int8")
            outcomes.append("4" if number else "8")
        except ValueError as error:
            outcomes.append(str(error).partition("is a model already")[1])

    in_threads(work, 2)
    (bits,) = set(outcomes) - {"is a model already"}
    settings = json.loads((target / "config.json").read_text())["quantization_config"]
    assert str(settings["config_groups"]["group_0"]["weights"]["num_bits"]) == bits
    with from_pretrained(target, memory_budget="4M"):
        pass


def test_memory_is_that_of_a_few_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring, "PIECE", 64 * KIB)
    source, sizes = saved(tmp_path / "source", intermediate_size=8192), list[int]()
    before = ring.Ring.read

    def read(self: ring.Ring, handle: Any, places: Any) -> Any:
        places = list(places)
        sizes.extend(place.nbytes for place in places)
        return before(self, handle, places)

    monkeypatch.setattr(ring.Ring, "read", read)
    convert(str(source), str(tmp_path / "target"), to="int8", verify=False)
    assert max(sizes) <= 64 * KIB, "a matrix has 1 MiB, and its scales are few"
