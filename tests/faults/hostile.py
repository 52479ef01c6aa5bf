"""Hostile files: each format read after thousands of changes, at random and by its structure, with little memory.

    python -m tests.faults.hostile FORMAT --mutations 100000 --seed 1 [--findings FOLDER]

Reading may succeed, or raise FormatError or OSError with the file's name, within seconds and ``ROOM`` bytes of memory.
Anything else is a finding: it is printed, and the changed file is kept in FOLDER. A number gives the same change again,
up to the random parts of the format's own files.
"""

from __future__ import annotations

import argparse
import collections
import copy
import ctypes
import dataclasses
import faulthandler
import json
import os
import random
import resource
import shutil
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests import prepared

ROOM = 256 << 20  # bytes of address space beyond what a process has that has read the format once
PATIENCE = 30  # seconds for one file, also where others have the processors
MEMORY = "/dev/shm"  # where flushes take no time
_EACH = 20_000  # changes for which one process serves
_ARENA_MAX = -8  # of malloc: each arena takes address space

NUMBERS = (-(2**63), -1, 0, 1, 7, 255, 4096, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64)
DEEP = "nested deeply"  # stands for a value that ``text_of`` nests
VALUES: tuple[Any, ...] = (
    *NUMBERS, 10**30, 1.5, 1e308, float("inf"), float("nan"), None, True, False, "", "x", "\ud800", "\x1b[31m\x07",
    "../../x", "/dev/zero", "a" * 5000, "float32", "storage", [], {}, [[]], [0] * 300, {"a": {"b": []}}, DEEP,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Format:
    """How files of a format are made, changed and read."""

    make: Callable[[Path], Any]  # in an empty folder
    read: Callable[[Path], Any]
    files: str  # that are changed: a pattern
    change: Callable[[bytes, random.Random], bytes | None] = lambda _, __: None  # by structure; None: at random


# Changes


def at_random(content: bytes, draw: random.Random) -> bytes:
    data = bytearray(content)
    for _ in range(draw.choice((1, 1, 1, 2, 4, 16))):
        place = draw.randrange(len(data) + 1)
        length = draw.choice((1, 2, 4, 8, 64, 512, 4096))
        what = draw.randrange(9)
        if what == 0:
            data[place : place + 1] = bytes([draw.randrange(256)])
        elif what == 1 and place < len(data):
            data[place] ^= 1 << draw.randrange(8)
        elif what == 2:
            width = draw.choice((1, 2, 4, 8))
            number = draw.choice((*NUMBERS, len(data), len(data) - 1, len(data) + 1, place)) & (1 << 8 * width) - 1
            data[place : place + width] = number.to_bytes(width, draw.choice(("little", "little", "big")))
        elif what == 3:
            del data[place : place + length]
        elif what == 4:
            data[place:place] = data[place : place + length]
        elif what == 5:
            del data[place:]
        elif what == 6:
            data[place:place] = draw.randbytes(length)
        elif what == 7:
            data[place : place + length] = bytes(length) if draw.random() < 0.5 else b"\xff" * length
        else:
            digits = [k for k in range(len(data)) if 48 <= data[k] < 58][:2000]
            if digits:
                place = draw.choice(digits)
                data[place : place + 1] = str(draw.choice((*VALUES[:19], 10**400))).encode()
    return bytes(data)


def edited(document: Any, draw: random.Random) -> Any:
    """Changes one value in a JSON document, or removes or adds one."""
    places: list[tuple[Any, Any]] = []
    waiting = [document]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict | list):
            found = list(node.items()) if isinstance(node, dict) else list(enumerate(node))
            places += [(node, key) for key, _ in found]
            waiting += [child for _, child in found]
    if not places or draw.random() < 0.02:
        return copy.deepcopy(draw.choice(VALUES))
    node, key = draw.choice(places)
    what = draw.randrange(6)
    if what == 0:
        del node[key]
    elif what == 1 and isinstance(node, dict):
        node[draw.choice(("x", "", "__metadata__", str(draw.choice(VALUES))))] = node.pop(key)
    elif what == 2 and isinstance(node, list):
        node.insert(key, node[key])
    elif what == 3:
        other, place = draw.choice(places)
        node[key] = json.loads(json.dumps(other.get(place) if isinstance(other, dict) else [*other, 0][place]))
    elif what == 4 and type(node[key]) is int:
        node[key] += draw.choice((-1, 1, 8, -8, 4096))
    else:
        node[key] = copy.deepcopy(draw.choice(VALUES))
    return document


def text_of(document: Any, draw: random.Random) -> bytes:
    """Returns the JSON, with what stands for a deep value."""
    depth = draw.choice((100, 2000, 100_000))
    return json.dumps(document).replace(f'"{DEEP}"', "[" * depth + "]" * depth).encode()


def changed_json(content: bytes, draw: random.Random) -> bytes:
    document = json.loads(content)
    for _ in range(draw.choice((1, 1, 2, 4))):
        document = edited(document, draw)
    return text_of(document, draw)


def mutated(format: Format, originals: dict[str, bytes], draw: random.Random) -> tuple[str, bytes]:
    name = draw.choice(sorted(originals))
    content = None
    if draw.random() < 0.7:
        content = format.change(originals[name], draw)
    if content is None or draw.random() < 0.1:
        content = at_random(originals[name] if content is None else content, draw)
    return name, content


