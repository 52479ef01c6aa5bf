"""The blocking way: write a tensor, read it back. python examples/blocking.py [FOLDER]."""

import os
import sys
import tempfile

import torch

import nvme_ops


def main(folder: str) -> None:
    path = os.path.join(folder, "weights")
    handle = nvme_ops.aio_handle()
    print(f"a handle on {handle.backend}")

    weights = torch.randn(1000, 1000)
    handle.sync_pwrite(weights, path)
    print(f"wrote {weights.nbytes} bytes; the file has {os.path.getsize(path)}")

    loaded = torch.empty_like(weights)
    handle.sync_pread(loaded, path)
    print(f"read it back: {'equal' if torch.equal(loaded, weights) else 'DIFFERENT'}")

    handle.write(weights, path, validate=True)  # reads again and compares, on one lane
    print("wrote it once more, and compared the file with the tensor")

    try:
        handle.sync_pread(torch.empty(2000, 1000), path)
    except EOFError as error:
        print(f"a tensor that is too large for the file: {error}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as folder:
        main(folder)
