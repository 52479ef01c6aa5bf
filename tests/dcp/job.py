"""What the ranks of test_dcp.py do: tests.dcp.job ACTION FOLDER.

Ranks of a sharded model save and load checkpoints in FOLDER and fail where something is not as it should be.
"""

from __future__ import annotations

import inspect
import json
import resource
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from nvme_ops.base.errors import ChecksumError
from nvme_ops.dcp import NvmeStorageReader, NvmeStorageWriter
from tests.contract.faulty import flip
from tests.dcp.states import equal

MIB = 1 << 20
WIDTH = 301  # divided by neither 2 nor 3


def reference(seed: int) -> dict[str, Any]:
    """Whole tensors, the same on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "rows": torch.randn(1001, WIDTH, generator=generator),
        "columns": torch.randn(64, 40 * WIDTH, generator=generator),
        "large": torch.randn(3 * MIB // 4, generator=generator),
        "half": torch.randn(5, 7, generator=generator).bfloat16(),
        "few": torch.randn(2, generator=generator),  # fewer than ranks
        "step": seed,
    }


def sharded(whole: dict[str, Any], dimension: int) -> dict[str, Any]:
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))

    def share(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return distribute_tensor(value, mesh, [Shard(min(dimension, value.dim() - 1))])
        return value

    return {name: share(value) for name, value in whole.items()}


def require_equal(actual: dict[str, Any], seed: int) -> None:
    whole = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in actual.items()}
    assert equal(whole, reference(seed)), f"other values on rank {dist.get_rank()}"


def fsdp() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model of FSDP2 whose optimizer has a state."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(37, 300), torch.nn.ReLU(), torch.nn.Linear(300, 5))
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.ones(2, 37)).sum().backward()
    optimizer.step()
    return model, optimizer


def fsdp_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments}


def whole_tensors(state: dict[str, Any], prefix: str = "") -> dict[str, torch.Tensor]:
    """All tensors of nested dicts, gathered, by their way there."""
    tensors: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        if isinstance(value, dict):
            tensors |= whole_tensors(value, f"{prefix}{name}/")
        elif isinstance(value, torch.Tensor):
            tensors[prefix + name] = value.full_tensor() if isinstance(value, DTensor) else value
    return tensors


def save(folder: Path) -> None:
    """On two ranks."""
    dcp.save(sharded(reference(1), 0), storage_writer=NvmeStorageWriter(folder / "ours"))
    future = dcp.async_save(sharded(reference(3), 1), storage_writer=NvmeStorageWriter(folder / "asynchronous"))
    future.result()  # type: ignore[union-attr]
    state = fsdp_state(*fsdp())
    dcp.save(state, storage_writer=NvmeStorageWriter(folder / "fsdp"))
    tensors = whole_tensors(state)
    if dist.get_rank() == 0:
        torch.save(tensors, folder / "fsdp.pt")
    tensors = {name: value for name, value in sharded(reference(3), 1).items() if isinstance(value, torch.Tensor)}
    dcp.save({"model": tensors, "step": 3}, storage_writer=dcp.FileSystemWriter(folder / "columns"))
    save_alone(folder)
    fail_to_save(folder)


def save_alone(folder: Path) -> None:
    """Each rank with metadata of its own, by any writer and for any reader."""
    if "use_collectives" not in inspect.signature(dcp.save).parameters:
        return
    writers: list[Any] = [NvmeStorageWriter, dcp.FileSystemWriter]
    for number, writer in enumerate(writers):
        path = folder / f"alone {number}"
        dcp.save(sharded(reference(6), 0), storage_writer=writer(path), use_collectives=False)
        dist.barrier()
        state = sharded(reference(99), 0)
        dcp.load(state, storage_reader=NvmeStorageReader(path))
        require_equal(state, 6)


def fail_to_save(folder: Path) -> None:
    """One rank may not write as much: all are told, and the old checkpoint stays."""
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, unlimited[1]))
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.save(sharded(reference(4), 0), storage_writer=NvmeStorageWriter(folder / "ours"))
    resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    failures = {rank: type(failure[0]).__name__ for rank, failure in caught.value.failures.items()}
    (folder / f"failed-{dist.get_rank()}.json").write_text(json.dumps(failures))


def load(folder: Path) -> None:
    """On three ranks."""
    for name, seed in (("ours", 1), ("asynchronous", 3), ("one", 5)):
        for dimension in (0, 1):
            state = sharded(reference(99), dimension)
            dcp.load(state, storage_reader=NvmeStorageReader(folder / name, verify=True))
            require_equal(state, seed)
    fail_to_load(folder / "one")  # which no other test loads
    model, optimizer = fsdp()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    state = fsdp_state(model, optimizer)
    dcp.load(state, storage_reader=NvmeStorageReader(folder / "fsdp"))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    loaded, expected = whole_tensors(fsdp_state(model, optimizer)), torch.load(folder / "fsdp.pt")
    assert len(loaded) == 16  # four parameters, and for each two moments and a step
    torch.testing.assert_close(loaded, expected, rtol=0, atol=0)


def fail_to_load(checkpoint: Path) -> None:
    """A flipped bit in what one rank reads: all are told which tensor it is in."""
    if dist.get_rank() == 0:
        info = next(iter(NvmeStorageReader(checkpoint).read_metadata().storage_data.values()))
        flip(checkpoint / info.relative_path, info.offset + info.length // 2)
    dist.barrier()
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.load(sharded(reference(99), 0), storage_reader=NvmeStorageReader(checkpoint, verify=True))
    errors: list[Any] = [failure[0] for failure in caught.value.failures.values()]
    assert errors
    for error in errors:
        assert type(error) is ChecksumError
        assert len(error.tensors) == 1


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    try:
        {"save": save, "load": load}[sys.argv[1]](Path(sys.argv[2]))
        dist.barrier()
    finally:
        dist.destroy_process_group()
