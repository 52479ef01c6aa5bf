"""Which guesses are worth it: few bytes for nothing, and none where steps take less time without."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nvme_ops.offload import stream_weights
from nvme_ops.offload.experts.guesses import LayerGuesses, Trial
from tests.conftest import KIB
from tests.contract.faulty import Faulty, Held
from tests.offload.layers import SIZE, Layers
from tests.offload.models import WIDTH, mixture

X = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(3))


def steps(trial: Trial, count: int, seconds: Callable[[bool], float], tokens: int = 1) -> int:
    """Counts steps; returns how many were made with guesses."""
    guessing = 0
    for _ in range(count):
        guessing += trial.guessing
        trial.note_step(tokens, seconds(trial.guessing))
    return guessing


@pytest.mark.parametrize("faster", [True, False])
def test_what_takes_less_time_is_kept_and_the_other_tried_for_few_steps(faster: bool) -> None:
    noise = random.Random(1)

    def seconds(guessing: bool) -> float:
        pause = 60 if noise.random() < 0.02 else 0.0  # a user who reads before the next prompt
        return (1 if guessing is faster else 1.2) * noise.uniform(0.8, 1.2) + pause

    trial = Trial()
    steps(trial, 1000, seconds)
    assert trial.guessing is faster
    guessing = steps(trial, 10_000, seconds)
    assert guessing > 9500 if faster else guessing < 500
    assert 0 < guessing < 10_000, "times can change"
    assert steps(trial, 5000, lambda guessing: 2 - seconds(guessing)) in range(500, 4500)
    assert trial.guessing is not faster


def test_steps_are_compared_with_those_of_as_many_tokens() -> None:
    trial = Trial()
    for _ in range(100):
        steps(trial, 100, lambda guessing: 1 + guessing)
        assert trial.guessing, "too few for a comparison"
        steps(trial, 1, lambda _: 100.0, tokens=512)
    steps(trial, 200, lambda guessing: 1 + guessing)
    assert not trial.guessing


@pytest.mark.parametrize("right", [0.98, 0.66, 0.3])
def test_wrong_guesses_of_those_less_sure_add_a_tenth_at_most(right: float) -> None:
    chance, guesses = random.Random(1), LayerGuesses()
    needed = read = wrong = 0
    for number in range(4000):
        for quarter, rate in enumerate((1.0, 0.95, right)):
            is_read, is_right = guesses.is_worth_it(quarter), chance.random() < rate
            guesses.judge(quarter, is_right)
            needed += 1
            guesses.note_read(needed=True)
            if is_read and not is_right:
                guesses.note_read(needed=False)
            if number >= 1000 and quarter == 2:
                read += is_read
                wrong += is_read and not is_right
    assert guesses.is_due(1.0)
    assert wrong < 0.1 * 9000
    assert read == {0.98: 3000, 0.3: 0}.get(right, read)
    assert read > 1500 or right < 0.5, "as many as a tenth allows are read"


def test_few_wrong_guesses_follow_each_other_whatever_was_right_before() -> None:
    guesses = LayerGuesses()
    for _ in range(10):
        guesses.judge(0, False)
    for _ in range(1000):
        guesses.note_read(needed=True)
    wrong = 0
    while guesses.is_worth_it(0):
        guesses.note_read(needed=False)
        wrong += 1
    assert 3 < wrong < 7
    for _ in range(100):
        guesses.note_read(needed=False)
    for _ in range(50):
        guesses.note_read(needed=True)
    assert guesses.is_worth_it(0)


def test_a_layer_of_wrong_guesses_is_asked_now_and_then() -> None:
    guesses = LayerGuesses()
    for _ in range(100):
        guesses.judge(0, False)
    assert [guesses.is_due(now) for now in range(1, 18)] == [now in (8, 16) for now in range(1, 18)]
    for _ in range(100):
        guesses.judge(0, True)
    assert guesses.is_due(1)
    assert [LayerGuesses.quarter(place, 8) for place in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [LayerGuesses.quarter(place, 2) for place in range(2)] == [0, 2]


# Of experts


def test_guesses_are_counted_and_wrong_ones_cancelled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cancelled: list[Held] = []
    monkeypatch.setattr(Held, "request_cancel", lambda held: cancelled.append(held))
    handle = Faulty("read", "hold", {3})
    one = Layers(folder, 2, 8, 5, handle)
    one.experts.guess(1, [5, 6, 7])
    assert one.use(1, [5, 1]) == 1
    assert len(cancelled) == 1
    assert one.experts.groups[1][7].values is None
    handle.go.set()
    stats = one.experts.stats()
    assert (stats.guesses_right, stats.bytes_guessed_right) == (1, SIZE)
    assert (stats.guesses_wrong, stats.bytes_guessed_wrong) == (2, 2 * SIZE)
    assert (stats.experts_used, stats.expert_hits) == (2, 0)
    handle.will("read", "fail")
    one.experts.guess(0, [1, 2])
    handle.will()
    assert one.use(0, [1, 2]) == 2, "a guess that failed is read again"


def test_guesses_leave_memory_to_what_is_expected(folder: Path) -> None:
    one = Layers(folder, 2, 8, 3)
    one.experts.expect(0, {0: 1, 1: 1}, 1)
    one.experts.guess(1, range(8))
    assert one.experts.stats().bytes_read == 3 * SIZE
    assert one.use(0, range(4)) == 2
    assert one.use(1, [0]) == 0, "nor does what is expected take theirs"
    one.experts.guess(0, [5, 6, 7])
    assert one.experts.stats().bytes_read == 7 * SIZE, "what computes now stays"
    while len(one.held(0)) < 2:  # what arrives has its memory until it is there
        time.sleep(0.001)
    assert one.use(1, [1, 2]) == 2
    one.experts.expect(1, {0: 1, 1: 1, 2: 1}, 1)
    one.experts.fetch(one.sources[1][0][0])
    assert one.held(1) == {0, 1, 2}, "a guess leaves before what is expected"
    assert one.experts.stats().guesses_wrong == 2


def test_guesses_are_read_as_memory_becomes_free_and_those_in_memory_stay(folder: Path) -> None:
    one = Layers(folder, 2, 8, 4)
    one.experts.expect(0, dict.fromkeys(range(4), 1), 1)
    one.experts.guess(1, [4, 7, 5, 6])
    assert one.held(1) == set(), "what is expected comes first"
    for number in range(3):
        one.experts.fetch(one.sources[0][number][0])
    assert [expert.guessed for expert in one.experts.groups[1]] == [None, None, None, None, 0, None, None, 1]
    assert one.use(1, [4, 5, 6, 7]) == 2
    assert one.experts.stats().guesses_right == 2
    for number in (4, 5, 6):
        one.use(1, [number])
    one.experts.guess(1, [7, 2])
    assert one.use(1, [7]) == 0, "the guess took other memory"


def test_reads_are_noted_as_needed_or_not(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[bool] = []
    monkeypatch.setattr(LayerGuesses, "note_read", lambda _, needed: noted.append(needed))
    one = Layers(folder, 1, 8, 4)
    one.experts.guess(0, [5, 6])
    one.use(0, [5, 7])
    assert sorted(noted) == [False, True, True]
    one.use(0, [5])
    assert len(noted) == 3, "a hit is no read"


def test_steps_without_guesses_that_take_less_time_have_none(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, seconds = Layers(folder, 2, 8, 4), 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: seconds)
    guesses = []
    for number in range(400):
        one.use(0, [number % 8])
        guesses.append(one.experts.may_guess(1))
        seconds += 1 + guesses[-1]
        if number == 60:
            one.use(0, range(8), 8)  # another prompt
    assert all(guesses[:100])
    assert not any(guesses[150:])
    one, number = Layers(folder, 1, 8, 4), 0
    while one.experts.may_guess(0) and number < 999:  # of a list, whose router begins a pass
        one.experts.begin_pass(0, 1)
        seconds, number = seconds + 1, number + 1
    assert number < 200
    one = Layers(folder, 1, 8, 8)
    assert one.experts.may_guess(0)
    one.use(0, range(8))
    assert not one.experts.may_guess(0), "all are in memory"


def test_a_layer_of_wrong_guesses_makes_none_until_they_would_be_right(folder: Path) -> None:
    one = Layers(folder, 2, 64, 4)

    def guesses(steps: int, off: int) -> int:
        before = one.experts.stats()
        for number in range(steps):
            if one.experts.may_guess(1):
                one.experts.guess(1, [(number + off) % 64])
            one.use(1, [number % 64])
        after = one.experts.stats()
        return after.guesses_wrong + after.guesses_right - before.guesses_wrong - before.guesses_right

    assert 0 < guesses(200, 32) < 10, "when it is seen that they are not sure, few more wrong ones may be read"
    assert guesses(50, 32) == 0
    assert guesses(600, 0) > 50
    assert guesses(8, 0) > 2


def test_those_that_most_often_followed_are_known_once_they_were_asked_for(folder: Path) -> None:
    one = Layers(folder, 2, 8, 4)
    assert one.experts.following(1, [1, 2]) == []
    for before, after in ((1, 4), (1, 6), (2, 5), (1, 4), (2, 5)):
        one.use(0, [before])
        one.use(1, [after])
        one.use(1, [7])  # follows none of the layer before
    assert one.experts.following(1, [1, 2]) == [4, 5]


@pytest.mark.parametrize("change", [1e-3, 100.0])
@torch.no_grad()
def test_the_next_router_chooses_early_unless_that_is_wrong(change: float, folder: Path) -> None:
    with stream_weights(mixture("packed", change), folder, memory_budget="500K") as model:
        for count in (128, 16):
            before = model.stats()
            for number in range(count):
                model(X[number % 32][None])
        stats = model.stats()
    assert [block.router.calls for block in model] == [144, 144, 144], "it is not called for a guess"
    if change < 1:
        assert stats.guesses_right > 10 * stats.guesses_wrong + 20
        assert stats.bytes_guessed_right == stats.guesses_right * 64 * KIB
    else:
        assert stats.guesses_wrong > stats.guesses_right
        assert stats.guesses_wrong == before.guesses_wrong, "no more are made"
