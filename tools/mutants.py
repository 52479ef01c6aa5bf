"""Measures what the tests of a room notice: a fixed sample of small changes of its code, and which test fails of each.

    python tools/mutants.py --list                              # the sample, which needs no run
    python tools/mutants.py --only memory --resume memory.jsonl
    python tools/mutants.py --resume all.jsonl --processes 2    # goes on where it was interrupted

The sample stays the same as the tests and other code change (``mutant_list``). Everything runs in copies of the
checkout. First all quick tests of the room run once, to learn which functions each of them reaches, in children too.
A mutant is then run with the tests that reach its function, the quickest ones first, up to the first that fails.
A mutant of csrc is run with the programs of tests/cpp.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mutant_list
import native_mutants
from mutant_list import ROOT, SAMPLE, Mutant

ROOMS = {
    "filesystem": ["tests/storage", "tests/checkpoint"],
    "io": ["tests/handle", "tests/stream", "tests/memory"],
    "memory": ["tests/memory", "tests/checkpoint/test_safetensors.py"],
    "storage": ["tests/storage"],
    "offload": ["tests/offload"],
    "checkpoint": ["tests/checkpoint", "tests/dcp"],
    "data": ["tests/data"],
    "formats": ["tests/checkpoint", "tests/faults/test_hostile.py", "tests/offload/test_stream_weights.py"],
    native_mutants.ROOM: ["tests/cpp"],
}
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "build", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis")
OUTCOMES = ("killed", "survived", "timeout", "unreached", "broken")

RESULT = re.compile(r"(tests/\S+?::.+?)(?: (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b.*)?$")

#: Found by every Python that the tests start; writes down which test calls which function of the room. An exception, of
#: a signal handler or of a limit that a test has set, ends the tracing of a thread, so it begins anew with each test.
REACH = """
import os, sys, threading
log, part = os.environ.get("MUTANTS_LOG"), os.environ.get("MUTANTS_PART", "")
seen, waiting = set(), []
def see(frame, event, _):
    code = frame.f_code
    if part in code.co_filename and (test := os.environ.get("PYTEST_CURRENT_TEST")) and (test, code) not in seen:
        seen.add((test, code))
        path = code.co_filename[code.co_filename.index(part) + 1:]
        waiting.append(f"{path}:{code.co_firstlineno}\\t{test.rpartition(' ')[0]}\\n")
        try:
            fd = os.open(log, os.O_WRONLY | os.O_APPEND)
            try:
                os.write(fd, "".join(waiting).encode())
                waiting.clear()
            finally:
                os.close(fd)
        except OSError:
            pass  # written with the next one
def pytest_runtest_setup():
    sys.settrace(see)
pytest_runtest_call = pytest_runtest_teardown = pytest_runtest_setup
if log:
    sys.settrace(see)
    threading.settrace(see)
