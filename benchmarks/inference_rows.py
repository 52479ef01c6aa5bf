"""Those who decode with weights that are on storage: how each is started, and what its process says."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import json
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import command, memory_limit
from benchmarks.file_rows import FIO_BEST
from benchmarks.inference_worker import Job
from nvme_ops.bench import fio
from nvme_ops.bench.measure import Row, Sample, Unavailable, WrongData, spread
from nvme_ops.text import MIB, size_words

MEMORY, OURS = "in memory", "nvme_ops"
COLUMNS = ("step", "first token", "load", "read per step", "peak memory", "while decoding", "of the bound")
_WORKER = Path(__file__).parent / "inference_worker.py"
_PROGRAM = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')"
_SPARE = 128 * MIB  # beside the budget, for the process whose memory is limited
_SETTLING = 1.0  # seconds for discards, which nothing can wait for


@dataclass(frozen=True)
class Contender:
    """``load`` names the function of ``inference_worker.LOADS``, ``package`` what it needs beside transformers."""

    name: str
    group: str
    load: str
    budget: int = 0
    package: str = "transformers"


def contenders(budgets: Sequence[int], deepspeed: bool) -> list[Contender]:
    """All of them, in the order of the table; each that takes a budget once for each."""
    made = [Contender(MEMORY, "memory", "memory")]
    for budget in budgets:
        words = size_words(budget)
        limit = size_words(budget + _SPARE)
        made += [
            Contender(f"nvme_ops from_pretrained, {words}", OURS, "pretrained", budget),
            Contender(f"nvme_ops stream_weights, {words}", OURS, "stream_weights", budget),
            Contender(f"accelerate, device_map, {words}", "accelerate", "dispatch", budget, "accelerate"),
            Contender(f"transformers, disk map, {words}", "accelerate", "disk_map", budget, "accelerate"),
            Contender(f"from_pretrained alone, limit of {limit}", "mapped", "mapped", budget),
        ]
    made.append(Contender("accelerate.disk_offload", "accelerate", "disk_offload", 0, "accelerate"))
    if deepspeed:
        made += [
            Contender("DeepSpeed ZeRO-Inference, defaults", "deepspeed", "zero", 0, "deepspeed"),
            *(Contender(f"DeepSpeed ZeRO-Inference, tuned, {size_words(budget)}", "deepspeed", "zero_tuned", budget,
                        "deepspeed") for budget in budgets),
        ]  # fmt: skip
    return made


@dataclass
class Work:
    """One model in one folder, decoded for one batch size; what each process said is kept."""

    model: str
    scratch: str
    batch: int
    steps: int
    prompt: int
    warm: bool
    expected: list[list[int]] = field(default_factory=list)  # the tokens of the model in memory
    said: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    @property
    def file(self) -> str:
        """The weights."""
        return os.path.join(self.model, "model.safetensors")

    def decode(self, each: Contender) -> Sample:
        """Decodes in a new process. Raises Unavailable with the reason, or WrongData for other tokens."""
        for package in ("transformers", each.package):
            if importlib.util.find_spec(package) is None:
                raise Unavailable(f"not installed: pip install {package}")
        bound = each.budget + _SPARE if each.load == "mapped" else None
        limit = memory_limit.limited(bound) if bound else contextlib.nullcontext("")
        with tempfile.TemporaryDirectory(dir=self.scratch) as folder, limit as group:
            job = Job(
                each.load, self.model, folder, each.budget, self.batch, self.steps, self.prompt, not self.warm, group
            )
            program = _PROGRAM + ("  # finds nvme_ops" if each.group == OURS else "")
            words = json.dumps(dataclasses.asdict(job))
            found = json.loads(command.in_new_process(program, str(_WORKER), words, folder=folder))
        self.said.setdefault(each.name, []).append(found)
        if each.name == MEMORY and not self.expected:
            self.expected = found["tokens"]
        if self.expected and found["tokens"] != self.expected:
            steps = [step for step, (mine, other) in enumerate(zip(found["tokens"], self.expected, strict=True))
                     if mine != other]  # fmt: skip
            raise WrongData(f"tokens differ from those of the model in memory, first in step {steps[0]}")
        middle = spread(found["steps"])
        return Sample(
            middle.median if middle else 0.0,
            self.batch,
            peak_bytes=found["peak_bytes"],
            figures={
                "step": middle.median if middle else 0.0,
                "first token": found["first_token"],
                "load": found["load"],
                "read per step": found["bytes_read"],
                "while decoding": found["decoding_bytes"],
            },
        )


def rows(work: Work, those: Sequence[Contender]) -> list[Row]:
    """One for each contender, the model in memory first, whose tokens the others are compared with."""
    return [Row(each.name, functools.partial(work.decode, each), before=settle) for each in those]


def settle() -> None:
    """Waits until the device has done what the row before has left it: writes, and discards of removed files."""
    os.sync()
    time.sleep(_SETTLING)


def fio_rows(work: Work) -> list[Row]:
    """Fio at its best over the whole file: as many tokens as weights that are read for each step allow."""

    def shown(sample: Sample) -> Sample:
        return Sample(sample.seconds, work.batch, figures={"step": sample.seconds, "read per step": sample.amount})

    size = os.path.getsize(work.file)
    return [fio.row(f"{FIO_BEST}, all weights", "read", lambda: work.file, size, settle, fio.best(size), shown=shown)]


def add_bounds(table_rows: Sequence[Row]) -> None:
    """Adds to each sample what part of its time the bound is: that of computing in memory, or of its reads by fio.

    Both are medians of this run.
    """
    rate, compute = 0.0, 0.0
    for row in table_rows:
        samples = [sample for sample in row.samples if sample is not None]
        if row.name.startswith("fio ") and samples:
            found = spread([each.figures["read per step"] / each.seconds for each in samples])
            rate = found.median if found else 0.0
        elif row.name == MEMORY and samples:
            found = spread([each.seconds for each in samples])
            compute = found.median if found else 0.0
    if not rate or not compute:
        return
    for row in table_rows:
        if not row.name.startswith("fio "):
            for sample in filter(None, row.samples):
                bound = max(compute, sample.figures["read per step"] / rate)
                sample.figures["of the bound"] = bound / sample.seconds
