"""save_on_nvme beside others: torch's own tools, threads, processes, and a device that fails."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import shutil
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint_sequential

from nvme_ops import aio_handle
from nvme_ops.errors import ChecksumError
from nvme_ops.offload import save_on_nvme
from tests.conftest import MIB, in_threads
from tests.offload.saving import few_in_flight, gradients, same, settled
from tests.offload.test_optimizer import Failing
from tests.offload.training import KIB, perceptron

_ = few_in_flight  # a fixture


# Beside others of torch


def test_of_checkpointed_blocks_the_inputs_alone_are_saved(folder: Path) -> None:
    model, x = perceptron(), torch.randn(64, 128, requires_grad=True)
    with save_on_nvme(folder, min_bytes=1, memory_budget=0) as saving:
        loss = checkpoint_sequential(model, 4, x, use_reentrant=False).square().sum()
        # of the last block, which torch does not compute again, all three; and what is squared
        assert 0 < saving.stats().bytes_saved <= (2 + 3 + 1) * x.nbytes + KIB
        loss.backward()


def test_blocks_in_blocks(folder: Path) -> None:
    model, x = perceptron(), torch.randn(64, 128)
    expected = gradients(model, x)[1:]
    outer = save_on_nvme(folder, min_bytes=1, memory_budget=0)
    inner = save_on_nvme(folder, min_bytes=1, memory_budget=0)
    with outer:
        y = model[:3](x)
        with inner, inner:
            y = model[3:6](y)
        y = model[6:](y)
        loss = y.square().sum()
    assert inner.stats().bytes_saved > 0
    assert outer.stats().bytes_saved > inner.stats().bytes_saved
    assert same(list(torch.autograd.grad(loss, list(model.parameters()))), expected)


# Computed again


class Throttled(aio_handle):
    """A device that takes long: computing again is worth it."""

    def submit_pwrite(self, *arguments: Any, **options: Any) -> Any:
        time.sleep(0.01)
        return super().submit_pwrite(*arguments, **options)


def test_what_is_cheap_is_computed_again_once_storage_is_what_is_waited_for(folder: Path) -> None:
    model, x = perceptron(), torch.randn(128, 128)
    expected = gradients(model, x)
    saving = save_on_nvme(folder, min_bytes=1, memory_budget=0, policy="auto", handle=Throttled())
    saved: list[int] = []
    while len(saved) < 4 or (len(saved) < 30 and not saving.stats().bytes_recomputed):  # as it measures
        before = saving.stats().bytes_saved
        assert same(gradients(model, x, saving), expected)
        saved.append(saving.stats().bytes_saved - before)
    assert saving.stats().bytes_recomputed > 0
    assert min(saved[1:]) < saved[0]


def test_nothing_is_computed_again_where_nothing_is_waited_for(folder: Path) -> None:
    model, x = perceptron(), torch.randn(64, 128)
    saving = save_on_nvme(folder, min_bytes=1, memory_budget="64M", policy="auto")
    for _ in range(3):
        gradients(model, x, saving)
    assert saving.stats().bytes_recomputed == 0


def test_computed_again_and_changed(folder: Path) -> None:
    model, x = perceptron(), torch.randn(64, 128)
    saving = save_on_nvme(folder, min_bytes=1, memory_budget=0, policy="auto", handle=Throttled())
    for _ in range(3):
        gradients(model, x, saving)
    before = saving.stats().bytes_recomputed
    with saving:
        y = model[1](model[0](x))
        z = model[3](y)
    y.detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        z.sum().backward()
    assert saving.stats().bytes_recomputed == before


def test_no_model_is_kept(folder: Path) -> None:
    model, x = perceptron(), torch.randn(64, 128)
    saving = save_on_nvme(folder, min_bytes=1, memory_budget=0, policy="auto", handle=Throttled())
    for _ in range(3):
        gradients(model, x, saving)
    weight = weakref.ref(model[0].weight)
    del model
    gc.collect()
    assert weight() is None


_LIBRARY = torch.library.Library("nvme_ops_test", "DEF")
_LIBRARY.define("negate_(Tensor x) -> ()")  # writes to what it is given, and its schema does not say so


def _negate(x: torch.Tensor) -> None:
    x.numpy()[:] *= -1


_LIBRARY.impl("negate_", _negate, "CPU")


def _data(x: torch.Tensor) -> None:
    x.data.mul_(-1)


@pytest.mark.parametrize("change", [torch.ops.nvme_ops_test.negate_, _data], ids=["collective", "data"])
def test_results_that_were_written_to_without_a_version(folder: Path, change: Any) -> None:
    x = torch.randn(1 << 14, requires_grad=True)

    def loss() -> torch.Tensor:
        a = x.square() * 1
        y, z = a.detach() * 0.5, a.detach() * 0.25
        change(y)
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


def test_threads_that_share_it_and_compute_again(folder: Path, eager_switches: None) -> None:
    saving = save_on_nvme(folder, min_bytes=1, memory_budget="64M", policy="auto")

    def work(_: int) -> None:
        weight = torch.randn(16, 16, requires_grad=True)
        for _ in range(10):
            with saving:
                loss = torch.stack([(weight * 2).sin().sum() for _ in range(100)]).sum()
            torch.autograd.grad(loss, weight)

    in_threads(work, 4)


# Not alone


@pytest.mark.parametrize("together", [True, False])
def test_threads(folder: Path, together: bool, eager_switches: None) -> None:
    x = torch.randn(64, 128)
    models = [perceptron() for _ in range(3)]
    expected = gradients(models[0], x)
    shared = save_on_nvme(folder, min_bytes=1, memory_budget=100 * KIB)
    found: dict[int, bool] = {}

    def work(number: int) -> None:
        saving = shared if together else save_on_nvme(folder, min_bytes=1, memory_budget=100 * KIB)
        found[number] = all(same(threaded(models[number], x, saving), expected) for _ in range(10))

    def threaded(model: torch.nn.Module, x: torch.Tensor, saving: save_on_nvme) -> list[torch.Tensor]:
        x = x.clone().requires_grad_()
        with saving:
            loss = model(x).square().sum()
        return list(torch.autograd.grad(loss, [x, *model.parameters()]))

    in_threads(work, 3)
    assert found == {0: True, 1: True, 2: True}
    assert shared.stats().bytes_stored == 0


# Failures


def test_a_disk_that_is_full_in_forward(make_file_system: Callable[..., Path]) -> None:
    folder = make_file_system(16 * MIB)
    x = torch.randn(1024, 1024, requires_grad=True)
    saving = save_on_nvme(folder, memory_budget="8M")

    def compute(layers: int) -> torch.Tensor:
        y = x
        with saving:
            for _ in range(layers):
                y = y.sin()
        return y.sum()

    compute(4).backward()
    words = (
        r"No space left on device: a tensor of 4 MiB, float32 of shape \(1024, 1024\), is to be saved .* 4 MiB.*8 MiB"
    )
    with without_gc():  # a program that catches the error needs its memory and space at once
        with pytest.raises(OSError, match=words) as caught:
            compute(12)
        assert caught.value.errno == errno.ENOSPC
        del caught  # which has the graph
        x.grad = None
        compute(4).backward()
    usual = x.detach().clone().requires_grad_()
    usual.sin().sin().sin().sin().sum().backward()
    assert x.grad is not None
    assert usual.grad is not None
    assert torch.equal(x.grad, usual.grad)
    saving.close()


@pytest.mark.parametrize("error", [OSError(errno.EIO, os.strerror(errno.EIO)), KeyboardInterrupt()])
@pytest.mark.parametrize("which", ["read", "write"])
def test_a_failure_is_raised_and_the_next_step_goes_on(folder: Path, which: str, error: BaseException) -> None:
    model, x, handle = perceptron(), torch.randn(64, 128), Failing()
    expected = gradients(model, x)
    handle.error = error
    saving = save_on_nvme(folder, min_bytes=1, memory_budget=0, handle=handle)
    for number in range(5):
        handle.after[which] = 2 * number
        with contextlib.suppress(type(error)):  # what was read ahead is read again
            assert same(gradients(model, x, saving), expected)
            assert which == "read"
        handle.after[which] = -1
        assert same(gradients(model, x, saving), expected)
    error.__traceback__ = None  # which has the graphs
    gc.collect()
    assert settled(saving).bytes_stored == 0 or isinstance(error, KeyboardInterrupt), "which may leave a write behind"


def test_a_write_that_fails_on_its_way_names_the_tensor(folder: Path) -> None:
    class Broken(aio_handle):
        def submit_pwrite(self, tensor: Any, *_: Any, **options: Any) -> Any:
            return super().submit_pwrite(tensor, folder / "missing" / "file", 0, **options)

    model, x = perceptron(), torch.randn(64, 128)
    with pytest.raises(FileNotFoundError, match=r"a tensor of 32 KiB, float32 of shape \(64, 128\), to be saved"):
        gradients(model, x, save_on_nvme(folder, min_bytes=16 * KIB, memory_budget=0, handle=Broken()))
    gc.collect()
    assert not list(folder.iterdir()), "the graph has gone with the exception"
    roomy = save_on_nvme(folder, min_bytes=1, memory_budget="1M", handle=Broken())
    assert same(gradients(model, x, roomy), gradients(model, x))


def test_a_read_that_fails_names_the_tensor(folder: Path) -> None:
    class Broken(Failing):
        def submit_pread(self, *arguments: Any, **options: Any) -> Any:
            raise OSError(errno.EIO, os.strerror(errno.EIO), "slab")

    model, x = perceptron(), torch.randn(64, 128)
    with save_on_nvme(folder, min_bytes=1, memory_budget=0, handle=Broken()):
        loss = model(x).square().sum()
    with pytest.raises(OSError, match=r"a tensor of .*, float32 of shape .*, saved .* Input/output"):
        loss.backward()


def test_a_compiled_step_with_its_backward(folder: Path) -> None:
    saving = save_on_nvme(folder, min_bytes=1, memory_budget=0)
    net = perceptron()

    def step(x: torch.Tensor) -> torch.Tensor:
        with saving:
            loss = net(x).sum()
        loss.backward()
        return loss

    x = torch.randn(4, next(net.parameters()).shape[1])
    step(x)
    expected = [each.grad.clone() for each in net.parameters() if each.grad is not None]
    compiled = torch.compile(step, backend="eager")
    for _ in range(2):
        net.zero_grad()
        compiled(x)
        assert same([each.grad for each in net.parameters() if each.grad is not None], expected)


@pytest.mark.parametrize("change", ["flipped", "cut off"])
def test_a_file_that_is_damaged_is_told(folder: Path, change: str) -> None:
    x = torch.randn(64, 128, requires_grad=True)
    with save_on_nvme(folder, min_bytes=1, memory_budget=0, checksums=change == "flipped") as saving:
        z = x.exp().sin().sin().sin().sin()
    settled(saving)
    for file in next(folder.iterdir()).iterdir():
        if file.name != "owner":
            flip(file) if change == "flipped" else os.truncate(file, 0)
    with pytest.raises(
        ChecksumError if change == "flipped" else OSError,
        match=r"a tensor of 32 KiB, float32 of shape \(64, 128\), saved",
    ):
        z.sum().backward()


@pytest.mark.parametrize("checksums", [False, True])
def test_reads_ahead_that_fail_and_are_not_needed_any_more_are_not_told(
    folder: Path, checksums: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first failure is raised; those of what was read ahead were printed, as of errors that nobody asked for."""
    told: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", told.append)
    x = torch.randn(64, 128, requires_grad=True)
    with save_on_nvme(folder, min_bytes=1, memory_budget=0, checksums=checksums) as saving:
        z = x
        for _ in range(100):
            z = z.sin()
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
    assert not told