"""


class Copy:
    """A copy of the checkout in which the tests run."""

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        self.root, self._folder, self._args = folder / "copy", folder, args
        shutil.copytree(ROOT, self.root, symlinks=True, ignore=LEFT_OUT)

    def run(self, arguments: Sequence[str], seconds: float | None, **environment: str) -> tuple[int | None, list[str]]:
        """Runs pytest; returns its status, None for one that took longer, and what it says."""
        options = "-v --tb=no -rN --disable-warnings -p no:cacheprovider -p no:randomly"  # ends with the last test
        words = [sys.executable, "-m", "pytest", *options.split(), f"--basetemp={self._folder / 'tmp'}"]
        return self.execute([*words, *arguments], seconds, **environment)

    def execute(
        self, command: Sequence[str], seconds: float | None, **environment: str
    ) -> tuple[int | None, list[str]]:
        """Runs a command in the copy; returns its status, None for one that took longer, and what it says."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "MUTANTS_"))}

        def limit() -> None:
            resource.setrlimit(resource.RLIMIT_DATA, (self._args.memory << 30, self._args.memory << 30))

        with tempfile.TemporaryFile(dir=self._folder) as output:
            process = subprocess.Popen(
                command,
                cwd=self.root,
                env={**kept, "PYTHONPATH": str(self.root), "COLUMNS": "400", **environment},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=limit,
            )
            try:
                status: int | None = process.wait(seconds)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # and what it has left
                process.wait()
            output.seek(0)
            return status, output.read().decode(errors="replace").splitlines()

    def reach(self, room: str) -> dict[str, Any]:
        """Runs all quick tests of a room; returns how long those that passed took, and who calls which function."""
        log = self._folder / "reach"
        log.touch()
        (self.root / "sitecustomize.py").write_text(REACH)
        part = f"/nvme_ops/{room}/"
        quick = ["-p", "sitecustomize", "-m", "not (slow or nightly or gpu)", "--durations=0", "-vv", *ROOMS[room]]
        _, said = self.run(quick, None, MUTANTS_LOG=str(log), MUTANTS_PART=part)
        (self.root / "sitecustomize.py").unlink()
        passed = {match[1]: 0.0 for line in said if (match := RESULT.match(line)) and match[2] == "PASSED"}
        for line in said:
            if (match := re.match(r"([\d.]+)s (?:call|setup) +(tests/.*)", line)) and match[2] in passed:
                passed[match[2]] += float(match[1])
        if not passed:
            raise RuntimeError("\n".join([f"{room}: no test passes", *said[-20:]]))
        reached = defaultdict(set)
        for line in log.read_text(errors="replace").splitlines():
            function, _, test = line.partition("\t")
            if test in passed:
                reached[function].add(test)
        log.unlink()
        return {"room": room, "tests": passed, "reached": {key: sorted(tests) for key, tests in reached.items()}}

    def judge(self, mutant: Mutant, tests: Sequence[str], usual: float) -> dict[str, Any]:
        """Runs the tests, which usually take so long, with the change; returns the outcome."""
        path = self.root / mutant.path
        source, before = path.read_bytes(), path.stat()
        status: int | None = 0
        said: list[str] = []
        try:
            self._write(path, mutant.applied(source))
            if tests:
                status, said = self.run(["-x", *tests], self._args.timeout + 2 * usual)
        finally:
            self._write(path, source)
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # what make goes by
        last = next(
            (match[1] for line in reversed(said) if (match := RESULT.match(line))), "as the tests are collected"
        )
        ended = "timeout" if status is None else {0: "survived", 3: "broken", 4: "broken"}.get(status, "killed")
        outcome = ended if tests else "unreached"  # broken: pytest could not run them, which says nothing
        done = {
            "mutant": mutant.name,
            "room": mutant.room,
            "line": mutant.line,
            "outcome": outcome,
            "tests": len(tests),
        }
        return {**done, "by": last} if outcome in ("killed", "timeout") else done

    def _write(self, path: Path, source: bytes) -> None:
        path.write_bytes(source)
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):  # which may look as if it were of this
            compiled.unlink()


class NativeCopy(Copy):
    """A copy in which the programs of tests/cpp run; those that a change does not concern are not compiled again."""

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        super().__init__(folder, args)
        self._cpp = self.root / ROOMS[native_mutants.ROOM][0]
        if self.make("usual", "build-plain", None) != 0:
            raise RuntimeError("make -C tests/cpp build-plain fails")

    def make(self, build: str, target: str, seconds: float | None) -> int | None:
        """Makes a target of the Makefile; returns the status."""
        words = ["make", "-j1", "-C", str(self._cpp), f"BUILD={build}", "CXXFLAGS=-O0 -g0 -w", target]
        return self.execute(words, seconds)[0]

    def reach(self, room: str) -> dict[str, Any]:
        """Runs all programs; returns how long those that passed took. Each counts as reaching everything."""
        taken = {}
        for path in sorted(self._cpp.glob("test_*.cpp")):
            start = time.monotonic()
            if self.make("usual", f"run-plain-{path.stem}", None) == 0:
                taken[f"{path.relative_to(self.root)}::all"] = time.monotonic() - start
        paths = (path.relative_to(self.root) for path in (self.root / "csrc").rglob("*.*"))
        return {"room": room, "tests": taken, "reached": {f"{path}:": sorted(taken) for path in paths}}

    def run(self, arguments: Sequence[str], seconds: float | None, **_: str) -> tuple[int | None, list[str]]:
        """Builds and runs programs up to the first that fails, as ``pytest -x`` would."""
        shutil.rmtree(self._cpp / "changed", ignore_errors=True)
        shutil.copytree(self._cpp / "usual", self._cpp / "changed")
        if self.make("changed", "changed/plain/core.o", None) != 0:
            return 3, []
        for test in arguments[1:]:
            target = Path(test.partition("::")[0]).stem
            if self.make("changed", f"changed/plain/{target}", None) != 0:
                return 3, []
            status = self.make("changed", f"run-plain-{target}", seconds)
            if status != 0:
                return status and 1, [test]
        return 0, []


