"""Whatever comes in between: Ctrl-C, a kill, signals. What was complete is there, and the same works again."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from torch.distributed.checkpoint import CheckpointException

from tests.contract.adapters import Capability, once
from tests.contract.suite import cause_of, files, require_no_more, settled
from tests.moments import Interrupt, numbers

Make = Callable[..., Capability]
#: What has reasons of its own not to work again, or not to be complete.
APART = {"Log": "a flush that was interrupted may have appended its record, which is then there twice"}
#: What judges only what it has begun itself; their own tests kill them, and end them so.
ANEW = {
    "Log": "the records of the last time are there, too",
    "KeptOptimizer": "its states go on with the parameters of the program before",
}
#: What a handler may run in the midst of where autograd is off, and cannot be switched on.
BELOW = dict.fromkeys(("Gradients", "Swapped", "SwappedAnew", "Training"), "below autograd nothing is differentiated")


def interrupted(work: Callable[[], object], number: int) -> str:
    """Works, is interrupted, and returns where; nothing if it was not."""
    moment = Interrupt(number)
    try:
        with moment:
            work()
    except (KeyboardInterrupt, CheckpointException) as error:
        if not isinstance(cause_of(error), KeyboardInterrupt):
            raise
    return moment.where


@pytest.mark.usefixtures("lost_unraisable")
@pytest.mark.parametrize("points", [3, pytest.param(9, marks=pytest.mark.slow)])
def test_ctrl_c_at_any_moment_leaves_what_was_complete(make: Make, kind: type[Capability], points: int) -> None:
    if kind.__name__ in APART:
        pytest.skip(APART[kind.__name__])
    one = make()
    one.work()
    one.check()
    with Interrupt() as all_of_it:
        one.work()
    before = settled()
    for number in numbers(kind.__name__, all_of_it.count, points):
        where = interrupted(one.work, number)
        try:
            assert torch.is_grad_enabled()
            assert gc.isenabled()
            one.check()
            one.work()
            one.check()
        except BaseException as error:
            raise AssertionError(f"after Ctrl-C at moment {number}, {where}") from error
    lost = 1 + points // 9  # where Ctrl-C comes just as a function of Python returns one
    require_no_more(before, lost, threads=1)  # one that ends writes is begun when it is first needed


@pytest.mark.usefixtures("lost_unraisable")
@pytest.mark.parametrize("step", ["start", "close"])
def test_ctrl_c_while_it_begins_or_ends(kind: type[Capability], folder: Path, step: str) -> None:
    """What was interrupted is done again; nothing stands in its way, and nothing of it stays."""
    if kind.__name__ in ANEW:
        pytest.skip(ANEW[kind.__name__])

    once(kind, folder)
    with Interrupt() as all_of_it:
        one = kind(folder)
        if step == "close":
            all_of_it.count = 0
        one.close()
    before = settled()
    for number in numbers(kind.__name__ + step, all_of_it.count, 3) if all_of_it.count else ():
        if step == "start":
            where = interrupted(lambda: kind(folder).close(), number)
        else:
            one = kind(folder)
            where = interrupted(one.close, number)
            one.close()
        try:
            once(kind, folder)
        except BaseException as error:
            raise AssertionError(f"after Ctrl-C at moment {number}, {where}") from error
    require_no_more(before, descriptors=2)


def dies() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("SIGKILL came and went")


def test_killed_at_any_moment_leaves_what_was_complete(make: Make, kind: type[Capability], folder: Path) -> None:
    if kind.__name__ in ANEW:
        pytest.skip(ANEW[kind.__name__])
    usual = make("usual")
    with Interrupt() as all_of_it:
        usual.work()
    usual.close()
    for number in [*numbers(kind.__name__ + "killed", all_of_it.count, 3)][1:]:
        place = folder / "killed"
        place.mkdir(exist_ok=True)
        child = os.fork()
        if child == 0:
            try:
                torch.set_num_threads(1)
                one = kind(place)
                one.work()
                with Interrupt(number, dies):
                    one.work()
            finally:
                os._exit(3)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status in (-signal.SIGKILL, 3)
        if kind.kept and status == -signal.SIGKILL:
            kind.found(place, 1).check()
        one = make("killed")
        one.work()
        one.check()
        one.close()
        assert files(place) <= files(folder / "usual") + kind.more_files, sorted(place.rglob("*"))


@pytest.mark.parametrize("points", [3, pytest.param(12, marks=pytest.mark.slow)])
def test_a_signal_handler_may_do_the_same(one: Capability, make: Make, kind: type[Capability], points: int) -> None:
    if kind.__name__ in BELOW:
        pytest.skip(BELOW[kind.__name__])
    other, told = make("other"), [0]

    @torch.enable_grad()
    def act() -> None:
        other.work()
        told[0] += 1

    with Interrupt() as all_of_it:
        one.work()
    for number in [*numbers(kind.__name__ + "handler", all_of_it.count // 2, points)][1:]:
        with Interrupt(number, act):
            one.work()
    assert told[0], "no moment came again"
    for capability in (one, other):
        capability.check()
        capability.work()
