"""NvmeOptimizer: state dicts, failures, and steps that begin during backward. Its bits: ``test_parity.py``."""

from __future__ import annotations

import copy
import errno
import gc
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from nvme_ops.base.native import native
from nvme_ops.offload import NvmeOptimizer, swap_params
from nvme_ops.storage.striped import StripedSlabs
from tests.contract.conftest import lost_unraisable
from tests.contract.faulty import Faulty, interrupt_two_waits
from tests.moments import Interrupt, numbers
from tests.offload.elsewhere import alone
from tests.offload.elsewhere import same as differ
from tests.offload.test_optimizer_kept import small, train
from tests.offload.training import Twins, adamw, backward, equal, network, states, values
from tests.restrictions import refuse


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert "nvme_ops-optimizer" not in [thread.name for thread in threading.enumerate()]


SMALL_CHUNKS = pytest.mark.usefixtures("small_chunks")
BUDGETS = {"none": "1M", "some": "3M", "all": "8M"}  # that hold so many of the states of ``network``


# Held in memory


@SMALL_CHUNKS
@pytest.mark.parametrize("overlap", [None, "backward"])
@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("held", BUDGETS)
def test_what_is_held_is_not_read_and_written_only_for_the_next_program(
    folder: Path, held: str, reuse: bool, overlap: Any
) -> None:
    with Twins(folder, ours={"memory_budget": BUDGETS[held], "reuse": reuse, "overlap": overlap}) as twins:

        def require_moved() -> None:
            before = copy.copy(twins.ours.stats())
            twins.step(5)
            stats = twins.ours.stats()
            whole = sum(chunk.nbytes for chunk in twins.ours._states.division.chunks)
            read, written = stats.bytes_read - before.bytes_read, stats.bytes_written - before.bytes_written
            assert (read, written) == (whole - stats.bytes_in_host, whole if reuse else read)
            assert stats.bytes_stored == 2 * written, "also after a load, which writes what is held"
            assert {"none": read == whole, "some": whole // 3 < read < whole * 2 // 3, "all": not read}[held]
            assert twins.apart() == ""

        for number in range(3):
            twins.step(number)
        require_moved()
        for _, optimizer in twins.both():
            optimizer.load_state_dict(copy.deepcopy(twins.plain.state_dict()))
        twins.step(3)
        require_moved()
        assert not twins.ours.save_states(folder / "saved")
        twins.ours.load_states(folder / "saved")
        assert twins.apart() == ""
        for model, optimizer in twins.both():
            model.add_module("more", more := torch.nn.Linear(301, 2, bias=False))
            torch.nn.init.ones_(more.weight)
            optimizer.add_param_group({"params": [more.weight]})
        twins.step(4)
        require_moved()
        stats, limit = twins.ours.stats(), int(BUDGETS[held][0]) << 20
        assert limit * (held == "some") // 2 < stats.peak_bytes <= limit
    assert twins.ours.stats().bytes_in_host == 0


@SMALL_CHUNKS
def test_states_for_which_there_is_no_memory_now_are_written(folder: Path) -> None:
    with Twins(folder, ours={"memory_budget": "3M"}) as twins:
        twins.step(0)
        held = twins.ours.stats().bytes_in_host
        with mock.patch.object(twins.ours._states._pool, "lease", side_effect=MemoryError):
            twins.step(1)
        assert twins.ours.stats().bytes_in_host < held
        for number in (2, 3):
            twins.step(number)
        assert (twins.apart(), twins.ours.stats().bytes_in_host) == ("", held)


def test_neither_direction_waits_for_the_other(folder: Path) -> None:
    """What is more urgent gets all that is in flight at once, and the other one's device is idle."""
    moving = mock.patch.object(StripedSlabs, "move", autospec=True, side_effect=StripedSlabs.move)
    with moving as move, Twins(folder) as twins:
        twins.step(0)
        twins.step(1)
    assert {call.kwargs["write"] for call in move.mock_calls} == {False, True}
    assert len({call.kwargs["priority"] for call in move.mock_calls}) == 1


# State dicts


def test_states_of_other_options_are_refused_where_there_is_no_room(folder: Path) -> None:
    model, other = small(), small()
    train(other, more := torch.optim.AdamW(other.parameters(), amsgrad=True), 0, 2)
    with adamw(model, folder) as less:
        train(model, less, 0, 2)
        before = [values(model), states(less)]
        with pytest.raises(ValueError, match="amsgrad=True now, and NvmeOptimizer has made no room"):
            less.load_state_dict(more.state_dict())
        less.param_groups[0]["amsgrad"] = True
        with pytest.raises(RuntimeError, match="has made no room"):
            less.step()
        less.param_groups[0]["amsgrad"] = False
        state = copy.deepcopy(more.state_dict())
        state["param_groups"][0]["amsgrad"] = False
        with pytest.raises(ValueError, match="has no room for"):
            less.load_state_dict(state)
        assert differ([values(model), states(less)], before) == ""
        train(model, less, 2, 3)


def test_large_tensors_that_an_update_makes_do_not_fragment_the_heap(folder: Path) -> None:
    model, made = network(), list[torch.Tensor]()
    hook = register_optimizer_step_pre_hook(lambda *_: made.append(torch.empty(1 << 20)))
    try:
        with adamw(model, folder) as optimizer:
            backward(model, 0)
            optimizer.step()
            assert any(map(native().in_pool, made))
    finally:
        hook.remove()
    assert not native().in_pool(torch.empty(1 << 20)), "torch's own allocator is back"


def test_the_states_of_a_parameter_are_a_mapping_until_it_is_closed(folder: Path) -> None:
    model = small()
    with adamw(model, folder) as optimizer:
        train(model, optimizer, 0, 1)
        (state, *_) = optimizer.state.values()
        assert ([*state], "lr" in state) == (["step", "exp_avg", "exp_avg_sq"], False)
        with pytest.raises(KeyError, match="lr"):
            state["lr"]
        train(model, optimizer, 1, 2)
    with pytest.raises(ValueError, match="is closed"):
        state["exp_avg"]


def test_state_dicts_are_the_programs_own_and_have_to_fit(folder: Path) -> None:
    model = network()
    with adamw(model, folder) as optimizer:
        assert optimizer.state_dict()["state"] == {}
        backward(model, 0)
        optimizer.step()
        state = optimizer.state_dict()
        before = state["state"][2]["exp_avg"].clone()
        backward(model, 1)
        optimizer.step()
        assert torch.equal(state["state"][2]["exp_avg"], before)
        state["state"][2]["exp_avg"].zero_()
        kept = state["state"][2].pop("exp_avg")
        with pytest.raises(ValueError, match="no 'exp_avg' of a parameter of shape"):
            optimizer.load_state_dict(state)
        state["state"][2]["exp_avg"] = kept[:5]
        with pytest.raises(ValueError, match=r"'exp_avg' of shape \(5, 30\) is for a parameter of shape \(401, 30\)"):
            optimizer.load_state_dict(state)
        state["param_groups"][0]["params"].pop()
        with pytest.raises(ValueError, match="group"):
            optimizer.load_state_dict(state)


def test_a_momentum_that_is_none_begins_with_the_next_step(folder: Path) -> None:
    """As it is in state dicts of earlier versions of torch."""
    with Twins(folder, torch.optim.SGD, lr=0.1, momentum=0.9) as twins:
        state = twins.plain.state_dict()
        state["state"] = {key: {"momentum_buffer": None} for key in state["param_groups"][0]["params"]}
        for _, optimizer in twins.both():
            optimizer.load_state_dict(state)
        twins.step(0)
        assert equal(values(twins.mine), values(twins.other))


def test_torchs_optimizer_gets_what_is_in_memory_together(folder: Path) -> None:
    """Its foreach and fused kernels are for that."""
    model, counts = network(), list[int]()

    def count(one: torch.optim.Optimizer, *_: Any) -> None:
        if type(one) is torch.optim.AdamW:
            counts.append(len(one.param_groups[0]["params"]))

    with adamw(model, folder) as optimizer, register_optimizer_step_pre_hook(count):
        backward(model, 0)
        optimizer.step()
    assert max(counts) > 1


# What cannot be


def test_what_cannot_be_is_refused(folder: Path) -> None:
    """What else people do wrong: ``test_mistakes.py``."""
    model = network()
    with pytest.raises(ValueError, match="Invalid learning rate"):
        adamw(model, folder, lr=-1.0)
    with pytest.raises(ValueError, match="gaps"):
        NvmeOptimizer([torch.nn.Parameter(torch.zeros(4, 8)[:, ::2])], torch.optim.AdamW, folder)
    with adamw(model, folder) as ours:
        for copied in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match=r"cannot be copied .* state_dict\(\) or save_states\(\)"):
                copied(ours)
    table = torch.nn.Embedding(10, 4, sparse=True)
    before = table.weight.detach().clone()
    with NvmeOptimizer([*model.parameters(), table.weight], torch.optim.SGD, folder) as optimizer:
        table(torch.tensor([1, 2])).sum().backward()
        with pytest.raises(RuntimeError, match="does not support sparse gradients"):
            optimizer.step()
        assert torch.equal(table.weight, before)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("ours", [False, True])
