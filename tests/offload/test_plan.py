"""The arithmetic of ``nvme-offload plan``, with numbers that can be followed by hand, and of ``plan --train``."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from nvme_ops.offload.plan.estimate import (
    Computing,
    Rates,
    Sizes,
    Streamed,
    TrainedModel,
    TrainingWay,
    best,
    estimate,
    inference_plan,
    step_bytes,
    ways,
)
from nvme_ops.text import GIB

MB = 1_000_000
LAYERS = tuple(Streamed(10 * MB) for _ in range(20))
RATES = Rates(storage=100 * MB, device_free=10_000 * MB, host_free=10_000 * MB)


def sizes(memory: int, **others: Any) -> Sizes:
    return Sizes(model=210 * MB, memory=memory, streamed=LAYERS, **others)


EMBEDDING = Sizes(8 * MB, memory=MB, streamed=(), tables=((8000, 1000),))
EXPERTS = Sizes(80 * MB, memory=1, streamed=(Streamed(10 * MB, 8, 2),) * 8)
BOTH = Sizes(120 * MB, memory=80 * MB, streamed=(*EXPERTS.streamed, *(Streamed(10 * MB),) * 4))
STEPS: list[tuple[Sizes, int, float, int]] = [
    # twice a weight and an eighth of the memory are what the others pass through: 80 - 20 - 10 leave five
    (sizes(80 * MB), 1, 150 * MB, 50 * MB), (sizes(25 * MB), 1, 200 * MB, 0), (sizes(200 * MB), 1, 0, 200 * MB),
    # an embedding costs a row for each token, until it is read as a whole
    (EMBEDDING, 16, 16_000, 0), (EMBEDDING, 2000, 2 * MB, 0), (EMBEDDING, 2001, 8 * MB, 0),
    # of experts those that a batch is likely to ask for: two of eight; each with 1 - 0.75 ** 2
    (EXPERTS, 1, 20 * MB, 0), (EXPERTS, 2, 35 * MB, 0), (EXPERTS, 1000, 80 * MB, 0),
    # experts stay after what all tokens use: the four, and one expert
    (BOTH, 1, 7 * 2.5 * MB, 50 * MB),
]  # fmt: skip


@pytest.mark.parametrize(("given_sizes", "batch", "read", "kept"), STEPS)
def test_what_a_step_reads_and_what_stays(given_sizes: Sizes, batch: int, read: float, kept: int) -> None:
    assert step_bytes(given_sizes, batch) == pytest.approx((read, kept))


def test_a_step_takes_as_long_as_the_longer_of_reading_and_computing() -> None:
    slow = estimate(sizes(80 * MB), RATES, Computing(step=0.5, prompt=1.0), 4, 10, 10)
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


def test_weights_in_cpu_memory_pass_to_the_accelerator_at_its_rate() -> None:
    rates = Rates(100 * MB, 10_000 * MB, 10_000 * MB, to_device=1000 * MB)
    found = estimate(sizes(80 * MB), rates, Computing(0.05, 0.1), 1, 10, 10)
    assert found.cpu_memory is not None
    assert found.cpu_memory.tokens_per_second == pytest.approx(1 / 0.15)
    assert found.cpu_memory.first_token_cold == pytest.approx(2.1 + 0.21)
    assert found.cpu_memory.fits


def test_the_cache_and_what_is_computed_with_come_beside_the_weights() -> None:
    found = estimate(sizes(80 * MB, cache=1000, working=100, logits=7), RATES, Computing(1, 1), 4, 10, 20)
    assert found.cache_bytes == 4 * 30 * 1000
    assert found.beside_bytes == 4 * 30 * 1000 + 4 * (10 * 100 + 7)


@pytest.mark.parametrize(("free", "streams", "whole"), [(89, False, False), (91, True, False), (211, True, True)])
def test_what_fits_into_memory(free: int, streams: bool, whole: bool) -> None:
    # 10 MB of weights are small and stay, beside the 80 for the others
    found = estimate(sizes(80 * MB), Rates(100 * MB, free * MB, free * MB), Computing(1, 1), 1, 10, 10)
    assert (found.nvme.fits, found.no_offload.fits) == (streams, whole)


def test_the_best_batch_online_costs_no_time_and_offline_gives_most_tokens() -> None:
    # reading takes 1.5 s: up to 1.65 s of computing make a step hardly longer
    computing = {1: Computing(0.2, 1), 8: Computing(1.6, 1), 16: Computing(1.7, 1), 64: Computing(8.0, 1)}
    estimates = [estimate(sizes(80 * MB), RATES, times, batch, 10, 10) for batch, times in computing.items()]
    assert best(estimates) == (8, 16)
    found = inference_plan({}, sizes(80 * MB), RATES, estimates, [], 80 * MB, 3.6, 100.0)
    assert (found["online_batch"], found["offline_batch"]) == (8, 16)
    assert found["bytes_kept"] == 60 * MB, "10 MB of small weights stay anyway"
    assert [each["batch"] for each in found["batches"]] == [1, 8, 16, 64]
    place = found["batches"][1]["nvme"]
    assert place["joules_per_1000_tokens"] == pytest.approx(1000 * 100 * 1.6 / 8)
    assert place["cost_per_1000_tokens"] == pytest.approx(1000 * 0.001 * 1.6 / 8)


def test_a_batch_that_does_not_fit_is_not_the_best() -> None:
    rates = Rates(100 * MB, 100 * MB, 100 * MB)
    computing = {1: Computing(0.2, 1), 64: Computing(0.3, 1)}
    for cache, wanted in ((MB, (1, 1)), (5 * MB, (None, None))):
        model = sizes(80 * MB, cache=cache)
        assert best([estimate(model, rates, times, batch, 5, 5) for batch, times in computing.items()]) == wanted


# Training

MODELS = st.builds(
    TrainedModel,
    parameters=st.integers(1, 10**10),
    itemsize=st.sampled_from([2, 4]),
    largest=st.integers(1, 10**9),
    activations=st.integers(0, 10**8),
    of_layer=st.integers(0, 10**8),
    seconds=st.just(1e-6),
)
ROOMS = st.integers(0, 2**42)


def by_name(model: TrainedModel, memory: int, free: int, batch: int, length: int = 1) -> dict[str, TrainingWay]:
    return {each.name: each for each in ways(model, memory, 1e9, free, batch, length)}


@given(MODELS, ROOMS, ROOMS, st.integers(1, 100))
def test_the_largest_batch_fits_and_no_larger_one(model: TrainedModel, memory: int, free: int, length: int) -> None:
    for name, way in by_name(model, memory, free, 1, length).items():
        largest = way.largest_batch
        assert way.fits == (largest >= 1)
        assert not by_name(model, memory, free, largest + 1, length)[name].fits
        if largest:
            fitting = by_name(model, memory, free, largest, length)[name]
            assert fitting.fits
            assert fitting.memory <= memory
            assert fitting.written <= free


@given(MODELS, ROOMS, ROOMS, st.integers(1, 100))
def test_room_on_storage_makes_no_batch_smaller(model: TrainedModel, memory: int, free: int, length: int) -> None:
    """If the disk has room for all of it, activations on storage need no more memory than in memory."""
    found = by_name(model, memory, free, 1, length)
    largest = found["in memory"].largest_batch
    assume(max(1, model.activations * length) * largest <= free)
    assert found["activations"].largest_batch >= largest


def test_nothing_fits_where_the_states_have_no_room() -> None:
    model = TrainedModel(10**9, 4, 10**8, activations=10**6, of_layer=10**5, seconds=1e-6)
    for batch in (1, 7):
        for name, way in by_name(model, 64 * GIB, 7 * GIB, batch).items():
            on_storage = name not in ("in memory", "activations")
            assert (way.fits, way.largest_batch == 0) == (not on_storage, on_storage)


def test_activations_on_storage_make_room_for_larger_batches() -> None:
    """A hundred layers, of whose activations only those of the one at work need memory, and the disk has room."""
    model = TrainedModel(1000, 4, 1000, activations=100_000, of_layer=1000, seconds=1e-6)
    for free, largest in ((10**9, 10**9 + 10**6), (10**12, 500 * 10**6)):
        found = {each.name: each for each in ways(model, 8 * 10**6, 1e9, free, 1000, 1)}
        memory, activations = found["in memory"], found["activations"]
        assert memory.largest_batch == (8 * 10**6 - 16_000) // 100_000
        assert not memory.fits
        assert activations.fits
        assert activations.largest_batch == pytest.approx(min(largest / 100_000, 7 * 10**6 / 2000), rel=0.01)
        assert activations.seconds == pytest.approx(2 * (10**8 - 10**6) / 1e9)
