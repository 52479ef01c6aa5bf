"""A model on an accelerator, in host memory and on NVMe. python examples/offload_three_tiers.py [FOLDER].

Without an accelerator the model computes on the CPU: there are two memories then, and one budget.
"""

import copy
import sys
import tempfile
from typing import Any

import torch

from nvme_ops.offload import stream_weights

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
MIB = 1 << 20


@torch.no_grad()
def main(folder: str) -> None:
    torch.manual_seed(7)
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(24))).to(DEVICE)  # 1 MiB each
    batch = torch.randn(4, 512, device=DEVICE)
    expected = copy.deepcopy(model)(batch)
    budgets: dict[str, Any] = {"device_budget": "6M", "host_budget": "12M"} if ON_GPU else {"host_budget": "18M"}

    with stream_weights(model, folder, **budgets) as streamed:
        for _ in range(3):  # the first pass fills host memory
            output = streamed(batch)
        before = streamed.stats()
        streamed(batch)
        stats = streamed.stats()
    read, copied = stats.bytes_read - before.bytes_read, stats.bytes_from_host - before.bytes_from_host
    print(f"the outputs are {'equal' if torch.equal(output, expected) else 'DIFFERENT'}")
    print(f"stay where it computes: {stats.bytes_kept / MIB:.0f} MiB, of a peak of {stats.peak_bytes / MIB:.0f}")
    print(f"copied from host memory in a step: {copied / MIB:.0f} MiB; read from storage: {read / MIB:.0f} MiB")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory(dir=".") as folder:
            main(folder)
