"""Files of torch.save: some tensors only, straight into tensors that are there, and from and to an accelerator.

The accelerator is simulated in host memory, which is no evidence about a real one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import nvme_ops
from nvme_ops.inspection.contents import contents, damaged
from tests.checkpoint.torch_files import (
    OBJECTS,
    bytes_read,
    essence,
    mixed_sizes,
    saved_by_torch,
    saved_here,
    trained,
    views,
)
from tests.conftest import MIB, pattern
from tests.private_device import PrivateDevice, private_device

load: Any = nvme_ops.load  # takes its options as dictionaries here
Checkpoint = tuple[Path, dict[str, Any]]

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch: sparse tensors


@pytest.fixture(params=[saved_by_torch, saved_here])
def checkpoint(request: pytest.FixtureRequest, folder: Path) -> Checkpoint:
    """A file of either writer, and what is in it."""
    model, optimizer = trained()
    odd = [torch.eye(3).to_sparse(), torch.randn(3, dtype=torch.complex64).conj(), torch.nn.Parameter(torch.ones(2))]
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    obj: dict[str, Any] = {**states, "views": views(), "sizes": mixed_sizes(), "odd": odd}
    return request.param(folder / "a.pt", obj), obj


def test_keys_are_places_in_the_object(checkpoint: Checkpoint) -> None:
    path, obj = checkpoint
    wanted = {
        "odd.2": obj["odd"][2],
        "odd.1": obj["odd"][1],
        "model.0.weight": obj["model"]["0.weight"],
        "optimizer.state.0.exp_avg": obj["optimizer"]["state"][0]["exp_avg"],
        "views.turned": obj["views"]["turned"],
        "sizes.9": obj["sizes"]["9"],
    }
    for location in (None, "cpu", {"cpu": "cpu"}, lambda storage, _: storage.clone(), lambda *_: None):
        found = load(path, keys=list(wanted), map_location=location, verify=True)
        assert found.keys() == wanted.keys()
        for name, each in wanted.items():
            assert type(found[name]) is type(each)
            assert (found[name].stride(), found[name].is_conj()) == (each.stride(), each.is_conj())
            assert torch.equal(found[name], each)
    assert list(load(path, keys="views.row")) == ["views.row"]
    assert essence(load(path, keys=["odd.0", "views.row"])["odd.0"]) == essence(obj["odd"][0])
    with pytest.raises(KeyError, match=r"has no tensor 'model\.3'"):
        load(path, keys=["views.row", "model.3"])


def test_keys_read_no_more_than_their_tensors(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    path, obj = checkpoint
    sizes = bytes_read(monkeypatch)
    found = load(path, keys=["sizes.9", "views.row"])
    assert torch.equal(found["views.row"], obj["views"]["row"])
    assert sum(sizes) <= MIB + 20 * 4 + 64  # the row and what aligns it, not all that it is a view of


def test_keys_that_share_memory_still_do(checkpoint: Checkpoint) -> None:
    found = load(checkpoint[0], keys=["model.0.weight", "model.2.weight", "views.row", "views.columns"])
    found["model.0.weight"][:] = 7
    assert found["model.2.weight"].eq(7).all()
    found["views.row"][0] = -1
    assert found["views.columns"][1, 0] == -1


def test_places_that_have_the_same_name(folder: Path) -> None:
    path = saved_here(folder / "a.pt", {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}})
    with pytest.raises(ValueError, match=r"'a\.b'"):
        load(path, keys=["a.b"])
    assert len(load(path)) == 2


def test_into_nested_containers_however_the_tensors_lie(checkpoint: Checkpoint) -> None:
    path, obj = checkpoint
    into: dict[str, Any] = {
        "views": {"base": torch.zeros(20, 3).t(), "columns": torch.zeros(3, 10), "turned": torch.zeros(40, 3)[::2]},
        "odd": [None, torch.zeros(3, dtype=torch.complex64)],
        "sizes": {name: torch.zeros_like(each) for name, each in obj["sizes"].items()},
    }
    names = ["views.base", "views.columns", "views.turned", "odd.1", *(f"sizes.{name}" for name in obj["sizes"])]
    found = load(path, into=into, keys=names, verify=True)
    assert found.keys() == set(names)
    for name in ("base", "columns", "turned"):
        assert torch.equal(into["views"][name], obj["views"][name])
    assert torch.equal(into["odd"][1], obj["odd"][1])
    assert essence(into["sizes"]) == essence(obj["sizes"])


def test_into_from_large_tensors_that_are_turned_or_full_of_holes(folder: Path) -> None:
    tall = torch.randn(3000, 1500)
    obj = {"turned": tall.t(), "sparse": tall[:, ::700], "cube": tall.view(30, 100, 1500).permute(2, 0, 1)[1:]}
    into = {name: torch.zeros(each.shape) for name, each in obj.items()}
    load(saved_here(folder / "a.pt", obj), into=into)
    for name, each in obj.items():
        assert torch.equal(into[name], each), name


def test_into_what_is_no_plain_tensor(folder: Path) -> None:
    odd = {"with": OBJECTS["with attributes"](), "plain": torch.ones(2)}
    into = {"with": torch.zeros(3), "plain": torch.zeros(2)}
    load(saved_here(folder / "a.pt", odd), into=into)
    assert torch.equal(into["with"], odd["with"])
    path = saved_here(folder / "a.pt", {"plain": torch.ones(2), "s": torch.eye(3).to_sparse()})
    into = {"plain": torch.zeros(2), "s": torch.zeros(3, 3).to_sparse()}
    with pytest.raises(ValueError, match="'s' has no dense memory"):
        load(path, into=into)
    assert into["plain"].eq(0).all()


# An accelerator


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
def saved(device: PrivateDevice, folder: Path) -> tuple[Path, dict[str, Any]]:
    """A file with tensors of two devices and of the host."""
    big = device.tensor(pattern(20 * MIB + 3))
    first = {"big": big, "view": big[5:9], "small": [device.tensor(torch.arange(9.0)) for _ in range(3)]}
    obj = {**first, "second": device.tensor(torch.arange(300), 1), "host": torch.arange(7)}
    return saved_here(folder / "a.pt", obj), obj


def on_host(obj: Any) -> Any:
    """The same tensors, with their devices."""
    if isinstance(obj, torch.Tensor):
        return str(obj.device), obj.cpu().tolist() if obj.numel() < MIB else obj.cpu()[-9:].tolist()
    if isinstance(obj, dict):
        return {key: on_host(each) for key, each in obj.items()}
    return [on_host(each) for each in obj]


def test_saves_from_a_device_and_torch_loads_to_it(saved: tuple[Path, dict[str, Any]]) -> None:
    path, obj = saved
    assert on_host(torch.load(path, weights_only=True)) == on_host(obj)
    assert torch.equal(torch.load(path, weights_only=True, map_location="cpu")["big"], pattern(20 * MIB + 3))
    assert damaged(contents(path)) == []


LOCATIONS: list[Any] = [
    None,
    "cpu",
    "privateuseone:1",
    {"privateuseone:0": "privateuseone:1"},
    {"privateuseone:0": "cpu", "cpu": "privateuseone:0"},
    lambda storage, location: None if location == "cpu" else storage.to(device=torch.device("privateuseone:1")),
]


@pytest.mark.parametrize("location", LOCATIONS, ids=range(len(LOCATIONS)))
def test_loads_to_where_torch_would_without_a_move(
    location: Any, saved: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = saved
    expected = on_host(torch.load(path, map_location=location, weights_only=True))
    moved, move = [0], torch.storage._to

    def watched(storage: torch.UntypedStorage, to: torch.device, wait: bool) -> Any:
        moved.append(storage.nbytes() if storage.device != to else 0)
        return move(storage, to, wait)

    monkeypatch.setattr(torch.storage, "_to", watched)
    assert on_host(load(path, map_location=location, verify=True)) == expected
    parts = load(path, map_location=location, verify=True, keys=["view", "second", "host"])
    assert on_host(parts) == {name: expected[name] for name in parts}
    assert max(moved) == 0 or callable(location)


def test_into_tensors_on_a_device(device: PrivateDevice, saved: tuple[Path, dict[str, Any]]) -> None:
    path, obj = saved
    into: dict[str, Any] = {
        "big": device.empty(20 * MIB + 3, index=1),
        "view": torch.zeros(4, dtype=torch.uint8),
        "small": [device.empty(9, dtype=torch.float32) for _ in range(3)],
        "second": torch.zeros(300, dtype=torch.int64),
        "host": device.empty(7, dtype=torch.int64),
    }
    load(path, into=into, verify=True)
    for name in ("big", "view", "second", "host"):
        assert torch.equal(into[name].cpu(), obj[name].cpu()), name
    assert all(torch.equal(each.cpu(), torch.arange(9.0)) for each in into["small"])
