"""NvmeOptimizer stopped at any line, or killed at any moment: it has the states of before or the new ones, whole."""

from __future__ import annotations

import contextlib
import copy
import linecache
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nvme_ops import aio_handle
from nvme_ops.memory import ring
from nvme_ops.offload import NvmeOptimizer
from nvme_ops.offload.optimizer import backward, chunks, saved_states, state_dicts, states, updates
from nvme_ops.offload.optimizer import nvme_optimizer as optimizer
from tests.offload.training import equal, values

TRACED = {module.__file__ for module in (backward, chunks, optimizer, saved_states, state_dicts, states, updates, ring)}
POINTS = pytest.mark.parametrize("points", [25, pytest.param(1000, marks=pytest.mark.slow)])
LIMIT = pytest.mark.timeout(3000)


class Line:
    """Raises at the line of our files that is run as the n-th one, on this thread and those that begin in the block."""

    def __init__(self, number: int = -1, main: bool = True) -> None:
        self.number, self.main = number, main  # whether lines of this thread count
        self.count, self.where = 0, ""

    def _trace(self, frame: Any, event: str, _: Any) -> Any:
        code = frame.f_code
        if code.co_filename not in TRACED or code.co_name in ("_work", "work"):  # to these Ctrl-C never comes
            return None
        # An exception at the end of a with block, before the lock is released, is one that Python itself never raises.
        lock = linecache.getline(code.co_filename, frame.f_lineno).lstrip().startswith("with self._")
        if event == "line" and not lock and (self.main or threading.current_thread() is not threading.main_thread()):
            self.count += 1
            if self.count == self.number:
                self.where = f"{os.path.basename(code.co_filename)}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self._trace

    def __enter__(self) -> Line:
        self._before = sys.gettrace()
        threading.settrace(self._trace)
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)
        threading.settrace(None)


def stopped(line: Line, call: Callable[[], object]) -> bool:
    """Whether the call was ended by what the line has raised."""
    try:
        with line:
            call()
    except KeyboardInterrupt:
        return True
    return False


