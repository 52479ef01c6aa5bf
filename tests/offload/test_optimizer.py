"""NvmeOptimizer: state dicts, clear errors, and states that are whole whatever fails. Its bits: ``test_parity.py``."""

from __future__ import annotations

import contextlib
import errno
import io
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from nvme_ops import aio_handle
from nvme_ops.offload import NvmeOptimizer
from tests.conftest import run_python
from tests.offload.training import backward, equal, network, values


@pytest.mark.parametrize("source", ["nvme", "torch"])
@pytest.mark.parametrize("target", ["nvme", "torch"])
def test_state_dicts_go_from_one_to_the_other(folder: Path, source: str, target: str) -> None:
    def make(which: str, model: torch.nn.Module) -> torch.optim.Optimizer:
        if which == "nvme":
            return NvmeOptimizer(model.parameters(), torch.optim.AdamW, folder, memory_budget="1M", lr=0.01)
        return torch.optim.AdamW(model.parameters(), lr=0.01)

    first = network()
    optimizer = make(source, first)
    for step in range(3):
        backward(first, step)
        optimizer.step()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    second = network()
    second.load_state_dict(first.state_dict())
    other = make(target, second)
    backward(second, 9)
    second.load_state_dict(first.state_dict())
    other.load_state_dict(torch.load(file))
    for step in range(3, 6):
        for model, each in ((first, optimizer), (second, other)):
            backward(model, step)
            each.step()
    assert equal(values(first), values(second))


def test_a_state_dict_does_not_change_with_later_steps(folder: Path) -> None:
    model = network()
    optimizer = NvmeOptimizer(model.parameters(), torch.optim.AdamW, folder)
    assert optimizer.state_dict()["state"] == {}
    backward(model, 0)
    optimizer.step()
    found = optimizer.state_dict()
    before = found["state"][2]["exp_avg"].clone()
    backward(model, 1)
    optimizer.step()
    optimizer.close()
    assert torch.equal(found["state"][2]["exp_avg"], before)
    found["state"][2]["exp_avg"].zero_()  # it is the program's own


def test_state_dicts_that_do_not_fit_are_refused(folder: Path) -> None:
    model = network()
    optimizer = NvmeOptimizer(model.parameters(), torch.optim.AdamW, folder)
    backward(model, 0)
    optimizer.step()
    found = optimizer.state_dict()
    kept = found["state"][2].pop("exp_avg")
    with pytest.raises(ValueError, match="no 'exp_avg' of a parameter of shape"):
        optimizer.load_state_dict(found)
    found["state"][2]["exp_avg"] = kept[:5]
    with pytest.raises(ValueError, match=r"'exp_avg' of shape \(5, 30\) is for a parameter of shape \(401, 30\)"):
        optimizer.load_state_dict(found)
    found["param_groups"][0]["params"].pop()
    with pytest.raises(ValueError, match="group"):
        optimizer.load_state_dict(found)


def test_what_cannot_be_is_refused(folder: Path) -> None:
    model = network()
    parameters = list(model.parameters())
    for kind in (torch.optim.SparseAdam, torch.optim.Adafactor):
        with pytest.raises(TypeError, match=f"{kind.__name__} is not one of torch.optim's elementwise optimizers: Ada"):
            NvmeOptimizer(parameters, kind, folder)
    with pytest.raises(ValueError, match="gaps"):
        NvmeOptimizer([torch.nn.Parameter(torch.zeros(4, 8)[:, ::2])], torch.optim.AdamW, folder)
    with pytest.raises(ValueError, match="Invalid learning rate"):
        NvmeOptimizer(parameters, torch.optim.AdamW, folder, lr=-1.0)
    assert list(folder.iterdir()) == []


def test_sparse_gradients_are_refused_and_nothing_changes(folder: Path) -> None:
    table = torch.nn.Embedding(10, 4, sparse=True)
    dense = torch.nn.Parameter(torch.ones(3))
    before = table.weight.detach().clone()
    with NvmeOptimizer([dense, table.weight], torch.optim.SGD, folder) as optimizer:
        (table(torch.tensor([1, 2])).sum() + dense.sum()).backward()
        with pytest.raises(RuntimeError, match="NvmeOptimizer does not support sparse gradients"):
            optimizer.step()
        assert torch.equal(table.weight, before)
        assert torch.equal(dense, torch.ones(3))


def test_after_close(folder: Path) -> None:
    model = network()
    optimizer = NvmeOptimizer(model.parameters(), torch.optim.AdamW, folder)
    optimizer.close()
    optimizer.close()
    for call in (optimizer.step, optimizer.state_dict):
        with pytest.raises(ValueError, match="is closed"):
            call()


# Failures


