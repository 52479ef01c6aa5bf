"""The table: what each capability does on a disk that fails. Each cell is a process of its own.

    python -m tests.faults.faulty_disk
    python -m tests.faults.faulty_disk --only Save,Load --fault stall

A cell is right where an OSError names the operation and the file, or the result is the one of a disk that is well;
where what was completed before is still there; where the same is done again once the disk is well; and where no
descriptor, thread, memory or temporary file is left.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import itertools
import json
import os
import pkgutil
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import torch
from torch.distributed.checkpoint import CheckpointException

import nvme_ops
from nvme_ops._native import native
from tests.contract.adapters import Capability, WrongResultError
from tests.contract.suite import ADAPTERS, NEEDS, SLACK, cause_of, files, forget_pages, judge, settled
from tests.faults.faulty_disk import FaultyDisk
from tests.faults.fuse import end_with_parent

STALL, LATE = 0.2, 10.0  # seconds of a stall; after which Ctrl-C has not come through
LIMIT = 900  # seconds of a process
UNMET = "no such request"
WHATS = "read", "write", "flush"
FAULTS = [
    *(f"{what} error" for what in WHATS),
    "write torn",
    *(f"{what} stall, {then}" for then in ("Ctrl-C", "exit") for what in WHATS),
]
DATA = 300_000  # bytes from which on a read is no system call, which the kernel does not interrupt
WATCH = os.WEXITED | os.WNOHANG | os.WNOWAIT


@dataclass
class Outcome:
    """What was seen in a cell. ``wrong`` is why it is not right."""

    how: str = UNMET
    words: str = ""
    wrong: list[str] = field(default_factory=list)


class Cells:
    """One capability under one fault after the other, in the process that does it."""

    def __init__(self, kind: type[Capability], disk: FaultyDisk, folder: Path) -> None:
        self.kind, self.disk, self.folder = kind, disk, folder
        self.outcome = Outcome()

    def run(self, faults: Sequence[str], tell: Callable[[Outcome], object]) -> None:
        """Does it, and tells each outcome, and one more at the end."""
        self.folder.mkdir()
        one = self.kind(self.folder)
        one.noticed = self._notice
        for step in (one.work, one.check, one.work):
            step()
        before, left = settled(), files(self.folder)
        for fault in faults:
            self.outcome = Outcome()
            forget_pages(self.folder)
            if self._under(fault, one):
                for name, step in (("check", one.check), ("again", one.work), ("check again", one.check)):
                    forget_pages(self.folder)
                    self._step(name, step)
                found = {**settled(), "files": files(self.folder) - self.kind.more_files}
                more = {name: count - {**before, "files": left}[name] for name, count in found.items()}
                self.outcome.wrong += [f"{name} left: {more[name]}" for name in more if more[name] > SLACK.get(name, 0)]
            tell(self.outcome)
        one.close()
        tell(Outcome("ended"))

    def _notice(self) -> None:
        """Ctrl-C has come through; what ends things now may wait for the device."""
        self.ended.set()

    def _step(self, name: str, step: Callable[[], None]) -> None:
        try:
            step()
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)
            self.outcome.wrong.append(f"{name}: {type(error).__name__}: {error}")

    def _under(self, fault: str, one: Capability) -> bool:
        """Works under the fault. Returns whether a request has met it."""
        words, _, self.then = fault.partition(", ")
        what, self.do = words.split()
        least = DATA if self.then == "Ctrl-C" and what == "read" else 0
        self.disk.rule(what, self.do, 1 if self.do == "torn" else -1, least)
        with self._helped(may_wait=what in one.waits):
            try:
                one.work()
                self.outcome.how = "right"
            except (KeyboardInterrupt, CheckpointException) as error:
                self._interrupted(error)
            except WrongResultError as error:
                self.outcome.how = "WRONG"
                self.outcome.wrong.append(f"silent: {error}")
            except Exception as error:
                self._failed(error)
        if self.disk.clear() == 0 and self.outcome.how == "right" and not self.released:
            self.outcome.how = UNMET
            return False
        if self.then == "Ctrl-C" and self.released:
            late = self.late.is_set()
            if late and what not in one.waits:
                self.outcome.wrong.append("Ctrl-C waited for the device")
            self.outcome.how += ", late" if late else ""
        return True

    def _interrupted(self, error: BaseException) -> None:
        if isinstance(cause_of(error), KeyboardInterrupt):
            self.outcome.how = "interrupted"
        else:
            self._failed(error)

    def _failed(self, error: BaseException) -> None:
        traceback.clear_frames(error.__traceback__)
        self.outcome.how, self.outcome.words = "raised", f"{type(error).__name__}: {error}"
        why = "a stall is no error" if self.do == "stall" else judge(error, FaultyDisk.folder)
        if why:
            self.outcome.wrong.append(f"{why}: {self.outcome.words}")

    @contextlib.contextmanager
    def _helped(self, may_wait: bool) -> Iterator[None]:
        """Ends a stall after a moment, or with Ctrl-C once that came through, or once it is late."""
        self.released, self.late, self.ended = False, threading.Event(), threading.Event()

        def help_it() -> None:
            while not self.disk.stalled():
                if self.ended.wait(0.01):
                    return
            self.released = True
            time.sleep(STALL)
            if self.then == "Ctrl-C" and not self.ended.is_set():
                os.kill(os.getpid(), signal.SIGINT)
                if not self.ended.wait(STALL if may_wait else LATE):
                    self.late.set()
            self.disk.clear()

        helper = threading.Thread(target=help_it)
        if self.do == "stall":
            helper.start()
        try:
            yield
        except KeyboardInterrupt:  # at the very end
            self.outcome.how = "interrupted"
        finally:
            self.ended.set()
            while helper.is_alive():
                with contextlib.suppress(KeyboardInterrupt):  # the same, a moment later
                    helper.join()


def leave(kind: type[Capability], fault: str, disk: FaultyDisk, folder: Path, tell: Callable[[str], object]) -> None:
    """Has it at work when the program ends, by ``sys.exit`` in a signal handler where it blocks."""
    folder.mkdir()
    one = kind(folder)
    forget_pages(folder)
    globals()["_left"] = one  # is not ended by being dropped
    done = threading.Event()

    def end_it() -> None:
        while not disk.stalled() and not done.wait(0.01):
            pass
        tell("leaving")
        if not done.wait(STALL / 2):
            os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    disk.rule(fault.split()[0], "stall")
    threading.Thread(target=end_it, daemon=True).start()
    try:
        one.leave()
    except CheckpointException as error:
        raise cause_of(error) from None
    done.set()


@contextlib.contextmanager
def child(errors: int) -> Iterator[tuple[int, int]]:
    """Forks; yields the child's process (0 in it) and the end of a pipe, the reading one in the parent."""
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        end_with_parent()
        os.close(reading)
        os.dup2(errors, 2)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        torch.set_num_threads(1)
    else:
        os.close(writing)
    try:
        yield process, writing if process == 0 else reading
    finally:
        if process:
            os.close(reading)