def test_one_whose_parameters_were_replaced_says_so(folder: Path, ours: bool) -> None:
    """Rather than training those that are left; by whatever wraps its step. Others go on."""

    def make(model: torch.nn.Module) -> torch.optim.Optimizer:
        return NvmeOptimizer(model.parameters(), torch.optim.SGD, folder) if ours else plain(model.parameters())

    model, other = network(), network()
    plain, frozen = partial(torch.optim.SGD, lr=0.1), torch.nn.Linear(100, 100).requires_grad_(False)
    before, beside = make(model), plain([*frozen.parameters(), *other.parameters()])
    torch.optim.lr_scheduler.StepLR(before, 1)  # which wraps step
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    options: Any = {"memory_budget": "4M", "min_bytes": "4K"}
    with swap_params(model, folder, **options) as swap, swap_params(frozen, folder, **options):
        old = values(model)
        backward(model, 0)
        scaler.scale(torch.zeros(1))
        for step in (before.step, lambda: scaler.step(before)):
            with pytest.raises(RuntimeError, match="Make the optimizer after swap_params"):
                step()
        assert equal(old, values(model))
        between = make(model)
        between.step()
        backward(other, 0)
        old = values(other)
        beside.step()
        assert not equal(old, values(other))
        swap.restore()
        backward(model, 1)
        with pytest.raises(RuntimeError, match=r"anew after restore\(\)"):
            between.step()
    make(model).step()


