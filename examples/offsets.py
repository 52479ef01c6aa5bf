"""Several tensors in one file, at any offset, by path or by file descriptor. python examples/offsets.py [FOLDER]."""

import os
import sys
import tempfile

import torch

import nvme_ops

HEADER = b"two tensors\n"  # 12 bytes: nothing need be aligned


def main(folder: str) -> None:
    path = os.path.join(folder, "model")
    handle = nvme_ops.aio_handle()
    weights, bias = torch.randn(777, 333), torch.randn(333)

    with open(path, "w+b", buffering=0) as file:
        file.write(HEADER)
        handle.sync_pwrite(weights, file.fileno(), len(HEADER))  # the descriptor stays open
    handle.sync_pwrite(bias, path, len(HEADER) + weights.nbytes)  # with an offset the rest of the file stays
    print(f"the file has {os.path.getsize(path)} bytes: {len(HEADER)} + {weights.nbytes} + {bias.nbytes}")

    row = torch.empty(333)
    handle.sync_pread(row, path, len(HEADER) + 100 * weights[0].nbytes)
    print(f"row 100 alone: {'equal' if torch.equal(row, weights[100]) else 'DIFFERENT'}")

    loaded = torch.empty_like(bias)
    handle.sync_pread(loaded, path, len(HEADER) + weights.nbytes)
    print(f"the second tensor: {'equal' if torch.equal(loaded, bias) else 'DIFFERENT'}")

    handle.sync_pwrite(bias, path)  # without an offset a tensor is the whole file
    print(f"the file now has {os.path.getsize(path)} bytes")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as folder:
        main(folder)
