"""``NvmeCache``: models generate the same tokens with it as with a cache in memory, in bounded memory."""

from __future__ import annotations

import copy
import errno
import functools
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nvme_ops.offload import NvmeCache
from tests.conftest import KIB, MIB, run_python

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 199, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 2048,
}  # fmt: skip

MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=199, n_embd=256, n_layer=6, n_head=4, n_positions=1024)
    ),
    "mixtral": lambda: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**SIZES, sliding_window=90, num_local_experts=4, num_experts_per_tok=2)
    ),
}

#: Ways of generating: their arguments.
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "sampling": {"do_sample": True, "top_k": 50},
}

PROMPTS = torch.randint(3, 199, (2, 230), generator=torch.Generator().manual_seed(5))
PADDED = torch.ones_like(PROMPTS)
PADDED[0, :70] = 0


@functools.cache
def model(name: str) -> Any:
    torch.manual_seed(2)
    return MODELS[name]().eval()


def generated(name: str, cache: Any, new: int = 8, **way: Any) -> torch.Tensor:
    torch.manual_seed(3)
    found = model(name).generate(
        PROMPTS,
        attention_mask=PADDED,
        max_new_tokens=new,
        pad_token_id=0,
        eos_token_id=None,
        cache=cache,
        **way,
    )
    return torch.as_tensor(found)


@functools.cache
def wanted(name: str, way: str) -> torch.Tensor:
    return generated(name, transformers.DynamicCache(config=model(name).config), **WAYS[way])


def size_of(name: str, rows: int, tokens: int) -> int:
    """Bytes of the keys and values of a model."""
    config = model(name).config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * rows * tokens * config.num_hidden_layers * heads * width * 4)


# The same tokens


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_the_tokens_are_those_of_a_cache_in_memory(name: str, way: str, folder: Path) -> None:
    rows = 2 * WAYS[way].get("num_beams", 1)
    size = size_of(name, rows, 238)
    for budget in (size // 2, 4 * size):
        with NvmeCache(folder, budget) as cache:
            assert torch.equal(generated(name, cache, **WAYS[way]), wanted(name, way))
            stats = cache.stats()
            assert stats.peak_bytes <= budget
            assert stats.bytes_cached == size_of(name, rows, cache.get_seq_length())
            assert (stats.bytes_read > 0) == (stats.bytes_written > 0) == (budget < size)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_context_of_four_times_the_memory(kind: str, folder: Path) -> None:
    torch.manual_seed(8)
    if kind == "llama":
        sizes = {**SIZES, "hidden_size": 256, "num_hidden_layers": 12, "num_key_value_heads": 4}
        large = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval()
    else:
        large = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=199, n_embd=256, n_head=4)).eval()
    prompts = torch.randint(3, 199, (2, 700), generator=torch.Generator().manual_seed(9))
    arguments: dict[str, Any] = {"max_new_tokens": 8, "pad_token_id": 0, "eos_token_id": None}
    want = large.generate(prompts, cache=transformers.DynamicCache(), **arguments)
    budget = 12 * 2 * 707 * 2 * 256 * 4 // 4
    with NvmeCache(folder, budget) as cache:
        assert torch.equal(large.generate(prompts, cache=cache, **arguments), want)
        assert cache.stats().bytes_cached == 4 * budget
        assert cache.stats().peak_bytes <= budget


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_any_attention(attention: str, folder: Path) -> None:
    before = model("llama").config._attn_implementation
    model("llama").set_attn_implementation(attention)
    try:
        want = generated("llama", transformers.DynamicCache())
        with NvmeCache(folder, "1536K") as cache:
            assert torch.equal(generated("llama", cache), want)
    finally:
        model("llama").set_attn_implementation(before)


@pytest.mark.parametrize("budget", ["1M", "64M"])
def test_windows_of_the_config_bound_what_is_kept(budget: str, folder: Path) -> None:
    config = model("mixtral").config
    with NvmeCache(folder, budget, config=config) as cache:
        assert torch.equal(generated("mixtral", cache), wanted("mixtral", "greedy"))
        assert cache.get_seq_length() == 237
        assert cache.stats().bytes_cached == size_of("mixtral", 2, config.sliding_window - 1)
        assert cache.is_sliding == [True] * 6


