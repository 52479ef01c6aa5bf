"""What stays in memory and what is used next, and the arithmetic of ``nvme-offload plan``, followed by hand."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nvme_ops.base.text import GIB, MIB
from nvme_ops.offload.plan.estimate import (
    Computing,
    Mixture,
    Rates,
    Sizes,
    best,
    estimate,
    inference_plan,
    inference_text,
    step_bytes,
)
from nvme_ops.offload.plan.probe import computing_of
from nvme_ops.offload.plan.training import Machine, TrainedModel, TrainingWay, training_plan, training_text, ways
from nvme_ops.offload.residency.order import Order
from nvme_ops.offload.residency.placement import kept_as_they_grow, placement, worth_keeping
from tests.conftest import in_threads
from tests.device.planned import compared

MB = 1_000_000
LAYERS = (10 * MB,) * 20
ABOUT = {"model": "M", "layers": 1, "bytes": MB, "dtype": "float32"}
RATES = Rates(storage=100 * MB, device_free=10_000 * MB, host_free=10_000 * MB)


def sizes(memory: int, **others: Any) -> Sizes:
    return Sizes(model=210 * MB, resident=10 * MB, memory=memory, streamed=LAYERS, **others)


EMBEDDING = Sizes(8 * MB, resident=0, memory=MB, streamed=(), tables=((8000, 1000),))


def mixture(memory: int, certain: int = 0) -> Sizes:
    """Eight experts of which a token uses two, and weights that all tokens use, which have room."""
    experts = Mixture(8, 2, 80 * MB, memory)
    return Sizes(80 * MB + certain, 0, memory + certain, (10 * MB,) * (certain // (10 * MB)), experts)


STEPS: list[tuple[Sizes, int, float, int]] = [
    # twice a weight and an eighth of the memory are what the others pass through: 80 - 20 - 10 leave five
    (sizes(80 * MB), 1, 150 * MB, 50 * MB), (sizes(25 * MB), 1, 200 * MB, 0), (sizes(200 * MB), 1, 0, 200 * MB),
    # an embedding costs a row for each token, until it is read as a whole
    (EMBEDDING, 16, 16_000, 0), (EMBEDDING, 2000, 2 * MB, 0), (EMBEDDING, 2001, 8 * MB, 0),
    # of experts those that a batch is likely to ask for: two of eight; each with 1 - 0.75 ** 2
    (mixture(0), 1, 20 * MB, 0), (mixture(0), 2, 35 * MB, 0), (mixture(0), 1000, 80 * MB, 0),
    # less those in memory, a quarter here: of these a quarter has to be used, and 3/4 of that read, to take a place
    (mixture(20 * MB, 40 * MB), 1, 20 * MB * (1 - 0.25 * (1 - 0.25 * 0.75)), 40 * MB), (mixture(80 * MB), 9, 0, 0),
]  # fmt: skip


@pytest.mark.parametrize(("given_sizes", "batch", "read", "kept"), STEPS)
def test_what_a_step_reads_and_placement(given_sizes: Sizes, batch: int, read: float, kept: int) -> None:
    assert step_bytes(given_sizes, batch) == pytest.approx((read, kept, 0))


@pytest.mark.parametrize(("host", "in_memory"), [(0, 20), (20, 40), (60, 80)])
def test_experts_in_host_memory_come_from_there(host: int, in_memory: int) -> None:
    """What is read is that of as much memory in one; the rest of what is missing where it computes is copied."""
    moved = step_bytes(replace(mixture(20 * MB, 40 * MB), host=host * MB), 1)
    assert moved.read == mixture(in_memory * MB).experts.hits_and_read(1)[1]
    assert moved.read + moved.from_host == mixture(20 * MB).experts.hits_and_read(1)[1]


def test_a_step_takes_as_long_as_the_longer_of_reading_and_computing() -> None:
    slow = estimate(sizes(80 * MB, cache=1000, working=100, logits=7), RATES, Computing(0.5, 1.0), 4, 10, 20)
    assert (slow.cache_bytes, slow.beside_bytes) == (4 * 30 * 1000, 4 * 30 * 1000 + 4 * (10 * 100 + 7))
    assert (slow.nvme.bytes_per_step, slow.nvme.reading) == (150 * MB, 1.5)
    assert (slow.nvme.bound, slow.nvme.first_token) == ("reading", 1.5)
    assert slow.nvme.tokens_per_second == pytest.approx(4 / 1.5)
    assert slow.nvme.first_token_cold == pytest.approx(2.1), "all 210 MB are read once"
    whole = slow.no_offload
    assert (whole.bytes_per_step, whole.tokens_per_second, whole.first_token) == (0, 8, 1.0)
    assert whole.first_token_cold == pytest.approx(2.1 + 1.0)
    assert slow.cpu_memory is None
    many = estimate(sizes(80 * MB), RATES, Computing(step=3.0, prompt=9.0), 64, 10, 10).nvme
    assert (many.bound, many.tokens_per_second, many.first_token) == ("computing", 64 / 3, 9.0)
    assert many.first_token_cold == 9.0


@pytest.mark.parametrize(
    ("memory", "rates", "in_page_cache"),
    [
        # 210 MB of weights, beside the 90 of memory that the model takes where it computes
        (80, {"host_free": 300 * MB}, True), (80, {"host_free": 300 * MB - 1}, False),
        (80, {"host_free": 210 * MB, "to_device": 5000.0 * MB}, True),
        (80, {"host_free": 210 * MB - 1, "to_device": 5000.0 * MB}, False),
        (200, {}, False),  # all stays in memory
        (80, {"cached": None}, False),
    ],
)  # fmt: skip
def test_the_page_cache_has_what_free_memory_holds(memory: int, rates: dict[str, Any], in_page_cache: bool) -> None:
    machine = replace(RATES, **{"cached": 1000.0 * MB, "cached_noise": 0.07, **rates})
    estimated = estimate(sizes(memory * MB), machine, Computing(0.2, 0.01, 0.1), 1, 10, 10)
    assert estimated.in_page_cache == in_page_cache
    assert estimated.nvme.reading == pytest.approx(0 if memory == 200 else 0.15 if in_page_cache else 1.5)
    assert estimated.nvme.first_token == max(estimated.nvme.reading, 0.01)
    assert estimated.nvme.first_token_cold == pytest.approx(2.1), "from storage"
    assert estimated.noise == pytest.approx(0.1 if estimated.nvme.bound == "computing" else 0)
    text = inference_text(inference_plan(ABOUT, sizes(memory * MB), machine, [estimated], [], memory * MB))
    line = "free memory holds all of it: after the first pass weights come from the page cache, 1 GB/s (noise 7 %)"
    assert (line in text) == in_page_cache


def test_the_page_cache_shrinks_as_batches_grow() -> None:
    machine = replace(RATES, host_free=301 * MB, cached=1000.0 * MB)
    model = sizes(80 * MB, cache=50_000)
    planned = [estimate(model, machine, Computing(0.2, 0.01), batch, 10, 10) for batch in (1, 2)]
    assert [estimated.in_page_cache for estimated in planned] == [True, False]
    assert "holds all of it beside batch 1: " in inference_text(inference_plan(ABOUT, model, machine, planned, [], MB))


def test_weights_in_cpu_memory_pass_to_the_accelerator_at_its_rate() -> None:
    rates = Rates(100 * MB, 10_000 * MB, 10_000 * MB, to_device=1000 * MB)
    estimated: Any = estimate(sizes(80 * MB), rates, Computing(0.05, 0.1), 1, 10, 10).cpu_memory
    assert estimated.tokens_per_second == pytest.approx(1 / 0.15)
    assert estimated.first_token_cold == pytest.approx(2.1 + 0.21)
    assert estimated.fits


def test_weights_in_host_memory_are_not_read_and_all_pass_the_bus() -> None:
    """Of 200 MB, 50 stay on the device; then storage at 100 MB/s, the bus at 1000 or computing limits the step."""
    rates, plans = Rates(100 * MB, 100 * MB, 500 * MB, to_device=1000 * MB), []
    for host, read, seconds, bound in ((0, 150, 1.5, "reading"), (100, 50, 0.5, "reading"), (200, 0, 0.15, "bus")):
        model = sizes(80 * MB, host=host * MB)
        estimated = estimate(model, rates, Computing(0.1, 0.1), 1, 10, 10)
        assert estimated.nvme.bytes_per_step == read * MB
        assert estimated.nvme.from_host == (150 - read) * MB
        assert estimated.nvme.reading == pytest.approx(seconds)
        assert estimated.nvme.bound == bound
        about = {**ABOUT, "bytes": model.model}
        plans.append(inference_text(inference_plan(about, model, rates, [estimated], [], 80 * MB)))
    assert "with 143.1 MiB more host memory nothing is read from storage" in plans[0]
    assert "with 143.1 MiB more of the device nothing is copied to it" in plans[2]
    assert "more host memory" not in plans[2]
    assert [line.split("  ")[0] for line in plans[1].splitlines() if line.startswith("device")] == [
        "device, host, NVMe", "device, host", "device",
    ]  # fmt: skip


@pytest.mark.parametrize(("free", "streams", "whole"), [(89, False, False), (91, True, False), (211, True, True)])
def test_what_fits_into_memory(free: int, streams: bool, whole: bool) -> None:
    # 10 MB of weights are small and stay, beside the 80 for the others
    estimated = estimate(sizes(80 * MB), Rates(100 * MB, free * MB, free * MB), Computing(1, 1), 1, 10, 10)
    assert (estimated.nvme.fits, estimated.no_offload.fits) == (streams, whole)


def test_the_best_batch_online_costs_no_time_and_offline_gives_most_tokens() -> None:
    # reading takes 1.5 s: up to 1.65 s of computing make a step hardly longer
    computing = {1: Computing(0.2, 1), 8: Computing(1.6, 1), 16: Computing(1.7, 1), 64: Computing(8.0, 1)}
    estimates = [estimate(sizes(80 * MB), RATES, times, batch, 10, 10) for batch, times in computing.items()]
    assert best(estimates) == (8, 16)
    plan = inference_plan({}, sizes(80 * MB), RATES, estimates, [], 80 * MB, 3.6, 100.0)
    assert (plan["online_batch"], plan["offline_batch"]) == (8, 16)
    assert plan["bytes_kept"] == 60 * MB, "10 MB of small weights stay anyway"
    place = plan["batches"][1]["nvme"]
    assert place["joules_per_1000_tokens"] == pytest.approx(1000 * 100 * 1.6 / 8)
    assert place["cost_per_1000_tokens"] == pytest.approx(1000 * 0.001 * 1.6 / 8)


def test_noise_recommends_nothing() -> None:
    def chosen(noise: float, reading: int = 0) -> tuple[int | None, int | None]:
        computing = {1: Computing(1.0, 1), 4: Computing(1.04, 1, noise), 16: Computing(4.0, 1), 64: Computing(15.0, 1)}
        model = sizes(80 * MB if reading else 200 * MB)
        rates = Rates(reading * MB, 10_000 * MB, 10_000 * MB) if reading else RATES
        estimates = [estimate(model, rates, computed, batch, 10, 10) for batch, computed in computing.items()]
        plan = inference_plan(ABOUT, model, rates, estimates, [], MB)
        assert plan["noise"] == pytest.approx(0 if reading else noise)
        assert inference_text(plan).count("no recommendation with more than") == best(estimates).count(None)
        return best(estimates)

    assert chosen(0.0) == (4, 64)
    assert chosen(0.05) == (4, 64), "4 tokens/s; 4.27 differ from 4 by more"
    assert chosen(0.08) == (1, 16), "0.04 and the noise are more than a tenth; 4.27 may be 4"
    assert chosen(0.15) == (None, 4)
    assert chosen(0.3) == (None, None)
    assert chosen(0.3, reading=5) == (64, 64), "what is hidden behind reading does not count"


def test_a_batch_that_computes_slower_than_a_larger_one_is_measured_again() -> None:
    def measured(of_1: list[float], of_4: list[float]) -> dict[int, Computing]:
        layers: Any = SimpleNamespace(
            step=lambda batch, _: (of_1 if batch == 1 else of_4).pop(0), prompt=lambda batch, _: 7.0 * batch
        )
        return computing_of(layers, [1, 4], 8, 8, lambda _: None)

    calm = measured([1.0, 1.1], [2.2, 2.0])
    assert [(computed.step, computed.prompt) for computed in calm.values()] == [(1.0, 7.0), (2.0, 28.0)]
    assert [computed.noise for computed in calm.values()] == pytest.approx([0.1, 0.1])
    assert measured([9.0, 8.0, 1.0], [2.0, 2.0])[1] == Computing(1.0, 7.0, 7.0)
    reproducible = [3.0] * 4
    assert measured(reproducible, [2.0, 2.0])[1] == Computing(3.0, 7.0, 0.0)
    assert reproducible == []


def test_a_batch_that_does_not_fit_is_not_the_best() -> None:
    rates = Rates(100 * MB, 100 * MB, 100 * MB)
    computing = {1: Computing(0.2, 1), 64: Computing(0.3, 1)}
    for cache, wanted in ((MB, (1, 1)), (5 * MB, (None, None))):
        model = sizes(80 * MB, cache=cache)
        assert best([estimate(model, rates, times, batch, 5, 5) for batch, times in computing.items()]) == wanted
    assert "no batch fits" in inference_text(inference_plan(ABOUT, sizes(80 * MB), rates, [], [64], 80 * MB))


def test_expanding_is_a_part_of_computing_but_for_few_tokens() -> None:
    """Of experts those in use, 2 of 8 or 1 - 0.75 ** 20 of all; a few rows are multiplied as they are stored."""
    rates = replace(RATES, expanding=1000 * MB)
    experts = Mixture(8, 2, 80 * MB, 80 * MB, expanded=160 * MB)
    model = sizes(210 * MB, experts=experts, expanded=300 * MB)
    for multiplied, batch, expected in (
        (0, 1, 0.3 + 0.16 / 4), (4, 4, 0), (4, 5, 0.3), (4, 20, 0.3 + 0.16 * (1 - 0.75**20))
    ):  # fmt: skip
        made = estimate(replace(model, multiplied=multiplied), rates, Computing(0.5, 1.0), batch, 10, 10)
        assert made.expanding == pytest.approx(expected)
        assert made.nvme.computing == pytest.approx(0.5 + expected)
        assert made.nvme.first_token == pytest.approx(1.3 + 0.16 * (1 - 0.75 ** (10 * batch)), rel=1e-6)
    assert estimate(model, RATES, Computing(0.5, 1.0), 9, 10, 10).expanding == 0


@pytest.mark.parametrize(
    ("in_8_bits", "stored", "least", "expanding"), [(0, 100 * MB, 116, 0), (500, 50 * MB, 128, 0.1)]
)
def test_a_cache_in_8_bits_moves_fewer_bytes_and_is_expanded(
    in_8_bits: int, stored: int, least: int, expanding: float
) -> None:
    """The least is 90 for weights, and a layer, which in 8 bits is beside it expanded."""
    model = sizes(80 * MB, cache=1000, cache_stored=in_8_bits, cache_page=10, layers=4)
    for free, bytes_in_files in ((least, stored), (least - 1, 0), (311, 0)):
        rates = Rates(100 * MB, free * MB, free * MB, expanding_cache=1000 * MB)
        made = estimate(model, rates, Computing(0.5, 1.0), 1, 99_990, 10)
        assert (made.cache_bytes, made.cache.stored) == (stored, bytes_in_files)
        assert (made.nvme.fits, made.no_offload.fits) == (free >= least, free == 311)
        assert made.nvme.reading == pytest.approx(1.5 + bytes_in_files / (100 * MB))
        assert (made.nvme.computing, made.no_offload.computing) == pytest.approx((0.5 + expanding, 0.5))
        assert made.expanding == pytest.approx(expanding)


def test_the_page_of_a_mixture_of_experts() -> None:
    plan = inference_plan(ABOUT, mixture(40 * MB), RATES, [], [], 40 * MB)
    line = "8 experts, 2 used per token; memory for experts 38.15 MiB, which has 44 % of those used: 10.73 MiB read"
    assert line in inference_text(plan)


# Training

MODELS = st.builds(
    TrainedModel,
    sizes=st.lists(st.integers(1, 10**7).map(lambda count: 4 * count), min_size=1, max_size=9).map(tuple),
    itemsize=st.sampled_from([2, 4]),
    activations=st.integers(0, 10**8),
    of_layer=st.integers(0, 10**8),
    largest_saved=st.integers(0, 10**8),
    seconds=st.just(1e-6),
)
ROOMS = st.integers(0, 2**42)


def by_name(model: TrainedModel, machine: Machine, batch: int, length: int = 1) -> dict[str, TrainingWay]:
    return {way.name: way for way in ways(model, machine, batch, length)}


@given(MODELS, ROOMS, ROOMS, ROOMS, st.booleans(), st.integers(1, 100))
def test_the_largest_batch_fits_and_no_larger_one(
    model: TrainedModel, memory: int, free: int, host: int, is_cpu: bool, length: int
) -> None:
    machine = Machine(memory, 1e9, free) if is_cpu else Machine(memory, 1e9, free, host, bus=4e9, on_cpu=1e-5)
    for name, way in by_name(model, machine, 1, length).items():
        assert not by_name(model, machine, way.largest_batch + 1, length)[name].fits
        fitting = by_name(model, machine, way.largest_batch, length)[name] if way.largest_batch else way
        assert fitting.fits == (way.largest_batch >= 1)
        assert not fitting.fits or (fitting.memory <= memory and fitting.stored <= free)


def test_activations_on_storage_make_room_for_larger_batches() -> None:
    """A hundred layers, of whose activations only those of the one at work need memory, and the disk has room."""
    model = TrainedModel((4000,), 4, activations=100_000, of_layer=1000, largest_saved=10, seconds=1e-6)
    for free, largest in ((10**9, 10**9 + 10**6), (10**12, 500 * 10**6)):
        named = by_name(model, Machine(8 * 10**6, 1e9, free), 1000)
        memory, activations = named["in memory"], named["activations"]
        assert memory.largest_batch == (8 * 10**6 - 16_000) // 100_000
        assert not memory.fits
        assert activations.fits
        assert activations.largest_batch == pytest.approx(min(largest / 100_000, 7 * 10**6 / 2000), rel=0.01)
        assert activations.seconds == pytest.approx(2 * (10**8 - 750_000) / 1e9), "a quarter is on its way"


def test_a_step_of_training_moves_what_its_plan_says(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")  # whatever accelerator another test has made in this process
    monkeypatch.setattr("nvme_ops.offload.activations.save_on_nvme.where_it_computes", lambda: cpu)
    compared(cpu, str(folder), Machine(32 * MIB, 1e9, 1 << 40))


def test_the_fastest_tier_decides_the_bound_of_training() -> None:
    """States of 8 MB, of which host memory has none, or all; 1 GB/s of storage, 4 GB/s of the bus, or computing."""
    model = TrainedModel((4 * MIB,), 4, activations=1, of_layer=1, largest_saved=1, seconds=1e-6)
    for host, batch, bound in ((0, 1, "storage"), (512 * MIB, 1, "bus"), (512 * MIB, 1 << 20, "computing")):
        way = by_name(model, Machine(1 << 30, 1e9, 1 << 40, host, bus=4e9), batch)["states"]
        moved = 16 * MIB / 1e9 if bound == "storage" else 12 * MIB / 4e9  # the states, and the parameters' backup
        assert way.bound == bound
        assert way.seconds == pytest.approx(1.048576 if bound == "computing" else moved, rel=0.01)
        assert (way.read, way.from_host) == pytest.approx((8 * MIB, 0) if host == 0 else (0, 8 * MIB), rel=0.01)


@pytest.mark.parametrize(("dtype", "nbytes"), [(None, 4), ("bfloat16", 2), ("int8", 1 + 4 / 256)])
def test_states_in_fewer_bits_are_planned_as_they_are_stored(dtype: Any, nbytes: float) -> None:
    model = TrainedModel((4 * MIB,), 4, activations=1, of_layer=1, largest_saved=1, seconds=1e-6, state_dtype=dtype)
    plan = by_name(model, Machine(1 << 30, 1e9, 1 << 40, 512 * MIB, bus=4e9), 1)
    assert plan["states"].from_host == pytest.approx(2 * MIB * nbytes, rel=0.01)
    assert plan["in memory"].memory == pytest.approx(16 * MIB, rel=0.01), "torch's own are in float32"


def test_the_page_of_training_says_what_to_pass() -> None:
    model = TrainedModel((4 * MIB,) * 8, 4, activations=1, of_layer=1, largest_saved=1, seconds=1e-9)
    machine = Machine(72 * MIB, 1e9, 1 << 40, 64 * MIB, bus=4e9, on_cpu=1e-3)
    text = training_text(training_plan({**ABOUT, "noise": 0.0, "memory_free": GIB}, model, machine, 0.1, [1], 1))
    for words in (
        "memory 72 MiB of 1 GiB free + 64 MiB of the host, bus 4 GB/s",
        "fastest: states, by NvmeOptimizer(host_budget='64 MiB')",
        "with 64 MiB more host memory nothing is read from storage",
        "with 56 MiB more memory, all of it is where it computes",
    ):
        assert words in text
    assert "\non the CPU " in text


# What is used next, and what is worth its memory


def uses(order: Order[str], names: str) -> list[bool]:
    return [order.use(name) for name in names]


def foreseen(order: Order[str], count: int = 99) -> str:
    return "".join(itertools.islice(order.ahead(), count))


def test_the_foreseen_order_holds_until_it_is_seen_to_be_wrong() -> None:
    order = Order("abcd")
    assert foreseen(order) == "abcd"
    assert uses(order, "ab") == [True, True]
    assert foreseen(order) == "cda"
    assert all(uses(order, "cdab"))
    uses(order, "dcba")
    assert all(uses(order, "dcba")[1:])
    assert all(uses(order, "dcba"))


@pytest.mark.parametrize(
    ("seen", "right", "then"),
    [
        ("abcdabcd", "abcd", "abc"),  # a loop
        ("eabeeabe", "eabe", "ab"),  # a weight in two places is followed by what follows it there
        ("eabeeabeea", "", "be"),
        ("ABCxyzxyzxyz", "xyzxyz", "xy"),  # one loop after another, as an encoder before a decoder
        ("ABCxyzxyzxyzA", "", "BCxyz"),  # and the first one is not forgotten
        ("axcabcabca", "", "bc"),  # a branch is believed to go where it went last
        ("axcabcabcaxca", "", "x"),
        ("aabbccaabbcc", "aabbcc", "ab"),  # the same weight again changes nothing
    ],
)
def test_what_followed_before_is_foreseen(seen: str, right: str, then: str) -> None:
    order = Order[str]()
    uses(order, seen)
    assert all(uses(order, right))
    assert foreseen(order).startswith(then)


def test_each_thread_has_its_own_place() -> None:
    order = Order("abcd")
    uses(order, "ab")
    seen: list[str] = []

    def other(_: int) -> None:
        order.use("a")
        seen.append(foreseen(order))

    in_threads(other, 1)
    assert seen == ["bcd"]
    assert foreseen(order) == "cda"
    assert order.current() == {"a", "b"}
    order.use("c")
    assert order.end_round() == [("a", 2), ("b", 1), ("c", 1), ("d", 0)]
    assert order.current() == {"c"}
    order = Order("abc")
    assert [bool(order.use(name) and order.end_round()) for name in "abcabc"] == [False, False, True] * 2


def test_what_is_used_more_often_or_is_small_is_kept_first() -> None:
    weights = [("rare", 0.5, 100), ("often", 4.0, 100), ("usual", 1.0, 100)]
    for capacity, kept in ((99, ""), (100, "often"), (250, "often usual"), (300, "often usual rare")):
        assert worth_keeping(weights, capacity) == set(kept.split())
    weights = [("large", 1.0, 8 * MIB), ("small", 1.0, 4096), ("other", 1.0, 8 * MIB)]
    assert worth_keeping(weights, MIB) == {"small"}
    chosen = sorted(worth_keeping([(str(number), 1.0, MIB) for number in range(10)], 5 * MIB))
    assert chosen in (list("02468"), list("13579")), "all along the order"


@given(
    st.lists(st.tuples(st.floats(0.1, 8), st.integers(1, 4 * MIB)), min_size=1, max_size=30), st.integers(0, 1 << 27)
)
def test_no_more_is_kept_than_there_is_room_for_and_all_that_fits(sizes: list[tuple[float, int]], room: int) -> None:
    weights = [(number, uses, nbytes) for number, (uses, nbytes) in enumerate(sizes)]
    for chosen in (worth_keeping(weights, room), placement(weights, room)):
        taken = sum(nbytes for number, _, nbytes in weights if number in chosen)
        assert taken <= room
        assert len(chosen) == len(weights) or sum(nbytes for _, _, nbytes in weights) > room


def test_what_does_not_stay_passes_through_twice_its_size() -> None:
    weights = [(number, 1.0, MIB) for number in range(100)]
    assert len(placement(weights, 80 * MIB)) == 80 - 2 - 10  # an eighth is read ahead
    assert placement(weights, 2 * MIB) == set()
    large = [("large", 1.0, 30 * MIB), *((number, 1.0, MIB) for number in range(50))]
    kept = placement(large, 64 * MIB)
    assert "large" in kept, "as that leaves more for the others"
    assert len(kept) - 1 == 64 - 30 - 2 - 8
    assert "large" in placement(large, 76 * MIB), "although it could pass through, beside fewer others"
    long_ago = [("table", 0.01, 30 * MIB), *((number, 2.0, MIB) for number in range(50))]
    kept = placement(long_ago, 40 * MIB)
    assert "table" not in kept
    assert len(kept) == 40 - 2 - 5


def test_only_the_proportions_of_uses_decide_what_stays() -> None:
    """A plan has one use in each step; a run counts several rounds, of which earlier ones count less."""
    sizes = [4096 * (8 + number % 29) for number in range(60)]
    once, often = ([(number, uses, nbytes) for number, nbytes in enumerate(sizes)] for uses in (1.0, 1.9375))
    for memory in range(0, sum(sizes), sum(sizes) // 50):
        assert placement(once, memory) == placement(often, memory)


@given(st.lists(st.integers(0, 100), max_size=30), st.integers(0, 2000), st.integers(0, 100))
def test_what_grows_is_kept_as_far_as_there_is_room(sizes: list[int], room: int, more: int) -> None:
    kept = kept_as_they_grow(sizes, room)
    assert sum(sizes[place] for place in kept) <= room
    assert len(kept) == len(sizes) or sum(sizes) > room
    equal = [more] * len(sizes)
    assert kept_as_they_grow(equal, room) <= kept_as_they_grow(equal, room + more)
