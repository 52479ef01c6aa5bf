"""``nvme-offload`` on a small Llama: what it prints, and how it refuses. No time is asserted."""

from __future__ import annotations

import io
import itertools
import json
import os
import re
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nvme_ops.base.text import KIB, MIB
from nvme_ops.checkpoint.convert import convert
from nvme_ops.formats import KINDS
from nvme_ops.measure.files import cached_bytes, handles_read_the_cache
from nvme_ops.offload import NvmeCache, cli, from_pretrained, stream_weights
from nvme_ops.offload.cache.quantized_layer import DTYPES
from nvme_ops.offload.plan.estimate import step_bytes
from nvme_ops.offload.plan.probe import Layers, rates, sizes_of
from nvme_ops.offload.weights.generation import GenerationStats
from nvme_ops.offload.weights.stored import stored_in
from tests.offload.llama import WORDS, saved_llama, saved_tokenizer

transformers: Any = pytest.importorskip("transformers")
CPU = torch.device("cpu")
BUDGET = 8 * MIB
LAYERS = 3
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_llama(tmp_path_factory.mktemp("model"), num_hidden_layers=LAYERS)


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    monkeypatch.setattr("nvme_ops.storage.rates._SECONDS", 0.01)
    monkeypatch.setattr("nvme_ops.storage.rates._SCRATCH", 32 * MIB)


def run(capsys: Capture, name: str, model: Path, *words: object, memory: str = "8M") -> tuple[str, str]:
    assert cli.main([name, str(model), "--memory", memory, *map(str, words)]) == 0
    return capsys.readouterr()


def document(capsys: Capture, name: str, model: Path, *words: object, memory: str = "8M") -> Any:
    out, err = run(capsys, name, model, *words, "--json", memory=memory)
    assert err == ""
    return json.loads(out)


def in_memory(folder: Path, prompt: list[int], count: int) -> list[int]:
    model: Any = transformers.LlamaForCausalLM.from_pretrained(folder)
    tokens = model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False)
    return [int(token) for token in tokens[0, len(prompt) :]]


# Plan


def bytes_kept(model: Any) -> int:
    """Returns the bytes of the weights, but experts, that a run has chosen to keep."""
    return sum(weight.room for weight in model._nvme_window._keep)


def test_the_plan_says_what_each_step_will_read(llama: Path) -> None:
    with from_pretrained(llama, memory_budget=5 * MIB) as model, torch.no_grad():
        read, kept, _ = step_bytes(sizes_of(model)[0], 1)
        stats = []
        for _ in range(6):
            model(torch.tensor([[1]]))
            stats.append(model.stats())
        assert 0 < kept < 5 * MIB
        assert kept == bytes_kept(model)
        assert (stats[-1].bytes_read - stats[-4].bytes_read) / 3 == pytest.approx(read, rel=0.01)
        layers = Layers(model, BUDGET, CPU, 1 << 30)
        with pytest.raises(ValueError, match=r"a layer takes .* too much to time one in 1 MiB"):
            Layers(model, MIB, CPU, 2 * MIB)
    assert layers.cache_sizes()["cache"] == LAYERS * 2 * 2 * 64 * 4  # keys and values, heads, elements, bytes


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_plan_knows_a_cache_in_8_bits(dtype: Any, llama: Path, folder: Path, capsys: Capture) -> None:
    with from_pretrained(llama, memory_budget=BUDGET) as model, torch.no_grad():
        planned = replace(sizes_of(model)[0], **Layers(model, BUDGET, CPU, 1 << 30).cache_sizes(dtype))
        stored, _, beside = planned.in_cache(2, 448)
        one = stored // LAYERS
        for budget, fits in ((stored + one + beside, True), (one + beside, True), (one + beside - 64 * KIB, False)):
            with NvmeCache(folder, budget, dtype=dtype, config=model.config) as cache:
                try:
                    for part in torch.ones(2, 448, dtype=torch.long).split([447, 1], dim=1):
                        model(part, cache=cache)
                    assert fits
                except MemoryError:
                    assert not fits
                    continue
                assert (cache.stats().bytes_stored == 0) == (budget > stored + beside)
    capsys.readouterr()
    words = ("--batch", 1, 3, "--prompt-length", 284, "--new-tokens", 100)
    plain, plan = (document(capsys, "plan", llama, *words, *more) for more in ([], ["--cache-dtype", dtype]))
    assert plan["cache_bytes_per_token"] == planned.cache_stored < 0.32 * plain["cache_bytes_per_token"]
    assert [batch["cache_bytes"] for batch in plan["batches"]] == [stored * 384 // 896, stored * 384 // 896 * 3]
    assert "expanding_cache" not in plain["rates"]
    for batch in plan["batches"]:
        seconds = batch["cache_bytes"] / planned.cache_stored * planned.cache / plan["rates"]["expanding_cache"]
        assert batch["expanding"] == pytest.approx(seconds)
        assert batch["nvme"]["computing"] == pytest.approx(batch["no_offload"]["computing"] + seconds)
    out, _ = run(capsys, "plan", llama, *words, "--cache-dtype", dtype)
    assert f" of key-value cache for each token in {dtype}\n" in out
    assert f"\nkeys in {dtype} are expanded at " in out
    for word, other in (("--cache-dtype", dtype), ("--quantize", "int8")):
        assert cli.main(["plan", str(llama), "--train", word, other, "--memory", "16M"]) == 2
        assert "are not for --train" in capsys.readouterr().err


def test_the_plan_knows_what_weights_that_all_tokens_use_expand_to(llama: Path) -> None:
    with from_pretrained(llama, memory_budget=5 * MIB) as model:
        layers = [weight for weight in map(stored_in, model.model.layers.parameters()) if weight is not None]
        planned, plain = sizes_of(model, "int4")[0], sizes_of(model)[0]
    assert plain.expanded == 0 < planned.expanded == sum(weight.nbytes for weight in layers)
    assert plain.model - planned.model == pytest.approx(planned.expanded * (1 - 9 / 64), rel=0.001)  # of float32


def mixtral() -> Any:
    """Returns a model of four layers with 16 experts each, two of which a token uses."""
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        hidden_size=128, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=512, num_local_experts=16, num_experts_per_tok=2,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config)


