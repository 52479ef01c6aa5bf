"""Pickles of files of torch.save: what is written and read is what Python's and torch's own write and read."""

from __future__ import annotations

import io
import resource
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

import nvme_ops
from nvme_ops._native import native
from nvme_ops.checkpoint import torch_load, torch_save
from nvme_ops.errors import FormatError
from nvme_ops.formats import torch_pickle

CODES = b"".join(torch_load._CODES)
CPU = torch.device("cpu")


def saved(obj: Any, folder: Path) -> Path:
    nvme_ops.save(obj, folder / "file.pt")
    return folder / "file.pt"


def both(obj: Any, folder: Path) -> list[Any]:
    path = saved(obj, folder)
    return [nvme_ops.load(path), torch.load(path, weights_only=True), torch.load(path, mmap=True)]


def test_what_is_one_object_stays_one(tmp_path: Path) -> None:
    shared, tensor = [1, 2], torch.arange(6.0)
    pair = (shared, tensor)
    obj = {"a": shared, "b": {"c": shared}, "t": tensor, "u": [tensor, tensor[2:4]], "pair": pair, "again": pair}
    for found in both(obj, tmp_path):
        assert found["a"] is found["b"]["c"]
        assert found["t"] is found["u"][0]
        assert found["pair"] is found["again"]
        assert found["pair"][0] is found["a"]
        found["t"][2] = 7
        assert found["u"][1][0] == 7


def test_a_list_that_holds_itself(tmp_path: Path) -> None:
    obj: dict[str, Any] = {"list": []}
    obj["list"].append(obj["list"])
    obj["self"] = obj
    for found in both(obj, tmp_path):
        assert found["list"][0] is found["list"]
        assert found["self"] is found


def test_a_state_dict_keeps_its_metadata_and_parameters_stay_parameters(tmp_path: Path) -> None:
    linear = torch.nn.Linear(3, 4)
    state: Any = torch.nn.Sequential(linear, torch.nn.BatchNorm1d(4)).state_dict()
    frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    for found in both({"state": state, "weight": linear.weight, "frozen": frozen}, tmp_path):
        assert type(found["state"]) is OrderedDict
        assert vars(found["state"]) == vars(state)
        assert list(found["state"]) == list(state)
        assert type(found["weight"]) is torch.nn.Parameter
        assert (found["weight"].requires_grad, found["frozen"].requires_grad) == (True, False)
        assert torch.equal(found["weight"], linear.weight)
        assert torch.equal(found["frozen"], frozen)


def test_plain_values(tmp_path: Path) -> None:
    numbers = [0, 255, 256, 65535, 65536, -1, 2**31 - 1, 2**31, -(2**31) - 1, 2**63, -(2**200)]
    others = ["", "é", "x" * 70000, 1.5, float("inf"), None, True, (), [], {}, (1, 2, 3, 4)]
    for found in both({"k": numbers, 3: [others] * 2500}, tmp_path):
        assert found == {"k": numbers, 3: [others] * 2500}


