"""Activations on storage: this package against memory, computing again, and hand-written hooks.

Each way trains the same net in a process of its own and must get the same gradients as in memory, bit for bit. The
convolutional net computes little for each byte that it keeps: storage decides. The transformer computes much. The bound
is the longer of two times: computing in memory, and moving the same bytes at fio's best mixed rate.
"""

from __future__ import annotations

import itertools
import os
import statistics
import zlib
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint_sequential

from benchmarks import accelerators, command
from benchmarks.accelerators import BUS
from nvme_ops.base.command_line import size
from nvme_ops.base.text import size_words
from nvme_ops.measure.rows import Row, Sample, forget_peak, peak
from nvme_ops.measure.tables import Table
from nvme_ops.offload import save_on_nvme

GROUPS = {
    "convolutional": "a light convolutional net, in samples/s: storage decides",
    "transformer": "layers of a transformer, in samples/s: computing decides",
}
MEMORY = "in memory"
_COLUMNS = ("forward", "backward", "read and written", BUS, "GB/s", "device memory", "peak memory", "of the bound")
_WAYS = {
    MEMORY: "memory",
    "save_on_nvme": "nvme",
    'save_on_nvme, policy="auto"': "auto",
    "torch.utils.checkpoint": "checkpoint",
    "hooks by numpy.save": "numpy",
    "save_on_cpu(pin_memory=True)": "host",
}
_LAYERS = {"convolutional": 48, "transformer": 6}
_FIRST = 1  # steps that are not counted


def net_table(run: command.Run, net: str, scratch: str) -> Table:
    """Measures rows that all train the same net."""
    args, same, is_cpu = run.args, command.Alike("gradients"), run.args.device == accelerators.CPU
    batch = args.batch if net == "convolutional" else args.batch_of_transformer

    def train(way: str, setup: accelerators.Setup) -> Sample:
        job: dict[str, Any] = {"way": way, "net": net, "layers": _LAYERS[net], "batch": batch}
        job |= {"steps": _FIRST + args.steps, "budget": setup[0], "host": setup[1]}
        result = command.work("activations", scratch, args, **job)
        same.require(result["gradients"], way == "memory")
        names = ("forward", "backward", "moved", BUS)
        forward, backward, moved, bus = (statistics.median(result[name][_FIRST:]) for name in names)
        figures = {"forward": forward, "backward": backward}
        if moved:
            figures |= {"read and written": moved, "GB/s": moved / (forward + backward) / 1e9}
        figures |= {name: value for name, value in ((BUS, bus), *result["peak"].items()) if value}
        return Sample(forward + backward, batch, peak_bytes=result["peak_bytes"], figures=figures)

    rows, setups = list[Row](), accelerators.setups(args) or [(args.budget, None)]
    for label, way in _WAYS.items():
        for setup in setups[: None if way == "nvme" else way != ("host" if is_cpu else "numpy")]:
            name = label if is_cpu or way != "nvme" else f"{label}, {accelerators.words_of(*setup)}"
            rows.append(Row(name, partial(train, way, setup), before=os.sync))
    title = f"{net}, {_LAYERS[net]} layers, batch {batch}, budget {size_words(args.budget)}"
    table = Table(net, title, "samples/s", rows, MEMORY, _COLUMNS)
    accelerators.bounded_both_ways(run, scratch, table, batch)
    return table


# What follows runs in the row's own process.

_MIN = 1 << 20  # bytes; tensors of this size and more are saved by hand, too
_CHANNELS, _PIXELS = 16, 64  # of the convolutional net
_WIDTH, _TOKENS, _HEADS = 1024, 256, 16  # of the transformer


def _net(job: Namespace) -> tuple[torch.nn.Sequential, tuple[int, ...]]:
    """Returns blocks that compute little, or much, for each byte that they keep, and the shape of a sample."""
    if job.net == "transformer":
        blocks: list[torch.nn.Module] = [
            torch.nn.TransformerEncoderLayer(_WIDTH, _HEADS, 4 * _WIDTH, 0.0, torch.nn.functional.gelu,
                                             batch_first=True, norm_first=True) for _ in range(job.layers)
        ]  # fmt: skip
        return torch.nn.Sequential(*blocks), (_TOKENS, _WIDTH)
    blocks = [torch.nn.Sequential(
        torch.nn.Conv2d(_CHANNELS, _CHANNELS, 3, padding=1, groups=_CHANNELS, bias=False),
        torch.nn.BatchNorm2d(_CHANNELS), torch.nn.ReLU()) for _ in range(job.layers)]  # fmt: skip
    return torch.nn.Sequential(*blocks), (_CHANNELS, _PIXELS, _PIXELS)


