"""save_on_nvme: what is saved, how much memory that takes, changes, failures, and others beside it.

Bits: ``test_parity.py``. Whose memory it is, and tensors of all kinds: ``test_saved_memory.py``.
"""

from __future__ import annotations

import errno
import gc
import os
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nvme_ops.base.errors import ChecksumError
from nvme_ops.offload import save_on_nvme
from nvme_ops.offload.activations import activations
from tests.conftest import MIB, in_threads, run_python
from tests.contract.faulty import Faulty
from tests.offload.training import KIB, equal, perceptron, settled

pytestmark = pytest.mark.usefixtures("few_in_flight")
MODIFIED = "modified by an inplace operation"


def sines(x: torch.Tensor, count: int) -> torch.Tensor:
    for _ in range(count):
        x = x.sin()
    return x


def gradients(model: torch.nn.Module, x: torch.Tensor, saving: Any = None) -> list[torch.Tensor]:
    """Of one step, those of the input first."""
    torch.manual_seed(5)  # of dropout
    x = x.clone().requires_grad_()
    for param in model.parameters():
        param.grad = None
    if saving is None:
        loss = model(x).square().sum()
    else:
        with saving:
            loss = model(x).square().sum()
    loss.backward()
    return [tensor.grad.clone() for tensor in (x, *model.parameters()) if tensor.grad is not None]


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
        settled(saving)
        z = z * 2 + x @ weight.t() + x.t() @ weight  # x again, which is on storage now
    assert saving.stats().bytes_saved == 3 * x.nbytes
    z.sum().backward()
    assert saving.stats().bytes_written <= 3 * x.nbytes


def test_what_the_budget_holds_is_never_written_and_the_last_is_kept(folder: Path) -> None:
    x = torch.randn(64, 1024, requires_grad=True)
    budget = 4 * x.nbytes
    saving = save_on_nvme(folder, min_bytes=1, memory_budget=budget)
    for count, written in ((4, 0), (7, 5)):  # of seven two stay, and two are on their way
        for _ in range(2):
            before = saving.stats()
            with saving:
                y = sines(x, count + 1)
            after = settled(saving)
            y.sum().backward()
            assert after.bytes_saved - before.bytes_saved == count * x.nbytes
            assert saving.stats().bytes_written - before.bytes_written == written * x.nbytes
    assert saving.stats().peak_bytes <= budget + 2 * x.nbytes, "with the layer at work"


def test_memory_is_bounded_and_reads_are_ahead(folder: Path) -> None:
    """In a second backward pass, too: what the first one has used last leaves memory meanwhile."""
    x = torch.randn(16, 1024, requires_grad=True)
    saving = save_on_nvme(folder, min_bytes=1, memory_budget=4 * x.nbytes)
    for _ in range(3):
        start = saving.stats()
        with saving:
            y = sines(x, 40)
        written = settled(saving).bytes_written - start.bytes_written
        assert written >= 33 * x.nbytes
        for retain in (True, True, False):
            before = saving.stats()
            y.sum().backward(retain_graph=retain)
            after = saving.stats()
            assert after.bytes_on_demand == 0
            assert 31 * x.nbytes < after.bytes_read - before.bytes_read <= written
    assert after.peak_bytes <= 6 * x.nbytes


