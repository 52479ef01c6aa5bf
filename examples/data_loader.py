"""Samples written once and read at random, resumed within an epoch. python examples/data_loader.py [FOLDER]."""

import sys
import tempfile

import torch

from nvme_ops.data import Loader, SampleStore, SampleWriter

COUNT, BATCH = 2000, 64


def main(folder: str) -> None:
    with SampleWriter(folder, {"image": bytes, "label": torch.int64}) as writer:
        for number in range(COUNT):
            image = bytes([number % 256]) * (1000 + number)  # like JPEGs: each has a size of its own
            writer.add({"image": image, "label": number})
    store = SampleStore(folder)
    print(f"{store}, {store.nbytes >> 20} MiB")

    def decode(sample: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return sample["image"][:1000].view(10, 100).float(), sample["label"]  # or torchvision.io.decode_jpeg

    loader = Loader(store, BATCH, shuffle=True, decode=decode)
    seen = []
    for images, labels in loader:
        seen += labels.tolist()
        if len(seen) == 10 * BATCH:
            state = loader.state_dict()  # goes into the checkpoint
            print(f"batches of {tuple(images.shape)}; stopped after {len(seen)} samples")
            break

    resumed = Loader(store, BATCH, shuffle=True, decode=decode)
    resumed.load_state_dict(state)
    for _, labels in resumed:
        seen += labels.tolist()
    print(f"resumed: {'all samples came once, right' if sorted(seen) == list(range(COUNT)) else 'SAMPLES ARE MISSING'}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as folder:
        main(folder)
