"""NvmeOptimizer stopped or killed at any moment: it has the states of before or the new ones, whole."""

from __future__ import annotations

import contextlib
import copy
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nvme_ops.offload import NvmeOptimizer
from tests.contract.conftest import lost_unraisable
from tests.moments import Interrupt, numbers
from tests.offload.test_optimizer_kept import Acting, interrupt
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


def parameters() -> list[torch.nn.Parameter]:
    """Several chunks of a budget of 1 MiB, one of which has two parameters."""
    generator = torch.Generator().manual_seed(3)
    return [torch.nn.Parameter(torch.randn(size, generator=generator)) for size in (30000, 9000, 17)]


def weigh(params: list[torch.nn.Parameter], step: int) -> None:
    """Gives gradients by autograd, which do not depend on the parameters."""
    for each in params:
        each.grad = None
    generator = torch.Generator().manual_seed(step)
    torch.stack([(each * torch.randn(each.shape, generator=generator)).sum() for each in params]).sum().backward()


def give(params: list[torch.nn.Parameter], step: int) -> None:
    """Gives the same gradients without autograd, whose threads a forked child lacks."""
    generator = torch.Generator().manual_seed(step)
    for each in params:
        each.grad = torch.randn(each.shape, generator=generator)


def values_of(params: list[torch.nn.Parameter]) -> list[torch.Tensor]:
    return values(torch.nn.ParameterList(params))


def same(one: dict[str, Any], other: dict[str, Any], options: bool = False) -> bool:
    """Whether these state dicts have the same states, and options."""
    states = [
        [torch.as_tensor(each[name]) for _, each in sorted(found["state"].items()) for name in sorted(each)]
        for found in (one, other)
    ]
    return (
        len(states[0]) == len(states[1])
        and equal(*states)
        and (not options or one["param_groups"][0]["lr"] == other["param_groups"][0]["lr"])
    )


def adamw(params: list[torch.nn.Parameter], folder: Path, **options: Any) -> NvmeOptimizer:
    return NvmeOptimizer(params, torch.optim.AdamW, folder, **{"memory_budget": "1M", **options})


class Reference:
    """What torch's own optimizer makes of parameters: their values and its state dict after each step."""

    def __init__(self, steps: int) -> None:
        params = parameters()
        plain = torch.optim.AdamW(params)
        self.values, self.dicts = [values_of(params)], [copy.deepcopy(plain.state_dict())]
        for step in range(1, steps + 1):
            plain.param_groups[0]["lr"] = step / 1000
            weigh(params, step)
            plain.step()
            self.values.append(values_of(params))
            self.dicts.append(copy.deepcopy(plain.state_dict()))

    def set(self, params: list[torch.nn.Parameter], step: int) -> None:
        for each, value in zip(params, self.values[step], strict=True):
            each.data.copy_(value)

    def take(self, params: list[torch.nn.Parameter], ours: NvmeOptimizer, step: int) -> None:
        """Takes this step, of parameters and states of the one before."""
        give(params, step)
        ours.param_groups[0]["lr"] = step / 1000
        ours.step()


@pytest.mark.parametrize(
    "options",
    [{}, {"reuse": True}, {"free_gradients": True}, {"overlap": "backward"},
     {"overlap": "backward", "free_gradients": True, "reuse": True}],
    ids=lambda options: "-".join(options) or "plain",
)  # fmt: skip
@POINTS
@LIMIT
def test_a_step_stopped_at_any_moment_goes_on(folder: Path, options: dict[str, Any], points: int) -> None:
    mine, other = parameters(), parameters()
    plain = torch.optim.AdamW(other)
    with adamw(mine, folder, **options) as ours:

        def step(number: int, moment: Interrupt) -> None:
            for params in (mine, other):
                weigh(params, number)
            plain.step()
            before = ours.steps
            if stopped(moment, ours.step):
                ours.step()
            assert equal(values_of(mine), values_of(other)), moment.where
            assert ours.steps == before + 1, moment.where

        step(0, Interrupt())
        step(1, counted := Interrupt())
        for number in numbers("step", counted.count, points):
            step(number, Interrupt(number))
        assert same(ours.state_dict(), plain.state_dict())


@pytest.mark.parametrize("free", [False, True])
def test_a_step_that_the_backward_pass_has_taken_is_not_taken_again(folder: Path, free: bool) -> None:
    """Wherever it is stopped."""
    mine, other = parameters(), parameters()
    plain = torch.optim.AdamW(other)
    with adamw(mine, folder, overlap="backward", free_gradients=free) as ours:

        def step(number: int, moment: Interrupt) -> None:
            for params in (mine, other):
                weigh(params, number)
            plain.step()
            end = time.monotonic() + 60
            while not equal(values_of(mine), values_of(other)):
                assert time.monotonic() < end
            if stopped(moment, ours.step):
                ours.step()
            assert equal(values_of(mine), values_of(other)), moment.where

        step(0, counted := Interrupt())
        for number in (found := list(numbers("taken", counted.count, 40))):
            step(number, Interrupt(number))
        assert ours.steps == len(found) + 1
        assert same(ours.state_dict(), plain.state_dict())


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("how", ["load_state_dict", "load_states"])
@POINTS
@LIMIT
def test_a_load_stopped_at_any_moment_is_old_or_new(folder: Path, reuse: bool, how: str, points: int) -> None:
    mine, reference, options = parameters(), Reference(4), how == "load_state_dict"
    with adamw(mine, folder, reuse=reuse) as ours:
        sources: list[Any] = []
        for step in (2, 3):
            ours.load_state_dict(reference.dicts[step])
            ours.save_states(folder / str(step))
            sources.append(reference.dicts[step] if how == "load_state_dict" else folder / str(step))
        load = getattr(ours, how)
        counted = Interrupt()
        assert not stopped(counted, lambda: load(sources[0]))
        now = 2
        for number in numbers(how, counted.count, points):
            line, new = Interrupt(number), 5 - now
            stopped(line, lambda new=new: load(sources[new - 2]))  # type: ignore[misc]
            found = ours.state_dict()
            if not same(found, reference.dicts[now], options):
                assert same(found, reference.dicts[new], options), line.where
                now = new
            if number % 5 == 0:  # and that is what a step begins with
                reference.set(mine, now)
                reference.take(mine, ours, now + 1)
                assert equal(values_of(mine), reference.values[now + 1]), line.where
                load(sources[now - 2])


