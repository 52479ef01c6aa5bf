"""Programs of test_saved_on_host.py that train on the simulated device."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from nvme_ops.base.text import parse_size
from nvme_ops.offload import Memory, NvmeOptimizer, save_on_nvme, swap_gradients, swap_params
from tests.conftest import in_threads
from tests.doubles import private_device
from tests.offload.training import Twins, equal, make_small_chunks, states


def network() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(part for _ in range(6) for part in (torch.nn.Linear(256, 256), torch.nn.GELU())))


def gradient_of(param: torch.nn.Parameter) -> torch.Tensor:
    assert param.grad is not None
    return param.grad


def gradients(folder: str, host_budget: str, seeds: str) -> None:
    """They are those of torch whatever the order of work, and storage is used for what has no room."""
    device, given = private_device(), torch.linspace(-1, 1, 256).repeat(256, 1)
    usual, there = network(), device.tensor(given)
    usual(given).sum().backward()
    for seed in range(int(seeds)):
        with device.left_as_found(), device.computing(), device.in_random_order(seed):
            model = network().to(device.device())
            saving = save_on_nvme(folder, device_budget="1M", host_budget=host_budget, min_bytes="64K")
            for _ in range(3):
                model.zero_grad()
                with saving:
                    loss = model(there).sum()
                loss.backward()
            stats = saving.stats()
            for param, wanted in zip(model.parameters(), usual.parameters(), strict=True):
                assert torch.equal(gradient_of(param).cpu(), gradient_of(wanted)), seed
            saving.close()
            del loss, model, param, saving
        assert (stats.bytes_written == 0) == (host_budget == "64M")
        assert (stats.bytes_from_host > 0) == (host_budget != "0")
        assert stats.bytes_in_host <= parse_size(host_budget, zero=True)


def dropped(folder: str) -> None:
    """What the accelerator has not copied yet keeps its memory when a graph goes, with or without a backward pass."""
    device = private_device()
    there = device.tensor(torch.ones(256, 256))
    with device.left_as_found(), device.computing():
        model = network().to(device.device())
        saving = save_on_nvme(folder, device_budget=0, host_budget="64M", min_bytes="64K")
        for _ in range(2):
            with saving:
                loss = model(there).sum()
            del loss
        with saving:
            loss = model(there).sum()
        torch.autograd.grad(loss, next(model[-2].parameters()))
        del loss
        saving.close()
        del model, saving


def without_memory(folder: str, host_budget: str) -> None:
    """A step for which the accelerator has no memory at some point ends by torch's error; the next one is right."""
    device, given = private_device(), torch.linspace(-1, 1, 256).repeat(256, 1)
    usual, model, there, kept, done = network(), network().to(device.device()), device.tensor(given), list[Any](), 0
    usual(given).sum().backward()
    saving = save_on_nvme(folder, device_budget="1M", host_budget=host_budget, min_bytes="64K")

    def step() -> None:
        model.zero_grad()
        with saving:
            loss = model(there).sum()
        loss.backward()
        for param, wanted in zip(model.parameters(), usual.parameters(), strict=True):
            assert torch.equal(gradient_of(param).cpu(), gradient_of(wanted))

    with device.computing():
        step()
        before = device.now.allocations.made
        step()
        for place in range(device.now.allocations.made - before):
            for failing in (1, -1):
                try:
                    with device.failing("allocation", place, failing):
                        step()
                    done += failing == 1
                except torch.cuda.OutOfMemoryError as error:
                    kept = [error]
                step()
                assert saving.stats().peak_bytes <= 2 << 20
    assert done, "what was unused has left"
    assert kept
    saving.close()


def evicted(folder: str) -> None:
    """What another thread evicts as it arrives is read again; it was taken for modified."""
    device = private_device()
    model, there = network().to(device.device()), device.tensor(torch.ones(256, 256))
    model(there).sum().backward()
    wanted = [gradient_of(param) for param in model.parameters()]
    saving, gone = save_on_nvme(folder, device_budget=0, host_budget=0, min_bytes="64K"), list[Any]()
    inside: Any = saving._activations
    await_arrival = inside._residency.await_arrival

    def evict_first(policy: Any, unit: Any, arrival: Any, begun: bool) -> bool:
        arrival.result()
        if not gone:
            gone.append(unit.describe())
            with inside.lock:
                inside.discard(unit)
        return await_arrival(policy, unit, arrival, begun)

    inside._residency.await_arrival = evict_first
    model.zero_grad()
    with saving:
        loss = model(there).sum()
    loss.backward()
    assert gone
    assert all(map(torch.equal, map(gradient_of, model.parameters()), wanted))
    saving.close()


def stepped(folder: str, seeds: str) -> None:
    """Parameters and states are those of torch's optimizer on the same device, whatever the order of work."""
    make_small_chunks()
    device = private_device()
    for seed in range(int(seeds)):
        with device.left_as_found(), device.computing(), device.in_random_order(seed):
            step_on(device.device(), folder)


