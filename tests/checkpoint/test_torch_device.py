"""Files of torch.save and tensors on an accelerator simulated in host memory, which is no evidence about a real one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import nvme_ops
from nvme_ops.inspection.contents import contents, damaged
from tests.conftest import MIB, pattern
from tests.private_device import PrivateDevice, private_device

load: Any = nvme_ops.load  # takes its options as dictionaries here


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> PrivateDevice:
    """The device of private_device, as far as torch's own loading needs it."""
    found = private_device()
    module = torch.get_device_module("privateuseone")
    monkeypatch.setattr(
        module, "device", lambda each: found.on(found.stream(each.index), index=each.index), raising=False
    )
    return found


@pytest.fixture
def on_device(device: PrivateDevice) -> dict[str, Any]:
    big = device.tensor(pattern(20 * MIB + 3))
    first = {"big": big, "view": big[5:9], "small": [device.tensor(torch.arange(9.0)) for _ in range(3)]}
    return {**first, "second": device.tensor(torch.arange(300), 1), "host": torch.arange(7)}


def on_host(obj: Any) -> Any:
    """The same tensors, with their devices."""
    if isinstance(obj, torch.Tensor):
        return str(obj.device), obj.cpu().tolist() if obj.numel() < MIB else obj.cpu()[-9:].tolist()
    return (
        {key: on_host(each) for key, each in obj.items()} if isinstance(obj, dict) else [on_host(each) for each in obj]
    )


def test_saves_from_a_device_and_torch_loads_to_it(on_device: dict[str, Any], folder: Path) -> None:
    nvme_ops.save(on_device, folder / "a.pt")
    assert on_host(torch.load(folder / "a.pt", weights_only=True)) == on_host(on_device)
    host = torch.load(folder / "a.pt", weights_only=True, map_location="cpu")
    assert torch.equal(host["big"], pattern(20 * MIB + 3))
    assert damaged(contents(folder / "a.pt")) == []


LOCATIONS: list[Any] = [
    None,
    "cpu",
    "privateuseone:1",
    {"privateuseone:0": "privateuseone:1"},
    {"privateuseone:0": "cpu", "cpu": "privateuseone:0"},
    lambda storage, _: storage,
    lambda storage, location: None if location == "cpu" else storage.to(device=torch.device("privateuseone:1")),
]


@pytest.mark.parametrize("location", LOCATIONS, ids=range(len(LOCATIONS)))
def test_loads_to_where_torch_would(location: Any, on_device: dict[str, Any], folder: Path) -> None:
    nvme_ops.save(on_device, folder / "a.pt")
    expected = on_host(torch.load(folder / "a.pt", map_location=location, weights_only=True))
    assert on_host(load(folder / "a.pt", map_location=location, verify=True)) == expected
    parts = load(folder / "a.pt", map_location=location, verify=True, keys=["view", "second", "host"])
    assert on_host(parts) == {name: expected[name] for name in parts}


def test_torch_has_no_storage_to_move(on_device: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvme_ops.save(on_device, folder / "a.pt")
    moved: list[int] = []
    move = torch.storage._to

    def watched(storage: torch.UntypedStorage, to: torch.device, wait: bool) -> Any:
        moved.append(storage.nbytes() if storage.device != to else 0)
        return move(storage, to, wait)

    monkeypatch.setattr(torch.storage, "_to", watched)
    for location in (None, "privateuseone:1", {"privateuseone:0": "privateuseone:1"}):
        load(folder / "a.pt", map_location=location)
    assert max(moved) == 0


def test_into_tensors_on_a_device(device: PrivateDevice, on_device: dict[str, Any], folder: Path) -> None:
    nvme_ops.save(on_device, folder / "a.pt")
    into: dict[str, Any] = {
        "big": device.empty(20 * MIB + 3, index=1),
        "view": torch.zeros(4, dtype=torch.uint8),
        "small": [device.empty(9, dtype=torch.float32) for _ in range(3)],
        "second": torch.zeros(300, dtype=torch.int64),
        "host": device.empty(7, dtype=torch.int64),
    }
    load(folder / "a.pt", into=into, verify=True)
    assert torch.equal(into["big"].cpu(), pattern(20 * MIB + 3))
    assert torch.equal(into["host"].cpu(), torch.arange(7))
    assert torch.equal(into["second"], torch.arange(300))
    assert torch.equal(into["view"], pattern(20 * MIB + 3)[5:9])
    assert all(torch.equal(each.cpu(), torch.arange(9.0)) for each in into["small"])