@POINTS
@LIMIT
def test_a_save_stopped_at_any_moment_is_old_or_new(folder: Path, points: int) -> None:
    mine, reference = parameters(), Reference(3)
    with adamw(mine, folder) as ours, adamw(parameters(), folder) as other:
        ours.load_state_dict(reference.dicts[2])
        path, counted = folder / "states", Interrupt()
        assert not stopped(counted, lambda: ours.save_states(path, durable=False))
        now = 2
        for number in numbers("save", counted.count, points):
            line, new = Interrupt(number), 5 - now
            ours.load_state_dict(reference.dicts[new])
            stopped(line, lambda: ours.save_states(path, durable=False))
            other.load_states(path)
            if not same(other.state_dict(), reference.dicts[now]):
                assert same(other.state_dict(), reference.dicts[new]), line.where
                now = new
            assert same(ours.state_dict(), reference.dicts[new])
        assert [each.name for each in folder.iterdir() if not each.name.startswith(".nvme_ops-")] == ["states"]


def work(reference: Reference, folder: Path, seed: int, at: int, note: Callable[[str], object]) -> None:
    """Steps, loads and saves until it is killed; notes what it begins and ends, and whose step's states there are."""
    torch.set_num_threads(1)  # a forked child has no others
    params, draw = parameters(), random.Random(seed)
    handle = Acting(backend="threads")
    ours = adamw(params, folder, reuse=True, handle=handle)
    while True:
        last = len(reference.dicts) - 1
        what = draw.choice(("step", "step", "step", "load", "load", "save", "save", "again"))
        new = at if what == "save" else draw.randrange(1, last) if what == "load" or at == last else at + 1
        reference.set(params, at)
        if what != "save" and new != at + 1:  # after the last step one can only go back
            what = "load"
        note(f"{what} {new}")
        if what == "load":
            ours.load_state_dict(reference.dicts[new])
        elif what == "save":
            ours.save_states(folder / "states", durable=False)
        else:
            if what == "again":  # a first attempt with other gradients, of which some chunks are done
                for each in params:
                    each.grad = torch.ones_like(each)
                handle.after(2, interrupt)
                with contextlib.suppress(KeyboardInterrupt):
                    ours.step()
                    raise AssertionError("was to be stopped")
                note("ended 0")
                note(f"second {at}")
                for each in params:
                    each.grad = torch.full_like(each, 2.0)
                handle.after(1 + draw.randrange(2), lambda: time.sleep(60))
                ours.step()
            reference.take(params, ours, new)
        at = new
        note(f"ended {at}")


@pytest.mark.parametrize("kills", [15, pytest.param(1000, marks=pytest.mark.slow)])
@LIMIT
def test_killed_at_any_moment_it_goes_on_with_what_was_committed(folder: Path, kills: int) -> None:
    reference, draw = Reference(8), random.Random(kills)
    place = folder / "kept"
    place.mkdir()
    now = saved = 0
    seen = set()
    for number in range(kills):
        reading, writing = os.pipe()

        def note(text: str, writing: int = writing) -> None:
            os.write(writing, f"{text}\n".encode())

        child = os.fork()
        if child == 0:
            try:
                work(reference, place, number, now, note)
            except BaseException as error:
                note(f"error {error!r}")
            finally:
                os._exit(1)
        os.close(writing)
        time.sleep(0.04 + draw.random() * 0.12)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        with open(reading, encoding="utf-8") as pipe:
            told = [line.split() for line in pipe]
        assert not any(what == "error" for what, *_ in told), told
        before, expected, files = now, now, {saved}
        for what, new, *_ in told:
            if what == "save":
                files = {saved, int(new)}
            if what in ("step", "load"):
                expected = int(new)
            if what == "ended" and new != "0":
                before = expected = int(new)
                saved = max(files - {saved}, default=saved)
                files = {saved}
        seen |= {told[-1][0]} if told else set()
        with adamw(parameters(), place, reuse=True) as ours:
            found = ours.state_dict()
            if same(found, reference.dicts[before]):
                now = before
            else:
                assert same(found, reference.dicts[expected]), f"killed {number}, after {told[-3:]}"
                now = expected
        if files != {0}:
            with adamw(parameters(), place, name="other") as ours:
                if (place / "states").exists():
                    ours.load_states(place / "states")
                found = ours.state_dict()
                good = [each for each in files if same(found, reference.dicts[each])]
                assert good, f"killed {number}, after {told[-3:]}: the file has neither of {files}"
                saved = good[0]
    assert kills < 1000 or seen >= {"step", "load", "save", "second"}