def step_on(device: torch.device, folder: str) -> None:
    """Compares steps with about half of the states in host memory."""
    torch.manual_seed(0)
    usual, there = ([torch.zeros(300, 300, device=device, requires_grad=True) for _ in range(4)] for _ in range(2))
    plain = torch.optim.AdamW(usual)
    with NvmeOptimizer(there, torch.optim.AdamW, folder, host_budget="3M") as ours:
        for _ in range(3):
            for one, other in zip(usual, there, strict=True):
                one.grad = other.grad = torch.randn(300, 300).to(device)
            plain.step()
            ours.step()
        stats = ours.stats()
        assert stats.bytes_read == 2 * (stats.bytes_stored // 2)
        assert stats.bytes_written == 3 * (stats.bytes_stored // 2)
        assert 1 << 20 < stats.bytes_in_host < stats.bytes_stored
        require_same(ours, there, plain, usual)


def require_same(ours: Any, there: Iterable[torch.Tensor], plain: Any, usual: Iterable[torch.Tensor]) -> None:
    """Compares the bits of parameters and states."""
    for mine, wanted in zip([*there, *states(ours)], [*usual, *states(plain)], strict=True):
        assert mine.cpu().equal(wanted.cpu()) if isinstance(wanted, torch.Tensor) else mine == wanted


def step_without_memory(folder: str, host_budget: str, overlap: Any = None) -> None:
    """A step for which the accelerator has no memory says which chunks are old, new or mixed; once more, it is right.

    What it had on the accelerator is free, though somebody keeps the error. With ``overlap`` the optimizer's thread,
    which begins once the backward pass is over, has no memory, and the step raises its error.
    """
    make_small_chunks()
    device, kept, mixed, refused = private_device(), list[Any](), 0, 0
    budgets: Any = {"device_budget": "800K", "host_budget": host_budget, "min_bytes": "64K"}
    usual, model = network().to(device.device()), network().to(device.device())
    swapped = swap_params(model, folder, **budgets)
    plain = torch.optim.AdamW(usual.parameters())
    ours = NvmeOptimizer(model.parameters(), torch.optim.AdamW, folder, host_budget="3M", overlap=overlap)
    users: list[Any] = [swapped] if overlap else [swapped, swap_gradients(model.parameters(), folder, **budgets)]
    update, begins = ours._updates.update, threading.Event()
    vars(ours._updates)["update"] = lambda *given: update(*given) if begins.wait(60) else None

    def values(of: torch.nn.Module) -> list[torch.Tensor]:
        return [param.detach().cpu().flatten() for param in of.parameters()]

    def others() -> int:
        return int(device.now.bytes) - sum(user.stats().bytes_in_memory for user in users)

    def step(place: int, failing: int) -> None:
        nonlocal mixed, refused
        given = torch.linspace(-1, place % 7, 256, device=device.device()).repeat(64, 1)
        begins.clear()
        for of in (usual, model):
            of.zero_grad()
            of(given).square().mean().backward()
        old, before = values(model), others()
        plain.step()
        try:
            with device.failing("allocation", place, failing):
                begins.set()
                ours.step()
            assert failing != -1
        except torch.cuda.OutOfMemoryError as error:
            kept[:] = [error]
            refused += failing == 1
            assert others() <= before
            now, new, apart = values(model), values(usual), 0
            of_each: dict[torch.Tensor, list[torch.Tensor]] = {
                param: values for param, *values in zip(model.parameters(), now, old, new, strict=True)
            }
            for chunk in ours._states.division.chunks:
                for part in chunk.slices:
                    is_now, was, is_to_be = (those[part.begin : part.end] for those in of_each[part.parameter])
                    apart += not is_now.equal(is_to_be if ours._states.is_done(chunk) else was)
            mixed += bool(apart)
            assert bool(apart) <= ("could not be put back" in kept[0].__notes__[0]), place
            ours.step()
        assert equal(values(model), values(usual))

    with device.computing(), device.pinned_memory(True):
        step(0, 0)
        for place in range(0, 63, 7):  # of some 100
            step(place, 1)
            step(place, -1)
    assert refused
    assert bool(mixed) is (overlap is None)
    for closed in (ours, *users[::-1]):
        closed.close()


def backward_without_memory(folder: str) -> None:
    """Each chunk is old or new where a backward pass finds no memory beside the optimizer's thread, and it goes on."""
    make_small_chunks()
    device, updated = private_device(), 0
    usual, model = network().to(device.device()), network().to(device.device())
    plain = torch.optim.AdamW(usual.parameters())
    given: Any = {"host_budget": "3M", "overlap": "backward", "free_gradients": True}
    ours = NvmeOptimizer(model.parameters(), torch.optim.AdamW, folder, **given)

    def backward(of: torch.nn.Module, number: int) -> None:
        of(torch.linspace(-1, number, 256, device=device.device()).repeat(64, 1)).square().mean().backward()

    def step(number: int) -> None:
        for of, optimizer in ((usual, plain), (model, ours)):
            optimizer.zero_grad()
            backward(of, number)
            optimizer.step()
        require_same(ours, model.parameters(), plain, usual.parameters())

    with device.computing(), device.pinned_memory(True):
        step(0)
        for place in range(0, 80, 4):
            old = [param.detach().cpu().flatten() for param in model.parameters()]
            plain.zero_grad()
            backward(usual, place)
            plain.step()
            try:
                with device.failing("allocation", place, 1):
                    backward(model, place)
                    ours.step()
            except torch.cuda.OutOfMemoryError:
                ours.zero_grad()
                params = zip(model.parameters(), old, usual.parameters(), strict=True)
                both: dict[torch.Tensor, tuple[torch.Tensor, torch.Tensor]] = {
                    param: (before, wanted.detach().cpu().flatten()) for param, before, wanted in params
                }
                for chunk, version in ours._states.current.items():
                    is_new = version.attempt > ours._states.last_commit
                    updated += is_new
                    for part in chunk.slices:
                        assert part.values().cpu().equal(both[part.parameter][is_new][part.begin : part.end])
            model.load_state_dict(usual.state_dict())
            ours.load_state_dict(plain.state_dict())
            step(place)
    assert updated
    ours.close()


def shared(folder: str, seeds: str) -> None:
    """Parameters, saved tensors and states take the host memory of one Memory, with the bits of torch."""
    make_small_chunks()
    device = private_device()
    for seed in range(int(seeds)):
        with device.left_as_found(), device.computing(), device.in_random_order(seed):
            train_in_one_memory(device.device(), folder)


def train_in_one_memory(device: torch.device, folder: str) -> None:
    """Others have nearly all of the host memory at first, and leave it to the states then."""
    memory = Memory(device="3M", host="16M")
    tier: Any = memory.host
    usual, model = network().to(device), network().to(device)
    swapped = swap_params(model, folder, memory=memory, min_bytes="64K")
    saving = save_on_nvme(folder, memory=memory, min_bytes="64K")
    plain = torch.optim.AdamW(usual.parameters(), foreach=False)
    others = [tier.share().allocate(6 << 20) for _ in range(2)]
    seen = []
    with NvmeOptimizer(model.parameters(), torch.optim.AdamW, folder, memory=memory, foreach=False) as ours:
        for number in range(5):
            given = torch.linspace(-1, number, 256, device=device).repeat(256, 1)
            with saving:
                loss = model(given).square().mean()
            loss.backward()
            usual(given).square().mean().backward()
            for optimizer in (plain, ours):
                optimizer.step()
                optimizer.zero_grad()
            seen.append((ours.stats().bytes_in_host, ours.stats().bytes_read, ours.stats().bytes_written))
            users = ours.stats(), swapped.stats(), saving.stats()
            assert sum(stats.bytes_in_host for stats in users) + sum(other.nbytes for other in others) <= 15 << 20
            if number == 1:
                others.clear()
        assert users[0].peak_bytes <= 16 << 20
        require_same(ours, model.parameters(), plain, usual.parameters())
    whole = 2 * sum(param.nbytes for param in usual.parameters())
    assert seen[0][0] < whole / 2 < seen[1][1]
    assert seen[3][0] >= whole
    assert seen[4][1:] == seen[3][1:]
    swapped.close()
    saving.close()


def beside(folder: str) -> None:
    """Optimizers in one Memory step as alone, also while one of them waits for gradients that never come."""
    make_small_chunks()
    device, memory = private_device(), Memory(device="3M", host="16M")
    tier: Any = memory.host
    given: Any = {"memory_budget": None, "memory": memory, "overlap": "backward"}

    def twins_of(kind: Any) -> Twins:
        models = [network(), network()]
        for model in models:
            model.register_parameter("unused", torch.nn.Parameter(torch.ones(9)))
            model.to(device.device())
        return Twins(Path(folder), kind, ours=given, models=models, foreach=False)

    def backward(one: Twins, number: int) -> None:
        for model, _ in one.both():
            model.zero_grad()
            model(torch.linspace(-1, number, 256, device=device.device()).repeat(9, 1)).square().mean().backward()

    def step(one: Twins) -> None:
        for _, optimizer in one.both():
            optimizer.step()

    def steps(number: int) -> None:
        for turn in range(2, 9):
            backward(twins[number], turn)
            step(twins[number])
        one = twins[number]
        require_same(one.ours, one.mine.parameters(), one.plain, one.other.parameters())

    with device.computing():
        others = tier.share().allocate(12 << 20)
        twins = list(map(twins_of, (torch.optim.AdamW, torch.optim.Adagrad)))
        for turn in range(2):
            for one in twins:
                backward(one, turn)
            for one in twins[::-1]:
                step(one)
        in_threads(steps, 2)
        assert 1 << 20 < sum(one.ours.stats().bytes_in_host for one in twins) <= (15 << 20) - others.nbytes
        assert memory.host_buffers.peak <= 1 << 20
        twins[0].ours.close()
        steps(1)
        whole = sum(param.nbytes for param in twins[1].mine.parameters())
        assert twins[1].ours.stats().bytes_in_host >= whole, "it has what the other one had"
        with pytest.raises(ValueError, match="in use by an optimizer: close these first"):
            memory.close()
        twins[1].ours.close()
        memory.close()