def in_process(disk: FaultyDisk, kind: type[Capability], faults: Sequence[str], folder: Path) -> list[Outcome]:
    """Returns what became of the cells of one capability, and of the whole."""
    outcomes: list[Outcome] = []
    with tempfile.TemporaryFile() as errors, child(errors.fileno()) as (process, pipe):
        if process == 0:
            try:
                Cells(kind, disk, folder).run(
                    faults, lambda one: os.write(pipe, json.dumps(vars(one)).encode() + b"\n")
                )
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        rescue = threading.Timer(LIMIT, os.kill, (process, signal.SIGKILL))
        rescue.start()
        with open(pipe, closefd=False) as lines:
            outcomes += [Outcome(**json.loads(line)) for line in lines]
        disk.clear()
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        rescue.cancel()
        if status != 0:
            errors.seek(0)
            outcomes.append(
                Outcome("DIED", "", [f"ended with {status}: {errors.read().decode(errors='replace')[-1500:]}"])
            )
    shutil.rmtree(folder)
    return outcomes


def at_exit(disk: FaultyDisk, kind: type[Capability], fault: str, folder: Path) -> Outcome:
    """Returns what became of a program that ended while the device stalled."""
    with tempfile.TemporaryFile() as errors, child(errors.fileno()) as (process, pipe):
        if process == 0:
            leave(kind, fault, disk, folder, lambda words: os.write(pipe, words.encode()))
            raise SystemExit(0)
        os.read(pipe, 100)
        stalled, over = 0, time.monotonic() + 1  # what is written at exit meets the stall then
        while not stalled and time.monotonic() < over and os.waitid(os.P_PID, process, WATCH) is None:
            stalled = disk.stalled()
            time.sleep(STALL if stalled else 0.01)
        disk.clear()
        status = _ended(process)
        errors.seek(0)
        words = errors.read().decode(errors="replace")
    outcome = Outcome("ended" if stalled else UNMET, words)
    if status != 0:
        outcome.wrong.append(f"ended with {status} at exit: {words[-2000:]}")
    elif kind.leave is not Capability.leave and not _is_left(kind, folder) and "nvme_ops" not in words:
        outcome.wrong.append(f"lost what it had begun, without a word: {words[-500:]}")
    shutil.rmtree(folder)
    return outcome