@contextlib.contextmanager
def without_gc() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def flip(file: Path) -> None:
    """Changes every page, past the page cache as well."""
    data = bytearray(file.read_bytes())
    for place in range(0, len(data), 4096):
        data[place] ^= 1
    with file.open("r+b") as opened:
        opened.write(data)
        os.fsync(opened.fileno())


def test_wrong_arguments(folder: Path) -> None:
    with pytest.raises(ValueError, match="memory_budget must be at least 0 bytes, not -1"):
        save_on_nvme(folder, memory_budget=-1)
    with pytest.raises(TypeError, match="min_bytes must be bytes"):
        save_on_nvme(folder, min_bytes=None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="handle must be an aio_handle"):
        save_on_nvme(folder, handle=3)  # type: ignore[arg-type]
    saving = save_on_nvme(folder, min_bytes="0M", memory_budget="0")  # a budget of nothing is a size
    saving.close()
    x = torch.randn(64, 128, requires_grad=True)
    with pytest.raises(ValueError, match="was closed"), saving:
        x.exp()


def test_a_folder_that_was_removed(folder: Path) -> None:
    """What is written stays readable; a folder for the next file is missed at once."""
    model, x = perceptron(), torch.randn(64, 128)
    expected = gradients(model, x)
    saving = save_on_nvme(folder, min_bytes=1, memory_budget=0)
    assert same(gradients(model, x, saving), expected)
    shutil.rmtree(folder)
    assert same(gradients(model, x, saving), expected)
    saving.close()