def test_the_scan_lets_through_what_torch_writes() -> None:
    obj = {"a": [torch.zeros(2), 1, -5, 2**40, 1.5, "x" * 300, None, True], "b": OrderedDict(c=(1, 2, 3, 4))}
    stream = io.BytesIO()
    torch.save(obj, stream)
    with zipfile.ZipFile(stream) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("data.pkl")]
        content = archive.read(name)
    assert native().scan_pickle(content, CODES) == ""
    assert native().scan_pickle(torch_save.pickled(obj)[0], CODES) == ""
    for length in range(len(content)):
        assert native().scan_pickle(content[:length], CODES) == "it ends too early"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "it ends too early"),
        (b"\x80\x02}r\xff\xff\xff\x7f.", "it numbers more objects than it has"),
        (b"\x80\x02}q\xff.", "it numbers more objects than it has"),
        (b"\x80\x02X\xff\xff\xff\xffabc.", "it ends too early"),
        (b"\x80\x02\x8a\xffabc.", "it ends too early"),
        (b"\x80\x02cos\nsystem", "it ends too early"),
        (b"\x80\x04\x95\x00.", "code 149 is not allowed"),
        (b"ios\nsystem\n.", "code 105 is not allowed"),
        (b"\x80\x02N.r\xff\xff\xff\xff", ""),  # nobody reads on
        (b"\x80\x02}q\x05.", ""),  # pickletools.optimize leaves numbers out
    ],
)
def test_the_scan_refuses_what_costs_more_than_it_is(content: bytes, words: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert native().scan_pickle(content, CODES) == words
    if words:
        with pytest.raises(torch_pickle.NotReadError, match=words):
            torch_load.make(content, lambda _: CPU, lambda *_: torch.empty(0))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB


def parts(count: int = 2) -> list[torch.Tensor]:
    empty = torch.empty(0, dtype=torch.uint8)
    return [empty.data for _ in range(count)]


def test_parts_of_a_memory_have_storages_of_their_own() -> None:
    memory = torch.arange(10, dtype=torch.uint8)
    first, second = parts()
    native().set_parts([first, second], memory, [2, 10], [4, 0])
    assert (first.tolist(), second.tolist()) == ([2, 3, 4, 5], [])
    assert first.untyped_storage().nbytes() == 4
    with pytest.raises(RuntimeError, match="not resizable"):
        first.untyped_storage().resize_(100)
    memory[3] = 77
    del memory
    assert first[1] == 77


@pytest.mark.parametrize(
    ("places", "lengths"), [([8], [3]), ([-1], [1]), ([0], [-1]), ([11], [0]), ([0, 0], [1]), ([2**62], [2**62])]
)
def test_parts_beyond_the_memory_are_refused(places: list[int], lengths: list[int]) -> None:
    with pytest.raises(ValueError, match=r"beyond the memory|one of everything"):
        native().set_parts(parts(1), torch.zeros(10, dtype=torch.uint8), places, lengths)


@pytest.mark.parametrize(
    ("offset", "size", "stride"),
    [(0, (3, 2), (2, 1)), (5, (1,), (1,)), (-1, (1,), (1,)), (0, (-1,), (1,)), (0, (2,), (-1,)), (0, (2, 2), (1,)),
     (0, (2**62, 2**62), (2**62, 2**62)), (2**63 - 1, (2,), (2**62,)), (0, (2**62, 2**62), (0, 0)), (6, (0,), (1,))],
)  # fmt: skip
def test_views_beyond_their_storage_are_refused(offset: int, size: tuple[int, ...], stride: tuple[int, ...]) -> None:
    tensor = torch.empty(0).data
    with pytest.raises(ValueError, match="reaches beyond its storage"):
        native().set_storages([tensor], [torch.zeros(5)], [offset], [size], [stride])


def test_many_tensors_take_no_detour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("the slow way")

    state = {f"layer.{number}": torch.full((number % 7, 3), float(number)) for number in range(3000)}
    monkeypatch.setattr(torch.Tensor, "__reduce_ex__", fail)
    monkeypatch.setattr(torch.serialization, "_load", fail)
    found = nvme_ops.load(saved(state, tmp_path), verify=True)
    assert list(found) == list(state)
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


def test_a_pickle_cannot_change_the_storage_that_it_describes() -> None:
    described = b"\x80\x02(U\x07storagectorch\nFloatStorage\nU\x010U\x03cpuK\x04tQ"
    found, storages = torch_pickle.read(described + b".", "file")
    assert [found] == storages == [torch_pickle.Storage("0", torch.float32, "cpu", 16)]
    with pytest.raises(FormatError, match=r"data\.pkl"):
        torch_pickle.read(described + b"}U\x04sizeK\xffsb.", "file")


def test_a_pickle_cannot_change_what_stands_for_a_function() -> None:
    content = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n}X\x01\x00\x00\x00aK\x01sb."
    with pytest.raises(torch_pickle.NotReadError, match="the state of a function"):
        torch_load.make(content, lambda _: CPU, lambda *_: torch.empty(0))