def test_the_plan_says_what_a_mixture_of_experts_will_read(folder: Path) -> None:
    def choose_at_random(hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scores = torch.rand(hidden.shape[:-1].numel(), 16)
        return scores, *scores.topk(2)

    made = mixtral()
    made.save_pretrained(folder / "model")
    nbytes = sum(param.nbytes for param in made.parameters())
    in_experts = sum(param.nbytes for name, param in made.named_parameters() if ".experts." in name)
    for share in (0.25, 0.5, 0.75):
        with from_pretrained(folder / "model", memory_budget=int(nbytes - (1 - share) * in_experts)) as model:
            sizes, _ = sizes_of(model)
            for layer in model.model.layers:
                layer.mlp.gate.forward = choose_at_random
            model._nvme_window.experts.guessing = False  # chance cannot be guessed
            read = []
            with torch.no_grad():
                for ids in torch.zeros(1, 82, dtype=torch.long).split([32, *[1] * 50], dim=1):
                    model(ids)
                    read.append(model.stats().bytes_read)
        planned, kept, _ = step_bytes(sizes, 1)
        assert kept == bytes_kept(model)
        assert (read[-1] - read[0]) / 50 == pytest.approx(planned, rel=0.15), share
    assert Layers(model, BUDGET, CPU, 1 << 30).step(2, 16) > 0


def test_the_plan_knows_lists_of_experts(folder: Path) -> None:
    for count in (16, 2):
        model = mixtral()
        for layer in model.model.layers:
            layer.mlp.gate = torch.nn.Linear(128, count, bias=False)
            layer.mlp.experts = torch.nn.ModuleList(torch.nn.Linear(128, 256) for _ in range(count))
        with stream_weights(model, folder, memory_budget=2 * MIB) as streamed:
            experts = sizes_of(streamed)[0].experts
            assert (experts.experts, experts.used_per_token) == (4 * count, 8)
            assert 0 < experts.memory == streamed._nvme_window.experts.share.nbytes


@pytest.mark.parametrize("kind", KINDS)
def test_the_plan_knows_what_packed_weights_take(kind: Any, folder: Path, capsys: Capture) -> None:
    made = mixtral().bfloat16()
    made.save_pretrained(folder / "model")
    convert(str(folder / "model"), str(folder / "packed"), to=kind)
    with from_pretrained(folder / "model", memory_budget="16M") as plain:
        planned, about = sizes_of(plain, kind)
    with stream_weights(made, folder, memory_budget="16M", quantize=kind) as streamed:
        sizes, _ = sizes_of(streamed)
    assert (planned.experts, planned.expanded) == (sizes.experts, sizes.expanded)
    assert planned.model == pytest.approx(sizes.model, rel=0.01)
    assert planned.experts.expanded == 4 * 16 * 3 * 128 * 128 * 2
    share = {"int8": 1 / 2, "int4": 9 / 32, "mxfp4": 17 / 64}[kind]
    assert planned.experts.expanded * share <= planned.experts.bytes < 1.3 * planned.experts.expanded * share
    capsys.readouterr()
    assert (about["stored_as"], planned.multiplied) == (kind, 4)
    words = ("--batch", 1, 64, "--prompt-length", 2, "--new-tokens", 2)
    plan = document(capsys, "plan", folder / "packed", *words, memory="16M")
    assert [entry["expanding"] > 0 for entry in plan["batches"]] == [False, True]
    assert plan["experts"]["bytes"] == pytest.approx(planned.experts.bytes, rel=0.3)  # they need not be whole pages
    bits = {"int8": "8 bits, scales of bfloat16 for 128", "int4": "4 bits, scales of bfloat16 for 32"}
    assert plan["stored_as"] == f"{bits.get(kind, '4 bits, scales of e8m0 for 32')} numbers"
    out, _ = run(
        capsys, "plan", folder / "model", "--quantize", kind, "--batch", 64, "--prompt-length", 8, memory="16M"
    )
    assert f"packed weights ({kind}) are expanded at" in out
    assert "  expanding  " in out
    assert cli.main(["plan", str(folder / "packed"), "--quantize", kind, "--memory", "16M"]) == 2
    assert "are packed already" in capsys.readouterr().err
    assert cli.main(["plan", str(folder / "packed"), "--state-dtype", "int8", "--memory", "16M"]) == 2
    assert "--state-dtype is for --train" in capsys.readouterr().err


def count_joules(monkeypatch: pytest.MonkeyPatch) -> None:
    joules = itertools.count(0, 84)
    monkeypatch.setattr("nvme_ops.offload.cli.Meter.read", lambda _: {"package-0": float(next(joules))})


def test_a_plan(llama: Path, folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    count_joules(monkeypatch)
    monkeypatch.setattr("nvme_ops.offload.plan.probe.free_memory", lambda: 64 * MIB)
    words = ["--batch", 4, 1, 100000, "--prompt-length", 8, "--new-tokens", 8, "--folder", folder]
    out, _ = run(capsys, "plan", llama, *words, "--price-per-hour", "1.2")
    for line in (
        f"LlamaForCausalLM: {LAYERS} layers, .*", r"1 .* J +[\d.]+", "online: +(batch [14],|no recommendation) .*",
        r"NVMe +8 MiB +[\d.]+ \(\w+\) +[\d.]+ \(\w+\)", "batch 100000: the cache does not fit .*",
    ):  # fmt: skip
        assert re.search(f"^{line}$", out, re.MULTILINE), line
    plan = document(capsys, "plan", llama, *words, "--watts", 100)
    batch = plan["batches"][1]
    assert plan["batches_that_do_not_fit"] == [100000]
    assert plan["cache_bytes_per_token"] * 4 * 16 == batch["cache_bytes"] < batch["beside_bytes"]
    assert batch["nvme"]["joules_per_1000_tokens"] == pytest.approx(1e5 / batch["nvme"]["tokens_per_second"])
    assert list(folder.iterdir()) == []


def test_a_plan_of_training(llama: Path, folder: Path, capsys: Capture) -> None:
    words = ["--train", "--prompt-length", "16", "--folder", folder, "--batch"]
    out, _ = run(capsys, "plan", llama, *words, 1, 1000, memory="160M")
    for line in (
        r"LlamaForCausalLM: [\d.]+ billion parameters of float32, .* of AdamW's st.*",
        r"in memory +.* 0 B +0 B +0 B +[\d.]+ s.*", r"states and parameters +.* TB +\d+",
        ".* does not fit .*", "fastest: .*", "none fits: .*",
    ):  # fmt: skip
        assert re.search(f"^{line}$", out, re.MULTILINE), line
    assert not list(folder.iterdir())
    plan = document(capsys, "plan", llama, *words, 2, memory="64M")
    model: Any = transformers.LlamaForCausalLM.from_pretrained(llama).train()
    assert plan["parameters"] == sum(param.numel() for param in model.parameters())
    assert plan["states"] == 8 * plan["parameters"]
    own, saved = {param.untyped_storage().data_ptr() for param in model.parameters()}, dict[int, int]()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    ids = torch.zeros(1, 16, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(ids, labels=ids, use_cache=False).loss
    beside = sum(nbytes for place, nbytes in saved.items() if place not in own)
    assert plan["activations"] * 16 == pytest.approx(beside, rel=0.25)
    del loss
    memory, states, freed, gradients, both, activations, everything = plan["batches"][0]["ways"]
    assert everything["read"] - gradients["read"] == activations["read"]
    assert states["written"] == freed["written"] == both["written"] == pytest.approx(plan["states"], rel=0.01)
    assert gradients["written"] > states["written"], "those of parameters of 1 MiB and more"
    assert both["memory"] == freed["memory"] < states["memory"] < memory["memory"]


@pytest.mark.skipif(not handles_read_the_cache(), reason="NVME_OPS_CACHE=direct leaves the page cache as it is")
def test_the_page_cache_is_measured_where_it_is_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = folder / "weights"
    file.write_bytes(bytes(MIB))

    def measured(free: int) -> tuple[bool, bool]:
        """Returns whether the page cache was measured, and has the file now."""
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        monkeypatch.setattr("nvme_ops.offload.plan.probe.free_memory", lambda: free)
        result = rates([str(file)], None, CPU)
        assert result.cached is None or result.cached > 0
        return result.cached is not None, bool(cached_bytes(str(file)))

    assert measured(MIB) == (True, True)
    assert measured(MIB - 1) == (False, False)
    monkeypatch.setenv("NVME_OPS_CACHE", "direct")
    assert measured(MIB) == (False, False)


def test_another_storage_is_measured_with_a_file_that_is_removed(llama: Path) -> None:
    shared = Path("/dev/shm")
    if not shared.is_dir() or os.stat(shared).st_dev == os.stat(llama).st_dev:
        pytest.skip("needs a second file system")
    before = set(shared.iterdir())
    assert rates([str(llama / "model.safetensors")], str(shared), CPU).storage > 0
    assert {path for path in set(shared.iterdir()) - before if path.name.startswith(".nvme_ops-")} == set()


# Generate


def test_text_or_ids_are_those_of_the_model_in_memory(llama: Path, folder: Path, capsys: Capture) -> None:
    wanted = in_memory(llama, [1, 2], 5)
    out, err = run(capsys, "generate", llama, "--new-tokens", 5, "--ids", "1,2")
    assert [int(token) for token in out.split(",")] == wanted
    assert "no tokenizer in the folder: these are ids of tokens\n" in err  # transformers may show a bar before
    shutil.copytree(llama, folder, dirs_exist_ok=True)
    saved_tokenizer(folder)
    out, err = run(capsys, "generate", folder, "--new-tokens", 5, "--prompt", "memory1 model2")
    assert out.split() == [f"{WORDS[token % 8]}{token}" for token in wanted]
    assert re.search(r"^[\d.]+ tokens/s, (< 1|\d+) % of what is possible: ", err, re.MULTILINE)


def test_a_batch_as_a_document(llama: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    count_joules(monkeypatch)
    words = ["--ids", "1,2", "--batch", 3, "--new-tokens", 7]
    sampled = document(capsys, "generate", llama, *words, "--sample")
    assert len({tuple(ids) for ids in sampled["tokens"]}) > 1
    result = document(capsys, "generate", llama, *words)
    assert result["tokens"] == [in_memory(llama, [1, 2], 7)] * 3
    assert (result["steps"], result["texts"]) == (6, None)
    assert result["joules_per_1000_tokens"] == pytest.approx(4000)
    assert 0 < result["peak_weights"] <= BUDGET
    assert result["tokens_per_second"] == pytest.approx(3 * 6 / result["seconds"])


def test_what_was_reached_is_compared_with_the_lower_bound() -> None:
    # two sequences, ten steps of 0.5 s: 1 GB at 4 GB/s would take 0.25 s, computing took 4 s of the five
    reached = GenerationStats([[1] * 11] * 2, 1.0, 10, 5.0, 1.0, 1_000_000_000, 1, 2).document(4e9, 88.0)
    wanted = {"tokens_per_second": 4.0, "bytes_per_step": 1e8, "rate_reached": 2e8, "reading_bound": 80.0,
              "computing_bound": 5.0, "share_of_bound": 0.8, "joules_per_1000_tokens": 4000}  # fmt: skip
    assert {key: reached[key] for key in wanted} == pytest.approx(wanted)
    text = cli.reached_text(reached).replace(".00", "")
    assert "4 tokens/s, 80 % of what is possible: 80.0 if reading were all, 5 if computing were" in text
    assert "4000 J for 1,000 tokens" in text
    nothing = GenerationStats([[1, 2]], 1.0, 1, 0.5, 0.0, 0, 1, 2).document(4e9, None)
    assert (nothing["reading_bound"], nothing["share_of_bound"]) == (None, pytest.approx(1.0))
    assert "no limit if reading were all" in cli.reached_text(nothing)
    one = GenerationStats([[1]], 1.0, 0, 0.0, 0.0, 0, 1, 2).document(4e9, None)
    assert "tokens/s" not in cli.reached_text(one), "one token has no rate"


# Refusals: status 2, one line


def test_what_is_refused(llama: Path, folder: Path, capsys: Capture) -> None:
    shutil.copytree(llama, folder / "only_weights")
    (folder / "only_weights/config.json").unlink()
    shutil.copytree(llama, folder / "damaged")
    (folder / "damaged/model.safetensors").write_bytes(b"x" * 100)
    sizes: Any = {"hidden_size": 256, "num_hidden_layers": 2, "vocab_size": 512}
    bert = transformers.BertConfig(**sizes, intermediate_size=512, num_attention_heads=4)
    transformers.BertModel(bert).save_pretrained(folder / "bert")
    transformers.MambaForCausalLM(transformers.MambaConfig(**sizes)).save_pretrained(folder / "mamba")
    capsys.readouterr()
    for command, name, words, reason in (
        ("plan", "only_weights", [], "config.json"),
        ("generate", "damaged", ["--ids", "1"], "model.safetensors"),
        ("plan", "bert", [], "BertModel is not supported: "),
        ("generate", "bert", ["--ids", "1"], "BertModel is not supported: "),
        ("plan", "mamba", [], "no layer of MambaForCausalLM can be timed"),
        ("generate", llama, ["--prompt", "hello"], "no tokenizer: give the prompt as ids of tokens, --ids 1,2,3"),
        ("generate", llama, ["--ids", "1,2000"], "token 2000 is not in the vocabulary of the model, which has 2000"),
        ("generate", llama, ["--ids", "1", "--new-tokens", "512"], "513 together, and the model takes 512"),
        ("generate", llama, ["--ids", "1", "--device", "nowhere"], "--device nowhere: "),
    ):
        assert cli.main([command, str(folder / name), *words, "--memory", "9M"]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert err.startswith("nvme-offload: ")
        assert reason in err


def test_watts_are_a_number_above_0(capsys: Capture) -> None:
    for wrong in ("0", "nan", "x"):
        with pytest.raises(SystemExit):
            cli.main(["plan", "model", "--memory", "1G", "--watts", wrong])
        assert f"--watts: '{wrong}' is not a number above 0" in capsys.readouterr().err


def test_without_transformers(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert cli.main(["generate", "x", "--memory", "8M", "--ids", "1"]) == 2
    wanted = "nvme-offload: transformers is not installed: pip install 'transformers>=5'\n"
    assert capsys.readouterr().err == wanted


def test_ctrl_c_ends_it_quietly(llama: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    class Screen(io.StringIO):
        def write(self, _: str) -> int:  # of the first token
            signal.raise_signal(signal.SIGINT)
            return 0

    monkeypatch.setattr(sys, "stdout", Screen())
    assert cli.main(["generate", str(llama), "--memory", "8M", "--ids", "1,2", "--new-tokens", "500"]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "nvme-offload: interrupted"
