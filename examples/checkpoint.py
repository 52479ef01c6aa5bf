"""Saves a model atomically, verifies it, saves it in the background. python examples/checkpoint.py [FOLDER]."""

import os
import sys
import tempfile

import torch

import nvme_ops


def main(folder: str) -> None:
    first = torch.nn.Linear(1024, 4096)
    model = torch.nn.Sequential(first, torch.nn.ReLU(), torch.nn.Linear(4096, 1024))
    path = os.path.join(folder, "model.safetensors")

    nvme_ops.save(model.state_dict(), path)  # a crash leaves the old file or the new one
    state = nvme_ops.load(path, verify=True)  # every byte against its checksum
    model.load_state_dict(state)

    future = nvme_ops.save_async(model.state_dict(), path)  # returns when a copy is safe
    with torch.no_grad():
        first.weight.mul_(0.5)  # the next step of training
    future.result()  # complete and durable, or the exception that says why not

    nvme_ops.load(path, into=model)  # straight into the module's tensors
    same = torch.equal(first.weight, state["0.weight"])
    print(f"saved and loaded {os.path.getsize(path)} bytes: {'equal' if same else 'DIFFERENT'}")
    os.unlink(path)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory(dir=".") as scratch:
            main(scratch)
