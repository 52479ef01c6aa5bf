"""Swapped parameters of an accelerator in host memory; trainings are in tests/offload/test_parity.py."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from nvme_ops.offload import Memory, NvmeOptimizer, stream_weights, swap_params
from tests.conftest import KIB, MIB, forked, give_up_root, in_threads, open_to_all, run_python
from tests.device.kinds import Simulated, on_simulated
from tests.offload.models import layers, nbytes

pytestmark = on_simulated
COUNT = 12  # layers of 256 KiB, of which four fit on the device


def swapped(device: Simulated, folder: Path, host_budget: int | str | None, **options: Any) -> tuple[Any, Any]:
    model = layers(COUNT).requires_grad_(False).to(device.device())
    usual: Any = {"device_budget": MIB + 64 * KIB, "handle": device.handle(), "min_bytes": "64K"}
    return model, swap_params(model, folder, host_budget=host_budget, **usual | options)


def doubled(model: Any) -> None:
    """Changes each layer, as an optimizer does."""
    for layer in model:
        layer.weight.mul_(2)


@torch.no_grad()
@pytest.mark.parametrize("host_budget", [0, MIB, 64 * MIB])
def test_values_are_right_in_any_order_of_work(device: Simulated, folder: Path, host_budget: int) -> None:
    given = torch.linspace(-1, 1, 256).repeat(2, 1)
    for seed in range(6):
        with device.computing(), device.in_random_order(seed), device.on() as stream:
            torch.manual_seed(seed)
            usual = layers(COUNT).requires_grad_(False)
            torch.manual_seed(seed)
            model, params = swapped(device, folder, host_budget)
            for _ in range(3):
                output = model(device.tensor(given))
                device.synchronize(stream)
                assert torch.equal(output.cpu(), usual(given)), seed
                doubled(model)
                doubled(usual)
            stats = params.stats()
            params.close()
            del model, params, output
        if host_budget == 64 * MIB:  # the one that stays on the device was moved once, and has no room in host memory
            assert stats.bytes_written == stats.bytes_read == 256 * KIB
            assert stats.bytes_in_host == (COUNT - 1) * 256 * KIB
        assert (stats.bytes_from_host > 0) == (host_budget > 0)
        assert stats.bytes_in_host <= host_budget
        assert stats.peak_bytes <= MIB + 64 * KIB


@torch.no_grad()
@pytest.mark.parametrize("what", ["queue", "record"])
def test_a_copy_that_fails_loses_nothing(device: Simulated, folder: Path, what: str) -> None:
    events = device.now.events
    with device.computing():
        model, params = swapped(device, folder, "64M")
        wanted = [layer.weight.cpu() for layer in model]
        failed = 0
        for number in range(12):
            try:
                with device.failing(what, skipped=number):
                    doubled(model)
                    torch.accelerator.synchronize(device.device())
            except RuntimeError:
                failed += 1
            device.synchronize()
        assert failed
        for layer, before in zip(model, wanted, strict=True):  # each was doubled as often as it was not refused
            factor = (layer.weight.cpu().norm() / before.norm()).log2().round().exp2()
            assert torch.equal(layer.weight.cpu(), before * factor)
            assert 1 <= factor <= 2**12
        params.close()
    if what == "record":
        device.now.events = events


@torch.no_grad()
def test_what_is_dropped_while_its_copies_are_queued(device: Simulated, folder: Path) -> None:
    """``device`` sees whether memory is freed too early."""
    with device.computing():
        model, params = swapped(device, folder, "64M")
        model(device.tensor(torch.ones(2, 256)))
        doubled(model)
        before = params.stats().bytes_in_host
        for number in range(COUNT):
            model[number].weight = torch.nn.Parameter(torch.ones(256, 256, device=device.device()), False)
        model(device.tensor(torch.ones(2, 256)))
        params._residents._free_gone()
        assert params.stats().bytes_in_host == 0 < before
        params.close()


@torch.no_grad()
def test_what_fits_on_the_device_is_not_in_host_memory(device: Simulated, folder: Path) -> None:
    with device.computing():
        model, params = swapped(device, folder, "64M", device_budget="8M")
        model(device.tensor(torch.ones(2, 256)))
        assert params.stats().bytes_in_host == 0
        params.restore()
        assert nbytes(model) > 0


@torch.no_grad()
def test_threads(device: Simulated, folder: Path) -> None:
    with device.computing():
        model, params = swapped(device, folder, MIB)
        given = device.tensor(torch.ones(2, 256))
        wanted = model(given).cpu()

        def run(_: int) -> None:
            for _ in range(3):
                assert torch.equal(model(given).cpu(), wanted)

        in_threads(run, 3)
        params.close()


class Training:
    """Parameters partly in host memory and partly on storage, with states in the same folder, and torch's own."""

    def __init__(self, device: Simulated, folder: Path, seed: int) -> None:
        torch.manual_seed(seed)
        self.device, self.usual = device, layers(COUNT).to(device.device())
        torch.manual_seed(seed)
        self.model, self.params = swapped(device, folder, MIB)
        self.ours = NvmeOptimizer(self.model.parameters(), torch.optim.AdamW, folder, host_budget="1M")
        self.plain = torch.optim.AdamW(self.usual.parameters())

    def step(self) -> None:
        for one, other in zip(self.model.parameters(), self.usual.parameters(), strict=True):
            one.grad = other.grad = self.device.tensor(torch.randn(other.shape))
        self.ours.step()
        self.plain.step()
        assert all(map(torch.equal, *([one.cpu() for one in of.parameters()] for of in (self.model, self.usual))))

    def close(self) -> None:
        stats = self.params.stats()
        assert min(stats.bytes_in_host, stats.bytes_from_host, stats.bytes_read, stats.bytes_written) > 0
        self.ours.close()
        self.params.close()


