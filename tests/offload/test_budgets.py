"""How much memory of which kind a capability takes, from what was said and what there is."""

from __future__ import annotations

import resource
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from nvme_ops.base import limits
from nvme_ops.base.limits import lockable_memory
from nvme_ops.offload import Memory, budgets, stream_weights, swap_gradients, swap_params
from nvme_ops.offload.budgets import Budgets, budgets_of
from tests.conftest import GIB, MIB
from tests.offload.models import layers

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 64 GiB free in host memory, 8 GiB free on the accelerator, and no limit of what is locked."""
    for module in (budgets, limits):
        monkeypatch.setattr(module, "free_memory", lambda: 64 * GIB)
    monkeypatch.setattr(limits, "lockable_memory", lambda: sys.maxsize)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (8 * GIB, 80 * GIB))


def given(device: torch.device, **options: Any) -> Budgets:
    names = ("memory_budget", "memory", "device_budget", "host_budget", "max_memory")
    return budgets_of(device, *[options.get(name) for name in names])


@pytest.mark.parametrize(
    ("device", "options", "wanted"),
    [
        (CPU, {"memory_budget": "4G"}, (4 * GIB, 0)),
        (CPU, {"host_budget": "4G"}, (4 * GIB, 0)),
        (CPU, {"memory_budget": "auto"}, (56 * GIB, 0)),
        (CPU, {"max_memory": {"cpu": "2GiB", 0: 0}}, (2 * GIB, 0)),
        (GPU, {}, (7 * GIB, 56 * GIB)),
        (GPU, {"memory_budget": "4G"}, (4 * GIB, 56 * GIB)),
        (GPU, {"device_budget": "4G", "host_budget": 0}, (4 * GIB, 0)),
        (GPU, {"device_budget": "auto", "host_budget": "16G"}, (7 * GIB, 16 * GIB)),
        (GPU, {"max_memory": {0: "20GiB", "cpu": "40GB", "disk": "1T"}}, (20 * GIB, 40 * 10**9)),
        (GPU, {"max_memory": {"cuda:0": "20GiB"}}, (20 * GIB, 0)),
    ],
)
@pytest.mark.filterwarnings("ignore:host_budget")
def test_what_is_said_and_what_there_is(device: torch.device, options: dict[str, Any], wanted: tuple[int, int]) -> None:
    made = given(device, **options)
    assert (made.own, made.host()) == wanted


@pytest.mark.parametrize(
    ("device", "options", "error", "words"),
    [
        (CPU, {}, TypeError, "memory_budget="),
        (CPU, {"device_budget": "4G"}, ValueError, "host_budget="),
        (CPU, {"host_budget": "4G", "memory_budget": "4G"}, TypeError, "the same on the CPU"),
        (GPU, {"device_budget": "4G", "memory_budget": "4G"}, TypeError, "the same on an accelerator"),
        (GPU, {"device_budget": 0}, ValueError, "device_budget must be at least 1"),
        (CPU, {"host_budget": True}, TypeError, "host_budget .* not bool"),
        (GPU, {"host_budget": "many"}, ValueError, "host_budget"),
        (GPU, {"max_memory": {1: "4G"}}, ValueError, "cuda:1"),
        (GPU, {"max_memory": {0: "4G"}, "host_budget": 0}, ValueError, "one or the other"),
    ],
)
def test_what_is_refused(device: torch.device, options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        given(device, **options)


@pytest.mark.parametrize("name", ["memory_budget", "host_budget"])
def test_what_is_too_small_is_named_as_the_program_has_named_it(name: str, folder: Path) -> None:
    model = layers(4)
    few: dict[str, Any] = {name: "8K"}
    with pytest.raises(MemoryError, match=f"does not fit a {name} of"):
        swap_params(model, folder, min_bytes=1, **few)
    with pytest.raises(MemoryError, match=f"does not fit a {name} of"):
        swap_gradients(model.parameters(), folder, min_bytes=1, **few)
    with pytest.raises(ValueError, match=f"a {name} of 8 KiB is too small for this model"):
        stream_weights(model, folder, device="cpu", **few)
    wanted = name if name == "memory_budget" else "device_budget"
    assert given(GPU, **{wanted: "1G"}).name == wanted
    assert given(GPU).name == "device_budget"


def test_less_than_was_asked_for_is_said_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(UserWarning, match="56 GiB are free: 56 GiB are used"):
        assert given(GPU, host_budget="80G").host() == 56 * GIB
    monkeypatch.setattr(limits, "lockable_memory", lambda: 8 * MIB)
    with pytest.warns(UserWarning, match="locked memory is 8 MiB: .*ulimit -l unlimited"):
        assert given(GPU, host_budget="16G").host() == 8 * MIB
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert given(GPU).host() == 8 * MIB


def test_a_memory_takes_the_place_of_the_budget_where_it_computes() -> None:
    memory = Memory("1G")
    assert given(GPU, memory=memory, host_budget="2G") == Budgets(memory, 2 * GIB)
    with pytest.raises(TypeError):
        given(GPU, memory=memory, device_budget="1G")


def test_a_memory_may_have_host_memory_that_all_share() -> None:
    memory = Memory(device="1G", host="2G")
    weights, params = given(GPU, memory=memory), given(GPU, memory=memory)
    assert weights == Budgets(memory, shared=memory.host)
    assert weights.host() == 2 * GIB * 15 // 16
    assert weights.host_tier() is params.host_tier() is memory.host
    with pytest.raises(TypeError, match="has host memory already"):
        given(GPU, memory=memory, host_budget="1G")
    with pytest.raises(ValueError, match="memory of an accelerator"):
        memory.share(CPU)
    for options in ({}, {"nbytes": "1G", "device": "1G"}, {"host": "1G"}):
        with pytest.raises(TypeError, match="either nbytes or device="):
            Memory(**options)


def test_the_limit_of_locked_memory_is_the_systems(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    status = tmp_path / "proc/self/status"
    status.parent.mkdir(parents=True)
    try:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (MIB, hard))
        for capabilities, wanted in (("0000000000000000", MIB), ("000001ffffffffff", sys.maxsize)):
            status.write_text(f"Name:\tpython\nCapEff:\t{capabilities}\n")
            assert lockable_memory(tmp_path) == wanted
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))
