"""NvmeOptimizer: the bits of torch's own optimizers, states that are whole whatever happens, clear errors."""

from __future__ import annotations

import contextlib
import errno
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nvme_ops import aio_handle
from nvme_ops.errors import ChecksumError
from nvme_ops.offload import NvmeOptimizer
from nvme_ops.offload.optimizer.chunks import ELEMENTWISE, MASTER
from tests.conftest import MIB, in_child, run_python
from tests.offload.training import backward, equal, network, values

STEPS = 20
CASES: list[tuple[str, dict[str, Any]]] = [
    (name, {}) for name in ELEMENTWISE
] + [
    ("AdamW", {"fused": True}), ("AdamW", {"foreach": True}), ("AdamW", {"amsgrad": True}),
    ("Adam", {"maximize": True}),
    ("SGD", {"momentum": 0.9}), ("SGD", {"momentum": 0.9, "nesterov": True}), ("SGD", {"fused": True, "momentum": 0.5}),
    ("RMSprop", {"momentum": 0.9, "centered": True}), ("Adagrad", {"initial_accumulator_value": 0.5}),
    ("AdamW", {"lr": torch.tensor(0.01)}),
]  # fmt: skip


def same_states(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Whether the second one has the states of the first, of all parameters that had a gradient."""
    assert second["state"].keys() == {number for number in first["state"] if number >= 2}  # Adagrad has all at once
    return all(
        torch.equal(torch.as_tensor(first["state"][number][name]), torch.as_tensor(value))
        for number, states in second["state"].items()
        for name, value in states.items()
        if value is not None
    )


@pytest.mark.parametrize(("name", "options"), CASES, ids=[f"{name}-{'-'.join(kw)}" for name, kw in CASES])
def test_the_bits_are_those_of_the_optimizer_itself(folder: Path, name: str, options: dict[str, Any]) -> None:
    mine, other = network(), network()
    kind = getattr(torch.optim, name)
    plain = kind(other.parameters(), **options)
    with NvmeOptimizer(mine.parameters(), kind, folder, memory_budget="1M", **options) as optimizer:
        for step in range(STEPS):
            for model, each in ((mine, optimizer), (other, plain)):
                backward(model, step)
                each.step()
        assert equal(values(mine), values(other))
        assert same_states(plain.state_dict(), optimizer.state_dict())
        assert optimizer.steps == STEPS
        assert optimizer.stats().peak_bytes <= MIB
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Adagrad"])
def test_bfloat16_with_master_weights(folder: Path, name: str) -> None:
    """As by hand: a float32 copy is updated with the gradients in float32, and copied to the parameter."""
    mine, other = network(torch.bfloat16), network(torch.bfloat16)
    kind: Any = getattr(torch.optim, name)
    options: dict[str, Any] = {"lr": 0.01}
    masters = [each.detach().float().requires_grad_() for each in other.parameters()]
    plain = kind(masters, **options)
    with NvmeOptimizer(mine.parameters(), kind, folder, memory_budget="1M", **options) as optimizer:
        for step in range(STEPS):
            backward(mine, step)
            optimizer.step()
            backward(other, step)
            for master, parameter in zip(masters, other.parameters(), strict=True):
                master.grad = None if parameter.grad is None else parameter.grad.float()
            plain.step()
            with torch.no_grad():
                for master, parameter in zip(masters, other.parameters(), strict=True):
                    parameter.copy_(master)
        assert equal(values(mine), values(other))
        found = optimizer.state_dict()["state"]
        assert all(torch.equal(states[MASTER], masters[number]) for number, states in found.items())


def test_bfloat16_without_master_weights(folder: Path) -> None:
    mine, other = network(torch.bfloat16), network(torch.bfloat16)
    plain = torch.optim.AdamW(other.parameters())
    with NvmeOptimizer(
        mine.parameters(), torch.optim.AdamW, folder, memory_budget="1M", master_weights=False
    ) as optimizer:
        for step in range(STEPS):
            for model, each in ((mine, optimizer), (other, plain)):
                backward(model, step)
                each.step()
        assert equal(values(mine), values(other))


def test_groups_schedulers_clipping_and_a_closure(folder: Path) -> None:
    """Options differ by group and change between steps; a group comes later."""

    def train(make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer]) -> list[torch.Tensor]:
        model = network()
        parameters = list(model.parameters())
        optimizer = make([{"params": parameters[:2], "lr": 0.1}, {"params": parameters[2:5], "amsgrad": True}])
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        for step in range(8):
            if step == 3:
                optimizer.add_param_group({"params": parameters[5:], "weight_decay": 0.0})

            def closure(step: int = step) -> float:
                backward(model, step)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                return 7.0

            assert optimizer.step(closure) == 7.0
            scheduler.step()
        return values(model)

    expected = train(torch.optim.AdamW)
    assert equal(train(lambda groups: NvmeOptimizer(groups, torch.optim.AdamW, folder, memory_budget="1M")), expected)


def test_a_grad_scaler_skips_what_is_not_finite(folder: Path) -> None:
    model = network()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with NvmeOptimizer(model.parameters(), torch.optim.AdamW, folder, memory_budget="1M") as optimizer:
        before = values(model)
        backward(model, 0)
        weight: Any = model[0].weight
        weight.grad[0, 0] = float("inf")
        scaler.scale(torch.zeros(1))  # which makes it begin
        scaler.step(optimizer)
        scaler.update()
        assert optimizer.steps == 0
        assert equal(values(model), before)
        backward(model, 0)
        scaler.step(optimizer)
        assert optimizer.steps == 1


def test_parameters_without_a_gradient_for_some_steps(folder: Path) -> None:
    def train(make: Callable[..., torch.optim.Optimizer]) -> list[torch.Tensor]:
        model = network()
        optimizer = make(torch.optim.AdamW, model.parameters())
        for step in range(6):
            backward(model, step)
            for number, each in enumerate(model.parameters()):
                if (number + step) % 3 == 0:
                    each.grad = None
            optimizer.step()
        return values(model)

    mine = train(lambda kind, parameters: NvmeOptimizer(parameters, kind, folder, memory_budget="1M"))
    assert equal(mine, train(lambda kind, parameters: kind(parameters)))


def test_nan_is_an_update_like_any(folder: Path) -> None:
    model = network()
    with NvmeOptimizer(model.parameters(), torch.optim.SGD, folder, momentum=0.9) as optimizer:
        backward(model, 0)
        weight: Any = model[0].weight
        weight.grad.fill_(float("nan"))
        optimizer.step()
    assert weight.isnan().all()


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
    for kind in (torch.optim.LBFGS, torch.optim.SparseAdam, torch.optim.Adafactor):
        with pytest.raises(TypeError, match=f"{kind.__name__} is not one of torch.optim's elementwise optimizers: Ada"):
            NvmeOptimizer(parameters, kind, folder)
    made: Any = torch.optim.AdamW(parameters)
    with pytest.raises(TypeError, match=r"not its class: NvmeOptimizer\(params, torch.optim.AdamW, folder"):
        NvmeOptimizer(parameters, made, folder)
    with pytest.raises(ValueError, match="memory_budget must be at least 1 MiB, not 4 KiB"):
        NvmeOptimizer(parameters, torch.optim.AdamW, folder, memory_budget=4096)
    with pytest.raises(ValueError, match="'lots' is not a size"):
        NvmeOptimizer(parameters, torch.optim.AdamW, folder, memory_budget="lots")
    with pytest.raises(ValueError, match="empty parameter list"):
        NvmeOptimizer([], torch.optim.AdamW, folder)
    with pytest.raises(ValueError, match="gaps"):
        NvmeOptimizer([torch.nn.Parameter(torch.zeros(4, 8)[:, ::2])], torch.optim.AdamW, folder)
    with pytest.raises(ValueError, match="Invalid learning rate"):
        NvmeOptimizer(parameters, torch.optim.AdamW, folder, lr=-1.0)
    with pytest.raises(FileNotFoundError):
        NvmeOptimizer(parameters, torch.optim.AdamW, folder / "none" / "below")
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


def test_a_forked_child_cannot_step(folder: Path) -> None:
    model = network()
    with NvmeOptimizer(model.parameters(), torch.optim.AdamW, folder, memory_budget="1M") as optimizer:
        backward(model, 0)
        optimizer.step()

        def child() -> None:
            with pytest.raises(RuntimeError, match="parent"):
                optimizer.step()

        in_child(child)
        optimizer.step()


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
@pytest.mark.parametrize("number", [0, 1, 3])
@pytest.mark.parametrize(
    "error", [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt()], ids=["EIO", "Ctrl-C"]
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


def test_after_a_failed_step_other_gradients_are_a_step_for_all(folder: Path) -> None:
    mine, handle = network(), Failing()
    with NvmeOptimizer(mine.parameters(), torch.optim.SGD, folder, momentum=0.9, memory_budget="1M",
                       handle=handle) as optimizer:  # fmt: skip
        backward(mine, 0)
        optimizer.step()
        backward(mine, 1)
        handle.after["write"] = 2
        with pytest.raises(OSError, match="Input/output error"):
            optimizer.step()
        backward(mine, 2)
        before = values(mine)
        optimizer.step()
        changed = [not torch.equal(one, other) for one, other in zip(before, values(mine), strict=True)]
        assert changed == [each.grad is not None and each.numel() > 0 for each in mine.parameters()]


def test_after_a_failed_step_gradients_changed_in_place_are_others(folder: Path) -> None:
    """So that no chunk keeps what the first attempt has made of it alone."""
    mine, handle = network(), Failing()
    with NvmeOptimizer(mine.parameters(), torch.optim.SGD, folder, momentum=0.9, memory_budget="1M",
                       handle=handle) as optimizer:  # fmt: skip
        backward(mine, 0)
        optimizer.step()
        handle.after["write"] = 2
        with pytest.raises(OSError, match="Input/output error"):
            optimizer.step()
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


def test_a_full_disk(folder: Path, make_file_system: Callable[..., Path]) -> None:
    """Nothing is lost: with more room the step goes on."""
    place = make_file_system(64 * MIB)
    model, other = torch.nn.Linear(1000, 1000), torch.nn.Linear(1000, 1000)
    other.load_state_dict(model.state_dict())
    plain = torch.optim.AdamW(other.parameters())
    with NvmeOptimizer(model.parameters(), torch.optim.AdamW, place, memory_budget="1M") as optimizer:
        for step in range(3):
            for each in (model, other):
                each.zero_grad()
                each(torch.full((1, 1000), step + 1.0)).sum().backward()
            plain.step()
            if step == 1:
                fill_up(place / "ballast")
                with pytest.raises(OSError, match="making room for") as caught:
                    optimizer.step()
                assert caught.value.errno == errno.ENOSPC
                (place / "ballast").unlink()
            optimizer.step()
        assert equal(values(model), values(other))


def fill_up(path: Path) -> None:
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass


def test_a_flipped_bit_is_told(folder: Path) -> None:
    model = network()
    with NvmeOptimizer(model.parameters(), torch.optim.AdamW, folder, memory_budget="1M", checksums=True) as optimizer:
        backward(model, 0)
        optimizer.step()
        slab = max(next(folder.iterdir()).iterdir(), key=lambda path: path.stat().st_size)
        with slab.open("r+b") as file:
            file.seek(100)
            file.write(b"\xff" * 8)
        before = values(model)
        with pytest.raises(ChecksumError, match="0/0"):
            optimizer.step()
        assert equal(values(model), before)


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
