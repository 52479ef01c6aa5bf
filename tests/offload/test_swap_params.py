"""swap_params: memory, order, init, refusals. That it computes the same: ``test_parity``; faults: the contract, too."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nvme_ops import IoFuture, aio_handle
from nvme_ops.offload import swap_params
from nvme_ops.offload.weights import residents
from tests.contract.conftest import lost_unraisable
from tests.contract.faulty import Faulty
from tests.moments import Interrupt, numbers
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
        for _ in range(1000):
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
        assert torch.mul(bias, 3, out=bias) is bias
        assert torch.equal(bias, 3 * x)


def test_an_assignment_that_cannot_be_written_leaves_the_old_values(folder: Path) -> None:
    model, handle = torch.nn.Linear(48, 48), Faulty()
    before = model.weight.detach().clone()
    with swap_params(model, folder, memory_budget="64K", min_bytes=1, handle=handle):
        handle.will("write", "fail")
        with pytest.raises(OSError, match="Input/output error"):
            model.weight.data = torch.ones(48, 48)
        handle.will()
        assert torch.equal(model.weight, before)


def test_restored_parameters_keep_their_gradients_and_are_usual_ones(folder: Path) -> None:
    mine, other = sentences(), sentences()
    for model in (mine, other):
        model.register_parameter("tied", next(model.parameters()))
    swapped = swap_params(mine, folder, memory_budget=200 * KIB, min_bytes=4 * KIB)
    for model in (mine, other):
        model(words(1)).sum().backward()
    swapped.restore()
    swapped.close()
    assert all(type(each) is torch.nn.Parameter for each in mine.parameters())
    for each, usual in zip(mine.parameters(), other.parameters(), strict=True):
        assert torch.equal(each, usual)
        assert each.grad is not None is not usual.grad
        assert torch.equal(each.grad, usual.grad)
    assert not list(folder.iterdir())


def test_a_model_larger_than_memory_begins_on_the_meta_device(folder: Path) -> None:
    def make() -> torch.nn.Sequential:
        return torch.nn.Sequential(torch.nn.Embedding(50, 64, padding_idx=1), torch.nn.Linear(64, 256),
                                   torch.nn.BatchNorm1d(256), torch.nn.Linear(256, 64))  # fmt: skip

    with torch.device("meta"):
        mine = make()
    torch.manual_seed(5)
    with swap_params(mine, folder, memory_budget=70 * KIB, min_bytes=4 * KIB):
        torch.manual_seed(5)
        other = make()
        assert equal(values(mine), values(other))
        buffers = zip(mine.buffers(), other.buffers(), strict=True)
        assert all(torch.equal(one, two) for one, two in buffers)
    with torch.device("meta"):
        mine = make()

    def twos(module: torch.nn.Module) -> None:
        for each in module.parameters(recurse=False):
            each.fill_(2)

    with swap_params(mine, folder, memory_budget=70 * KIB, min_bytes=4 * KIB, param_init_fn=twos):
        assert all(torch.equal(each, torch.full_like(each, 2)) for each in values(mine))


def test_what_cannot_be_is_refused_and_nothing_changes(folder: Path) -> None:
    model = sentences()
    before = list(model.parameters())
    with pytest.raises(ValueError, match="none of min_bytes or more"):
        swap_params(model, folder, memory_budget="1M")
    with pytest.raises(ValueError, match="the parameters are on cpu, not on cuda"):
        swap_params(model, folder, memory_budget="1M", min_bytes=1, device="cuda")
    mixed = torch.nn.ModuleList([torch.nn.Linear(9, 9), torch.nn.Linear(9, 9, device="meta")])
    with pytest.raises(ValueError, match="the parameters are on 2 devices, not on one: cpu, meta"):
        swap_params(mixed, folder, memory_budget="1M", min_bytes=1)
    bare = torch.nn.Module()
    bare.weight = torch.nn.Parameter(torch.empty(99, device="meta"))
    with pytest.raises(ValueError, match="Module is on the meta device and has no reset_parameters"):
        swap_params(bare, folder, memory_budget="1M", min_bytes=1)
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
        held = [each.lent().__enter__() for each in list(model.parameters())[:2]]
        with pytest.raises(
            MemoryError, match=r"no memory in one piece for a tensor of 16 KiB, .* others in use have 32 KiB of 40"
        ):
            model(torch.ones(1, 64))
        threading.Timer(0.1, held.clear).start()
        monkeypatch.setattr(residents.Residents, "patience", 30.0)
        model(torch.ones(1, 64))


# Failures


class Asked(IoFuture):
    """A write that has ended when it was asked whether it has so many times."""

    def __init__(self, operation: Any, times: int) -> None:
        super().__init__(operation)
        self.times = times

    def done(self) -> bool:
        self.times -= 1
        return self.times < 0 and super().done()


class Later(aio_handle):
    """Writes what a tensor was when it was asked to, and says so later."""

    times = 0

    def submit_pwrite(self, tensor: Any, *arguments: Any, **options: Any) -> Any:
        if not self.times:
            return super().submit_pwrite(tensor, *arguments, **options)
        (future := super().submit_pwrite(tensor.clone(), *arguments, **options)).result()
        return Asked(future._operation, self.times)


@pytest.mark.parametrize("times", [1, 3, 5])
def test_what_is_changed_while_it_is_written_is_written_again(folder: Path, times: int) -> None:
    """The end of a write was taken for that of the one of the last change: several threads lost theirs."""
    model, handle = layers(4), Later()
    with swap_params(model, folder, memory_budget=40 * KIB, min_bytes=1, handle=handle), torch.no_grad():
        first, *others = model.parameters()
        handle.times = times
        for value in (1.0, 2.0):
            first.fill_(value)
            others[0].fill_(value)
            handle.times = 0
        others[1].add(others[2])  # whose memory these have
        for each in (first, others[0]):
            assert torch.equal(each + 0.0, torch.full((64, 64), 2.0))


def test_a_write_that_has_failed_is_repeated_where_its_memory_is_needed(folder: Path) -> None:
    mine, other, handle = layers(), layers(), Faulty()
    with swap_params(mine, folder, memory_budget=60 * KIB, min_bytes=1, handle=handle), torch.no_grad():
        handle.will("write", "fail", {1})
        for model in (mine, other):
            for each in list(model.parameters()) * 4:
                each.add_(1)
        assert equal(values(mine), values(other))
        assert handle.met


USES: dict[str, Callable[[Any], object]] = {
    "read": lambda weight: weight + 0.0,
    "changed": lambda weight: weight.fill_(9),
    "assigned": lambda weight: setattr(weight, "data", torch.full((64, 64), 9.0)),
}


@pytest.mark.usefixtures(lost_unraisable.__name__)
@pytest.mark.parametrize("points", [6, pytest.param(150, marks=pytest.mark.slow)])
@pytest.mark.parametrize("use", USES)
def test_ctrl_c_at_any_moment_of_a_use_loses_nothing(folder: Path, use: str, points: int) -> None:
    """Neither a change that was made before, nor half of one that is made then, nor memory."""

    def attempt(moment: Interrupt) -> None:
        model: Any = layers(4)
        with swap_params(model, folder, memory_budget=32 * KIB, min_bytes=1) as swapped, torch.no_grad():
            for number, each in enumerate(model.parameters()):
                each.fill_(number)  # the last two are newer in memory than on storage
            with contextlib.suppress(KeyboardInterrupt), moment:
                USES[use](model[0].weight)
            gc.collect()
            first, *others = ({float(each.min()), float(each.max())} for each in model.parameters())
            assert first in ({0.0}, {9.0}), moment.where
            assert others == [{1.0}, {2.0}, {3.0}], moment.where
            with swapped.gathered([model[2].weight, model[3].weight]):  # which takes all the memory
                assert swapped.stats().peak_bytes <= 32 * KIB

    attempt(counted := Interrupt())
    for number in numbers("use", counted.count, points):
        attempt(Interrupt(number))
