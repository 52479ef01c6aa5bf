"""Tries an op for real: loads it, makes a handle, writes a page and reads it back, in a process of its own.

That process is forked from the report's, which has imported torch but loaded no op. Whatever becomes of it, the report
goes on. CUDA and cuFile work in it since the report itself uses neither.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from nvme_ops.io.arguments import cache_mode, require_usable_names
from nvme_ops.op_builder import AsyncIOBuilder, OpBuilder
from nvme_ops.op_builder.builder import load_finished

LIMIT = 60.0  # seconds for all of it, on storage that is busy
PAGE = 4096  # bytes


@dataclass(frozen=True)
class Failure:
    """Why something did not work."""

    words: str
    errno: int | None = None


@dataclass(frozen=True)
class Attempt:
    """What became of an op."""

    loaded: bool = False  # False where it would be compiled first
    warnings: Sequence[str] = ()  # of its loader
    problem: Failure | None = None  # why a handle does not work
    backend: str = ""  # of the handle
    backends: Mapping[str, str | None] = field(default_factory=dict)  # why each is not usable; None where it is
    folders: Mapping[str, Failure | None] = field(default_factory=dict)  # why no page went there and back


def attempt(builder: OpBuilder, folders: Sequence[str] = ()) -> Attempt:
    """Loads an op that is built; of ``async_io`` a handle then moves a page, also in each of ``folders``."""
    try:
        outcome, end = in_another_process(lambda: _use(builder, folders), LIMIT)
    except OSError:  # a limit on processes or descriptors, with which a handle may work
        outcome, end = _use(builder, folders), ""
    if end:
        return Attempt(loaded=True, problem=Failure(f"the process that tried it {end}"))
    failures = {folder: failure and Failure(**failure) for folder, failure in outcome.pop("folders").items()}
    problem = outcome.pop("problem")
    return Attempt(**outcome, problem=problem and Failure(**problem), folders=failures)


def wrong_setting() -> str:
    """Returns which variable a handle refuses before the op is compiled; an empty string if none."""
    try:
        require_usable_names(None)
        cache_mode(None)
    except ValueError as error:
        return str(error)
    return ""


# In the other process


def _use(builder: OpBuilder, folders: Sequence[str]) -> dict[str, Any]:
    outcome: dict[str, Any] = {"loaded": False, "problem": None, "folders": {}}
    with _noting(outcome, "problem"):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            module: Any = load_finished(builder)
        outcome |= {"loaded": module is not None, "warnings": [str(warning.message) for warning in caught]}
        if module is None or builder.name != AsyncIOBuilder.NAME:
            return outcome
        from nvme_ops.io.handle import aio_handle

        outcome["backends"] = module.backends()
        handle = aio_handle()
        outcome["backend"] = handle.backend
        _move_page(handle, _any_file())
        for folder in folders:
            with _noting(outcome["folders"], folder):
                _move_page(handle, _file_in(folder))
    return outcome


@contextlib.contextmanager
def _noting(failures: dict[str, Any], name: str) -> Iterator[None]:
    failures[name] = None
    try:
        yield
    except Exception as error:
        code = errno.ENOMEM if isinstance(error, MemoryError) else getattr(error, "errno", None)
        failures[name] = {"words": str(error) or type(error).__name__, "errno": code}


def _file_in(folder: str | None) -> int:
    with tempfile.TemporaryFile(dir=folder) as file:  # without a name: others may write to the folder
        return os.dup(file.fileno())


def _any_file() -> int:
    """Opens a file for a page: a handle that works is not to blame for a missing or full folder of temporary files."""
    try:
        file = _file_in(None)
        os.posix_fallocate(file, 0, PAGE)
    except OSError:
        return os.memfd_create("nvme-report")
    return file


def _move_page(handle: Any, file: int) -> None:
    data = os.urandom(PAGE)
    back = memoryview(bytearray(PAGE + 1))[1:]  # through staging memory, as most memory that is not aligned
    try:
        handle.sync_pwrite(memoryview(b"." + data)[1:], file)
        handle.sync_pread(back, file)
    except OSError as error:
        raise OSError(error.errno, error.strerror) from None  # the file has no name
    if back != data:
        raise OSError(errno.EIO, "what was read is not what was written")


def in_another_process(work: Callable[[], dict[str, Any]], limit: float) -> tuple[dict[str, Any], str]:
    """Returns what ``work`` returned within ``limit`` seconds, or how its process ended instead.

    Raises:
        OSError: none can be started.
    """
    reading, writing = os.pipe()
    with open(reading, "rb", buffering=0):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # numpy has threads, which do nothing now
                child = os.fork()
            if child == 0:
                _answer(work, reading, writing)
        finally:
            os.close(writing)
        output = _read(reading, limit)
    if output is None:
        os.kill(child, signal.SIGKILL)  # one that is stuck in the kernel stays behind
        return {}, f"did not end in {limit:.0f} s"
    last = output.strip().rpartition("\n")[2]
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code == 0:
        return json.loads(last), ""
    end = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
    return {}, f"{end}: {last}" if last else end


def _answer(work: Callable[[], dict[str, Any]], reading: int, writing: int) -> NoReturn:
    """Writes what ``work`` returns as the last line of all that this process prints, and ends it."""
    status = 1
    try:
        for standard in (1, 2):
            os.dup2(writing, standard)
        os.close(reading)
        os.close(writing)  # a handle finds as many descriptors as elsewhere
        os.write(1, f"\n{json.dumps(work())}\n".encode())
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _read(pipe: int, limit: float) -> str | None:
    """Reads to the end; returns None instead of waiting for longer than ``limit``."""
    parts, end, poll = list[bytes](), time.monotonic() + limit, select.poll()
    poll.register(pipe, select.POLLIN)
    while poll.poll(max(0.0, end - time.monotonic()) * 1000):
        parts.append(os.read(pipe, 1 << 16))
        if not parts[-1]:
            return b"".join(parts).decode(errors="replace")
    return None
