"""Tensors by key on NVMe, more of them than memory has room for. python examples/tensor_store.py [FOLDER]."""

import os
import sys
import tempfile

import torch

from nvme_ops.memory.pool import Pool
from nvme_ops.storage import Session, TensorStore

LAYERS, LENGTH = 12, 1 << 20


def main(folder: str) -> None:
    pool = Pool(16 << 20)  # what get() returns shares 16 MiB, of 48 MiB that are stored
    with Session(folder, name="activations") as session, TensorStore(session, pool, checksums=True) as store:
        for layer in range(LAYERS):  # forward: returns at once, and the tensor is freed when it is stored
            store.put(f"layer {layer}", torch.full((LENGTH,), float(layer)))
        store.wait()
        print(f"stored {len(store)} tensors, {store.bytes_in_use >> 20} MiB")

        equal = True
        following = store.get(f"layer {LAYERS - 1}")
        for layer in reversed(range(LAYERS)):  # backward: the next one is read while this one is used
            future = following
            if layer:
                following = store.get(f"layer {layer - 1}")
            future.result()
            equal = equal and bool((future.tensor == layer).all())
        print(f"read them backwards in {pool.peak >> 20} MiB: {'equal' if equal else 'DIFFERENT'}")

        store.drop("layer 0")
        print(f"dropped one: {store.bytes_in_use >> 20} MiB are left")

    with Session(folder, name="state", reuse=True) as session, TensorStore(session) as store:
        store.put("step", torch.tensor(1000)).result()
    with Session(folder, name="state", reuse=True) as session, TensorStore(session) as store:
        future = store.get("step")
        future.result()
        print(f"found in the next session: step {future.tensor.item()}; {os.path.basename(session.folders[0])} is kept")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as folder:
        main(folder)
