"""NvmeOptimizer stopped at any moment of a load, a save or the end of a step: old or new states, whole.

A step that is stopped: ``random_optimizers.py``. A program that is killed: ``test_optimizer_kept.py``.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nvme_ops.offload import NvmeOptimizer
from tests.contract.conftest import lost_unraisable
from tests.moments import Interrupt, numbers
from tests.offload.elsewhere import same as differ
from tests.offload.random_optimizers import states
from tests.offload.test_optimizer_kept import small, train
from tests.offload.training import equal, values

POINTS = pytest.mark.parametrize("points", [15, pytest.param(1000, marks=pytest.mark.slow)])
LIMIT = pytest.mark.timeout(3000)
pytestmark = pytest.mark.usefixtures(lost_unraisable.__name__)


def stopped(moment: Interrupt, call: Callable[[], object]) -> bool:
    """Whether the call was ended by Ctrl-C."""
    try:
        with moment:
            call()
    except KeyboardInterrupt:
        return True
    return False


def adamw(model: torch.nn.Module, folder: Path, **options: Any) -> NvmeOptimizer:
    return NvmeOptimizer(model.parameters(), torch.optim.AdamW, folder, **{"memory_budget": "1M", **options})


def take(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.param_groups[0]["lr"] = (step + 1) / 1000
    train(model, optimizer, step, step + 1)


class Reference:
    """What torch's own optimizer makes of a model: the parameters and states after each of four steps."""

    def __init__(self) -> None:
        model = small()
        plain = torch.optim.AdamW(model.parameters())
        self.models, self.states, self.dicts = list[Any](), list[Any](), list[Any]()
        for step in range(5):
            self.models.append(copy.deepcopy(model.state_dict()))
            self.states.append(copy.deepcopy(states(plain)))
            self.dicts.append(copy.deepcopy(plain.state_dict()))
            take(model, plain, step)

    def has(self, optimizer: NvmeOptimizer, step: int, options: bool = False) -> bool:
        """Whether the optimizer has the states of a step, and perhaps the options."""
        found, wanted = states(optimizer), self.states[step]
        return differ(found, wanted) == "" if options else differ(found[:-1], wanted[:-1]) == ""


@pytest.mark.parametrize("free", [False, True])
def test_a_step_that_the_backward_pass_has_taken_is_not_taken_again(folder: Path, free: bool) -> None:
    """Wherever it is stopped."""
    mine, other = small(), small()
    plain = torch.optim.AdamW(other.parameters())
    with adamw(mine, folder, overlap="backward", free_gradients=free) as ours:

        def step(number: int, moment: Interrupt) -> None:
            for model in (mine, other):
                model.zero_grad()
                model(torch.full((300,), number / 50).sin()).square().sum().backward()
            plain.step()
            end = time.monotonic() + 60
            while not equal(values(mine), values(other)):
                assert time.monotonic() < end
            if stopped(moment, ours.step):
                ours.step()
            assert equal(values(mine), values(other)), moment.where

        step(0, counted := Interrupt())
        for number in (found := list(numbers("taken", counted.count, 40))):
            step(number, Interrupt(number))
        assert ours.steps == len(found) + 1
        assert differ(states(ours)[:-1], states(plain)[:-1]) == ""


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("how", ["load_state_dict", "load_states"])
@POINTS
@LIMIT
def test_a_load_stopped_at_any_moment_is_old_or_new(folder: Path, reuse: bool, how: str, points: int) -> None:
    mine, reference, options = small(), Reference(), how == "load_state_dict"
    with adamw(mine, folder, reuse=reuse) as ours:
        sources: dict[int, Any] = {step: reference.dicts[step] if options else folder / str(step) for step in (2, 3)}
        for step in (2, 3):
            ours.load_state_dict(reference.dicts[step])
            ours.save_states(folder / str(step))
        load = getattr(ours, how)
        counted, now = Interrupt(), 2
        assert not stopped(counted, lambda: load(sources[2]))
        for number in numbers(how, counted.count, points):
            line, new = Interrupt(number), 5 - now
            stopped(line, lambda new=new: load(sources[new]))  # type: ignore[misc]
            if not reference.has(ours, now, options):
                assert reference.has(ours, new, options), line.where
                now = new
            if number % 5 == 0:  # and that is what a step begins with
                mine.load_state_dict(reference.models[now])
                take(mine, ours, now)
                assert equal(values(mine), list(reference.models[now + 1].values())), line.where
                load(sources[now])


@POINTS
@LIMIT
def test_a_save_stopped_at_any_moment_is_old_or_new(folder: Path, points: int) -> None:
    reference, path = Reference(), folder / "states"
    with adamw(small(), folder) as ours, adamw(small(), folder) as other:
        ours.load_state_dict(reference.dicts[2])
        counted, now = Interrupt(), 2
        assert not stopped(counted, lambda: ours.save_states(path, durable=False))
        for number in numbers("save", counted.count, points):
            line, new = Interrupt(number), 5 - now
            ours.load_state_dict(reference.dicts[new])
            stopped(line, lambda: ours.save_states(path, durable=False))
            other.load_states(path)
            if not reference.has(other, now):
                assert reference.has(other, new), line.where
                now = new
            assert reference.has(ours, new)
        assert [each.name for each in folder.iterdir() if not each.name.startswith(".nvme_ops-")] == ["states"]
