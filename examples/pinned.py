"""Memory that the device fills without a copy. python examples/pinned.py [FOLDER]."""

import os
import sys
import tempfile

import torch

import nvme_ops


def main(folder: str) -> None:
    path = os.path.join(folder, "weights")
    handle = nvme_ops.aio_handle()

    # page-locked huge-page memory as in DeepNVMe: one dimension, freed by hand
    locked = handle.new_cpu_locked_tensor(1 << 20, torch.empty(0, dtype=torch.bfloat16))
    weights = locked.view(1024, 1024)
    weights.normal_()
    handle.sync_pwrite(weights, path)
    print(f"a view of a locked tensor is pinned: {handle.is_pinned(weights)}")

    # the same memory with a shape, freed like any tensor
    loaded = nvme_ops.empty(1024, 1024, dtype=torch.bfloat16)
    handle.sync_pread(loaded, path)
    print(f"read into nvme_ops.empty: {'equal' if torch.equal(loaded, weights) else 'DIFFERENT'}")

    # an ordinary tensor works as well, through a bounded ring of staging memory
    ordinary = torch.empty(1024, 1024, dtype=torch.bfloat16)
    handle.sync_pread(ordinary, path)
    print(f"read into an ordinary tensor: {'equal' if torch.equal(ordinary, loaded) else 'DIFFERENT'}")

    print(f"locked tensor freed: {handle.free_cpu_locked_tensor(locked)}")
    print(f"freed again: {handle.free_cpu_locked_tensor(locked)}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as folder:
        main(folder)
