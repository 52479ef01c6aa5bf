"""Scans a pickle before it is given to Python's reader, which trusts every number in it."""

from __future__ import annotations

import pickle
from collections.abc import Iterable

# What follows an opcode: this many bytes; the number of an object, of this many bytes; or a count of bytes, itself of
# this many bytes, and then those. Two lines follow GLOBAL.
_FOLLOWED = {
    pickle.BININT1[0]: 1, pickle.BINGET[0]: 1, pickle.BINPUT[0]: 1, pickle.PROTO[0]: 1, pickle.BININT2[0]: 2,
    pickle.BININT[0]: 4, pickle.LONG_BINGET[0]: 4, pickle.BINFLOAT[0]: 8,
}  # fmt: skip
_NUMBERED = {pickle.BINPUT[0]: 1, pickle.LONG_BINPUT[0]: 4}
_COUNTED = {pickle.LONG1[0]: 1, pickle.SHORT_BINSTRING[0]: 1, pickle.BINUNICODE[0]: 4}
_BYTE = 0xFF
_STOP, _LINES = pickle.STOP[0], pickle.GLOBAL[0]


def scan(content: bytes, codes: Iterable[bytes]) -> str:
    """Returns why a pickle is refused; empty if it has only these opcodes and takes no more memory than its size."""
    return walk(content, codes)[0]


def walk(content: bytes, codes: Iterable[bytes], place: int = 0) -> tuple[str, int]:
    """Does what ``scan`` does for a pickle that begins at ``place``; also returns where it ends."""
    allowed = {code[0] for code in codes}
    numbered, counted = dict(_NUMBERED), _COUNTED
    start, end, largest = place, len(content), 0
    if end - start > _BYTE:  # no number of one byte can be larger than that
        del numbered[pickle.BINPUT[0]]
    steps = {code: 1 + _FOLLOWED.get(code, 0) for code in allowed - {*numbered, *counted, _STOP, _LINES}}
    while place < end:
        code = content[place]
        step = steps.get(code)
        if step is not None:
            place += step
            continue
        if code not in allowed:
            return f"code {code} is not allowed", place
        place += 1
        if code in numbered:
            # Python's reader makes a table as long as the largest number. Optimized pickles skip numbers.
            largest = max(largest, int.from_bytes(content[place : place + numbered[code]], "little"))
            place += numbered[code]
        elif code in counted:
            place += counted[code]
            place += int.from_bytes(content[place - counted[code] : place], "little")
        elif code == _LINES:
            for _ in range(2):
                place = content.find(b"\n", place) + 1 or end
        else:
            return "it numbers more objects than it has" if largest >= end - start else "", place
    return "it ends too early", end
