"""The asynchronous way: compute on one part while the next is read. python examples/asynchronous.py [FOLDER]."""

import os
import sys
import tempfile

import torch

import nvme_ops

PARTS, LENGTH = 8, 1 << 20


def main(folder: str) -> None:
    path = os.path.join(folder, "activations")
    handle = nvme_ops.aio_handle()

    written = torch.arange(PARTS * LENGTH, dtype=torch.float32).view(PARTS, LENGTH)
    for index, part in enumerate(written):
        handle.async_pwrite(part, path, index * part.nbytes)  # returns at once; do not change the part before wait()
    print(f"started {PARTS} writes; wait() says {handle.wait()} have ended")

    buffers = [torch.empty(LENGTH), torch.empty(LENGTH)]
    total = 0.0
    handle.async_pread(buffers[0], path, 0)
    for index in range(PARTS):
        handle.wait()  # the part to work on is there
        if index + 1 < PARTS:
            following = buffers[(index + 1) % 2]
            handle.async_pread(following, path, (index + 1) * following.nbytes)
        total += buffers[index % 2].sum(dtype=torch.float64).item()  # while the next one is on its way
    same = total == written.sum(dtype=torch.float64).item()
    print(f"summed {PARTS} parts while reading ahead: the sum is {'right' if same else 'WRONG'}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as folder:
        main(folder)