# Failures


@SMALL_CHUNKS
@pytest.mark.parametrize("held", ["none", "some"])
@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("how", ["the same", "anew", "in place"])
def test_a_failed_step_is_gone_on_with_unless_the_gradients_are_others(
    folder: Path, how: str, reuse: bool, held: str
) -> None:
    """With the same ones it goes on, also where the optimizer changes them; with others it is a step for all."""
    options: dict[str, Any] = {"momentum": 0.9, "nesterov": how == "the same", "foreach": True, "lr": 0.1}
    handle = Faulty()
    ours = {"handle": handle, "reuse": reuse, "memory_budget": {"none": "1M", "some": "2M"}[held]}
    with Twins(folder, torch.optim.SGD, ours=ours, **options) as twins:
        twins.step(0)
        twins.backward(1)
        handle.will("write", "refuse", {3})
        with pytest.raises(OSError, match="Input/output error") as caught:
            twins.ours.step()
        assert "step 2 of NvmeOptimizer: " in caught.value.__notes__[0]
        if how == "anew":
            backward(twins.mine, 7)
        with_gradient = [param for param in twins.mine.parameters() if param.grad is not None and param.numel()]
        before = [param.detach().clone() for param in with_gradient]
        if how != "the same":
            for param in with_gradient:
                param.grad.mul_(2)
        twins.ours.step()
        twins.plain.step()
        assert how == "the same" or not any(map(torch.equal, before, with_gradient))
        twins.step(2)
        assert (twins.apart() == "") is (how == "the same")


def test_what_a_failed_step_has_put_back_is_the_programs_to_change(folder: Path) -> None:
    model, handle = network(), Faulty("write", "refuse", {3})
    given: Any = {"memory_budget": "1M", "handle": handle, "lr": 0.0, "momentum": 0.9}
    with NvmeOptimizer(model.parameters(), torch.optim.SGD, folder, **given) as optimizer:
        backward(model, 0)
        with pytest.raises(OSError, match="Input/output error"):
            optimizer.step()
        for param in model.parameters():
            param.data.fill_(5.0)
        optimizer.step()
        assert all(bool((param == 5).all()) for param in model.parameters())


class Stopping(dict[Any, Any]):
    """Is stopped by Ctrl-C, twice, as it forgets something."""

    left = 2

    def pop(self, *given: Any) -> Any:
        self.left -= 1
        if self.left >= 0:
            raise KeyboardInterrupt
        return super().pop(*given)


