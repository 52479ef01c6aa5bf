"""The arithmetic of ``nvme-offload plan --train``."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from nvme_ops.offload.plan.estimate import TrainedModel, TrainingWay, ways
from nvme_ops.text import GIB

MODELS = st.builds(
    TrainedModel,
    parameters=st.integers(1, 10**10),
    itemsize=st.sampled_from([2, 4]),
    largest=st.integers(1, 10**9),
    activations=st.integers(0, 10**8),
    of_layer=st.integers(0, 10**8),
    seconds=st.just(1e-6),
)
SIZES = st.integers(0, 2**42)


def by_name(model: TrainedModel, memory: int, free: int, batch: int, length: int = 1) -> dict[str, TrainingWay]:
    return {each.name: each for each in ways(model, memory, 1e9, free, batch, length)}


@given(MODELS, SIZES, SIZES, st.integers(1, 100))
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


@given(MODELS, SIZES, SIZES, st.integers(1, 100))
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
