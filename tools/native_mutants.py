"""The mutants of csrc without its binding, drawn as those of a room are (``mutant_list``).

The code is not parsed: clang-format puts spaces around binary operators only.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from mutant_list import MAX_CONSTANT, ROOT, Mutant, draw

ROOM, LAYERS, SAMPLE = "csrc", ("base", "backends", "engine"), 60
#: What may be a comment, a line of the preprocessor or a text, where nothing is changed.
APART = re.compile(
    r"""//[^\n]*|/\*.*?\*/|^ *\#(?:\\\n|[^\n])*|"(?:\\.|[^"\\\n])*"|(?<!\d)'(?:\\.|[^'\\\n])+'""",
    re.DOTALL | re.MULTILINE,
)
LEFT_OUT = re.compile(r"\b(?:throw|static_assert|case|template|using|operator)\b")
SWAPPED = {
    "==": "!=", "!=": "==", "<": "<=", "<=": "<", ">": ">=", ">=": ">", "+": "-", "-": "+", "*": "/", "/": "*",
    "%": "/", "<<": ">>", ">>": "<<", "&": "|", "|": "&", "&&": "||", "||": "&&", "+=": "-=", "-=": "+=",
}  # fmt: skip
BINARY = re.compile(rf"(?<= )(?:{'|'.join(map(re.escape, sorted(SWAPPED, key=len, reverse=True)))})(?=[ \n])")
CONSTANT = re.compile(r"(?<![\w.'])\d+(?=[uUlL]*(?![\w.']))")
STATEMENT = re.compile(r"^ +((?:[a-z]\w*(?:\(\))?(?:\[[^\]\n]*\])?(?:::|\.|->))*[a-z]\w*\([^;{}\n]*\));$", re.MULTILINE)
RETURN = re.compile(r"(\] (?:\([^()]*\) )?\{ )?\breturn ([^;{}]+);")  # first the head of a lambda, which says no type


def changes(text: str) -> Iterator[tuple[str, int, int, str]]:
    """Yields operators, each with the part of the text that is replaced and what takes its place."""
    for match in BINARY.finditer(text):
        yield "operator", *match.span(), SWAPPED[match[0]]
    for match in re.finditer(r"!(?=[\w(])", text):
        yield "not", *match.span(), ""
    for match in CONSTANT.finditer(text):
        if int(match[0]) <= MAX_CONSTANT:
            yield "constant", *match.span(), str(int(match[0]) + 1)
    for match in STATEMENT.finditer(text):
        yield "statement", *match.span(1), ""
    for match in RETURN.finditer(text):
        if match[1] is None and match[2] not in ("0", "nullptr"):
            yield "return", *match.span(2), "true" if match[2] == "false" else "{}"
    for match in re.finditer(r"\b(if|while) \(", text):
        start = end = match.end()
        depth = 1
        while depth:
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        if not re.search(r"\w = |;", text[start : end - 1]):  # of what is declared there, more would have to change
            yield from (
                ("condition", start, end - 1, value) for value in ("false", "true")[: 2 if match[1] == "if" else 1]
            )


def mutants_of(path: str, source: bytes) -> list[Mutant]:
    """Returns all mutants of a file; what tells one from another is the text of its line."""
    code = source.decode("latin-1")  # a character for each byte
    text = APART.sub(lambda match: re.sub(r"[^\n]", '"' if match[0][0] in "\"'" else " ", match[0]), code)
    made, alike = [], Counter[str]()
    for operator, start, end, after in changes(text):
        first, last = text.rfind("\n", 0, start) + 1, text.find("\n", start)
        if LEFT_OUT.search(text, first, last) or (operator == "operator" and '"' in text[first:last]):
            continue
        line, scope = text.count("\n", 0, start) + 1, code[first:last].strip()
        mutant = Mutant(ROOM, path, line, scope, 0, operator, start, end, code[start:end], after)
        alike[mutant.name] += 1
        made.append(replace(mutant, number=alike[mutant.name]))
    return made


def sample(count: int = SAMPLE) -> list[Mutant]:
    """Returns the fixed sample, in the order of its files. A smaller one is a part of it."""
    paths = sorted(path for layer in LAYERS for path in (ROOT / "csrc" / layer).iterdir())
    return draw([made for path in paths for made in mutants_of(str(path.relative_to(ROOT)), path.read_bytes())], count)
