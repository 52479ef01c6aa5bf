"""Hostile files: each format read after thousands of changes, at random and by its structure, with little memory.

    python -m tests.faults.hostile FORMAT 100000

Reading may succeed, or raise FormatError or OSError with the file's name, within seconds and ``ROOM`` bytes of memory.
Anything else is printed, after the number of the change: a number gives the same change again, up to the random parts
of the format's own files.
"""

from __future__ import annotations

import copy
import ctypes
import dataclasses
import json
import os
import random
import resource
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nvme_ops.base.errors import FormatError
from tests.offload.elsewhere import apart

ROOM = 256 << 20  # bytes of address space beyond what a process has that has read the format once
PATIENCE = 30  # seconds for one file, also where others have the processors
MEMORY = "/dev/shm"  # where flushes take no time
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
    """Changes bytes or a number, removes, repeats or adds some, or cuts the rest off."""
    data = bytearray(content)
    for _ in range(draw.choice((1, 1, 1, 2, 4, 16))):
        place = draw.randrange(len(data) + 1)
        length, width = draw.choice((1, 2, 4, 8, 64, 512, 4096)), draw.choice((1, 2, 4, 8))
        number = draw.choice((*NUMBERS, len(data), len(data) - 1, len(data) + 1, place)) & (1 << 8 * width) - 1
        digits = [k for k, byte in enumerate(data) if 48 <= byte < 58][:2000] or [place]
        digit = draw.choice(digits)
        begin, end, new = draw.choice((
            (place, place + 1, draw.randbytes(1)),
            (place, place + 1, bytes(byte ^ 1 << draw.randrange(8) for byte in data[place : place + 1])),
            (place, place + width, number.to_bytes(width, draw.choice(("little", "little", "big")))),
            (place, place + length, b""),
            (place, place, data[place : place + length]),
            (place, len(data), b""),
            (place, place, draw.randbytes(length)),
            (place, place + length, draw.choice((b"\0", b"\xff")) * length),
            (digit, digit + 1, str(draw.choice((*VALUES[:19], 10**400))).encode()),
        ))  # fmt: skip
        data[begin:end] = new
    return bytes(data)


def edited(document: Any, draw: random.Random) -> Any:
    """Changes one value in a JSON document, or removes or adds one."""
    places: list[tuple[Any, Any]] = []
    waiting = [document]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict | list):
            items = list(node.items()) if isinstance(node, dict) else list(enumerate(node))
            places += [(node, key) for key, _ in items]
            waiting += [child for _, child in items]
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
    content = format.change(originals[name], draw) if draw.random() < 0.7 else None
    if content is None or draw.random() < 0.1:
        content = at_random(originals[name] if content is None else content, draw)
    return name, content


# Reading


def little_memory(more: int) -> None:
    """Lets this process have so many bytes of address space more."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + more, used + more))


def run(which: str, count: int, place: Path) -> list[str]:
    """Reads so many changed files, in children; returns what went wrong, a line each."""
    from tests.faults.hostile_formats import FORMATS

    warnings.simplefilter("ignore")
    chosen, kept = FORMATS[which], set[Path]()
    chosen.make(place)
    originals = {str(path.relative_to(place)): path.read_bytes() for path in place.glob(chosen.files)}

    def read(number: str) -> list[str]:
        if not kept:  # in a new child
            ctypes.CDLL(None).mallopt(_ARENA_MAX, 1)
            kept.update([place, *place.rglob("*")])
            chosen.read(place)
            little_memory(ROOM)
        for original, content in originals.items():
            (place / original).write_bytes(content)
        for path in set(place.rglob("*")) - kept:
            if not path.is_dir():
                path.unlink()
        name, content = mutated(chosen, originals, random.Random(f"{which}:{number}"))
        (place / name).write_bytes(content)
        try:
            chosen.read(place)
        except (FormatError, OSError) as error:
            if str(place) not in str(error) and getattr(error, "filename", None) is None:
                return [f"{number}: does not name the file: {error!r}"]
        return []

    return [
        line for lines in apart([str(number) for number in range(count)], read, PATIENCE).values() for line in lines
    ]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=MEMORY if os.path.isdir(MEMORY) else None) as folder:
        print(*(failures := run(sys.argv[1], int(sys.argv[2]), Path(folder))), sep="\n")
    sys.exit(bool(failures))
