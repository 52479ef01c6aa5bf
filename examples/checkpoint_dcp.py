"""A sharded model in a distributed checkpoint, on as many ranks as there are.

python examples/checkpoint_dcp.py [FOLDER], or: torchrun --nproc-per-node 2 examples/checkpoint_dcp.py FOLDER
"""

import os
import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from nvme_ops.dcp import NvmeStorageReader, NvmeStorageWriter


def main(folder: str) -> None:
    torch.manual_seed(7)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weights = torch.nn.Sequential(torch.nn.Linear(500, 301), torch.nn.Linear(301, 10)).state_dict()
    state = {name: distribute_tensor(weight, mesh, [Shard(0)]) for name, weight in weights.items()}

    dcp.save(state, storage_writer=NvmeStorageWriter(folder))
    future: Any = dcp.async_save(state, storage_writer=NvmeStorageWriter(folder))
    future.result()  # from here on the second has replaced the first

    loaded: dict[str, Any] = {name: torch.zeros_like(weight) for name, weight in state.items()}
    dcp.load(loaded, storage_reader=NvmeStorageReader(folder, verify=True))
    equal = all(torch.equal(loaded[name].full_tensor(), weight) for name, weight in weights.items())
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks, files {sorted(os.listdir(folder))}: {'equal' if equal else 'DIFFERENT'}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as own:
        if "RANK" in os.environ:
            dist.init_process_group("gloo")
        else:
            dist.init_process_group("gloo", init_method=f"file://{own}/ranks", rank=0, world_size=1)
        main(os.path.join(sys.argv[1], "checkpoint") if "RANK" in os.environ else os.path.join(own, "checkpoint"))
        dist.destroy_process_group()
