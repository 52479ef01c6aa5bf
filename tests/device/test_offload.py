"""Weights that come to an accelerator while it computes: right, within the budget, after what still uses the memory."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from nvme_ops import load, save
from nvme_ops.memory.tier import tier_on
from nvme_ops.offload import stream_weights, swap_params
from nvme_ops.offload.parameters.residents import Resident, Residents
from tests.conftest import MIB
from tests.device.kinds import Device, Simulated, on_doubles
from tests.offload.models import Tied


@torch.no_grad()
def test_the_output_is_that_of_the_model_in_memory(device: Device, folder: Path) -> None:
    """Rows of an embedding and whole weights, whose memory is used again while the device is behind."""
    torch.manual_seed(1)
    model, tokens = Tied().eval(), torch.tensor([[1, 2, 2], [5, 1, 3]])
    there = device.empty(0).device
    with device.computing():
        wanted = copy.deepcopy(model).to(there)(tokens.to(there)).cpu()
        with stream_weights(model, folder, memory_budget="1200K", device=there, handle=device.handle()) as streamed:
            outputs, given = [], tokens.to(there)
            device.settle()
            with device.on() as stream:
                for _ in range(4):
                    device.keep_busy()
                    outputs.append(streamed(given))
                device.synchronize(stream)
            assert all(torch.equal(output.cpu(), wanted) for output in outputs)
            stats = streamed.stats()
            assert 0 < stats.peak_bytes <= 1200 << 10
            assert stats.bytes_read > stats.bytes_on_demand
        del outputs, streamed


@on_doubles
def test_memory_is_charged_until_the_last_tensor_over_it_is_gone(device: Simulated) -> None:
    """Weights in use that have been evicted were not counted, and others came beyond the budget."""
    share = tier_on(device.device(), MIB).share()
    memory = share.allocate(MIB)
    assert memory is not None
    values, memory = memory.detach(), None
    assert share.allocate(1) is None
    del values
    assert share.allocate(MIB) is not None


def test_what_is_trained_moves_to_where_the_model_computes(device: Device, folder: Path) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256).requires_grad_(number == 1) for number in range(4)))
    before, values = list(model[1].parameters()), [param.detach().clone() for param in model[1].parameters()]
    there = device.empty(0).device
    with pytest.raises(ValueError, match="too small"):
        stream_weights(model, folder, memory_budget=1, device=there)
    assert {param.device.type for param in model.parameters()} == {"cpu"}
    streamed = stream_weights(model, folder, memory_budget="2M", device=there)
    assert all(one is other for one, other in zip(before, streamed[1].parameters(), strict=True))
    assert {param.device for param in streamed.parameters()} == {there}
    assert streamed.to(there) is streamed
    assert all(torch.equal(param.detach().cpu(), value) for param, value in zip(before, values, strict=True))
    streamed.close()


@pytest.mark.parametrize(("multiplied", "threaded"), [(False, True), (True, False)])
def test_another_stream_waits_for_what_the_first_one_does_to_values(
    device: Device, folder: Path, multiplied: bool, threaded: bool
) -> None:
    there = device.empty(0).device
    source, target, result = (device.empty(1000, dtype=torch.float32) for _ in range(3))

    class Behind(Resident):
        """Its device has something left to do of what the values are computed with."""

        def note_computed(self) -> None:
            device.keep_busy()
            target.copy_(source, non_blocking=True)
            super().note_computed()

    residents = Residents(folder, "test", given=1 << 20, device=there, checksums=False, handle=device.handle())
    resident = Behind("one", torch.empty(1000, dtype=torch.float32, device="meta"), there)
    with device.computing():
        residents.add(resident, torch.full((1000,), 3.0, device=there) if multiplied else None)
        if multiplied:
            assert residents.scale(resident, torch.tensor(2.0, device=there))
    device.settle()
    with device.on() as first, residents.used(resident, "forward") as values:
        device.require_pending(first)

    def use_elsewhere() -> None:
        with device.on() as other, residents.used(resident, "forward") as data:
            result.copy_(data, non_blocking=True)
            device.synchronize(other)
            device.require_run(first)

    if threaded:
        with ThreadPoolExecutor() as threads:
            threads.submit(use_elsewhere).result()
    else:
        use_elsewhere()
    assert torch.equal(result.cpu(), torch.full((1000,), 6.0 if multiplied else 0.0))
    del values
    residents.close()


def test_a_device_may_be_named_without_its_number(device: Device, folder: Path) -> None:
    there = device.empty(0).device
    for where in ("meta", there):
        module = torch.nn.Linear(256, 256, device=where)
        with swap_params(module, folder, memory_budget="1M", min_bytes=1, device=there.type):
            assert {param.device for param in module.parameters()} == {there}


def test_a_module_that_began_on_the_meta_device_is_saved_by_its_addresses(device: Device, folder: Path) -> None:
    safetensors: Any = pytest.importorskip("safetensors.torch")
    there, files = device.empty(0).device, [folder / f"{number}.safetensors" for number in range(2)]
    with torch.device("meta"):
        module = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.BatchNorm1d(256), torch.nn.Linear(256, 256))
    with swap_params(module, folder, memory_budget="1M", min_bytes=64 << 10, device=there.type):
        assert {tensor.device for tensor in (*module.parameters(), *module.buffers())} == {there}
        safetensors.save_model(module, files[0])
        torch.save(module.state_dict(), folder / "all.pt")
        save(module, files[1])
        loaded, expected = (load(file) for file in files)
        pickled = torch.load(folder / "all.pt", map_location="cpu")
        for name, tensor in expected.items():
            assert torch.equal(loaded[name], tensor)
            assert torch.equal(pickled[name], tensor)
        assert expected["0.weight"].std() > 0.01