def _is_left(kind: type[Capability], folder: Path) -> bool:
    one = kind.__new__(kind)
    vars(one).update(folder=folder, path=folder / getattr(kind, "name", "file"))
    try:
        return one.left()
    except (OSError, ValueError):
        return False


def _ended(process: int) -> int | str:
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        pid, status = os.waitpid(process, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(process, signal.SIGKILL)
    return "nothing: it hangs"


def run(kinds: dict[str, type[Capability]], faults: list[str]) -> list[str]:
    """Runs the table, and prints it; returns what is wrong, a line for each."""
    wrong: list[str] = []

    def note(name: str, fault: str, outcome: Outcome) -> None:
        last = (outcome.words.strip().splitlines() or [""])[-1]
        print(f"{name:14} {fault:22} {outcome.how:18} {last}", flush=True)
        wrong.extend(f"wrong: {name}, {fault}: {each}" for each in outcome.wrong)

    leaving = [each for each in faults if each.endswith("exit")]
    others = [each for each in faults if each not in leaving]
    with FaultyDisk() as disk:
        for name, kind in kinds.items():
            folder, met = disk.folder / "cell", set(WHATS if kind.leave is not Capability.leave or not others else ())
            outcomes = in_process(disk, kind, others, folder)
            for fault, outcome in itertools.zip_longest([*others, "at the end"], outcomes):
                note(name, fault, outcome or Outcome("not run"))
                if outcome and outcome.how != UNMET:
                    met.add(fault.split()[0])
            for fault in leaving:
                note(name, fault, at_exit(disk, kind, fault, folder) if fault.split()[0] in met else Outcome())
    return wrong


def main() -> int:
    """Runs the table. Returns 1 if a cell is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.faulty_disk", description="a table of faults")
    parser.add_argument("--only", default="", help="names of capabilities, with commas")
    parser.add_argument("--fault", default="", help="faults that begin so")
    options = parser.parse_args()
    kinds = {name: kind for name, kind in ADAPTERS.items() if name != "Adaptive"}  # which tries more lanes as it learns
    if options.only:
        kinds = {name: ADAPTERS[name] for name in options.only.split(",")}
    kinds = {name: kind for name, kind in kinds.items() if name not in NEEDS or find_spec(NEEDS[name])}
    native()
    for each in pkgutil.walk_packages(nvme_ops.__path__, "nvme_ops."):  # once, and not in each cell
        if not each.name.endswith("__main__"):
            with contextlib.suppress(ImportError):
                importlib.import_module(each.name)
    gc.freeze()
    wrong = run(kinds, [each for each in FAULTS if each.startswith(options.fault)])
    print("\n".join(wrong), flush=True)
    return 1 if wrong else 0
