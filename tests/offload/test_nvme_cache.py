"""``NvmeCache``: call by call, and in whole generations, it returns what transformers' cache in memory returns."""

from __future__ import annotations

import copy
import errno
import functools
import os
import pickle
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nvme_ops.base.text import bytes_of
from nvme_ops.io.engine import Priority
from nvme_ops.offload import NvmeCache
from nvme_ops.offload.cache.quantized_layer import DTYPES
from nvme_ops.offload.cache.segments import Segments
from nvme_ops.storage.slab import Extent
from nvme_ops.storage.striped import Piece, StripedSlabs
from tests.conftest import KIB, MIB

transformers = pytest.importorskip("transformers")

from tests.offload.rounded_cache import usual_cache  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

# Call by call

LAYERS, WINDOW, MIN_BUDGET = 5, 33, 2600 * KIB


def config(windows: bool, window: int = WINDOW) -> Any:
    """All layers attend to everything, or some to a window."""
    kinds = ["full_attention", "sliding_attention" if windows else "full_attention"] * LAYERS
    return transformers.Qwen2Config(
        num_hidden_layers=LAYERS, use_sliding_window=windows, sliding_window=window, layer_types=kinds[:LAYERS]
    )


class Caches(RuleBasedStateMachine):
    """Two caches that are given the same calls, and must return the same."""

    @initialize(
        windows=st.booleans(),
        budget=st.sampled_from([MIN_BUDGET, 4 * MIB, 64 * MIB]),
        seed=st.integers(0, 99),
        dtype=st.sampled_from([None, None, *DTYPES]),
    )
    def begin(self, windows: bool, budget: int, seed: int, dtype: Any = None) -> None:
        self.folder = tempfile.mkdtemp(prefix="caches-")
        self.windows, self.budget, self.batch = windows, budget if dtype is None else 4 * budget, 2
        self.most = 110 if dtype is None else 350
        self.states = torch.Generator().manual_seed(seed)
        of = config(windows, WINDOW if dtype is None else 150)
        self.mine = NvmeCache(self.folder, self.budget, config=of, dtype=dtype)
        self.caches: list[Any] = [self.mine, usual_cache(of, dtype)]

    def teardown(self) -> None:
        if hasattr(self, "mine"):
            self.mine.close()
            shutil.rmtree(self.folder)

    def length(self) -> int:
        return int(self.caches[1].get_seq_length())

    def call(self, name: str, *arguments: Any) -> None:
        for cache in self.caches:
            getattr(cache, name)(*arguments)

    @rule(tokens=st.sampled_from([1, 1, 1, 2, 7, 40]))
    def update(self, tokens: int) -> None:
        tokens *= 1 if self.most < 200 else 3
        if self.length() > self.most:
            self.reset()
        for layer in range(LAYERS):
            sizes = [list(cache.get_mask_sizes(tokens, layer)) for cache in self.caches]
            assert sizes[0] == sizes[1]
            keys = torch.randn(self.batch, 2, tokens, 64, generator=self.states)
            values = torch.randn(self.batch, 2, tokens, 128, generator=self.states).to(torch.bfloat16)
            ours, want = (cache.update(keys, values, layer) for cache in self.caches)
            assert torch.equal(ours[0], want[0])
            assert torch.equal(ours[1], want[1])
            del ours, want  # their memory is needed

    @precondition(lambda self: self.length() > 0)
    @rule()
    def reorder(self) -> None:
        before = self.mine.stats().bytes_written
        self.call("reorder_cache", torch.randint(self.batch, (self.batch,), generator=self.states))
        assert self.mine.stats().bytes_written == before

    @precondition(lambda self: self.length() > 0 and not self.windows)
    @rule(removed=st.integers(0, 60))
    def crop(self, removed: int) -> None:
        self.call("crop", -min(removed * (1 if self.most < 200 else 3), self.length()))

    @precondition(lambda self: self.length() > 0)
    @rule()
    def change_batch(self) -> None:
        if self.batch < 4:
            self.call("batch_repeat_interleave", 2)
            self.batch *= 2
        else:
            self.call("batch_select_indices", torch.tensor([3, 0, 3]))
            self.batch = 3

    @rule()
    def reset(self) -> None:
        self.call("reset")
        self.batch = 2

    @invariant()
    def same_length_within_the_budget(self) -> None:
        if hasattr(self, "mine"):
            assert self.mine.get_seq_length() == self.length()
            assert self.mine.stats().peak_bytes <= self.budget


Caches.TestCase.settings = settings(max_examples=25, stateful_step_count=30)
TestCaches = Caches.TestCase