# Reading


def serve(which: str, seed: int, start: int, stop: int, folder: Path) -> None:
    """Reads the changed files from ``start`` to ``stop``; prints a line for each finding and one at the end."""
    from nvme_ops.base.errors import FormatError
    from tests.faults.hostile_formats import FORMATS

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    ctypes.CDLL(None).mallopt(_ARENA_MAX, 1)
    chosen, place = FORMATS[which], folder / "files"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    chosen.make(place)
    originals = {str(path.relative_to(place)): path.read_bytes() for path in place.glob(chosen.files)}
    kept = set(place.rglob("*"))
    chosen.read(place)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, used + ROOM))
    said: collections.Counter[str] = collections.Counter()

    def tell(number: int, error: BaseException, what: str = "") -> None:
        """Keeps the file, and says the kind of an error and where it came from."""
        frames = traceback.extract_tb(error.__traceback__)
        ours = [frame for frame in frames if "/nvme_ops/" in frame.filename] or frames[-1:]
        places = [f"{frame.filename.rpartition('/nvme_ops/')[2]}:{frame.lineno}" for frame in reversed(ours[-3:])]
        found = {"what": f"{what}{type(error).__name__}", "where": " < ".join(places), "words": str(error)[:300]}
        (folder / "found" / f"{number}-{Path(name).name}").write_bytes(content)
        print(json.dumps({"number": number, **found}), flush=True)

    for number in range(start, stop):
        (folder / "at").write_text(str(number))
        faulthandler.dump_traceback_later(PATIENCE, exit=True)
        for original, bytes_before in originals.items():
            (place / original).write_bytes(bytes_before)
        for path in set(place.rglob("*")) - kept:
            if not path.is_dir():
                path.unlink()
        name, content = mutated(chosen, originals, random.Random(f"{which}:{seed}:{number}"))
        (place / name).write_bytes(content)
        try:
            chosen.read(place)
            said["read"] += 1
        except (FormatError, OSError) as error:
            named = str(place) in str(error) or getattr(error, "filename", None) is not None
            said[type(error).__name__] += 1
            if not named:
                tell(number, error, "does not name the file: ")
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            tell(number, error)
    print(json.dumps({"said": said}), flush=True)


# Running


@dataclasses.dataclass
class Result:
    said: collections.Counter[str]
    findings: list[dict[str, Any]]


def run(which: str, seed: int, mutations: int, keep: Path | None = None, start: int = 0) -> Result:
    """Reads so many changed files, in processes of their own."""
    result, stop = Result(collections.Counter(), []), start + mutations
    with tempfile.TemporaryDirectory(prefix="nvme_ops-hostile-", dir=MEMORY if os.path.isdir(MEMORY) else None) as made:
        folder = Path(made)
        (folder / "found").mkdir()
        while start < stop:
            end = min(stop, start + _EACH)
            last = _part(which, seed, start, end, folder, result)
            start = end if last is None else last + 1
        if keep is not None:
            shutil.copytree(folder / "found", keep / f"{which}-{seed}", dirs_exist_ok=True)
    return result


def _part(which: str, seed: int, start: int, stop: int, folder: Path, result: Result) -> int | None:
    """Returns the number of the change that ended the process; None if none did."""
    (folder / "at").unlink(missing_ok=True)
    words = ["-m", "tests.faults.hostile", which, "--seed", str(seed), "--serve", str(start), str(stop), str(folder)]
    done = prepared.run(*words, timeout=PATIENCE * (stop - start))
    for line in done.stdout.splitlines():
        found = json.loads(line)
        if "said" in found:
            result.said.update(found["said"])
            return None
        result.findings.append(found)
    if not (folder / "at").exists():
        raise RuntimeError(f"{which}: ends the process: {done.returncode}\n{done.stderr}")
    at = int((folder / "at").read_text())
    shutil.copytree(folder / "files", folder / "found" / f"{at}", symlinks=True)
    what = "hangs" if "Timeout" in done.stderr else f"ends the process: {done.returncode}"
    result.findings.append({"number": at, "what": what, "where": "", "words": done.stderr[-2000:]})
    return at


def main() -> int:
    from tests.faults.hostile_formats import FORMATS

    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("format", choices=[*FORMATS, "all"])
    made.add_argument("--mutations", type=int, default=1000)
    made.add_argument("--seed", type=int, default=1)
    made.add_argument("--start", type=int, default=0)
    made.add_argument("--findings", type=Path)
    made.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    given = made.parse_args()
    if given.serve:
        start, stop, folder = given.serve
        serve(given.format, given.seed, int(start), int(stop), Path(folder))
        return 0
    wrong = 0
    for which in FORMATS if given.format == "all" else [given.format]:
        result = run(which, given.seed, given.mutations, given.findings, given.start)
        print(f"{which}: {given.mutations} changes, {len(result.findings)} findings; {dict(result.said)}", flush=True)
        for each in result.findings:
            print(f"  number {each['number']}: {each['what']} at {each['where']}: {each['words']}", flush=True)
        wrong += len(result.findings)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
