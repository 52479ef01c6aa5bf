"""Several lanes for one transfer. python examples/parallel.py [FOLDER].

Each lane is a queue with a thread of its own. One is enough for most devices; more help where one processor cannot keep
up: several disks in one file system, or ordinary tensors, of which each lane copies a part.
"""

import os
import sys
import tempfile
import time

import torch

import nvme_ops


def main(folder: str) -> None:
    path = os.path.join(folder, "weights")
    weights = torch.arange(8 << 20)  # 64 MiB
    nvme_ops.aio_handle().sync_pwrite(weights, path)
    for lanes in (1, 2, 4):
        handle = nvme_ops.aio_handle(intra_op_parallelism=lanes, cache="direct")
        loaded = torch.zeros_like(weights)
        start = time.perf_counter()
        handle.sync_pread(loaded, path)
        seconds = time.perf_counter() - start
        equal = "equal" if torch.equal(loaded, weights) else "DIFFERENT"
        print(f"{handle.get_intra_op_parallelism()} lanes: {weights.nbytes / seconds / 1e9:.2f} GB/s, {equal}")

    odd = torch.empty(12345, dtype=torch.int8)  # no size need divide by the lanes
    nvme_ops.aio_handle(intra_op_parallelism=4).sync_pread(odd, path, 7)
    equal = "equal" if torch.equal(odd, weights.view(torch.int8)[7 : 7 + odd.numel()]) else "DIFFERENT"
    print(f"{odd.numel()} bytes from offset 7 by 4 lanes: {equal}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as folder:
        main(folder)
