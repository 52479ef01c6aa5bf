"""Beside others: threads, forked children, other processes at the same folder."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from tests.conftest import forked, in_child, in_threads, killed_in
from tests.contract.adapters import Capability
from tests.contract.suite import files
from tests.moments import Interrupt, numbers

Make = Callable[..., Capability]


#: What only the process that has made it can use, and what a child is told.
PARENTS = {
    **dict.fromkeys(("Log", "Store", "StreamedOn", "Experts", "Activations"), "fork|parent"),
    **dict.fromkeys(("Swapped", "Gradients", "OneMemory"), "swapped by the parent process"),
    **dict.fromkeys(("Optimizer", "KeptOptimizer", "Training"), "fork|parent"),
}


def test_a_forked_child_uses_its_parents_or_is_told(one: Capability, make: Make, kind: type[Capability]) -> None:
    before = files(one.folder)

    def child() -> None:
        told = PARENTS.get(kind.__name__)
        with pytest.raises(RuntimeError, match=told) if told else nullcontext():
            one.work()
        own = make("of the child")
        own.work()
        own.check()
        own.close()
        with contextlib.suppress(RuntimeError):
            one.close()

    in_child(child)
    assert files(one.folder) >= before
    one.check()
    one.work()
    one.check()


@pytest.mark.parametrize("points", [4, pytest.param(30, marks=pytest.mark.slow)])
def test_a_child_forked_beside_a_busy_thread_can_use_it(one: Capability, kind: type[Capability], points: int) -> None:
    if kind.__name__ not in PARENTS:
        pytest.skip("a child waits for what its parent writes to the same file")
    with Interrupt() as all_of_it:
        one.work()
    reached, forked = threading.Event(), threading.Event()

    def wait_for_fork() -> None:
        reached.set()
        forked.wait(100)

    def work(number: int) -> None:
        with Interrupt(number, wait_for_fork):
            one.work()
        wait_for_fork()  # a thread that ends may hold MKL's lock, which the child would wait for for ever

    def child() -> None:
        with contextlib.suppress(RuntimeError, PermissionError):
            one.work()
        with contextlib.suppress(RuntimeError):
            one.close()

    for number in [*numbers(kind.__name__ + "fork", all_of_it.count, points)][1:]:
        worker = threading.Thread(target=work, args=(number,))
        worker.start()
        reached.wait()
        try:
            in_child(child)
        finally:
            forked.set()
            worker.join()  # which returns before the thread has ended
            while Path(f"/proc/self/task/{worker.native_id}").exists():
                time.sleep(0.001)
            reached.clear()
            forked.clear()
    one.check()


@pytest.mark.usefixtures("eager_switches")
def test_threads_with_one_each_do_not_meet(make: Make) -> None:
    """And each outlives the thread that made it."""
    made: list[Capability] = []

    def work(number: int) -> None:
        made.append(one := make(str(number)))
        one.work()
        one.check()

    in_threads(work, 3)
    made[0].work()
    made[0].check()


#: What two programs at one file have to order themselves, or cannot tell apart by what is read.
ALONE = {
    **dict.fromkeys(("File", "Handle", "Futures", "Adaptive"), "a file is its writers' to order"),
    "Log": "the records of both are there",
    "KeptOptimizer": "its states go on with the parameters of the program before",
    "Pretrained": "the model is written anew by each",
    **dict.fromkeys(("Load", "LoadTorch", "LoadInto", "SafeOpen", "DcpLoad"), "begins with a save"),
    "Batches": "begins with a store",
}


def test_processes_at_one_folder_do_not_mix(make: Make, kind: type[Capability], folder: Path) -> None:
    if kind.__name__ in ALONE:
        pytest.skip(ALONE[kind.__name__])
    make("work").close()

    def body(_: int) -> None:
        torch.set_num_threads(1)
        for _ in range(2):
            with contextlib.suppress(BlockingIOError):  # somebody else has the session
                one = kind(folder / "work")
                one.work()
                one.close()

    with forked(2, body):
        pass
    one = make("work")
    one.work()
    one.check()


def test_one_process_is_killed_beside_another(make: Make, kind: type[Capability], folder: Path) -> None:
    """What the dead one has left is removed by others at no cost of the living."""
    one = make("living")
    one.work()

    def other() -> Capability:
        (folder / "living" / "dead").mkdir()
        made = kind(folder / "living" / "dead")
        made.work()
        return made

    killed_in(other)
    make("another").work()
    one.work()
    one.check()