def numbers(count: int, points: int) -> Iterator[int]:
    """Yields so many of ``count`` lines, from the first to the last, or at random once there are more."""
    draw = random.Random(points)
    for number in range(points):
        yield 1 + (number * count // points if points < count else draw.randrange(count))


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


def states_of(found: dict[str, Any]) -> list[torch.Tensor]:
    return [torch.as_tensor(each[name]) for _, each in sorted(found["state"].items()) for name in sorted(each)]


def same(one: dict[str, Any], other: dict[str, Any], options: bool = False) -> bool:
    """Whether these state dicts have the same states, and options."""
    return (
        len(states_of(one)) == len(states_of(other))
        and equal(states_of(one), states_of(other))
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
def test_a_step_stopped_at_any_line_goes_on(folder: Path, options: dict[str, Any], points: int) -> None:
    mine, other = parameters(), parameters()
    plain = torch.optim.AdamW(other)
    with adamw(mine, folder, **options) as ours:

        def step(number: int, line: Line) -> bool:
            line.main = False

            def attempt() -> None:
                weigh(mine, number)
                line.main = True
                ours.step()

            weigh(other, number)
            plain.step()
            return stopped(line, attempt)

        lines = Line()
        assert not step(0, Line())
        assert not step(1, lines)
        for number in numbers(lines.count, points):
            line = Line(number)
            before = ours.steps
            if step(number, line):
                ours.step()
            assert equal(values_of(mine), values_of(other)), f"line {number}, {line.where}"
            assert ours.steps == before + 1, f"line {number}, {line.where}"
        assert same(ours.state_dict(), plain.state_dict())


@pytest.mark.parametrize("free", [False, True])
def test_a_step_that_the_backward_pass_has_taken_is_not_taken_again(folder: Path, free: bool) -> None:
    """Wherever it is stopped: at each line from the first to the last."""
    mine, other = parameters(), parameters()
    plain = torch.optim.AdamW(other)
    with adamw(mine, folder, overlap="backward", free_gradients=free) as ours:
        line, number = Line(0), 0
        while number <= line.count:
            number += 1
            line = Line(number)
            weigh(mine, number)
            weigh(other, number)
            plain.step()
            assert ours._pass is not None
            assert ours._pass._ended.wait(60)
            if stopped(line, ours.step):
                ours.step()
            assert equal(values_of(mine), values_of(other)), f"line {number}, {line.where}"
        assert ours.steps == number > 50
        assert same(ours.state_dict(), plain.state_dict())


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("how", ["load_state_dict", "load_states"])
@POINTS
@LIMIT
def test_a_load_stopped_at_any_line_is_old_or_new(folder: Path, reuse: bool, how: str, points: int) -> None:
    mine, reference, options = parameters(), Reference(4), how == "load_state_dict"
    with adamw(mine, folder, reuse=reuse) as ours:
        sources: list[Any] = []
        for step in (2, 3):
            ours.load_state_dict(reference.dicts[step])
            ours.save_states(folder / str(step))
            sources.append(reference.dicts[step] if how == "load_state_dict" else folder / str(step))
        load = getattr(ours, how)
        lines = Line()
        assert not stopped(lines, lambda: load(sources[0]))
        now = 2
        for number in numbers(lines.count, points):
            line, new = Line(number), 5 - now
            stopped(line, lambda new=new: load(sources[new - 2]))  # type: ignore[misc]
            found = ours.state_dict()
            if not same(found, reference.dicts[now], options):
                assert same(found, reference.dicts[new], options), f"line {number}, {line.where}"
                now = new
            if number % 5 == 0:  # and that is what a step begins with
                reference.set(mine, now)
                reference.take(mine, ours, now + 1)
                assert equal(values_of(mine), reference.values[now + 1]), f"line {number}, {line.where}"
                load(sources[now - 2])


@POINTS
@LIMIT
def test_a_save_stopped_at_any_line_is_old_or_new(folder: Path, points: int) -> None:
    mine, reference = parameters(), Reference(3)
    with adamw(mine, folder) as ours, adamw(parameters(), folder) as other:
        ours.load_state_dict(reference.dicts[2])
        path, lines = folder / "states", Line()
        assert not stopped(lines, lambda: ours.save_states(path, durable=False))
        now = 2
        for number in numbers(lines.count, points):
            line, new = Line(number), 5 - now
            ours.load_state_dict(reference.dicts[new])
            stopped(line, lambda: ours.save_states(path, durable=False))
            other.load_states(path)
            if not same(other.state_dict(), reference.dicts[now]):
                assert same(other.state_dict(), reference.dicts[new]), f"line {number}, {line.where}"
                now = new
            assert same(ours.state_dict(), reference.dicts[new])
        assert [each.name for each in folder.iterdir() if not each.name.startswith(".nvme_ops-")] == ["states"]


class Tape:
    """What a child that may be killed has begun and ended, each with the step whose states are then there."""

    def __init__(self) -> None:
        self.reading, self.writing = os.pipe()

    def note(self, text: str) -> None:
        os.write(self.writing, f"{text}\n".encode())

    def read(self) -> list[list[str]]:
        os.close(self.writing)
        with open(self.reading, encoding="utf-8") as pipe:
            return [line.split() for line in pipe]


def work(reference: Reference, folder: Path, seed: int, at: int, tape: Tape) -> None:
    """Steps, loads and saves until it is killed."""
    torch.set_num_threads(1)  # a forked child has no others
    params, draw = parameters(), random.Random(seed)
    ours = adamw(params, folder, reuse=True, handle=aio_handle(backend="threads"))
    while True:
        last = len(reference.dicts) - 1
        what = draw.choice(("step", "step", "step", "load", "load", "save", "save", "again"))
        new = at if what == "save" else draw.randrange(1, last) if what == "load" or at == last else at + 1
        reference.set(params, at)
        if what != "save" and new != at + 1:  # after the last step one can only go back
            what = "load"
        tape.note(f"{what} {new}")
        if what == "load":
            ours.load_state_dict(reference.dicts[new])
        elif what == "save":
            ours.save_states(folder / "states", durable=False)
        else:
            if what == "again":  # a first attempt with other gradients, of which some chunks are done
                with contextlib.suppress(KeyboardInterrupt):
                    for each in params:
                        each.grad = torch.ones_like(each)
                    stop_after(ours, draw.randrange(3))
                    ours.step()
                    raise AssertionError("was to be stopped")
                ours._states.when_done = lambda _: None
                tape.note("ended 0")
                tape.note(f"second {at}")
                for each in params:
                    each.grad = torch.full_like(each, 2.0)
                ours._states.commit = lambda *_: time.sleep(60)  # type: ignore[method-assign]
                ours.step()
            reference.take(params, ours, new)
        at = new
        tape.note(f"ended {at}")


def stop_after(ours: NvmeOptimizer, count: int) -> None:
    """Ends the next step when so many more chunks are done."""

    def done(_: object) -> None:
        nonlocal count
        count -= 1
        if count < 0:
            raise KeyboardInterrupt

    ours._states.when_done = done


@pytest.mark.parametrize("kills", [15, pytest.param(1000, marks=pytest.mark.slow)])
@LIMIT
def test_killed_at_any_moment_it_goes_on_with_what_was_committed(folder: Path, kills: int) -> None:
    reference, draw = Reference(8), random.Random(kills)
    place = folder / "kept"
    place.mkdir()
    now = saved = 0
    seen = set()
    for number in range(kills):
        tape = Tape()
        child = os.fork()
        if child == 0:
            try:
                work(reference, place, number, now, tape)
            except BaseException as error:
                tape.note(f"error {error!r}")
            finally:
                os._exit(1)
        time.sleep(0.04 + draw.random() * 0.12)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        told = tape.read()
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
