"""swap_params and swap_gradients beyond random programs. The same bits: ``test_parity``; faults: the contract, too."""

from __future__ import annotations

import contextlib
import copy
import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing._internal.distributed.fake_pg import FakeStore

from nvme_ops import aio_handle
from nvme_ops.base.native import native
from nvme_ops.io.engine import Op
from nvme_ops.offload import NvmeOptimizer, swap_gradients, swap_params
from nvme_ops.offload.parameters import residents
from nvme_ops.storage.store import StoreFuture
from tests.conftest import in_threads
from tests.contract.conftest import lost_unraisable
from tests.contract.faulty import Faulty, WrappedEngine
from tests.moments import Interrupt, numbers
from tests.offload.elsewhere import same
from tests.offload.training import KIB, equal, layers, sentences, values, words


def test_reads_are_ahead_of_their_use_once_the_order_is_known(folder: Path) -> None:
    torch.manual_seed(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256, bias=False) for _ in range(12)))
    with swap_params(model, folder, memory_budget=4 * 256 * KIB, min_bytes=1) as swapped:
        x = torch.ones(1, 256)
        for _ in range(3):
            model(x).sum().backward()
        before = swapped.stats()
        model(x).sum().backward()
        after = swapped.stats()
        assert after.bytes_on_demand == before.bytes_on_demand
        assert after.bytes_read - before.bytes_read <= (24 - 6) * 256 * KIB, "what is used at both turns stays"
        assert after.bytes_written == before.bytes_written


def test_what_is_noted_of_copies_and_views_does_not_grow(folder: Path) -> None:
    model = layers(2)
    with swap_params(model, folder, memory_budget="1M", min_bytes=1), torch.no_grad():
        weight: Any = model[0].weight
        kept = weight.detach()[3]
        for _ in range(150):
            weight.detach().to(torch.bfloat16)
            weight.detach()[2].fill_(2)
        assert len(weight.resident.copies) <= 100
        kept.fill_(3)
        assert weight[2:4].sum(1).tolist() == [128, 192]


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_out_of_another_shape_is_refused_and_keeps_its_values(folder: Path) -> None:
    model, x = torch.nn.Linear(48, 48), torch.ones(48)
    before = model.bias.detach().clone()
    with swap_params(model, folder, memory_budget="64K", min_bytes=1), torch.no_grad():
        bias: Any = model.bias
        bias.add_(1)  # newer in memory than on storage
        for work in (
            lambda: torch.add(torch.ones(1, 48), 1, out=bias),
            lambda: torch.masked_select(x, x > 0, out=model.weight),  # of whatever shape the values say
            lambda: bias.addbmm_(torch.ones(3, 5, 4), torch.ones(3, 4, 48)),  # which torch resizes, as if it were out=
        ):
            with pytest.raises(RuntimeError, match=r"cannot be resized.*: assign the result to its \.data"):
                work()
        assert torch.equal(bias, before + 1)
        assert torch.masked_select(x, x > 0, out=bias) is bias
        assert torch.equal(bias, x)


def test_restored_parameters_keep_their_gradients_and_are_usual_ones(folder: Path) -> None:
    mine, other = sentences(), sentences()
    for model in (mine, other):
        model.register_parameter("tied", next(model.parameters()))
    swapped = swap_params(mine, folder, memory_budget=200 * KIB, min_bytes=4 * KIB)
    for model in (mine, other):
        model(words(1)).sum().backward()
    swapped.restore()
    for param, usual in zip(mine.parameters(), other.parameters(), strict=True):
        assert type(param) is torch.nn.Parameter
        assert torch.equal(param, usual)
        assert param.grad is not None is not usual.grad
        assert torch.equal(param.grad, usual.grad)
    assert not list(folder.iterdir())


def test_a_parametrization_is_added_trained_and_removed(folder: Path) -> None:
    mine, other = layers(2), layers(2)
    seen: list[Any] = []
    with swap_params(mine, folder, memory_budget="64K", min_bytes=1):
        for model in (mine, other):
            torch.manual_seed(1)
            torch.nn.utils.parametrizations.spectral_norm(model[0])
            model(torch.ones(2, 64)).sum().backward()
            seen.append([param.grad.clone() for param in model.parameters() if param.grad is not None])
            torch.nn.utils.parametrize.remove_parametrizations(model[0], "weight")
        assert len(seen[0]) == 2
        assert equal(*seen)
        assert equal(values(mine), values(other))