class ByHand(torch.autograd.graph.saved_tensors_hooks):
    """Hooks with a file for each tensor, written immediately and read on demand."""

    def __init__(self, folder: str) -> None:
        super().__init__(self._pack, self._unpack)
        self.bytes_read = self.bytes_written = 0
        self._paths = (os.path.join(folder, f"{number}.npy") for number in itertools.count())

    def stats(self) -> ByHand:
        """Returns what has the bytes moved so far."""
        return self

    def _pack(self, tensor: torch.Tensor) -> Any:
        if tensor.nbytes < _MIN or isinstance(tensor, torch.nn.Parameter):
            return tensor
        path = next(self._paths)
        np.save(path, tensor.detach().contiguous().numpy())
        self.bytes_written += tensor.nbytes
        return path

    def _unpack(self, saved: Any) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        tensor = torch.from_numpy(np.load(saved))
        os.unlink(saved)
        self.bytes_read += tensor.nbytes
        return tensor


def _forward(job: Namespace, net: torch.nn.Sequential) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns the forward pass; what moves tensors in it is in ``job.counting``."""
    if job.way == "memory":
        return net
    if job.way == "checkpoint":  # keeps the inputs of parts, about as many as each has layers
        parts = max(1, round(job.layers**0.5))
        return lambda x: checkpoint_sequential(net, parts, x, use_reentrant=False)
    if job.way == "host":
        hooks: Any = torch.autograd.graph.save_on_cpu(pin_memory=True)
    else:
        hooks = ByHand(job.folder) if job.way == "numpy" else None
        hooks = hooks or save_on_nvme(job.folder, policy=job.way, **accelerators.budgets(save_on_nvme, job))
        job.counting.append(hooks)

    def forward(x: torch.Tensor) -> torch.Tensor:
        with hooks:
            output: torch.Tensor = net(x)
            return output

    return forward


def work(job: Namespace) -> dict[str, Any]:
    """Trains a net; returns the times, bytes and gradients of each step, and the peak of memory."""
    if job.device.type == "cuda":  # whose kernels may add up in any order
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.manual_seed(1)
    net, shape = _net(job)
    net.to(job.device)(torch.zeros(1, *shape, device=job.device))  # torch's setup at first use
    before = forget_peak() or peak()
    result: dict[str, Any] = {"forward": [], "backward": [], "moved": [], BUS: [], "gradients": []}
    job.counting = []
    forward = _forward(job, net)
    for step in range(job.steps):
        x = torch.randn(job.batch, *shape, generator=torch.Generator().manual_seed(step))
        x = x.to(job.device).requires_grad_()
        net.zero_grad()
        moved, copied = accelerators.moved(job)
        begin = accelerators.clock(job.device)
        loss = forward(x).sum()
        middle = accelerators.clock(job.device)
        loss.backward()
        end = accelerators.clock(job.device)
        gradients = 0
        for parameter in net.parameters():
            if parameter.grad is not None:
                gradients = zlib.crc32(parameter.grad.cpu().contiguous().numpy().data, gradients)
        after = accelerators.moved(job)
        for name, value in {"forward": middle - begin, "backward": end - middle, "moved": after[0] - moved,
                            BUS: after[1] - copied, "gradients": gradients}.items():  # fmt: skip
            result[name].append(value)
        del loss, x
    return {**result, "peak_bytes": peak() - before}


def tables(run: command.Run, scratch: str, _: dict[str, Any]) -> Iterator[Table]:
    """Yields the tables of one folder."""
    for group in run.args.groups:
        yield net_table(run, group, scratch)


_FLAGS = {
    **accelerators.FLAGS,
    "--budget": ("memory for what is saved, on the CPU", "256M", size),
    "--batch": ("samples of the convolutional net", 64),
    "--batch-of-transformer": ("the same", 8),
    "--steps": ("of each process, after the first one", 2),
}
PROGRAM = command.Program(GROUPS, tables, 1, _FLAGS, accelerators.check, size="16G", rounds=5,
                          prepare=accelerators.prepare)  # fmt: skip
