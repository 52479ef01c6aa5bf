"""Steps that begin during the backward pass: the same bits, and nothing is lost when something goes wrong."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nvme_ops import aio_handle
from nvme_ops.offload import NvmeOptimizer
from tests.offload.test_optimizer import Failing
from tests.offload.training import backward, equal, network, values


def names() -> list[str]:
    return [thread.name for thread in threading.enumerate()]


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert "nvme_ops-optimizer" not in names()


def make(model: torch.nn.Module, folder: Path, **options: Any) -> NvmeOptimizer:
    given = {"memory_budget": "1M", "overlap": "backward", **options}
    return NvmeOptimizer(model.parameters(), torch.optim.AdamW, folder, **given)


def failing(writes: int) -> Failing:
    """Fails the write after so many."""
    handle = Failing()
    handle.after["write"] = writes
    return handle


def test_freed_gradients_and_a_step_that_fails(folder: Path) -> None:
    mine, other = network(), network()
    plain = torch.optim.AdamW(other.parameters())
    with make(mine, folder, overlap=None, free_gradients=True, handle=failing(3)) as optimizer:
        for step in range(2):
            backward(mine, step)
            backward(other, step)
            plain.step()
            if step == 0:
                with pytest.raises(OSError, match="Input/output error"):
                    optimizer.step()
                assert any(parameter.grad is None for parameter in mine[0].parameters())
            optimizer.step()
        assert equal(values(mine), values(other))


def test_most_of_it_happens_before_the_step(folder: Path) -> None:
    model = network()
    with make(model, folder) as optimizer:
        before = values(model)
        backward(model, 0)
        end = time.monotonic() + 60
        while equal(before, values(model)):
            assert time.monotonic() < end
            time.sleep(0.01)
        assert optimizer.steps == 0
        optimizer.step()
        assert optimizer.steps == 1


def test_a_second_backward_pass_is_refused(folder: Path) -> None:
    model = network()
    with make(model, folder) as optimizer:
        backward(model, 0)
        with pytest.raises(RuntimeError, match=r"ready twice before step\(\): .* `with optimizer.accumulate\(\):`"):
            backward(model, 1)
        optimizer.zero_grad()
        backward(model, 1)
        optimizer.step()


def test_an_exception_in_the_backward_pass(folder: Path) -> None:
    """What was not updated stays, and the next step is one for all."""
    model = network()
    with make(model, folder) as optimizer:
        backward(model, 0)
        optimizer.step()

        def fail(_: Any) -> None:
            raise KeyError("hook")

        hook = next(model[0].parameters()).register_hook(fail)
        optimizer.zero_grad()
        with pytest.raises(KeyError):
            backward(model, 1)
        hook.remove()
        optimizer.zero_grad()
        backward(model, 2)
        optimizer.step()
        assert optimizer.steps == 2


def test_a_failure_is_raised_by_the_step_which_can_go_on(folder: Path) -> None:
    mine, other = network(), network()
    plain = torch.optim.AdamW(other.parameters())
    with make(mine, folder, handle=failing(3)) as optimizer:
        for model in (mine, other):
            backward(model, 0)
        plain.step()
        with pytest.raises(OSError, match="Input/output error") as caught:
            optimizer.step()
        assert "step 1 of NvmeOptimizer" in caught.value.__notes__[0]
        optimizer.step()
        assert equal(values(mine), values(other))


def test_state_dicts_wait_for_the_end_of_the_step(folder: Path) -> None:
    model = network()
    with make(model, folder) as optimizer:
        backward(model, 0)
        for call in (optimizer.state_dict, lambda: optimizer.load_state_dict({})):
            with pytest.raises(RuntimeError, match=r"call step\(\) or zero_grad\(\) before this"):
                call()
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())


class Held(aio_handle):
    """Holds one write up until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.left = 0
        self.begun, self.go = threading.Event(), threading.Event()

    def submit_pwrite(self, *arguments: Any, **options: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            self.begun.set()
            self.go.wait(60)
        return super().submit_pwrite(*arguments, **options)


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize(
    ("number", "free", "times", "later"),
    [(1, False, 1, True), (4, True, 1, True), (1, True, 1, False), (4, False, 2, False)],
)
def test_ctrl_c_while_the_disk_is_slow(folder: Path, number: int, free: bool, times: int, later: bool) -> None:
    """Nothing is updated behind the program's back or twice, and what was given up is not done."""
    mine, other = network(), network()
    plain = torch.optim.AdamW(other.parameters())
    with make(mine, folder, handle=(handle := Held()), free_gradients=free, memory_budget="2M") as optimizer:
        for step in range(3):
            handle.left = number if step == 1 else 0
            for model in (mine, other):
                backward(model, step)
            plain.step()
            if step == 1:
                assert handle.begun.wait(60)
                for wait in range(times):  # the second one comes while the thread is waited for
                    main = threading.main_thread().ident
                    threading.Timer(0.3 * (1 + wait), signal.pthread_kill, [main, signal.SIGINT]).start()
                threading.Timer(1.2, handle.go.set).start()
                with pytest.raises(KeyboardInterrupt):
                    optimizer.step()
                if later:
                    handle.go.wait(60)
                    time.sleep(0.5)
            optimizer.step()
        assert equal(values(mine), values(other))
        found, expected = optimizer.state_dict()["state"], plain.state_dict()["state"]
        assert all(torch.equal(found[each]["step"], expected[each]["step"]) for each in found)


def test_closed_in_between(folder: Path) -> None:
    model = network()
    optimizer = make(model, folder)
    backward(model, 0)
    optimizer.close()
    backward(model, 1)  # as any
    assert list(folder.iterdir()) == []