def test_what_cannot_be_is_refused_and_nothing_changes(folder: Path) -> None:
    model, bare = sentences(), torch.nn.Module()
    before = list(model.parameters())
    bare.weight = torch.nn.Parameter(torch.empty(99, device="meta"))
    mixed = torch.nn.ModuleList([torch.nn.Linear(9, 9), torch.nn.Linear(9, 9, device="meta")])
    wrong: list[tuple[torch.nn.Module, dict[str, Any], str]] = [
        (model, {"min_bytes": "1M"}, "none of min_bytes or more"),
        (model, {"device": "cuda"}, "the parameters are on cpu, not on cuda"),
        (mixed, {}, "the parameters are on 2 devices, not on one: cpu, meta"),
        (bare, {}, "nothing initializes weight of this module on the meta device"),
    ]
    for module, given, reason in wrong:
        with pytest.raises(ValueError, match=reason):
            swap_params(module, folder, **{"memory_budget": "1M", "min_bytes": 1, **given})
    assert all(one is other for one, other in zip(before, model.parameters(), strict=True))
    with (
        swap_params(model, folder, memory_budget="1M", min_bytes=1),
        pytest.raises(ValueError, match="swapped already"),
    ):
        swap_params(model, folder, memory_budget="1M", min_bytes=1)
    with pytest.raises(ValueError, match="were closed"):
        model(words(1))
    assert not list(folder.iterdir())


def test_memory_that_somebody_holds_is_waited_for_and_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residents.Residents, "patience", 0.2)
    model: Any = layers(3)
    with swap_params(model, folder, memory_budget=40 * KIB, min_bytes=1):
        held = [param.lent().__enter__() for param in list(model.parameters())[:2]]
        with pytest.raises(
            MemoryError, match=r"no memory in one piece for a tensor of 16 KiB, .* others in use have 32 KiB of 40"
        ):
            model(torch.ones(1, 64))
        threading.Timer(0.1, held.clear).start()
        monkeypatch.setattr(residents.Residents, "patience", 30.0)
        model(torch.ones(1, 64))


# Failures


class Asked:
    """A write that has ended when it was asked whether it has so many times."""

    def __init__(self, operation: Any, times: int) -> None:
        self._operation, self.times = operation, times

    def __getattr__(self, name: str) -> Any:
        return getattr(self._operation, name)

    def done(self) -> bool:
        self.times -= 1
        return self.times < 0 and bool(self._operation.done())


class Later(aio_handle):
    """Writes what a tensor was when it was asked to, and says so later."""

    times = 0

    def _make_engine(self) -> Any:
        return _LaterEngine(super()._make_engine(), self)


class _LaterEngine(WrappedEngine):
    def submit(self, op: int, tensor: Any, *arguments: Any) -> Any:
        if op != Op.WRITE or not self._handle.times:
            return self._engine.submit(op, tensor, *arguments)
        (operation := self._engine.submit(op, tensor.clone(), *arguments)).wait(None)
        return Asked(operation, self._handle.times)


def test_what_is_changed_while_it_is_written_is_written_again(folder: Path) -> None:
    """The end of a write was taken for that of the one of the last change: several threads lost theirs."""
    model, handle = layers(4), Later()
    with swap_params(model, folder, memory_budget=40 * KIB, min_bytes=1, handle=handle), torch.no_grad():
        first, *others = model.parameters()
        for times in (1, 3, 5):
            handle.times = times
            for value in (times, times + 1):
                first.fill_(value)
                others[0].fill_(value)
                handle.times = 0
            others[1].add(others[2])  # whose memory these have
            for weight in (first, others[0]):
                assert torch.equal(weight + 0.0, torch.full((64, 64), times + 1.0))


def test_a_write_that_has_failed_is_repeated_where_its_memory_is_needed(folder: Path) -> None:
    mine, other, handle = layers(), layers(), Faulty()
    with torch.no_grad(), swap_params(mine, folder, memory_budget=60 * KIB, min_bytes=1, handle=handle):
        handle.will("write", "fail", {1})
        for model in (mine, other):
            for param in list(model.parameters()) * 4:
                param.add_(1)
        assert equal(values(mine), values(other))
        assert handle.met


USES: dict[str, Callable[[Any], object]] = {
    "read": lambda weight: weight + 0.0,
    "changed": lambda weight: weight.fill_(9),
    "assigned": lambda weight: setattr(weight, "data", torch.full((64, 64), 9.0)),
}