@pytest.mark.parametrize("dtype", [None, *DTYPES])
def test_recording_keeps_what_leaves_the_window(dtype: str | None) -> None:
    calls = Caches()
    calls.begin(True, 2 * MIB, 1, dtype)
    calls.update(100)
    calls.call("activate_past_recording")
    for tokens, removed in [(30, 25), (7, 0), (50, 50), (3, 1), (1, 1)]:
        calls.update(tokens)
        calls.call("crop", -removed)
    calls.teardown()


@pytest.mark.parametrize("budget", [MIN_BUDGET // 4, 64 * MIB])
@pytest.mark.parametrize("dtype", DTYPES)
def test_cropped_pages_are_not_quantized_any_more(dtype: str, budget: int) -> None:
    calls = Caches()
    calls.begin(False, budget, 1, dtype)
    for tokens, removed in [(110, 50), (1, 59), (40, 10), (1, 1)]:
        calls.update(tokens)
        calls.call("reorder_cache", torch.tensor([1, 0]))
        calls.call("crop", -3 * removed)
        calls.update(1)
    calls.teardown()


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_cropped_in_files_is_neither_read_nor_kept(folder: Path, dtype: Any) -> None:
    states = torch.randn(1, 1, 384, 64)
    for crop in (64, 129, 192, 316):
        usual = usual_cache(config(False), dtype)
        with NvmeCache(folder, 620 * KIB, dtype=dtype) as cache:
            for part in states.split([200, 184], dim=2):
                for layer in range(4):
                    for one in (cache, usual):
                        one.update(part, -part, layer)
            layers: Any = cache.layers
            paged = [layer._paged for layer in layers]
            away = [layer for layer in range(4) if paged[layer].memory is None]
            assert away
            for one in (cache, usual):
                one.crop(-crop)
            for layer in away:
                assert paged[layer].bytes_cached <= (384 - crop + 63) * paged[layer].stored.token_bytes
                ours, wanted = (one.update(states[:, :, :1], -states[:, :, :1], layer) for one in (cache, usual))
                assert torch.equal(ours[0], wanted[0])
                assert torch.equal(ours[1], wanted[1])
                del ours


def test_what_cannot_be_is_refused(folder: Path) -> None:
    states, rows = torch.zeros(2, 2, 9, 64), torch.LongTensor
    with NvmeCache(folder, 1 << 20, config=config(True)) as cache:
        for _ in range(100):
            cache.update(states, states, 1)
        for use, error, words in (
            (lambda: cache.crop(-500), RuntimeError, "layer 1 has forgotten the tokens before its window of 33"),
            (lambda: cache.update(states[:1], states[:1], 1), ValueError, "of a batch of 2, 2 heads of 64"),
            (lambda: cache.crop(3), ValueError, "negative"),
            (
                lambda: cache.reorder_cache(rows([-1, 0])),
                ValueError,
                r"of 2 cannot .* its rows \[-1, 0\]",
            ),
            (
                lambda: cache.reorder_cache(rows([0, 2])),
                ValueError,
                r"of 2 cannot .* its rows \[0, 2\]",
            ),
            (lambda: cache.batch_select_indices(torch.tensor([], dtype=torch.long)), ValueError, r"its rows \[\]"),
            (lambda: copy.deepcopy(cache), TypeError, "cannot be copied"),
            (lambda: pickle.dumps(cache), TypeError, "cannot be pickled"),
        ):
            with pytest.raises(error, match=words):
                use()
    with pytest.raises(ValueError, match="dtype must be None or 'int8', 'float8', not 'int4'"):
        NvmeCache(folder, "1M", dtype="int4")  # type: ignore[arg-type]
    for use in (cache.reset, lambda: cache.crop(-1), lambda: cache.update(states, states, 1)):
        with pytest.raises(ValueError, match="this NvmeCache is closed"):
            use()
    unknown = config(False)
    unknown.layer_types[1] = "indexed_attention"
    with pytest.raises(ValueError, match="layer 1 of this model, of type 'indexed_attention'"):
        NvmeCache(folder, "1M", config=unknown)
    with (
        NvmeCache(folder, host_budget="500K") as cache,
        pytest.raises(MemoryError, match="a host_budget of 500 KiB is"),
    ):
        generated("Llama", cache)
    with NvmeCache(folder, "500K") as cache:
        with pytest.raises(MemoryError, match=r"memory_budget of 500 KiB is too small: layer \d, .* at least \d+ KiB"):
            generated("Llama", cache)
        with pytest.raises(RuntimeError, match="NvmeCache is for inference"):
            model("Llama")(PROMPTS, cache=cache)
    states = torch.zeros(1, 4, 64, 128)
    with NvmeCache(folder, 1 << 20) as cache:
        held = [cache.update(states, states, layer) for layer in range(3)]
        with pytest.raises(MemoryError, match="keys and values in use have"):
            cache.update(states, states, 3)
        held.clear()
        cache.update(states, states, 3)
    assert not list(folder.iterdir())


def test_no_more_room_is_made_than_another_layer_needs(folder: Path) -> None:
    states = torch.zeros(1, 4, 64, 128)
    with NvmeCache(folder, "1408K") as cache:
        for layer in range(4):
            cache.update(states, states, layer)
        assert cache._pager.share.nbytes - cache._pager.share.bytes_in_use == 2 * states.nbytes
        assert cache.stats().bytes_written == 0


@pytest.mark.parametrize(("dtype", "tokens", "budget"), [(None, 128, 517 * KIB), ("int8", 256, 984 * KIB)])
def test_a_layer_whose_batch_changes_makes_no_room_for_itself(
    folder: Path, dtype: Any, tokens: int, budget: int
) -> None:
    states = torch.randn(1, 1, tokens + 1, 64)
    usual = usual_cache(config(False), dtype)
    with NvmeCache(folder, budget, dtype=dtype) as cache:
        for part in states.split([tokens, 1], dim=2):
            for layer in range(4):
                for one in (cache, usual):
                    one.update(part, -part, layer)
        cache.batch_repeat_interleave(2)
        rows = states[:, :, :1].repeat(2, 1, 1, 1)
        usual.layers[0].batch_repeat_interleave(2)
        for ours, wanted in zip(cache.update(rows, -rows, 0), usual.update(rows, -rows, 0), strict=True):
            assert torch.equal(ours, wanted)


class Slabs:
    """Space in one file, of bytes in memory."""

    bytes_in_use = 0

    def __init__(self) -> None:
        self.file = torch.zeros(MIB, dtype=torch.uint8)

    def allocate(self, nbytes: int) -> list[Piece]:
        self.bytes_in_use += nbytes
        return [Piece(0, 0, nbytes, Extent(self.bytes_in_use - nbytes, nbytes))]

    def move_all(self, moves: list[tuple[Piece, torch.Tensor]], _: Any, is_write: bool, __: Any) -> None:
        for piece, memory in moves:
            there = self.file[piece.extent.start : piece.extent.start + piece.nbytes]
            (there if is_write else memory).copy_(memory if is_write else there)


def test_a_window_may_skip_tokens_for_which_there_is_room() -> None:
    for skipped in (0, 2, 3, 50):
        segments = Segments(Slabs(), 0, [(2, 8), (1, 4)])  # type: ignore[arg-type]
        values = [torch.randint(256, (rows, 100 * size), dtype=torch.uint8) for rows, size in [(2, 8), (1, 4)]]
        for token in [*range(10), *range(10 + skipped, 17 + skipped)]:  # the tenth has room for three others
            alone = [value[:, token * size : (token + 1) * size] for value, size in zip(values, (8, 4), strict=True)]
            segments.write(token, token + 1, (alone, token), alone[0])
        back = [torch.zeros_like(value) for value in values]
        assert segments.read(10 + skipped, 17 + skipped, (back, 0), [], Priority.DEMAND) == 7 * segments.token_bytes
        for value, same, size in zip(values, back, (8, 4), strict=True):
            span = slice((10 + skipped) * size, (17 + skipped) * size)
            assert torch.equal(value[:, span], same[:, span])


@pytest.mark.parametrize("dtype", [None, "int8"])
@pytest.mark.parametrize(("code", "of"), [(errno.ENOSPC, r".*of keys and values of layer"), (errno.EIO, ": 'slab'$")])
def test_files_that_cannot_grow(folder: Path, monkeypatch: pytest.MonkeyPatch, code: int, of: str, dtype: Any) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code), "slab")

    monkeypatch.setattr(StripedSlabs, "allocate", refuse)
    tokens, budget = (64, MIB) if dtype is None else (320, 5 * MIB)
    states = torch.zeros(1, 4, tokens, 128)
    with NvmeCache(folder, budget, dtype=dtype) as cache, pytest.raises(OSError, match=os.strerror(code) + of):  # noqa: PT012
        for layer in range(5):
            cache.update(states, states, layer)
    assert not list(folder.iterdir())