def test_what_is_still_on_its_way_is_taken_from_memory_also_after_ctrl_c(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = Faulty("write", "hold")
    x = torch.randn(16, 1024, requires_grad=True)
    with save_on_nvme(folder, min_bytes=1, memory_budget=0, handle=handle) as saving:
        z = sines(x, 4)  # what was saved last is not written yet

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:  # while the write is cancelled
        patch.setattr(activations.Activations, "_hold", interrupt)
        with pytest.raises(KeyboardInterrupt):
            torch.autograd.grad(z.sum(), x, retain_graph=True)
    assert handle.under_way.is_set()
    (gradient,) = torch.autograd.grad(z.sum(), x)
    assert saving.stats().bytes_read == 0
    assert saving.stats().bytes_cancelled >= x.nbytes
    assert torch.equal(torch.autograd.grad(sines(x, 4).sum(), x)[0], gradient)
    handle.go.set()
    saving.close()
    assert not any(folder.iterdir())


# Graphs


def test_a_graph_that_is_never_run_leaks_nothing(folder: Path, no_collection: None) -> None:
    """No cycle either."""
    x = torch.randn(64, 128, requires_grad=True)
    with save_on_nvme(folder, min_bytes=1, memory_budget=100 * KIB) as saving:
        y = perceptron()(x)
    seen = weakref.ref(y)
    assert settled(saving).bytes_stored > 0
    del y
    assert seen() is None
    assert settled(saving).bytes_stored == 0
    with saving:
        loss = sines(x, 8).sum()
    gone = weakref.ref(saving)
    del saving
    assert torch.equal(*torch.autograd.grad(loss, x), *torch.autograd.grad(sines(x, 8).sum(), x))
    del loss
    assert gone() is None
    assert not any(folder.iterdir())


# Changes


@pytest.mark.parametrize(("least", "budget"), [(1, 0), (1, 16 * MIB), (MIB, 0)], ids=["written", "saved", "kept"])
def test_a_tensor_that_is_changed_after_it_was_saved(folder: Path, budget: int, least: int) -> None:
    x = torch.randn(64, 128, requires_grad=True)
    with save_on_nvme(folder, min_bytes=least, memory_budget=budget) as saving:
        y = x.exp()
        z = y.sin()
    settled(saving)
    y.add_(1)
    with pytest.raises(RuntimeError, match=MODIFIED):
        z.sum().backward()


@pytest.mark.parametrize(("size", "least"), [(4240, 1), (1 << 20, "1M")], ids=["a small part", "a copied part"])
def test_a_change_of_what_a_view_that_is_gone_was_of_is_told(folder: Path, size: int, least: Any) -> None:
    """Nothing of the view is left but its values on storage, which are those that were saved; torch raises."""
    whole = torch.randn(size, requires_grad=True).clone()
    with save_on_nvme(folder, memory_budget=0, min_bytes=least):
        loss = whole[: size // 16].abs().sum()
    with torch.no_grad():
        whole.normal_()
    with pytest.raises(RuntimeError, match=MODIFIED):
        loss.backward()


def test_what_was_changed_is_saved_again(folder: Path) -> None:
    """As is a recurrent loop's state. ``data`` changes one without a trace: what was written before is not it."""
    start, state, other = torch.randn(64, 64, requires_grad=True), torch.zeros(64, 64), torch.zeros(64, 64)
    with save_on_nvme(folder, min_bytes=1, memory_budget=0) as saving:
        first, before = start * state, start * other  # saves both
        state.add_(1)
        second = start * state
        settled(saving)
        other.add_(1)
        third = start * other.data
    for loss in (second, third):
        assert torch.equal(torch.autograd.grad(loss.sum(), start)[0], torch.ones(64, 64))
    for loss in (first, before):
        with pytest.raises(RuntimeError, match=MODIFIED):
            loss.sum().backward()


# Computed again


def test_what_is_cheap_is_computed_again_once_storage_is_waited_for(folder: Path) -> None:
    model, x, slow = perceptron(), torch.randn(128, 128), Faulty("write", "slow", seconds=0.01)
    saving = save_on_nvme(folder, min_bytes=1, memory_budget=0, policy="auto", handle=slow)
    expected, saved = gradients(model, x), list[int]()
    while len(saved) < 4 or (len(saved) < 30 and not saving.stats().bytes_recomputed):  # as it measures
        before = saving.stats().bytes_saved
        assert equal(gradients(model, x, saving), expected)
        saved.append(saving.stats().bytes_saved - before)
    assert saving.stats().bytes_recomputed > 0
    assert min(saved[1:]) < saved[0]
    before = saving.stats().bytes_recomputed
    with saving:
        y = model[1](model[0](x))
        z = model[3](y)
    y.detach().add_(1)
    with pytest.raises(RuntimeError, match=MODIFIED):
        z.sum().backward()
    assert saving.stats().bytes_recomputed == before
    weight = weakref.ref(model[0].weight)
    del model, y, z
    gc.collect()
    assert weight() is None, "no model is kept"


_LIBRARY = torch.library.Library("nvme_ops_test", "DEF")
_LIBRARY.define("negate_(Tensor x) -> ()")  # writes to what it is given, and its schema does not say so


def _negate(x: torch.Tensor) -> None:
    x.numpy()[:] *= -1


_LIBRARY.impl("negate_", _negate, "CPU")


def test_results_that_were_written_to_without_a_version(folder: Path) -> None:
    x = torch.randn(1 << 14, requires_grad=True)

    def loss() -> torch.Tensor:
        a = x.square() * 1
        y, z = a.detach() * 0.5, a.detach() * 0.25
        torch.ops.nvme_ops_test.negate_(y)
        return a.sin().sum() + (y * x + z * x).sum()

    expected = torch.autograd.grad(loss(), x)[0]
    saving = save_on_nvme(folder, min_bytes=1, memory_budget=0, policy="auto")
    choice: Any = saving._choice
    for _ in range(3):
        with saving:
            made = loss()
        assert torch.equal(torch.autograd.grad(made, x)[0], expected)
        choice._again = frozenset(choice._seconds)  # everything that can be
    assert saving.stats().bytes_recomputed > 0


# Beside others


def test_blocks_in_blocks(folder: Path) -> None:
    model, x = perceptron(), torch.randn(64, 128)
    outer, inner = (save_on_nvme(folder, min_bytes=1, memory_budget=0) for _ in range(2))
    with outer:
        y = model[:3](x)
        with inner, inner:
            y = model[3:6](y)
        loss = model[6:](y).square().sum()
    assert 0 < inner.stats().bytes_saved < outer.stats().bytes_saved
    assert equal(list(torch.autograd.grad(loss, list(model.parameters()))), gradients(model, x)[1:])


@pytest.mark.usefixtures("eager_switches")
def test_threads_that_share_it(folder: Path) -> None:
    x, models = torch.randn(64, 128), [perceptron() for _ in range(3)]
    expected = gradients(models[0], x)[1:]
    saving = save_on_nvme(folder, min_bytes=1, memory_budget=100 * KIB, policy="auto")

    def work(number: int) -> None:
        model = models[number]
        for _ in range(10):
            with saving:
                loss = model(x).square().sum()
            assert equal(list(torch.autograd.grad(loss, list(model.parameters()))), expected)

    in_threads(work, 3)
    assert settled(saving).bytes_stored == 0


def test_compiled_code_runs_as_such_and_a_compiled_step_with_its_backward(folder: Path) -> None:
    ran: list[Any] = []

    def backend(module: Any, _: Any) -> Any:
        def run(*inputs: Any) -> Any:
            ran.append(module)
            return module.forward(*inputs)

        return run

    net, x = perceptron(), torch.randn(4, 128)
    compiled = torch.compile(net, backend=backend)
    for policy in ("nvme", "auto"):
        torch._dynamo.reset()
        saving = save_on_nvme(folder, min_bytes=1, memory_budget=0, policy=policy)
        for _ in range(2):
            with saving:
                loss = compiled(x).square().sum()
            loss.backward()
    assert len(ran) == 4

    def step(x: torch.Tensor) -> None:
        with saving:
            loss = net(x).square().sum()
        loss.backward()

    net.zero_grad()
    torch.compile(step, backend="eager")(x)
    assert equal([param.grad for param in net.parameters() if param.grad is not None], gradients(net, x)[1:])


# Failures


@pytest.mark.usefixtures("no_collection")  # a program that catches the error needs its memory and space at once
def test_a_disk_that_is_full_in_forward(make_file_system: Callable[..., Path]) -> None:
    x = torch.randn(1024, 1024, requires_grad=True)
    saving = save_on_nvme(make_file_system(16 * MIB), memory_budget="8M")
    words = r"No space left on device: a tensor of 4 MiB, float32 of shape \(1024, 1024\), is to be saved .* 4 MiB.*8 M"
    with saving:
        sines(x, 1)  # the first time, torch imports its compiler, whose cycles would keep the graph
    with pytest.raises(OSError, match=words) as caught, saving:
        sines(x, 12)
    assert caught.value.errno == errno.ENOSPC
    del caught  # which has the graph
    with saving:
        loss = sines(x, 4).sum()
    assert torch.equal(*torch.autograd.grad(loss, x), *torch.autograd.grad(sines(x, 4).sum(), x))
    del loss
    saving.close()


@pytest.mark.parametrize(
    ("what", "do", "error", "word"),
    [("write", "fail", OSError, "to be saved"), ("read", "fail", OSError, "saved .* could not be read.* Input/output"),
     ("read", "flip", ChecksumError, "saved")],
)  # fmt: skip
def test_a_failure_names_the_tensor_and_leaves_nothing(
    folder: Path, what: str, do: str, error: type[OSError], word: str
) -> None:
    model, x, handle = perceptron(), torch.randn(64, 128), Faulty()
    expected = gradients(model, x)
    saving = save_on_nvme(folder, memory_budget=0, min_bytes=16 * KIB, checksums=do == "flip", handle=handle)
    handle.will(what, do)
    with pytest.raises(error, match=rf"a tensor of \d+ KiB, float32 of shape \(.*, 128\), {word}"):
        gradients(model, x, saving)
    handle.will()
    gc.collect()
    assert settled(saving).bytes_stored == 0, "the graph has gone with the exception"
    assert equal(gradients(model, x, saving), expected)


def test_reads_ahead_that_fail_and_are_not_needed_any_more_are_not_told(folder: Path, unraisable: list[Any]) -> None:
    """The first failure is raised; those of what was read ahead were printed, as of errors that nobody asked for."""
    x = torch.randn(64, 128, requires_grad=True)
    with save_on_nvme(folder, min_bytes=1, memory_budget=0, checksums=True) as saving:
        z = sines(x, 100)
        settled(saving)
        for file in next(folder.iterdir()).iterdir():
            if file.name != "owner":
                os.truncate(file, 0)
        with pytest.raises(OSError, match="saved for the backward pass"):
            z.sum().backward()
        time.sleep(0.1)  # for reads to end
        x.cos().cos()  # which looks what has ended
        del z
        gc.collect()
    assert not unraisable


def test_a_program_that_ends_with_a_graph_says_nothing_and_leaves_nothing(folder: Path) -> None:
    done = run_python(
        """
        import sys, torch
        from nvme_ops.offload import save_on_nvme
        net = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU())
        with save_on_nvme(sys.argv[1], memory_budget="1M", min_bytes=1) as saving:
            loss = net(torch.randn(512, 512)).sum()
        """,
        folder,
    )
    assert (done.stdout, done.stderr) == ("", "")
    assert list(folder.iterdir()) == []
