"""Rewrites a pickle of protocol 3 to 5 in protocol 2, the only one that torch's own reader reads with weights_only."""

from __future__ import annotations

import pickle
import pickletools
from itertools import pairwise

from nvme_ops.base.errors import UnsafeError

_TEXT = {"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"}
_BYTES = {"SHORT_BINBYTES", "BINBYTES", "BINBYTES8"}
_PUT, _GET = {"BINPUT", "LONG_BINPUT"}, {"BINGET", "LONG_BINGET"}
_LONG = 128  # characters; longer texts, which name no class, are referred to
_MOST = 32  # bytes that a byte may become: references to texts are shorter than these
_UNKNOWN = {"ADDITEMS", "FROZENSET", "NEWOBJ_EX", "BYTEARRAY8", "NEXT_BUFFER", "READONLY_BUFFER"}


def in_protocol_2(content: bytes, path: str) -> bytes:
    """Returns a pickle that makes the same objects, or the same bytes if its protocol is 2 or lower.

    Texts are repeated where the original refers to them, so that those that name a class can be joined with it.

    Raises UnsafeError for what protocol 2 cannot express; a damaged pickle is returned as it is.
    """
    if content[:1] != pickle.PROTO or content[1:2] <= b"\2":
        return content
    try:
        steps = [(code.name, argument, place) for code, argument, place in pickletools.genops(content)]
    except Exception:  # of many types; its reader finds the same
        return content
    made: list[tuple[bytes, str | None]] = []  # opcodes; the text that they put on the stack, if any
    memo: dict[int, str | None] = {}  # texts in it
    left = _MOST * (len(content) + _LONG)
    for (name, argument, place), (_, _, after) in pairwise([*steps, ("", None, len(content))]):
        if name in _UNKNOWN:
            protocol = content[1]
            raise UnsafeError(
                f"{path}: data.pkl: {name} of pickle protocol {protocol}, which torch's weights_only reader does not "
                "know: save it without pickle_protocol="
            )
        if name == "PROTO":
            made.append((pickle.PROTO + b"\2", None))
        elif name == "FRAME":
            continue
        elif name in _TEXT:
            made.append((_text(str(argument)), str(argument)))
        elif name in _BYTES:
            latin = bytes(argument or b"").decode("latin1")
            call = pickle.GLOBAL + b"_codecs\nencode\n", _text(latin), _text("latin1"), pickle.TUPLE2, pickle.REDUCE
            made.append((b"".join(call), None))
        elif name == "MEMOIZE" or name in _PUT:
            number = len(memo) if argument is None else int(argument)
            text = made[-1][1] if made else None
            memo[number] = text if text is not None and len(text) <= _LONG else None
            if memo[number] is None:
                made.append((pickle.LONG_BINPUT + number.to_bytes(4, "little"), None))
        elif name in _GET and (text := memo.get(int(argument or 0))) is not None:
            made.append((_text(text), text))
            if (left := left - len(text)) < 0:
                return content
        elif name == "STACK_GLOBAL":
            pair = [text for _, text in made[-2:]]
            if len(pair) < 2 or None in pair or any("\n" in str(value) for value in pair):
                return content  # not as Python writes it
            made[-2:] = [(pickle.GLOBAL + "{}\n{}\n".format(*pair).encode(), None)]
        else:
            made.append((content[place:after], None))
    return b"".join(code for code, _ in made)


def _text(text: str) -> bytes:
    encoded = text.encode("utf-8", "surrogatepass")
    return pickle.BINUNICODE + len(encoded).to_bytes(4, "little") + encoded