# In 8 bits


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 96, 24])
def test_values_are_off_by_half_a_scale_at_most(folder: Path, dtype: Any, width: int) -> None:
    """Also of heads whose width makes pages of several groups; one channel is much larger than others."""
    states = torch.randn(2, 3, 1300, width, generator=torch.Generator().manual_seed(width))
    states[..., 3] *= 100
    usual = usual_cache(config(False), dtype)
    with NvmeCache(folder, 64 * MIB, dtype=dtype) as cache:
        for part in states.split([1299, 1], dim=2):
            made = [one.update(part, -part.bfloat16(), 0) for one in (cache, usual)]
        assert all(torch.equal(ours, wanted) for ours, wanted in zip(*made, strict=True))
        (keys, values), stored = made[0], cache.stats().bytes_cached
    most, relative = (127, 0.0) if dtype == "int8" else (448, 2**-4)
    for ours, wanted, dim, group in ((keys, states, -2, 64), (values, -states.bfloat16(), -1, 1)):
        exact = wanted[:, :, :1280].float().unflatten(2, (-1, group))
        off = (ours[:, :, :1280].float().unflatten(2, (-1, group)) - exact).abs()
        scale = exact.abs().amax(dim, keepdim=True) / most
        assert bool((off <= 0.501 * scale + (relative + ours.dtype.itemsize % 4 * 2**-9) * exact.abs()).all())
        assert torch.equal(ours[:, :, -64:], wanted[:, :, -64:]), "the newest are as they are"
        assert bool(off[:, :, 0].any())
    newest = 1300 - int((off.amax((0, 1, 3, 4)) > 0).sum())
    assert stored >= 2 * 3 * (newest * width * 6 + (1300 - newest) * (2 * width + width / 16 + 4))
    assert stored <= 2 * 3 * (newest * width * 6 + (1300 - newest) * (2 * width + width / 16 + 4 + 64 / 3))


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_is_kept_as_it_is_while_it_is_new(folder: Path, dtype: Any) -> None:
    states = torch.randn(1, 2, 330, 64)
    spoilt = states.index_fill(2, torch.tensor([130]), torch.inf)
    with NvmeCache(folder, 640 * KIB, dtype=dtype) as cache:
        cache.update(states[:, :, :128], states[:, :, :128], 0)
        for bad in (spoilt, -spoilt, spoilt - spoilt):
            with pytest.raises(ValueError, match="layer 0: a key or value that is not finite") as caught:
                cache.update(states[:, :, 128:], bad[:, :, 128:], 0)
            assert cache.get_seq_length() == 128
        keys, values = cache.update(spoilt[:, :, 128:200], spoilt[:, :, 128:200], 0)
        assert torch.equal(keys[:, :, 64:], spoilt[:, :, 64:200])
        cache.crop(-72)
        del keys, values
        keys, values = cache.update(states[:, :, 128:], states[:, :, 128:], 0)
        assert torch.equal(keys[:, :, 128:], states[:, :, 128:])
        assert torch.equal(values[:, :, 128:], states[:, :, 128:])
        assert caught.value.__traceback__ is not None