def sample(room: str, count: int | None) -> list[Mutant]:
    """Returns the fixed sample of a room, or its first ones."""
    if room == native_mutants.ROOM:
        return native_mutants.sample(count or native_mutants.SAMPLE)
    return mutant_list.sample(room, count or SAMPLE)


def chosen(mutant: Mutant, known: dict[str, Any]) -> list[str]:
    """Returns the tests that reach the function of a mutant, or any of its file where it is in none; quickest first."""
    place = f"{mutant.path}:{mutant.function}" if mutant.function else f"{mutant.path}:"
    reaching = {test for function, tests in known["reached"].items() for test in tests if is_at(function, place)}
    seconds: dict[str, float] = known["tests"]
    own = f"test_{Path(mutant.path).stem}.cpp"  # is the most likely to fail; C++ that includes a header is built again
    return sorted(reaching, key=lambda test: (own not in test, seconds[test], test))


def is_at(function: str, place: str) -> bool:
    """Returns whether a function is the one that is named, or lies in the file that is."""
    return function.startswith(place) if place.endswith(":") else function == place


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Returns what an earlier run has written; of a line that it was killed at, nothing."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def measure(rooms: Sequence[str], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Runs what ``args.resume`` has no outcome of; returns the outcomes of all."""
    before = read_lines(args.resume)
    known = {line["room"]: line for line in before if "reached" in line}
    done = {line["mutant"]: line for line in before if "mutant" in line}
    lock = threading.Lock()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, open(args.resume, "a") as file:

        def note(line: dict[str, Any]) -> None:
            with lock:
                file.write(json.dumps(line) + "\n")
                file.flush()

        for room in rooms:
            made = NativeCopy if room == native_mutants.ROOM else Copy
            copies = [made(Path(folder, f"{room}-{number}"), args) for number in range(args.processes)]
            wanted = sample(room, args.first)
            if room not in known and any(mutant.name not in done for mutant in wanted):
                known[room] = copies[0].reach(room)
                note(known[room])

            def judge(mutant: Mutant, copies: list[Copy] = copies) -> None:
                with lock:
                    copy = copies.pop()
                try:
                    tests = chosen(mutant, known[mutant.room])
                    line = copy.judge(mutant, tests, sum(known[mutant.room]["tests"][test] for test in tests))
                finally:
                    with lock:
                        copies.append(copy)
                note(line)
                done[mutant.name] = line
                change = f"{mutant.before[:60]!r} -> {mutant.after[:60]!r}"
                print(f"{line['outcome']:9} {mutant.path}:{mutant.line} {change} {line.get('by', '')}", flush=True)

            with ThreadPoolExecutor(args.processes) as pool:
                list(pool.map(judge, [mutant for mutant in wanted if mutant.name not in done]))
    return [done[mutant.name] for room in rooms for mutant in sample(room, args.first)]


def main() -> None:
    """Prints the sample, or runs it and prints how many mutants of each room were killed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the sample and run nothing")
    parser.add_argument("--only", choices=ROOMS, action="append", metavar="ROOM", help=f"of {', '.join(ROOMS)}")
    parser.add_argument("--first", type=int, metavar="N", help="only so many mutants of each room")
    parser.add_argument(
        "--resume", type=Path, default=Path("mutants.jsonl"), metavar="FILE", help="outcomes, a line each"
    )
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="mutants that are run at once")
    parser.add_argument(
        "--timeout", type=float, default=300, metavar="SECONDS", help="of one mutant, beyond twice what its tests take"
    )
    parser.add_argument("--memory", type=int, default=16, metavar="GIB", help="that a process of the tests may take")
    args = parser.parse_args()
    rooms = args.only or list(ROOMS)
    if args.list:
        for mutant in (mutant for room in rooms for mutant in sample(room, args.first)):
            print(f"{mutant.path}:{mutant.line}  {mutant.operator}: {mutant.before!r} -> {mutant.after!r}")
        return
    counts = Counter((line["room"], line["outcome"]) for line in measure(rooms, args))
    print("".join(f"{word:>12}" for word in ("room", *OUTCOMES)))
    for room in rooms:
        print("".join(f"{word:>12}" for word in (room, *(counts[room, outcome] for outcome in OUTCOMES))))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted; the same command goes on")
