"""A file object that moves tensors, for torch.save and torch.load too. python examples/file_object.py [FOLDER]."""

import os
import sys
import tempfile

import torch

import nvme_ops


def main(folder: str) -> None:
    path = os.path.join(folder, "model")
    weights = torch.randn(1000, 1000)

    with nvme_ops.open(path, "w") as file:
        torch.save({"weights": weights, "step": 7}, file)
        file.sync()  # durable from here on
    with nvme_ops.open(path) as file:
        loaded = torch.load(file)
    equal = loaded["step"] == 7 and torch.equal(loaded["weights"], weights)
    print(f"torch.save and torch.load, {os.path.getsize(path)} bytes: {'equal' if equal else 'DIFFERENT'}")

    first, second = torch.randn(500_000), torch.randn(500_000)
    with nvme_ops.open(os.path.join(folder, "tensors"), "w") as file:
        future = file.pwrite_async(second, first.nbytes)  # goes on while the first is written
        file.pwrite(first, 0)
        print(f"wrote two tensors, the second of {future.result()} bytes")

    with nvme_ops.open(os.path.join(folder, "tensors"), "r+") as file:
        tensor = torch.empty(1_000_000)
        file.pread(tensor, 0)
        print(f"read both at once: {'equal' if torch.equal(tensor, torch.cat([first, second])) else 'DIFFERENT'}")
        file.seek(-4, os.SEEK_END)
        print(f"the last four bytes: {file.read(4).hex()}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as folder:
        main(folder)
