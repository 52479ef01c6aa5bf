"""Experts that sink from an accelerator to host memory and rise again: what is read, copied and held, in any order."""

from __future__ import annotations

import contextlib
import copy
import functools
import random
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from nvme_ops.memory import tier
from nvme_ops.offload import Memory, NvmeCache, from_pretrained, stream_weights
from nvme_ops.offload.experts.host_computing import HostComputing
from tests.conftest import MIB, in_child, in_threads
from tests.contract.faulty import Faulty
from tests.device.kinds import Simulated, on_simulated
from tests.moments import Interrupt
from tests.offload.layers import SIZE, Layers
from tests.offload.models import mixture, nbytes, saved

ROOM, COUNT, CHOSEN = 40, 64, 4
computing = pytest.mark.parametrize("computing", [False, True])  # the CPU, with those in host memory
Steps = Sequence[tuple[int, list[int]]]


def steps(count: int = 80, seed: int = 0) -> Steps:
    """Experts that two layers choose, each as likely as all others: what was used lately says nothing."""
    rng = random.Random(seed)
    return [(step % 2, rng.sample(range(COUNT), CHOSEN)) for step in range(count)]


def lru(steps: Steps, room: int, below: int) -> tuple[int, int]:
    """Counts what two LRUs read from storage and copy if no expert is in both."""
    above, under = OrderedDict[tuple[int, int], None](), OrderedDict[tuple[int, int], None]()
    read = copied = 0
    for layer, chosen in steps:
        for expert in [(layer, number) for number in chosen]:
            if expert not in above:
                read += expert not in under
                copied += 1
                under.pop(expert, None)
            above[expert] = None
            above.move_to_end(expert)
            if len(above) > room:
                under[above.popitem(last=False)[0]] = None
                copied += 1
            if len(under) > below:
                under.popitem(last=False)
    return read, copied


def opened(device: Simulated, folder: Path, below: int, **options: Any) -> Layers:
    return Layers(folder, 2, COUNT, ROOM, device=device.device(), below=below, **options)


@on_simulated
@pytest.mark.parametrize("below", [8, 40, 60])
def test_no_more_is_moved_than_by_two_exclusive_lrus(device: Simulated, folder: Path, below: int) -> None:
    layers, chosen = opened(device, folder, below), steps(200)
    with device.computing():
        for step in chosen:
            layers.use(*step)
    stats = layers.experts.stats()
    read, copied = lru(chosen, ROOM, below)
    # 1.05 on a machine at rest; where copies end late, others leave that were to stay
    assert stats.bytes_read <= 1.1 * read * SIZE
    assert stats.bytes_read + stats.bytes_from_host + stats.bytes_to_host <= 1.1 * copied * SIZE
    assert stats.peak_bytes <= ROOM * SIZE
    assert SIZE * (below - 1) < stats.bytes_in_host <= SIZE * below
    layers.experts.close()


@on_simulated
@computing
@pytest.mark.parametrize("seeds", [4, pytest.param(100, marks=pytest.mark.nightly)])
def test_experts_are_right_in_any_order_of_work(device: Simulated, folder: Path, seeds: int, computing: bool) -> None:
    layers = opened(device, folder, 50, computing=computing)
    with device.computing():
        for seed in range(seeds):
            with device.in_random_order(seed), device.on():
                for step in steps(seed=seed):
                    layers.use(*step)
    layers.experts.close()


