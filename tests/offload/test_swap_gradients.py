"""swap_gradients: what random programs do not do. Same bits in training: ``test_parity.py``."""

from __future__ import annotations

import contextlib
import copy
import gc
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing._internal.distributed.fake_pg import FakeStore

from nvme_ops.offload import NvmeOptimizer, swap_gradients, swap_params
from tests.conftest import in_threads
from tests.contract.conftest import lost_unraisable
from tests.contract.faulty import Faulty
from tests.moments import Interrupt, numbers
from tests.offload.training import KIB, equal, sentences, values, words

Gradients = list[torch.Tensor | None]


def gathered(model: torch.nn.Module) -> Gradients:
    return [None if each.grad is None else each.grad.clone() for each in model.parameters()]


def same(first: Gradients, second: Gradients) -> bool:
    return all(
        (one is None and two is None) or (one is not None and two is not None and torch.equal(one, two))
        for one, two in zip(first, second, strict=True)
    )


def test_a_block_finds_usual_tensors(folder: Path) -> None:
    model = torch.nn.Linear(64, 64)
    with swap_gradients(model.parameters(), folder, min_bytes=1 * KIB) as gradients:
        model(torch.ones(1, 64)).sum().backward()
        grad: Any = model.weight.grad
        assert torch.nn.utils.get_total_norm([grad]).item() == grad.clone().norm().item()
        with gradients.gathered(model.parameters()):
            assert type(model.weight.grad) is torch.Tensor
            model.weight.grad.data.fill_(5)
        assert model.weight.grad is grad
        assert torch.equal(copy.deepcopy(grad), torch.full((64, 64), 5.0))


def test_a_gradient_that_another_thread_adds_to_stays_where_it_is(folder: Path) -> None:
    """Autograd adds to what ``grad`` was: values were lost, or it crashed, when a hook replaced that meanwhile."""
    weight: Any = torch.nn.Parameter(torch.randn(64, 64))
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
        assert type(weight.grad) is not torch.Tensor
        assert torch.equal(weight.grad, torch.full((64, 64), 2.0))


def test_gradients_of_several_threads_add_up(folder: Path) -> None:
    """An error that was no error came of it, and gradients of 18 to 36 where it is 80."""
    weights = [torch.nn.Parameter(torch.randn(64, 64)) for _ in range(3)]

    def work(_: int) -> None:
        for _ in range(20):
            torch.stack([each.sum() for each in weights]).sum().backward()

    with swap_gradients(weights, folder, memory_budget=100 * KIB, min_bytes=1 * KIB):
        in_threads(work, 4)
        found = [each.grad for each in weights]
        assert all(each is not None and torch.equal(each, torch.full((64, 64), 80.0)) for each in found)


def test_parameters_that_get_another_dtype_have_such_gradients(folder: Path) -> None:
    model = torch.nn.Linear(64, 64)
    with swap_gradients(model.parameters(), folder, min_bytes=1 * KIB):
        model(torch.ones(1, 64)).sum().backward()
        model.zero_grad()
        model.to(torch.bfloat16)
        model(torch.ones(1, 64, dtype=torch.bfloat16)).sum().backward()
        assert type(model.weight.grad) is not torch.Tensor
        assert model.weight.grad is not None
        assert torch.equal(model.weight.grad, torch.ones(64, 64, dtype=torch.bfloat16))


def test_the_space_of_gradients_that_are_gone_is_used_again(folder: Path) -> None:
    model = torch.nn.Linear(64, 64)
    with swap_gradients(model.parameters(), folder, memory_budget=100 * KIB, min_bytes=1 * KIB) as gradients:
        kept, most = list[Any](), 0
        for number in range(8):
            model.zero_grad()
            (model.weight * number).sum().backward()
            assert model.weight.grad is not None
            if number < 4:
                kept.append(model.weight.grad)
            else:
                kept.clear()
                model.weight.grad[0].sum()  # a view, which is gone
            most = gradients.stats().bytes_stored if number < 5 else most
            assert gradients.stats().bytes_stored <= most


def test_a_gradient_that_could_not_be_written_is_lost_whenever_it_is_used(folder: Path) -> None:
    model, handle = torch.nn.Linear(64, 64), Faulty("write", "fail")
    with swap_gradients(model.parameters(), folder, min_bytes=1 * KIB, handle=handle):
        model.weight.sum().backward()
        handle.will()
        for _ in range(2):
            assert model.weight.grad is not None
            with pytest.raises(OSError, match="Input/output error"):
                model.weight.grad.sum()


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
    with swap_gradients([weight], folder, min_bytes=weight.nbytes):
        (weight * factor).sum().abs().backward()
        assert type(weight.grad) is not torch.Tensor
        assert weight.grad is not None
        assert torch.equal(weight.grad.resolve_conj(), expected)


