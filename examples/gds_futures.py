"""Loads layers to the GPU while it computes with earlier ones. python examples/gds_futures.py [FOLDER]."""

import os
import sys
import tempfile

import torch

import nvme_ops

LAYERS, WIDTH = 8, 2048


def main(folder: str) -> None:
    if not torch.cuda.is_available():
        sys.exit("gds_futures.py: no CUDA GPU here, and this example computes on one")
    try:
        handle = nvme_ops.gds_handle(intra_op_parallelism=4)
    except RuntimeError as reason:
        sys.exit(f"gds_futures.py: {reason}")
    names = [os.path.join(folder, f"layer{number}") for number in range(LAYERS)]

    model = [torch.randn(WIDTH, WIDTH, device="cuda") / WIDTH**0.5 for _ in range(LAYERS)]
    print(f"{handle.submit_pwritev(model, names).result()} bytes in {LAYERS} files, one call")

    expected = values = torch.randn(64, WIDTH, device="cuda")
    for layer in model:
        expected = expected @ layer

    # two buffers take turns: one is filled while the other is used
    buffers = [torch.empty(WIDTH, WIDTH, device="cuda") for _ in range(2)]
    coming = handle.submit_pread(buffers[0], names[0])
    for number in range(LAYERS):
        coming.result()  # from here on every stream sees the data
        if number + 1 < LAYERS:
            # waits by itself for the product that still uses this buffer
            coming = handle.submit_pread(buffers[(number + 1) % 2], names[number + 1])
        values = values @ buffers[number % 2]
    print(f"computed with layers from storage: {'right' if torch.allclose(values, expected) else 'WRONG'}")
    print(f"paths taken: {handle.path_statistics()['uses']}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as folder:
        main(folder)
