"""Programs of test_host_copies.py that train on the simulated device."""

from __future__ import annotations

from typing import Any

import torch

from nvme_ops.base.text import parse_size
from nvme_ops.offload import Memory, NvmeOptimizer, save_on_nvme, swap_gradients, swap_params
from tests.doubles import private_device
from tests.offload.training import equal, make_small_chunks, states


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
        for place in range(0, device.now.allocations.made - before, 5):
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
        for mine, wanted in zip([*there, *states(ours)], [*usual, *states(plain)], strict=True):
            assert mine.cpu().equal(wanted.cpu()) if isinstance(wanted, torch.Tensor) else mine == wanted


def step_without_memory(folder: str, host_budget: str) -> None:
    """A step for which the accelerator has no memory says which chunks are old, new or mixed; once more, it is right.

    What it had on the accelerator is free, though somebody keeps the error.
    """
    make_small_chunks()
    device, kept, mixed = private_device(), list[Any](), 0
    budgets: Any = {"device_budget": "800K", "host_budget": host_budget, "min_bytes": "64K"}
    usual, model = network().to(device.device()), network().to(device.device())
    swapped = swap_params(model, folder, **budgets)
    plain = torch.optim.AdamW(usual.parameters())
    ours = NvmeOptimizer(model.parameters(), torch.optim.AdamW, folder, host_budget="3M")
    gradients = swap_gradients(model.parameters(), folder, **budgets)

    def values(of: torch.nn.Module) -> list[torch.Tensor]:
        return [param.detach().cpu().flatten() for param in of.parameters()]

    def others() -> int:
        return int(device.now.bytes) - sum(both.stats().bytes_in_memory for both in (swapped, gradients))

    def step(place: int, failing: int) -> None:
        nonlocal mixed
        given = torch.linspace(-1, place % 7, 256, device=device.device()).repeat(64, 1)
        for of in (usual, model):
            of.zero_grad()
            of(given).square().mean().backward()
        old, before = values(model), others()
        plain.step()
        try:
            with device.failing("allocation", place, failing):
                ours.step()
        except torch.cuda.OutOfMemoryError as error:
            kept[:] = [error]
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
    assert mixed
    for closed in (ours, gradients, swapped):
        closed.close()


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
        for mine, wanted in zip(
            [*model.parameters(), *states(ours)], [*usual.parameters(), *states(plain)], strict=True
        ):
            assert mine.cpu().equal(wanted.cpu()) if isinstance(wanted, torch.Tensor) else mine == wanted
    whole = 2 * sum(param.nbytes for param in usual.parameters())
    assert seen[0][0] < whole / 2 < seen[1][1]
    assert seen[3][0] >= whole
    assert seen[4][1:] == seen[3][1:]
    swapped.close()
    saving.close()
