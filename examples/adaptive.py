"""A handle that learns how to move each kind of transfer. python examples/adaptive.py [FOLDER]."""

import os
import sys
import tempfile

import torch

import nvme_ops


def main(folder: str) -> None:
    path = os.path.join(folder, "weights")
    weights = torch.randn(1000, 1000)
    loaded = torch.empty_like(weights)
    with nvme_ops.aio_handle.adaptive(folder) as handle:
        for _ in range(20):  # by then it has tried all of its tools
            handle.sync_pwrite(weights, path)
            handle.sync_pread(loaded, path)
        print(handle.explain())
    print(f"read it back: {'equal' if torch.equal(loaded, weights) else 'DIFFERENT'}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as folder:
        main(folder)
