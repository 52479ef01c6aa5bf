"""The arithmetic of ``nvme-offload plan``, with numbers that can be followed by hand."""

from __future__ import annotations

from typing import Any

import pytest

from nvme_ops.offload.plan.estimate import (
    Computing,
    InferencePlan,
    Rates,
    Sizes,
    Streamed,
    best,
    estimate,
    per_thousand,
    step_bytes,
)

MB = 1_000_000
LAYERS = tuple(Streamed(10 * MB) for _ in range(20))
RATES = Rates(storage=100 * MB, device_free=10_000 * MB, host_free=10_000 * MB)


def sizes(memory: int, **others: Any) -> Sizes:
    return Sizes(model=210 * MB, memory=memory, streamed=LAYERS, **others)


def test_what_does_not_stay_is_read_by_each_step() -> None:
    # twice a weight and an eighth of the memory are what the others pass through: 80 - 20 - 10 leave five
    assert step_bytes(sizes(80 * MB), 1) == (150 * MB, 50 * MB)
    assert step_bytes(sizes(25 * MB), 1) == (200 * MB, 0)
    assert step_bytes(sizes(200 * MB), 1) == (0, 200 * MB)


def test_an_embedding_costs_a_row_for_each_token_until_it_is_read_as_a_whole() -> None:
    embedding = Sizes(8 * MB, memory=MB, streamed=(), tables=((8000, 1000),))
    assert step_bytes(embedding, 16) == (16_000, 0)
    assert step_bytes(embedding, 2000)[0] == 2 * MB
    assert step_bytes(embedding, 2001)[0] == 8 * MB


def test_of_experts_those_are_read_that_a_batch_is_likely_to_ask_for() -> None:
    experts = Sizes(80 * MB, memory=1, streamed=tuple(Streamed(10 * MB, 8, 2) for _ in range(8)))
    assert step_bytes(experts, 1)[0] == 20 * MB  # two of eight
    assert step_bytes(experts, 2)[0] == 35 * MB  # each with 1 - 0.75 ** 2
    assert step_bytes(experts, 1000)[0] == 80 * MB


def test_experts_stay_after_what_all_tokens_use() -> None:
    streamed = (Streamed(10 * MB, 8, 2),) * 8 + (Streamed(10 * MB),) * 4
    read, kept = step_bytes(Sizes(120 * MB, memory=80 * MB, streamed=streamed), 1)
    assert kept == 50 * MB  # the four, and one expert
    assert read == pytest.approx(7 * 2.5 * MB)


def test_a_step_takes_as_long_as_the_longer_of_reading_and_computing() -> None:
    slow = estimate(sizes(80 * MB), RATES, Computing(step=0.5, prompt=1.0), 4, 10, 10)
    assert slow.nvme.bytes_per_step == 150 * MB
    assert slow.nvme.reading == 1.5
    assert (slow.nvme.bound, slow.nvme.step, slow.nvme.first_token) == ("reading", 1.5, 1.5)
    assert slow.nvme.tokens_per_second == pytest.approx(4 / 1.5)
    assert slow.nvme.first_token_cold == pytest.approx(2.1), "all 210 MB are read once"
    many = estimate(sizes(80 * MB), RATES, Computing(step=3.0, prompt=9.0), 64, 10, 10)
    assert (many.nvme.bound, many.nvme.step, many.nvme.first_token) == ("computing", 3.0, 9.0)
    assert many.nvme.first_token_cold == 9.0


def test_without_offload_nothing_is_read_once_it_is_loaded() -> None:
    found = estimate(sizes(80 * MB), RATES, Computing(0.5, 1.0), 4, 10, 10)
    assert found.no_offload.bytes_per_step == 0
    assert found.no_offload.tokens_per_second == 8
    assert found.no_offload.first_token == 1.0
    assert found.no_offload.first_token_cold == pytest.approx(2.1 + 1.0)
    assert found.cpu_memory is None


def test_weights_in_cpu_memory_pass_to_the_accelerator_at_its_rate() -> None:
    rates = Rates(100 * MB, 10_000 * MB, 10_000 * MB, to_device=1000 * MB)
    found = estimate(sizes(80 * MB), rates, Computing(0.05, 0.1), 1, 10, 10)
    assert found.cpu_memory is not None
    assert found.cpu_memory.step == pytest.approx(0.15)
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
    found = InferencePlan({}, sizes(80 * MB), RATES, estimates, [], 80 * MB).document()
    assert (found["online_batch"], found["offline_batch"]) == (8, 16)
    assert found["bytes_kept"] == 60 * MB, "10 MB of small weights stay anyway"
    assert [each["batch"] for each in found["batches"]] == [1, 8, 16, 64]


def test_a_batch_that_does_not_fit_is_not_the_best() -> None:
    rates = Rates(100 * MB, 100 * MB, 100 * MB)
    computing = {1: Computing(0.2, 1), 64: Computing(0.3, 1)}
    for cache, wanted in ((MB, (1, 1)), (5 * MB, (None, None))):
        model = sizes(80 * MB, cache=cache)
        assert best([estimate(model, rates, times, batch, 5, 5) for batch, times in computing.items()]) == wanted


def test_what_a_thousand_tokens_cost() -> None:
    assert per_thousand(100.0, 4.0) == 25_000  # joules, at 100 watts
    assert per_thousand(3.6 / 3600, 4.0) == pytest.approx(0.25)  # at 3.60 an hour
