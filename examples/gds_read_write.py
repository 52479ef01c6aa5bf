"""Tensors on a GPU, straight from and to storage where the machine can. python examples/gds_read_write.py [FOLDER]."""

import os
import sys
import tempfile

import torch

from nvme_ops.op_builder import GDSBuilder


def main(folder: str) -> None:
    if not torch.cuda.is_available():
        sys.exit("gds_read_write.py: no CUDA GPU here, and this example moves tensors of one")
    try:
        handle = GDSBuilder().load().gds_handle(intra_op_parallelism=4)
    except RuntimeError as reason:
        sys.exit(f"gds_read_write.py: {reason}")
    path = os.path.join(folder, "weights")

    weights = torch.randn(4096, 4096, device="cuda")
    handle.sync_pwrite(weights, path)
    print(f"wrote {weights.nbytes} bytes by way of {handle.last_path}: {handle.path_statistics()['why']}")

    loaded = torch.empty_like(weights)
    handle.sync_pread(loaded, path)
    print(f"read by way of {handle.last_path}: {'equal' if torch.equal(loaded, weights) else 'DIFFERENT'}")

    # what is queued on the current stream comes before the transfer, without a synchronisation of your own
    with torch.cuda.stream(torch.cuda.Stream()):
        doubled = loaded * 2
        handle.sync_pwrite(doubled, path)
        handle.sync_pread(loaded, path)
        print(f"on a stream of its own: {'equal' if torch.equal(loaded, doubled) else 'DIFFERENT'}")

    # a tensor on the CPU is moved as aio_handle moves it
    on_cpu = torch.empty(4096, 4096)
    handle.sync_pread(on_cpu, path)
    print(f"read into CPU memory: {'equal' if torch.equal(on_cpu, loaded.cpu()) else 'DIFFERENT'}")
    print(f"paths taken: {handle.path_statistics()['uses']}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as folder:
        main(folder)
