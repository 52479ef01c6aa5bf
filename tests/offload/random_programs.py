"""Random programs over tensors on storage, each run on plain torch as well: the same bits, or a refusal.

    python -m tests.offload.random_programs swap_params 20000

A program is a list of statements of Python over one small model. It is written from a seed, on plain torch alone, so
that a seed is the same program whatever is tested. Each statement runs with the capability first. What that refuses, in
a sentence of its own, plain torch skips; what it raises otherwise, plain torch has to raise too; what both compute is
compared bit for bit. A statement with a ``line`` is interrupted (Ctrl-C) at that line of nvme_ops: a write has then
happened as a whole, or not at all. A program that fails is printed without the statements that it fails without.
"""

from __future__ import annotations

import contextlib
import gc
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from nvme_ops._native import native
from nvme_ops.offload import residency
from nvme_ops.offload.weights import residents, streamed, window
from tests.offload.elsewhere import apart
from tests.offload.random_comparison import Comparison, Outcome, Side, differences, opened
from tests.offload.random_model import Statement, model_of
from tests.offload.random_statements import Writer

CAPABILITIES = ("swap_params", "swap_gradients", "stream_weights", "save_on_nvme", "NvmeOptimizer")
LONGEST = 20  # seconds that a program may take


def run_program(
    capability: str, seed: int, program: Sequence[Statement], folder: str, without: Sequence[str] = ()
) -> Outcome:
    """Runs a program with a capability and on plain torch."""
    _be_quick()
    if capability == "NvmeOptimizer":
        from tests.offload import random_optimizers

        with tempfile.TemporaryDirectory(dir=folder) as folder:
            return random_optimizers.run_program(seed, program, folder, without)
    ours, plain = model_of(capability, seed, without), model_of(capability, seed, without)
    with opened(capability, ours, folder, random.Random(seed)) as (saving, used):
        compared = Comparison(Side(ours, saving), Side(plain, contextlib.nullcontext()))
        known = compared.run(program)
        compared.end(known)
        if capability == "stream_weights" and not compared.outcome.failure:
            compared.outcome.counts["bytes read"] += used.stats().bytes_read
        if capability == "swap_params" and not compared.outcome.failure and random.Random(seed).random() < 0.2:
            used.restore()
            if known and (found := differences(compared.ours.state(), compared.plain.state())) != "":
                compared._fail("a difference", f"restored: {found}")
        return compared.outcome


def _be_quick() -> None:
    """Memory that others hold is given up soon, and small weights are streamed too."""
    for module, name, value in (
        (residents.Residents, "patience", 0.03), (residency, "_LONG", 0.01), (window.Window, "patience", 0.03),
        (streamed, "_SMALL", 0),
    ):  # fmt: skip
        if hasattr(module, name):
            setattr(module, name, value)
    torch.set_num_threads(1)


# Many programs run


def write_program(capability: str, seed: int, without: Sequence[str] = ()) -> list[Statement]:
    """Returns the program of a seed; ``without`` some kinds of statements."""
    if capability == "NvmeOptimizer":
        from tests.offload.random_optimizers import OptimizerWriter

        return OptimizerWriter(seed, without).write(random.Random(seed).randint(6, 30))
    return Writer(capability, seed, without).write(random.Random(seed).randint(6, 30))


def outcomes(seeds: Sequence[int], work: Callable[[int], Outcome]) -> Iterator[tuple[int, Outcome]]:
    """Runs programs in children; a crash or a hang is an outcome."""
    native()  # which may have to be compiled
    for seed, (line,) in apart(
        list(map(str, seeds)), lambda seed: [json.dumps(vars(work(int(seed))))], LONGEST
    ).items():
        if line.startswith("{"):
            found = json.loads(line)
            yield int(seed), Outcome(**{**found, **{name: Counter(found[name]) for name in ("refusals", "counts")}})
        else:
            yield int(seed), Outcome("hangs" if "SIGALRM" in line else "crashes, or the harness raises", detail=line)


def shrunk(
    capability: str, seed: int, program: list[Statement], kind: str, folder: str, without: Sequence[str]
) -> list[Statement]:
    """Returns the program without the statements that it fails without."""

    def fails(tried: list[Statement]) -> bool:
        found = outcomes([seed], lambda seed: run_program(capability, seed, tried, folder, without))
        return next(found)[1].kind == kind

    end = time.monotonic() + 60
    for size in (8, 4, 2, 1, 1):
        at = len(program) - size
        while at >= 0 and time.monotonic() < end and not kind.startswith("hangs"):
            tried = program[:at] + program[at + size :]
            if fails(tried):
                program = tried
            at -= size
    plain = [Statement(each.code, each.kind) for each in program]
    return plain if fails(plain) else program


def printed(program: Sequence[Statement]) -> str:
    """A program as it is shown."""
    lines = [f"{each.code}{f'  # Ctrl-C at line {each.line}' if each.line else ''}" for each in program]
    return "\n".join("    " + line for each in lines for line in each.split("\n"))


@dataclass
class Summary:
    """What became of many programs."""

    programs: int = 0
    failures: list[str] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)


def run_many(
    capability: str,
    seeds: Sequence[int],
    folder: str,
    without: Sequence[str] = (),
) -> Summary:
    """Runs the programs of seeds; of each kind of failure, the first is shown."""
    _be_quick()
    for seed in range(30):  # what torch imports when it is used first
        write_program(capability, seed, without)
    gc.collect()
    gc.freeze()
    summary = Summary()

    def work(seed: int) -> Outcome:
        return run_program(capability, seed, write_program(capability, seed, without), folder, without)

    for seed, outcome in outcomes(seeds, work):
        summary.programs += 1
        summary.refusals += outcome.refusals
        summary.counts += outcome.counts
        if not outcome.failure:
            continue
        kind = outcome.kind
        summary.kinds[kind] += 1
        if summary.kinds[kind] == 1:
            program = write_program(capability, seed, without)
            if outcome.at:
                del program[outcome.at + 1 :]
            program = shrunk(capability, seed, program, kind, folder, without)
            text = f"{capability}, seed {seed}: {outcome.failure}: {outcome.detail}\n{printed(program)}"
            summary.failures.append(text)
    return summary


if __name__ == "__main__":
    kind, programs, *first = sys.argv[1:]
    with tempfile.TemporaryDirectory() as where:
        print(*run_many(kind, range(int((first or ["0"])[0]), int(programs)), where).failures, sep="\n")
