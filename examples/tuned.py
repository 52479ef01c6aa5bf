"""A handle with the settings that suit the device. python examples/tuned.py [FOLDER]."""

import os
import sys
import tempfile

import torch

import nvme_ops


def main(folder: str) -> None:
    handle = nvme_ops.aio_handle.tuned(folder)  # what nvme-tune found for the device, else the defaults
    print(f"{handle.get_block_size()} bytes x {handle.get_queue_depth()}, {handle.get_intra_op_parallelism()} lanes")

    path = os.path.join(folder, "weights")
    weights = torch.randn(1000, 1000)
    handle.sync_pwrite(weights, path)
    loaded = torch.empty_like(weights)
    handle.sync_pread(loaded, path)
    print(f"read it back: {'equal' if torch.equal(loaded, weights) else 'DIFFERENT'}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as folder:
        main(folder)
