"""swap_gradients: gradients leave memory as they are produced, and come back for the step."""

from __future__ import annotations

import copy
import errno
import gc
import math
import os
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nvme_ops.offload import NvmeOptimizer, swap_gradients, swap_params
from nvme_ops.offload.weights.gradients import has_swapped_gradient
from nvme_ops.offload.weights.swapped import SwappedTensor
from tests.conftest import MIB, run_python
from tests.offload.random_gradients import program
from tests.offload.test_optimizer import Failing
from tests.offload.test_swap_params import KIB, network, words
from tests.offload.training import equal, values


def gather(model: torch.nn.Module, gradients: Any) -> list[torch.Tensor | None]:
    found: list[torch.Tensor | None] = []
    for each in model.parameters():
        with gradients.gathered([each]):
            found.append(None if each.grad is None else each.grad.clone())
    return found


def same(first: list[torch.Tensor | None], second: list[torch.Tensor | None]) -> bool:
    return all(
        (one is None and two is None) or (one is not None and two is not None and torch.equal(one, two))
        for one, two in zip(first, second, strict=True)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("parameters_too", [False, True])
def test_accumulated_and_clipped_gradients_have_the_same_bits(
    folder: Path, dtype: torch.dtype, parameters_too: bool
) -> None:
    mine, other = network(dtype), network(dtype)
    reference = NvmeOptimizer(other.parameters(), torch.optim.AdamW, folder, lr=0.01)
    swapped = swap_params(mine, folder, memory_budget=80 * KIB, min_bytes=4 * KIB) if parameters_too else None
    gradients = swap_gradients(mine.parameters(), folder, memory_budget=100 * KIB, min_bytes=4 * KIB)
    optimizer = NvmeOptimizer(mine.parameters(), torch.optim.AdamW, folder, memory_budget="1M", lr=0.01)
    with reference, optimizer, gradients:
        for step in range(3):
            for number in range(2):
                for model in (mine, other):
                    model(words(2 * step + number)).float().square().mean().backward()
            large = [each for each in mine.parameters() if each.nbytes >= 4 * KIB]
            assert all(has_swapped_gradient(each) for each in large)
            norms = [gradients.clip_grad_norm_(0.1), torch.nn.utils.clip_grad_norm_(other.parameters(), 0.1)]
            assert torch.equal(*norms)
            assert same(gather(mine, gradients), [each.grad for each in other.parameters()])
            for each in (optimizer, reference):
                each.step()
                each.zero_grad()
            assert equal(values(mine), values(other))
        stats = gradients.stats()
        assert stats.bytes_written >= 6 * sum(each.nbytes for each in mine.parameters() if each.nbytes >= 4 * KIB)
        assert 0 < stats.peak_bytes <= 75 * KIB
    if swapped is not None:
        swapped.close()
    assert not list(folder.iterdir())


def test_a_gradient_on_storage_is_read_and_changed_like_any_other(folder: Path) -> None:
    model = torch.nn.Linear(64, 64)
    with swap_gradients(model.parameters(), folder, min_bytes=1 * KIB) as gradients:
        model(torch.ones(1, 64)).sum().backward()
        grad = model.weight.grad
        assert grad is not None
        assert has_swapped_gradient(model.weight)
        assert grad.shape == (64, 64)
        assert torch.equal(grad, torch.ones(64, 64))
        grad.mul_(2)
        grad[0] += 1
        grad.data[1].zero_()
        assert grad.sum().item() == 2 * 64 * 64 + 64 - 2 * 64
        assert torch.nn.utils.get_total_norm([grad]).item() == grad.clone().norm().item()
        with gradients.gathered(model.parameters()):
            assert type(model.weight.grad) is torch.Tensor
            assert model.weight.grad[0, 0].item() == 3
            model.weight.grad.data.fill_(5)
        assert model.weight.grad is grad
        assert torch.equal(copy.deepcopy(grad), torch.full((64, 64), 5.0))


def gathered_gradients(model: torch.nn.Module) -> list[torch.Tensor | None]:
    return [None if each.grad is None else each.grad.clone() for each in model.parameters()]


def test_a_gradient_that_is_asked_for_in_between_is_not_added_and_takes_nothing_away(folder: Path) -> None:
    """Tensor hooks run for ``torch.autograd.grad`` too: the gradients before it were lost, and the step did nothing."""
    mine, other = network(), network()
    with swap_gradients(mine.parameters(), folder, min_bytes=1 * KIB):
        for model in (mine, other):
            model(words(0)).square().mean().backward()
            torch.autograd.grad(model(words(1)).square().mean(), list(model.parameters()))
            assert all(each.grad is not None for each in model.parameters())
            torch.autograd.grad(model(words(1)).square().mean(), list(model.parameters()))
            model(words(2)).square().mean().backward()
        assert same(gathered_gradients(mine), gathered_gradients(other))


@pytest.mark.parametrize("first", [False, True])
def test_a_gradient_is_not_added_to_one_that_was_reset_after_a_hook_failed(folder: Path, first: bool) -> None:
    def fail(_: torch.Tensor) -> None:
        raise ArithmeticError

    mine, other = network(), network()
    with swap_gradients(mine.parameters(), folder, min_bytes=1 * KIB):
        mine(words(0)).square().mean().backward()
        parameter = list(mine.parameters())[0 if first else -1]
        hook = parameter.register_hook(fail)
        with pytest.raises(ArithmeticError):
            mine(words(1)).square().mean().backward()
        hook.remove()
        mine.zero_grad()
        for model in (mine, other):
            model(words(2)).square().mean().backward()
        assert same(gathered_gradients(mine), gathered_gradients(other))


@pytest.mark.parametrize("foreach", [None, True])
@pytest.mark.parametrize("how", ["norm", "largest", "value", "ours"])
def test_functions_that_clip_work(folder: Path, how: str, foreach: bool | None) -> None:
    """Not all gradients fit the budget at once."""
    mine, other = network(), network()
    with swap_gradients(mine.parameters(), folder, memory_budget=100 * KIB, min_bytes=1 * KIB) as gradients:
        for model in (mine, other):
            model(words(0)).square().mean().backward()
            for most in (0.1, 0.01):
                if how == "value":
                    torch.nn.utils.clip_grad_value_(model.parameters(), most / 10, foreach=foreach)
                elif how == "ours" and model is mine:
                    gradients.clip_grad_norm_(most)
                else:
                    norm_type = math.inf if how == "largest" else 2.0
                    torch.nn.utils.clip_grad_norm_(model.parameters(), most, norm_type, foreach=foreach)
        assert same(gathered_gradients(mine), gathered_gradients(other))


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("ours", [False, True])
def test_a_scaler_unscales_and_skips_steps_that_are_not_finite(folder: Path, unscale: bool, ours: bool) -> None:
    mine, other = network(), network()
    gradients = swap_gradients(mine.parameters(), folder, memory_budget=100 * KIB, min_bytes=1 * KIB)
    optimizers: list[Any] = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (mine, other)]
    if ours:
        optimizers[0] = NvmeOptimizer(mine.parameters(), torch.optim.AdamW, folder, memory_budget="1M", lr=0.01)
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in optimizers]
    with gradients:
        for number in range(3):
            for model, optimizer, scaler in zip((mine, other), optimizers, scalers, strict=True):
                optimizer.zero_grad()
                loss = model(words(number)).square().mean()
                scaler.scale(loss * (math.inf if number == 1 else 1.0)).backward()
                if unscale:
                    scaler.unscale_(optimizer)
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                scaler.step(optimizer)
                scaler.update()
            assert equal(values(mine), values(other))
    assert [each.get_scale() for each in scalers] == [512.0, 512.0]
    if ours:
        optimizers[0].close()