@on_simulated
@pytest.mark.parametrize("name", ["Qwen3Moe", "Mixtral"])
def test_tokens_are_those_on_the_cpu(device: Simulated, folder: Path, name: str) -> None:
    path, kind = saved(folder, name)
    plain = kind.from_pretrained(path, experts_implementation="eager").eval()
    tokens = torch.tensor([[1, 2, 3]])
    usual: Any = {"max_new_tokens": 6, "do_sample": False}
    wanted = plain.generate(tokens, **usual)
    budgets: Any = {"device_budget": nbytes(plain) // 2, "host_budget": nbytes(plain) // 8}
    for seed in (None, 0, 1):
        order = device.computing() if seed is None else device.in_random_order(seed)
        with device.computing(), order, from_pretrained(path, device=device.device(), **budgets) as model:
            for _ in range(2):
                assert torch.equal(model.generate(device.tensor(tokens), **usual).cpu(), wanted)
            stats = model.stats()
        assert stats.bytes_from_host > 0
        assert stats.peak_bytes <= budgets["device_budget"]
        assert stats.bytes_in_host <= budgets["host_budget"]


@on_simulated
@computing
def test_threads_with_streams_of_their_own(device: Simulated, folder: Path, computing: bool) -> None:
    layers = opened(device, folder, 50, computing=computing)

    def run(number: int) -> None:
        with device.on():
            for step in steps(seed=number):
                layers.use(*step)

    with device.computing():
        in_threads(run, 3)
    assert layers.experts.stats().bytes_from_host > 0
    assert (layers.experts.stats().experts_on_host > 0) == computing
    layers.experts.close()


@on_simulated
@pytest.mark.parametrize("below", [128, 40])
def test_what_has_sunk_another_process_need_not_read(device: Simulated, folder: Path, below: int) -> None:
    """Two openings are as two processes. With less room than for all it is slower, but right."""
    one, other = (opened(device, folder, below, shared=True) for _ in range(2))
    with device.computing():
        for seed in range(3):
            with device.in_random_order(seed), device.on():
                for step in steps(seed=seed):
                    one.use(*step)
        for layers in (other, one, other):
            for step in steps(seed=4):
                layers.use(*step)
    stats = other.experts.stats()
    assert stats.bytes_in_host <= below * SIZE
    assert stats.bytes_from_host > 0
    if below == 128:
        assert stats.bytes_read <= 41 * SIZE, "those that have never sunk"
        assert stats.bytes_to_host <= 41 * SIZE
        assert other.shared is not None
        assert other.shared.tier.memory.bytes_complete() <= 128 * SIZE
    one.experts.close()
    assert other.use(0, [1, 2, 3]) <= 3
    other.experts.close()


@on_simulated
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("what", ["queue", "record", "refuse", "fail"])
@computing
def test_a_copy_or_read_that_fails_ends_one_step_alone(
    device: Simulated, folder: Path, what: str, shared: bool, computing: bool
) -> None:
    handle, done, events, is_read = Faulty(), 0, device.now.events, what in ("refuse", "fail")
    layers = opened(device, folder, 50, shared=shared, computing=computing, handle=handle)
    with device.computing():
        for number, step in enumerate(steps(200)):
            handle.will("read", what, range(1 + number % 6, 99) if is_read and number % 4 else ())
            with contextlib.suppress(RuntimeError, OSError):  # a copy from the accelerator is none of its step
                with device.computing() if is_read or not number % 4 else device.failing(what, skipped=number % 6):
                    layers.use(*step)
                done += 1
    stats = layers.experts.stats()
    assert 50 < done < 200
    assert stats.bytes_from_host > 0
    assert (stats.experts_on_host > 0) == computing
    layers.experts.close()
    if what == "record":
        device.now.events = events  # torch never frees those that were not recorded


@on_simulated
def test_a_machine_whose_memory_others_fill(device: Simulated, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is worth more takes the place of what has sunk; nothing more is taken from the system."""
    layers = opened(device, folder, 60)
    share: Any = layers.experts.host and layers.experts.host.share
    monkeypatch.setattr(tier, "free_memory", lambda: MIB - share.in_use)
    share._tier._spare = MIB - 30 * SIZE
    with device.computing():
        for step in steps(200):
            layers.use(*step)
    stats = layers.experts.stats()
    assert 28 * SIZE < stats.bytes_in_host <= 30 * SIZE
    assert stats.bytes_from_host > 0
    layers.experts.close()


@on_simulated
def test_modules_that_are_all_used_are_streamed_in_the_same_memory(device: Simulated, folder: Path) -> None:
    model, given = mixture("list"), torch.randn(64, 64)
    wanted = copy.deepcopy(model)(given)
    budgets: Any = {"device_budget": nbytes(model) // 2, "host_budget": "2M"}
    with device.computing(), stream_weights(model, folder, device=device.device(), **budgets) as streamed:
        for _ in range(12):
            assert torch.equal(streamed(device.tensor(given)).cpu(), wanted)
        assert streamed._nvme_window.experts is None
        before = streamed.stats()
        streamed(device.tensor(given))
        assert streamed.stats().bytes_read == before.bytes_read, "all others have room in host memory"


@on_simulated
def test_a_forked_child_is_refused_and_its_parent_goes_on(device: Simulated, folder: Path) -> None:
    layers = opened(device, folder, 128, shared=True, computing=True)
    with device.computing():
        for step in steps():
            layers.use(*step)
        assert any(layers.experts.is_on_host(step[0], number) for number in step[1])

        def use() -> None:
            for number in step[1]:
                with pytest.raises(RuntimeError, match="parent process"):
                    layers.use(step[0], [number])
            layers.experts.close()

        in_child(use)
        for step in steps(seed=1):
            layers.use(*step)
    layers.experts.close()


@on_simulated
@pytest.mark.usefixtures("unraisable")  # what is raised while Python frees an object is lost
def test_ctrl_c_at_any_moment_leaves_no_expert_that_cannot_leave(device: Simulated, folder: Path) -> None:
    layers, events = opened(device, folder, 50, computing=True), device.now.events
    here, made = functools.partial(Interrupt, within="host_experts.py"), Interrupt(within="host_experts.py")
    host: Any = layers.experts.host
    with device.computing():
        for step in steps():
            layers.use(*step)
        with made:
            layers.use(0, range(8))
        for number in range(1, 2 * made.count):
            moment, (layer, chosen) = here(number), steps(2, number)[number % 2]
            with contextlib.suppress(KeyboardInterrupt), moment:
                layers.use(layer, chosen)
            order = {item[2] for item in host._order if host._is_only_here(item)}
            assert order | host._risen.keys() == host.present.keys() >= set(host._copies.values()), moment.where
            layers.use(layer, chosen)
    host.resize(0)
    assert host.share.bytes_in_use == 0
    layers.experts.close()
    device.now.events = events  # torch never frees those that were not recorded


@on_simulated
def test_host_memory_is_given_up_but_for_what_the_cpu_computes_with(device: Simulated, folder: Path) -> None:
    layers = opened(device, folder, 50, computing=True)
    host: Any = layers.experts.host
    with device.computing():
        for step in steps():
            layers.use(*step)
        least = min(host.present, key=lambda sunk: (sunk not in host._risen, sunk.worth)).expert
        values = host.values(least)
        for left in (49, 8, 0):
            host.resize(left * SIZE)
            assert host.share.bytes_in_use == max(1, left) * SIZE
        number = layers.experts.groups[least.group].index(least)
        assert torch.equal(values, layers.data.view(-1, SIZE)[COUNT * least.group + number])
        del values
        for step in steps(seed=1):
            layers.use(*step)
    layers.experts.close()


@on_simulated
@pytest.mark.usefixtures("one_thread")
@computing
def test_experts_give_way_to_a_cache_in_both_memories_and_come_back(
    device: Simulated, folder: Path, computing: bool
) -> None:
    path, kind = saved(folder, "Qwen3Moe")
    plain = kind.from_pretrained(path, experts_implementation="eager").eval()
    size, usual = nbytes(plain), {"max_new_tokens": 4, "do_sample": False}
    prompts = [torch.randint(0, 256, (2, count), generator=torch.Generator().manual_seed(count)) for count in (4, 300)]
    wanted, memory = (
        [plain.generate(tokens, **usual) for tokens in prompts],
        Memory(device=size * 2 // 3, host=size // 2),
    )

    def in_host(which: int, **options: Any) -> int:
        assert torch.equal(model.generate(device.tensor(prompts[which]), **usual, **options).cpu(), wanted[which])
        tiers: Any = memory._tier, memory.host
        assert tiers[0]._in_use <= tiers[0].nbytes
        assert tiers[1]._pool.bytes_in_use <= size // 2
        return int(model.stats().bytes_in_host)

    options: Any = {"memory": memory, "compute_on_host": computing}
    with device.computing(), from_pretrained(path, device=device.device(), **options) as model:
        alone = [in_host(0) for _ in range(3)][-1]
        with NvmeCache(folder, memory=memory) as cache:
            for _ in range(2):
                assert in_host(1, cache=cache) < alone / 2
                assert cache.stats().bytes_in_host > cache.stats().bytes_stored == 0
                cache.reset()
        assert [in_host(0) for _ in range(3)][-1] == alone > 0


@on_simulated
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", ["Qwen3Moe", "GptOss"])
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_the_cpu_computes_with_experts_in_host_memory(
    device: Simulated, folder: Path, name: str, implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here a CPU computes for the device, too, so that the bits are the same."""
    monkeypatch.setattr(HostComputing, "is_sooner", lambda _, tokens: tokens <= 2)
    path, kind = saved(folder, name)
    size = nbytes(kind.from_pretrained(path))
    budgets: Any = {"device_budget": size // 2, "host_budget": size // 4}
    seen = []
    for on_host in (False, True):
        options: Any = {"compute_on_host": on_host, "experts_implementation": implementation, **budgets}
        with device.computing(), from_pretrained(path, device=device.device(), **options) as model, torch.no_grad():
            for seed in range(30):
                tokens = torch.randint(0, 256, (1, 1 + seed % 3), generator=torch.Generator().manual_seed(seed))
                seen.append(model(device.tensor(tokens)).logits.cpu())
            stats = model.stats()
    assert all(map(torch.equal, seen[:30], seen[30:]))
    assert stats.experts_on_host > 0
    assert stats.bytes_in_host <= budgets["host_budget"]
    assert stats.peak_bytes <= budgets["device_budget"]


def test_the_cpu_computes_where_that_is_measured_to_be_sooner() -> None:
    computing = HostComputing()
    assert not computing.is_sooner(1), "no copy has been timed yet"
    assert computing.is_copy_unknown()
    computing.note_copy(1000, 1.0)
    assert computing.is_sooner(1), "what was not measured yet is tried"
    computing.note_computing(1000, 1, 1.1)
    assert computing.is_sooner(1), "about equal: as before"
    computing.note_computing(1000, 1, 3.0)
    assert not computing.is_sooner(1)
    for _ in range(4):
        computing.note_computing(1000, 1, 1.0)
    assert not computing.is_sooner(1), "about equal: as before"
    for _ in range(9):
        computing.note_computing(1000, 1, 0.5)
    assert computing.is_sooner(1)
    assert not computing.is_sooner(9), "too many tokens"
    ways = [computing.is_sooner(1) for _ in range(600)]
    assert ways.count(False) == 2, "now and then the other way is tried"
