"""Which guesses are worth it: few bytes for nothing, and none where steps take less time without."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from nvme_ops.offload.weights.guesses import LayerGuesses, Trial


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