def test_gradients_that_were_set_to_zero_are_zero(folder: Path) -> None:
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    with swap_gradients(model.parameters(), folder, min_bytes=1 * KIB) as gradients:
        for _ in range(3):
            model(torch.ones(1, 64)).sum().backward()
            optimizer.zero_grad(set_to_none=False)
            assert gradients.stats().bytes_read == 0
        assert same(gathered(model), [torch.zeros(64, 64), torch.zeros(64)])
        model(torch.ones(1, 64)).sum().backward()
        assert same(gathered(model), [torch.ones(64, 64), torch.ones(64)])


def test_after_close_gradients_are_usual_ones(folder: Path) -> None:
    model: Any = torch.nn.Linear(64, 64)
    with swap_gradients(model.parameters(), folder, min_bytes=1 * KIB) as gradients:
        assert gradients.clip_grad_norm_(1.0).item() == 0
        model(torch.ones(1, 64)).sum().backward()
    assert [each.grad is None for each in model.parameters()] == [True, False], "the bias is small"
    model(torch.ones(1, 64)).sum().backward()
    assert type(model.weight.grad) is torch.Tensor


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
    parameters: Any = list(torch.nn.Linear(64, 64).parameters())
    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        with pytest.raises(ValueError, match="several ranks"):
            swap_gradients(parameters, folder, min_bytes=1)
        with pytest.raises(ValueError, match="several ranks"):
            NvmeOptimizer(parameters, torch.optim.SGD, folder, lr=1.0, overlap="backward")
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("failing", ["gradients", "params", "states"])
@pytest.mark.parametrize("which", ["read", "write"])
def test_a_step_that_fails_goes_on_whatever_of_it_is_on_storage(folder: Path, failing: str, which: str) -> None:
    mine, other, handle = sentences(), sentences(), Faulty()
    plain = torch.optim.AdamW(other.parameters(), lr=0.01)
    options: Any = {name: {"handle": handle} if name == failing else {} for name in ("gradients", "params", "states")}
    small: Any = {"min_bytes": 4 * KIB}
    with (
        swap_params(mine, folder, memory_budget=160 * KIB, **small, **options["params"]),
        swap_gradients(mine.parameters(), folder, memory_budget=100 * KIB, **small, **options["gradients"]),
        NvmeOptimizer(
            mine.parameters(), torch.optim.AdamW, folder, memory_budget="1M", lr=0.01, **options["states"]
        ) as ours,
    ):
        for number in range(3):
            for model, optimizer in ((mine, ours), (other, plain)):
                optimizer.zero_grad()
                model(words(number)).square().mean().backward()
            handle.will(which, "refuse", {number + 1})
            with contextlib.suppress(OSError):
                ours.step()
            if ours.steps == number:
                ours.step()
            assert handle.met or not number or (failing, which) == ("gradients", "write")
            handle.will()
            plain.step()
            assert equal(values(mine), values(other))


@pytest.mark.usefixtures(lost_unraisable.__name__)
def test_an_interruption_at_any_moment_leaves_gradients_old_or_new(folder: Path) -> None:
    def loss(model: torch.nn.Module, number: int) -> torch.Tensor:
        return torch.as_tensor(model(torch.full((2, 64), number + 1.0)).square().mean())

    def three() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))

    plain = three()
    first, second = (torch.autograd.grad(loss(plain, number), list(plain.parameters())) for number in range(2))

    def attempt(moment: Interrupt) -> None:
        model = three()
        with swap_gradients(model.parameters(), folder, memory_budget=100 * KIB, min_bytes=1 * KIB) as gradients:
            loss(model, 0).backward()
            try:
                with moment:
                    loss(model, 1).backward()
                    gradients.clip_grad_norm_(1e9)
                    model.zero_grad(set_to_none=False)
            except KeyboardInterrupt:
                gc.collect()  # of the exception, whose frames may be in a cycle
            for found, one, two in zip(gathered(model), first, second, strict=True):
                assert any(found is not None and torch.equal(found, each) for each in (one, one + two, 0 * one)), (
                    moment.where
                )
            model.zero_grad(set_to_none=moment.number % 2 == 0)
            loss(model, 1).backward()
            assert same(gathered(model), list(second)), moment.where

    attempt(counted := Interrupt())
    for number in numbers("gradients", counted.count, 20):
        attempt(Interrupt(number))
    assert counted.count > 100
