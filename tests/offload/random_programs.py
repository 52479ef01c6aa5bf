"""Random programs over tensors on storage, each run on plain torch as well: the same bits, or a refusal.

    TMPDIR=/dev/shm python -m tests.offload.random_programs swap_params 0 20000

A program is a list of statements of Python over one small model. It is written from a seed, on plain torch alone, so
that a seed is the same program whatever is tested. Each statement runs with the capability first. What that refuses, in
a sentence of its own, plain torch skips; what it raises otherwise, plain torch has to raise too; what both compute is
compared bit for bit.
"""

from __future__ import annotations

import contextlib
import gc
import json
import random
import sys
import tempfile
from collections.abc import Sequence

import torch

from nvme_ops.base import lifetime
from nvme_ops.offload.experts import experts
from nvme_ops.offload.residency import placement, policy
from nvme_ops.offload.weights import window
from nvme_ops.storage import slab
from tests.offload.elsewhere import apart
from tests.offload.random_comparison import Comparison, Outcome, Side, differences, opened
from tests.offload.random_mixture import Mixture, MixtureWriter
from tests.offload.random_model import Model, Statement
from tests.offload.random_statements import Writer

CAPABILITIES = ("swap_params", "swap_gradients", "stream_weights", "stream_mixture", "save_on_nvme", "one_memory")
LONGEST = 20  # seconds that a program may take


def run_program(capability: str, seed: int, folder: str, without: Sequence[str] = ()) -> Outcome:
    """Runs the program of a seed with a capability and on plain torch."""
    program = write_program(capability, seed, without)
    ours, plain = model_of(capability, seed, without), model_of(capability, seed, without)
    with opened(capability, ours, folder, random.Random(seed)) as (saving, used):
        compared = Comparison(Side(ours, saving), Side(plain, contextlib.nullcontext()))
        known = compared.run(program)
        if not compared.outcome.failure:
            compared.end(known)
        if capability == "swap_params" and not compared.outcome.failure and random.Random(seed).random() < 0.2:
            used.restore()
            if known and (differs := differences(compared.ours.state(), compared.plain.state())) != "":
                compared._fail("restored", differs)
        return compared.outcome


def write_program(capability: str, seed: int, without: Sequence[str] = ()) -> list[Statement]:
    """Returns the program of a seed; ``without`` some kinds of words."""
    count = random.Random(seed).randint(6, 30)
    writer = MixtureWriter if capability == "stream_mixture" else Writer
    return writer(capability, seed, model_of(capability, seed, without), without).write(count)


def model_of(capability: str, seed: int, without: Sequence[str] = ()) -> Model | Mixture:
    """The same model for the same seed."""
    model = Mixture(seed) if capability == "stream_mixture" else Model(seed, without)
    return model.eval().requires_grad_(False) if capability.startswith("stream_") else model


def run_many(capability: str, seeds: range, folder: str, without: Sequence[str] = ()) -> tuple[list[str], int]:
    """Runs the programs of seeds in children; returns failures, and how many statements were equal on both sides."""
    for owner, name, value in (  # memory that others hold is given up soon, and small weights are streamed too
        *((owner, "patience", 0.005) for owner in (policy.Policy, window.Window, experts.Experts)),
        (lifetime, "_POLL", 0.002), (placement, "_SMALL", 0),
        (slab.Slab.__init__, "__defaults__", (1 << 20,)),  # a tmpfs fills what is allocated: 256 MiB for each program
    ):  # fmt: skip
        setattr(owner, name, value)
    torch.set_num_threads(1)
    for seed in range(30):  # what torch imports when it is used first
        write_program("swap_params", seed)
        write_program(capability, seed)
    gc.collect()
    gc.freeze()

    def work(seed: str) -> list[str]:
        return [json.dumps(vars(run_program(capability, int(seed), folder, without)))]

    failures, equal = [], 0
    for name, (line,) in apart(list(map(str, seeds)), work, LONGEST).items():
        outcome = Outcome(**json.loads(line)) if line.startswith("{") else Outcome(line)
        equal += outcome.equal
        if outcome.failure:
            program = "\n".join(statement.code for statement in write_program(capability, int(name), without))
            failures.append(f"{capability}, seed {name}: {outcome.failure}\n{program}")
    return failures, equal


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as where:
        print(*run_many(sys.argv[1], range(*map(int, sys.argv[2:])), where)[0], sep="\n")