def test_a_gradient_that_another_thread_adds_to_stays_where_it_is(folder: Path) -> None:
    """Autograd adds to what ``grad`` was: values were lost, or it crashed, when a hook replaced that meanwhile."""
    weight = torch.nn.Parameter(torch.randn(64, 64))
    adds, go_on = threading.Event(), threading.Event()

    def pause(_: torch.Tensor) -> None:
        if threading.current_thread() is other:
            adds.set()
            go_on.wait()

    with swap_gradients([weight], folder, memory_budget=100 * KIB, min_bytes=1 * KIB):
        weight.register_hook(pause)
        other = threading.Thread(target=lambda: weight.sum().backward())
        other.start()
        adds.wait()
        weight.sum().backward()
        between = type(weight.grad)
        go_on.set()
        other.join()
        assert between is torch.Tensor
        assert isinstance(weight.grad, SwappedTensor)
        assert torch.equal(weight.grad, torch.full((64, 64), 2.0))


def test_gradients_of_several_threads_add_up(folder: Path) -> None:
    """An error that was no error came of it, and gradients of 18 to 36 where it is 80."""
    weights = [torch.nn.Parameter(torch.randn(64, 64)) for _ in range(3)]
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(20):
                torch.stack([each.sum() for each in weights]).sum().backward()
        except BaseException as error:
            failures.append(error)

    with swap_gradients(weights, folder, memory_budget=100 * KIB, min_bytes=1 * KIB):
        threads = [threading.Thread(target=work) for _ in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert not failures
        found = [each.grad for each in weights]
        assert all(each is not None and torch.equal(each, torch.full((64, 64), 80.0)) for each in found)


def test_a_gradient_with_a_graph_is_differentiated_again(folder: Path) -> None:
    mine, other = network(), network()
    with swap_gradients(mine.parameters(), folder, min_bytes=1 * KIB):
        for model in (mine, other):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model(words(0)).square().mean().backward(create_graph=True)
            grads = [each.grad for each in model.parameters() if each.grad is not None]
            assert all(each.requires_grad for each in grads)
            model.zero_grad()
            torch.stack([each.square().sum() for each in grads]).sum().backward()
        assert same(gathered_gradients(mine), gathered_gradients(other))


@pytest.mark.parametrize("take", [lambda each: each, lambda each: each.data, lambda each: each[1:], torch.t])
def test_a_gradient_that_somebody_keeps_is_not_the_next_one(folder: Path, take: Callable[..., torch.Tensor]) -> None:
    model = torch.nn.Linear(64, 64)
    with swap_gradients(model.parameters(), folder, memory_budget=100 * KIB, min_bytes=1 * KIB) as gradients:
        kept = []
        for number in range(4):
            model.zero_grad()
            (model.weight * number).sum().backward()
            kept.append(take(model.weight.grad))
        assert [each.mean().item() for each in kept] == [0, 1, 2, 3]
        kept.clear()
        before = gradients.stats().bytes_stored
        for _ in range(4):
            model.zero_grad()
            model.weight.sum().backward()
            assert model.weight.grad is not None
            model.weight.grad[0].sum()  # a view, which is gone
        assert gradients.stats().bytes_stored <= before


def test_a_gradient_that_the_program_gave_is_added_to(folder: Path) -> None:
    model, mine = torch.nn.Linear(64, 64), torch.zeros(64, 64)
    with swap_gradients(model.parameters(), folder, min_bytes=1 * KIB):
        for number in range(2):
            model.weight.grad = mine
            model.weight.sum().backward()
            assert model.weight.grad is mine
            assert mine.mean().item() == number + 1


def test_a_conjugated_gradient_is_one(folder: Path) -> None:
    weight = torch.nn.Parameter(torch.randn(64, 64, dtype=torch.complex64))
    factor = torch.randn(64, 64, dtype=torch.complex64)
    expected = torch.autograd.grad((weight * factor).sum().abs(), weight)[0]
    with swap_gradients([weight], folder, min_bytes=1):
        (weight * factor).sum().abs().backward()
        assert has_swapped_gradient(weight)
        assert weight.grad is not None
        assert torch.equal(weight.grad.resolve_conj(), expected)


def test_parameters_that_get_another_dtype_have_such_gradients(folder: Path) -> None:
    model = torch.nn.Linear(64, 64)
    with swap_gradients(model.parameters(), folder, min_bytes=1 * KIB):
        model(torch.ones(1, 64)).sum().backward()
        model.zero_grad()
        model.to(torch.bfloat16)
        model(torch.ones(1, 64, dtype=torch.bfloat16)).sum().backward()
        assert has_swapped_gradient(model.weight)
        assert model.weight.grad is not None
        assert torch.equal(model.weight.grad, torch.ones(64, 64, dtype=torch.bfloat16))


@pytest.mark.parametrize("foreach", [False, True])
def test_gradients_that_were_set_to_zero_are_zero(folder: Path, foreach: bool) -> None:
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=foreach)
    with swap_gradients(model.parameters(), folder, min_bytes=1 * KIB) as gradients:
        for _ in range(3):
            model(torch.ones(1, 64)).sum().backward()
            optimizer.zero_grad(set_to_none=False)
            assert gradients.stats().bytes_read == 0
        assert same(gathered_gradients(model), [torch.zeros(64, 64), torch.zeros(64)])
        model(torch.ones(1, 64)).sum().backward()
        assert same(gather(model, gradients), [torch.ones(64, 64), torch.ones(64)])


