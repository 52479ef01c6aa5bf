"""``NvmeCache`` on an accelerator: the same keys and values whichever tier they come from, and what fails there."""

from __future__ import annotations

import contextlib
import copy
import errno
import functools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nvme_ops.offload import Memory, NvmeCache, stream_weights
from nvme_ops.offload.plan.estimate import cache_bytes
from nvme_ops.storage.striped import StripedSlabs
from tests.conftest import KIB, MIB
from tests.device.kinds import Simulated, on_simulated

transformers = pytest.importorskip("transformers")

from tests.offload.rounded_cache import usual_cache  # noqa: E402

pytestmark = on_simulated
LAYERS, WINDOW = 12, 33
NONE, SOME, ALL = 0, 300 * KIB, 64 * MIB
BUDGETS = [(device, host) for device in (2600 * KIB, 4 * MIB, ALL) for host in (NONE, SOME, ALL)]


def config(windows: bool, window: int = WINDOW) -> Any:
    """All layers attend to everything, or some to a window."""
    kinds = ["full_attention", "sliding_attention" if windows else "full_attention"] * LAYERS
    return transformers.Qwen2Config(
        num_hidden_layers=LAYERS, use_sliding_window=windows, sliding_window=window, layer_types=kinds[:LAYERS]
    )


class Calls:
    """Random calls to a cache on the device, and to a usual one in host memory, which must return the same."""

    def __init__(self, device: Simulated, cache: NvmeCache, seed: int, windows: bool, dtype: str | None = None) -> None:
        self.device, self.cache, self.usual = device, cache, usual_cache(config(windows, window(dtype)), dtype)
        self.most = 110 if dtype is None else 330
        self.made, self.rng, self.windows = torch.Generator().manual_seed(seed), random.Random(seed), windows
        self.batch, self.failures = 2, 0
        self.trouble: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext

    def run(self, steps: int) -> None:
        for _ in range(5):
            self.update(1)
        for _ in range(steps):
            self.update(self.rng.choice([1, 1, 1, 1, 1, 2, 7, 40]) * (self.most // 110))
            others = [
                self.reorder,
                self.reorder,
                self.change_batch,
                self.reset,
                *([self.crop] * 2 * (not self.windows)),
            ]
            if self.rng.random() < 0.4:
                self.rng.choice(others)()

    def update(self, tokens: int) -> None:
        if self.usual.get_seq_length() > self.most:
            self.reset()
        for layer in range(LAYERS):
            keys = torch.randn(self.batch, 2, tokens, 64, generator=self.made)
            values = torch.randn(self.batch, 2, tokens, 128, generator=self.made).to(torch.bfloat16)
            ours = self.given(self.device.tensor(keys), self.device.tensor(values), layer)
            assert ours[0].device == self.device.device()
            want = self.usual.update(keys, values, layer)
            assert all(torch.equal(mine.cpu(), right) for mine, right in zip(ours, want, strict=True)), layer
            del ours

    def given(self, *states: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Updates a layer; if that fails, nothing has changed, and it works once what has failed is known."""
        for attempt in range(LAYERS):
            try:
                with contextlib.nullcontext() if attempt else self.trouble():
                    return self.cache.update(*states)
            except (OSError, RuntimeError):
                self.failures += 1
        return self.cache.update(*states)

    def both(self, name: str, *arguments: Any) -> None:
        for cache in (self.cache, self.usual):
            getattr(cache, name)(*arguments)

    def reorder(self) -> None:
        self.both("reorder_cache", torch.randint(self.batch, (self.batch,), generator=self.made))

    def crop(self) -> None:
        self.both("crop", -self.rng.randint(0, min(60, self.usual.get_seq_length())))

    def change_batch(self) -> None:
        if self.batch < 4:
            self.both("batch_repeat_interleave", 2)
            self.batch *= 2
        else:
            self.both("batch_select_indices", torch.tensor([3, 0, 3]))
            self.batch = 3

    def reset(self) -> None:
        self.both("reset")
        self.batch = 2


def window(dtype: str | None) -> int:
    """In which something is quantized, if it is to be."""
    return WINDOW if dtype is None else 150


def opened(
    device: Simulated, folder: Path, own: int, host: int, windows: bool = False, dtype: str | None = None
) -> NvmeCache:
    given: Any = {"device_budget": own, "host_budget": host, "dtype": dtype, "handle": device.handle()}
    return NvmeCache(folder, **given, config=config(windows, window(dtype)))


@pytest.mark.parametrize(
    ("own", "host", "dtype"),
    [*((*budgets, None) for budgets in BUDGETS), (14 * MIB, SOME, "int8"), (14 * MIB, ALL, "float8")],
)
@pytest.mark.parametrize("seeds", [3, pytest.param(100, marks=pytest.mark.nightly)])
def test_keys_and_values_are_the_same_in_any_order_of_work(
    device: Simulated, folder: Path, own: int, host: int, dtype: str | None, seeds: int
) -> None:
    for seed in range(seeds):
        with (
            device.computing(),
            device.in_random_order(seed),
            device.on() as stream,
            opened(device, folder, own, host, seed % 3 == 1, dtype) as cache,
        ):
            calls = Calls(device, cache, seed, seed % 3 == 1, dtype)
            calls.update(calls.most - 10)
            calls.run(12)
            device.synchronize(stream)
            stats = cache.stats()
            assert stats.peak_bytes <= own
            assert stats.bytes_in_host <= host


@functools.cache
def llama() -> Any:
    torch.manual_seed(1)
    sizes = {"hidden_size": 128, "intermediate_size": 160, "num_attention_heads": 4, "num_key_value_heads": 2}
    more = {"vocab_size": 199, "num_hidden_layers": 6, "eos_token_id": None, "head_dim": 64}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **more)).eval()


PROMPTS = torch.randint(3, 199, (2, 230), generator=torch.Generator().manual_seed(5))


def generated(model: Any, prompts: torch.Tensor, cache: Any, **way: Any) -> torch.Tensor:
    common: dict[str, Any] = {"max_new_tokens": 5, "pad_token_id": 0, "do_sample": False}
    return torch.as_tensor(
        model.generate(prompts, attention_mask=torch.ones_like(prompts), cache=cache, **common, **way)
    )


@pytest.mark.parametrize("beams", [1, 3])
def test_tokens_are_those_of_a_cache_on_the_host(device: Simulated, folder: Path, beams: int) -> None:
    """Also of a chat that goes on, and after a reset."""
    model = copy.deepcopy(llama()).to(device.device())
    wanted = generated(llama(), PROMPTS, transformers.DynamicCache(), num_beams=beams)
    longer = torch.cat([wanted, PROMPTS[:, :30]], 1)
    wanted_then = generated(llama(), longer, transformers.DynamicCache())
    some = beams * 7 * MIB // 4
    for seed, (own, host) in enumerate([(some, ALL), (some, MIB), (some, 0), (0, ALL)]):
        budgets: Any = {"device_budget": own, "host_budget": host}
        with (
            device.computing(),
            device.in_random_order(seed),
            NvmeCache(folder, **budgets, handle=device.handle()) as cache,
        ):
            assert torch.equal(generated(model, device.tensor(PROMPTS), cache, num_beams=beams).cpu(), wanted)
            stats = cache.stats()
            assert stats.peak_bytes <= (own or host)
            if beams == 1:
                assert torch.equal(generated(model, device.tensor(longer), cache).cpu(), wanted_then)
            cache.reset()
            assert torch.equal(generated(model, device.tensor(PROMPTS), cache, num_beams=beams).cpu(), wanted)
            if own:
                assert (stats.bytes_read > 0) == (stats.bytes_stored > 0) == (host < ALL)
                assert (stats.bytes_from_host > 0) == (stats.bytes_in_host > 0) == (host > 0)


@pytest.mark.parametrize("seeds", [2, pytest.param(100, marks=pytest.mark.nightly)])
def test_weights_give_way_in_both_memories_and_come_back(device: Simulated, folder: Path, seeds: int) -> None:
    short, own, host = PROMPTS[:, :20], 5 * MIB // 2, 2 * MIB
    wanted, wanted_short = (generated(llama(), ids, transformers.DynamicCache()) for ids in (PROMPTS, short))

    def in_host(ids: torch.Tensor, right: torch.Tensor, cache: Any) -> int:
        assert torch.equal(generated(streamed, device.tensor(ids), cache).cpu(), right)
        assert memory._tier._in_use <= own
        assert memory.host._pool.bytes_in_use <= host
        return int(streamed.stats().bytes_in_host)

    for seed in range(seeds):
        memory: Any = Memory(device=own, host=host)
        with (
            device.computing(),
            device.in_random_order(seed),
            stream_weights(copy.deepcopy(llama()), folder, device=device.device(), memory=memory) as streamed,
        ):
            alone = [in_host(short, wanted_short, transformers.DynamicCache()) for _ in range(3)][-1]
            with NvmeCache(folder, memory=memory) as cache:
                for _ in range(2):
                    assert in_host(PROMPTS, wanted, cache) < alone / 2
                    stats = cache.stats()
                    assert min(stats.bytes_in_host, stats.bytes_stored) > 0
                    cache.reset()
                    assert in_host(short, wanted_short, cache) > alone / 2
                    cache.reset()
            assert [in_host(short, wanted_short, transformers.DynamicCache()) for _ in range(2)][-1] > alone * 3 / 4 > 0


def test_layers_leave_the_device_without_a_wait(device: Simulated, folder: Path) -> None:
    """And no more of them than have to."""
    states = device.tensor(torch.zeros(2, 2, 512, 64))  # 1 MiB a layer
    with device.computing(), opened(device, folder, 5 * MIB, ALL) as cache:
        for layer in range(LAYERS):
            cache.update(states, states, layer)
            host: Any = cache._pager._host
            assert layer < 3 or not device.idle(host.streams[1].stream.stream_id)
        assert 8 * MIB <= cache.stats().bytes_to_host <= 9 * MIB


def test_a_copy_that_fails_changes_nothing(device: Simulated, folder: Path) -> None:
    @contextlib.contextmanager
    def failing(what: str) -> Iterator[None]:
        with device.failing(what, calls.rng.randrange(20)):
            device.now.copies.count = -1
            yield

    with device.computing(), opened(device, folder, 2600 * KIB, ALL) as cache:
        calls = Calls(device, cache, 3, False)
        calls.trouble = lambda: failing("run")  # as they leave the device
        calls.update(110)
        calls.trouble = lambda: failing("queue")
        calls.run(20)
        assert calls.failures


@pytest.mark.parametrize(("host", "dtype"), [(NONE, None), (SOME, None), (SOME, "int8")])
def test_a_transfer_that_fails_changes_nothing(
    device: Simulated, folder: Path, host: int, dtype: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    move_all, left = StripedSlabs.move_all, 1 << 30

    def fail(*given: Any) -> None:
        nonlocal left
        left -= 1
        if left <= 0:
            raise OSError(errno.EIO, "no such luck")
        move_all(*given)

    @contextlib.contextmanager
    def trouble() -> Iterator[None]:
        nonlocal left
        left = calls.rng.choice([1, 1, 2])
        try:
            yield
        finally:
            left = 1 << 30

    monkeypatch.setattr(StripedSlabs, "move_all", fail)
    own = 2600 * KIB if dtype is None else 7 * MIB
    with device.computing(), opened(device, folder, own, host, dtype=dtype) as cache:
        calls = Calls(device, cache, 3, False, dtype)
        calls.update(calls.most)
        calls.trouble = trouble
        calls.run(20)
        assert calls.failures


def test_a_cache_closed_while_copies_are_queued(device: Simulated, folder: Path) -> None:
    """What the accelerator has not done yet uses memory of both; ``device`` sees whether it is freed too early."""
    for steps in range(3):
        with device.computing(), opened(device, folder, 2600 * KIB, ALL) as cache:
            states = torch.zeros(4, 2, 100, 64)
            for _ in range(1 + steps):
                for layer in range(LAYERS):
                    cache.update(device.tensor(states), device.tensor(states), layer)


@pytest.mark.parametrize(("own", "host"), [("1200K", "1M"), ("1200K", 0), (0, "4M")])
def test_layers_may_be_on_two_devices(device: Simulated, folder: Path, own: Any, host: Any) -> None:
    wanted = dict.fromkeys(range(8), torch.empty(2, 2, 0, 64))
    with device.computing(), NvmeCache(folder, device_budget=own, host_budget=host) as cache:
        for tokens in (60, 1, 1, 1):
            for layer in wanted:
                states, where = torch.randn(2, 2, tokens, 64), layer // 4
                wanted[layer] = torch.cat([wanted[layer], states], 2)
                there = device.tensor(states, where)
                for seen in cache.update(there, there, layer):
                    assert seen.device == device.device(where)
                    assert torch.equal(seen.cpu(), wanted[layer])
                del there, seen


def test_what_cannot_be_is_refused(device: Simulated, folder: Path) -> None:
    states = torch.zeros(2, 2, 200, 64)
    there = device.tensor(states)
    for given, error, words in (
        ({}, TypeError, "either memory_budget= or memory= says"),
        ({"host_budget": MIB, "memory_budget": MIB}, TypeError, "are the same: give one of them"),
        ({"device_budget": MIB, "memory": Memory(device=MIB)}, TypeError, "either memory_budget= or memory= says"),
        ({"device_budget": "much"}, ValueError, "device_budget: "),
        ({"host_budget": -1}, ValueError, "host_budget must be at least 0 bytes"),
    ):
        with pytest.raises(error, match=words):
            NvmeCache(folder, **given)
    with NvmeCache(folder, device_budget=MIB) as cache, pytest.raises(ValueError, match="computes on the CPU"):
        cache.update(states, states, 0)
    with NvmeCache(folder, device_budget="auto") as cache, pytest.raises(TypeError, match="give device_budget="):
        cache.update(there, there, 0)
    with NvmeCache(folder, host_budget=MIB) as cache:  # not on the device, as nobody knows what is free there
        assert torch.equal(cache.update(there, there, 0)[0].cpu(), states)
    words = "a device_budget of 300 KiB is too small: layer 0, .*: at least 448 KiB are"
    with NvmeCache(folder, device_budget=300 * KIB) as cache, pytest.raises(MemoryError, match=words):
        cache.update(there, there, 0)
    assert not list(folder.iterdir())


@torch.no_grad()
@pytest.mark.parametrize("host", [NONE, 6 * MIB, ALL])
@pytest.mark.parametrize("own", [6900 * KIB, 10900 * KIB, ALL])
def test_a_step_brings_what_its_plan_says(device: Simulated, folder: Path, own: int, host: int) -> None:
    """Twelve layers of 1 MiB each, beside their tails: those that do not stay come from host memory or the files."""
    tokens = 2048
    with device.computing(), opened(device, folder, own, host) as cache:
        moved = []
        for count in (tokens - 4, 1, 1, 1, 1):
            for layer in range(LAYERS):
                states = device.tensor(torch.ones(1, 2, count, 32))
                cache.update(states, states, layer)
            stats = cache.stats()
            moved.append((stats.bytes_from_host, stats.bytes_read))
        planned = cache_bytes(LAYERS * MIB, LAYERS, own, host)
        assert planned is not None
        found = [after - before for before, after in zip(moved[-2], moved[-1], strict=True)]
        assert found == pytest.approx([planned.in_host, planned.stored], rel=0.25, abs=2.5 * MIB)
        assert (sum(found) == 0) == (own == ALL)
