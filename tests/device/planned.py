"""Programs of test_planned.py: plans for the simulated device, and training with the budgets of each way."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import torch

from nvme_ops.base.text import MIB, parse_size
from nvme_ops.offload import NvmeOptimizer, cli, save_on_nvme, swap_gradients, swap_params
from nvme_ops.offload.plan import probe, training
from nvme_ops.offload.plan.training import Machine, TrainedModel, TrainingWay, ways
from tests.doubles import private_device
from tests.offload.llama import saved_llama
from tests.offload.training import make_small_chunks, settled

LAYERS, TOKENS, STEPS = 12, 512, 3
MOVED = ("read", "written", "from_host", "to_host")
#: Each layer of 1 MiB saves its input and that of its activation, of 1 MiB each.
MODEL = TrainedModel((MIB,) * LAYERS, 4, 2 * LAYERS * MIB // TOKENS, 2 * MIB // TOKENS, MIB // TOKENS, seconds=1e-6)


def train(way: TrainingWay, device: torch.device, folder: str) -> dict[str, list[int]]:
    """Returns the bytes that the last step has moved, by function."""
    torch.manual_seed(0)
    parts = (part for _ in range(LAYERS) for part in (torch.nn.Linear(512, 512, bias=False), torch.nn.GELU()))
    model, given = torch.nn.Sequential(*parts).to(device), torch.ones(TOKENS, 512, device=device)
    budgets: dict[str, Any] = way.budgets
    users: dict[str, Any] = {}
    with contextlib.ExitStack() as ends:
        if (budget := budgets.get("swap_params")) is not None:
            users["swap_params"] = ends.enter_context(swap_params(model, folder, **budget))
        if (budget := budgets.get("swap_gradients")) is not None:
            users["swap_gradients"] = ends.enter_context(swap_gradients(model.parameters(), folder, **budget))
        optimizer: Any = torch.optim.AdamW(model.parameters(), foreach=False)
        if (budget := budgets.get("NvmeOptimizer")) is not None:
            freed: Any = {} if "swap_gradients" in budgets else {"overlap": "backward", "free_gradients": True}
            optimizer = NvmeOptimizer(model.parameters(), torch.optim.AdamW, folder, **freed, **budget)
            users["NvmeOptimizer"] = ends.enter_context(optimizer)
        saving: Any = contextlib.nullcontext()
        if (budget := budgets.get("save_on_nvme")) is not None:
            saving = users["save_on_nvme"] = save_on_nvme(folder, **budget)
            ends.callback(saving.close)
        moved: list[dict[str, list[int]]] = []
        for _ in range(STEPS):
            with saving:
                loss = model(given).sum()
            if "save_on_nvme" in users:
                settled(saving)  # or backward may come before what is written
            loss.backward()
            del loss
            optimizer.step()
            optimizer.zero_grad()
            stats = {name: user.stats() for name, user in users.items()}
            moved.append({name: [getattr(of, f"bytes_{word}") for word in MOVED] for name, of in stats.items()})
    return {
        name: [after - before for after, before in zip(last, moved[-2][name], strict=True)]
        for name, last in moved[-1].items()
    }


#: By how much each may move more or less: of states nothing. Of gradients some are read ahead once more; writes of
#: the last tensors saved are called off; how many parameters are there when the order of use turns is a matter of time.
OFF = {"NvmeOptimizer": 0, "swap_gradients": 4 * MIB, "save_on_nvme": 3 * MIB, "swap_params": 4 * MIB}


def compared(device: torch.device, folder: str, machine: Machine) -> None:
    """What moves, and to which tier, is what the plan says."""
    for way in ways(MODEL, machine, 1, TOKENS):
        found = train(way, device, folder) if way.budgets else {}
        assert set(found) == set(way.moved)
        if "swap_gradients" not in way.budgets:  # during the backward pass, updates and it wait for each other
            found.pop("swap_params", None)
        for name, of in found.items():
            planned = [getattr(way.moved[name], word) for word in MOVED]
            if name == "NvmeOptimizer":  # it does not count copies
                planned[2:] = of[2:]
            for word, nbytes, wanted in zip(MOVED, of, planned, strict=True):
                off = 0 if name == "swap_gradients" and word in ("written", "to_host") else OFF[name]
                assert abs(nbytes - wanted) <= off, (way.name, name, word, of, planned)


def on_device(folder: str, *hosts: str) -> None:
    """Compares with the plan of a machine whose accelerator has 32 MiB."""
    make_small_chunks()
    vars(training)["_ON_THEIR_WAY"] = MIB
    device = private_device()
    for host in hosts:
        with device.left_as_found(), device.computing():
            compared(device.device(), folder, Machine(32 * MIB, 1e9, 1 << 40, parse_size(host, zero=True), bus=4e9))


def command(folder: str) -> None:
    """Plans of inference and training for the device, by the command: every way has a row, within the budgets given."""
    device = private_device()
    module: Any = torch.get_device_module("privateuseone")
    module.mem_get_info = lambda _: (64 * MIB, 128 * MIB)
    module.synchronize = torch.accelerator.synchronize
    vars(probe).update(_SECONDS=0.01, _SCRATCH=32 * MIB)
    model = saved_llama(Path(folder), num_hidden_layers=6)
    words = ["plan", str(model), "--device", "privateuseone", "--host-memory", "6M", "--prompt-length", "8", "--json"]

    def planned(*more: str) -> Any:
        with contextlib.redirect_stdout(io.StringIO()) as output:
            assert cli.main([*words, *more]) == 0
        return json.loads(output.getvalue())

    with device.pinned_memory(True), device.computing():
        one, many = planned("--memory", "9M", "--new-tokens", "248", "--batch", "1", "40")["batches"]
        for way in ("nvme", "cpu_memory", "no_offload", "on_cpu"):
            assert one[way]["fits"]
            assert one[way]["bound"] in ("reading", "bus", "computing")
        assert 4 * MIB < one["nvme"]["from_host"] <= 6 * MIB
        assert one["nvme"]["bytes_per_step"] > 4 * MIB
        assert one["cache"] == {"kept": one["cache_bytes"], "in_host": 0, "stored": 0}
        assert many["cache"]["in_host"] > 0, "256 tokens of 40 sequences, of 6 KiB each, have no room in 64 MiB"
        plan = planned("--train", "--memory", "48M", "--batch", "1")
        ways_found = {way["name"]: way for way in plan["batches"][0]["ways"]}
        assert len(ways_found) == 8
        assert plan["host_memory"] == 6 * MIB
        assert ways_found["all of these"]["budgets"]["swap_params"] == {
            "device_budget": 6 * MIB,
            "host_budget": 0,
        }
        assert ways_found["on the CPU"]["bound"] == "computing"