# Generations

SIZES: dict[str, Any] = {
    "vocab_size": 199, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 2048,
}  # fmt: skip
RECURRENT: dict[str, Any] = {
    **SIZES, "num_hidden_layers": 3, "num_key_value_heads": 8, "use_mamba_kernels": False, "tie_word_embeddings": False,
}  # fmt: skip
HYBRIDS: dict[str, dict[str, Any]] = {
    "FalconH1": {
        **RECURRENT, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_state": 8, "mamba_n_groups": 1,
        "mamba_chunk_size": 8,
    },
    "Zamba2": {
        **RECURRENT, "mamba_d_state": 8, "n_mamba_heads": 8, "mamba_ngroups": 1, "chunk_size": 8,
        "layers_block_type": ["mamba", "hybrid", "hybrid"],
    },
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "Llama": SIZES,
    "Mixtral": {**SIZES, "sliding_window": 90, "num_local_experts": 4, "num_experts_per_tok": 2},
    **HYBRIDS,
}
BEAMS: dict[str, Any] = {"num_beams": 3}
PROMPTS = torch.randint(3, 199, (2, 230), generator=torch.Generator().manual_seed(5))
PADDED = torch.ones_like(PROMPTS)
PADDED[0, :70] = 0


@functools.cache
def model(name: str) -> Any:
    torch.manual_seed(2)
    config = getattr(transformers, f"{name}Config")(**MODELS[name])
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


def generated(name: str, cache: Any, new: int = 8, **way: Any) -> torch.Tensor:
    torch.manual_seed(3)
    common: dict[str, Any] = {"max_new_tokens": new, "pad_token_id": 0, "eos_token_id": None}
    return torch.as_tensor(model(name).generate(PROMPTS, attention_mask=PADDED, cache=cache, **common, **way))