def test_prompt_lookup_crops_what_was_guessed_wrong(folder: Path) -> None:
    prompt = PROMPTS[:1, :50].repeat(1, 4)
    arguments: dict[str, Any] = {"max_new_tokens": 30, "prompt_lookup_num_tokens": 5, "eos_token_id": None}
    want = model("llama").generate(prompt, pad_token_id=0, **arguments)
    with NvmeCache(folder, "800K") as cache:
        found = model("llama").generate(prompt, pad_token_id=0, cache=cache, **arguments)
        assert torch.equal(found, want)
        assert cache.stats().bytes_written > 0


def test_an_assistant_of_another_size(folder: Path) -> None:
    torch.manual_seed(7)
    assistant = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SIZES, "num_hidden_layers": 1})).eval()
    arguments: dict[str, Any] = {"max_new_tokens": 12, "assistant_model": assistant, "eos_token_id": None}
    want = model("llama").generate(PROMPTS[:1], pad_token_id=0, **arguments)
    with NvmeCache(folder, "640K") as cache:
        assert torch.equal(model("llama").generate(PROMPTS[:1], pad_token_id=0, cache=cache, **arguments), want)


def test_a_conversation_goes_on_with_the_same_cache(folder: Path) -> None:
    more = torch.randint(3, 199, (2, 60), generator=torch.Generator().manual_seed(6))
    outputs = []
    with NvmeCache(folder, "1536K") as cache:
        for each in (transformers.DynamicCache(), cache):
            first = model("llama").generate(PROMPTS, max_new_tokens=20, pad_token_id=0, cache=each)
            again = torch.cat([first, more], 1)
            outputs.append(model("llama").generate(again, max_new_tokens=20, pad_token_id=0, cache=each))
    assert torch.equal(*outputs)


@pytest.mark.parametrize("way", ["greedy", "beams"])
def test_encoder_and_decoder_have_a_cache_each(way: str, folder: Path) -> None:
    torch.manual_seed(4)
    t5 = transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=199, d_model=64, d_kv=64, d_ff=96, num_layers=4, num_heads=2)
    ).eval()
    arguments: dict[str, Any] = {"max_new_tokens": 16, "decoder_start_token_id": 0, "eos_token_id": None, **WAYS[way]}
    want = t5.generate(PROMPTS, attention_mask=PADDED, **arguments)
    rows = 2 * WAYS[way].get("num_beams", 1)
    with NvmeCache(folder, "4M") as own, NvmeCache(folder, rows * 640 * KIB) as cross:
        cache = transformers.EncoderDecoderCache(own, cross)
        assert torch.equal(t5.generate(PROMPTS, attention_mask=PADDED, cache=cache, **arguments), want)
        assert cross.stats().bytes_read > 0


# What it counts


def test_each_token_is_written_once_at_most(folder: Path) -> None:
    with NvmeCache(folder, "1536K") as cache:
        generated("llama", cache, new=24)
        stats = cache.stats()
        assert stats.bytes_written == stats.bytes_stored <= stats.bytes_cached
        files = sum(each.stat().st_blocks * 512 for each in folder.rglob("*") if each.is_file())
        assert files >= stats.bytes_stored


def test_reordering_writes_nothing(folder: Path) -> None:
    with NvmeCache(folder, "4M") as cache:
        generated("llama", cache, num_beams=3)
        stats = cache.stats()
        assert 0 < stats.bytes_written <= stats.bytes_cached


def test_most_reads_are_ahead_of_their_use(folder: Path) -> None:
    with NvmeCache(folder, size_of("llama", 2, 238)) as cache:  # memory is counted in powers of two
        generated("llama", cache)
        stats = cache.stats()
        assert stats.bytes_read > 4 * stats.bytes_on_demand > 0


def test_without_pressure_no_file_is_touched(folder: Path) -> None:
    with NvmeCache(folder, "64M") as cache:
        generated("llama", cache)
        assert cache.stats().bytes_written == cache.stats().bytes_read == 0


# What goes wrong


def test_a_budget_that_is_too_small_says_what_is_needed(folder: Path) -> None:
    with (
        NvmeCache(folder, "500K") as cache,
        pytest.raises(MemoryError, match=r"a memory_budget of 500 KiB is too small: layer \d, .* at least \d+ KiB are"),
    ):
        generated("llama", cache)


