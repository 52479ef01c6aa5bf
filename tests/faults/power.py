"""Cuts the power of a disk at random moments of a program, and asks after each for what had been promised.

    python -m tests.faults.power safetensors --filesystem ext4 --cuts 200
    python -m tests.faults.power --list

A promise (``Promise``) is a small program that prints a line whenever something is promised, and a check of what a
power failure has left, given the lines printed before it. Each module ``promises*.py`` beside this one has a table of
them, ``PROMISES``. Two runs of the program are recorded; during the second one the kernel writes dirty pages back now
and then. Needs root, ``/dev/fuse``, loop devices and the file system's mkfs.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import pkgutil
import random
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from nvme_ops._native import native
from tests.faults.fuse import end_with_parent, run
from tests.faults.power_disk import MAKE, Crashes, LoggedDisk, Writeback, private_folder, sync, why_not

Tell = Callable[[str], None]  # prints a line
_PATIENCE = 120  # seconds for a program, or a check
SCRATCH = "NVME_OPS_POWER_SCRATCH"  # names a folder for what a program needs beside the disk


@dataclass(frozen=True)
class Promise:
    """A program that makes promises, and what looks whether they were held.

    Args:
        program: called with an empty folder on the disk and what prints a line, in a process that then ends at once.
        check: called with the same folder after a power failure, and the lines. Returns ``fine``, or ``lost`` or
            ``mixed`` and what was found. Whatever it raises counts as ``mixed``.
        held: False for a control: the rig has to find that it is not held.
    """

    program: Callable[[str, Tell], None]
    check: Callable[[str, list[str]], str]
    held: bool = True


@dataclass
class Found:
    cuts: int = 0
    words: list[str] = field(default_factory=list)
    lost: int = 0
    mixed: int = 0


def promises() -> dict[str, Promise]:
    found: dict[str, Promise] = {}
    for module in sorted(each.name for each in pkgutil.iter_modules([str(Path(__file__).parent)])):
        if module.startswith("promises"):
            found |= getattr(importlib.import_module(f"tests.faults.{module}"), "PROMISES", {})
    return found


def cut(promise: Promise, filesystem: str, cuts: int, seed: int, folder: str, runs: int = 2) -> Found:
    """Records ``runs`` runs of the program and cuts each at its share of the moments."""
    found = Found()
    for number in range(runs):
        chance = random.Random(f"{seed} {number}")
        disk = LoggedDisk(folder, filesystem)
        try:
            begin, told = _record(promise, disk, chance.getrandbits(32) if number % 2 else None)
        finally:
            disk.close()
        crashes = Crashes(disk, folder)
        share = cuts * (number + 1) // runs - cuts * number // runs
        try:
            for moment in sorted(chance.choices(range(begin, len(disk.log) + 1), k=share)):
                lines = [line for entry, line in told if entry <= moment]
                words = _look(promise, crashes, moment, lines, chance)
                found.cuts += 1
                found.lost += words.startswith("lost")
                found.mixed += words.startswith("mixed")
                if words != "fine":
                    found.words.append(f"run {number}, entry {moment}, told {lines[-1:]}: {words}")
        finally:
            crashes.close()
            disk.log.close()
    return found


def _record(promise: Promise, disk: LoggedDisk, writeback: int | None) -> tuple[int, list[tuple[int, str]]]:
    """Runs the program; returns the entry at which it began, and (entry, line) of each promise."""
    place = os.path.join(disk.mounted, "work")
    os.mkdir(place)
    sync(place)
    begin, told = len(disk.log), []
    (mine, its), (its_answers, my_answers) = os.pipe(), os.pipe()

    def tell(line: str) -> None:
        os.write(its, line.encode() + b"\n")
        os.read(its_answers, 1)  # by when its moment was noted

    def work() -> str:
        promise.program(place, tell)
        return ""

    writing = None if writeback is None else Writeback(place, writeback)
    try:
        with _child(work) as read:
            os.close(its)
            for line in _lines(mine):
                told.append((len(disk.log), line))
                os.write(my_answers, b".")
            if words := read():
                raise RuntimeError(f"the program failed: {words}")
    finally:
        if writing is not None:
            writing.close()
        for each in (mine, its_answers, my_answers):
            os.close(each)
    if not told:
        raise RuntimeError("the program has promised nothing")
    return begin, told


def _look(promise: Promise, crashes: Crashes, moment: int, lines: list[str], chance: random.Random) -> str:
    """Returns what the check says after a power failure."""
    try:
        with (
            crashes.at(moment, chance) as mounted,
            _child(lambda: promise.check(os.path.join(mounted, "work"), lines)) as read,
        ):
            return read()
    except RuntimeError as error:
        return f"mixed: {error}"


@contextlib.contextmanager
def _child(work: Callable[[], str]) -> Iterator[Callable[[], str]]:
    """Runs ``work`` in a forked process that ends at once after it; yields what reads its words."""
    mine, its = os.pipe()
    process = os.fork()
    if not process:
        words = "mixed: the process ended"
        try:
            os.setpgid(0, 0)
            end_with_parent()
            os.close(mine)
            words = work()
        except BaseException:
            words = "mixed: " + " | ".join(traceback.format_exc().strip().splitlines()[-5:])
        finally:
            with contextlib.suppress(BaseException), open(its, "w") as file:
                json.dump(words, file)
            os._exit(0)
    os.close(its)

    def read() -> str:
        text = "".join(_lines(mine))
        return str(json.loads(text)) if text else "mixed: the process was killed"

    try:
        yield read
    finally:
        os.close(mine)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)  # also what it has started
        os.waitpid(process, 0)


def _lines(pipe: int) -> Iterator[str]:
    """Yields lines until the other end is closed."""
    deadline, text = time.monotonic() + _PATIENCE, b""
    while True:
        if not select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise RuntimeError(f"nothing came for {_PATIENCE} s")
        part = os.read(pipe, 1 << 16)
        text += part
        *lines, text = text.split(b"\n")
        yield from (line.decode() for line in lines)
        if not part:
            if text:
                yield text.decode()
            return


def main() -> None:
    """Cuts the promises that are named. Exits with 1 if one was not held, with 2 if that cannot be tried here."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("promises", nargs="*", metavar="PROMISE", help="all but the controls if none is given")
    parser.add_argument("--filesystem", choices=MAKE, default="ext4")
    parser.add_argument("--cuts", type=int, default=200)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "little"))
    parser.add_argument("--list", action="store_true", help="the names of the promises")
    given = parser.parse_args()
    known = promises()
    if given.list:
        print("\n".join(known))
        return
    if missing := why_not(given.filesystem):
        print(missing)
        sys.exit(2)
    place, wrong = tempfile.mkdtemp(prefix="nvme_ops-power-"), 0
    try:
        folder = private_folder(place)
        os.environ[SCRATCH] = os.path.join(folder, "scratch")
        native()  # once, not in every process
        torch.set_num_threads(1)
        for name in given.promises or [name for name, promise in known.items() if promise.held]:
            found = cut(known[name], given.filesystem, given.cuts, given.seed, folder)
            line = f"{found.cuts} power failures, {found.lost} lost, {found.mixed} mixed"
            print(f"{name}, {given.filesystem}, seed {given.seed}: {line}", *found.words[:5], sep="\n    ", flush=True)
            wrong += bool(found.words) == known[name].held
    finally:
        with contextlib.suppress(RuntimeError):
            run("umount", "--lazy", place)
        os.rmdir(place)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
