"""Layers of an ``NvmeCache`` against those of transformers' ``DynamicCache``, call by call."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from nvme_ops.offload import NvmeCache
from tests.conftest import KIB, MIB

transformers = pytest.importorskip("transformers")

from nvme_ops.offload.cache.nvme_cache import NvmeLayer  # noqa: E402  (needs transformers)

LAYERS = 5
WINDOWS: list[list[int | None]] = [[None] * LAYERS, [None, 33, None, 33, 70]]


def in_memory(windows: list[int | None]) -> Any:
    layers = [
        transformers.cache_utils.DynamicLayer()
        if window is None
        else transformers.cache_utils.DynamicSlidingWindowLayer(window)
        for window in windows
    ]
    return transformers.Cache(layers=layers)


def paged(folder: Path, budget: int, windows: list[int | None]) -> NvmeCache:
    cache = NvmeCache(folder, budget)
    cache.layer_class_to_replicate = None
    layers: Any = [NvmeLayer(cache._pager, number, window) for number, window in enumerate(windows)]
    cache.layers = layers
    return cache


class Pair:
    """Two caches that are given the same calls, and must return the same."""

    def __init__(self, mine: Any, theirs: Any, seed: int) -> None:
        self.caches = (mine, theirs)
        self.random, self.states = random.Random(seed), torch.Generator().manual_seed(seed)
        self.batch = 2

    def update(self, tokens: int) -> None:
        for layer in range(LAYERS):
            assert self.same(lambda cache, at=layer: list(cache.get_mask_sizes(tokens, at)))
            keys = torch.randn(self.batch, 2, tokens, 64, generator=self.states)
            values = torch.randn(self.batch, 2, tokens, 128, generator=self.states).to(torch.bfloat16)
            found, want = (cache.update(keys, values, layer) for cache in self.caches)
            assert torch.equal(found[0], want[0])
            assert torch.equal(found[1], want[1])
            del found, want  # their memory is needed

    def same(self, function: Any) -> bool:
        first, second = map(function, self.caches)
        return bool(first == second)

    def call(self, name: str, *arguments: Any) -> None:
        for cache in self.caches:
            getattr(cache, name)(*arguments)

    def step(self, croppable: bool) -> None:
        length = self.caches[1].get_seq_length()
        kind = self.random.choice(["update"] * 8 + ["reorder"] * 4 + ["crop"] * 3 * croppable + ["batch", "reset"])
        if kind == "update" or not length:
            self.update(self.random.choice([1, 1, 1, 1, 2, 7, 40]))
        elif kind == "reorder":
            self.call("reorder_cache", torch.randint(self.batch, (self.batch,), generator=self.states))
        elif kind == "crop":
            self.call("crop", -self.random.randint(0, min(length, self.random.choice([3, 60]))))
        elif kind == "batch" and self.batch < 4:
            self.call("batch_repeat_interleave", 2)
            self.batch *= 2
        elif kind == "batch":
            self.call("batch_select_indices", torch.tensor([3, 0, 3]))
            self.batch = 3
        elif self.random.random() < 0.3:
            self.call("reset")
            self.batch = 2
        assert self.same(lambda cache: cache.get_seq_length())


@pytest.mark.parametrize("windows", WINDOWS, ids=["full", "windows"])
@pytest.mark.parametrize("budget", [2600 * KIB, 4 * MIB, 64 * MIB])
@pytest.mark.parametrize("seed", range(4))
def test_all_calls_return_what_a_cache_in_memory_returns(
    seed: int, budget: int, windows: list[int | None], folder: Path
) -> None:
    with paged(folder, budget, windows) as mine:
        pair = Pair(mine, in_memory(windows), seed)
        for _ in range(70):
            if pair.caches[1].get_seq_length() > 110:
                pair.call("reset")
                pair.batch = 2
            pair.step(croppable=windows is WINDOWS[0])
        if budget == 2600 * KIB:
            assert mine.stats().bytes_read > 0
        assert mine.stats().peak_bytes <= budget


def test_recording_keeps_what_leaves_the_window(folder: Path) -> None:
    windows: list[int | None] = [33] * LAYERS
    with paged(folder, 2 * MIB, windows) as mine:
        pair = Pair(mine, in_memory(windows), 1)
        pair.update(100)
        pair.call("activate_past_recording")
        for tokens, removed in [(30, 25), (7, 0), (50, 50), (3, 1), (1, 1)]:
            pair.update(tokens)
            pair.call("crop", -removed)


def test_a_crop_beyond_what_a_window_keeps_is_refused(folder: Path) -> None:
    with paged(folder, 1 << 20, [33] * LAYERS) as mine:
        for _ in range(100):
            mine.update(torch.zeros(1, 2, 9, 64), torch.zeros(1, 2, 9, 64), 0)
        with pytest.raises(RuntimeError, match="layer 0 has forgotten the tokens before its window of 33"):
            mine.crop(-500)


def test_another_shape_is_refused(folder: Path) -> None:
    with NvmeCache(folder, "1M") as cache:
        cache.update(torch.zeros(2, 2, 9, 8), torch.zeros(2, 2, 9, 8), 0)
        with pytest.raises(ValueError, match=r"layer 0 has keys or values of a batch of 2, 2 heads of 8"):
            cache.update(torch.zeros(3, 2, 1, 8), torch.zeros(3, 2, 1, 8), 0)
        assert cache.get_seq_length() == 9


def test_a_positive_crop_is_refused(folder: Path) -> None:
    with NvmeCache(folder, "1M") as cache:
        cache.update(torch.zeros(2, 2, 9, 8), torch.zeros(2, 2, 9, 8), 0)
        with pytest.raises(ValueError, match="negative"):
            cache.crop(3)


def test_held_keys_and_values_leave_no_memory(folder: Path) -> None:
    states = torch.zeros(1, 4, 64, 128)
    with NvmeCache(folder, 1 << 20) as cache:
        held = []
        for layer in range(3):
            held.append(cache.update(states, states, layer))
        with pytest.raises(MemoryError, match="keys and values in use have"):
            cache.update(states, states, 3)
        held.clear()
        cache.update(states, states, 3)
