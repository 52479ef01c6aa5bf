"""Rows that several processes run concurrently, one for each folder or rank."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from nvme_ops.bench.engines import Contender, make_row
from nvme_ops.bench.engines.task import Task
from nvme_ops.bench.measure import Row, Sample, Unavailable, WrongData
from nvme_ops.bench.remote import Remote


def make_rows(task: Task, contenders: Sequence[Contender]) -> list[Row]:
    """Returns all rows of one process, which share the file and its memory."""
    return [make_row(contender, task) for contender in contenders]


def joint_row(name: str, remotes: Sequence[Remote], number: int) -> Row:
    """Joins row ``number`` of all these processes, started together, into one row: their sum."""
    row = Row(name, lambda: Sample(1, 1))

    def ask(command: str) -> Any:
        answers, asked = [], []
        failures: list[Exception] = []
        for remote in remotes:
            try:
                remote.send(number, command)
                asked.append(remote)
            except Unavailable as error:
                failures.append(error)
        for remote in asked:  # read all answers, or the next request would get an old one
            try:
                answer, row.note = remote.receive()
                answers.append(answer)
            except (Unavailable, RuntimeError, WrongData) as error:
                failures.append(error)
        if failures:
            raise failures[-1]
        return answers

    def run() -> Sample:
        begin = time.perf_counter()
        samples = ask("run")
        return combined(samples, time.perf_counter() - begin)

    row.run, row.before, row.check = run, lambda: ask("before"), lambda: ask("check")
    return row


def combined(samples: Sequence[Sample], end_to_end: float) -> Sample:
    """Joins passes of concurrent processes: the longest time, the sum of the rest, as in ds_io."""

    def total(values: Sequence[Any]) -> Any:
        return None if any(value is None for value in values) else sum(values)

    found = [sample for sample in samples if sample.from_page_cache is not None]
    cached = sum((sample.from_page_cache or 0) * sample.amount for sample in found)
    submits = [sample.submit_seconds for sample in samples if sample.submit_seconds is not None]
    return replace(
        samples[0],
        seconds=max(sample.seconds for sample in samples),
        amount=sum(sample.amount for sample in samples),
        cpu_seconds=total([sample.cpu_seconds for sample in samples]),
        submit_seconds=max(submits, default=None),
        peak_bytes=total([sample.peak_bytes for sample in samples]),
        end_to_end=end_to_end,
        from_page_cache=cached / sum(sample.amount for sample in found) if found else None,
    )