@pytest.mark.usefixtures(lost_unraisable.__name__)
@pytest.mark.parametrize("use", USES)
def test_ctrl_c_at_any_moment_of_a_use_loses_nothing(folder: Path, use: str) -> None:
    """Neither a change that was made before, nor half of one that is made then, nor memory."""

    def attempt(moment: Interrupt) -> None:
        model: Any = layers(4)
        with swap_params(model, folder, memory_budget=32 * KIB, min_bytes=1) as swapped, torch.no_grad():
            for number, param in enumerate(model.parameters()):
                param.fill_(number)  # the last two are newer in memory than on storage
            with contextlib.suppress(KeyboardInterrupt), moment:
                USES[use](model[0].weight)
            gc.collect()
            first, *others = ({float(param.min()), float(param.max())} for param in model.parameters())
            assert first in ({0.0}, {9.0}), moment.where
            assert others == [{1.0}, {2.0}, {3.0}], moment.where
            with swapped.gathered([model[2].weight, model[3].weight]):  # which takes all the memory
                assert swapped.stats().peak_bytes <= 32 * KIB

    attempt(counted := Interrupt())
    for number in numbers("use", counted.count, 8):
        attempt(Interrupt(number))


# Gradients


def gathered(model: torch.nn.Module) -> list[torch.Tensor | None]:
    return [None if param.grad is None else param.grad.clone() for param in model.parameters()]


def test_gradients_are_usual_ones_where_a_program_gives_them(folder: Path) -> None:
    model: Any = torch.nn.Linear(64, 64)
    weight, mine = model.weight, torch.zeros(64, 64)
    with swap_gradients(model.parameters(), folder, min_bytes=1 * KIB) as gradients:
        assert gradients.clip_grad_norm_(1.0).item() == 0
        model(torch.ones(1, 64)).sum().backward()
        grad = weight.grad
        with gradients.gathered(model.parameters()):
            assert type(weight.grad) is torch.Tensor
            weight.grad.data.fill_(5)
        assert weight.grad is grad
        assert torch.equal(copy.deepcopy(grad), torch.full((64, 64), 5.0))
        for number in range(2):
            weight.grad = mine
            weight.sum().backward()
            assert weight.grad is mine
            assert mine.mean().item() == number + 1
        weight.grad = grad
    del grad
    assert not any(isinstance(tracked, StoreFuture) for tracked in gc.get_objects()), "what was written is kept"
    assert [param.grad is None for param in model.parameters()] == [True, False], "the bias is small"
    weight.sum().backward()
    assert type(weight.grad) is torch.Tensor


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
            torch.stack([weight.sum() for weight in weights]).sum().backward()

    with swap_gradients(weights, folder, memory_budget=100 * KIB, min_bytes=1 * KIB):
        in_threads(work, 4)
        grads = [weight.grad for weight in weights]
        assert all(grad is not None and torch.equal(grad, torch.full((64, 64), 80.0)) for grad in grads)


def test_only_the_space_of_gradients_that_are_gone_is_used_again(folder: Path) -> None:
    model: Any = torch.nn.Linear(64, 64)
    with swap_gradients(model.parameters(), folder, memory_budget=100 * KIB, min_bytes=1 * KIB) as gradients:
        kept, most = list[Any](), 0
        for number in range(8):
            model.zero_grad()
            (model.weight * number).sum().backward()
            if number < 4:
                kept.append(model.weight.grad)
            else:
                assert [tensor[0, 0].item() for tensor in kept] == [0, 1, 2, 3][: len(kept)]
                kept.clear()
                model.weight.grad[0].sum()  # a view, which is gone
            most = gradients.stats().bytes_stored if number < 5 else most
            assert gradients.stats().bytes_stored <= most
        model.zero_grad()
        model.to(torch.bfloat16)
        model(torch.ones(1, 64, dtype=torch.bfloat16)).sum().backward()
        assert type(model.weight.grad) is not torch.Tensor
        assert torch.equal(model.weight.grad, torch.ones(64, 64, dtype=torch.bfloat16))


def test_a_gradient_that_could_not_be_written_is_lost_whenever_it_is_used(folder: Path) -> None:
    model, handle = torch.nn.Linear(64, 64), Faulty("write", "fail")
    with swap_gradients(model.parameters(), folder, min_bytes=1 * KIB, handle=handle):
        model.weight.sum().backward()
        handle.will()
        for _ in range(2):
            assert model.weight.grad is not None
            with pytest.raises(OSError, match="Input/output error"):
                model.weight.grad.sum()