def train_beside(device: Simulated, folder: Path, user: str) -> None:
    """What another process does in a folder where one has parameters already, and where it may do nothing."""
    if user == "another user":
        open_to_all(folder)  # now, since each pytest that begins closes the folder of all of them
        give_up_root()
        for private in folder.iterdir():  # sessions, too
            for use in (os.listdir, partial(swapped, device, host_budget=MIB)):
                with pytest.raises(PermissionError, match=private.name):
                    use(private)
    training = Training(device, folder, 7)
    for _ in range(3):
        training.step()
    training.close()


PROGRAM = """
    import sys
    from pathlib import Path
    import torch
    from tests.device.kinds import Simulated
    from tests.device.test_swapped_on_host import train_beside
    folder, user = sys.argv[1:]
    torch.set_num_threads(1)
    device = Simulated()
    with torch.no_grad(), device.computing(), device.pinned_memory(True):
        train_beside(device, Path(folder), "this user")  # another one may not be able to import
        train_beside(device, Path(folder), user)
"""
NOT_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")


@torch.no_grad()
@pytest.mark.parametrize("who", ["a process", "a forked child"])
@pytest.mark.parametrize("user", ["this user", pytest.param("another user", marks=NOT_ROOT)])
def test_other_processes_train_parameters_of_their_own(device: Simulated, folder: Path, who: str, user: str) -> None:
    """In the same folder, at the same time. A child cannot use those of its parent, nor take them from it."""
    (folder / "private").mkdir(0o700)
    with device.computing():
        mine = Training(device, folder, 1)
        mine.step()
        before = sorted(folder.iterdir())

        def in_the_child(_: int) -> None:
            uses = [use for layer in mine.model for use in (layer.weight.tolist, layer.weight.zero_)]
            for use in (mine.ours.step, mine.params.restore, *uses):
                with pytest.raises(RuntimeError, match=r"(swapped by|states belong to) the parent process"):
                    use()
            mine.ours.close()
            mine.params.close()
            train_beside(device, folder, user)

        if who == "a process":
            with ThreadPoolExecutor(1) as pool:
                other = pool.submit(run_python, PROGRAM, folder, user)
                while not other.done():
                    mine.step()
                other.result()
        else:
            with forked(1, in_the_child) as running:
                while running():
                    mine.step()
        assert sorted(folder.iterdir()) == before
        mine.step()
        mine.close()
    assert list(folder.iterdir()) == [folder / "private"]


@pytest.mark.filterwarnings("ignore:others use the host")
@torch.no_grad()
def test_one_memory_has_both_tiers_of_several_users(device: Simulated, folder: Path) -> None:
    given = torch.ones(2, 256)
    memory = Memory(device="3M", host="4500K")
    with device.computing():
        model, params = swapped(device, folder, None, device_budget=None, memory=memory)
        weights = layers(COUNT).requires_grad_(False)
        wanted = weights(given)
        with stream_weights(weights, folder, memory=memory, device=device.device()) as streamed:
            before = model(device.tensor(given)).cpu()
            for _ in range(4):
                assert torch.equal(streamed(device.tensor(given)).cpu(), wanted)
                assert torch.equal(model(device.tensor(given)).cpu(), before)
            in_host = [params.stats().bytes_in_host, streamed.stats().bytes_in_host]
            assert min(in_host) > 0
            assert sum(in_host) <= 4500 * KIB
        params.close()