class Failing(aio_handle):
    """Fails the writes or reads from the given one on, as often as it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.after = {"read": -1, "write": -1}
        self.error: BaseException = OSError(errno.EIO, os.strerror(errno.EIO))

    def _count(self, which: str) -> None:
        if self.after[which] == 0:
            self.after[which] = -1
            raise self.error
        self.after[which] -= self.after[which] > 0

    def submit_pread(self, *arguments: Any, **options: Any) -> Any:
        self._count("read")
        return super().submit_pread(*arguments, **options)

    def submit_pwrite(self, *arguments: Any, **options: Any) -> Any:
        self._count("write")
        return super().submit_pwrite(*arguments, **options)


@pytest.mark.parametrize("which", ["read", "write"])
@pytest.mark.parametrize(
    ("number", "error"),
    [(0, KeyboardInterrupt()), (1, OSError(errno.EIO, "Input/output error")), (3, KeyboardInterrupt())],
)
def test_a_step_that_fails_goes_on_when_it_is_called_again(
    folder: Path, which: str, number: int, error: BaseException
) -> None:
    mine, other = network(), network()
    plain = torch.optim.AdamW(other.parameters())
    handle = Failing()
    handle.error = error
    with NvmeOptimizer(mine.parameters(), torch.optim.AdamW, folder, memory_budget="1M", handle=handle) as optimizer:
        for step in range(4):
            backward(mine, step)
            backward(other, step)
            plain.step()
            if step == 2:
                handle.after[which] = number
                with pytest.raises(type(error)) as caught:
                    optimizer.step()
                assert "step 3 of NvmeOptimizer: " in caught.value.__notes__[0]
                assert optimizer.steps == 2
            optimizer.step()
        assert equal(values(mine), values(other))


@pytest.mark.parametrize("how", ["anew", "in place"])
def test_after_a_failed_step_other_gradients_are_a_step_for_all(folder: Path, how: str) -> None:
    """So that no chunk keeps what the first attempt has made of it alone."""
    mine, handle = network(), Failing()
    with NvmeOptimizer(mine.parameters(), torch.optim.SGD, folder, momentum=0.9, memory_budget="1M",
                       handle=handle) as optimizer:  # fmt: skip
        backward(mine, 0)
        optimizer.step()
        backward(mine, 1)
        handle.after["write"] = 2
        with pytest.raises(OSError, match="Input/output error"):
            optimizer.step()
        if how == "anew":
            backward(mine, 2)
        before = values(mine)
        for each in mine.parameters():
            if each.grad is not None:
                each.grad.mul_(2)
        optimizer.step()
        changed = [not torch.equal(one, other) for one, other in zip(before, values(mine), strict=True)]
        assert changed == [each.grad is not None and each.numel() > 0 for each in mine.parameters()]


def test_gradients_that_the_optimizer_changes_are_those_of_the_next_attempt(folder: Path) -> None:
    options: dict[str, Any] = {"momentum": 0.9, "nesterov": True, "foreach": True, "lr": 0.1}
    mine, other, handle = network(), network(), Failing()
    plain = torch.optim.SGD(other.parameters(), **options)
    with NvmeOptimizer(
        mine.parameters(), torch.optim.SGD, folder, memory_budget="1M", handle=handle, **options
    ) as optimizer:
        for step in range(3):
            backward(mine, step)
            backward(other, step)
            plain.step()
            if step == 1:
                handle.after["write"] = 2
                with pytest.raises(OSError, match="Input/output error"):
                    optimizer.step()
            optimizer.step()
        assert equal(values(mine), values(other))


@pytest.mark.parametrize("which", ["read", "write"])
@pytest.mark.parametrize("number", [0, 2])
def test_a_load_that_fails_leaves_the_old_states(folder: Path, which: str, number: int) -> None:
    mine, other, handle = network(), network(), Failing()
    plain = torch.optim.AdamW(other.parameters())
    with NvmeOptimizer(mine.parameters(), torch.optim.AdamW, folder, memory_budget="1M", handle=handle) as optimizer:
        for step in range(3):
            if step == 2:
                found = optimizer.state_dict()
                found["param_groups"][0]["lr"] = 7.0
                handle.after[which] = number
                with contextlib.suppress(OSError):
                    optimizer.load_state_dict(found)
                handle.after[which] = -1
                if which == "write":
                    assert optimizer.param_groups[0]["lr"] == 0.001
                optimizer.param_groups[0]["lr"] = 0.001
            for model, each in ((mine, optimizer), (other, plain)):
                backward(model, step)
                each.step()
        assert equal(values(mine), values(other))


def fill_up(path: Path) -> None:
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass


def test_memory_stays_within_the_budget_however_many_chunks_there_are(folder: Path) -> None:
    result = run_python(
        """
        import sys
        import torch
        from nvme_ops.offload import NvmeOptimizer

        def peak(name):
            return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name)) / 1024

        parameters = [torch.nn.Parameter(torch.zeros(1024, 1024)) for _ in range(16)]
        for each in parameters:
            each.grad = torch.ones_like(each)
        small = torch.nn.Parameter(torch.zeros(1000))
        with NvmeOptimizer([small], torch.optim.AdamW, sys.argv[1], memory_budget="4M", fused=True) as warm:
            small.grad = torch.zeros(1000)
            warm.step()
        with NvmeOptimizer(parameters, torch.optim.AdamW, sys.argv[1], memory_budget="4M", fused=True) as optimizer:
            open("/proc/self/clear_refs", "w").write("5")
            before = peak("VmRSS")
            for _ in range(2):
                optimizer.step()
        print(peak("VmHWM") - before)
        """,
        folder,
    )
    assert float(result.stdout) <= 4 + 16
