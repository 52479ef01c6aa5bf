"""AdamW with its states on storage: this package, and what is written by hand, against memory and the device.

The table ``step`` times ``optimizer.step()`` alone, with random gradients, the files dropped from the page cache before
each; its bound is what fio takes for the same bytes, read and written at once. The table ``backward`` times whole
training steps of a model that computes for long, whose optimizer steps after the backward pass or during it. The table
``engines`` times those of this package and of DeepSpeed, on its own op and on ours, each in a process of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # so that it runs from anywhere, uninstalled too

import torch

import nvme_ops
from benchmarks import command
from benchmarks.file_rows import FIO_BEST
from benchmarks.training_engines import engine_rows
from benchmarks.training_worker import forget
from nvme_ops.arguments import positive, size
from nvme_ops.bench import fio
from nvme_ops.bench.measure import Row, Sample, WrongData, timed
from nvme_ops.bench.tables import Table
from nvme_ops.measuring.files import require_space
from nvme_ops.offload import NvmeOptimizer
from nvme_ops.text import MIB, size_words

GROUPS = {
    "step": "optimizer.step(): in memory, NvmeOptimizer, torch.save and torch.load by hand, fio",
    "backward": "whole steps of a model that computes: in memory, NvmeOptimizer after and during the backward pass",
    "engines": "whole steps with states, or states and parameters, on storage: nvme_ops, and DeepSpeed on both ops",
}
MEMORY = "in memory"
_WIDTH = 2048  # of a layer: 4 M parameters
_STATES = 8  # bytes for each parameter: exp_avg, exp_avg_sq
_OPTIONS: dict[str, Any] = {"lr": 1e-4, "fused": True}


def parameters(nbytes: int) -> list[torch.nn.Parameter]:
    """Returns parameters of about so many bytes in all, with gradients."""
    torch.manual_seed(1)
    made = []
    for _ in range(max(1, nbytes // (4 * _WIDTH * _WIDTH))):
        each = torch.nn.Parameter(torch.randn(_WIDTH, _WIDTH))
        each.grad = torch.randn(_WIDTH, _WIDTH)
        made.append(each)
    return made


class ByHand:
    """An optimizer whose states are saved by torch.save after each step, and loaded before it."""

    def __init__(self, made: list[torch.nn.Parameter], path: str) -> None:
        self._optimizer, self._path = torch.optim.AdamW(made, **_OPTIONS), path

    def step(self) -> None:
        """Loads, steps, saves and forgets."""
        if os.path.exists(self._path):
            self._optimizer.load_state_dict(torch.load(self._path, weights_only=True))
        self._optimizer.step()
        torch.save(self._optimizer.state_dict(), self._path)
        self._optimizer.state.clear()


def step_rows(scratch: str, given: argparse.Namespace, stack: contextlib.ExitStack) -> Iterator[Table]:
    """All update equal parameters with equal gradients, so that they can be compared."""
    made = {name: parameters(given.size) for name in (MEMORY, "nvme_ops", "by hand")}
    states = sum(each.numel() for each in made[MEMORY]) * _STATES
    ours = stack.enter_context(
        NvmeOptimizer(made["nvme_ops"], torch.optim.AdamW, scratch, memory_budget=given.budget, **_OPTIONS)
    )
    hand = ByHand(made["by hand"], os.path.join(scratch, "states.pt"))
    memory = torch.optim.AdamW(made[MEMORY], **_OPTIONS)
    steps = {MEMORY: 0, "nvme_ops": 0, "by hand": 0}

    def row(label: str, name: str, step: Callable[[], Any]) -> Row:
        def run() -> Sample:
            steps[name] += 1
            return timed(step, 2 * states)

        def check() -> None:
            while steps[MEMORY] < steps[name]:
                steps[MEMORY] += 1
                memory.step()
            for one, other in zip(made[MEMORY], made[name], strict=True):
                if not torch.equal(one, other):
                    raise WrongData("a parameter differs from that of the optimizer in memory")

        return Row(label, run, partial(forget, scratch), check)

    rows = [
        row(MEMORY, MEMORY, memory.step),
        row(f"NvmeOptimizer, {size_words(given.budget)}", "nvme_ops", ours.step),
        row("torch.save and torch.load", "by hand", hand.step),
    ]
    path = os.path.join(scratch, "fio")
    nvme_ops.aio_handle().write(nvme_ops.empty(states, dtype=torch.uint8).fill_(1), path)
    before = partial(forget, scratch)
    rows.append(fio.row(f"{FIO_BEST}, half read, half written", "rw", lambda: path, states, before, fio.best(states)))
    yield Table("step", f"AdamW, {size_words(states)} of states: read and written", "GB/s", rows, MEMORY)


def backward_rows(scratch: str, given: argparse.Namespace, stack: contextlib.ExitStack) -> Iterator[Table]:
    """A model of equal layers."""
    count = max(1, given.size // (4 * _WIDTH * _WIDTH))
    inputs = torch.randn(given.batch, _WIDTH)

    def model() -> torch.nn.Module:
        torch.manual_seed(1)
        return torch.nn.Sequential(*(torch.nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(count)))

    def row(label: str, make: Callable[[Any], torch.optim.Optimizer]) -> Row:
        module = model()
        optimizer = make(module.parameters())

        def step() -> None:
            optimizer.zero_grad()
            module(inputs).square().mean().backward()
            optimizer.step()

        return Row(label, lambda: timed(step, given.batch), partial(forget, scratch))

    def ours(overlap: Any) -> Callable[[Any], torch.optim.Optimizer]:
        options: dict[str, Any] = {"memory_budget": given.budget, "overlap": overlap, **_OPTIONS}
        return lambda those: stack.enter_context(NvmeOptimizer(those, torch.optim.AdamW, scratch, **options))

    rows = [
        row(MEMORY, lambda those: torch.optim.AdamW(those, **_OPTIONS)),
        row("NvmeOptimizer", ours(None)),
        row('NvmeOptimizer, overlap="backward"', ours("backward")),
    ]
    yield Table("backward", f"{count} layers of {_WIDTH}, batch {given.batch}", "samples/s", rows, MEMORY, ())


def tables(run: command.Run, scratch: str, _: dict[str, Any]) -> Generator[Table, None, None]:
    """Of one folder."""
    for group, make in {"step": step_rows, "backward": backward_rows, "engines": engine_rows}.items():
        if group in run.given.groups:
            require_space(scratch, 8 * run.given.size, "--size or --path")
            with contextlib.ExitStack() as stack:
                yield from make(scratch, run.given, stack)


def measure(given: argparse.Namespace) -> command.Run:
    """All groups."""
    run = command.Run(given, budget=given.budget, batch=given.batch)
    return run.folders(8, tables)


def main(words: Sequence[str] | None = None) -> int:
    """Status 0; 1 when a folder cannot be used or parameters differ; 2 for wrong arguments; 130 after Ctrl-C."""
    parser = command.parser(__file__, __doc__, GROUPS)
    parser.set_defaults(size=848 * MIB, rounds=5)  # 222 million parameters
    parser.add_argument("--budget", type=size, default=256 * MIB, metavar="SIZE",
                        help="memory for states (default 256M)")  # fmt: skip
    parser.add_argument("--batch", type=positive, default=2048, metavar="N",
                        help="samples of a step of the group backward (default 2048)")  # fmt: skip
    parser.add_argument("--batch-of-engines", type=positive, default=64, metavar="N",
                        help="samples of a step of the group engines (default 64)")  # fmt: skip
    parser.add_argument("--steps", type=positive, default=4, metavar="N",
                        help="of each process of the group engines, after the first one (default 4)")  # fmt: skip
    return command.run(command.parse(parser, words), measure)


if __name__ == "__main__":
    sys.exit(main())