def test_gradients_that_were_reset_are_not_added_to(folder: Path) -> None:
    model = torch.nn.Linear(64, 64)
    with swap_gradients(model.parameters(), folder, min_bytes=1 * KIB) as gradients:
        for _ in range(3):
            model.zero_grad()
            model(torch.ones(1, 64)).sum().backward()
        found = gather(model, gradients)
        assert found[0] is not None
        assert torch.equal(found[0], torch.ones(64, 64))
        model.zero_grad()
        assert gather(model, gradients) == [None, None]
        assert gradients.clip_grad_norm_(1.0).item() == 0
        model(torch.ones(1, 64)).sum().backward()
    assert model.weight.grad is None
    model(torch.ones(1, 64)).sum().backward()
    assert model.weight.grad is not None
    assert torch.equal(model.weight.grad, torch.ones(64, 64))


def test_clipping_twice_and_after_a_look_scales_once_each(folder: Path) -> None:
    mine, other = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
    with swap_gradients(mine.parameters(), folder, min_bytes=1 * KIB) as gradients:
        for each in (mine, other):
            each(torch.ones(1, 64)).sum().backward()
        gather(mine, gradients)
        for most in (5.0, 1.0):
            first = gradients.clip_grad_norm_(most)
            torch.testing.assert_close(first, torch.nn.utils.clip_grad_norm_(other.parameters(), most))
            for one, two in zip(gather(mine, gradients), other.parameters(), strict=True):
                torch.testing.assert_close(one, two.grad)


