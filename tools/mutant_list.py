"""The mutants of a room: small changes of its code by fixed operators, and a fixed sample of them.

A mutant is drawn by a hash of what it is, without its line: what is changed elsewhere leaves the sample as it is.
"""

from __future__ import annotations

import ast
import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
SAMPLE, SEED = 50, 32  # mutants of each room

SWAPPED: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
MAX_CONSTANT = 64  # larger ones are sizes and flags, of which one more is no change or a crash
TEXT = {"say", "show", "print", "printable", "warn", "debug", "info", "warning", "isinstance", "cast", "TypeVar"}


@dataclass(frozen=True)
class Mutant:
    """A change of a file: the bytes from ``start`` to ``end`` become ``after``."""

    room: str
    path: str  # in the checkout
    line: int
    scope: str  # of the function, or class, that it is in
    function: int  # the first line of that function, with decorators; 0 in a module or class
    operator: str
    start: int
    end: int
    before: str
    after: str
    number: int = 0  # among those in the scope that are alike

    @property
    def name(self) -> str:
        """What it is, wherever in the file it lies."""
        return f"{self.path} {self.scope} {self.operator}: {self.before} -> {self.after} #{self.number}"

    def applied(self, source: bytes) -> bytes:
        """Returns the file with the change."""
        return source[: self.start] + self.after.encode() + source[self.end :]


def mutants_of(room: str, path: str, source: bytes) -> list[Mutant]:
    """Returns all mutants of a file, in its order."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    mutants: list[Mutant] = []
    alike: Counter[str] = Counter()

    def add(node: Any, operator: str, after: str, scope: str, function: int) -> None:
        start, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        made = Mutant(room, path, node.lineno, scope, function, operator, start, end, ast.unparse(node), after)
        alike[made.name] += 1
        mutants.append(replace(made, number=alike[made.name]))

    def walk(node: ast.AST, scope: str, function: int) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            scope = f"{scope}.{node.name}".lstrip(".")
            if not isinstance(node, ast.ClassDef):
                function = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        for operator, part, after in changes(node):
            add(part, operator, after, scope, function)
        for child in children(node):
            walk(child, scope, function)

    walk(ast.parse(source), "", 0)
    return mutants


def children(node: ast.AST) -> Iterator[ast.AST]:
    """Yields the parts of a node that may be mutated: no annotations, no texts, nothing of errors."""
    if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom):
        return
    if isinstance(node, ast.Call) and called(node) in TEXT:
        return
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return
    for field, value in ast.iter_fields(node):
        if field not in ("annotation", "returns", "type_params"):
            yield from (item for item in (value if isinstance(value, list) else [value]) if isinstance(item, ast.AST))


def called(node: ast.Call) -> str:
    """Returns the last name of the function that is called."""
    return ast.unparse(node.func).rpartition(".")[2]


def changes(node: ast.AST) -> Iterator[tuple[str, ast.AST, str]]:
    """Yields the operators that apply to a node, each with the part of it that is replaced and what takes its place."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPPED:
        ops = [SWAPPED[type(node.ops[0])](), *node.ops[1:]]
        yield "compare", node, f"({ast.unparse(ast.Compare(node.left, ops, node.comparators))})"
    elif isinstance(node, ast.BinOp) and type(node.op) in SWAPPED and not (is_text(node.left) or is_text(node.right)):
        yield "arithmetic", node, f"({ast.unparse(ast.BinOp(node.left, SWAPPED[type(node.op)](), node.right))})"
    elif isinstance(node, ast.AugAssign) and type(node.op) in SWAPPED and not is_text(node.value):
        yield "arithmetic", node, ast.unparse(ast.AugAssign(node.target, SWAPPED[type(node.op)](), node.value))
    elif isinstance(node, ast.BoolOp):
        yield "logic", node, f"({ast.unparse(ast.BoolOp(SWAPPED[type(node.op)](), node.values))})"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "not", node, f"({ast.unparse(node.operand)})"
    elif isinstance(node, ast.Constant) and type(node.value) is int and 0 <= node.value <= MAX_CONSTANT:
        yield "constant", node, f"({node.value + 1})"
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and called(node.value) not in TEXT:
        yield "statement", node, "pass"
    elif isinstance(node, ast.Return) and node.value is not None and ast.unparse(node.value) != "None":
        yield "return", node, "return None"
    elif isinstance(node, ast.If | ast.IfExp | ast.While):
        always = ["False"] if isinstance(node, ast.While) else ["True", "False"]  # nothing ends a loop
        yield from (("condition", node.test, text) for text in always if "TYPE_CHECKING" not in ast.unparse(node.test))


def is_text(node: ast.expr) -> bool:
    """Returns whether it is a string, which cannot be subtracted."""
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))


def sample(room: str, count: int = SAMPLE) -> list[Mutant]:
    """Returns the fixed sample of a room, in the order of its files. A smaller one is a part of it."""
    files = sorted((ROOT / "nvme_ops" / room).rglob("*.py"))
    mutants = [mutant for path in files for mutant in mutants_of(room, str(path.relative_to(ROOT)), path.read_bytes())]
    return draw(mutants, count)


def draw(mutants: list[Mutant], count: int) -> list[Mutant]:
    """Returns so many of them, drawn by their names, in the order of their files."""
    mutants.sort(key=lambda mutant: hashlib.sha256(f"{SEED} {mutant.name}".encode()).digest())
    return sorted(mutants[:count], key=lambda mutant: (mutant.path, mutant.start, mutant.after))
