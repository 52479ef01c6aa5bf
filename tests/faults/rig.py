"""The table: what each capability keeps when its disk fails, tears, stalls or loses its power.

    python -m tests.faults.rig                                        # each capability under each fault
    python -m tests.faults.rig Save Load --fault stall
    python -m tests.faults.rig --power xfs --cuts 200 "File.sync"     # the power fails at random moments
    python -m tests.faults.rig --list

A fault is met right where an OSError names the operation and the file, or the result is the one of a disk that is well;
where what was completed before is still there; where the same is done again once the disk is well; and where no
descriptor, thread, memory or temporary file is left.

For a power failure two runs of a promise's program are recorded; during the second one the kernel writes dirty pages
back now and then. Each check is of what a failure has left, given what had been promised by then.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import importlib
import itertools
import json
import os
import pkgutil
import random
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
from typing import Any

import torch
from torch.distributed.checkpoint import CheckpointException

import nvme_ops
from nvme_ops.base.native import native
from tests.contract.adapters import Capability, WrongResultError
from tests.contract.suite import ADAPTERS, NEEDS, SLACK, cause_of, files, forget_pages, judge, settled
from tests.faults.disk import MAKE, Crashes, Disk, end_with_parent, missing, sync, writeback
from tests.faults.promises import PROMISES, Promise

FAULTY = "ext4 without a journal"
STALL, LATE = 0.2, 10.0  # seconds of a stall; after which Ctrl-C has not come through
LIMIT = 600  # seconds of a process
UNMET = "no such request"
WHATS = "read", "write", "flush"
FAULTS = [
    *(f"{what} error" for what in WHATS),
    "write torn",
    *(f"{what} stall, {then}" for then in ("Ctrl-C", "exit") for what in WHATS),
]
DATA = 300_000  # bytes from which on a read is no system call, which the kernel does not interrupt
#: All but what tries more lanes as it learns, and what needs what is not installed.
KINDS = {name: kind for name, kind in ADAPTERS.items() if name != "Adaptive" and find_spec(NEEDS.get(name, "torch"))}


class Child:
    """A forked process that does ``work``, and then ends at once, or with ``exits`` as programs do.

    Iterating over it yields what ``work`` tells (any JSON), until it has ended.
    """

    def __init__(self, work: Callable[[Callable[[Any], object]], object], exits: bool = False) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        told, telling = os.pipe()
        self._told = open(told)  # noqa: SIM115
        self._process = os.fork()
        if self._process:
            os.close(telling)
            self._rescue = threading.Timer(LIMIT, os.kill, (self._process, signal.SIGKILL))
            self._rescue.start()
            return
        try:
            end_with_parent()
            os.setpgid(0, 0)
            os.dup2(self._errors.fileno(), 2)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            torch.set_num_threads(1)
            work(lambda what: os.write(telling, json.dumps(what).encode() + b"\n"))
        except BaseException:
            if exits:
                raise
            traceback.print_exc()
            os._exit(1)
        if not exits:
            os._exit(0)
        sys.exit()

    def __iter__(self) -> Iterator[Any]:
        return map(json.loads, self._told)

    def has_ended(self, wait: bool = False) -> bool:
        return os.waitid(os.P_PID, self._process, os.WEXITED | os.WNOWAIT | (0 if wait else os.WNOHANG)) is not None

    def failure(self) -> str:
        """Waits until it has ended, and ends what it has started; returns how it failed, an empty string if not."""
        self.has_ended(wait=True)
        os.killpg(self._process, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(self._process, 0)[1])
        self._rescue.cancel()
        self._told.close()
        self._errors.seek(0)
        self.words = self._errors.read().decode(errors="replace")
        self._errors.close()
        return f"ended with {status}: {self.words[-1500:]}" if status else ""


# Faults


@dataclass
class Outcome:
    """What was seen in a cell. ``wrong`` is why it is not right."""

    how: str = UNMET
    words: str = ""
    wrong: list[str] = field(default_factory=list)


class Cells:
    """One capability under one fault after the other, in the process that does it."""

    def __init__(self, kind: type[Capability], disk: Disk) -> None:
        self.kind, self.disk, self.folder = kind, disk, disk.mounted / "cell"

    def run(self, faults: Sequence[str], tell: Callable[[dict[str, Any]], object]) -> None:
        """Does it, and tells each outcome, and one more at the end."""
        self.folder.mkdir()
        one = self.kind(self.folder)
        one.noticed = lambda: self.ended.set()  # what ends things now may wait for the device
        for step in (one.work, one.check, one.work):
            step()
        before = {**settled(), "files": files(self.folder) + self.kind.more_files}
        for fault in faults:
            self.outcome = Outcome()
            forget_pages(self.folder)
            if self._under(fault, one):
                for name, step in (("check", one.check), ("again", one.work), ("check again", one.check)):
                    forget_pages(self.folder)
                    try:
                        step()
                    except BaseException as error:
                        traceback.clear_frames(error.__traceback__)
                        self.outcome.wrong.append(f"{name}: {type(error).__name__}: {error}")
                after = {**settled(), "files": files(self.folder)}
                more = {name: count - before[name] for name, count in after.items()}
                self.outcome.wrong += [f"{name} left: {more[name]}" for name in more if more[name] > SLACK.get(name, 0)]
            tell(vars(self.outcome))
        one.close()
        tell(vars(Outcome("ended")))

    def _under(self, fault: str, one: Capability) -> bool:
        """Works under the fault. Returns whether a request has met it."""
        words, _, then = fault.partition(", ")
        what, do = words.split()
        least = DATA if then == "Ctrl-C" and what == "read" else 0
        self.disk.rule(what, do, 1 if do == "torn" else -1, least)
        self.released, self.late, self.ended = False, threading.Event(), threading.Event()
        helper = threading.Thread(target=self._end_stall, args=(then, what in one.waits))
        if do == "stall":
            helper.start()
        try:
            self._work(one, do)
        except KeyboardInterrupt:  # at the very end
            self.outcome.how = "interrupted"
        finally:
            self.ended.set()
            while helper.is_alive():
                with contextlib.suppress(KeyboardInterrupt):  # the same, a moment later
                    helper.join()
        if self.disk.clear() == 0 and self.outcome.how == "right" and not self.released:
            self.outcome.how = UNMET
            return False
        if (what, do, self.outcome.how) == ("flush", "error", "right"):
            self.outcome.wrong.append("nobody was told that it failed")
        if self.late.is_set():
            self.outcome.how += ", late"
            self.outcome.wrong += [] if what in one.waits else ["Ctrl-C waited for the device"]
        return True

    def _end_stall(self, then: str, may_wait: bool) -> None:
        """Ends a stall after a moment, or with Ctrl-C once that came through, or once it is late."""
        while not self.disk.stalled():
            if self.ended.wait(0.01):
                return
        self.released = True
        time.sleep(STALL)
        if then == "Ctrl-C" and not self.ended.is_set():
            os.kill(os.getpid(), signal.SIGINT)
            if not self.ended.wait(STALL if may_wait else LATE):
                self.late.set()
        self.disk.clear()

    def _work(self, one: Capability, do: str) -> None:
        outcome = self.outcome
        try:
            one.work()
            outcome.how = "right"
        except WrongResultError as error:
            outcome.how = "WRONG"
            outcome.wrong.append(f"silent: {error}")
        except (KeyboardInterrupt, CheckpointException, Exception) as error:
            if isinstance(cause_of(error), KeyboardInterrupt):
                outcome.how = "interrupted"
                return
            traceback.clear_frames(error.__traceback__)
            outcome.how, outcome.words = "raised", f"{type(error).__name__}: {error}"
            why = "a stall is no error" if do == "stall" else judge(error, self.disk.mounted)
            outcome.wrong += [f"{why}: {outcome.words}"] if why else []


def in_process(disk: Disk, kind: type[Capability], faults: Sequence[str]) -> list[Outcome]:
    """Returns what became of the cells of one capability, and of the whole."""
    child = Child(functools.partial(Cells(kind, disk).run, faults))
    outcomes = [Outcome(**fields) for fields in child]
    disk.clear()
    if failure := child.failure():
        outcomes.append(Outcome("DIED", "", [failure]))
    shutil.rmtree(disk.mounted / "cell")
    return outcomes


def leave(kind: type[Capability], fault: str, disk: Disk, tell: Callable[[str], object]) -> None:
    """Has it at work when the program ends, by ``sys.exit`` in a signal handler where it blocks."""
    (disk.mounted / "cell").mkdir()
    one = kind(disk.mounted / "cell")
    forget_pages(one.folder)
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


def at_exit(disk: Disk, kind: type[Capability], fault: str) -> Outcome:
    """Returns what became of a program that ended while the device stalled."""
    child = Child(functools.partial(leave, kind, fault, disk), exits=True)
    next(iter(child), None)
    stalled, over = 0, time.monotonic() + 1  # what is written at exit meets the stall then
    while not stalled and time.monotonic() < over and not child.has_ended():
        stalled = disk.stalled()
        time.sleep(STALL if stalled else 0.01)
    disk.clear()
    failure, folder, is_left = child.failure(), disk.mounted / "cell", False
    outcome = Outcome("ended" if stalled else UNMET, child.words, [f"at exit {failure}"] if failure else [])
    with contextlib.suppress(OSError, ValueError):
        is_left = kind.leave is Capability.leave or kind.found(folder, 0).left()
    if not failure and not is_left and "nvme_ops" not in child.words:
        outcome.wrong.append(f"lost what it had begun, without a word: {child.words[-500:]}")
    shutil.rmtree(folder)
    return outcome


def under_faults(names: Sequence[str], faults: Sequence[str], note: Callable[[str, str, Outcome], object]) -> None:
    leaving = [fault for fault in faults if fault.endswith("exit")]
    others = [fault for fault in faults if fault not in leaving]
    with contextlib.closing(Disk(FAULTY)) as disk:
        for name in names:
            kind = KINDS[name]
            met = set(WHATS if kind.leave is not Capability.leave or not others else ())
            for fault, outcome in itertools.zip_longest([*others, "at the end"], in_process(disk, kind, others)):
                note(name, fault, outcome or Outcome("not run"))
                if outcome and outcome.how != UNMET:
                    met.add(fault.split()[0])
            for fault in leaving:
                note(name, fault, at_exit(disk, kind, fault) if fault.split()[0] in met else Outcome())


# Power failures


def cut(promise: Promise, filesystem: str, cuts: int, seed: int) -> Outcome:
    """Records two runs of the program and cuts each at half of the moments. ``wrong`` has what was not kept."""
    wrong: list[str] = []
    for number in range(2):
        chance = random.Random(f"{seed} {number}")
        with contextlib.closing(Disk(filesystem, logged=True)) as disk:
            place = disk.mounted / "work"
            place.mkdir()
            sync(place)
            begin = disk.logged()
            with writeback(place, random.Random(chance.random())) if number else contextlib.nullcontext():
                child = Child(lambda tell: promise.program(place, lambda what: tell((disk.logged(), what))))  # noqa: B023
                told = [*child]
                failure = child.failure() or ("" if told else "it has promised nothing")
        if failure:
            raise RuntimeError(f"the program failed: {failure}")
        crashes = Crashes(disk)
        moments = [moment for moment, end in enumerate(crashes.ends) if end >= begin]
        for moment in sorted(chance.choices(moments, k=(cuts + number) // 2)):
            promised = [what for end, what in told if end <= crashes.ends[moment]]
            try:
                with crashes.at(moment, chance) as mounted:
                    failure = Child(lambda _: promise.check(mounted / "work", promised)).failure()  # noqa: B023
            except RuntimeError as error:
                failure = str(error)
            wrong += [f"run {number}, entry {moment}, told {promised[-1:]}: {failure}"] if failure else []
    return Outcome(f"{cuts} power failures, {len(wrong)} lost", "", wrong)


def main() -> int:
    """Prints the cells that are asked for. Returns 1 if one is wrong, 2 if that cannot be tried here."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.rig", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="of capabilities or promises; all but the controls")
    parser.add_argument("--fault", default="", help="faults that begin so")
    parser.add_argument("--power", choices=MAKE, help="a file system of which the power fails")
    parser.add_argument("--cuts", type=int, default=200)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "little"))
    parser.add_argument("--list", action="store_true", help="the names of capabilities, and those of promises")
    given = parser.parse_args()
    if given.list:
        print(*KINDS, "", *PROMISES, sep="\n")
        return 0
    if reason := missing(given.power or FAULTY):
        print(reason)
        return 2
    native()  # once, and not in each process
    torch.set_num_threads(1)
    for module in pkgutil.walk_packages(nvme_ops.__path__, "nvme_ops."):
        if not module.name.endswith("__main__"):
            with contextlib.suppress(ImportError):
                importlib.import_module(module.name)
    gc.freeze()
    wrong: list[str] = []

    def note(name: str, fault: str, outcome: Outcome, held: bool = True) -> None:
        last = (outcome.words.strip().splitlines() or [""])[-1]
        print(f"{name:14} {fault:22} {outcome.how:18} {last}", flush=True)
        wrong.extend(f"wrong: {name}, {fault}: {line}" for line in outcome.wrong if held)
        if not held and not outcome.wrong:
            wrong.append(f"wrong: {name}, {fault}: nothing is found")

    if given.power:
        for name in given.names or [name for name, promise in PROMISES.items() if promise.held]:
            outcome = cut(PROMISES[name], given.power, given.cuts, given.seed)
            note(name, f"{given.power}, seed {given.seed}", outcome, PROMISES[name].held)
    else:
        faults = [fault for fault in FAULTS if fault.startswith(given.fault)]
        under_faults(given.names or list(KINDS), faults, note)
    print("\n".join(wrong), flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