def test_a_gradient_that_was_changed_is_clipped_as_it_is(folder: Path) -> None:
    mine, other = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
    with swap_gradients(mine.parameters(), folder, min_bytes=1 * KIB) as gradients:
        for each in (mine, other):
            each(torch.ones(1, 64)).sum().backward()
        for most in (5.0, 1.0):
            with gradients.gathered(mine.parameters()):
                for parameter in (*mine.parameters(), *other.parameters()):
                    assert parameter.grad is not None
                    parameter.grad.add_(1)
            first = gradients.clip_grad_norm_(most)
            torch.testing.assert_close(first, torch.nn.utils.clip_grad_norm_(other.parameters(), most))
            for one, two in zip(gather(mine, gradients), other.parameters(), strict=True):
                torch.testing.assert_close(one, two.grad)


def test_what_cannot_be_is_refused(folder: Path) -> None:
    model = torch.nn.Linear(64, 64)
    with pytest.raises(ValueError, match="none of min_bytes or more"):
        swap_gradients(model.parameters(), folder)
    with pytest.raises(MemoryError, match=r"16 KiB, .* does not fit a memory_budget"):
        swap_gradients(model.parameters(), folder, memory_budget="8K", min_bytes=1)
    gradients = swap_gradients(model.parameters(), folder, min_bytes=1)
    with gradients, pytest.raises(ValueError, match="swapped already"):
        swap_gradients(model.parameters(), folder, min_bytes=1)
    gradients.close()
    words_of = torch.nn.Embedding(64, 64, sparse=True)
    loss = words_of(torch.tensor([1])).sum()
    swapped = swap_gradients(words_of.parameters(), folder, min_bytes=1)
    with swapped, pytest.raises(RuntimeError, match="does not support sparse gradients"):
        loss.backward()
    assert not list(folder.iterdir())


def test_several_ranks_are_refused(folder: Path) -> None:
    """DistributedDataParallel reduces gradients when all are complete: what leaves before would be one rank's own."""
    program = f"""
        import torch, torch.distributed
        from nvme_ops.offload import NvmeOptimizer, swap_gradients
        from torch.testing._internal.distributed.fake_pg import FakeStore
        torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
        model = torch.nn.Linear(64, 64)
        for make in (
            lambda: swap_gradients(model.parameters(), {str(folder)!r}, min_bytes=1),
            lambda: NvmeOptimizer(model.parameters(), torch.optim.SGD, {str(folder)!r}, lr=1.0, overlap="backward"),
        ):
            try:
                make()
            except ValueError as error:
                print(error)
    """
    said = run_python(program).stdout.splitlines()
    assert len(said) == 2
    assert all("several ranks" in line for line in said)