@pytest.mark.parametrize("budget", ["", "no size", 0])
def test_a_budget_that_is_no_size(budget: Any, folder: Path) -> None:
    with pytest.raises(ValueError, match=r"size|at least 1"):
        NvmeCache(folder, budget)
    assert not list(folder.iterdir())


def test_a_folder_that_does_not_exist(folder: Path) -> None:
    with pytest.raises(FileNotFoundError):
        NvmeCache(folder / "none" / "below", "1M")


def test_a_full_disk(make_file_system: Callable[..., Path]) -> None:
    place = make_file_system(16 * MIB)
    with NvmeCache(place, "1M") as cache:
        room = os.statvfs(place)
        with open(place / "filler", "wb") as filler:
            os.posix_fallocate(filler.fileno(), 0, room.f_bavail * room.f_frsize - 100 * KIB)
        with pytest.raises(
            OSError, match=r"keys and values of layer \d+ do not fit beside the .* in its files"
        ) as caught:
            generated("llama", cache)
        assert caught.value.errno == errno.ENOSPC
        del caught  # its traceback has keys and values
        (place / "filler").unlink()
        cache.reset()
        assert torch.equal(generated("llama", cache), wanted("llama", "greedy"))


def test_a_closed_cache(folder: Path) -> None:
    cache = NvmeCache(folder, "1536K")
    generated("llama", cache)
    cache.close()
    cache.close()
    assert not list(folder.iterdir())
    for use in (cache.reset, lambda: cache.crop(-1), lambda: generated("llama", cache)):
        with pytest.raises(ValueError, match="this NvmeCache is closed"):
            use()
    assert repr(cache) == "<NvmeCache closed>"


def test_a_cache_that_is_gone_is_closed(folder: Path) -> None:
    cache = NvmeCache(folder, "1536K")
    generated("llama", cache)
    del cache
    assert not list(folder.iterdir())


def test_a_copy_is_refused(folder: Path) -> None:
    with NvmeCache(folder, "1536K") as cache:
        with pytest.raises(TypeError, match="cannot be copied"):
            copy.deepcopy(cache)
        with pytest.raises(TypeError, match="cannot be pickled"):
            pickle.dumps(cache)


def test_gradients_are_refused(folder: Path) -> None:
    with NvmeCache(folder, "1536K") as cache, pytest.raises(RuntimeError, match="NvmeCache is for inference"):
        model("llama")(PROMPTS, cache=cache)


def test_an_unsupported_layer_is_named(folder: Path) -> None:
    config = transformers.LlamaConfig(**SIZES)
    config.layer_types = ["full_attention", "hybrid"] * 3
    with pytest.raises(ValueError, match="layer 1 of this model, of type 'hybrid'"):
        NvmeCache(folder, "1M", config=config)
    assert not list(folder.iterdir())


# Several


def test_two_caches_in_one_folder_do_not_meet(folder: Path) -> None:
    with NvmeCache(folder, "1536K") as first, NvmeCache(folder, "1536K") as second:
        ours = torch.Generator().manual_seed(1)
        sent: list[list[torch.Tensor]] = [[], []]
        for _ in range(30):
            for layer in range(4):
                for which, cache in enumerate((first, second)):
                    states = torch.randn(2, 2, 16, 64, generator=ours)
                    found, _ = cache.update(states, -states, layer)
                    if layer == 3:
                        sent[which].append(states)
                        assert torch.equal(found, torch.cat(sent[which], 2))
        assert first.stats().bytes_written > 0


def test_several_folders_share_it(folder: Path) -> None:
    places = [folder / "a", folder / "b"]
    for place in places:
        place.mkdir()
    with NvmeCache(places, "1536K") as cache:
        assert torch.equal(generated("llama", cache), wanted("llama", "greedy"))
        for place in places:
            assert max(each.stat().st_size for each in place.rglob("*") if each.is_file()) > 4 * KIB


def test_the_package_does_not_import_transformers() -> None:
    program = "import sys, nvme_ops.offload; assert 'transformers' not in sys.modules"
    run_python(program, fresh=True)
