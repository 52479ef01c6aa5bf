"""``NvmeCache`` against transformers' ``DynamicCache``, call by call; hypothesis finds the shortest that differ."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nvme_ops.offload import NvmeCache
from tests.conftest import KIB, MIB

transformers = pytest.importorskip("transformers")

LAYERS, WINDOW, LEAST = 5, 33, 2600 * KIB


def config(windows: bool) -> Any:
    """All layers attend to everything, or some to a window."""
    kinds = ["full_attention", "sliding_attention" if windows else "full_attention"] * LAYERS
    return transformers.Qwen2Config(
        num_hidden_layers=LAYERS, use_sliding_window=windows, sliding_window=WINDOW, layer_types=kinds[:LAYERS]
    )


class Caches(RuleBasedStateMachine):
    """Two caches that are given the same calls, and must return the same."""

    @initialize(windows=st.booleans(), budget=st.sampled_from([LEAST, 4 * MIB, 64 * MIB]), seed=st.integers(0, 99))
    def begin(self, windows: bool, budget: int, seed: int) -> None:
        self.folder = tempfile.mkdtemp(prefix="caches-")
        self.windows, self.budget, self.batch = windows, budget, 2
        self.states = torch.Generator().manual_seed(seed)
        self.mine = NvmeCache(self.folder, budget, config=config(windows))
        self.caches: list[Any] = [self.mine, transformers.DynamicCache(config=config(windows))]

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
        if self.length() > 110:
            self.reset()
        for layer in range(LAYERS):
            sizes = [list(cache.get_mask_sizes(tokens, layer)) for cache in self.caches]
            assert sizes[0] == sizes[1]
            keys = torch.randn(self.batch, 2, tokens, 64, generator=self.states)
            values = torch.randn(self.batch, 2, tokens, 128, generator=self.states).to(torch.bfloat16)
            found, want = (cache.update(keys, values, layer) for cache in self.caches)
            assert torch.equal(found[0], want[0])
            assert torch.equal(found[1], want[1])
            del found, want  # their memory is needed

    @precondition(lambda self: self.length() > 0)
    @rule()
    def reorder(self) -> None:
        self.call("reorder_cache", torch.randint(self.batch, (self.batch,), generator=self.states))

    @precondition(lambda self: self.length() > 0 and not self.windows)
    @rule(removed=st.integers(0, 60))
    def crop(self, removed: int) -> None:
        self.call("crop", -min(removed, self.length()))

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


@pytest.mark.parametrize("windows", [False, True])
def test_what_does_not_fit_is_written_and_read(folder: Path, windows: bool) -> None:
    calls = Caches()
    calls.begin(windows, LEAST, 1)
    calls.update(40)
    calls.change_batch()
    for tokens in (40, 20, 7, 1):
        calls.update(tokens)
        calls.reorder()
    assert calls.mine.stats().bytes_read > 0
    calls.teardown()


def test_recording_keeps_what_leaves_the_window(folder: Path) -> None:
    calls = Caches()
    calls.begin(True, 2 * MIB, 1)
    calls.update(100)
    calls.call("activate_past_recording")
    for tokens, removed in [(30, 25), (7, 0), (50, 50), (3, 1), (1, 1)]:
        calls.update(tokens)
        calls.call("crop", -removed)
    calls.teardown()


def test_what_cannot_be_is_refused(folder: Path) -> None:
    states = torch.zeros(2, 2, 9, 64)
    with NvmeCache(folder, 1 << 20, config=config(True)) as cache:
        for _ in range(100):
            cache.update(states, states, 1)
        with pytest.raises(RuntimeError, match="layer 1 has forgotten the tokens before its window of 33"):
            cache.crop(-500)
        with pytest.raises(ValueError, match=r"layer 1 has keys or values of a batch of 2, 2 heads of 64"):
            cache.update(states[:1], states[:1], 1)
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
