"""Parts of files in torch.save's format: some tensors only, or straight into tensors that are there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import nvme_ops
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
from tests.conftest import MIB

load: Any = nvme_ops.load  # takes its options as dictionaries here

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch: sparse tensors


@pytest.fixture(params=[saved_by_torch, saved_here])
def checkpoint(request: pytest.FixtureRequest, folder: Path) -> tuple[Path, dict[str, Any]]:
    """A file of either writer, and what is in it."""
    model, optimizer = trained()
    obj: dict[str, Any] = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "views": views(),
        "sizes": mixed_sizes(),
    }
    obj["odd"] = [
        torch.eye(3).to_sparse(),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.nn.Parameter(torch.ones(2)),
    ]
    return request.param(folder / "a.pt", obj), obj


def test_keys_are_places_in_the_object(checkpoint: tuple[Path, dict[str, Any]]) -> None:
    path, obj = checkpoint
    names = ["odd.2", "model.0.weight", "optimizer.state.0.exp_avg", "views.turned", "odd.1", "sizes.0"]
    found = load(path, keys=names, verify=True)
    assert found.keys() == set(names)
    assert essence(found["odd.2"]) == essence(obj["odd"][2])
    assert torch.equal(found["odd.1"], obj["odd"][1])
    assert found["odd.1"].is_conj()
    assert torch.equal(found["model.0.weight"], obj["model"]["0.weight"])
    assert torch.equal(found["optimizer.state.0.exp_avg"], obj["optimizer"]["state"][0]["exp_avg"])
    assert found["views.turned"].stride() == obj["views"]["turned"].stride()
    assert list(load(path, keys="views.row")) == ["views.row"]


def test_keys_read_no_more_than_their_tensors(
    checkpoint: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, obj = checkpoint
    sizes = bytes_read(monkeypatch)
    found = load(path, keys=["sizes.9", "views.row"])
    assert torch.equal(found["views.row"], obj["views"]["row"])
    assert sum(sizes) <= MIB + 20 * 4 + 64  # the row and what aligns it, not all that it is a view of


def test_keys_that_share_memory_still_do(checkpoint: tuple[Path, dict[str, Any]]) -> None:
    found = load(checkpoint[0], keys=["model.0.weight", "model.2.weight", "views.row", "views.columns"])
    found["model.0.weight"][:] = 7
    assert found["model.2.weight"].eq(7).all()
    found["views.row"][0] = -1
    assert found["views.columns"][1, 0] == -1


def test_keys_of_what_is_no_plain_tensor(checkpoint: tuple[Path, dict[str, Any]]) -> None:
    found = load(checkpoint[0], keys=["odd.0", "views.row"])
    assert essence(found["odd.0"]) == essence(checkpoint[1]["odd"][0])


def test_keys_of_an_unsafe_pickle_execute_nothing(folder: Path) -> None:
    torch.save({"a": torch.ones(2), "evil": Evil(str(folder / "done"))}, folder / "a.pt")
    assert torch.equal(load(folder / "a.pt", keys=["a"])["a"], torch.ones(2))
    assert not (folder / "done").exists()


class Evil:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (self.path, "w")


def test_a_key_that_is_not_there(checkpoint: tuple[Path, dict[str, Any]]) -> None:
    with pytest.raises(KeyError, match=r"has no tensor 'model\.3'"):
        load(checkpoint[0], keys=["views.row", "model.3"])


def test_places_that_have_the_same_name(folder: Path) -> None:
    path = saved_here(folder / "a.pt", {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}})
    with pytest.raises(ValueError, match=r"'a\.b'"):
        load(path, keys=["a.b"])
    assert len(load(path)) == 2


@pytest.mark.parametrize("location", ["cpu", {"cpu": "cpu"}, lambda storage, _: storage.clone(), lambda *_: None])
def test_keys_go_where_map_location_says(location: Any, checkpoint: tuple[Path, dict[str, Any]]) -> None:
    found = load(checkpoint[0], keys=["views.row", "sizes.9"], map_location=location, verify=True)
    assert torch.equal(found["views.row"], checkpoint[1]["views"]["row"])
    assert torch.equal(found["sizes.9"], checkpoint[1]["sizes"]["9"])


def test_into_a_module(folder: Path) -> None:
    for save in (saved_by_torch, saved_here):
        model, _ = trained()
        path = save(folder / "a.pt", model.state_dict())
        other = trained()[0]
        before = other.state_dict()["0.weight"].data_ptr()
        load(path, into=other, verify=True)
        assert essence(other.state_dict()) == essence(model.state_dict())
        assert other.state_dict()["0.weight"].data_ptr() == before


def test_into_nested_containers_however_the_tensors_lie(checkpoint: tuple[Path, dict[str, Any]]) -> None:
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


def test_into_from_what_is_no_plain_tensor(folder: Path) -> None:
    obj = {"with": OBJECTS["with attributes"](), "plain": torch.ones(2)}
    into = {"with": torch.zeros(3), "plain": torch.zeros(2)}
    load(saved_here(folder / "a.pt", obj), into=into)
    assert torch.equal(into["with"], obj["with"])
    assert torch.equal(into["plain"], obj["plain"])


def test_into_sparse_tensors_is_refused(folder: Path) -> None:
    path = saved_here(folder / "a.pt", {"plain": torch.ones(2), "s": torch.eye(3).to_sparse()})
    into = {"plain": torch.zeros(2), "s": torch.zeros(3, 3).to_sparse()}
    with pytest.raises(ValueError, match="'s' has no dense memory"):
        load(path, into=into)
    assert into["plain"].eq(0).all()


@pytest.mark.parametrize(
    ("into", "error", "words"),
    [
        ({"a": torch.zeros(3)}, KeyError, "'b' has no counterpart"),
        ({"a": torch.zeros(3), "b": torch.zeros(2), "c": torch.zeros(1)}, KeyError, "has no tensor 'c'"),
        ({"a": torch.zeros(4), "b": torch.zeros(2)}, ValueError, r"shape \(3,\)"),
        ({"a": torch.zeros(3), "b": torch.zeros(2, dtype=torch.int32)}, ValueError, "torch.float32"),
    ],
    ids=["no place", "nothing for it", "shape", "dtype"],
)
def test_into_tensors_that_do_not_fit(into: Any, error: Any, words: str, folder: Path) -> None:
    path = saved_here(folder / "a.pt", {"a": torch.ones(3), "b": torch.ones(2)})
    with pytest.raises(error, match=words):
        load(path, into=into)
    if error is ValueError:
        assert all(each.eq(0).all() for each in into.values())