def test_gradients_leave_memory_once_they_are_written(folder: Path) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512, bias=False) for _ in range(16)))
    with swap_gradients(model.parameters(), folder, memory_budget="8M"):
        before = native().pool_statistics()["live_bytes"]
        model(torch.ones(1, 512)).sum().backward()
        after = native().pool_statistics()
        assert 0 < after["live_bytes"] - before <= 2 * 1024 * KIB, "a quarter of the budget is being written"
        assert after["cached_bytes"] <= 4 * 1024 * KIB
    gc.collect()  # graphs of earlier tests that have something on storage
    made = torch.empty(1024 * KIB, dtype=torch.uint8)
    assert not native().in_pool(made), "torch's own allocator is back"


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
        assert same(gathered(model), [torch.zeros(64, 64), torch.zeros(64)]) == ""
        model(torch.ones(1, 64)).sum().backward()
        assert same(gathered(model), [torch.ones(64, 64), torch.ones(64)]) == ""


@pytest.mark.parametrize("unused", [[1, 1, 1], [0, 2, 3], [3, 1, 0]])
def test_parameters_without_a_gradient_before_the_first_step_are_left_out(folder: Path, unused: list[int]) -> None:
    """Of a branch that is not taken: a gradient was foreseen, and there never was one."""
    torch.manual_seed(4)
    mine = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(4))
    other = copy.deepcopy(mine)
    plain = torch.optim.AdamW(other.parameters(), lr=0.01)
    with (
        swap_gradients(mine.parameters(), folder, min_bytes=1, memory_budget="256K"),
        NvmeOptimizer(mine.parameters(), torch.optim.AdamW, folder, memory_budget="1M", lr=0.01) as optimizer,
    ):
        for left_out in unused:
            for layers, its_optimizer in ((mine, optimizer), (other, plain)):
                x = torch.ones(2, 64)
                for number, layer in enumerate(layers):
                    x = x if number == left_out else layer(x).tanh()
                x.square().sum().backward()
                its_optimizer.step()
                its_optimizer.zero_grad()
        assert equal(values(mine), values(other))


def test_gradients_that_cannot_be_swapped_are_refused(folder: Path) -> None:
    model = torch.nn.Linear(64, 64)
    parameters = list(model.parameters())
    with pytest.raises(ValueError, match="none of min_bytes or more"):
        swap_gradients(parameters, folder)
    with pytest.raises(MemoryError, match=r"16 KiB, .* does not fit a (memory|device)_budget"):
        swap_gradients(parameters, folder, memory_budget="8K", min_bytes=1)
    with swap_gradients(parameters, folder, min_bytes=1), pytest.raises(ValueError, match="swapped already"):
        swap_gradients(parameters, folder, min_bytes=1)
    words_of = torch.nn.Embedding(64, 64, sparse=True)
    loss = words_of(torch.tensor([1])).sum()
    swapped = swap_gradients(words_of.parameters(), folder, min_bytes=1)
    with swapped, pytest.raises(RuntimeError, match="does not support sparse gradients"):
        loss.backward()
    # DistributedDataParallel reduces gradients when all are complete: what leaves before would be one rank's own
    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        with pytest.raises(ValueError, match="several ranks"):
            swap_gradients(parameters, folder, min_bytes=1)
        with pytest.raises(ValueError, match="several ranks"):
            NvmeOptimizer(parameters, torch.optim.SGD, folder, lr=1.0, overlap="backward")
    finally:
        torch.distributed.destroy_process_group()
    assert not list(folder.iterdir())


@pytest.mark.usefixtures(lost_unraisable.__name__)
def test_an_interruption_at_any_moment_leaves_gradients_old_or_new(folder: Path) -> None:
    def loss(model: torch.nn.Module, number: int) -> torch.Tensor:
        return torch.as_tensor(model(torch.full((2, 64), number + 1.0)).square().mean())

    plain = layers(3)
    first, second = (torch.autograd.grad(loss(plain, number), list(plain.parameters())) for number in range(2))

    def attempt(moment: Interrupt) -> None:
        model = layers(3)
        with swap_gradients(model.parameters(), folder, memory_budget=100 * KIB, min_bytes=1 * KIB) as gradients:
            loss(model, 0).backward()
            with contextlib.suppress(KeyboardInterrupt), moment:
                loss(model, 1).backward()
                gradients.clip_grad_norm_(1e9)
                model.zero_grad(set_to_none=False)
            gc.collect()  # of the exception, whose frames may be in a cycle
            for grad, one, two in zip(gathered(model), first, second, strict=True):
                possible = (one, one + two, 0 * one)
                assert any(grad is not None and torch.equal(grad, value) for value in possible), moment.where
            model.zero_grad(set_to_none=moment.number % 2 == 0)
            loss(model, 1).backward()
            assert same(gathered(model), list(second)) == "", moment.where

    attempt(counted := Interrupt())
    for number in numbers("gradients", counted.count, 10):
        attempt(Interrupt(number))
    assert counted.count > 100
