"""GPU memory that is registered with cuFile once and used often. python examples/gds_pinned.py [FOLDER]."""

import os
import sys
import tempfile

import torch

import nvme_ops


def main(folder: str) -> None:
    if not torch.cuda.is_available():
        sys.exit("gds_pinned.py: no CUDA GPU here, and this example pins memory of one")
    try:
        handle = nvme_ops.gds_handle()
    except RuntimeError as reason:
        sys.exit(f"gds_pinned.py: {reason}")
    path = os.path.join(folder, "states")

    # as in DeepNVMe: one dimension, page-aligned, freed by hand
    buffer = handle.new_pinned_device_tensor(1 << 22, torch.empty(0, dtype=torch.bfloat16, device="cuda"))
    print(f"pinned: {handle.is_pinned(buffer)}; a view of it too: {handle.is_pinned(buffer[1000:2000])}")
    for step in range(3):
        buffer.fill_(step)
        handle.sync_pwrite(buffer, path)
        buffer.zero_()
        handle.sync_pread(buffer, path)
        print(f"step {step} by way of {handle.last_path}: {'right' if buffer.eq(step).all() else 'WRONG'}")
    print(f"freed: {handle.free_pinned_device_tensor(buffer)}; again: {handle.free_pinned_device_tensor(buffer)}")

    # a tensor of your own: it stays allocated until it is unpinned
    weights = torch.randn(2048, 2048, device="cuda")
    try:
        handle.pin_device_tensor(weights)
    except OSError as error:
        print(f"cuFile does not pin it ({error}), which a transfer does not need")
    handle.sync_pwrite(weights, path)
    loaded = torch.empty_like(weights)
    handle.sync_pread(loaded, path)  # this one is not pinned
    print(f"read into an ordinary tensor: {'equal' if torch.equal(loaded, weights) else 'DIFFERENT'}")
    print(f"unpinned: {handle.unpin_device_tensor(weights)}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as folder:
        main(folder)
