"""save_on_nvme: what is saved, how much memory that takes, and what is changed meanwhile. Bits: ``test_parity.py``."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch

from nvme_ops.offload import save_on_nvme
from nvme_ops.offload.activations import activations
from tests.conftest import MIB
from tests.contract.faulty import Faulty
from tests.offload.saving import few_in_flight, gradients, same, settled
from tests.offload.training import KIB, perceptron

_ = few_in_flight  # a fixture


# What is saved


def test_a_storage_is_written_once_and_parameters_never(folder: Path) -> None:
    weight = torch.nn.Parameter(torch.randn(128, 128))
    frozen = torch.nn.Parameter(torch.randn(128, 128), requires_grad=False)
    x = torch.randn(128, 128)
    with save_on_nvme(folder, min_bytes=1, memory_budget=0) as saving:
        y = x @ weight.t() @ frozen.t()  # saves x and, beside parameters, nothing for frozen
        y = y * weight[:1]
        assert saving.stats().bytes_saved == 2 * x.nbytes
        z = y.exp()
        z = z * z + z.view(-1).sin().view(z.shape) + z.t() @ z  # z several times
        z = z * 2
    assert saving.stats().bytes_saved == 3 * x.nbytes
    z.sum().backward()
    assert saving.stats().bytes_written <= 3 * x.nbytes


def test_parts_of_one_storage_are_written_once_and_small_parts_alone(folder: Path) -> None:
    x = torch.randn(96, 1024, requires_grad=True)
    with save_on_nvme(folder, min_bytes=1, memory_budget=0) as saving:
        y = x * 1
        y = y.clone()
        parts = [each.exp() for each in y.chunk(3)]
        assert saving.stats().bytes_saved == y.nbytes
        one = y[7].square()
    assert saving.stats().bytes_saved == y.nbytes + y[7].nbytes
    (sum(each.sum() for each in parts) + one.sum()).backward()
    assert x.grad is not None
    usual = torch.autograd.grad(sum(each.exp().sum() for each in x.chunk(3)) + x[7].square().sum(), x)
    assert torch.equal(x.grad, usual[0])


def test_what_the_budget_holds_is_never_written_and_the_last_is_kept(folder: Path) -> None:
    x = torch.randn(64, 1024, requires_grad=True)
    budget = 4 * x.nbytes
    saving = save_on_nvme(folder, min_bytes=1, memory_budget=budget)
    for count, written in ((4, 0), (7, 3)):
        for _ in range(2):
            before = saving.stats()
            with saving:
                y = x
                for _ in range(count + 1):
                    y = y.sin()
            after = settled(saving)
            y.sum().backward()
            assert after.bytes_saved - before.bytes_saved == count * x.nbytes
            assert saving.stats().bytes_written - before.bytes_written == written * x.nbytes
    assert saving.stats().peak_bytes <= budget + activations._IN_FLIGHT + 2 * x.nbytes, "with the layer at work"


def test_memory_is_bounded_and_reads_are_ahead(folder: Path) -> None:
    x = torch.randn(16, 1024, requires_grad=True)
    saving = save_on_nvme(folder, min_bytes=1, memory_budget=4 * x.nbytes)
    for _ in range(3):
        before = saving.stats()
        with saving:
            y = x
            for _ in range(40):
                y = y.sin()
        settled(saving)
        y.sum().backward()
        after = saving.stats()
        assert after.bytes_on_demand - before.bytes_on_demand == 0
        assert after.bytes_read - before.bytes_read == after.bytes_written - before.bytes_written >= 33 * x.nbytes
    assert after.peak_bytes <= 6 * x.nbytes + activations._IN_FLIGHT


def test_what_is_still_on_its_way_is_taken_from_memory(folder: Path) -> None:
    handle = Faulty("write", "hold")
    x = torch.randn(16, 1024, requires_grad=True)
    with save_on_nvme(folder, min_bytes=1, memory_budget=0, handle=handle) as saving:
        y = x.sin()
        z = y.sin().sin().sin()  # what was saved last is not written yet
    assert handle.under_way.is_set()
    z.sum().backward()
    stats = saving.stats()
    assert stats.bytes_cancelled == x.nbytes
    assert stats.bytes_read == 0
    assert torch.equal(torch.autograd.grad(x.sin().sin().sin().sin().sum(), x)[0], x.grad if x.grad is not None else x)
    handle.go.set()
    saving.close()
    assert not any(folder.iterdir())


def test_what_shares_memory_without_a_version_is_not_taken_for_the_same(folder: Path) -> None:
    """``data`` changes a tensor without a trace: what was written before that is not what is saved after it."""
    start, x = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64)
    with save_on_nvme(folder, min_bytes=1, memory_budget=0) as saving:
        first = start * x
        settled(saving)
        x.add_(1)
        second = start * x.data
    (found,) = torch.autograd.grad(second.sum(), start)
    assert torch.equal(found, x)
    del first


# Graphs


def test_a_graph_that_is_never_run_leaks_nothing(folder: Path) -> None:
    model, x = perceptron(), torch.randn(64, 128)
    gc.disable()  # no cycle either
    try:
        with save_on_nvme(folder, min_bytes=1, memory_budget=100 * KIB) as saving:
            y = model[0](x)
            output = model[1:](y)
        seen = [weakref.ref(y), weakref.ref(output)]
        assert settled(saving).bytes_stored > 0
        del y, output
        assert [each() for each in seen] == [None, None]
        assert settled(saving).bytes_stored == 0
        gone = weakref.ref(saving)
        del saving
        assert gone() is None
        assert not any(folder.iterdir())
    finally:
        gc.enable()


def test_the_graph_keeps_the_files(folder: Path) -> None:
    model, x = perceptron(), torch.randn(64, 128)
    expected = gradients(model, x)[1:]
    with save_on_nvme(folder, min_bytes=1, memory_budget=0):
        loss = model(x).square().sum()
    gc.collect()
    assert same(list(torch.autograd.grad(loss, list(model.parameters()))), expected)
    del loss
    gc.collect()
    assert not any(folder.iterdir())


# Changes


@pytest.mark.parametrize("least", [1, MIB], ids=["saved", "kept"])
@pytest.mark.parametrize("budget", [0, 16 * MIB])
@pytest.mark.parametrize("when", ["at once", "after the write"])
def test_a_tensor_that_is_changed_after_it_was_saved(folder: Path, budget: int, least: int, when: str) -> None:
    x = torch.randn(64, 128, requires_grad=True)
    saving = save_on_nvme(folder, min_bytes=least, memory_budget=budget)
    with saving:
        y = x.exp()
        z = y.sin()
    if when == "after the write":
        settled(saving)
    y.add_(1)
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
        z.sum().backward()


@pytest.mark.parametrize("size", [4240, 1 << 20], ids=["a small part", "a large part"])
def test_a_change_of_what_a_view_that_is_gone_was_of_is_told(folder: Path, size: int) -> None:
    """Nothing of the view is left but its values on storage, which are those that were saved; torch raises."""
    whole = torch.randn(size, requires_grad=True).clone()
    with save_on_nvme(folder, memory_budget=0, min_bytes=1):
        loss = whole[: size // 16].abs().sum()
    with torch.no_grad():
        whole.normal_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_change_before_it_is_saved_again(folder: Path) -> None:
    """The buffer of a recurrent loop is saved in each of its states by operations that do not need the others."""
    start = torch.randn(64, 64, requires_grad=True)
    state = torch.zeros(64, 64)
    with save_on_nvme(folder, min_bytes=1, memory_budget=0):
        first = start * state  # saves state
        state.add_(1)
        second = start * state
    (found,) = torch.autograd.grad(second.sum(), start)
    assert torch.equal(found, state)
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        first.sum().backward()