@pytest.mark.parametrize("error", [OSError(errno.EIO, os.strerror(errno.EIO)), KeyboardInterrupt()])
def test_a_backward_pass_that_fails_can_be_repeated(folder: Path, error: BaseException) -> None:
    mine, other, handle = network(), network(), Failing()
    handle.error = error
    with swap_gradients(mine.parameters(), folder, memory_budget=100 * KIB, min_bytes=4 * KIB, handle=handle) as grads:
        for number in range(3):
            other.zero_grad()
            other(words(number)).square().mean().backward()
            mine.zero_grad()
            handle.after["write"] = number
            with pytest.raises(type(error)):
                mine(words(number)).square().mean().backward()
            mine.zero_grad()
            mine(words(number)).square().mean().backward()
            assert same(gather(mine, grads), [each.grad for each in other.parameters()])


def test_a_full_disk_is_told_by_the_backward_pass(make_file_system: Callable[..., Path]) -> None:
    place = make_file_system(8 * MIB)
    model = torch.nn.Sequential(*(torch.nn.Linear(1000, 1000) for _ in range(3)))
    with swap_gradients(model.parameters(), place, memory_budget="32M"):
        with pytest.raises(OSError, match="making room for") as caught:
            model(torch.ones(1, 1000)).sum().backward()
        assert caught.value.errno == errno.ENOSPC


def test_a_gradient_that_cannot_be_read_fails_the_step_which_goes_on(folder: Path) -> None:
    mine, other, handle = network(), network(), Failing()
    plain = torch.optim.AdamW(other.parameters(), lr=0.01)
    gradients = swap_gradients(mine.parameters(), folder, memory_budget=100 * KIB, min_bytes=4 * KIB, handle=handle)
    with gradients, NvmeOptimizer(mine.parameters(), torch.optim.AdamW, folder, memory_budget="1M", lr=0.01) as mine_s:
        for number in range(3):
            for model, optimizer in ((mine, mine_s), (other, plain)):
                optimizer.zero_grad()
                model(words(number)).square().mean().backward()
            handle.after["read"] = number
            with pytest.raises(OSError, match="Input/output error"):
                mine_s.step()
            mine_s.step()
            plain.step()
            assert equal(values(mine), values(other))


@pytest.mark.parametrize("seed", range(40))
def test_random_programs_see_what_they_see_without(seed: int) -> None:
    program(seed)


def interrupted(line: int, work: Callable[[], None]) -> bool:
    """Interrupts ``work`` at a line, counted over those of the two files. Returns False where there are not so many."""
    left = line

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.endswith(("offload/gradients.py", "offload/swapped_gradient.py")):
            return None
        left -= event == "line"
        if left == 0 and event == "line":
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_an_interruption_at_any_line_leaves_gradients_old_or_new(folder: Path) -> None:
    def loss(model: torch.nn.Module, number: int) -> torch.Tensor:
        return model(torch.full((2, 64), number + 1.0)).square().mean()

    def network_of_three() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))

    plain = network_of_three()
    first, second = (torch.autograd.grad(loss(plain, number), list(plain.parameters())) for number in range(2))
    for line in range(1, 2000, 11):
        model = network_of_three()
        with swap_gradients(model.parameters(), folder, memory_budget=100 * KIB, min_bytes=1 * KIB) as gradients:
            loss(model, 0).backward()

            def work(model: torch.nn.Module = model, gradients: Any = gradients) -> None:
                loss(model, 1).backward()
                gradients.clip_grad_norm_(1e9)
                model.zero_grad(set_to_none=False)

            if not interrupted(line, work):
                return
            for found, one, two in zip(gathered_gradients(model), first, second, strict=True):
                assert found is not None
                assert any(torch.equal(found, each) for each in (one, one + two, torch.zeros_like(one)))
            model.zero_grad(set_to_none=line % 2 == 0)
            loss(model, 1).backward()
            assert same(gathered_gradients(model), list(second))
            gc.collect()  # of the exception, whose frames may be in a cycle
            assert not any(each.is_used() for each in gradients._residents._all.values())
    raise AssertionError("it has not ended")
