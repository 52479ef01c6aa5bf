"""Rows that run in a separate process: the code they load may exit, hang or change settings without affecting others.

Several such processes, asked concurrently, stand for several ranks.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from nvme_ops.measure import stop
from nvme_ops.measure.rows import Row, Sample, Unavailable, WrongData, cached_share_of

_LIMIT = 300.0  # seconds until an answer
_PATIENCE = 10.0  # seconds for a process to end by itself


class Remote:
    """A process, and the rows that ``make(*arguments)`` returns in it when the first one is needed."""

    def __init__(self, make: Callable[..., list[Row]], *arguments: object, limit: float = _LIMIT) -> None:
        self._limit = limit
        self._output = tempfile.TemporaryFile("r+", errors="replace")  # noqa: SIM115  (without a name)
        self._gone = ""  # why there is no process any more
        context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        self._pipe, theirs = context.Pipe()
        output = f"/proc/{os.getpid()}/fd/{self._output.fileno()}"
        self._process = context.Process(target=_serve, args=(theirs, output, make, arguments), daemon=True)
        resource_tracker.ensure_running()  # started later, it would unblock the signal
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # for good, in the process
        try:
            with stop.deferred():
                self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()

    def __enter__(self) -> Remote:
        """Keeps the process until the end of the block."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Ends the process and everything it started; after an exception, such as a signal's, without waiting."""
        self._pipe.close()
        self._process.join(_PATIENCE if kind is None else 0)  # it leaves when the pipe is closed
        if self._process.is_alive():
            stop.kill_group(self._process)
        self._process.join()
        self._output.close()

    def send(self, number: int, command: str) -> None:
        """Has a method of row ``number`` called. Raises Unavailable if the process is gone."""
        if self._gone:
            raise Unavailable(self._gone)
        try:
            self._pipe.send((number, command))
        except OSError:
            self._give_up()

    def receive(self) -> tuple[Any, str]:
        """Returns the answer and the row's note, or raises the row's exception; Unavailable if the process is gone."""
        if self._gone:
            raise Unavailable(self._gone)
        try:
            if not self._pipe.poll(self._limit):
                self._give_up(f"no answer for {self._limit:g} s: its process was stopped")
            kind, answer, note = self._pipe.recv()
        except (EOFError, OSError):
            self._give_up()
        if kind is not None:
            raise kind(answer)
        return answer, note

    def _give_up(self, reason: str = "") -> NoReturn:
        """Raises Unavailable; without a reason, because the process has closed the pipe."""
        if not reason:
            self._process.join(_PATIENCE)
            reason = f"its process ended with status {self._process.exitcode}"
        if self._process.is_alive():
            stop.kill_group(self._process)
        words = [line.strip() for line in self._output if line.strip()]
        self._gone = f"{reason} ({words[-1]})" if words else reason
        raise Unavailable(self._gone)


def _serve(pipe: Connection, output: str, make: Callable[..., list[Row]], arguments: tuple[object, ...]) -> None:
    """Runs the parent's commands until it closes the pipe. All output goes to the file ``output``."""
    stop.serve_parent()
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # what it has said is there when it is killed
    rows: list[Row] = []
    while True:
        try:
            number, command = pipe.recv()
        except EOFError:
            return
        try:
            rows = rows or make(*arguments)
            result = getattr(rows[number], command)()  # it checks the page cache: it may be alone in knowing the file
            answer: tuple[type[Exception] | None, Any, str] = (None, result, rows[number].note)
        except (Unavailable, WrongData) as reason:
            answer = (type(reason), str(reason), "")
        except Exception as error:  # the parent keeps any exception as a note
            answer = (RuntimeError, f"{type(error).__name__}: {error}", "")
        pipe.send(answer)


def joint_row(name: str, remotes: Sequence[Remote], number: int) -> Row:
    """Returns a row that starts row ``number`` of all processes together, and joins their passes."""
    row = Row(name)

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
        samples = ask("measure")
        return combined(samples, time.perf_counter() - begin)

    row.run, row.before, row.check = run, lambda: ask("prepare"), lambda: ask("check")
    return row


def combined(samples: Sequence[Sample], end_to_end: float) -> Sample:
    """Joins passes of concurrent processes: the longest time, the sum of the rest, as in ds_io."""

    def total(values: Sequence[Any]) -> Any:
        return None if any(value is None for value in values) else sum(values)

    submits = [sample.submit_seconds for sample in samples if sample.submit_seconds is not None]
    return replace(
        samples[0],
        seconds=max(sample.seconds for sample in samples),
        amount=sum(sample.amount for sample in samples),
        cpu_seconds=total([sample.cpu_seconds for sample in samples]),
        submit_seconds=max(submits, default=None),
        peak_bytes=total([sample.peak_bytes for sample in samples]),
        end_to_end=end_to_end,
        from_page_cache=cached_share_of(samples),
    )
