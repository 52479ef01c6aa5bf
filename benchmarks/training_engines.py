"""The table ``engines`` of training.py: whole training steps, each engine in a process of its own."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import os
import statistics
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import command
from benchmarks.training_worker import INNER, WIDTH, Job
from nvme_ops.bench.measure import Row, Sample, Unavailable, WrongData
from nvme_ops.bench.tables import Table

MEMORY = "in memory"
COLUMNS = ("forward", "backward", "optimizer", "read per step", "written per step", "peak memory")
_WORKER = Path(__file__).parent / "training_worker.py"
_PROGRAM = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')"
_FIRST = 1  # steps before those that are counted: there are no states yet
_ENGINES = (
    (MEMORY, "memory", False),
    ("fully_shard, CPUOffloadPolicy", "cpu_offload", False),
    ("nvme_ops, states", "nvme_ops", False),
    ("nvme_ops, states and parameters", "nvme_ops", True),
    ("DeepSpeed, states", "deepspeed", False),
    ("DeepSpeed, states and parameters", "deepspeed", True),
    ("DeepSpeed on our op, states", "deepspeed on nvme_ops", False),
    ("DeepSpeed on our op, both", "deepspeed on nvme_ops", True),
)


def engine_rows(scratch: str, given: argparse.Namespace, _: contextlib.ExitStack) -> Iterator[Table]:
    """All train the same model, and must find the losses of the one in memory."""
    blocks = max(1, given.size // (2 * 4 * WIDTH * INNER))
    expected: list[float] = []

    def train(engine: str, parameters: bool) -> Sample:
        if engine.startswith("deepspeed") and (given.no_deepspeed or importlib.util.find_spec("deepspeed") is None):
            raise Unavailable("left out" if given.no_deepspeed else "not installed: pip install deepspeed")
        with tempfile.TemporaryDirectory(dir=scratch) as folder:
            job = Job(engine, folder, blocks, given.batch_of_engines, _FIRST + given.steps, parameters, given.budget)
            program = _PROGRAM + ("  # finds nvme_ops" if "nvme_ops" in engine else "")
            words = json.dumps(dataclasses.asdict(job))
            found: dict[str, Any] = json.loads(command.in_new_process(program, str(_WORKER), words, folder=folder))
        if engine == "memory" and not expected:
            expected.extend(found["losses"])
        if engine == "deepspeed" and expected and found["losses"] != expected:
            raise Unavailable("other losses than in memory: see docs/deepspeed.md")
        if expected and found["losses"] != expected:
            raise WrongData(f"losses {found['losses']} are not those of the model in memory, {expected}")
        counted = {
            name: statistics.median(found[name][_FIRST:]) for name in ("forward", "backward", "step", "read", "written")
        }
        return Sample(
            counted["forward"] + counted["backward"] + counted["step"],
            given.batch_of_engines,
            peak_bytes=found["peak_bytes"],
            figures={
                "forward": counted["forward"],
                "backward": counted["backward"],
                "optimizer": counted["step"],
                "read per step": counted["read"],
                "written per step": counted["written"],
            },
        )

    rows = [Row(label, partial(train, engine, parameters), before=os.sync) for label, engine, parameters in _ENGINES]
    title = f"AdamW, {blocks * 2 * WIDTH * INNER / 1e6:.0f} million parameters, batch {given.batch_of_engines}"
    yield Table("engines", title, "samples/s", rows, MEMORY, COLUMNS)
