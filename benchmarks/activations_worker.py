"""Trains a net in a process of its own, and prints what each step took; see activations.py."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint_sequential

from nvme_ops.offload import save_on_nvme

_LEAST = 1 << 20  # bytes; tensors of this size and more are saved by hand, too
_CHANNELS, _PIXELS = 16, 64  # of the convolutional net
_WIDTH, _TOKENS, _HEADS = 1024, 256, 16  # of the transformer


@dataclass
class Job:
    """What ``activations.py`` asks of a process."""

    way: str  # of WAYS
    net: str  # of NETS
    layers: int
    batch: int
    steps: int
    folder: str
    memory_budget: int
    group: str = ""  # a cgroup's file cgroup.procs to join once everything is imported


def convolutional(layers: int) -> tuple[torch.nn.Sequential, tuple[int, ...]]:
    """Returns blocks that compute little for each byte that they keep, and the shape of a sample."""
    blocks = [
        torch.nn.Sequential(
            torch.nn.Conv2d(_CHANNELS, _CHANNELS, 3, padding=1, groups=_CHANNELS, bias=False),
            torch.nn.BatchNorm2d(_CHANNELS),
            torch.nn.ReLU(),
        )
        for _ in range(layers)
    ]
    return torch.nn.Sequential(*blocks), (_CHANNELS, _PIXELS, _PIXELS)


def transformer(layers: int) -> tuple[torch.nn.Sequential, tuple[int, ...]]:
    """Returns blocks that compute much for each byte that they keep, and the shape of a sample."""
    blocks = [
        torch.nn.TransformerEncoderLayer(_WIDTH, _HEADS, 4 * _WIDTH, 0.0, torch.nn.functional.gelu, batch_first=True,
                                         norm_first=True)
        for _ in range(layers)
    ]  # fmt: skip
    return torch.nn.Sequential(*blocks), (_TOKENS, _WIDTH)


NETS = {"convolutional": convolutional, "transformer": transformer}


class ByHand(torch.autograd.graph.saved_tensors_hooks):
    """A file for each tensor, written immediately and read when it is asked for."""

    def __init__(self, folder: str, write: Callable[[str, torch.Tensor], Any], read: Callable[[str], torch.Tensor]):
        self.moved = self._count = 0

        def pack(tensor: torch.Tensor) -> Any:
            if tensor.nbytes < _LEAST or isinstance(tensor, torch.nn.Parameter):
                return tensor
            self._count += 1
            path = os.path.join(folder, f"{self._count}")
            write(path, tensor)
            self.moved += tensor.nbytes
            return path, tensor.nbytes

        def unpack(saved: Any) -> torch.Tensor:
            if isinstance(saved, torch.Tensor):
                return saved
            path, nbytes = saved
            tensor = read(path)
            os.unlink(path)
            self.moved += nbytes
            return tensor

        super().__init__(pack, unpack)


Step = Callable[[torch.Tensor], torch.Tensor]
Moved = Callable[[], int]


@contextlib.contextmanager
def memory(_: Job, net: torch.nn.Sequential) -> Iterator[tuple[Step, Moved]]:
    """Keeps everything."""
    yield net, lambda: 0


@contextlib.contextmanager
def checkpointed(job: Job, net: torch.nn.Sequential) -> Iterator[tuple[Step, Moved]]:
    """Keeps the inputs of parts, about as many as each has layers, and computes the rest again."""
    parts = max(1, round(job.layers**0.5))
    yield lambda x: checkpoint_sequential(net, parts, x, use_reentrant=False), lambda: 0


def ours(policy: Any) -> Callable[[Job, torch.nn.Sequential], Any]:
    """Returns the way of this package."""

    @contextlib.contextmanager
    def way(job: Job, net: torch.nn.Sequential) -> Iterator[tuple[Step, Moved]]:
        saving = save_on_nvme(job.folder, memory_budget=job.memory_budget, policy=policy)

        def forward(x: torch.Tensor) -> torch.Tensor:
            with saving:
                return net(x)

        def moved() -> int:
            stats = saving.stats()
            return stats.bytes_read + stats.bytes_written

        yield forward, moved
        saving.close()

    return way


def by_hand(write: Callable[[str, torch.Tensor], Any], read: Callable[[str], torch.Tensor]) -> Any:
    """Returns the way of hand-written hooks."""

    @contextlib.contextmanager
    def way(job: Job, net: torch.nn.Sequential) -> Iterator[tuple[Step, Moved]]:
        saving = ByHand(job.folder, write, read)

        def forward(x: torch.Tensor) -> torch.Tensor:
            with saving:
                return net(x)

        yield forward, lambda: saving.moved

    return way


def _numpy_save(path: str, tensor: torch.Tensor) -> None:
    np.save(path + ".npy", tensor.detach().contiguous().numpy())
    os.rename(path + ".npy", path)


WAYS: dict[str, Callable[[Job, torch.nn.Sequential], Any]] = {
    "memory": memory,
    "checkpoint": checkpointed,
    "nvme": ours("nvme"),
    "auto": ours("auto"),
    "torch": by_hand(lambda path, tensor: torch.save(tensor.detach().clone(), path), torch.load),
    "numpy": by_hand(_numpy_save, lambda path: torch.from_numpy(np.load(path))),
}


def status(name: str) -> int:
    """Returns an entry of ``/proc/self/status``, in bytes."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) * 1024


def digest(net: torch.nn.Module) -> int:
    """Returns a checksum of all gradients."""
    found = 0
    for each in net.parameters():
        if each.grad is not None:
            file = io.BytesIO(each.grad.contiguous().numpy().tobytes())
            found = zlib.crc32(file.getbuffer(), found)
    return found


def train(job: Job) -> dict[str, Any]:
    """Returns what each step took, and what became of it."""
    torch.manual_seed(1)
    net, shape = NETS[job.net](job.layers)
    net(torch.zeros(1, *shape))  # torch's setup at first use
    if job.group:
        Path(job.group).write_text("0", encoding="ascii")
    before = status("VmRSS")
    found: dict[str, Any] = {"forward": [], "backward": [], "moved": [], "gradients": []}
    with WAYS[job.way](job, net) as (forward, moved):
        for step in range(job.steps):
            x = torch.randn(job.batch, *shape, generator=torch.Generator().manual_seed(step)).requires_grad_()
            net.zero_grad()
            earlier = moved()
            begin = time.perf_counter()
            loss = forward(x).sum()
            middle = time.perf_counter()
            loss.backward()
            end = time.perf_counter()
            found["forward"].append(middle - begin)
            found["backward"].append(end - middle)
            found["moved"].append(moved() - earlier)
            found["gradients"].append(digest(net))
            del loss, x
    found["peak_bytes"] = status("VmHWM") - before
    return found


if __name__ == "__main__":
    print(json.dumps(train(Job(**json.loads(sys.argv[-1])))), flush=True)