def size_of(name: str, rows: int, tokens: int) -> int:
    """Bytes of the keys and values of a model."""
    of = model(name).config
    return int(2 * rows * tokens * of.num_hidden_layers * of.num_key_value_heads * of.head_dim * 4)


@pytest.mark.parametrize(("name", "way"), [("Llama", BEAMS), ("Mixtral", {"do_sample": True, "top_k": 50})])
def test_the_tokens_are_those_of_a_cache_in_memory(name: str, way: dict[str, Any], folder: Path) -> None:
    rows, of = 2 * way.get("num_beams", 1), model(name).config
    size, wanted = size_of(name, rows, 238), generated(name, transformers.DynamicCache(config=of), **way)
    for budget in (size // 2, 4 * size):
        with NvmeCache(folder, budget) as cache:
            assert torch.equal(generated(name, cache, **way), wanted)
            stats = cache.stats()
            assert stats.peak_bytes <= budget
            assert stats.bytes_cached == size_of(name, rows, cache.get_seq_length())
            assert (stats.bytes_read > 0) == (stats.bytes_written > 0) == (budget < size)
            assert stats.bytes_written <= stats.bytes_cached, "each token once at most"
            assert stats.bytes_read > 4 * stats.bytes_on_demand or budget > size, "most are read ahead"
    if name == "Mixtral":
        with NvmeCache(folder, "1M", config=of) as cache:
            assert torch.equal(generated(name, cache, **way), wanted)
            assert cache.get_seq_length() == 237
            assert cache.stats().bytes_cached == size_of(name, 2, of.sliding_window - 1), "the config has windows"
            assert cache.is_sliding == [True] * of.num_hidden_layers


@pytest.mark.parametrize(("dtype", "error"), [("int8", 1e-3), ("float8", 5e-3)])
def test_tokens_in_8_bits_are_the_same_for_any_budget(dtype: Any, error: float, folder: Path) -> None:
    of, size = model("Llama").config, size_of("Llama", 6, 300)
    with NvmeCache(folder, 4 * size, dtype=dtype) as cache:
        wanted = generated("Llama", cache, 70, **BEAMS)
        assert cache.stats().bytes_written == 0
    budget = size // 3
    for _ in range(of.num_hidden_layers):
        with NvmeCache(folder, budget, dtype=dtype) as cache:
            try:
                assert torch.equal(generated("Llama", cache, 70, **BEAMS), wanted)
            except MemoryError as small:
                budget = bytes_of("", re.findall("at least (.*iB) are needed", str(small))[0])
                continue
            stats = cache.stats()
            assert 0 < stats.bytes_written <= stats.bytes_cached
            assert stats.peak_bytes <= budget < size
            break
    else:
        raise AssertionError("what an error says is needed is not enough")
    usual = transformers.DynamicCache(config=of)
    with NvmeCache(folder, budget, dtype=dtype) as cache, torch.no_grad():
        for part in wanted.split([240, *[1] * (wanted.shape[1] - 240)], dim=1):
            ours, right = (model("Llama")(part, cache=one).logits for one in (cache, usual))
            assert float((ours - right).norm() / right.norm()) < error
            assert torch.equal(ours.argmax(-1), right.argmax(-1))
        assert not torch.equal(ours, right)


@pytest.mark.parametrize("way", [{}, BEAMS], ids=["greedy", "beams"])
@pytest.mark.parametrize("name", HYBRIDS)
def test_a_recurrent_state_beside_keys_stays_in_memory(name: str, way: dict[str, Any], folder: Path) -> None:
    of = model(name).config
    wanted = generated(name, transformers.DynamicCache(config=of), **way)
    for budget in ("9M", "64M"):
        with NvmeCache(folder, budget, config=of) as cache:
            for _ in range(2):
                assert torch.equal(generated(name, cache, **way), wanted)
                assert cache.get_seq_length() == 237
                cache.reset()


def test_encoder_and_decoder_have_a_cache_each(folder: Path) -> None:
    torch.manual_seed(4)
    t5 = transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=199, d_model=64, d_kv=64, d_ff=96, num_layers=3, num_heads=2)
    ).eval()
    arguments: dict[str, Any] = {"max_new_tokens": 6, "decoder_start_token_id": 0, "eos_token_id": None, **BEAMS}
    want = t5.generate(PROMPTS, attention_mask=PADDED, **arguments)
    with NvmeCache(folder, "4M") as own, NvmeCache(folder, 5 * 640 * KIB) as cross:
        cache = transformers.EncoderDecoderCache(own, cross)
        assert torch.equal(t5.generate(PROMPTS, attention_mask=PADDED, cache=cache, **arguments), want)
        assert cross.stats().bytes_read > 0