@SMALL_CHUNKS
@pytest.mark.parametrize("held", BUDGETS)
def test_what_is_done_is_not_put_back_where_ctrl_c_comes_twice(
    folder: Path, held: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new states are those of now already, and the old values not forgotten yet."""
    interrupt_two_waits(monkeypatch)
    with Twins(folder, ours={"memory_budget": BUDGETS[held]}) as twins:
        twins.step(0)
        twins.backward(1)
        twins.ours._states.changed = Stopping()
        with pytest.raises(KeyboardInterrupt):
            twins.ours.step()
        for _, optimizer in twins.both():
            optimizer.step()
        assert twins.apart() == ""


# During the backward pass


def test_most_of_it_happens_before_the_step_and_no_state_dict(folder: Path) -> None:
    model = network()
    with adamw(model, folder, overlap="backward") as optimizer:
        before = values(model)
        backward(model, 0)
        end = time.monotonic() + 60
        while equal(before, values(model)):
            assert time.monotonic() < end
            time.sleep(0.01)
        assert optimizer.steps == 0
        for call in (optimizer.state_dict, lambda: optimizer.load_state_dict({})):
            with pytest.raises(RuntimeError, match=r"call step\(\) or zero_grad\(\) before this"):
                call()
        optimizer.step()
        assert optimizer.steps == 1
        optimizer.load_state_dict(optimizer.state_dict())


def test_a_second_backward_pass_or_one_that_fails_is_no_step(folder: Path) -> None:
    model = network()

    def fail(_: Any) -> None:
        raise KeyError("hook")

    with adamw(model, folder, overlap="backward") as optimizer:
        backward(model, 0)
        # torch refuses it where a weight that this pass has saved has been updated meanwhile
        said = r"ready twice before step\(\): .* `with optimizer.accumulate\(\):`|modified by an inplace operation"
        with pytest.raises(RuntimeError, match=said):
            backward(model, 1)
        optimizer.zero_grad()
        hook = next(model[0].parameters()).register_hook(fail)
        with pytest.raises(KeyError):
            backward(model, 1)
        hook.remove()
        optimizer.zero_grad()
        backward(model, 2)
        optimizer.step()
        assert optimizer.steps == 1
        backward(model, 3)
    backward(model, 4)  # as any, now that it is closed
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("free", [False, True])
def test_a_failure_is_raised_by_the_step_which_can_go_on(folder: Path, free: bool) -> None:
    given = {"handle": Faulty("write", "refuse", {4}), "overlap": "backward", "free_gradients": free}
    with Twins(folder, ours=given) as twins:
        twins.backward(0)
        with pytest.raises(OSError, match="Input/output error") as caught:
            twins.ours.step()
        assert "step 1 of NvmeOptimizer" in caught.value.__notes__[0]
        assert free is any(param.grad is None for layer in twins.mine for param in layer.parameters())
        for _, optimizer in twins.both():
            optimizer.step()
        assert twins.apart() == ""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="a system call is refused by its number on x86_64")
@pytest.mark.parametrize("then", ["step", "zero_grad", "close"])
@alone
def test_memory_that_the_system_refuses_the_thread(folder: Path, then: str) -> None:
    """That of the buffers. The filter of system calls is of one thread, and the next step has another."""
    mmap = 9

    def without_memory(*given: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            refuse(mmap, errno.ENOMEM)
        return update(*given)

    with Twins(folder, ours={"overlap": "backward", "free_gradients": True}) as twins:
        update = twins.ours._states.update
        with mock.patch.object(twins.ours._states, "update", without_memory):
            twins.backward(0)
            if then == "step":
                with pytest.raises(MemoryError, match="Cannot allocate memory") as caught:
                    twins.ours.step()
                assert "step 1 of NvmeOptimizer: 0 of" in caught.value.__notes__[0]
        if then == "close":
            return
        if then == "zero_grad":
            twins.ours.zero_grad()
        else:
            for _, optimizer in twins.both():
                optimizer.step()
        twins.step(1)
        assert twins.apart() == ""


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize(("number", "free", "times"), [(4, True, 1), (1, False, 2)])
def test_ctrl_c_while_the_disk_is_slow(folder: Path, number: int, free: bool, times: int) -> None:
    """Nothing is updated behind the program's back or twice, and what was given up is not done."""
    handle, main = Faulty(), threading.main_thread().ident
    given: Any = {"handle": handle, "free_gradients": free, "memory_budget": "2M", "overlap": "backward"}
    with Twins(folder, ours=given) as twins:
        twins.step(0)
        handle.will("write", "hold", {number})
        twins.backward(1)
        assert handle.under_way.wait(60)
        for wait in range(times):  # the second one comes while the thread is waited for
            threading.Timer(0.2 * (1 + wait), signal.pthread_kill, [main, signal.SIGINT]).start()
        threading.Timer(0.7, handle.go.set).start()
        with pytest.raises(KeyboardInterrupt):
            twins.ours.step()
        if times == 1:
            handle.go.wait(60)
            time.sleep(0.3)
        handle.will()
        for _, optimizer in twins.both():
            optimizer.step()
        twins.step(2)
        assert twins.apart() == ""


# Stopped at any moment of a load or of a step: old or new states, whole. A program that is killed:
# test_optimizer_kept.py.

LOST = pytest.mark.usefixtures(lost_unraisable.__name__)


def stopped(moment: Interrupt, call: Callable[[], object]) -> bool:
    """Whether the call was ended by Ctrl-C."""
    try:
        with moment:
            call()
    except KeyboardInterrupt:
        return True
    return False


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


@LOST
def test_a_step_that_the_backward_pass_has_taken_is_not_taken_again(folder: Path) -> None:
    """Wherever it is stopped."""
    mine, other = small(), small()
    plain = torch.optim.AdamW(other.parameters())
    with adamw(mine, folder, overlap="backward", free_gradients=True) as ours:

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
        for number in (chosen := list(numbers("taken", counted.count, 20))):
            step(number, Interrupt(number))
        assert ours.steps == len(chosen) + 1
        assert differ(states(ours)[:-1], states(plain)[:-1]) == ""
    gc.collect()
    assert not native().in_pool(torch.empty(1 << 20, dtype=torch.uint8)), "torch's own allocator is back"


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("points", [15, pytest.param(200, marks=pytest.mark.slow)])
@SMALL_CHUNKS
@LOST
def test_a_step_stopped_at_any_moment_updates_every_chunk_once(folder: Path, reuse: bool, points: int) -> None:
    mine, other = small(), small()
    plain = torch.optim.AdamW(other.parameters())
    with adamw(mine, folder, reuse=reuse, memory_budget="2M") as ours:

        def step(number: int, moment: Interrupt) -> None:
            train(other, plain, number, number + 1)
            for param, one in zip(mine.parameters(), other.parameters(), strict=True):
                param.grad = one.grad
            if stopped(moment, ours.step) and ours.steps == taken:
                ours.step()
            assert equal(values(mine), values(other)), moment.where

        for taken in range(3):
            step(taken, counted := Interrupt())
        for taken, number in enumerate(numbers("held", counted.count, points), 3):
            step(taken, Interrupt(number))
        assert differ(states(ours)[:-1], states(plain)[:-1]) == ""
        assert 0 < ours.stats().bytes_in_host < 722400


@pytest.mark.parametrize("how", ["load_state_dict", "load_states"])
@pytest.mark.parametrize("points", [15, pytest.param(100, marks=pytest.mark.slow)])
@SMALL_CHUNKS
@LOST
def test_a_load_stopped_at_any_moment_is_old_or_new(folder: Path, how: str, points: int) -> None:
    mine, reference = small(), Reference()
    compared = slice(None) if how == "load_state_dict" else slice(-1)  # with the options of groups, or without
    with adamw(mine, folder, reuse=how == "load_states", memory_budget="2M") as ours:
        sources: dict[int, Any] = {step: reference.dicts[step] for step in (3, 2)}
        for step, source in sources.items():
            ours.load_state_dict(source)
            ours.save_states(folder / str(step))
            sources[step] = source if how == "load_state_dict" else folder / str(step)

        def load(step: int) -> None:
            getattr(ours, how)(sources[step])

        def is_at(step: int) -> bool:
            return differ(states(ours)[compared], reference.states[step][compared]) == ""

        now, counted = 2, Interrupt()
        assert not stopped(counted, lambda: load(2))
        for number in numbers(how, counted.count, points):
            stopped(line := Interrupt(number), partial(load, 5 - now))
            now = now if is_at(now) else 5 - now
            assert is_at(now), line.where
            if number % 5 == 0:  # and that is what a step begins with
                mine.load_state_dict(reference.models[now])
                take(mine, ours, now)
                assert equal(values(mine), list(reference.models[now + 1].values())), line.where
                load(now)
    assert {entry.name for entry in folder.iterdir() if not entry.name.startswith(".nvme_ops-")} <= {"2", "3"}
