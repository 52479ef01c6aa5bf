"""Ways to a tensor whose values are on storage: each has the values, changes them, or raises a sentence."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import distribute_module
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.testing._internal.distributed.fake_pg import FakeStore

import nvme_ops
from nvme_ops.checkpoint import modules
from nvme_ops.offload import swap_params
from nvme_ops.offload.residency import placement
from nvme_ops.offload.weights.stored import StoredTensor
from nvme_ops.offload.weights.stream_weights import stream_weights
from tests.contract.faulty import Faulty


class Model(nn.Module):
    """Three matrices of one shape, one of them tied."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.embedding = nn.Linear(48, 48), nn.Linear(48, 48), nn.Embedding(48, 48)
        self.head = nn.Linear(48, 48, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.second(self.first(x)))


@pytest.fixture
def plain() -> Model:
    torch.manual_seed(1)
    return Model()


@pytest.fixture
def swapped(plain: Model, folder: Path) -> Iterator[Model]:
    model = copy.deepcopy(plain)
    with swap_params(model, folder, memory_budget="24K", min_bytes=1):
        yield model


@pytest.fixture
def streaming(plain: Model, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(placement, "_SMALL", 0)  # which would stay in memory
    moved: Any = copy.deepcopy(plain)
    with stream_weights(moved, folder, memory_budget="24K") as model:
        assert isinstance(model.first.weight, StoredTensor)
        yield model


@pytest.fixture(params=["swapped", "streaming"])
def either(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


def require_equal(model: nn.Module, plain: nn.Module) -> None:
    expected = plain.state_dict()
    assert [name for name, tensor in model.state_dict().items() if not torch.equal(tensor + 0, expected[name])] == []


# Saving and loading


@pytest.mark.parametrize("name", ["a.pt", "a.safetensors", "folder"])
def test_a_module_is_saved_whole_and_loaded_into_or_refused(name: str, either: Any, plain: Model, folder: Path) -> None:
    saving = nvme_ops.save_async(either, folder / name)
    if not isinstance(either.first.weight, StoredTensor):
        with torch.no_grad():
            either.first.weight.zero_()  # it has the values of the call
    saving.result()
    loaded = nvme_ops.load(folder / name)
    assert sorted(loaded) == ["embedding.weight", "first.bias", "first.weight", "second.bias", "second.weight"]
    assert all(torch.equal(loaded[key], plain.state_dict()[key]) for key in loaded)
    other = Model()
    nvme_ops.save(other, folder / name)
    if isinstance(either.first.weight, StoredTensor):
        with pytest.raises(ValueError, match=r"'first\.weight' cannot be filled: its values are streamed from storage"):
            nvme_ops.load(folder / name, into=either)
        require_equal(either, plain)
    else:
        nvme_ops.load(folder / name, into=either, verify=True)
        require_equal(either, other)


def test_views_and_conversions_of_a_weight_are_saved_beside_it(either: Any, plain: Model, folder: Path) -> None:
    def of(weight: torch.Tensor) -> dict[str, torch.Tensor]:
        weight = weight.detach()
        return {"weight": weight, "turned": weight.t(), "half": weight.to(torch.float16), "rows": weight[3:7]}

    expected, tensors = of(plain.first.weight), of(either.first.weight)
    nvme_ops.save(tensors, folder / "a.pt")
    nvme_ops.save({name: tensors[name] for name in ("weight", "half")}, folder / "a.safetensors")
    states = [nvme_ops.load(folder / "a.pt"), nvme_ops.load(folder / "a.safetensors")]
    if isinstance(either.first.weight, StoredTensor):
        for name, tensor in tensors.items():
            either.register_buffer(f"{name}_", tensor)
        state = nn.Sequential(either).state_dict()
        states.append({name: state[f"0.{name}_"] + 0 for name in expected})
    for saved in states:
        assert all(tensor.dtype == expected[name].dtype for name, tensor in saved.items())
        assert all(torch.equal(tensor, expected[name]) for name, tensor in saved.items())


def test_tensors_without_memory_are_not_taken_for_tied() -> None:
    with torch.device("meta"):
        on_meta = Model()
    torch.distributed.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    distributed: Any = distribute_module(Model(), DeviceMesh("cpu", [0]))
    distributed.head.weight = distributed.embedding.weight
    torch.distributed.destroy_process_group()
    for model in (on_meta, distributed):
        state, left_out = modules.without_ties(model.state_dict())
        assert len(state) == 5
        assert left_out == {"head.weight": "embedding.weight"}


def test_pickled_tensors_are_usual_and_share_memory_when_tied(either: Any, plain: Model) -> None:
    stream = io.BytesIO()
    torch.save(dict(either.named_parameters(remove_duplicate=False)), stream)
    stream.seek(0)
    loaded = torch.load(stream, weights_only=True)
    assert all(torch.equal(tensor, plain.get_parameter(name)) for name, tensor in loaded.items())
    assert loaded["head.weight"].data_ptr() == loaded["embedding.weight"].data_ptr()
    assert stream.getbuffer().nbytes < 4 * plain.first.weight.nbytes
    if not isinstance(either.first.weight, StoredTensor):
        before = pickle.loads(pickle.dumps(either.first.weight))
        with torch.no_grad():  # what is pickled once does not stand for values from later
            either.first.weight.add_(1)
        assert torch.equal(pickle.loads(pickle.dumps(either.first.weight)), before + 1)


# Around the dispatcher

AROUND: tuple[Callable[[Any], Any], ...] = (  # methods and operations: test_operations.py
    lambda p: p.detach().untyped_storage().data_ptr(),
    lambda p: torch.from_dlpack(p.detach()),
    lambda p: p.share_memory_(),
    lambda p: bytes(p.detach().untyped_storage()),
    lambda p: nvme_ops.aio_handle().sync_pwrite(p.detach(), "/dev/null"),
    lambda p: p.detach().apply_(lambda value: value + 1),
    lambda p: torch.jit.save(torch.jit.trace(p.module, torch.ones(2, 48)), io.BytesIO()),
    lambda p: p.detach().t_(),
)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_what_would_meet_no_memory_or_change_the_shape_says_what_to_do(either: Any, plain: Model) -> None:
    weight = either.first.weight
    weight.module = either.first
    for way in AROUND:
        with pytest.raises((RuntimeError, ValueError), match=r"values (of this tensor )?are on storage"):
            way(weight)
    require_equal(either, plain)


def test_conjugated_and_negated_views_are_not_written_to(folder: Path) -> None:
    model = nn.ParameterDict({"w": nn.Parameter(torch.randn(6, 4, dtype=torch.complex64))})
    with swap_params(model, folder, memory_budget="8K", min_bytes=1):
        for view in (model["w"].detach().conj(), torch._neg_view(model["w"].detach())):
            with pytest.raises(RuntimeError, match="conjugated or negated view"):
                view.zero_()


def test_lists_are_taken_one_by_one_and_joined_within_the_budget(folder: Path) -> None:
    plain = nn.ParameterList(torch.ones(1024) * number for number in range(20))
    model = copy.deepcopy(plain)
    with swap_params(model, folder, memory_budget="12K", min_bytes=1) as swapping, torch.no_grad():
        for tensors in (list(model), list(plain)):
            torch._foreach_addcmul_(tensors, tensors, tensors, torch.arange(20.0))
        assert torch.equal(torch.stack(torch._foreach_norm(list(model))), torch.stack(torch._foreach_norm(list(plain))))
        assert torch.equal(torch.cat(list(model)), torch.cat(list(plain)))
        assert swapping.stats().peak_bytes <= 12 << 10


def test_values_read_in_inference_mode_can_be_changed_later(swapped: Any) -> None:
    with torch.inference_mode():
        swapped(torch.ones(1, 48))
    with torch.no_grad():
        for param in swapped.parameters():
            param.fill_(2)
    assert float(swapped.second.bias.sum()) == 96


# data


def test_data_that_would_share_memory_is_refused_once_either_changes(swapped: Any) -> None:
    weight, assigned = swapped.first.weight, torch.ones(48, 48)
    weight.data = assigned
    assert weight.sum().item() == 48 * 48
    with torch.no_grad(), pytest.raises(RuntimeError, match="share memory only if parameters are in memory"):
        weight.add_(1)
    assigned.add_(1)
    with pytest.raises(RuntimeError, match=r"that was assigned to \.data is changed"):
        weight.sum()
    del assigned
    assert weight.sum().item() == 48 * 48


def test_memory_beside_a_part_that_was_assigned_is_not_reached(swapped: Any) -> None:
    vector_to_parameters(parameters_to_vector(swapped.second.parameters()), swapped.second.parameters())
    with pytest.raises(RuntimeError, match=r"a part of another tensor was assigned to \.data"):
        swapped.second.weight.as_strided((2,), (1,), 0)
    swapped.second.weight.data = torch.ones(48, 48)
    assert swapped.second.weight.as_strided((2,), (1,), 0).sum().item() == 2


def test_data_that_cannot_be_assigned_changes_nothing(either: Any, plain: Model) -> None:
    for value, error in (
        (3, TypeError),
        (torch.ones(48, 48, device="meta"), RuntimeError),
        (torch.ones(48, 48).to_sparse(), (TypeError, RuntimeError)),
    ):
        with pytest.raises(error):
            either.first.weight.data = value
    require_equal(either, plain)


def test_data_that_cannot_be_written_changes_nothing(folder: Path) -> None:
    model, handle = nn.Linear(64, 64, bias=False), Faulty()
    before = model.weight.detach().clone()

    def assign(number: int) -> torch.Tensor:
        value = torch.full((64, 64), float(number))
        if number % 2:
            model.weight.data = value
        else:
            with torch.no_grad():
                model.weight.set_(value)  # type: ignore[call-overload]
        return value

    with swap_params(model, folder, memory_budget="64K", min_bytes=1, handle=handle) as swapping:
        for number, how in enumerate(("refuse", "fail")):
            handle.will("write", how)
            with pytest.raises(OSError, match="Input/output error"):
                assign(number)
            assert torch.equal(model.weight + 0, before)
            handle.will()
            before = assign(number)
        for number in range(10):
            assert torch.equal(assign(number), model.weight + 0)
        assert swapping.stats().bytes_stored <= 5 * 16384
